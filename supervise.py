"""Runs one command of a sweep: appends what it prints to its log, ends it at its limit, says how it went.

    python supervise.py --log FILE --timeout SECONDS --label TEXT -- COMMAND ARGUMENT...

The command runs in a session of its own, with a folder for temporary files (swap files among them)
that is removed afterwards. Whatever ends it, none of its processes is left, also those that moved to
another session as torchrun's workers do. The log's last line becomes
`status: status=ok|failed|oom|timeout, seconds=..., reason=...`.

Exit code: 0 for ok, 1 for the others, 128 + N if a signal N ended this program: then there is no
status line. Paths of this machine and its name are left out of the log.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import psutil

import collect

MARK = "GPTLITE_RUN"  # in the environment of all of the command's processes, to recognise them by


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, required=True, help="appended to")
    parser.add_argument("--name", type=Path, help="the name that the log will have (default: its own)")
    parser.add_argument("--timeout", type=float, required=True, metavar="SECONDS")
    parser.add_argument("--label", default="", help="printed before the outcome")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()

    received = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: received.append(number))
    print(args.label, end="", flush=True)
    parent, mark, start = os.getppid(), uuid.uuid4().hex, time.monotonic()
    temporary = tempfile.mkdtemp(prefix="gptlite-")
    environment = {**os.environ, MARK: mark, "TMPDIR": temporary, "PYTHONUNBUFFERED": "1"}
    try:
        with open(args.log, "a", encoding="utf-8") as log:
            process = subprocess.Popen(
                args.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            reader = threading.Thread(target=copy, args=(process.stdout, log, args.label), daemon=True)
            reader.start()
            try:
                while process.poll() is None and not received:
                    if os.getppid() != parent:
                        received.append(signal.SIGTERM)  # run.sh was killed
                    if time.monotonic() - start > args.timeout:
                        break
                    time.sleep(0.1)
                exit_code = process.poll()  # None: it is to be ended
            finally:
                end(process, mark)
            reader.join(timeout=5)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    seconds = time.monotonic() - start
    if received:
        print("interrupted", flush=True)
        sys.exit(128 + received[0])

    log = collect.read_log(args.log)
    log.path = args.name or args.log
    if exit_code is None:
        done = f"step {log.meters[-1].get('step', '?')}" if log.meters else "no step"
        status, reason = "timeout", f"ended after {args.timeout:g} s (--timeout), {done} logged"
    else:
        status, reason = collect.judge(log, args.log.read_text(encoding="utf-8"), exit_code)
    with open(args.log, "a", encoding="utf-8") as file:
        file.write(f"status: status={status}, seconds={seconds:.1f}, reason={reason}\n")
    if status == "ok":
        numbers = collect.summary_numbers(log)
        reason = f"loss {numbers['final_loss']:.4f}, {numbers['samples_per_second']:.4g} samples/s"
    print(f"{status:<7} {seconds:5.0f} s   {reason}", flush=True)
    sys.exit(0 if status == "ok" else 1)


def copy(pipe, log, label: str) -> None:
    """Copy lines from the pipe to the log; on a terminal show how far the run is."""
    terminal = sys.stdout.isatty()
    places = private_names()
    for raw in pipe:
        line = raw.decode("utf-8", errors="replace").rstrip("\r\n")
        for place, name in places:
            line = place.sub(name, line)
        log.write(line + "\n")
        log.flush()
        if terminal and line.startswith("meter: "):
            values = collect.pairs(line.removeprefix("meter: "))
            print(f"\r{label}step {values.get('step')}, loss {values.get('loss')}\033[K", end="", flush=True)
    if terminal:
        print(f"\r{label}\033[K", end="", flush=True)


def private_names() -> list[tuple[re.Pattern, str]]:
    """This machine's paths and its name, and what stands for them in a log that others read."""
    here = str(Path(__file__).resolve().parent)
    places = {tempfile.gettempdir(): "/tmp", sys.prefix: "PYTHON", sys.base_prefix: "PYTHON", here: "."}
    places[str(Path.home())] = "~"
    ordered = sorted(places.items(), key=lambda item: -len(item[0]))  # the innermost first
    found = [(re.compile(re.escape(place) + r"(?=[/\s\"':,)]|$)"), name) for place, name in ordered if len(place) > 1]
    if len(socket.gethostname()) > 2:
        found.append((re.compile(rf"\b{re.escape(socket.gethostname())}\b"), "localhost"))
    return found


def end(process: subprocess.Popen, mark: str, patience: float = 2) -> None:
    """End the process, its descendants, and all that carry the mark: TERM, and KILL after `patience` seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):
        family = find(process, mark)
        for member in family:
            with contextlib.suppress(psutil.Error):
                member.send_signal(number)
        psutil.wait_procs(family, timeout=patience)


def find(process: subprocess.Popen, mark: str) -> list[psutil.Process]:
    """The living ones among them. Workers whose launcher is gone are no longer its descendants: hence the mark."""
    family = {}
    if process.returncode is None:  # else its number may be another's by now
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(process.pid)
            family = {member.pid: member for member in [root, *root.children(recursive=True)]}
    for member in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if member.pid != os.getpid() and member.environ().get(MARK) == mark:
                family[member.pid] = member
    return [member for member in family.values() if member.is_running() and not is_zombie(member)]


def is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


if __name__ == "__main__":
    main()
