"""Both pipelines, PyTorch's and DeepSpeed's, follow one process, and say before they start what they cannot do."""

import itertools
import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from training import COMMON, SETTINGS, distance, read, several

import gptlite
import pipeline
import train_pp

PARITY = 1e-4
SCHEDULES = list(pipeline.SCHEDULES)
MICRO = ("--micro-batch-size", "2")  # 8 micro-batches per step in one pipeline, 4 in each of two
DEEPSPEED = ("train_deepspeed_pp.py", "--deepspeed_config", "ds_configs/pp_zero1.json")


@pytest.fixture(scope="session")
def launch(run, torchrun, text_file):
    """launch(processes, script and flags, ...): what that run printed, with the flags that all tests share."""

    def launch(processes, *command, cwd=ROOT):
        command = torchrun(processes, *command) if processes > 1 else [sys.executable, *command]
        done = run([*command, *COMMON, "--data", text_file], timeout=420, cwd=cwd)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        assert "destroy_process_group" not in done.stderr
        return read(done.stdout)

    return launch


@pytest.fixture(scope="session")
def reference(launch):
    """reference(optimizer, *flags): train_ddp.py on one process, started once for each set of flags."""
    done = {}

    def reference(*flags):
        if flags not in done:
            optimizer, *others = flags
            done[flags] = launch(1, "train_ddp.py", *SETTINGS[optimizer], "--micro-batch-size", "16", *others)
        return done[flags]

    return reference


CLIP = ("--clip", "0.05")  # every step is clipped
BF16 = ("--precision", "bf16")


@pytest.fixture(scope="session")
def matrix(run, torchrun, text_file):
    """matrix(processes, optimizer, flags of train_pp.py, ...): a run of which --full needs several.

    The first that is asked for runs all of as many processes, and of pipelines of as many, in one launch.
    """
    two = ("--pipeline-parallel-size", "2")
    lines = {"one": {2: [], 4: []}, "two": {4: [("sgd", "--schedule", "1F1B", *two, *CLIP)]}}
    for schedule, optimizer in itertools.product(SCHEDULES, SETTINGS):
        for processes in (2, 4):
            lines["one"][processes].append((optimizer, "--schedule", schedule, *layers(processes, schedule)))
        lines["two"][4].append((optimizer, "--schedule", schedule, *two))
    lines["one"][2] += [("adamw", "--schedule", schedule, *BF16) for schedule in ("1F1B", "ZBVZeroBubble")]
    done = {}

    def matrix(processes, *line):
        pipelines = "two" if "--pipeline-parallel-size" in line else "one"
        if (pipelines, processes) not in done:
            wanted = lines[pipelines][processes]
            common = [*MICRO, *COMMON, "--data", text_file]
            commands = [[*flags, *SETTINGS[optimizer], *common] for optimizer, *flags in wanted]
            parts, _ = several(run, torchrun, processes, "train_pp", commands, timeout=900)
            done[pipelines, processes] = {key: read(part) for key, part in zip(wanted, parts, strict=True)}
        return done[pipelines, processes][line]

    return matrix


def layers(processes, schedule):
    """More of them where nano has too few for the stages."""
    return ("--n-layer", "8") if processes * pipeline.SCHEDULES[schedule].stages_per_process > 4 else ()


def check_parity(log, expected):
    """Each step's loss, the validation loss and its tokens are those of one process, and so is the model."""
    assert len(log.losses) == 20
    assert distance(log.losses, expected.losses) < PARITY
    assert float(log.result["validation_loss"]) == pytest.approx(float(expected.result["validation_loss"]), rel=PARITY)
    assert log.result["validation_tokens"] == expected.result["validation_tokens"]
    assert log.run["parameters"] == expected.run["parameters"]


def bubble(log) -> dict[str, str]:
    line = next(line for line in log.text.splitlines() if line.startswith("bubble: "))
    return dict(pair.split("=", 1) for pair in line.removeprefix("bubble: ").split(", "))


# ---- parity -------------------------------------------------------------------------------------


def test_two_stages_follow_one_process(launch, reference):
    log = launch(2, "train_pp.py", *SETTINGS["sgd"], *MICRO)
    check_parity(log, reference("sgd"))
    assert log.run["strategy"] == "pp_1f1b"
    # The first stage has two blocks and the embeddings, the last two blocks and the head; SGD keeps nothing.
    assert log.states() == pytest.approx({"Parameters": 2, "Gradients": 2, "OptimizerState": 0}, rel=0.01)
    assert bubble(log)["predicted"] == "0.1111"
    assert 0 < float(bubble(log)["measured"]) < 1


def test_two_pipelines_with_zero_bubble_follow_one_process(launch, reference):
    flags = ("--schedule", "ZBVZeroBubble", "--pipeline-parallel-size", "2")
    log = launch(4, "train_pp.py", *SETTINGS["sgd"], *MICRO, *flags)
    check_parity(log, reference("sgd"))
    assert log.run["strategy"] == "pp_zbv_dp"
    assert bubble(log)["micro_batches"] == "4", "the batch is shared between the two pipelines"


@pytest.mark.full
@pytest.mark.parametrize("optimizer", SETTINGS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("processes", [2, 4])
def test_schedules_follow_one_process(matrix, reference, processes, schedule, optimizer):
    more = layers(processes, schedule)
    log = matrix(processes, optimizer, "--schedule", schedule, *more)
    check_parity(log, reference(optimizer, *more))
    assert log.run["strategy"] == pipeline.SCHEDULES[schedule].strategy


@pytest.mark.full
@pytest.mark.parametrize("optimizer", SETTINGS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_data_parallel_pipelines_follow_one_process(matrix, reference, schedule, optimizer):
    log = matrix(4, optimizer, "--schedule", schedule, "--pipeline-parallel-size", "2")
    check_parity(log, reference(optimizer))
    assert log.run["strategy"] == pipeline.SCHEDULES[schedule].strategy + "_dp"


@pytest.mark.full
@pytest.mark.parametrize("optimizer", SETTINGS)
@pytest.mark.parametrize("processes", [2, 4])
def test_deepspeeds_pipeline_follows_one_process(launch, reference, processes, optimizer):
    log = launch(processes, *DEEPSPEED, *SETTINGS[optimizer], *MICRO, "--pipeline-parallel-size", "2")
    check_parity(log, reference(optimizer))
    assert log.run["strategy"] == ("deepspeed_pp" if processes == 2 else "deepspeed_pp_dp")
    # Half of the layers each. ZeRO-1 adds a copy of the part it updates, and shares the moments between pipelines.
    parts = processes // 2
    state = 2 / parts + (4 / parts if optimizer == "adamw" else 0)
    assert log.states() == pytest.approx({"Parameters": 2, "Gradients": 2, "OptimizerState": state}, rel=0.01)


@pytest.mark.full
@pytest.mark.parametrize("script", ["pp", "deepspeed_pp"])
def test_clipping_uses_the_norm_over_all_stages(launch, matrix, reference, script):
    flags = ("--pipeline-parallel-size", "2", *CLIP)
    expected = reference("sgd", *CLIP)
    if script == "pp":
        check_parity(matrix(4, "sgd", "--schedule", "1F1B", *flags), expected)
    else:
        check_parity(launch(4, *DEEPSPEED, *SETTINGS["sgd"], *MICRO, *flags), expected)
    assert distance(expected.losses, reference("sgd").losses) > 1e-2


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble", "DeepSpeed's"])
def test_bf16_follows_fp32(launch, matrix, reference, schedule):
    if schedule == "DeepSpeed's":
        log = launch(2, *DEEPSPEED, *SETTINGS["adamw"], *MICRO, *BF16)
    else:
        log = matrix(2, "adamw", "--schedule", schedule, *BF16)
    expected = reference("adamw")
    assert 1e-6 < distance(log.losses, expected.losses) < 2e-2  # and it is not fp32
    assert float(log.result["validation_loss"]) == pytest.approx(float(expected.result["validation_loss"]), rel=2e-2)
    # Weights and moments that the optimizer updates are fp32, about half of them each (in a V the first process
    # has embeddings and head); DeepSpeed's fp32 weights are a copy.
    assert log.states()["OptimizerState"] == pytest.approx(6 if schedule == "DeepSpeed's" else 4, rel=0.05)


BREAKS = {
    "summed over pipelines": ("parameter.grad /= data_parallel_size", "pass"),
    "summed over micro-batches": ("scale_grads=True", "scale_grads=False"),
    "same data in both pipelines": ("rank=data_rank", "rank=0"),
    "not sent to the other pipeline": ("dist.all_reduce(parameter.grad, group=data_group)", "pass"),
}


@pytest.mark.full
@pytest.mark.parametrize("broken", BREAKS)
def test_parity_fails_when_broken(launch, reference, tmp_path, broken):
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    right, wrong = BREAKS[broken]
    text = (tmp_path / "train_pp.py").read_text()
    assert right in text
    (tmp_path / "train_pp.py").write_text(text.replace(right, wrong))
    log = launch(4, "train_pp.py", *SETTINGS["sgd"], *MICRO, "--pipeline-parallel-size", "2", cwd=tmp_path)
    assert distance(log.losses, reference("sgd").losses) > 10 * PARITY


# ---- stages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [65, 20000])
@pytest.mark.parametrize("n_stages", [1, 2, 3, 4, 8])
def test_stages_are_the_whole_model(n_stages, vocab_size):
    config = gptlite.get_config("nano", n_layer=8)
    args = SimpleNamespace(seed=3, precision="fp32")
    blocks = pipeline.split_blocks(config, vocab_size, n_stages)
    assert [i for stage in blocks for i in stage] == list(range(8))
    stages = [
        train_pp.Stage(args, config, vocab_size, stage, i == 0, i == n_stages - 1) for i, stage in enumerate(blocks)
    ]
    whole = gptlite.GPTlite(vocab_size, config, 3)
    weights = {name: weight for stage in stages for name, weight in stage.state_dict().items()}
    assert sum(len(stage.state_dict()) for stage in stages) == len(weights)
    torch.testing.assert_close(weights, dict(whole.state_dict()), rtol=0, atol=0)
    tokens = torch.arange(20).view(2, 10)
    x = tokens
    for stage in stages:
        x = stage(x)
    torch.testing.assert_close(x, whole(tokens), rtol=0, atol=0)


def test_stages_cost_the_same():
    def counts(vocab_size, n_stages, **overrides):
        blocks = pipeline.split_blocks(gptlite.get_config("gpt3-small", **overrides), vocab_size, n_stages)
        return [len(stage) for stage in blocks]

    assert counts(65, 4) == [3, 3, 3, 3]
    assert counts(65, 5) == [3, 3, 2, 2, 2]
    # The head of GPT-2's vocabulary costs as much as nearly 5 blocks of this width: the last stage has no other.
    assert counts(50257, 4, block_size=512) == [4, 4, 4, 0]


# ---- schedules ----------------------------------------------------------------------------------

PICTURE = """\
process 0  F0 F1 F2 .  .  .  B0 B0 B1 B1 B2 B2
process 1  .  F0 F1 F2 B0 B0 B1 B1 B2 B2 .  .
bubble: predicted=0.2500, formula=(p-1)/(m+p-1)
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_the_predicted_bubble_is_the_pictures(schedule, p):
    for m in (2 * p, 4 * p, 8 * p):
        rows = pipeline.timetable(schedule, p, m)
        length = max(start + pipeline.SLOTS[kind] for row in rows for start, _, kind, _ in row)
        computing = [sum(pipeline.SLOTS[kind] for _, _, kind, _ in row) for row in rows]
        assert computing == [3 * m * pipeline.SCHEDULES[schedule].stages_per_process] * p
        assert 1 - sum(computing) / (p * length) == pytest.approx(pipeline.SCHEDULES[schedule].bubble(p, m))


def test_a_schedule_is_drawn(run):
    command = ["train_pp.py", "--schedule", "GPipe", "--pipeline-parallel-size", "2", "--batch-size", "3"]
    result = run([sys.executable, *command, "--show-schedule"])
    assert result.returncode == 0, result.stderr
    title, picture = result.stdout.split("\n", 1)
    assert title.startswith("GPipe, 2 processes, 3 micro-batches (F forward")
    assert picture == PICTURE


def test_the_docstring_shows_the_real_picture():
    for row in pipeline.draw("1F1B", 2, 4).splitlines()[1:3]:
        assert row in train_pp.__doc__


# train_pp.py, noting what each process computes in place of how long it takes.
RECORDER = """
import json, os
import pipeline, train_pp

class Recorder(pipeline.IdleMeter):
    computed = []

    def timed(self, function):
        def call(micro, *args, **kwargs):
            kind = "F" if "forward" in function.__name__ else "B" if kwargs.get("full_backward", True) else "I"
            kind = "W" if "weight" in function.__name__ else kind
            self.computed.append((function.__self__.stage_index, kind, micro))
            return function(micro, *args, **kwargs)

        return call

pipeline.IdleMeter = Recorder
train_pp.main()
with open(os.path.join(os.environ["RECORDS"], os.environ["RANK"]), "w") as file:
    json.dump(Recorder.computed, file)
"""


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_library_computes_in_the_pictures_order(run, torchrun, text_file, tmp_path, schedule):
    script = tmp_path / "record.py"
    script.write_text(RECORDER)
    flags = ["--model", "nano", "--batch-size", "8", "--data", text_file, "--schedule", schedule, "--steps", "1"]
    result = run(torchrun(2, script, *flags), timeout=300, PYTHONPATH=ROOT, RECORDS=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    for i, planned in enumerate(pipeline.order(schedule, 2, 8)):
        assert [tuple(call) for call in json.loads((tmp_path / str(i)).read_text())] == planned


# ---- errors -------------------------------------------------------------------------------------

ERRORS = {
    "too few micro-batches": (4, ["--batch-size", "6"], "1F1B on 4 processes needs at least 4 micro-batches"),
    "too few for a V": (
        4,
        ["--schedule", "ZBVZeroBubble", "--n-layer", "8", "--batch-size", "12"],
        "ZBVZeroBubble on 4 processes needs at least 7 micro-batches",
    ),
    "rounds": (
        2,
        ["--schedule", "Interleaved1F1B", "--batch-size", "10"],
        "takes micro-batches in 2 rounds, and 5 do not divide into 2",
    ),
    "batch": (4, ["--pipeline-parallel-size", "2", "--batch-size", "6"], "does not divide into micro-batches of 2"),
    "layers": (2, ["--n-layer", "1"], "nano has 1 layer(s): give at most 1 processes per pipeline"),
    "stages": (
        4,
        ["--schedule", "Interleaved1F1B"],
        "8 stages, 2 per process, and nano has 4 layer(s): give at most 2",
    ),
    "processes": (4, ["--pipeline-parallel-size", "3"], "a --pipeline-parallel-size that divides 4 (1, 2, 4)"),
    "split backward": (2, ["--schedule", "ZBVZeroBubble", "--compile"], "neither checkpointed nor compiled"),
    "schedule": (2, ["--schedule", "2F2B"], "invalid choice: '2F2B'"),
}


QUICK = "too few micro-batches"


@pytest.mark.parametrize("mistake", [QUICK, *(pytest.param(m, marks=pytest.mark.full) for m in ERRORS if m != QUICK)])
def test_a_mistake_is_one_line_on_every_rank(run, text_file, mistake):
    """Each rank is started alone: it must see the mistake before it waits for another."""
    world_size, flags, message = ERRORS[mistake]
    messages = set()
    for rank in (0, world_size - 1):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        result = run([sys.executable, "train_pp.py", *COMMON, *MICRO, "--data", text_file, *flags], timeout=60, **place)
        assert result.returncode == 2, result.stderr
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1, result.stderr
        messages.add(result.stderr)
    assert len(messages) == 1
