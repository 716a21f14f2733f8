"""collect.py and plot.py on logs made here: what a log says, how a run ended, what the tables and charts show."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

import collect

ROOT = Path(__file__).resolve().parent.parent
RUN = (
    "run: strategy={name}, model=nano, parameters=816640, n_layer=4, block_size=64, dropout=0.0, processes=2, "
    "device=cpu, precision=fp32, batch=8, micro_batch=2, optimizer=adamw, steps=20, data=a, b.txt, "
    "shared_gpu=False, torch=2.14.1+cu130"
)
METER = (
    "meter: step={step}/20, RunningAvgSamplesPerSec=163.186, CurrSamplesPerSec=170.5, MemAllocated={memory}GB, "
    "MaxMemAllocated=0.75GB, loss={loss}, Parameters=0.003042GB, Gradients=0.001521GB, OptimizerState=0.006084GB"
)
RESULT = "result: validation_loss=3.864486, validation_tokens=5120"


def lines(name="ddp", status="ok", reason="", result=RESULT):
    return [
        "sweep: model=nano, processes=2, device=cpu, batch=8, micro_batch=2, steps=20",
        f"command: torchrun --standalone --nproc_per_node=2 train_{name}.py --steps 20",
        RUN.format(name=name),
        METER.format(step=10, memory=0.5, loss=4.0),
        "[INFO] [timer.py] epoch=0, RunningAvgSamplesPerSec=99999, CurrSamplesPerSec=99999, MemAllocated=9.0GB",
        METER.format(step=20, memory=0.7, loss=3.5),
        result,
        f"status: status={status}, seconds=14.2, reason={reason}",
    ]


def write(folder, name="ddp", text=None, **options):
    (folder / "log").mkdir(exist_ok=True)
    path = folder / "log" / f"{name}.log"
    path.write_text("\n".join(text if text is not None else lines(name, **options)) + "\n")
    return path


def run_collect(folder, *arguments):
    command = [sys.executable, ROOT / "collect.py", folder, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_pairs_keep_commas_and_equal_signs_of_a_value():
    assert collect.pairs("a=1, text=b, c=d.txt, e=2GB") == {"a": "1", "text": "b", "c": "d.txt", "e": "2GB"}
    assert collect.pairs("text=one, two, new=x=y") == {"text": "one, two", "new": "x=y"}


def test_tables(tmp_path):
    write(tmp_path, "zero1")
    write(tmp_path, "ddp")
    result = run_collect(tmp_path)
    assert result.returncode == 0, result.stderr
    summary = rows(tmp_path / "summary.csv")
    assert [row["strategy"] for row in summary] == ["ddp", "zero1"]
    design = "strategy command model parameters processes device precision batch micro_batch steps samples_per_second"
    design += " tokens_per_second memory_average_gb memory_max_gb parameters_gb gradients_gb optimizer_gb"
    design += " model_states_gb final_loss validation_loss status reason"
    assert list(summary[0])[: len(design.split())] == design.split()
    row = summary[0]
    assert row["command"] == "torchrun --standalone --nproc_per_node=2 train_ddp.py --steps 20"
    assert (row["samples_per_second"], row["memory_max_gb"], row["final_loss"]) == ("163.186", "0.75", "3.5")
    assert float(row["tokens_per_second"]) == pytest.approx(163.186 * 64)
    assert float(row["memory_average_gb"]) == pytest.approx(0.6)
    assert float(row["model_states_gb"]) == pytest.approx(0.003042 + 0.001521 + 0.006084)
    assert (row["validation_loss"], row["data"], row["optimizer"]) == ("3.864486", "a, b.txt", "adamw")
    samples = rows(tmp_path / "samples.csv")
    assert [(row["strategy"], row["step"], row["loss"]) for row in samples[:2]] == [
        ("ddp", "10", "4"),
        ("ddp", "20", "3.5"),
    ]
    assert len(samples) == 4  # DeepSpeed's own line is not one of ours
    assert "RSS" in result.stdout
    markdown = run_collect(tmp_path, "--markdown").stdout
    assert "| ddp | 2 | 163.2 |" in markdown


def test_rows_that_did_not_finish_have_a_reason_and_no_numbers(tmp_path):
    write(tmp_path, "ddp")
    write(
        tmp_path, "zero3", [*lines("zero3")[:4], "status: status=timeout, seconds=9, reason=ended after 9 s, step 10"]
    )
    skipped = ["sweep: model=nano, processes=2", "status: status=skipped, seconds=0, reason=needs a, b=c"]
    write(tmp_path, "zero3_nvme", skipped)
    write(tmp_path, "zero0", lines("zero0")[:4])  # run.sh was killed before it wrote the status
    result = run_collect(tmp_path)
    assert result.returncode == 0, result.stderr
    summary = {row["strategy"]: row for row in rows(tmp_path / "summary.csv")}
    assert summary["zero3"]["status"] == "timeout"
    assert summary["zero3"]["reason"] == "ended after 9 s, step 10"
    assert summary["zero3_nvme"]["reason"] == "needs a, b=c"
    assert summary["zero0"]["status"] == "failed"
    assert "log/zero0.log" in summary["zero0"]["reason"]
    for name in ("zero3", "zero3_nvme", "zero0"):
        assert all(summary[name][key] == "-" for key in collect.NUMBERS + collect.LOSSES)
    assert all(cell != "" for row in summary.values() for cell in row.values())


def cut(text, what):
    return [line.replace(what, "") for line in text]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ([line for line in lines() if not line.startswith("meter")], "no meter line"),
        ([line for line in lines() if "step=20/20" not in line], "step 10/20"),
        ([line for line in lines() if not line.startswith("result")], "no result line"),
        (cut(lines(), ", MaxMemAllocated=0.75GB"), "no MaxMemAllocated"),
        (cut(lines(), ", Gradients=0.001521GB"), "no Gradients"),
        (cut(lines(), "validation_loss=3.864486, "), "no validation_loss"),
        (cut(lines(), "block_size=64, "), "no block_size"),
        ([line.replace("loss=3.5", "loss=what") for line in lines()], "loss=what"),
    ],
)
def test_a_missing_number_is_an_error_that_names_the_log(tmp_path, text, names):
    write(tmp_path, "zero1")
    write(tmp_path, "ddp", text)
    result = run_collect(tmp_path)
    assert result.returncode == 1
    assert "log/ddp.log" in result.stderr
    assert names in result.stderr
    assert "Traceback" not in result.stderr
    summary = {row["strategy"]: row for row in rows(tmp_path / "summary.csv")}
    assert (summary["ddp"]["status"], summary["zero1"]["status"]) == ("failed", "ok")
    assert names in summary["ddp"]["reason"]


def test_no_evaluation_is_not_a_missing_number(tmp_path):
    write(tmp_path, "ddp", result="result: validation_loss=none, validation_tokens=0")
    assert run_collect(tmp_path).returncode == 0
    assert rows(tmp_path / "summary.csv")[0]["validation_loss"] == "-"


def test_a_shared_gpu_is_marked(tmp_path):
    text = [line.replace("shared_gpu=False", "shared_gpu=True").replace("=cpu", "=H200") for line in lines()]
    write(tmp_path, "ddp", text)
    assert "speed means nothing" in run_collect(tmp_path).stdout
    assert rows(tmp_path / "summary.csv")[0]["device"] == "H200 (shared)"


def test_a_folder_without_logs(tmp_path):
    result = run_collect(tmp_path)
    assert result.returncode == 2
    assert "no log/*.log" in result.stderr


def judged(tmp_path, text, exit_code):
    path = write(tmp_path, "ddp", [line for line in text if not line.startswith("status")])
    return collect.judge(collect.read_log(path), path.read_text(), exit_code)


def test_how_a_run_ended(tmp_path):
    assert judged(tmp_path, lines(), 0) == ("ok", "")
    head = lines()[:4]
    traceback = [
        "Traceback (most recent call last):",
        "[rank1]: ValueError: heads do not divide",
        "ChildFailedError: x",
        "[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:36551",
    ]
    assert judged(tmp_path, head + traceback, 1) == ("failed", "ValueError: heads do not divide")
    assert judged(tmp_path, [*head, "train_ddp.py: error: no such text"], 2)[1] == "train_ddp.py: error: no such text"
    assert judged(tmp_path, head, 3) == ("failed", "exit code 3")
    cuda = "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB."
    assert judged(tmp_path, [*head, cuda], 1)[0] == "oom"
    assert judged(tmp_path, head, -9)[0] == "oom"
    assert judged(tmp_path, [*head, " exitcode  : -9 (pid: 4711)"], 1)[0] == "oom"
    # DeepSpeed's launcher returns 0 when a signal killed its child.
    status, reason = judged(tmp_path, head, 0)
    assert status == "failed"
    assert "log/ddp.log ends at step 10/20" in reason
    status, reason = judged(tmp_path, [*head, f"x.Error: {'long ' * 500}"], 1)
    assert len(reason) < 300


def test_charts(tmp_path):
    names = ["ddp", "zero3", "a_strategy_with_quite_a_long_name_of_its_own", *(f"extra{i}" for i in range(15))]
    for name in names:
        write(tmp_path, name)
    write(tmp_path, "zero0", [*lines("zero0")[:3], "status: status=oom, seconds=9, reason=out of memory"])
    single, none = tmp_path / "single", tmp_path / "none"
    single.mkdir()
    none.mkdir()
    write(single, "ddp")
    write(none, "ddp", status="failed", reason="something")
    for folder in (tmp_path, single, none):
        assert run_collect(folder).returncode == 0
        command = [sys.executable, ROOT / "plot.py", folder]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr
        assert "Warning" not in result.stderr
        for chart in ("model_states", "memory_max", "memory_average", "throughput", "loss"):
            data = (folder / f"{chart}.png").read_bytes()
            assert data.startswith(b"\x89PNG")
            assert len(data) > 5000
