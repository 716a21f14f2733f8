"""Activation memory: what is counted is what theory says, and none of the flags changes what is trained."""

import argparse
import json
import re
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
import training
from conftest import ROOT

import activations
import gptlite

CHECKPOINTING, OFFLOAD, COMPILE = "--activation-checkpointing ", "--activation-offload ", "--compile "
BOTH = CHECKPOINTING + OFFLOAD


def flags(string=""):
    parser = argparse.ArgumentParser()
    activations.add_flags(parser.add_argument)
    return parser.parse_args(string.split())


@pytest.fixture(autouse=True)
def no_hooks_are_left():
    yield
    activations.Saved.stop_hooks()


# ---- counted and predicted ----------------------------------------------------------------------

SHAPES = {
    "nano": (gptlite.get_config("nano"), 65, 4),
    "odd": (gptlite.GPTConfig(n_layer=3, n_embd=30, n_head=5, block_size=17), 7, 3),
    "one of each": (gptlite.GPTConfig(n_layer=1, n_embd=64, n_head=1, block_size=8), 65, 1),
    "long": (gptlite.GPTConfig(n_layer=2, n_embd=64, n_head=4, block_size=512), 65, 1),
}


@pytest.mark.parametrize("string", ["", CHECKPOINTING, OFFLOAD, BOTH])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_count_is_what_theory_says(shape, dropout, string):
    config, vocab_size, batch = SHAPES[shape]
    config = gptlite.replace(config, dropout=dropout)
    measured, _ = activations.measure(config, vocab_size, batch, flags(string))
    assert measured == activations.predict(config, vocab_size, batch, checkpointing=CHECKPOINTING in string)


def test_the_factor_grows_with_the_blocks():
    factors = []
    for n_layer in (1, 4, 12):
        config = gptlite.get_config("nano", n_layer=n_layer)
        plain, _ = activations.measure(config, 65, 2, flags())
        less, _ = activations.measure(config, 65, 2, flags(CHECKPOINTING))
        factors.append(plain / less)
    assert factors[0] == 1  # the one block is computed again: all of it is held then
    assert 2.5 < factors[1] < 3.5
    assert 5.5 < factors[2] < 7
    config = gptlite.get_config("gpt3-175b", dropout=0)
    factor = activations.predict(config, 65, 1) / activations.predict(config, 65, 1, checkpointing=True)
    assert 10 < factor < 12


def train(string, dropout=0.1, n_steps=3, n_layer=3):
    """Losses and gradients of a few steps, and what was saved."""
    config = gptlite.get_config("nano", n_layer=n_layer, dropout=dropout)
    model = gptlite.GPTlite(65, config)
    torch.manual_seed(1)
    saved, losses = activations.Saved(flags(string), torch.device("cpu"), model.blocks), []
    for step in range(n_steps):
        tokens = torch.randint(65, (2, 64), generator=torch.Generator().manual_seed(step))
        logits = model(tokens)
        held = saved.held
        losses.append(F.cross_entropy(logits.flatten(0, -2), tokens.flatten()))
        losses[-1].backward()
        if step == 0:
            assert held > 0
            assert (saved.held, saved.holders) == (0, {})  # the backward pass has dropped everything
            found = saved.count()
        else:
            assert saved.held == 0  # only the first step counts
    return [loss.item() for loss in losses], {n: p.grad for n, p in model.named_parameters()}, found


@pytest.mark.parametrize("string", [CHECKPOINTING, OFFLOAD, BOTH])
def test_the_same_masks_losses_and_gradients(string, monkeypatch):
    def reentrant(*_):
        raise AssertionError("this is the reentrant checkpoint")

    monkeypatch.setattr(torch.utils.checkpoint.CheckpointFunction, "forward", reentrant)
    losses, gradients, _ = train("")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other_losses, other_gradients, _ = train(string)
    assert other_losses == losses
    torch.testing.assert_close(other_gradients, gradients, rtol=0, atol=0)


def test_names_stay_as_they_are():
    model = gptlite.get_model(65, "nano")
    names = list(model.state_dict())
    activations.Saved(flags(BOTH + COMPILE), torch.device("cpu"), model.blocks)
    assert list(model.state_dict()) == names


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that torch.compile has made, which here are not compiled to C++: that takes a minute."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compile_ = torch.compile
    torch.compiler.reset()
    monkeypatch.setattr("torch.compile", lambda function: compile_(function, backend=backend))
    yield graphs
    torch.compiler.reset()


@pytest.mark.parametrize("string", [pytest.param(COMPILE, marks=pytest.mark.full), COMPILE + BOTH])
def test_compiled_blocks_share_one_graph(graphs, string):
    """There are more blocks than Dynamo keeps versions of one function (8)."""
    (losses, gradients, _), (expected, expected_gradients, _) = (train(s, 0.0, n_layer=9) for s in (string, ""))
    assert losses == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-3, atol=1e-6)
    assert len(graphs) == 1


@pytest.mark.full
def test_an_evaluation_compiles_few_graphs(graphs):
    """Without gradients is a graph, and the first other shape one for all others; a sample grows token by token."""
    model = gptlite.get_model(65, "nano")
    activations.Saved(flags(COMPILE), torch.device("cpu"), model.blocks)
    model(torch.zeros((4, 64), dtype=torch.int64)).sum().backward()
    assert len(graphs) == 1
    with torch.no_grad():
        for batch in (4, 4, 3, 2, 4):
            model(torch.zeros((batch, 64), dtype=torch.int64))
    model.generate(torch.zeros((1, 1), dtype=torch.int64), 40)
    assert len(graphs) <= 6


def test_an_evaluation_saves_nothing():
    model = gptlite.get_model(65, "nano", n_layer=1)
    saved = activations.Saved(flags(CHECKPOINTING), torch.device("cpu"), model.blocks)
    with torch.no_grad():
        model(torch.zeros((1, 8), dtype=torch.int64))
    assert saved.count() == {"Activations": 0, "BlockActivations": 0}


def test_offload_copies_a_storage_once_and_leaves_parameters_and_small_tensors():
    saved = activations.Saved(flags(OFFLOAD), torch.device("cpu"))
    large = torch.randn(3, 4, 100_000)
    q, k = large.unbind()[:2]
    packed = [saved.pack(q), saved.pack(k.t())]
    assert packed[0].packed.copy is packed[1].packed.copy
    torch.testing.assert_close(saved.unpack(packed[0]), q, rtol=0, atol=0)
    torch.testing.assert_close(saved.unpack(packed[1]), k.t(), rtol=0, atol=0)
    assert saved.held == large.numel() * 4
    weight = torch.nn.Parameter(torch.randn(100, 100))
    for tensor in (weight, weight.t(), torch.arange(10_000)):
        assert saved.pack(tensor) is tensor
    assert torch.is_tensor(saved.pack(torch.randn(10)).packed)


class Stream:
    """A stream whose copies are made only when somebody waits for an event behind them."""

    def __init__(self):
        self.waiting = []

    def __enter__(self):
        self.copy_ = torch.Tensor.copy_
        torch.Tensor.copy_ = lambda to, source, non_blocking: self.waiting.append((to, source))

    def __exit__(self, *_):
        torch.Tensor.copy_ = self.copy_

    def wait_stream(self, other):
        pass

    def record_event(self):
        return list(self.waiting)  # what is to be done before it

    def wait_event(self, event):
        for to, source in event:
            if any(to is other for other, _ in self.waiting):
                to.copy_(source)
                self.waiting = [copy for copy in self.waiting if copy[0] is not to]


@pytest.mark.parametrize("string", [OFFLOAD, BOTH])
@pytest.mark.parametrize("window", [0, 2**18, 2**30])
def test_offload_waits_for_its_copies(monkeypatch, string, window):
    """Without a GPU: what a GPU's streams do, on a CPU, as late as they may."""
    expected, gradients, plain = train("")
    stream, empty, left = Stream(), torch.empty, []

    class Elsewhere(activations.Offload):
        LEAST, WINDOW = 4096, window

        def __init__(self, device):
            super().__init__(device)
            self.stream = stream

        def leave(self, memory, event):
            super().leave(memory, event)
            left.append(memory.numel())
            assert self.leaving_bytes == sum(memory.numel() for memory, _ in self.leaving) <= window

        def let_go(self):
            memory, _ = self.leaving[0]
            super().let_go()
            assert not any(source is memory for _, source in stream.waiting)

    def garbage(*shape, pin_memory=False, **options):
        tensor = empty(*shape, **options)
        return tensor.fill_(255) if tensor.dtype == torch.uint8 else tensor

    monkeypatch.setattr(activations, "Offload", Elsewhere)
    monkeypatch.setattr("torch.empty", garbage)
    monkeypatch.setattr("torch.accelerator.current_stream", lambda device: stream)
    losses, other_gradients, found = train(string)
    assert losses == expected
    torch.testing.assert_close(other_gradients, gradients, rtol=0, atol=0)
    assert len(left) > 10
    assert 0 < found["Activations"] < 0.5 * plain["Activations"]
    assert found.get("BlockActivations", 1) > 0
    assert stream.waiting == []


def test_no_compiler_is_one_line(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    line = activations.find_problem(flags(COMPILE))
    assert "no-such-compiler" in line
    assert "apt install g++" in line
    assert activations.find_problem(flags(BOTH)) is None


# ---- every strategy trains the same -------------------------------------------------------------

SHAPE = "--model nano --batch-size 16 --steps 5 --warmup-steps 2 --log-every 1 --eval-steps 2 --micro-batch-size 4 "
DROPOUT, BF16 = "--dropout 0.2 ", "--precision bf16 "
SEQUENCE = "--sequence-parallel "


def parse(outputs):
    """Of each run: its losses, its validation loss and what its last meter line counts."""
    runs = []
    for part in outputs:
        last = re.findall(r"^meter: .*$", part, re.MULTILINE)[-1]
        runs.append(
            {
                "losses": [float(loss) for loss in re.findall(r"^meter: step=.*?, loss=([\d.]+)", part, re.MULTILINE)],
                "validation": float(re.search(r"validation_loss=([\d.]+)", part)[1]),
                **{name: float(value) for name, value in re.findall(r"(\w*Activations)=([\d.]+)GB", last)},
            }
        )
    return runs


@pytest.fixture
def several(run, torchrun, text_file):
    """several(script, command line, ...): two processes train by each of them; what they printed."""

    def several(script, *lines, timeout=400, **environment):
        lines = [[*(SHAPE + line).split(), "--data", text_file] for line in lines]
        outputs, stderr = training.several(run, torchrun, 2, script, lines, timeout, **environment)
        assert "reentrant" not in stderr
        assert "Warning" not in stderr, stderr
        return parse(outputs)

    return several


def same(run, plain, rel=1e-6):
    assert len(run["losses"]) == 5
    assert run["losses"] == pytest.approx(plain["losses"], rel=rel)
    assert run["validation"] == pytest.approx(plain["validation"], rel=rel)


def check_count(run, string, batch=4):
    """The meter line has what theory says, in GB with 6 decimals."""
    bytes_ = activations.predict(gptlite.get_config("nano"), 65, batch, checkpointing=CHECKPOINTING in string)
    assert run["Activations"] == pytest.approx(bytes_ / 2**30, abs=1e-6)


def test_ddp_trains_the_same(several):
    lines = ["", BOTH, DROPOUT, DROPOUT + BOTH, BF16, BF16 + CHECKPOINTING]
    plain, both, dropout, dropout_both, bf16, bf16_checkpointing = several("train_ddp", *lines)
    same(both, plain)
    same(dropout_both, dropout)
    same(bf16_checkpointing, bf16)
    assert abs(dropout["losses"][0] / plain["losses"][0] - 1) > 1e-4  # there was dropout, and bf16
    assert plain["losses"] != bf16["losses"]
    check_count(plain, "")
    check_count(both, BOTH)
    # Half of it in bf16, but for the norms' inputs; and autocast's copies of the weights, 2 bytes per parameter.
    copies = 2 * 816_640 / 2**30
    assert bf16["Activations"] - copies < 0.65 * plain["Activations"]


@pytest.mark.full
def test_resident_memory_falls_by_what_is_counted(run, text_file):
    peaks, counts = [], []
    for line in ("", CHECKPOINTING):
        shape = "--model baby --batch-size 8 --micro-batch-size 8 --steps 3 --log-every 1 --eval-steps 0 "
        done = run([sys.executable, "train_ddp.py", *(shape + line).split(), "--data", text_file], timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        counts += re.findall(r"step=3/3.* Activations=([\d.]+)GB", done.stdout)
        peaks += re.findall(r"step=3/3.* MaxMemAllocated=([\d.]+)GB", done.stdout)
    counted, resident = (float(values[0]) - float(values[1]) for values in (counts, peaks))
    assert counted > 0.15
    assert resident == pytest.approx(counted, rel=0.25)


@pytest.mark.full
def test_ddp_compiled(several, tmp_path):
    # Nine blocks are more than Dynamo compiles versions of one function: they must share one.
    environment = {"TORCHINDUCTOR_CACHE_DIR": tmp_path}
    plain, compiled = several("train_ddp", "--n-layer 9 ", "--n-layer 9 " + COMPILE, **environment)
    same(compiled, plain, rel=1e-4)


@pytest.mark.full
def test_fsdp_trains_the_same(several):
    plain, both, dropout, dropout_both = several("train_fsdp", "", BOTH, DROPOUT, DROPOUT + BOTH)
    same(both, plain)
    same(dropout_both, dropout)
    check_count(plain, "")
    check_count(both, BOTH)


@pytest.mark.full
def test_tensor_parallelism_trains_the_same(several):
    lines = ["", BOTH, SEQUENCE, SEQUENCE + BOTH, DROPOUT, DROPOUT + BOTH]
    plain, both, sequence, sequence_both, dropout, dropout_both = several("train_tp", *lines)
    same(both, plain)
    same(sequence_both, sequence)
    same(dropout_both, dropout)
    # A process has its heads' part of what lies inside the layers; --sequence-parallel cuts what lies between, too.
    assert 0.5 < sequence["Activations"] / plain["Activations"] < 0.95
    assert both["Activations"] < 0.5 * plain["Activations"]
    assert sequence_both["Activations"] < 0.5 * sequence["Activations"]


@pytest.mark.full
def test_pipelines_train_the_same(several):
    lines = ["", BOTH, DROPOUT, DROPOUT + BOTH, "--schedule GPipe ", "--schedule Interleaved1F1B " + BOTH]
    plain, both, dropout, dropout_both, gpipe, interleaved = several("train_pp", *lines)
    same(both, plain)
    same(dropout_both, dropout)
    same(interleaved, plain)
    # 1F1B holds two micro-batches at most, on the first process; GPipe all four, on the last with the head.
    config = gptlite.get_config("nano")
    a_block = (
        activations.predict(config, 65, 4) - activations.predict(gptlite.replace(config, n_layer=3), 65, 4)
    ) / 2**30
    assert plain["Activations"] == pytest.approx(2 * 2 * a_block, rel=1e-3)
    assert gpipe["Activations"] > 4 * 2 * a_block


@pytest.mark.full
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_deepspeed_trains_the_same(run, torchrun, text_file, tmp_path, stage):
    """By flags, and by a JSON that has DeepSpeed's section and nothing else."""
    config = json.loads((ROOT / "ds_configs" / f"{stage}.json").read_text())
    config["activation_checkpointing"] = {"cpu_checkpointing": True}
    (tmp_path / "section.json").write_text(json.dumps(config))
    plain = ["--deepspeed_config", f"ds_configs/{stage}.json", *SHAPE.split(), "--data", str(text_file)]
    section = ["--deepspeed_config", str(tmp_path / "section.json"), *plain[2:]]
    lines = [plain, [*plain, *BOTH.split()], section]
    outputs, stderr = training.several(run, torchrun, 2, "train_deepspeed", lines)
    assert "reentrant" not in stderr
    plain, by_flags, by_section = parse(outputs)
    for other in (by_flags, by_section):
        same(other, plain)
        check_count(other, BOTH)
    check_count(plain, "")
    assert 'config: --activation-checkpointing sets "activation_checkpointing"' in outputs[1]
    assert "config: --activation-offload changes nothing" in outputs[2]


@pytest.mark.full
def test_deepspeeds_pipeline_trains_the_same(run, torchrun, text_file):
    runs = []
    for line in ("", BOTH):
        command = ["train_deepspeed_pp.py", "--deepspeed_config", "ds_configs/pp_zero1.json", *(SHAPE + line).split()]
        done = run(torchrun(2, *command, "--data", text_file), timeout=300)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        runs += parse([done.stdout])
    plain, both = runs
    same(both, plain)
    assert both["Activations"] < 0.5 * plain["Activations"]


@pytest.mark.full
@pytest.mark.parametrize("script", ["train_fsdp", "train_tp", "train_pp"])
def test_the_others_compiled(several, tmp_path_factory, script):
    environment = {"TORCHINDUCTOR_CACHE_DIR": tmp_path_factory.getbasetemp() / "inductor"}
    plain, compiled, both = several(script, "", COMPILE, COMPILE + CHECKPOINTING, **environment)
    same(compiled, plain, rel=1e-4)
    same(both, plain, rel=1e-4)


@pytest.mark.full
def test_accumulation_does_not_change_the_count(several):
    one, four = several("train_ddp", "--micro-batch-size 2 --batch-size 4 ", "--micro-batch-size 2 --batch-size 16 ")
    check_count(one, "", batch=2)
    assert one["Activations"] == four["Activations"]


def test_the_command_prints_both(run):
    done = run([sys.executable, "activations.py", "nope"])
    assert done.returncode == 2
    assert "no model nope" in done.stderr
