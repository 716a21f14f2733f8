"""train_pp.py follows one process in every schedule, alone and with data parallelism, and says what it cannot do."""

import json
import re
import sys

import pytest
import torch
from conftest import ROOT

import gptlite
import pipeline
import train_pp

SCHEDULES = list(pipeline.SCHEDULES)
ADAMW = ("--optimizer", "adamw", "--lr", "1e-3")
SGD = ("--optimizer", "sgd", "--lr", "0.1")
OPTIMIZERS = pytest.mark.parametrize("optimizer", [ADAMW, SGD], ids=["adamw", "sgd"])
SMALL = ["--device", "cpu", "--model", "nano", "--block-size", "16", "--dropout", "0", "--log-every", "1"]
SMALL += ["--batch-size", "16", "--micro-batch-size", "2", "--steps", "20", "--warmup-steps", "4"]


def read(output: str) -> dict:
    """What a script printed: the losses, the first meter line, and the run:, result: and bubble: lines as dicts."""
    found = {"losses": [float(loss) for loss in re.findall(r"^meter: .* loss=([^,\s]+)", output, re.MULTILINE)]}
    for name in ("run", "meter", "result", "bubble"):
        line = re.search(rf"^{name}: (.*)$", output, re.MULTILINE)
        found[name] = dict(pair.split("=", 1) for pair in line[1].split(", ") if "=" in pair) if line else None
    return found


@pytest.fixture(scope="session")
def one_process(run, text_file):
    """one_process(*flags): the reference, a run of train_ddp.py on one process, started once for each set of flags."""
    done = {}

    def reference(*flags):
        if flags not in done:
            result = run([sys.executable, "train_ddp.py", *SMALL, "--data", text_file, *flags], timeout=300)
            assert result.returncode == 0, result.stderr[-3000:]
            done[flags] = read(result.stdout)
            assert len(done[flags]["losses"]) == 20
        return done[flags]

    return reference


@pytest.fixture(scope="session")
def train(run, torchrun, text_file):
    """train(processes, *flags): what train_pp.py (or another script) printed there."""

    def train(processes, *flags, script="train_pp.py"):
        result = run(torchrun(processes, script, *SMALL, "--data", text_file, *flags), timeout=420)
        assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
        assert "destroy_process_group" not in result.stderr
        return read(result.stdout)

    return train


def assert_same(found, reference):
    """Each step's loss, the validation loss and its tokens are those of one process."""
    assert found["losses"] == pytest.approx(reference["losses"], rel=1e-4)
    assert reference["losses"][-1] < 0.95 * reference["losses"][0], "the model must learn, or any optimizer agrees"
    assert float(found["result"]["validation_loss"]) == pytest.approx(
        float(reference["result"]["validation_loss"]), rel=1e-4
    )
    assert found["result"]["validation_tokens"] == reference["result"]["validation_tokens"]
    assert found["run"]["parameters"] == reference["run"]["parameters"]


# ---- parity -------------------------------------------------------------------------------------


def test_two_stages_follow_one_process(one_process, train):
    found, reference = train(2, *SGD), one_process(*SGD)
    assert_same(found, reference)
    assert found["run"]["strategy"] == "pp_1f1b"
    for states in ("Parameters", "Gradients", "OptimizerState"):
        whole, largest = (float(run["meter"][states].removesuffix("GB")) for run in (reference, found))
        assert largest <= 0.55 * whole, f"each of two processes holds about half of the {states}"
    assert found["bubble"]["predicted"] == "0.1111"
    assert 0 < float(found["bubble"]["measured"]) < 1


@pytest.mark.full
@OPTIMIZERS
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_follow_one_process(one_process, train, schedule, optimizer):
    found = train(2, *optimizer, "--schedule", schedule)
    assert_same(found, one_process(*optimizer))
    assert found["run"]["strategy"] == pipeline.SCHEDULES[schedule].strategy


@pytest.mark.full
@OPTIMIZERS
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_processes_follow_one(one_process, train, schedule, optimizer):
    layers = ("--n-layer", "8") if pipeline.SCHEDULES[schedule].stages_per_process == 2 else ()
    assert_same(train(4, *optimizer, "--schedule", schedule, *layers), one_process(*optimizer, *layers))


@pytest.mark.full
@OPTIMIZERS
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_data_parallel_pipelines_follow_one_process(one_process, train, schedule, optimizer):
    found = train(4, *optimizer, "--schedule", schedule, "--pipeline-parallel-size", "2")
    assert_same(found, one_process(*optimizer))
    assert found["run"]["strategy"] == pipeline.SCHEDULES[schedule].strategy + "_dp"
    assert found["bubble"]["micro_batches"] == "4", "the batch is shared between the two pipelines"


@pytest.mark.full
def test_gradients_are_clipped_by_the_norm_over_all_stages(one_process, train):
    flags = (*SGD, "--clip", "0.2")
    reference = one_process(*flags)
    assert reference["losses"] != one_process(*SGD)["losses"], "the gradient must be large enough to be clipped"
    assert_same(train(4, *flags, "--pipeline-parallel-size", "2"), reference)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_bf16_keeps_fp32_weights(one_process, train, schedule):
    found, reference = train(2, *ADAMW, "--precision", "bf16", "--schedule", schedule), one_process(*ADAMW)
    assert found["losses"] == pytest.approx(reference["losses"], rel=0.02)
    assert found["losses"] != pytest.approx(reference["losses"], rel=1e-6)
    state, parameters = (float(found["meter"][name].removesuffix("GB")) for name in ("OptimizerState", "Parameters"))
    assert state == pytest.approx(2 * parameters, rel=0.01), "both of AdamW's moments in fp32, as the weights"


# ---- stages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_stages", [1, 2, 3, 4, 8])
def test_stages_are_the_whole_model(n_stages):
    config = gptlite.get_config("nano", n_layer=8)
    blocks = pipeline.split_blocks(config, 65, n_stages)
    assert [i for stage in blocks for i in stage] == list(range(8))
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
    stages = [train_pp.Stage(65, config, 3, stage, autocast=False) for stage in blocks]
    whole = gptlite.GPTlite(65, config, 3)
    weights = {name: weight for stage in stages for name, weight in stage.state_dict().items()}
    assert sum(len(stage.state_dict()) for stage in stages) == len(weights)
    torch.testing.assert_close(weights, dict(whole.state_dict()), rtol=0, atol=0)
    tokens = torch.arange(20).view(2, 10)
    x = tokens
    for stage in stages:
        x = stage(x)
    torch.testing.assert_close(x, whole(tokens), rtol=0, atol=0)


def test_a_large_vocabulary_counts_as_blocks():
    """The head of a vocabulary of 50,257 costs as much as 4 blocks of this width: the last stage gets fewer."""
    blocks = pipeline.split_blocks(gptlite.get_config("gpt3-small", block_size=512), 50257, 4)
    assert [len(stage) for stage in blocks] == [4, 4, 4, 0]
    assert [len(stage) for stage in pipeline.split_blocks(gptlite.get_config("gpt3-small"), 65, 4)] == [3, 3, 3, 3]


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
    flags = [*SMALL, "--data", text_file, "--schedule", schedule, "--steps", "1", "--eval-steps", "0"]
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
    "layers": (2, ["--n-layer", "1"], "nano has 1 layers: give at most 1 processes per pipeline"),
    "stages": (4, ["--schedule", "Interleaved1F1B"], "8 stages, 2 per process, and nano has 4 layers: give at most 2"),
    "processes": (4, ["--pipeline-parallel-size", "3"], "a --pipeline-parallel-size that divides 4 (1, 2, 4)"),
    "schedule": (2, ["--schedule", "2F2B"], "invalid choice: '2F2B'"),
}


@pytest.mark.parametrize(
    "mistake", ["too few micro-batches", *(pytest.param(m, marks=pytest.mark.full) for m in ERRORS)]
)
def test_a_mistake_is_one_line_on_every_rank(run, text_file, mistake):
    """Each rank is started alone: it must see the mistake before it waits for another."""
    world_size, flags, message = ERRORS[mistake]
    messages = set()
    for rank in (0, world_size - 1):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        result = run([sys.executable, "train_pp.py", *SMALL, "--data", text_file, *flags], timeout=60, **place)
        assert result.returncode == 2, result.stderr
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1, result.stderr
        messages.add(result.stderr)
    assert len(messages) == 1
