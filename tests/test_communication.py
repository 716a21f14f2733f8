"""What is sent: DDP's communication hooks, ZeRO++'s checks, and what DeepSpeed's buckets cost."""

import json
import math
import re
import sys

import pytest
from conftest import ROOT
from training import COMMON, SETTINGS, distance, read, train

import buckets
import comm_hooks
import ds_config
import ds_sections
import gptlite
import train_ddp
import train_deepspeed

# ---- DDP's hooks --------------------------------------------------------------------------------

# Counts the bytes that PyTorch's hooks all-reduce, by type; the meter and the evaluation call it from elsewhere.
COUNTS = """
import json, os, sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
import torch.distributed as dist
import several

sent = {{}}
original = dist.all_reduce

def counted(tensor, *arguments, **options):
    if "ddp_comm_hooks" in sys._getframe(1).f_globals["__name__"]:
        sent[str(tensor.dtype)] = sent.get(str(tensor.dtype), 0) + tensor.numel() * tensor.element_size()
    return original(tensor, *arguments, **options)

dist.all_reduce = counted
for _ in several.runs("train_ddp", json.loads(sys.argv[1])):
    if os.environ["RANK"] == "0":
        print("sent", json.dumps(sent), flush=True)
    sent.clear()
"""
HOOKS = {
    "none": [],
    "bf16": ["--comm-hook", "bf16"],
    "fp16": ["--comm-hook", "fp16"],
    "powersgd": ["--comm-hook", "powersgd"],
}


def launch(run, torchrun, folder, text_file, *flags):
    """A log and the bytes sent, per hook, of 2 processes in one launch."""
    script = folder / "counts.py"
    script.write_text(COUNTS.format(root=str(ROOT)))
    lines = [[*COMMON, *flags, "--data", str(text_file), *hook] for hook in HOOKS.values()]
    done = run(torchrun(2, script, json.dumps(lines)), 300)
    assert done.returncode == 0, done.stderr[-3000:]
    parts = re.split(r"^== \d+$", done.stdout, flags=re.MULTILINE)[1:]
    logs = {}
    for hook, part in zip(HOOKS, parts, strict=True):
        sent = [json.loads(line.removeprefix("sent ")) for line in part.splitlines() if line.startswith("sent ")]
        logs[hook] = read(part), sent[0]
        assert logs[hook][0].run["strategy"] == ("ddp" if hook == "none" else f"ddp_{hook}_hook")
    return logs


@pytest.fixture(scope="module")
def hooks(run, torchrun, tmp_path_factory, text_file):
    """With SGD, which a gradient that is summed would break, and 2 micro-batches per step."""
    folder = tmp_path_factory.mktemp("hooks")
    return launch(run, torchrun, folder, text_file, *SETTINGS["sgd"], "--micro-batch-size", "4")


@pytest.mark.parametrize(("hook", "tolerance"), [("bf16", 2e-3), ("fp16", 2e-4)])
def test_16_bits_follow_fp32(hooks, hook, tolerance):
    """bf16 has 8 bits of precision, fp16 11: measured here 3e-4 and 2e-5 after 20 steps."""
    log, expected = hooks[hook][0], hooks["none"][0]
    assert 0 < distance(log.losses, expected.losses) < tolerance  # and it is not fp32
    validation = [float(x.result["validation_loss"]) for x in (log, expected)]
    assert validation[0] == pytest.approx(validation[1], rel=tolerance)


def test_powersgd_trains(hooks):
    """It is lossy: its loss falls as far as the exact one's, within 3 %."""
    log, expected = hooks["powersgd"][0], hooks["none"][0]
    assert 1e-4 < distance(log.losses, expected.losses) < 3e-2
    assert log.losses[0] - log.losses[-1] > 0.9 * (expected.losses[0] - expected.losses[-1]) > 0.9


def test_bytes_that_the_hooks_send(hooks):
    """Once per step, although there are 2 micro-batches: 16 bits send half of fp32, PowerSGD what its formula says."""
    n, steps = int(hooks["none"][0].run["parameters"]), 20
    assert hooks["none"][1] == {}  # DDP's own all-reduce is not a hook's
    assert hooks["bf16"][1] == {"torch.bfloat16": 2 * n * steps}
    assert hooks["fp16"][1] == {"torch.float16": 2 * n * steps}
    rank, compressed = 4, 0
    for p in gptlite.get_model(65, "nano").parameters():
        rows, columns = (p.shape[0], p.numel() // p.shape[0]) if p.dim() > 1 else (p.numel(), 1)
        thin = rank * (rows + columns)  # PyTorch compresses what becomes half as large at least
        compressed += thin if p.dim() > 1 and 2 * thin < p.numel() else p.numel()
    exact = comm_hooks.exact_steps(steps)
    assert hooks["powersgd"][1] == {"torch.float32": 4 * (exact * n + (steps - exact) * compressed)}
    assert compressed < n / 10


@pytest.mark.full
def test_hooks_go_with_accumulation_clipping_and_mixed_precision(run, torchrun, tmp_path, text_file):
    flags = [*SETTINGS["adamw"], "--micro-batch-size", "2", "--clip", "0.5", "--precision", "bf16"]
    logs = launch(run, torchrun, tmp_path, text_file, *flags)
    n = int(logs["none"][0].run["parameters"])
    assert logs["bf16"][1] == {"torch.bfloat16": 2 * n * 20}
    expected = logs["none"][0].losses
    for hook, tolerance in (("bf16", 2e-3), ("fp16", 2e-3), ("powersgd", 6e-2)):  # measured: 3e-4, 7e-5, 4e-2
        losses = logs[hook][0].losses
        assert 0 < distance(losses, expected) < tolerance
        assert losses[0] - losses[-1] > 0.9 * (expected[0] - expected[-1]) > 0.9


def test_powersgd_starts_when_a_short_run_still_has_steps():
    assert [comm_hooks.exact_steps(steps) for steps in (1, 20, 100, 60000)] == [2, 2, 10, 1000]


def test_wrong_hooks(mistake):
    assert "bf16" in mistake(train_ddp.main, "--comm-hook", "int8")
    assert "--comm-hook powersgd" in mistake(train_ddp.main, "--powersgd-rank", "2", "--comm-hook", "bf16")


# ---- ZeRO++ -------------------------------------------------------------------------------------


def test_zeropp_without_cuda_is_one_line(mistake):
    line = mistake(train_deepspeed.main, "--deepspeed_config", ROOT / "ds_configs/zeropp.json", "--device", "cpu")
    assert all(word in line for word in ("zero_quantized_weights", "NVIDIA", "zero3.json")), line


def zeropp(monkeypatch, size, local, world, gpus=8, gradients=True, fp16=True):
    monkeypatch.setattr("torch.accelerator.device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    zero = {"stage": 3, "zero_quantized_gradients": gradients, "zero_hpz_partition_size": size}
    config = {"zero_optimization": zero, "fp16": {"enabled": fp16}}
    ds_sections.check_zeropp(config, "z.json", "cuda", world)


@pytest.mark.parametrize(("size", "local", "world"), [(8, 8, 8), (8, 8, 16), (4, 8, 16), (8, 2, 2), (1, 4, 4)])
def test_groups_of_zeropp_that_lie_inside_a_node(monkeypatch, size, local, world):
    zeropp(monkeypatch, size, local, world, gpus=local)


@pytest.mark.parametrize(
    ("size", "local", "world", "words"),
    [(16, 8, 16, "give 8"), (3, 8, 8, "give 8"), (8, 4, 8, "give 4"), ("2", 4, 4, "whole number"), (-1, 4, 4, "whole")],
)
def test_groups_of_zeropp_that_do_not(monkeypatch, capsys, size, local, world, words):
    with pytest.raises(SystemExit) as stop:
        zeropp(monkeypatch, size, local, world, gpus=local)
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_quantized_gradients_need_a_process_per_gpu(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        zeropp(monkeypatch, 1, 2, 2)
    assert "2 processes and 8 GPUs" in capsys.readouterr().err
    zeropp(monkeypatch, 1, 2, 2, gradients=False)


def test_quantized_gradients_between_nodes_are_fp16(monkeypatch, capsys):
    zeropp(monkeypatch, 8, 8, 8, fp16=False)  # within a node they are not quantized
    with pytest.raises(SystemExit):
        zeropp(monkeypatch, 8, 8, 16, fp16=False)
    assert '"fp16": {"enabled": true}' in capsys.readouterr().err


def test_deepspeed_accepts_the_keys_of_zeropp():
    path = str(ROOT / "ds_configs/zeropp.json")
    config = ds_config.read(path)
    assert config["fp16"]["enabled"]
    zero = ds_config.zero_config(config, path)
    assert (zero.zero_quantized_weights, zero.zero_quantized_gradients, zero.zero_hpz_partition_size) == (True, True, 8)


# ---- buckets ------------------------------------------------------------------------------------

# Reports the largest tensor that DeepSpeed allocates with torch.empty.
EMPTY = """
import sys
sys.path.insert(0, {root!r})
import torch

original, largest = torch.empty, 0

def empty(*arguments, **options):
    global largest
    tensor = original(*arguments, **options)
    if tensor.dtype == torch.float32:
        largest = max(largest, tensor.untyped_storage().nbytes())
    return tensor

torch.empty = empty
import train_deepspeed
train_deepspeed.main()
print("largest", largest)
"""


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.full)])
def test_the_predicted_buffer_is_what_deepspeed_allocates(run, text_file, tmp_path, stage):
    script = tmp_path / "empty.py"
    script.write_text(EMPTY.format(root=str(ROOT)))
    flags = ["--deepspeed_config", f"ds_configs/zero{stage}.json", "--bucket-size", "3e6", "--model", "nano"]
    flags += ["--steps", "2", "--batch-size", "4", "--log-every", "1", "--eval-steps", "1", "--data", text_file]
    done = run([sys.executable, script, *flags], 120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert read(done.stdout).run["strategy"] == f"zero{stage}_bucket_3e6"
    assert 'config: --bucket-size 3000000 replaces 500000 ("zero_optimization.reduce_bucket_size"' in done.stdout
    predicted = float(re.search(r"^buckets: .*buffers=([\d.]+)GB", done.stdout, re.MULTILINE)[1]) * 2**30
    assert predicted == pytest.approx(12e6, abs=2000)
    assert int(done.stdout.split("largest ")[1]) == 12_000_000


@pytest.mark.full
@pytest.mark.parametrize("stage", [2, 3])
def test_buckets_change_no_number(run, torchrun, text_file, stage):
    flags = [*COMMON, *SETTINGS["sgd"], "--micro-batch-size", "4", "--data", text_file]
    small = train(run, torchrun, f"zero{stage}", *flags, "--bucket-size", "20000")  # less than a weight has
    large = train(run, torchrun, f"zero{stage}", *flags, "--bucket-size", "5e8")
    assert distance(small.losses, large.losses) < 1e-4
    # A buffer of 1.86 GB is allocated, and only what the gradients fill of it is resident.
    assert large.meter[-1]["MaxMemAllocated"] - small.meter[-1]["MaxMemAllocated"] < 0.1


@pytest.mark.parametrize(
    ("config", "bytes_"),
    [({}, 4), ({"bf16": {"enabled": True}}, 2), ({"bf16": {"enabled": True}, "communication_data_type": "fp32"}, 4)],
)
def test_a_bucket_has_the_type_that_is_sent(config, bytes_):
    assert ds_config.bytes_of_a_gradient(config) == bytes_


def test_names_and_sizes_of_buckets():
    assert [buckets.elements(text) for text in ("5e8", "500000", "1.5e6")] == [500_000_000, 500_000, 1_500_000]
    assert [buckets.name(size) for size in (500_000_000, 1_500_000, 7, 10)] == ["5e8", "15e5", "7", "1e1"]


def test_predictions():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    def predict(**options):
        return buckets.predict(DeepSpeedZeroConfig(**options), 4)

    assert predict(stage=2) == predict(stage=3) == 4 * 500_000_000  # DeepSpeed's defaults
    assert predict(stage=2, overlap_comm=True) == 2 * predict(stage=2)
    assert predict(stage=2, contiguous_gradients=False) == predict(stage=0) == 0


def test_wrong_bucket_sizes(mistake):
    zero2 = ["--deepspeed_config", ROOT / "ds_configs/zero2.json", "--device", "cpu"]
    for value in ("0", "1.5", "inf", "nan", "big"):
        assert "--bucket-size" in mistake(train_deepspeed.main, *zero2, "--bucket-size", value)
    line = mistake(train_deepspeed.main, *zero2, "--bucket-size", "5e11")
    assert re.search(r"need 1862.6 GB for 1 processes? on a machine with \d+", line)
    zero0 = ["--deepspeed_config", ROOT / "ds_configs/zero0.json", "--device", "cpu"]
    assert "stage 0" in mistake(train_deepspeed.main, *zero0, "--bucket-size", "5e8")


@pytest.mark.full
def test_the_sweep_of_bucket_sizes(run, text_file, tmp_path):
    """And the strategies that are only run by name: a hook, and ZeRO++, which is skipped."""
    (tmp_path / "tmp").mkdir()
    environment = {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable, "TMPDIR": str(tmp_path / "tmp")}
    command = ["./run.sh", "--bucket-sizes", "zeropp", "ddp_powersgd_hook", "--steps", "3", "--data", text_file]
    done = run([*command, "--out", tmp_path / "out", "--", "--eval-steps", "1"], 900, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^\| `(zero\d_bucket_\w+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| (-?[\d.]+)", done.stdout, re.M)
    assert [row[0] for row in rows] == [
        f"zero{stage}_bucket_{size}" for stage in (2, 3) for size in ("5e5", "5e7", "5e8")
    ]
    assert [float(row[1]) for row in rows[:3]] == [0.0019, 0.1863, 1.8626]
    assert all(math.isclose(float(row[2]), 0.003, rel_tol=0.02) for row in rows if not row[0].endswith("5e5"))
    assert re.search(r"^zeropp .*skipped: ZeRO\+\+ quantizes with a CUDA kernel", done.stdout, re.M)
    assert "ddp_powersgd_hook" in done.stdout
    assert (tmp_path / "out" / "memory_max.png").exists()
