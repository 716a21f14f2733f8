"""DeepSpeed's other tools: what the profiler and the monitor write, the autotuner's configs, mistakes in sections."""

import base64
import csv
import importlib.util
import json
import re
import sys

import pytest
import torch
from conftest import ROOT
from training import COMMON, SCRIPTS, SETTINGS, read, train

import ds_config
import ds_sections
import harness
import train_deepspeed

SHORT = ("--model", "nano", "--steps", "5", "--batch-size", "8", "--log-every", "1", "--warmup-steps", "4")


def launch(run, config, text_file, *flags, timeout=240, **options):
    """A run of one process with a config of ds_configs/."""
    command = [sys.executable, "train_deepspeed.py", "--deepspeed_config", f"ds_configs/{config}.json", *SHORT]
    done = run([*command, "--micro-batch-size", "4", "--data", text_file, *flags], timeout, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return read(done.stdout)


# ---- profiler and monitor -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def profiled(run, text_file):
    return launch(run, "zero1_flops_profiler", text_file)


def test_the_profile_is_in_the_log(profiled):
    """Once per micro-batch of step 2; MACs of GPTlite's matrices and attention, counted by hand."""
    assert profiled.text.count("DeepSpeed Flops Profiler ----") == 2
    tokens, width, layers, context, vocabulary = 4 * 64, 128, 4, 64, 65
    macs = tokens * (layers * (12 * width**2 + 2 * context * width) + width * vocabulary)
    found = re.findall(r"fwd MACs per GPU: +([\d.]+) MMACs", profiled.text)
    assert [float(value) for value in found] == pytest.approx([macs / 1e6] * 2, rel=0.002)
    assert "params per GPU:                                                         816.64 K" in profiled.text
    assert re.search(r"\(attention\): CausalSelfAttention\(\s+65\.66 K = 8\.04% Params", profiled.text)  # each module's


@pytest.fixture(scope="module")
def monitored(run, text_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("monitor") / "new"
    return launch(run, "zero1_monitor", text_file, "--monitor-path", folder), folder


def test_the_monitor_writes_where_it_says_and_nowhere_else(monitored):
    log, folder = monitored
    assert f"config: the monitor writes to {folder}/zero1_monitor\n" in log.text
    assert [path.name for path in folder.iterdir()] == ["zero1_monitor"]
    with open(folder / "zero1_monitor" / "Train_Samples_lr.csv", newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["step", "lr"]
    assert [int(samples) for samples, _ in rows[1:]] == [8, 16, 24, 32, 40]  # its x axis is samples
    assert float(rows[-1][1]) == pytest.approx(1e-3)
    names = {path.name for path in folder.glob("*/*.csv")}
    assert {f"Train_Samples_elapsed_time_ms_{part}.csv" for part in ("forward", "backward", "step")} <= names


def test_profiler_and_monitor_change_no_number(profiled, monitored):
    assert profiled.losses == monitored[0].losses
    assert profiled.result == monitored[0].result


@pytest.mark.full
@pytest.mark.parametrize("config", ["zero1_flops_profiler", "zero1_monitor", "autotuning"])
def test_parity_with_zero1(run, torchrun, text_file, tmp_path, monkeypatch, config):
    monkeypatch.setitem(SCRIPTS, config, ("train_deepspeed.py", "--deepspeed_config", f"ds_configs/{config}.json"))
    flags = [*COMMON, *SETTINGS["sgd"], "--micro-batch-size", "4", "--data", text_file]
    own = ["--monitor-path", tmp_path] if config == "zero1_monitor" else []
    log = train(run, torchrun, config, *flags, *own)
    assert log.losses == train(run, torchrun, "zero1", *flags).losses
    assert log.run["strategy"] == config


def test_each_run_has_a_folder_of_its_own(tmp_path):
    def config(**changes):
        return {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"} | changes}

    for expected in ("job", "job-2", "job-3"):
        first = config()
        assert ds_sections.use_monitor_folder(first, None) == [f"config: the monitor writes to {tmp_path}/{expected}"]
        assert first["csv_monitor"]["job_name"] == expected
        (tmp_path / expected).mkdir()
    assert ds_sections.use_monitor_folder(config(enabled=False), None) == []
    other = config()
    ds_sections.use_monitor_folder(other, str(tmp_path / "other"))
    assert other["csv_monitor"] == {"enabled": True, "output_path": str(tmp_path / "other"), "job_name": "job"}


def test_what_the_configs_write_is_ignored_by_git():
    ignored = (ROOT / ".gitignore").read_text().split()
    assert (
        json.loads((ROOT / "ds_configs/zero1_monitor.json").read_text())["csv_monitor"]["output_path"] + "/" in ignored
    )
    tuner = json.loads((ROOT / "ds_configs/autotuning.json").read_text())["autotuning"]
    assert all(tuner[key].startswith("results/autotuning/") for key in ("results_dir", "exps_dir"))
    assert "results/autotuning/" in ignored


def test_monitor_folders_that_cannot_be(mistake, tmp_path):
    config = ["--deepspeed_config", ROOT / "ds_configs/zero1_monitor.json"]
    (tmp_path / "file").write_text("")
    line = mistake(train_deepspeed.main, *config, "--monitor-path", tmp_path / "file" / "below")
    assert "--monitor-path" in line
    other = ["--deepspeed_config", ROOT / "ds_configs/zero1.json"]
    assert "csv_monitor" in mistake(train_deepspeed.main, *other, "--monitor-path", tmp_path)


# ---- autotuning ---------------------------------------------------------------------------------


def encoded(**changes):
    config = json.loads((ROOT / "ds_configs/autotuning.json").read_text()) | changes
    return base64.urlsafe_b64encode(json.dumps(config).encode()).decode()


def test_a_config_in_base64_is_read_as_the_autotuner_passes_it(mistake):
    config = ds_config.read(encoded(train_micro_batch_size_per_gpu=2, zero_optimization={"stage": 1}))
    assert (config["train_micro_batch_size_per_gpu"], config["zero_optimization"]) == (2, {"stage": 1})
    line = mistake(train_deepspeed.main, "--deepspeed_config", encoded(train_batch_size="auto"))
    assert ds_sections.AUTOTUNER in line
    assert len(line) < 200
    for name in ("none.json", "ds_configs/zero1.json", "x" * 5000):
        assert ds_sections.from_autotuner(name) is None


def test_a_run_that_nobody_tunes_trains_to_its_end():
    config = json.loads((ROOT / "ds_configs/autotuning.json").read_text())
    assert "deepspeed --autotuning tune" in ds_sections.switch_off_autotuning(config, "autotuning.json")[0]
    assert config["autotuning"]["enabled"] is False
    config["autotuning"]["enabled"] = True
    assert ds_sections.switch_off_autotuning(config, ds_sections.AUTOTUNER) == []
    assert config["autotuning"]["enabled"] is True


@pytest.mark.full
def test_the_experiments_of_the_autotuner_run(run, torchrun, text_file, tmp_path):
    """The two kinds that DeepSpeed 0.19.8 starts: one that sizes the model up, and one per batch size."""
    command = ["train_deepspeed.py", "--deepspeed", "--model", "nano", "--data", text_file, "--deepspeed_config"]
    profile = {"enabled": True, "model_info_path": str(tmp_path / "model.json"), "model_info": {"profile": True}}
    config = encoded(autotuning=profile, zero_optimization={"stage": 3}, memory_breakdown=False)
    done = run(torchrun(2, *command, config), 240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "model.json").read_text())["num_params"] == 816640

    measure = {"enabled": True, "fast": True, "metric_path": str(tmp_path / "metrics.json")}
    batch = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    done = run(torchrun(2, *command, encoded(autotuning=measure, zero_optimization={"stage": 1}, **batch)), 240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "metrics.json").read_text())["throughput"] > 0
    assert "strategy=autotuner" in done.stdout
    assert "batch=16, micro_batch=4" in done.stdout


# ---- mistakes in sections -----------------------------------------------------------------------

ZERO1 = json.loads((ROOT / "ds_configs/zero1.json").read_text())
WRONG = {
    "near miss": ({"flops_profiler": {"profile_steps": 2}}, ['did you mean "profile_step"']),
    "near miss of the monitor": ({"csv_monitor": {"output_dir": "x"}}, ['"csv_monitor.output_dir"', "output_path"]),
    "unknown in autotuning": ({"autotuning": {"speed": 1}}, ['"autotuning.speed"', "max_train_batch_size"]),
    "near miss of a section": ({"csv_monitors": {}}, ['did you mean "csv_monitor"']),
    "section is a list": ({"flops_profiler": []}, ["flops_profiler", "object"]),
    "enabled is text": ({"csv_monitor": {"enabled": "yes"}}, ["csv_monitor.enabled", "true or false"]),
    "profile at step 0": ({"flops_profiler": {"profile_step": 0}}, ["profile_step", "at least 1"]),
    "sparse attention": ({"sparse_attention": {"mode": "fixed"}}, ["has removed", "sparse_attention"]),
    "compression": ({"compression_training": {}}, ["has removed", "compression_training"]),
    "1-bit Adam": ({"optimizer": {"type": "OneBitAdam", "params": {}}}, ["has removed", "OneBitAdam", "AdamW"]),
    "0/1 Adam": ({"optimizer": {"type": "ZeroOneAdam"}}, ["has removed", "ZeroOneAdam"]),
    "1-bit LAMB": ({"optimizer": {"type": "OneBitLamb"}}, ["has removed", "OneBitLamb"]),
    "no such optimizer": ({"optimizer": {"type": "AdamX"}}, ["no optimizer", "AdamX", "did you mean"]),
    "wrong case": ({"optimizer": {"type": "sgd"}}, ['did you mean "SGD"']),
    "no such scheduler": ({"scheduler": {"type": "WarmupLinear"}}, ["no scheduler", "did you mean"]),
    "no type": ({"scheduler": {"params": {}}}, ["scheduler", '"type"']),
}


@pytest.mark.parametrize("case", WRONG)
def test_sections(mistake, tmp_path, case):
    changes, words = WRONG[case]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(ZERO1 | changes))
    line = mistake(train_deepspeed.main, "--deepspeed_config", path)
    assert all(word in line for word in [str(path), *words]), line


def test_what_is_removed_is_what_deepspeed_refuses():
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    for key in ds_sections.REMOVED:
        with pytest.raises(DeepSpeedConfigError, match="removed"):
            DeepSpeedConfig({"train_batch_size": 1, key: {}})
    assert importlib.util.find_spec("deepspeed.runtime.fp16.onebit") is None  # 1-bit Adam, 1-bit LAMB, 0/1 Adam
    assert importlib.util.find_spec("deepspeed.ops.sparse_attention") is None


@pytest.mark.parametrize(
    ("section", "package"), [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("comet", "comet_ml")]
)
def test_a_monitor_whose_package_is_missing(mistake, monkeypatch, tmp_path, section, package):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else find(name))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(ZERO1 | {section: {"enabled": True}}))
    line = mistake(train_deepspeed.main, "--deepspeed_config", path)
    assert f"pip install {package}" in line
    path.write_text(json.dumps(ZERO1 | {section: {"enabled": False}}))
    ds_config.read(str(path))


# ---- schedules ----------------------------------------------------------------------------------

DECAY = {"type": "WarmupDecayLR", "params": {"total_num_steps": 50, "warmup_max_lr": 0.001, "warmup_num_steps": 10}}
COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 50, "warmup_num_steps": 10}}
CYCLE = {"type": "OneCycle", "params": {"cycle_min_lr": 0.0, "cycle_max_lr": 0.001}}
RANGE = {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.001}}
STEPS = {"type": "StepLR", "params": {"step_size": 30}}


def parsed(monkeypatch, tmp_path, scheduler, *flags):
    """The config after the flags, and the scheduler that DeepSpeed or PyTorch builds from it."""
    from deepspeed.runtime import lr_schedules

    path = tmp_path / "config.json"
    path.write_text(json.dumps(ZERO1 | {"scheduler": scheduler}))
    monkeypatch.setattr(sys, "argv", ["train_deepspeed.py", "--deepspeed_config", str(path), *flags])
    parser = harness.build_parser("")
    parser.add_argument("--deepspeed_config")
    _, config, _ = ds_config.parse_args(parser, 1)
    lr = config["optimizer"]["params"]["lr"]
    kind, params = config["scheduler"]["type"], config["scheduler"]["params"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    module = lr_schedules if hasattr(lr_schedules, kind) else torch.optim.lr_scheduler
    schedule = getattr(module, kind)(optimizer, **params)
    rates = []
    for _ in range(12):
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return params, rates


@pytest.mark.parametrize("scheduler", [DECAY, COSINE, CYCLE, RANGE, STEPS], ids=lambda s: s["type"])
def test_a_schedule_is_left_alone_without_a_flag(monkeypatch, tmp_path, scheduler):
    params, _ = parsed(monkeypatch, tmp_path, scheduler)
    assert params == scheduler["params"]


@pytest.mark.parametrize("scheduler", [DECAY, COSINE], ids=lambda s: s["type"])
def test_rate_and_warmup_reach_schedules_that_decay(monkeypatch, tmp_path, scheduler):
    params, rates = parsed(monkeypatch, tmp_path, scheduler, "--lr", "0.01", "--warmup-steps", "4")
    assert params["warmup_num_steps"] == 4
    assert params["total_num_steps"] == 50
    assert max(rates) == pytest.approx(0.01, rel=0.05)
    assert rates[-1] < max(rates)


def test_rate_of_a_schedule_of_pytorch_is_the_optimizers(monkeypatch, tmp_path):
    params, rates = parsed(monkeypatch, tmp_path, STEPS, "--lr", "0.01")
    assert params == STEPS["params"]
    assert rates[0] == 0.01


@pytest.mark.parametrize(
    ("scheduler", "flags", "words"),
    [
        (CYCLE, ["--lr", "0.01"], ["OneCycle", "--lr", "scheduler.params.cycle_max_lr"]),
        (RANGE, ["--lr", "0.01"], ["LRRangeTest", "lr_range_test_min_lr"]),
        (CYCLE, ["--warmup-steps", "5"], ["OneCycle", "--warmup-steps", "scheduler.params"]),
        (DECAY, ["--warmup-steps", "0"], ["WarmupDecayLR", "take", "out"]),
    ],
)
def test_flags_that_a_schedule_has_no_key_for(mistake, tmp_path, scheduler, flags, words):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(ZERO1 | {"scheduler": scheduler}))
    line = mistake(train_deepspeed.main, "--deepspeed_config", path, *flags)
    assert all(word in line for word in [str(path), *words]), line
