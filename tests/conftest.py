"""What the tests share: a text to train on, a way to run a command, and a check that nothing is left running."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
MARK = "GPTLITE_TESTS"  # in the environment of whatever the tests start, to recognise it by

# Before any test module imports torch: the children inherit it, and two processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ[MARK] = uuid.uuid4().hex
sys.path.insert(0, str(ROOT))  # the modules under test lie beside tests/


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """About 20,000 characters of English, with Tiny Shakespeare's 65 in it: the tests need no network."""
    from pydoc_data.topics import topics  # the text of Python's help()

    import gptlite

    text = "\n\n".join(topics[name] for name in sorted(topics))
    text = "".join(c for c in text if c in gptlite.CHARACTERS)[:20_000]
    path = tmp_path_factory.mktemp("text") / "english.txt"
    path.write_text(gptlite.CHARACTERS + text, encoding="utf-8")
    return path


def started_here(mark=None):
    """The processes that carry our mark (and another, if given), without this one and what started it."""
    own = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ() if process.pid not in own else {}
            alive = process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
        if alive and environment.get(MARK) == os.environ[MARK] and (mark is None or mark in environment.values()):
            found.append(process)
    return found


def end(processes):
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


@pytest.fixture(scope="session")
def run():
    """run(command, timeout=120, **env): run a list of arguments in the repository, in a session of its own.

    Returns a CompletedProcess with stdout and stderr as text. A variable given as None is taken out
    of the environment. At the timeout everything it started is killed, also what left its session,
    and the test fails with the output so far. Workers that outlive a command are killed and fail too.
    """

    def run(command, timeout=120, *, cwd=ROOT, input=None, **env):
        mark = uuid.uuid4().hex
        environment = {**os.environ, "GPTLITE_TEST_RUN": mark}
        for name, value in env.items():
            environment.pop(name, None)
            if value is not None:
                environment[name] = str(value)
        command = [str(word) for word in command]
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.PIPE if input is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            stdout, stderr = process.communicate(input, timeout=timeout)
        except BaseException as reason:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            end(started_here(mark))
            stdout, stderr = process.communicate()
            if not isinstance(reason, subprocess.TimeoutExpired):
                raise
            tail = "\n".join([*stdout.splitlines()[-30:], "-- stderr --", *stderr.splitlines()[-30:]])
            pytest.fail(f"{' '.join(command)} ran longer than {timeout} s:\n{tail}")
        # A worker notices within a second or two that its launcher is gone.
        deadline = time.monotonic() + 10
        while (left := started_here(mark)) and time.monotonic() < deadline:
            time.sleep(0.2)
        if left:
            names = [(p.pid, " ".join(p.cmdline())) for p in left if p.is_running()]
            end(left)
            pytest.fail(f"{' '.join(command)} left processes behind: {names}")
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)

    return run


@pytest.fixture(scope="session")
def torchrun():
    """torchrun(processes, script, *arguments): the command that launches them here, for `run`."""

    def command(processes, script, *arguments):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        return [*launcher, script, *arguments]

    return command


@pytest.fixture(scope="session", autouse=True)
def nothing_left_running():
    """At the end of the session no process that a test started is alive."""
    yield
    deadline = time.monotonic() + 10
    while (left := started_here()) and time.monotonic() < deadline:
        time.sleep(0.2)
    names = [(p.pid, " ".join(p.cmdline())) for p in left if p.is_running()]
    end(left)
    assert not names, f"the tests left processes behind: {names}"


@pytest.fixture
def mistake(monkeypatch, capsys):
    """mistake(main, *arguments, world_size=1): run a script's main to its exit code 2; returns its one line."""

    def call(main, *arguments, world_size=1):
        monkeypatch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("LOCAL_RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        for name in ("MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR"):  # main sets them: take them back afterwards
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        with pytest.raises(SystemExit) as stop:
            main()
        lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning:")]
        assert stop.value.code == 2
        assert len(lines) == 1, lines
        assert "error: " in lines[0]
        return lines[0]

    return call
