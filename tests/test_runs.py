"""Whole runs: the documented launch lines, epochs, what is sharded, and how runs end."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, end, started_here
from training import COMMON, SETTINGS, distance, read, train

QUICK = ("--model", "nano", "--steps", "2", "--batch-size", "4", "--log-every", "1", "--eval-steps", "1")
BIN = os.path.dirname(sys.executable)


# ---- launch lines -------------------------------------------------------------------------------

LAUNCHES = [
    "python train_ddp.py",
    "torchrun --standalone --nproc_per_node=2 train_ddp.py",
    "torchrun --nproc_per_node=2 train_fsdp.py",
    "deepspeed --num_gpus=2 train_deepspeed.py --deepspeed_config ds_configs/zero3_offload.json",
    "torchrun --standalone --nproc_per_node=2 train_deepspeed.py --deepspeed_config ds_configs/zero3.json",
    "deepspeed --num_gpus=2 train_deepspeed.py --deepspeed --deepspeed_config ds_configs/zero1.json",
]


@pytest.mark.full
@pytest.mark.parametrize("line", LAUNCHES)
def test_launch_lines_work_as_written(run, text_file, line):
    program, *arguments = line.split()
    steps = 4 if program == "deepspeed" else 2  # DeepSpeed's own throughput line starts at step 3
    flags = [*QUICK, "--steps", steps, "--data", text_file]
    done = run([os.path.join(BIN, program), *arguments, *flags], timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    log = read(done.stdout)
    assert [line["step"] for line in log.meter] == list(range(1, steps + 1))
    assert log.run["processes"] == ("1" if program == "python" else "2")
    if program == "deepspeed":  # the launcher hides that line, unless the JSON's log_level says otherwise
        line = r"global_step=(\d), RunningAvgSamplesPerSec=[\d.]+, CurrSamplesPerSec=[\d.]+, MemAllocated="
        assert re.findall(line, done.stdout) == ["3", "4"]


def test_deepspeed_logs_its_own_throughput_too(run, torchrun, text_file):
    """And its estimate of the memory, in the same breath of a one-process run."""
    flags = [*QUICK[:2], "--steps", "4", "--batch-size", "4", "--log-every", "2", "--data", text_file, "--sample", "20"]
    log = train(run, torchrun, "zero3", *flags, processes=1)
    assert re.search(
        r"global_step=4, RunningAvgSamplesPerSec=[\d.]+, CurrSamplesPerSec=[\d.]+, MemAllocated=", log.text
    )
    assert "config: --batch-size 4 replaces 256" in log.text
    assert len(log.text.split("sample:\n")[1]) >= 20


def test_estimate_memory_gives_the_published_figures(run):
    done = run([sys.executable, "train_deepspeed.py", "--model", "gpt3-small", "--estimate-memory"], timeout=120)
    assert done.returncode == 0, done.stderr
    assert "gpt3-small: 0.323GB of fp32 parameters" in done.stdout
    assert re.search(r"0\.16GB \| offload_optimizer=\S*cpu", done.stdout)  # ZeRO-2, offload
    assert re.search(r"0\.34GB \| offload_optimizer=none", done.stdout)  # ZeRO-2
    assert re.search(r"0\.01GB \| offload_param=\S*cpu", done.stdout)  # ZeRO-3, offload
    assert re.search(r"0\.19GB \| offload_param=none, offload_optimizer=none", done.stdout)  # ZeRO-3


@pytest.mark.full
def test_every_script_explains_its_flags(run):
    for script in sorted(ROOT.glob("train_*.py")):
        done = run([sys.executable, script.name, "--help"], timeout=60)
        assert done.returncode == 0
        assert "--micro-batch-size" in done.stdout
        assert "Choose:" in done.stdout  # the docstring is the help


# ---- epochs -------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp_full_shard", "zero1"])
def test_parity_holds_over_several_epochs(run, torchrun, tmp_path, strategy):
    """116 samples are 7 steps of 16: 20 steps cross two ends of an epoch, where the order is shuffled anew."""
    text = tmp_path / "short.txt"
    text.write_text(("the quick brown fox jumps over the lazy dog. " * 5)[:200])
    flags = [*COMMON, *SETTINGS["sgd"], "--data", text]
    one = train(run, torchrun, "ddp", *flags, "--micro-batch-size", "16", processes=1)
    two = train(run, torchrun, strategy, *flags, "--micro-batch-size", "4")
    assert distance(two.losses, one.losses) < 1e-4


# ---- inside a run -------------------------------------------------------------------------------


def instrumented(tmp_path, text):
    """A script that changes something and then runs a training script's main."""
    path = tmp_path / "instrumented.py"
    path.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n" + text)
    return path


GATHERS = """
import torch.distributed as dist
import train_deepspeed
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
import deepspeed, harness

gathered = 0
original = dist.all_gather_into_tensor

def counted(*arguments, **options):
    global gathered
    gathered += (arguments[0] if arguments else options["output_tensor"]).numel()
    return original(*arguments, **options)

dist.all_gather_into_tensor = dist.distributed_c10d.all_gather_into_tensor = counted
step = harness.Meter.step
initialize = deepspeed.initialize
engines = []

def kept(**options):
    result = initialize(**options)
    engines.append(result[0])
    return result

def report(meter, number, loss):
    global gathered
    whole = sum(p.ds_status == ZeroParamStatus.AVAILABLE for p in engines[0].module.parameters())
    n = sum(p.ds_numel for p in engines[0].module.parameters())
    meter.print(f"gathered {gathered / n:.4f} whole {whole}")
    gathered = 0
    step(meter, number, loss)

deepspeed.initialize = kept
harness.Meter.step = report
train_deepspeed.main()
"""


def test_zero3_really_shards(run, torchrun, text_file, tmp_path):
    """Each parameter is gathered twice per micro-batch, and after a step none is whole."""
    script = instrumented(tmp_path, GATHERS)
    flags = ["--model", "nano", "--steps", "4", "--batch-size", "4", "--micro-batch-size", "1", "--data", text_file]
    done = run(torchrun(2, script, "--deepspeed_config", "ds_configs/zero3.json", *flags, "--eval-steps", "0"), 200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"gathered ([\d.]+) whole (\d+)", done.stdout)
    assert [whole for _, whole in found] == ["0"] * 4
    # 2 micro-batches, forward and backward; the very first backward pass, still being traced, gathers more.
    assert [float(gathered) for gathered, _ in found[1:]] == pytest.approx([2 * 2] * 3, rel=0.01)
    assert float(found[0][0]) >= 4


SEEDS = """
import os, torch, harness
import {script} as script

def report(*arguments, **options):
    mask = torch.nn.functional.dropout(torch.ones(64), 0.5)
    print(f"rank {{os.environ['RANK']}} masks {{mask.tolist()}}", flush=True)

harness.evaluate = report
script.main()
"""


@pytest.mark.full
@pytest.mark.parametrize("script", ["train_ddp", "train_fsdp", "train_deepspeed"])
def test_dropout_differs_between_processes(run, torchrun, text_file, tmp_path, script):
    path = instrumented(tmp_path, SEEDS.format(script=script))
    config = ["--deepspeed_config", "ds_configs/zero3.json"] if script == "train_deepspeed" else []
    done = run(torchrun(2, path, *config, *QUICK, "--dropout", "0.1", "--data", text_file), 200)
    assert done.returncode == 0, done.stderr[-3000:]
    masks = dict(re.findall(r"rank (\d) masks (\[.*?\])", done.stdout))
    assert set(masks) == {"0", "1"}
    assert masks["0"] != masks["1"]


# ---- how runs end -------------------------------------------------------------------------------

RAISES = """
import os, harness, train_ddp
step = harness.Meter.step

def broken(meter, number, loss):
    if number == 2 and os.environ["RANK"] == "1":
        raise RuntimeError("rank 1 breaks")
    step(meter, number, loss)

harness.Meter.step = broken
train_ddp.main()
"""


def test_one_failing_rank_ends_the_job(run, torchrun, text_file, tmp_path):
    start = time.monotonic()
    flags = ["--model", "nano", "--steps", "1000", "--batch-size", "2", "--data", text_file]
    done = run(torchrun(2, instrumented(tmp_path, RAISES), *flags), timeout=120)
    assert done.returncode != 0
    assert "rank 1 breaks" in done.stderr
    assert time.monotonic() - start < 100  # import and start-up are about 15 s of it


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_killed_deepspeed_launcher_leaves_nothing(text_file, tmp_path, number):
    """No worker and, with SIGTERM, no swap file: the first of DeepSpeed's two launchers passes nothing on."""
    swap = tmp_path / "swap"
    swap.mkdir()
    flags = ["--model", "nano", "--steps", "100000", "--batch-size", "4", "--log-every", "1", "--data", text_file]
    command = [os.path.join(BIN, "deepspeed"), "--num_gpus=2", "--master_port", "29617", "train_deepspeed.py"]
    command += ["--deepspeed_config", "ds_configs/zero3_nvme.json", "--nvme-path", swap, *flags]
    environment = {**os.environ, "GPTLITE_TEST_RUN": str(tmp_path)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as launcher:
        try:
            for line in launcher.stdout:
                if line.startswith("meter: step=3/"):
                    break
            assert list(swap.iterdir())
            launcher.send_signal(number)
            launcher.stdout.close()
            deadline = time.monotonic() + 12
            while (left := started_here(str(tmp_path))) and time.monotonic() < deadline:
                time.sleep(0.2)
            assert not [(p.pid, p.cmdline()) for p in left if p.is_running()]
            assert launcher.wait(5) != 0
            assert list(swap.iterdir()) == []
        finally:
            end(started_here(str(tmp_path)))
            launcher.kill()


def test_no_script_but_deepspeeds_imports_deepspeed(run):
    program = "import sys, train_ddp, train_fsdp; assert not [m for m in sys.modules if m.startswith('deepspeed')]"
    assert run([sys.executable, "-c", program], timeout=60).returncode == 0
