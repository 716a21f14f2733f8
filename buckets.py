"""What DeepSpeed's communication buckets cost in memory: predicted from the config, beside what was measured.

    python buckets.py results/cpu-2-cores-nano-buckets     a table of a sweep made by run.sh --bucket-sizes

With contiguous_gradients (the default) ZeRO copies gradients into a buffer of reduce_bucket_size elements
and reduces it when it is full; with overlap_comm ZeRO-1 and 2 have two, to fill one while the other is sent.
The buffer is allocated whole, however small the model: at DeepSpeed's 5e8 elements 1.86 GB in fp32. A GPU's
memory is gone by that much. On a CPU a page counts as resident (RSS) only when something is written to it,
and a buffer is never filled beyond the model's gradients. allgather_bucket_size and
stage3_prefetch_bucket_size only bound how much is sent at once: no buffer has their size. GB = 2**30 bytes.
"""

import argparse
import os
import re
import sys
from pathlib import Path

import harness
from accounting import GB

SECTION = "zero_optimization"


def elements(string: str) -> int:
    """The type of --bucket-size: 500000 or 5e8."""
    value = float(string)
    if not 1 <= value < 2**40 or value != int(value):
        raise argparse.ArgumentTypeError(f"{string} is not a whole number of elements of at least 1")
    return int(value)


def name(size: int) -> str:
    """500000000 -> 5e8."""
    zeros = len(str(size)) - len(str(size).rstrip("0"))
    return f"{size // 10**zeros}e{zeros}" if zeros else str(size)


def apply(config: dict, size: int | None, path: str) -> list[str]:
    """Write --bucket-size into the config; a line for each key that it changes."""
    if size is None:
        return []
    zero = config.setdefault(SECTION, {})
    if not zero.get("stage"):
        harness.fail(f"--bucket-size is for ZeRO 1, 2 and 3: {path} has stage 0")
    lines = []
    keys = ["reduce_bucket_size", "allgather_bucket_size"]
    for key in keys + (["stage3_prefetch_bucket_size"] if zero["stage"] == 3 else []):
        old = zero.get(key)
        if old != size:
            what = f'sets "{SECTION}.{key}"' if old is None else f'replaces {old} ("{SECTION}.{key}" of {path})'
            lines.append(f"config: --bucket-size {size} {what}")
        zero[key] = size
    return lines


def predict(zero_config, bytes_per_element: int) -> int:
    """Bytes of the reduce buffers that one process allocates; zero_config is DeepSpeed's own, defaults filled in."""
    if zero_config.stage == 0 or not (zero_config.contiguous_gradients or zero_config.offload_optimizer):
        return 0
    double = zero_config.overlap_comm and zero_config.stage < 3
    return int(zero_config.reduce_bucket_size) * bytes_per_element * (2 if double else 1)


def check(buffers: int, path: str, device: str, processes: int) -> None:
    """End with one line where the buffers of `processes` on this machine are larger than its memory."""
    if device == "cpu":
        import psutil

        total, needed, where = psutil.virtual_memory().total, buffers * processes, f"{processes} processes on a machine"
    else:
        import torch

        if not hasattr(torch.accelerator, "get_memory_info"):  # an older PyTorch
            return
        total, needed, where = torch.accelerator.get_memory_info(0)[1], buffers, "a process on a GPU"
    if needed > total:
        harness.fail(
            f"{path}: buckets of this size need {needed / GB:.1f} GB for {where} with {total / GB:.1f} GB: give a "
            'smaller --bucket-size, or "reduce_bucket_size"'
        )


def describe(zero_config, buffers: int) -> str:
    """The line of the log that collects what was predicted."""
    return f"buckets: reduce_bucket_size={int(zero_config.reduce_bucket_size)}, buffers={buffers / GB:.6f}GB"


def table(folder: str) -> str:
    """A Markdown table of the bucket rows in a folder of results: predicted beside measured."""
    import collect

    lines = [
        "| strategy | buffers allocated (GB) | ever filled (GB) | maximum RSS (GB) | more RSS (GB) |",
        "|---|---:|---:|---:|---:|",
    ]
    smallest: dict[str, float] = {}
    for path in sorted((Path(folder) / "log").glob("*_bucket_*.log"), key=order):
        log = collect.read_log(path)
        found = re.search(r"^buckets: .*buffers=([\d.]+)GB", path.read_text(encoding="utf-8"), re.MULTILINE)
        if log.status != "ok" or not found:
            lines.append(f"| `{path.stem}` | {log.status}: {log.reason} | | | |")
            continue
        peak, allocated = collect.summary_numbers(log)["memory_max_gb"], float(found[1])
        size = 4 if log.settings["precision"] == "fp32" else 2
        filled = min(allocated, size * int(log.settings["parameters"]) / GB)
        first = smallest.setdefault(path.stem.split("_bucket_")[0], peak)
        cells = [f"{allocated:.4f}", f"{filled:.4f}", f"{peak:.3f}", f"{peak - first:.3f}"]
        lines.append(f"| `{path.stem}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def order(path) -> tuple[str, float]:
    stage, _, size = path.stem.partition("_bucket_")
    return stage, float(size)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a folder of results, with log/zero*_bucket_*.log in it")
    args = parser.parse_args()
    if not os.path.isdir(os.path.join(args.folder, "log")):
        parser.error(f"{args.folder} has no log/: give a folder that run.sh --bucket-sizes made")
    print(table(args.folder), end="")


if __name__ == "__main__":
    sys.exit(main())
