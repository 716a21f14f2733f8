"""run.sh: what it writes, how it ends, what it leaves behind.

Most tests sweep a copy of the repository (its path has a space in it) whose training scripts are
replaced by one that only prints what they print, and misbehaves as told by BEHAVE_<strategy>; the
launchers are the real ones. The rest trains for real, on the CPU.
"""

import contextlib
import csv
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import conftest
import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
CHARTS = [
    f"{name}.png" for name in ("model_states", "memory_max", "memory_average", "activations", "throughput", "loss")
]
STRATEGIES = [
    "ddp",
    "fsdp_no_shard",
    "fsdp_shard_grad_op",
    "fsdp_full_shard",
    "fsdp_hybrid_shard",
    "zero0",
    "zero1",
    "zero2",
    "zero3",
    "zero2_offload",
    "zero3_offload",
    "zero3_nvme",
    "tp",
    "tp_sp",
    "tp_dp",
    "pp_gpipe",
    "pp_1f1b",
    "pp_interleaved",
    "pp_zbv",
    "pp_1f1b_dp",
    "deepspeed_pp",
    "ddp_checkpointing",
    "ddp_activation_offload",
    "fsdp_checkpointing",
]
BY_NAME = ["ddp_bf16_hook", "ddp_fp16_hook", "ddp_powersgd_hook", "zeropp"]
BY_NAME += [f"zero{stage}_bucket_{size}" for stage in (2, 3) for size in ("5e5", "5e7", "5e8")]

FAKE = r"""
import os, signal, subprocess, sys, tempfile, time

def value(flag):
    return sys.argv[sys.argv.index(flag) + 1]

strategy = "fsdp_" + value("--sharding-strategy").lower() if "--sharding-strategy" in sys.argv else "ddp"
behave = os.environ.get("BEHAVE_" + strategy, "ok")
rank, steps = int(os.environ["RANK"]), int(value("--steps"))
open(os.path.join(tempfile.gettempdir(), "swap"), "w").write("x" * 1000)
if behave == "fail" and rank == 1:
    raise ValueError("the heads do not divide")
if behave == "memory":
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.")
if rank == 0 and behave != "silent":
    print(f"run: strategy={strategy}, model=nano, parameters=816640, block_size=64, dropout=0.0, "
          f"processes={os.environ['WORLD_SIZE']}, device=cpu, precision=fp32, batch={value('--batch-size')}, "
          f"micro_batch={value('--micro-batch-size')}, optimizer=adamw, steps={steps}, data=fake.txt, "
          f"shared_gpu=False, torch=2", flush=True)
    for step in range(1, steps + 1):
        print(f"meter: step={step}/{steps}, RunningAvgSamplesPerSec=100, CurrSamplesPerSec=100, "
              f"MemAllocated=0.5GB, MaxMemAllocated=0.75GB, loss={4 - step / 100}, Parameters=0.003042GB, "
              f"Gradients=0.003042GB, OptimizerState=0.006084GB, Activations=0.006198GB", flush=True)
        if behave in ("hang", "killed"):
            break
if behave == "hang":  # deaf to SIGTERM, with a child that has left the session
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    time.sleep(600)
if behave == "killed" and rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 0 and behave != "silent":
    print("result: validation_loss=3.9, validation_tokens=640", flush=True)
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the repository's sweep with scripts that only pretend to train."""
    folder = tmp_path_factory.mktemp("a path") / "with spaces"
    folder.mkdir()
    for name in [
        "run.sh",
        "setup.sh",
        "machine.py",
        "supervise.py",
        "collect.py",
        "plot.py",
        "gptlite.py",
        "workload.py",
        "requirements.txt",
    ]:
        shutil.copy(ROOT / name, folder / name)
    for name in ("train_ddp.py", "train_fsdp.py"):
        (folder / name).write_text(FAKE)
    return folder


@pytest.fixture
def environment(tmp_path):
    """No GPU, this interpreter, and a folder of the test's own for temporary files."""
    (tmp_path / "tmp").mkdir()
    return {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable, "TMPDIR": str(tmp_path / "tmp")}


def rows(folder, name="summary.csv"):
    with open(folder / name, newline="") as file:
        return list(csv.DictReader(file))


def statuses(folder):
    return {row["strategy"]: row["status"] for row in rows(folder)}


def test_help_list_and_wrong_options(run):
    # Before any set-up: with a python3 that cannot even start.
    bare = {"PATH": "/usr/bin:/bin", "PYTHON": "no-such-python"}
    result = run(["./run.sh", "--help"], **bare)
    assert result.returncode == 0
    assert "--micro-batch-size" in result.stdout
    result = run(["./run.sh", "--list"], **bare)
    assert (result.returncode, result.stdout.split()) == (0, STRATEGIES + BY_NAME)
    for arguments, message in [
        (["--nope"], "there is no option --nope"),
        (["zero9"], "there is no strategy zero9"),
        (["--steps"], "--steps needs a value"),
        (["--steps", "ten"], "--steps takes a whole number"),
        (["--nproc=0"], "--nproc takes a whole number"),
        (["--data", "no/such/file.txt"], "cannot read the data no/such/file.txt"),
    ]:
        result = run(["./run.sh", *arguments], **bare)
        assert result.returncode == 2
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1
    result = run(["./run.sh", "ddp"], **bare)
    assert result.returncode == 1
    assert "PYTHON" in result.stderr


def test_wrong_options_that_depend_on_the_machine(run, environment, tmp_path):
    for arguments, message in [
        (["--model", "gpt9"], "no model is named 'gpt9'"),
        (["--nproc", "3", "--batch-size", "8", "--micro-batch-size", "1"], "give a multiple of 3"),
    ]:
        result = run(["./run.sh", "--out", tmp_path / "out", *arguments], **environment)
        assert result.returncode == 2
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1
        assert not (tmp_path / "out").exists()


def test_every_ending_is_a_row(copy, run, environment, tmp_path):
    behaviour = {"no_shard": "fail", "shard_grad_op": "silent", "full_shard": "hang", "hybrid_shard": "killed"}
    behaviour = {f"BEHAVE_fsdp_{name}": behave for name, behave in behaviour.items()} | environment
    command = [copy / "run.sh", "--steps=4", "--out", "out"]
    result = run([*command, "--timeout", "12", "fsdp_full_shard"], 300, cwd=tmp_path, **behaviour)
    assert result.returncode == 1, result.stderr
    # Without a compiler DeepSpeed's ops cannot be built.
    names = ["ddp", "fsdp_no_shard", "fsdp_shard_grad_op", "fsdp_hybrid_shard", "zero3_nvme"]
    result = run([*command, *names], 300, cwd=tmp_path, CXX="no-such-compiler", **behaviour)
    out = tmp_path / "out"  # relative to where run.sh was called
    assert result.returncode == 1, result.stderr
    expected = {
        "ddp": ("ok", "-"),
        "fsdp_no_shard": ("failed", "ValueError: the heads do not divide"),
        "fsdp_shard_grad_op": ("failed", "log/fsdp_shard_grad_op.log has no meter line"),
        "fsdp_full_shard": ("timeout", "ended after 12 s"),
        "fsdp_hybrid_shard": ("oom", "SIGKILL"),
        "zero3_nvme": ("skipped", "apt-get install g++"),
    }
    summary = rows(out)
    assert [row["strategy"] for row in summary] == list(expected)
    for row in summary:
        status, reason = expected[row["strategy"]]
        assert (row["status"], reason in row["reason"]) == (status, True), row
        assert "" not in row.values()
        lines = (out / "log" / f"{row['strategy']}.log").read_text().splitlines()
        assert lines[0].startswith("sweep: ")
        assert lines[-1].startswith(f"status: status={status}, ")
        assert row["strategy"] in result.stdout  # the closing table has all rows
    assert summary[0]["command"].startswith(
        "torchrun --standalone --nproc_per_node=2 train_ddp.py --model nano --steps 4"
    )
    assert [row["processes"] for row in summary] == ["2", "2", "2", "2", "4", "2"]
    assert [row["step"] for row in rows(out, "samples.csv") if row["strategy"] == "ddp"] == ["1", "2", "3", "4"]
    for chart in CHARTS:
        assert (out / chart).read_bytes().startswith(b"\x89PNG")
    machine = (out / "machine.txt").read_text()
    assert "torch: " in machine
    assert "command: ./run.sh --steps=4" in machine
    # Nothing of this machine's folders is in what others will read, and nothing is left in them.
    for file in [*out.glob("*.csv"), *out.glob("log/*.log"), out / "machine.txt"]:
        assert str(copy) not in file.read_text(), file
        assert str(tmp_path) not in file.read_text(), file
    assert list((tmp_path / "tmp").iterdir()) == []
    assert sorted(p.name for p in (out / "log").iterdir()) == sorted(f"{name}.log" for name in expected)

    # Naming a strategy measures it again and keeps the other rows.
    command = [copy / "run.sh", "--steps=4", "--out", out, "fsdp_no_shard"]
    result = run(command, 120, cwd=tmp_path, **environment)
    assert result.returncode == 0, result.stderr
    assert statuses(out) == {name: status for name, (status, _) in expected.items()} | {"fsdp_no_shard": "ok"}


def start(command, environment, **options):
    """run.sh as a shell starts it, also where the tests themselves run with SIGINT ignored."""
    return subprocess.Popen(
        [str(word) for word in command],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **options,
    )


def wait_for(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.1)


@contextlib.contextmanager
def cleaned_up(process, mark):
    try:
        yield
    finally:
        process.kill()
        conftest.end(conftest.started_here(mark))
        process.communicate()


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        (signal.SIGINT, 130),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.full),
    ],
)
def test_a_signal_ends_every_worker(copy, environment, tmp_path, number, code):
    mark = f"signal-{number}"
    out, environment = tmp_path / "out", environment | {"GPTLITE_TEST_RUN": mark}
    names = ["ddp", "fsdp_no_shard", "fsdp_full_shard"]
    command = [copy / "run.sh", "--steps", "2", "--out", out, *names]
    process = start(command, environment | {"BEHAVE_fsdp_no_shard": "hang"})
    with cleaned_up(process, mark):
        hanging = lambda: any("step=1/2" in path.read_text() for path in out.glob("log/.fsdp_no_shard*"))  # noqa: E731
        wait_for(hanging, 120, "the second strategy's first step")
        assert len(conftest.started_here(mark)) >= 5
        process.send_signal(number)  # to run.sh alone
        started = time.monotonic()
        wait_for(lambda: not conftest.started_here(mark), 10, "the end of every process")
        output, _ = process.communicate(timeout=10)
        assert process.returncode == code, output
        assert time.monotonic() - started < 10
    assert "fsdp_full_shard" not in output
    assert statuses(out) == {"ddp": "ok"}  # what was finished is in the tables
    if number != signal.SIGKILL:  # then nobody is left to tidy up
        assert [path.name for path in (out / "log").iterdir()] == ["ddp.log"]
        assert list((tmp_path / "tmp").iterdir()) == []


def test_a_signal_while_the_ops_compile(environment, tmp_path):
    """An interrupted build leaves no compiler running."""
    mark = "compile"
    environment = environment | {"GPTLITE_TEST_RUN": mark, "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    process = start(
        [ROOT / "run.sh", "--steps", "2", "--out", tmp_path / "out", "zero2_offload"], environment, cwd=tmp_path
    )
    with cleaned_up(process, mark):
        compiling = lambda: any("cc1plus" in p.name() for p in conftest.started_here(mark))  # noqa: E731
        wait_for(compiling, 120, "the compiler")
        process.terminate()
        wait_for(lambda: not conftest.started_here(mark), 10, "the end of every process")
        output, _ = process.communicate(timeout=10)
        assert process.returncode == 143, output
    assert "takes minutes, once" in output
    assert list((tmp_path / "tmp").iterdir()) == []


def test_unwritable_folders(copy, run, environment, tmp_path):
    result = run([copy / "run.sh", "--out", "/proc/nope", "ddp"], **environment)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "cannot write to /proc/nope" in result.stderr


def test_a_sweep_trains_on_the_cpu_though_the_usual_port_is_taken(run, environment, text_file, tmp_path):
    """DDP, and DeepSpeed through its own launcher; called from another folder, while port 29500 is in use."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # in use by another: as good
            taken.bind(("127.0.0.1", 29500))
            taken.listen()
        command = [ROOT / "run.sh", "--steps", "6", "--data", text_file.name, "--out", tmp_path / "out"]
        command += ["ddp", "zero1", "--", "--eval-steps", "2"]
        result = run(command, 600, cwd=text_file.parent, **environment)
    assert result.returncode == 0, result.stdout + result.stderr
    summary = rows(tmp_path / "out")
    assert [(row["strategy"], row["status"], row["device"]) for row in summary] == [
        ("ddp", "ok", "cpu"),
        ("zero1", "ok", "cpu"),
    ]
    ddp, zero1 = summary
    assert ddp["data"] == text_file.name
    assert float(ddp["final_loss"]) == pytest.approx(float(zero1["final_loss"]), rel=1e-4)
    assert float(ddp["validation_loss"]) == pytest.approx(float(zero1["validation_loss"]), rel=1e-4)
    assert float(ddp["tokens_per_second"]) == pytest.approx(64 * float(ddp["samples_per_second"]), rel=1e-5)
    assert zero1["command"].startswith(
        "deepspeed --num_gpus=2 train_deepspeed.py --deepspeed_config ds_configs/zero1.json --model nano --steps 6"
    )
    assert "--dropout 0" in zero1["command"]
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.full
def test_two_sweeps_at_once(run, environment, text_file, tmp_path):
    results = {}

    def sweep(name):
        command = ["./run.sh", "--steps", "4", "--data", text_file, "--out", tmp_path / name, "zero1", "ddp"]
        results[name] = run([*command, "--", "--eval-steps", "2"], 900, **environment)

    threads = [threading.Thread(target=sweep, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in ("one", "two"):
        assert results[name].returncode == 0, results[name].stdout + results[name].stderr
        assert statuses(tmp_path / name) == {"ddp": "ok", "zero1": "ok"}


@pytest.mark.full
def test_the_whole_sweep(run, environment, text_file, tmp_path):
    """Every strategy that this machine can run, NVMe with a folder of the caller's; the losses agree."""
    (tmp_path / "nvme").mkdir()
    command = ["./run.sh", "--steps", "4", "--data", text_file, "--out", tmp_path / "out"]
    command += ["--nvme-path", tmp_path / "nvme", "--", "--eval-steps", "2"]
    result = run(command, 1800, **environment)
    assert result.returncode == 0, result.stdout + result.stderr
    summary = rows(tmp_path / "out")
    assert [row["strategy"] for row in summary] == STRATEGIES
    assert {row["status"] for row in summary} <= {"ok", "skipped"}
    losses = [float(row["final_loss"]) for row in summary if row["status"] == "ok"]
    assert len(losses) >= 5
    assert max(losses) - min(losses) < 1e-4 * min(losses)
    assert list((tmp_path / "nvme").iterdir()) == []
    assert list((tmp_path / "tmp").iterdir()) == []


# ---- set-up -------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path):
    """setup.sh with requirements that pip can install from a folder: no download of gigabytes."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    make_wheel(wheels, "tinyneed", "1.0")
    shutil.copy(ROOT / "setup.sh", tmp_path / "setup.sh")
    (tmp_path / "requirements.txt").write_text('# a comment\ntinyneed==1.0\nnever; sys_platform == "nowhere"\n')
    (tmp_path / "use.sh").write_text('cd "$(dirname "$0")"\n. ./setup.sh\necho "uses $PYTHON"\n')
    return tmp_path, {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PYTHON": None}


def make_wheel(folder, name, version):
    import zipfile

    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        information = f"{name}-{version}.dist-info"
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", "")


@pytest.mark.full
def test_setup_makes_completes_and_reuses(run, small):
    folder, environment = small
    script = ["bash", folder / "use.sh"]

    (folder / "requirements.txt").write_text("tinyneed==9.0\n")  # there is none: pip fails
    result = run(script, 120, **environment)
    assert result.returncode == 1
    assert "pip could not install" in result.stderr
    assert not (folder / ".venv" / "complete").exists()

    (folder / "requirements.txt").write_text("tinyneed==1.0\n")  # the next call completes what is there
    result = run(script, 120, **environment)
    assert result.returncode == 0, result.stderr
    assert "several GB" in result.stderr
    assert result.stdout.strip() == f"uses {folder}/.venv/bin/python"

    result = run(script, 20, **environment)  # and the one after has nothing to do
    assert (result.returncode, result.stderr) == (0, "")

    make_wheel(folder / "wheels", "tinymore", "1.0")
    with open(folder / "requirements.txt", "a") as file:
        file.write("tinymore\n")
    assert "several GB" in run(script, 120, **environment).stderr  # requirements.txt has changed

    # The environment that is active has everything: it is used, and no .venv is made.
    python = folder / ".venv" / "bin"
    (folder / ".venv").rename(folder / "active")
    result = run(script, 20, **environment, PATH=f"{folder}/active/bin:{os.environ['PATH']}")
    assert (result.returncode, result.stderr) == (0, "")
    assert str(folder / "active") in result.stdout
    assert not python.exists()

    # PYTHON wins over all of it.
    result = run(script, 20, **(environment | {"PYTHON": sys.executable}))
    assert result.stdout.strip() == f"uses {sys.executable}"


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        ('case "$*" in *ensurepip*) exit 1 ;; *) exec REAL "$@" ;; esac', "apt-get install python3-venv"),
        ('case "$*" in *"3, 10"*) exit 1 ;; *) exec REAL "$@" ;; esac', "Python 3.10 or newer is needed"),
    ],
    ids=["no ensurepip", "too old"],
)
def test_a_python_that_will_not_do_is_one_line(run, small, fake, message):
    folder, environment = small
    (folder / "bin").mkdir()
    (folder / "bin" / "python3").write_text("#!/bin/sh\n" + fake.replace("REAL", f'"{sys.executable}"') + "\n")
    (folder / "bin" / "python3").chmod(0o755)
    result = run(["bash", folder / "use.sh"], 60, **environment, PATH=f"{folder}/bin:/usr/bin:/bin")
    assert result.returncode == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (folder / ".venv").exists()


def test_no_process_is_taken_for_ours_by_its_name():
    """The checks for leftovers look at a mark in the environment, so other people's runs are left alone."""
    other = subprocess.Popen(["sleep", "30"], env={"PATH": os.environ["PATH"]})
    try:
        assert psutil.Process(other.pid) not in conftest.started_here()
    finally:
        other.kill()
        other.wait()
