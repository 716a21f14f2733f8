"""The logs of a sweep to two CSV tables, and the summary as text.

    python collect.py results/cpu-2-cores-nano               writes samples.csv and summary.csv, prints the table
    python collect.py results/cpu-2-cores-nano --markdown    prints it as Markdown

samples.csv has a row per `meter:` line of log/*.log, summary.csv a row per log. Units: GB = 2**30
bytes; throughput is samples, or tokens, of the global batch per second; `memory_average_gb` is the
mean of what was allocated at the end of the logged steps, `memory_max_gb` the peak since training
began, both of the process that needs most; on a CPU both are the resident set (RSS). `parameters_gb`,
`gradients_gb` and `optimizer_gb` are the model states that one process holds in memory, `model_states_gb`
their sum; `offloaded_gb` is the part of it that DeepSpeed keeps in CPU memory in place of a GPU's (without
a GPU: would keep), `on_disk_gb` what it has swapped out. `activations_gb` is what autograd holds at most for
the backward pass, `block_activations_gb` the part of it that one block holds while it is computed again.
Losses are in nats per token or image; `validation_accuracy` is the share of images whose class is found.

A row whose status is not `ok` has `-` for its numbers, and a reason. A number that is missing in a
log with status ok is an error: exit code 1, and the row says `failed`.
"""

import argparse
import csv
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent

# Column of samples.csv: key in a meter line.
METER = {
    "loss": "loss",
    "samples_per_second_running": "RunningAvgSamplesPerSec",
    "samples_per_second_current": "CurrSamplesPerSec",
    "memory_gb": "MemAllocated",
    "memory_max_gb": "MaxMemAllocated",
    "parameters_gb": "Parameters",
    "gradients_gb": "Gradients",
    "optimizer_gb": "OptimizerState",
}
SAMPLES = ["strategy", "step", *METER]
STATES = ["parameters_gb", "gradients_gb", "optimizer_gb"]
# What autograd holds at the peak of a micro-batch, and, with checkpointing, the part of it that is one block's. Logs of
# before these were counted do not have them.
ACTIVATIONS = {"activations_gb": "Activations", "block_activations_gb": "BlockActivations"}
# Only runs that offload print these: what of the states is in CPU memory in place of a GPU's, and what more is on disk.
OFFLOAD = {"offloaded_gb": "Offloaded", "on_disk_gb": "OnDisk"}
SETTINGS = ["model", "parameters", "processes", "device", "precision", "batch", "micro_batch", "steps"]
NUMBERS = [
    "samples_per_second",
    "tokens_per_second",
    "memory_average_gb",
    "memory_max_gb",
    *STATES,
    "model_states_gb",
]
LOSSES = ["final_loss", "validation_loss"]
ALSO = ["block_size", "image_size", "data", "optimizer", "torch", "seconds", "validation_accuracy"]
SUMMARY = ["strategy", "command", *SETTINGS, *NUMBERS, *LOSSES, "status", "reason", *ALSO, *OFFLOAD, *ACTIVATIONS]


class LogError(Exception):
    """A log lacks what it must have; the message names the log."""


@dataclass
class Log:
    """What one log says: its `sweep:`, `command:`, `run:`, `result:` and `status:` line, and all `meter:` lines."""

    path: Path
    settings: dict[str, str] = field(default_factory=dict)  # of the sweep, then of the run itself
    meters: list[dict[str, str]] = field(default_factory=list)
    result: dict[str, str] = field(default_factory=dict)
    status: str = ""
    reason: str = ""
    seconds: str = "-"

    @property
    def strategy(self) -> str:
        return self.path.stem

    @property
    def name(self) -> str:
        return f"log/{self.path.name}"


def pairs(text: str) -> dict[str, str]:
    """`a=1, b=x, y, c=2GB` -> {"a": "1", "b": "x, y", "c": "2GB"}: a value ends where the next key begins."""
    return dict(part.split("=", 1) for part in re.split(r", (?=\w+=)", text.strip()) if "=" in part)


def read_log(path: Path) -> Log:
    log = Log(path)
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        kind, _, rest = line.partition(": ")
        if kind in ("sweep", "run"):
            log.settings |= pairs(rest)
            if "text" in log.settings:  # what "data" was called in logs of before there were images
                log.settings["data"] = log.settings.pop("text")
        elif kind == "command":
            log.settings["command"] = rest
        elif kind == "meter":
            log.meters.append(pairs(rest))
        elif kind == "result":
            log.result = pairs(rest)
        elif kind == "status":
            values = pairs(rest.partition(", reason=")[0])
            log.status, log.seconds = values.get("status", ""), values.get("seconds", "-")
            log.reason = rest.partition(", reason=")[2]
    return log


def number(log: Log, values: dict[str, str], key: str, line: str) -> float:
    try:
        return float(values[key].removesuffix("GB"))
    except KeyError:
        raise LogError(f"{log.name}: no {key} in its {line} line") from None
    except ValueError:
        raise LogError(f"{log.name}: {key}={values[key]} in its {line} line is not a number") from None


def check_complete(log: Log) -> None:
    """Raise LogError unless the run got to its end: meter lines up to the last step, and the result."""
    if not log.meters:
        raise LogError(f"{log.name} has no meter line, though the run ended without an error")
    step, _, steps = log.meters[-1].get("step", "").partition("/")
    if not step or step != steps:
        raise LogError(
            f"{log.name} ends at step {log.meters[-1].get('step', '?')}, though the run ended without an error"
        )
    if not log.result:
        raise LogError(f"{log.name} has no result line, though the run ended without an error")
    sample_rows(log)
    summary_numbers(log)


def sample_rows(log: Log) -> list[dict]:
    rows = []
    for i, values in enumerate(log.meters):
        where = f"meter (number {i + 1})"
        try:
            row = {"strategy": log.strategy, "step": values.get("step", "").partition("/")[0]}
            if not row["step"].isdigit():
                raise LogError(f"{log.name}: no step in its {where} line")
            rows.append(row | {column: number(log, values, key, where) for column, key in METER.items()})
        except LogError:
            if log.status in ("", "ok"):
                raise
            break  # the last line of a run that was ended may be cut
    return rows


def summary_numbers(log: Log) -> dict:
    samples = sample_rows(log)
    last = samples[-1]
    rate = last["samples_per_second_running"]
    states = {key: last[key] for key in STATES}
    evaluated = log.result.get("validation_loss") != "none"  # none: --eval-steps 0
    return {
        "samples_per_second": rate,
        # images have no tokens
        "tokens_per_second": "-" if has_images(log) else rate * number(log, log.settings, "block_size", "run"),
        "memory_average_gb": sum(row["memory_gb"] for row in samples) / len(samples),
        "memory_max_gb": max(row["memory_max_gb"] for row in samples),
        **states,
        "model_states_gb": sum(states.values()),
        **{
            name: number(log, log.meters[-1], key, "meter") if key in log.meters[-1] else 0.0
            for name, key in OFFLOAD.items()
        },
        **{
            name: number(log, log.meters[-1], key, "meter") if key in log.meters[-1] else "-"
            for name, key in ACTIVATIONS.items()
        },
        "final_loss": last["loss"],
        "validation_loss": number(log, log.result, "validation_loss", "result") if evaluated else "-",
        "validation_accuracy": (
            number(log, log.result, "validation_accuracy", "result") if evaluated and has_images(log) else "-"
        ),
    }


def has_images(log: Log) -> bool:
    return "image_size" in log.settings


def summary_row(log: Log) -> dict:
    row = dict.fromkeys(SUMMARY, "-")
    row |= {key: log.settings[key] for key in ["command", *SETTINGS, *ALSO] if key in log.settings}
    if log.settings.get("shared_gpu") == "True":
        row["device"] += " (shared)"
    row |= {"strategy": log.strategy, "status": log.status, "reason": log.reason or "-", "seconds": log.seconds}
    if log.status == "ok":
        size = "image_size" if has_images(log) else "block_size"
        missing = [key for key in ["command", *SETTINGS, size, "data", "optimizer", "torch"] if row[key] == "-"]
        if missing:
            raise LogError(f"{log.name}: no {missing[0]} in its run line")
        check_complete(log)
        row |= summary_numbers(log)
    return row


# ---- how a run ended ----------------------------------------------------------------------------

OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|can't allocate memory|Cannot allocate memory", re.IGNORECASE
)
KILLED = re.compile(r"exit ?code\s*:?\s*-9\b|Signal 9 \(SIGKILL\)|return code = -9\b")
ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?((?:[\w.]*(?:Error|Exception|Interrupt)\b|[\w.]+\.py: error): .*)")


# What the other processes say when one has failed.
FOLLOWS = re.compile(
    r"ChildFailedError|Connection (closed|reset)|Broken pipe|DistBackendError|DistNetworkError|"
    r"SignalException|CalledProcessError"
)


def judge(log: Log, text: str, exit_code: int) -> tuple[str, str]:
    """Status and reason of a run that ended by itself with `exit_code` (-9: killed by signal 9)."""
    lines = [line for line in text.splitlines() if not line.startswith(("sweep:", "command:"))]
    # DeepSpeed's launcher exits with 0 when its child is killed: the log has to be complete, too.
    if exit_code == 0:
        try:
            check_complete(log)
            return "ok", ""
        except LogError as error:
            failure = str(error)
    else:
        failure = f"exit code {exit_code}"
    memory = [line.strip() for line in lines if OUT_OF_MEMORY.search(line)]
    if memory:
        return "oom", shorten(memory[-1])
    if exit_code in (-9, 137) or any(KILLED.search(line) for line in lines):
        return "oom", "a process was killed (SIGKILL): most likely the machine ran out of memory"
    errors = [found[1] for line in lines if (found := ERROR.match(line.strip()))]
    errors = [error for error in errors if not FOLLOWS.search(error)] or errors
    if errors:
        return "failed", shorten(errors[-1] if exit_code else f"{failure}: {errors[-1]}")
    return "failed", shorten(failure)


def shorten(line: str, length: int = 240) -> str:
    line = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", line).split())
    return line if len(line) <= length else line[: length - 3] + "..."


# ---- tables -------------------------------------------------------------------------------------


def in_order(names: list[str]) -> list[str]:
    """In the order of `run.sh --list`; names that it does not know come last."""
    listed = subprocess.run(["bash", str(HERE / "run.sh"), "--list"], capture_output=True, text=True, check=True)
    order = [line.split()[0] for line in listed.stdout.splitlines() if line.strip()]
    return sorted(names, key=lambda name: (order.index(name) if name in order else len(order), name))


def write_csv(path: Path, columns: list[str], rows: list[dict]) -> None:
    """Write the file as a whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: f"{v:.7g}" if isinstance(v, float) else v for key, v in row.items()} for row in rows)
    os.replace(temporary, path)


def memory_unit(gigabytes: list[float]) -> tuple[str, float]:
    """GB, or MB where the largest is below 1 GB."""
    return ("GB", 1.0) if max(gigabytes, default=0) >= 1 else ("MB", 1024.0)


def table(rows: list[dict]) -> list[list[str]]:
    """The summary as cells of text: the header, then a row per strategy."""
    ok = [row for row in rows if row["status"] == "ok"]
    unit, factor = memory_unit([row["memory_max_gb"] for row in ok])
    states_unit, states_factor = memory_unit([row["model_states_gb"] for row in ok])
    memory = "RSS" if all(row["device"] in ("cpu", "-") for row in rows) else "memory"
    header = [
        "strategy",
        "processes",
        "samples/s",
        "tokens/s",
        f"average {memory} ({unit})",
        f"maximum {memory} ({unit})",
    ]
    header += [f"{name} ({states_unit})" for name in ("parameters", "gradients", "optimizer", "model states")]
    header += [f"activations ({states_unit})", "final loss", "validation loss", "validation accuracy", "status"]
    cells = [header]
    for row in rows:
        if row["status"] != "ok":
            cells.append([row["strategy"], row["processes"], *["-"] * 12, f"{row['status']}: {row['reason']}"])
            continue
        cells.append(
            [
                row["strategy"],
                row["processes"],
                f"{rate:.1f}" if (rate := row["samples_per_second"]) >= 10 else f"{rate:.3g}",
                f"{rate:.0f}" if isinstance(rate := row["tokens_per_second"], float) else rate,
            ]
            + [f"{row[key] * factor:.2f}" for key in ("memory_average_gb", "memory_max_gb")]
            + [f"{row[key] * states_factor:.2f}" for key in (*STATES, "model_states_gb")]
            + [f"{v * states_factor:.2f}" if isinstance(v := row["activations_gb"], float) else v]
            + [f"{v:.4f}" if isinstance(v := row[key], float) else v for key in [*LOSSES, "validation_accuracy"]]
            + ["ok"]
        )
    # Texts have no accuracy, images no tokens, older logs no activations.
    columns = list(zip(*cells, strict=True))
    empty = [i for i, (name, *rest) in enumerate(columns) if name.startswith(ONLY_SOME) and set(rest) == {"-"}]
    return [[cell for i, cell in enumerate(line) if i not in empty] for line in cells]


ONLY_SOME = ("tokens/s", "activations", "validation accuracy")


def caption(rows: list[dict]) -> str:
    """What all runs have in common, in a line, and what they do not."""
    rows = [row for row in rows if row["status"] == "ok"] or rows
    shared, differing = [], []
    for key in ["model", "parameters", "block_size", "device", "precision", "batch", "micro_batch", "steps", "data"]:
        values = list(dict.fromkeys(row[key] for row in rows))
        if values == ["-"]:  # images have no block size
            continue
        (shared if len(values) == 1 else differing).append(f"{key.replace('_', ' ')} {' or '.join(values)}")
    line = ", ".join(shared)
    if differing:
        line += f"; the runs differ in: {', '.join(differing)}"
    if any("(shared)" in row["device"] for row in rows):
        line += "; processes share a GPU: memory is right, speed means nothing"
    return line


def as_text(cells: list[list[str]]) -> str:
    """Aligned columns; a header of several words is broken into lines."""
    heads = [
        re.sub(r" (?=\()|(?<=\w) (?=RSS|memory|loss|accuracy|states)", "\n", name).split("\n") for name in cells[0]
    ]
    height = max(map(len, heads))
    heads = [[""] * (height - len(head)) + head for head in heads]
    lines = [[head[i] for head in heads] for i in range(height)] + cells[1:]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads) - 1)] + [0]
    return "\n".join(
        "  ".join(
            c.ljust(w) if i in (0, len(widths) - 1) else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def as_markdown(cells: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(cells[0]) - 2) + ["---"]
    return "\n".join(
        "| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in [cells[0], rule, *cells[1:]]
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder of results, with log/*.log in it")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--quiet", action="store_true", help="write the CSV files, print no table")
    args = parser.parse_args()

    logs = {path.stem: path for path in args.folder.glob("log/*.log")}
    if not logs:
        parser.error(f"{args.folder} has no log/*.log: give a folder that run.sh made")
    samples, rows, errors = [], [], []
    for name in in_order(list(logs)):
        log = read_log(logs[name])
        if not log.status:
            log.status, log.reason = "failed", f"{log.name} has no status line: the sweep was killed"
        try:
            row = summary_row(log)
        except LogError as error:
            errors.append(str(error))
            log.status, log.reason = "failed", str(error)
            row = summary_row(log)
        rows.append(row)
        samples += sample_rows(log)
    write_csv(args.folder / "samples.csv", SAMPLES, samples)
    write_csv(args.folder / "summary.csv", SUMMARY, rows)
    if not args.quiet:
        print(caption(rows) + "\n")
        print(as_markdown(table(rows)) if args.markdown else as_text(table(rows)))
    for error in errors:
        print(f"collect.py: error: {error}", file=sys.stderr)
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
