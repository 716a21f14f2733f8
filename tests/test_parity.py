"""The law of this repository: every strategy trains the same numbers as one process.

Each strategy runs on 2 processes (HYBRID_SHARD on 4) with the global batch of a one-process run, in
fp32 without dropout, and must follow its loss within 1e-4 relative over 20 steps, under AdamW and
under SGD. The short test run has SGD with accumulation 2; --full has both, with accumulation 1 and 4,
bf16, clipping, and the proof that the test notices what it should.
"""

import shutil

import pytest
from conftest import ROOT
from training import COMMON, PROCESSES, SCRIPTS, SETTINGS, distance, read, several, train

PARITY = 1e-4


@pytest.fixture(scope="session")
def reference(run, torchrun, text_file):
    """reference(optimizer, *flags): the one-process run, once per set of flags."""
    cache = {}

    def get(optimizer, *flags):
        key = (optimizer, *flags)
        if key not in cache:
            flags = [*COMMON, *SETTINGS[optimizer], "--data", text_file, "--micro-batch-size", "16", *flags]
            cache[key] = train(run, torchrun, "ddp", *flags, processes=1)
        return cache[key]

    return get


def flags_for(strategy, optimizer, accumulation, text_file):
    micro = 16 // accumulation // PROCESSES.get(strategy, 2)
    return [*COMMON, *SETTINGS[optimizer], "--data", text_file, "--micro-batch-size", micro]


CLIP = ("--clip", "0.05")  # the norm is above 0.3 throughout: every step is clipped
BF16 = ["ddp", "fsdp_full_shard", "zero0", "zero1", "zero2", "zero3"]
CLIPPED = [*BF16, "fsdp_hybrid_shard"]


@pytest.fixture(scope="module")
def matrix(run, torchrun, text_file):
    """matrix(strategy, optimizer, accumulation, *flags): a strategy's run, of which --full needs several.

    The first that is asked for runs all of its strategy in one launch.
    """
    logs = {}

    def get(strategy, *which):
        if strategy not in logs:
            keys = [(optimizer, accumulation) for optimizer in SETTINGS for accumulation in (1, 4)]
            keys += [("adamw", 2, "--precision", "bf16")] if strategy in BF16 else []
            keys += [("sgd", 2, *CLIP)] if strategy in CLIPPED else []
            script, *own = SCRIPTS[strategy]
            lines = [[*own, *flags_for(strategy, *key[:2], text_file), *key[2:]] for key in keys]
            timeout = 1500  # the first with offload on a machine compiles DeepSpeed's C++, for minutes
            processes = PROCESSES.get(strategy, 2)
            parts, _ = several(run, torchrun, processes, script.removesuffix(".py"), lines, timeout)
            logs[strategy] = {key: read(part) for key, part in zip(keys, parts, strict=True)}
        return logs[strategy][which]

    return get


def check_parity(log, expected):
    assert len(log.losses) == 20
    assert distance(log.losses, expected.losses) < PARITY
    assert float(log.result["validation_loss"]) == pytest.approx(float(expected.result["validation_loss"]), rel=PARITY)
    assert log.result["validation_tokens"] == expected.result["validation_tokens"]


# What a process holds of each parameter, in bytes, in fp32 on 2 processes (HYBRID_SHARD: groups of 2):
# parameters, gradients, what the optimizer keeps besides its moments, and the moments of AdamW. On paper
# ZeRO-1, 2 and 3 hold 12, 10 and 8 with AdamW; DeepSpeed adds 2 for a copy of this process's part of the
# parameters, which its optimizer updates, and ZeRO-3 with offload 2 for gradients on their way to the CPU.
STATES = {
    "ddp": (4, 4, 0, 8),
    "fsdp_no_shard": (4, 4, 0, 8),
    "fsdp_shard_grad_op": (2, 2, 0, 4),
    "fsdp_full_shard": (2, 2, 0, 4),
    "fsdp_hybrid_shard": (2, 2, 0, 4),
    "zero0": (4, 4, 0, 8),
    "zero1": (4, 4, 2, 4),
    "zero2": (4, 2, 2, 4),
    "zero3": (2, 2, 2, 4),
    "zero2_offload": (4, 2, 2, 4),
    "zero3_offload": (2, 4, 2, 4),
    "zero3_nvme": (2, 2, 2, 4),
}


def check_states(log, optimizer):
    """The counted model states are what theory says; the rest is explained by a number."""
    strategy, states = log.run["strategy"], log.states()
    parameters, gradients, copy, moments = STATES[strategy]
    state = copy + (moments if optimizer == "adamw" else 0)
    # ZeRO-2 keeps the gradient that lies across two partitions whole: at most the largest tensor, 128 x 512.
    across = 4 * 128 * 512 / int(log.run["parameters"]) if strategy == "zero2" else 0
    assert states["Parameters"] == pytest.approx(parameters, rel=0.002)  # shards are padded to equal sizes
    assert gradients * 0.998 <= states["Gradients"] <= gradients * 1.002 + across
    on_disk = state if strategy == "zero3_nvme" else 0
    assert states["OptimizerState"] == pytest.approx(state - on_disk, rel=0.002, abs=1e-3)
    assert states.get("OnDisk", 0) == pytest.approx(on_disk, rel=0.002)


@pytest.mark.parametrize("strategy", SCRIPTS)
def test_parity_under_sgd(run, torchrun, text_file, reference, strategy):
    log = train(run, torchrun, strategy, *flags_for(strategy, "sgd", 2, text_file))
    check_parity(log, reference("sgd"))
    check_states(log, "sgd")
    assert log.run["strategy"] == strategy


@pytest.mark.full
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("optimizer", SETTINGS)
@pytest.mark.parametrize("strategy", SCRIPTS)
def test_parity(matrix, reference, strategy, optimizer, accumulation):
    log = matrix(strategy, optimizer, accumulation)
    check_parity(log, reference(optimizer))
    if accumulation == 4:  # ZeRO-1 holds whole gradients between micro-batches, of which there must be several
        check_states(log, optimizer)


@pytest.mark.full
@pytest.mark.parametrize("strategy", BF16)
def test_bf16_follows_fp32(matrix, reference, strategy):
    log = matrix(strategy, "adamw", 2, "--precision", "bf16")
    expected = reference("adamw")
    assert 1e-6 < distance(log.losses, expected.losses) < 2e-2  # and it is not fp32
    assert float(log.result["validation_loss"]) == pytest.approx(float(expected.result["validation_loss"]), rel=2e-2)
    # TRAPS: weights and moments that the optimizer updates are fp32 in every mixed-precision run.
    states = log.states()
    held = {"ddp": 8, "fsdp_full_shard": 4, "zero0": 12, "zero1": 6, "zero2": 6, "zero3": 6}[strategy]
    assert states["OptimizerState"] == pytest.approx(held, rel=0.01)


@pytest.mark.full
@pytest.mark.parametrize("strategy", CLIPPED)
def test_clipping_uses_the_norm_of_the_whole_gradient(matrix, reference, strategy):
    log = matrix(strategy, "sgd", 2, *CLIP)
    expected = reference("sgd", *CLIP)
    check_parity(log, expected)
    assert distance(expected.losses, reference("sgd").losses) > 1e-2


# ---- the test notices -----------------------------------------------------------------------------

BREAKS = {
    # a gradient that is summed over processes, not averaged
    "summed": ("train_ddp.py", "(loss / accumulation).backward()", "(loss / accumulation * world_size).backward()"),
    # ranks that see the same data
    "same data": ("train_ddp.py", "num_replicas=world_size, rank=rank", "num_replicas=1, rank=0"),
    # a warm-up that is off by one step
    "warm-up": ("harness.py", "max(0, step - 1) / n", "max(0, step) / n"),
    # micro-batches that are summed, not averaged
    "accumulation": ("train_ddp.py", "(loss / accumulation).backward()", "loss.backward()"),
}


@pytest.mark.full
@pytest.mark.parametrize("broken", BREAKS)
def test_parity_fails_when_broken(run, torchrun, text_file, reference, tmp_path, broken):
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    file, right, wrong = BREAKS[broken]
    text = (tmp_path / file).read_text()
    assert right in text
    (tmp_path / file).write_text(text.replace(right, wrong))
    log = train(run, torchrun, "ddp", *flags_for("ddp", "sgd", 2, text_file), cwd=tmp_path)
    assert distance(log.losses, reference("sgd").losses) > 10 * PARITY
