"""A user's mistake is one line that says what is wrong and what would do, and exit code 2, on every rank."""

import json
import shutil
import sys

import pytest
import torch
from conftest import ROOT

import train_ddp
import train_deepspeed
import train_fsdp

CONFIG = json.loads((ROOT / "ds_configs" / "zero3.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "0"], ["--steps", "at least 1"]),
        (["--steps", "ten"], ["--steps", "ten"]),
        (["--lr", "-1"], ["--lr", "at least 0"]),
        (["--lr", "nan"], ["--lr", "at least 0"]),
        (["--model", "gpt5"], ["--model", "gpt5", "nano"]),
        (["--optimizer", "adam"], ["--optimizer", "adamw"]),
        (["--dropout", "1.5"], ["--dropout", "below 1"]),
        (["--modle", "nano"], ["--modle"]),
        (["--batch-size", "10", "--micro-batch-size", "4"], ["10", "4 x 1 = 4", "--batch-size"]),
    ],
)
def test_flags(mistake, arguments, words):
    line = mistake(train_ddp.main, *arguments)
    assert all(word in line for word in words), line


def test_the_batch_must_divide_over_the_processes(mistake):
    line = mistake(train_ddp.main, "--batch-size", "8", "--micro-batch-size", "1", world_size=3)
    assert "1 x 3 = 3" in line


def test_shard_sizes(mistake):
    hybrid = ["--sharding-strategy", "HYBRID_SHARD", "--batch-size", "8"]
    assert "groups of 3" in mistake(train_fsdp.main, *hybrid, "--shard-size", "3", world_size=4)
    assert "HYBRID_SHARD" in mistake(train_fsdp.main, "--shard-size", "2", "--batch-size", "8", world_size=4)


def test_more_processes_than_gpus(mistake, monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    line = mistake(train_ddp.main, "--batch-size", "8", world_size=4)
    assert all(word in line for word in ("4 processes", "2 GPU", "--share-gpu", "--device cpu")), line


# ---- DeepSpeed's JSON ---------------------------------------------------------------------------


def changed(**changes):
    return json.dumps({**CONFIG, **changes})


TEXTS = {
    "trailing comma": ('{\n  "train_batch_size": 8,\n}', ["line 3", "trailing commas"]),
    "comment": ('{\n  // small\n  "train_batch_size": 8\n}', ["line 2", "comments"]),
    "duplicate key": ('{"train_batch_size": 8, "train_batch_size": 16}', ["train_batch_size", "twice"]),
    "not an object": ("[1, 2]", ["JSON object"]),
    "near miss": (changed(gradient_clip=1.0), ["gradient_clip", 'did you mean "gradient_clipping"']),
    "near miss of a section": (changed(zero_optimisation={"stage": 3}), ['did you mean "zero_optimization"']),
    "auto": (changed(train_batch_size="auto"), ["train_batch_size", "auto", "give a value"]),
    "auto inside": (changed(zero_optimization={"stage": 2, "reduce_bucket_size": "auto"}), ["reduce_bucket_size"]),
    "text for a number": (changed(train_batch_size="8"), ["train_batch_size", "whole number"]),
    "fraction": (changed(train_micro_batch_size_per_gpu=1.5), ["train_micro_batch_size_per_gpu", "whole number"]),
    "negative": (changed(gradient_clipping=-1), ["gradient_clipping", "at least 0"]),
    "true": (changed(steps_per_print=True), ["steps_per_print", "whole number"]),
    "batches disagree": (changed(gradient_accumulation_steps=3), ["256", "1 x accumulation 3 x 1 processes = 3"]),
    "checkpointing: near miss": (
        changed(activation_checkpointing={"cpu_checkpoint": True}),
        ["activation_checkpointing.cpu_checkpoint", 'did you mean "cpu_checkpointing"'],
    ),
    "checkpointing: text": (changed(activation_checkpointing={"profile": "yes"}), ["profile", "true or false"]),
    "checkpointing: model parallel": (
        changed(activation_checkpointing={"partition_activations": True}),
        ["partition_activations", "leave it out"],
    ),
    "checkpointing: a number": (changed(activation_checkpointing=1), ["activation_checkpointing", "object"]),
    "interval": (changed(pipeline={"activation_checkpoint_interval": -1}), ["activation_checkpoint_interval"]),
    "section is a number": (changed(zero_optimization=3), ["zero_optimization", "object"]),
    "nvme without a path": (
        changed(zero_optimization={"stage": 3, "offload_param": {"device": "nvme"}}),
        ["nvme_path"],
    ),
}


@pytest.mark.parametrize("case", TEXTS)
def test_json(mistake, tmp_path, case):
    text, words = TEXTS[case]
    path = tmp_path / "config.json"
    path.write_text(text)
    line = mistake(train_deepspeed.main, "--deepspeed_config", path)
    assert str(path) in line
    assert all(word in line for word in words), line


def test_missing_json(mistake, tmp_path):
    assert "No such file" in mistake(train_deepspeed.main, "--deepspeed_config", tmp_path / "none.json")
    assert "ds_configs" in mistake(train_deepspeed.main)


def test_nvme_path(mistake, tmp_path):
    nvme, other = "ds_configs/zero3_nvme.json", "ds_configs/zero3.json"
    line = mistake(train_deepspeed.main, "--deepspeed_config", ROOT / nvme, "--nvme-path", tmp_path / "none")
    assert "--nvme-path" in line
    assert str(tmp_path / "none") in line
    assert "--nvme-path" in mistake(train_deepspeed.main, "--deepspeed_config", ROOT / other, "--nvme-path", tmp_path)


def test_an_unknown_key_is_a_warning(tmp_path, capsys):
    import ds_config

    path = tmp_path / "config.json"
    path.write_text(changed(my_own_notes="x"))
    ds_config.read(str(path))
    assert "my_own_notes" in capsys.readouterr().err


def test_zero3_is_not_compiled(mistake):
    arguments = ["--deepspeed_config", ROOT / "ds_configs/zero3.json", "--compile"]
    assert "--compile" in mistake(train_deepspeed.main, *arguments)


def test_unknown_zero_keys_and_stages(mistake, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(changed(zero_optimization={"stage": 2, "reduce_bucket": 1}))
    assert 'did you mean "reduce_bucket_size"' in mistake(train_deepspeed.main, "--deepspeed_config", path)
    path.write_text(changed(zero_optimization={"stage": 4}))
    assert "zero_optimization.stage" in mistake(train_deepspeed.main, "--deepspeed_config", path)


# ---- by real command lines ----------------------------------------------------------------------


def test_one_line_and_exit_code_2_of_a_real_command(run, tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"train_batch_size": 8,}')
    done = run([sys.executable, "train_deepspeed.py", "--deepspeed_config", path], timeout=60)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_every_rank_says_the_same(run, torchrun, tmp_path):
    """The text is read after the processes have met: the error of one must not leave the others waiting."""
    arguments = ["--data", tmp_path / "none.txt", "--batch-size", "8", "--steps", "1"]
    done = run(torchrun(2, "train_ddp.py", *arguments), timeout=60)
    assert done.returncode == 1  # torchrun's own, for a worker's 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("train_ddp.py: error:")]
    assert lines == [f"train_ddp.py: error: cannot read the text {tmp_path}/none.txt: No such file or directory"] * 2
    assert "exitcode  : 2" in done.stderr


@pytest.mark.parametrize(
    ("length", "words"), [(64, ["64 characters", "at least 65"]), (70, ["1 training samples", "8"])]
)
def test_texts_that_are_too_short(run, tmp_path, length, words):
    """Shorter than a window; and smaller than one global batch, which would be no step at all."""
    path = tmp_path / "short.txt"
    path.write_text("ab" * (length // 2))
    done = run([sys.executable, "train_ddp.py", "--data", path, "--batch-size", "8"], timeout=60)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert all(word in done.stderr for word in words), done.stderr


def test_the_shortest_text_trains(run, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("abcde" * 13)  # 65 characters, one window of 64
    arguments = ["--data", path, "--batch-size", "1", "--steps", "2", "--log-every", "1"]
    done = run([sys.executable, "train_ddp.py", *arguments], timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("meter: ") == 2


@pytest.mark.full
def test_processes_download_once_and_a_read_only_folder_ends_in_a_text(run, torchrun, tmp_path):
    """No network: one process tries, all train on the text that stands in, and one loud line says so."""
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    (tmp_path / "data").write_text("a file, so that no folder data/ can be written")
    arguments = ["--batch-size", "4", "--steps", "1", "--eval-steps", "0"]
    done = run(torchrun(2, "train_ddp.py", *arguments), 90, cwd=tmp_path, TINYSHAKESPEARE_URL="http://127.0.0.1:9/")
    assert done.returncode == 0, done.stderr
    assert "data=python-help" in done.stdout
    assert done.stderr.count("NOT TINY SHAKESPEARE") == 1


@pytest.mark.full
def test_offload_without_a_compiler_says_what_to_install(run, text_file, tmp_path):
    arguments = ["--deepspeed_config", "ds_configs/zero2_offload.json", "--data", text_file, "--batch-size", "4"]
    empty = tmp_path / "bin"
    empty.mkdir()
    environment = {"PATH": str(empty), "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"), "CXX": None}
    done = run([sys.executable, "train_deepspeed.py", *arguments], 120, **environment)
    assert done.returncode == 2, done.stdout[-2000:] + done.stderr[-3000:]
    assert "C++ compiler" in done.stderr
