"""Tensor parallelism trains as one process does, and holds, sends and drops what it says."""

import json
import os
import re
import sys

import pytest
import torch.distributed as dist

import tensor_parallel
import train_tp

# The smallest shape with 4 heads; 65 characters do not divide by 2 or 4.
SHAPE = "--model nano --n-layer 2 --block-size 32 "
# A seed with which rounding stays small: with seed 0 and this SGD, one process with micro-batches of 8 and of 2
# differ by 1e-4 themselves after 20 steps (one ReLU that is near 0 goes one way or the other).
PARITY = SHAPE + "--batch-size 8 --steps 20 --warmup-steps 4 --log-every 1 --seed 1 "
ADAMW = "--optimizer adamw --lr 1e-3 "
SGD = "--optimizer sgd --lr 0.1 "
CLIP = "--clip 0.5 "  # the norm starts above 6
SEQUENCE = "--sequence-parallel "
BYTES = {"Parameters": 4, "Gradients": 4, "OptimizerState": 8}  # per parameter, in fp32 with AdamW
TWO = "--tensor-parallel-size 2 "


def micro(size):
    return f"--micro-batch-size {size} "


def parse(output):
    """Of each run in the output of several.py: losses by step, validation loss and tokens, strategy, states in GB."""
    runs = []
    for part in re.split(r"^== \d+$", output, flags=re.MULTILINE)[1:]:
        line = re.findall(r"^meter: .*$", part, re.MULTILINE)[-1]
        runs.append(
            {
                "losses": [float(loss) for loss in re.findall(r"^meter: step=.*?, loss=([\d.]+)", part, re.MULTILINE)],
                "validation": float(re.search(r"validation_loss=([\d.]+)", part)[1]),
                "tokens": int(re.search(r"validation_tokens=(\d+)", part)[1]),
                "strategy": re.search(r"strategy=(\w+)", part)[1],
                "states": {name: float(re.search(rf"{name}=([\d.]+)GB", line)[1]) for name in BYTES},
            }
        )
    return runs


def launch(run, command, command_lines, text_file):
    """`command` is how to start several.py (or watch_tp.py), without the command lines."""
    lines = json.dumps([[*line.split(), "--data", str(text_file)] for line in command_lines])
    done = run([*command, lines], timeout=480)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "destroy_process_group" not in done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def one_process(run, text_file):
    """What one process sees with the same global batch, by optimizer and clipping."""
    kinds = {"adamw": ADAMW, "sgd": SGD, "adamw clip": ADAMW + CLIP, "sgd clip": SGD + CLIP, "sgd by 2": SGD + micro(2)}
    lines = [PARITY + micro(8) + kind for kind in kinds.values()]
    output = launch(run, [sys.executable, "tests/several.py", "train_ddp"], lines, text_file)
    results = dict(zip(kinds, parse(output), strict=True))
    # What the comparisons below rest on: it repeats, it learns, and clipping makes a difference.
    assert results["sgd by 2"]["losses"] == pytest.approx(results["sgd"]["losses"], rel=1e-5)
    assert all(result["losses"][-1] < 0.9 * result["losses"][0] for result in results.values())
    assert abs(results["sgd"]["losses"][-1] / results["sgd clip"]["losses"][-1] - 1) > 1e-2
    return results


def check_parity(run, torchrun, text_file, one_process, processes, cases):
    """cases: strategy, which run of one process it must follow, arguments."""
    command = torchrun(processes, "tests/several.py", "train_tp")
    output = launch(run, command, [PARITY + arguments for _, _, arguments in cases], text_file)
    for (strategy, kind, arguments), result in zip(cases, parse(output), strict=True):
        expected = one_process[kind]
        assert result["strategy"] == strategy
        assert len(result["losses"]) == 20
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-4), arguments
        assert result["validation"] == pytest.approx(expected["validation"], rel=1e-4), arguments
        assert result["tokens"] == expected["tokens"]


def test_two_processes_follow_one(run, torchrun, text_file, one_process):
    cases = [
        ("tp", "sgd clip", SGD + CLIP + micro(2)),
        ("tp_sp", "adamw", ADAMW + micro(8) + SEQUENCE),
    ]
    check_parity(run, torchrun, text_file, one_process, 2, cases)


@pytest.mark.full
def test_two_processes_follow_one_in_the_other_ways(run, torchrun, text_file, one_process):
    cases = [
        ("tp", "sgd", SGD + micro(8)),
        ("tp", "adamw", ADAMW + micro(8)),
        ("tp", "adamw clip", ADAMW + CLIP + micro(2)),
        ("tp_sp", "sgd", SGD + micro(2) + SEQUENCE),
        ("tp_sp", "sgd clip", SGD + CLIP + micro(8) + SEQUENCE),
    ]
    check_parity(run, torchrun, text_file, one_process, 2, cases)


@pytest.mark.full
def test_four_processes_follow_one(run, torchrun, text_file, one_process):
    cases = [
        ("tp", "sgd", SGD + micro(8)),
        ("tp", "adamw clip", ADAMW + CLIP + micro(2)),
        ("tp_sp", "adamw", ADAMW + micro(8) + SEQUENCE),
        ("tp_sp", "sgd clip", SGD + CLIP + micro(2) + SEQUENCE),
    ]
    check_parity(run, torchrun, text_file, one_process, 4, cases)


@pytest.mark.full
def test_two_by_two_processes_follow_one(run, torchrun, text_file, one_process):
    cases = [
        ("tp_dp", "sgd", SGD + micro(4) + TWO),
        ("tp_dp", "adamw", ADAMW + micro(1) + TWO),
        ("tp_dp", "sgd clip", SGD + CLIP + micro(1) + TWO),
        ("tp_sp_dp", "sgd", SGD + micro(1) + TWO + SEQUENCE),
        ("tp_sp_dp", "adamw clip", ADAMW + CLIP + micro(4) + TWO + SEQUENCE),
    ]
    check_parity(run, torchrun, text_file, one_process, 4, cases)


def parameters_of_one_process(tensor_parallel_size, layers=4, features=128, block=64, vocabulary=65):
    """Of `nano`, on the process that holds most: the sharded ones, and those that each process has whole."""
    rows = -(-vocabulary // tensor_parallel_size)
    sharded_block = 3 * features**2 + features**2 + 2 * 4 * features**2 + 4 * features  # qkv, proj, up, down, up's bias
    sharded = 2 * rows * features + layers * sharded_block // tensor_parallel_size
    norms, row_wise_biases = (2 * layers + 1) * 2 * features, layers * 2 * features
    return sharded, norms + block * features + row_wise_biases


def test_launch_line(run, torchrun, text_file):
    arguments = (TWO + "--steps 2 --batch-size 2 --eval-steps 1").split()
    done = run([*torchrun(2, "train_tp.py", *arguments), "--data", text_file])
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Warning" not in done.stderr
    result = parse("== 0\n" + done.stdout)[0]
    assert (result["strategy"], result["tokens"]) == ("tp", 64)
    # Of 816,640 parameters (16 bytes each) 11,520 are whole on both: 1.4 %. Of the others this process has half,
    # and half a row more of both the token embedding and lm_head: 33 of 65 rows of 128 features.
    sharded, whole = parameters_of_one_process(2)
    assert (sharded, whole) == ((816_640 - 11_520) // 2 + 128, 11_520)
    for name, size in BYTES.items():
        assert result["states"][name] == pytest.approx(size * (sharded + whole) / 2**30, abs=1e-6), name


@pytest.mark.full
def test_bf16_keeps_weights_and_optimizer_in_fp32(run, torchrun, text_file):
    ways = (TWO, TWO + "--precision bf16", "", SEQUENCE + "--precision bf16")
    lines = [PARITY + "--steps 6 " + micro(4) + way for way in ways]
    results = parse(launch(run, torchrun(4, "tests/several.py", "train_tp"), lines, text_file))
    for fp32, bf16 in (results[:2], results[2:]):
        assert bf16["losses"] == pytest.approx(fp32["losses"], rel=1e-2)
        assert bf16["losses"] != fp32["losses"]
        assert bf16["states"] == fp32["states"]


@pytest.fixture(scope="module")
def watched(run, torchrun, text_file, tmp_path_factory):
    """What each of four processes dropped and sent, by kind of run and rank (see watch_tp.py)."""
    folder = tmp_path_factory.mktemp("watched")
    kinds = {"2 x 2": TWO, "1 x 4": "", "2 x 2 sequence": TWO + SEQUENCE, "1 x 4 sequence": SEQUENCE}
    base = SHAPE + "--dropout 0.5 --batch-size 2 --steps 1 --eval-steps 0 "
    launch(run, torchrun(4, "tests/watch_tp.py", folder), [base + kind for kind in kinds.values()], text_file)
    return {
        name: [json.loads((folder / f"{number}-{rank}.json").read_text()) for rank in range(4)]
        for number, name in enumerate(kinds)
    }


@pytest.mark.full
def test_dropout_agrees_within_a_tensor_parallel_group_and_differs_elsewhere(watched):
    def masks(kind, where):  # [rank][mask]
        return [process[where] for process in watched[kind]]

    # Between the layers a group holds the same activations, and drops the same of them.
    between = masks("2 x 2", "between")
    assert between[0] == between[1]
    assert between[2] == between[3]
    assert not set(between[0]) & set(between[2])
    assert len(set(between[0])) == len(between[0]) == 5  # the embeddings, and two in each of two blocks
    between = masks("1 x 4", "between")
    assert between[0] == between[1] == between[2] == between[3]
    assert len(set(between[0])) == len(between[0]) == 2 * 5  # two micro-batches
    # Heads, and parts of a sequence, are each on one process, and have masks of their own.
    for where, kinds in (("attention", watched), ("between", ("2 x 2 sequence", "1 x 4 sequence"))):
        for kind in kinds:
            drawn = [mask for process in masks(kind, where) for mask in process]
            assert len(set(drawn)) == len(drawn) > 0, (where, kind)


@pytest.mark.full
def test_what_is_sent(watched):
    layers = 2
    # Two per block and direction; the embedding, the input gradient of lm_head; the loss: the largest
    # logit, the sum of the exponentials and the target's logit. No logits, and no weights.
    loss = 3
    plain = {"all_reduce": 4 * layers + 2 + loss}
    # Each is now an all-gather and a reduce-scatter; the positions' gradient is gathered, the norms' are added up.
    norms = 2 * (2 * layers + 1)
    sequence = {
        "reduce_scatter_tensor": 4 * layers + 2,
        "all_gather_into_tensor": 4 * layers + 3,
        "all_reduce": loss + norms,
    }
    for process in range(4):
        assert watched["1 x 4"][process]["collectives"] == plain
        assert watched["1 x 4 sequence"][process]["collectives"] == sequence


ERRORS = [
    (4, "--tensor-parallel-size 3", "4 processes do not divide into groups of 3: give another --tensor-parallel-size"),
    (2, "--tensor-parallel-size 4", "2 processes do not divide into groups of 4: give another --tensor-parallel-size"),
    (8, "", "the 4 heads of nano do not divide over 8 processes: give a --tensor-parallel-size that divides 4"),
    (4, "--model baby", "the 6 heads of baby do not divide over 4 processes: give a --tensor-parallel-size that divi"),
    (4, "--sequence-parallel --block-size 30", "a block of 30 tokens does not divide over 4 processes"),
    (4, "--tensor-parallel-size 2 --batch-size 9 --micro-batch-size 3", "on 2 data-parallel processes (3 x 2 = 6)"),
    (2, "--tensor-parallel-size 0", "0 is not at least 1"),
]


@pytest.mark.parametrize(("processes", "arguments", "message"), ERRORS)
def test_wrong_values_are_one_line_on_every_rank(monkeypatch, capsys, processes, arguments, message):
    monkeypatch.setattr(dist, "init_process_group", lambda *_: pytest.fail("it would wait for the others"))
    monkeypatch.setattr(sys, "argv", ["train_tp.py", "--device", "cpu", *arguments.split()])
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # left as they are, whatever main() sets
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    lines = set()
    for rank in (0, processes - 1):
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", processes)):
            monkeypatch.setenv(name, str(value))
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        with pytest.raises(SystemExit) as stop:
            train_tp.main()
        assert stop.value.code == 2
        lines.add(capsys.readouterr().err)
    (line,) = lines
    assert line.count("\n") == 1
    assert message in line


def test_a_vocabulary_too_small_to_share(monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ended.append(True))
    for vocabulary, size in ((65, 1), (65, 2), (65, 4), (4, 4), (3, 2)):
        tensor_parallel.check_vocabulary(vocabulary, size)
    assert not ended
    with pytest.raises(SystemExit) as stop:
        tensor_parallel.check_vocabulary(5, 4)  # 2, 2, 1 and none
    assert (stop.value.code, ended) == (2, [True])
    assert "a vocabulary of 5 characters leaves some of 4" in capsys.readouterr().err
