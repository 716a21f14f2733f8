"""What machine this is and what it lacks, for run.sh.

    python machine.py facts --nproc 2 --model nano --text FILE    shell assignments; FILE describes the machine
    python machine.py ops CPUAdamBuilder AsyncIOBuilder           compiles DeepSpeed's C++ ops, once per machine

`ops` prints a line per op, its name and `ok`, or its name and what to install.
"""

import argparse
import contextlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import signal
import sys
import sysconfig
import time
from importlib.metadata import PackageNotFoundError, version


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    facts = commands.add_parser("facts")
    facts.add_argument("--nproc", type=int, help="processes (default: one per GPU; 2 without a GPU)")
    facts.add_argument("--model", help="a preset of gptlite.py (default: gpt3-small on a GPU, nano on a CPU)")
    facts.add_argument("--workload", default="gptlite", help="gptlite or resnet")
    facts.add_argument("--text", metavar="FILE", help="write the description of the machine there")
    facts.add_argument("--note", default="", help="the command that the description mentions")
    ops = commands.add_parser("ops")
    ops.add_argument("builders", nargs="+", help="names of DeepSpeed's op builders")
    args = parser.parse_args()
    if args.command == "ops":
        compile_ops(args.builders)
    else:
        print_facts(args)


# ---- facts --------------------------------------------------------------------------------------


def print_facts(args) -> None:
    try:
        import torch
    except ImportError as error:
        fail(f"{sys.executable} cannot import torch ({error}): install requirements.txt there, or unset PYTHON")
    import gptlite
    import workload

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None and accelerator.type != "mps":  # MPS has no collectives
        device, gpus = accelerator.type, torch.accelerator.device_count()
        gpu_name = torch.get_device_module(accelerator).get_device_name(0)
    else:
        device, gpus, gpu_name = "cpu", 0, ""
    if args.workload not in workload.N_OUTPUTS:
        fail(f"no workload is named {args.workload!r}: there are {', '.join(workload.N_OUTPUTS)}")
    model = args.model or ("gpt3-small" if gpus else "nano")
    if args.workload == "resnet":
        if args.model:
            fail("--model is for GPTlite and does not apply to --workload resnet: leave it out")
        model = workload.RESNET
    elif model not in gptlite.PRESETS:
        fail(f"no model is named {model!r}: there are {', '.join(gptlite.PRESETS)}")
    nproc = args.nproc or gpus or 2
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    kind = f"{gpus}x-{gpu_name}" if gpus else f"cpu-{cores}-core{'s' if cores > 1 else ''}"
    shared = "-shared" if gpus and nproc > gpus else ""
    slug = re.sub(r"[^a-z0-9.]+", "-", f"{kind}{shared}-{model}".lower()).strip("-")
    missing = ""
    if not sys.platform.startswith("linux"):
        missing = f"DeepSpeed needs Linux; this is {platform.system()}"
    elif importlib.util.find_spec("deepspeed") is None:
        missing = "deepspeed is not installed: pip install -r requirements.txt"
    facts = {"DEVICE": device, "GPUS": gpus, "CORES": cores, "MODEL": model, "NPROC": nproc, "MACHINE": slug}
    for name, value in (facts | {"NO_DEEPSPEED": missing}).items():
        print(f"{name}={shlex.quote(str(value))}")
    if args.text:
        with open(args.text, "w", encoding="utf-8") as file:
            file.write(description(args, gpus, gpu_name, cores, torch))


def description(args, gpus: int, gpu_name: str, cores: int, torch) -> str:
    """The machine in lines of `name: value`; no host name and no path. GB = 2**30 bytes."""
    import psutil

    def installed(package):
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    lines = {"machine": f"{gpus} x {gpu_name}" if gpus else f"CPU, {cores} cores"}
    if gpus:
        memory = torch.accelerator.get_memory_info(0)[1] if hasattr(torch.accelerator, "get_memory_info") else 0
        lines["gpu memory"] = f"{memory / 2**30:.0f} GB each" if memory else "unknown"
    lines |= {
        "cpu": f"{cpu_name()}, {cores} cores",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GB",
        "system": system_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": installed("deepspeed"),
        "date": time.strftime("%Y-%m-%d"),
        "command": args.note,
    }
    return "".join(f"{name}: {value}\n" for name, value in lines.items())


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def system_name() -> str:
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {platform.machine()}"
    except (OSError, KeyError):
        return f"{platform.system()} {platform.release()}, {platform.machine()}"


def fail(message: str):
    print(f"run.sh: error: {message}", file=sys.stderr)
    sys.exit(2)


# ---- DeepSpeed's ops ----------------------------------------------------------------------------


def compile_ops(builders: list[str]) -> None:
    """Load each op, which compiles it on this machine's first use of it; print what is in the way of one."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    compiler, missing = os.environ.get("CXX", "c++"), ""
    if shutil.which(compiler) is None:
        missing = f"DeepSpeed's C++ ops need a compiler ({compiler} is not there): on Debian, apt-get install g++"
    elif not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        missing = "DeepSpeed's C++ ops need the headers of Python: on Debian, apt-get install python3-dev"
    if missing:
        for name in builders:
            print(f"{name} {missing}")
        return
    from deepspeed.accelerator import get_accelerator

    for name in builders:
        try:
            builder = get_accelerator().create_op_builder(name)
            if builder is None:
                reason = f"DeepSpeed has no {name} for this device"
            elif name == "AsyncIOBuilder" and not builder.is_compatible(verbose=False):
                reason = "NVMe offload needs the libaio headers: on Debian, apt-get install libaio-dev"
            else:
                builder.load()
                reason = "ok"
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            reason = f"DeepSpeed's {name} does not compile: {lines[-1][:200]}"
        print(f"{name} {reason}", flush=True)


def stop(number: int, frame) -> None:
    """End ninja and its compilers, then this program."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.terminate()
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
