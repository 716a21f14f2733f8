"""The parts that all scripts share: schedule, order of the data, throughput, memory."""

import json
import re
import sys

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from torch.utils.data import DataLoader, DistributedSampler

import accounting
import ds_config
import harness


def parse(*flags):
    return harness.build_parser("").parse_args(flags)


@pytest.fixture
def alone():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# ---- the end of a process ------------------------------------------------------------------------

# Pairs of processes, forked, since importing PyTorch takes seconds. They hold on to the interpreter from the
# last collective to the end, as a process on a busy machine does by chance: without let_threads_finish about
# one process in five is aborted.
PAIRS = """
import os, sys, tempfile
import torch, torch.distributed as dist
import launcher

folder = tempfile.mkdtemp()
ended = []
for pair in range(10):
    for rank in range(2):
        if os.fork():
            continue
        launcher.let_threads_finish()
        dist.init_process_group("gloo", init_method=f"file://{folder}/{pair}", rank=rank, world_size=2)
        group = dist.group.WORLD  # as DDP and DTensor do, which keeps its threads alive
        sys.setswitchinterval(100)
        tensors = [torch.ones(3) for _ in range(3)]
        for tensor in tensors:
            dist.all_reduce(tensor)
        dist.destroy_process_group()
        sys.exit()
    ended += [os.wait()[1] for _ in range(2)]
os.system(f"rm -r {folder}")
sys.exit(any(ended))
"""


@pytest.mark.full
def test_gloos_threads_do_not_abort_a_process_that_ends(run):
    done = run([sys.executable, "-c", PAIRS], 200)
    assert done.returncode == 0, done.stderr


# ---- the run line --------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "shared"), [("cpu:gloo,cuda:nccl", False), ("gloo", True)])
def test_a_gpu_is_shared_where_gloo_carries_all(alone, capsys, monkeypatch, backend, shared):
    """get_backend() names both where each kind of device has its own."""
    monkeypatch.setattr("torch.distributed.get_backend", lambda: backend)
    monkeypatch.setattr("harness.device_name", lambda device: "a GPU")
    monkeypatch.setattr("accounting.reset_peak_memory", lambda device: None)
    args = parse("--model", "nano")
    harness.Meter(args, "ddp", 1, "text", torch.device("cuda"))
    assert f"shared_gpu={shared}" in capsys.readouterr().out


# ---- schedule -----------------------------------------------------------------------------------


@pytest.mark.parametrize("warmup_steps", [1, 2, 4, 1000])
def test_warm_up_equals_deepspeeds_step_by_step(warmup_steps):
    from deepspeed.runtime.lr_schedules import WarmupLR

    def rates(optimizer, scheduler, steps=12):
        for _ in range(steps):
            yield optimizer.param_groups[0]["lr"]
            optimizer.step()
            scheduler.step()

    args = parse("--warmup-steps", str(warmup_steps), "--lr", "0.1")
    ours = harness.get_optimizer(args, [torch.nn.Parameter(torch.zeros(1))])
    theirs = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    params = json.loads((ROOT / "ds_configs" / "zero1.json").read_text())["scheduler"]["params"]
    params.update(warmup_max_lr=0.1, warmup_num_steps=warmup_steps)
    expected = list(rates(theirs, WarmupLR(theirs, **params)))
    assert list(rates(ours, harness.get_scheduler(args, ours))) == pytest.approx(expected)
    assert expected[:3] == pytest.approx([0, 0, 0.1 / max(2, warmup_steps)])


def test_no_warm_up_is_a_constant_rate():
    args = parse("--warmup-steps", "0", "--lr", "0.1")
    optimizer = harness.get_optimizer(args, [torch.nn.Parameter(torch.zeros(1))])
    scheduler = harness.get_scheduler(args, optimizer)
    for _ in range(3):
        assert optimizer.param_groups[0]["lr"] == 0.1
        optimizer.step()
        scheduler.step()


# ---- order of the data --------------------------------------------------------------------------


def epoch_batches(world_size, accumulation, micro_batch_size, epochs=2, samples=22, batch_size=4):
    """The samples of each optimizer step, as sets, over all ranks."""
    streams = []
    for rank in range(world_size):
        sampler = DistributedSampler(range(samples), world_size, rank, seed=3, drop_last=True)
        loader = DataLoader(range(samples), micro_batch_size, sampler=sampler)
        streams.append(harness.endless(loader, sampler, samples // batch_size, accumulation))
    steps = []
    for _ in range(epochs * (samples // batch_size)):
        steps.append({int(i) for stream in streams for _ in range(accumulation) for i in next(stream)})
    return steps


def test_every_number_of_processes_sees_the_same_global_batches():
    one = epoch_batches(1, 1, 4)
    assert all(len(step) == 4 for step in one)
    assert epoch_batches(2, 2, 1) == epoch_batches(2, 1, 2) == epoch_batches(4, 1, 1) == one


def test_an_epoch_repeats_no_sample_and_the_next_is_shuffled_anew():
    steps = epoch_batches(2, 2, 1)
    first, second = steps[:5], steps[5:]
    assert len(set().union(*first)) == 20
    assert len(set().union(*second)) == 20
    assert first != second


# ---- meter --------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 6])
def test_throughput_is_samples_over_wall_time_without_the_warm_up(alone, capsys, monkeypatch, steps):
    """The first two steps take 10 s each, the others 2 s; a step is 8 samples however they are accumulated."""
    clock = [0.0]
    monkeypatch.setattr(harness.time, "perf_counter", lambda: clock[0])
    args = parse("--steps", str(steps), "--batch-size", "8", "--log-every", "1", "--model", "nano")
    meter = harness.Meter(args, "test", 100, "text", torch.device("cpu"))
    meter.states = {"Parameters": 2**30}
    for step in range(1, steps + 1):
        clock[0] += 10 if step <= 2 else 2
        meter.step(step, torch.tensor(1.5))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("run: strategy=test, model=nano, parameters=100,")
    last = dict(re.findall(r"(\w+)=([^,]*)", lines[-1]))
    assert len(lines) == 1 + steps
    assert float(last["RunningAvgSamplesPerSec"]) == pytest.approx(8 / 2 if steps > 2 else 8 / 10)
    assert float(last["CurrSamplesPerSec"]) == pytest.approx(8 / 2 if steps > 2 else 8 / 10)
    assert float(last["loss"]) == 1.5
    assert last["Parameters"] == "1.000000GB"


def test_the_last_step_is_logged_too(alone, capsys):
    args = parse("--steps", "5", "--log-every", "2", "--model", "nano")
    meter = harness.Meter(args, "test", 100, "text", torch.device("cpu"))
    for step in range(1, 6):
        meter.step(step, torch.tensor(1.0))
    assert re.findall(r"step=(\d)/5", capsys.readouterr().out) == ["2", "4", "5"]


def test_peak_memory_counts_from_the_start_of_training():
    device = torch.device("cpu")
    before = torch.ones(64 * 2**20)  # 256 MB
    high = accounting.memory(device)[0]
    del before
    accounting.reset_peak_memory(device)
    now, peak = accounting.memory(device)
    assert peak < high - 200 * 2**20
    during = torch.ones(32 * 2**20)  # 128 MB
    del during
    assert accounting.memory(device)[1] > now + 100 * 2**20


def test_model_states_are_counted_from_the_tensors():
    model = torch.nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    assert accounting.model_states(model, optimizer) == {
        "Parameters": 400,
        "Gradients": 400,
        "OptimizerState": 800,
    }


# ---- flags and JSON -----------------------------------------------------------------------------


def test_both_spellings_of_local_rank_are_accepted():
    assert parse("--local_rank=1").local_rank == parse("--local-rank=1").local_rank == 1


def deepspeed_args(monkeypatch, path, *flags, world_size=2):
    monkeypatch.setattr("sys.argv", ["train_deepspeed.py"])
    parser = harness.build_parser("")
    parser.add_argument("--deepspeed_config")
    monkeypatch.setattr("sys.argv", ["train_deepspeed.py", "--deepspeed_config", str(path), *flags])
    return ds_config.parse_args(parser, world_size)


CONFIGS = sorted(p.stem for p in (ROOT / "ds_configs").glob("zero[0-3]*.json"))


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_say_what_the_flags_default_to(monkeypatch, tmp_path, name):
    """Strict JSON, and without a flag nothing of it is replaced."""
    monkeypatch.chdir(tmp_path)  # where the monitor's folder is made
    path = ROOT / "ds_configs" / f"{name}.json"
    args, config, changes = deepspeed_args(monkeypatch, path)
    defaults = parse()
    for flag in (
        "batch_size",
        "micro_batch_size",
        "optimizer",
        "lr",
        "weight_decay",
        "warmup_steps",
        "clip",
        "log_every",
    ):
        assert getattr(args, flag) == getattr(defaults, flag), flag
    assert [line for line in changes if "pin_memory" not in line and "monitor writes" not in line] == []
    assert config.pop("gradient_accumulation_steps") == 128
    written = json.loads(path.read_text())
    assert config["optimizer"]["params"]["betas"] == [0.8, 0.999]
    assert config["optimizer"]["params"]["eps"] == 1e-8
    assert config["gradient_clipping"] == 0.0
    assert config["log_level"] == "info"
    assert config["scheduler"]["params"]["warmup_type"] == "linear"
    assert {key: config[key] for key in written if key != "zero_optimization"} == {
        key: written[key] for key in written if key != "zero_optimization"
    }


def test_configs_are_alike_but_for_what_the_strategy_needs():
    names = [*CONFIGS, "autotuning", "zeropp", "pp_zero1"]
    assert set(names) == {path.stem for path in (ROOT / "ds_configs").iterdir()}
    configs = {name: json.loads((ROOT / "ds_configs" / f"{name}.json").read_text()) for name in names}
    own = {"zero1_flops_profiler": ["flops_profiler"], "zero1_monitor": ["csv_monitor", "wall_clock_breakdown"]}
    own |= {"autotuning": ["autotuning"], "zeropp": ["fp16"]}
    for name, config in configs.items():
        for key in own.get(name, []):
            assert config.pop(key)
        zero = config.pop("zero_optimization")
        assert zero["stage"] == ({"autotuning": 1, "pp_zero1": 1, "zeropp": 3}.get(name) or int(name[4]))
        assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == 500_000
        config["optimizer"]["params"].pop("torch_adam", None)  # offload has an Adam of its own for the CPU
        if zero["stage"] == 3:  # else DeepSpeed keeps small parameters, or all of them, whole
            keys = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance")
            assert [zero[f"stage3_{key}"] for key in keys] == [0, 0, 0]
    assert all(config == configs["zero0"] for config in configs.values())


def test_flags_override_the_json_and_say_so(monkeypatch):
    path = ROOT / "ds_configs" / "zero2.json"
    flags = ["--batch-size", "8", "--lr", "0.1", "--optimizer", "sgd", "--warmup-steps", "0", "--precision", "bf16"]
    _, config, changes = deepspeed_args(monkeypatch, path, *flags)
    assert (config["train_batch_size"], config["gradient_accumulation_steps"]) == (8, 4)
    assert config["optimizer"] == {"type": "SGD", "params": {"lr": 0.1, "weight_decay": 3e-7}}
    assert config["bf16"] == {"enabled": True}
    assert config["zero_allow_untested_optimizer"]
    assert "scheduler" not in config
    assert len(changes) == 5
    assert changes[0] == f'config: --batch-size 8 replaces 256 ("train_batch_size" of {path})'


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"train_batch_size": 256}, (256, 128, 1)),  # the article's: no accumulation, as DeepSpeed counts
        ({"train_micro_batch_size_per_gpu": 4}, (8, 4, 1)),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}, (24, 4, 3)),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 3}, (24, 4, 3)),
        ({}, (256, 1, 128)),  # the flags' defaults
    ],
)
def test_batches_are_completed_as_deepspeed_does(monkeypatch, tmp_path, batch, expected):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}, **batch}))
    args, config, _ = deepspeed_args(monkeypatch, path)
    assert (args.batch_size, args.micro_batch_size, config["gradient_accumulation_steps"]) == expected
    assert config["optimizer"]["type"] == "AdamW"
    assert "scheduler" not in config  # and then DeepSpeed's rate is constant
    assert config["gradient_clipping"] == 0.0
