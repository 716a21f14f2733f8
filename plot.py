"""The CSV tables of a sweep to charts.

    python plot.py results/cpu-2-cores-nano

Reads summary.csv and samples.csv (see collect.py), and writes beside them
    model_states.png      parameters, gradients and optimizer state that each process holds
    memory_max.png        peak memory of the process that needs most (on a CPU, resident set)
    memory_average.png    what stays allocated between steps
    activations.png       what autograd holds at most for the backward pass, where the logs say it
    throughput.png        samples per second of all processes together
    loss.png              loss over steps, all strategies in one picture
One bar per strategy, in the order of summary.csv. A strategy that did not finish has no bar but its status.
"""

import argparse
import csv
import sys
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's colours, which stay apart for colour-blind readers.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#767676"
STATES = [
    ("parameters_gb", "parameters", BLUE),
    ("gradients_gb", "gradients", ORANGE),
    ("optimizer_gb", "optimizer state", GREEN),
]
FAMILIES = {"ddp": "#0072B2", "fsdp": "#56B4E9", "zero": "#009E73", "offload": "#E69F00", "nvme": "#D55E00"}


def family_colour(strategy: str) -> str:
    """One colour for each kind of strategy, so that the groups are seen at once."""
    for family in ("ddp", "fsdp", "nvme", "offload", "zero"):
        if family in strategy:
            return FAMILIES[family]
    return "#CC79A7"


def read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def several(rows: list[dict], key: str) -> str:
    """The values of a column, most frequent first: `2`, or `2 or 4`."""
    values = [row[key] for row in rows if row[key] != "-"]
    return " or ".join(sorted(dict.fromkeys(values), key=lambda value: -values.count(value))) or "?"


def subtitle(folder: Path, rows: list[dict]) -> str:
    machine = several(rows, "device")
    if (folder / "machine.txt").exists():
        facts = dict(line.split(": ", 1) for line in (folder / "machine.txt").read_text().splitlines() if ": " in line)
        machine = facts.get("machine", machine)
    processes = several(rows, "processes").split(" or ")[0]  # names() tells where it is another number
    model = f"GPTlite {several(rows, 'model')} with block {several(rows, 'block_size')}"
    if several(rows, "block_size") == "?":  # not GPTlite
        model = several(rows, "model")
    return (
        f"{model} on {machine}, "
        f"{processes} process{'es' if processes != '1' else ''}, {several(rows, 'precision')}, "
        f"batch {several(rows, 'batch')}, micro-batch {several(rows, 'micro_batch')}"
    )


def unit(gigabytes: list[float]) -> tuple[str, float]:
    return ("GB", 1.0) if max(gigabytes, default=0) >= 1 else ("MB", 1024.0)


def figure(height: float, title: str, below: str):
    """Axes under a title and, smaller, what was measured where. Height in inches, without the titles."""
    head = 0.42 + 0.17 * (1 + below.count("\n"))
    height += head
    fig, axes = plt.subplots(figsize=(9, height), layout="constrained")
    fig.get_layout_engine().set(rect=(0, 0, 1, 1 - head / height))
    fig.text(0.012, 1 - 0.1 / height, title, va="top", fontsize=13, fontweight="bold")
    fig.text(0.012, 1 - 0.36 / height, below, va="top", fontsize=8.5, color="#444444")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_axisbelow(True)
    return fig, axes


def names(rows: list[dict]) -> list[str]:
    """The strategies, with the number of processes where it is not the usual one."""
    usual = several(rows, "processes").split(" or ")[0]
    return [
        row["strategy"] + ("" if row["processes"] in (usual, "-") else f"\n({row['processes']} processes)")
        for row in rows
    ]


def bars(path: Path, rows: list[dict], title: str, below: str, label: str, parts, factor: float, note) -> None:
    """A horizontal bar per row, its parts (column, name, colour or None) stacked; note(row) is written at its end."""
    fig, axes = figure((1.2 if len(parts) > 1 else 0.8) + 0.34 * len(rows), title, below)
    places = range(len(rows))
    ends = [0.0] * len(rows)
    for column, name, colour in parts:
        widths = [float(row[column]) * factor if row["status"] == "ok" else 0.0 for row in rows]
        colours = [colour or family_colour(row["strategy"]) for row in rows]
        axes.barh(places, widths, left=ends, height=0.66, color=colours, label=name)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    # DeepSpeed offloads the optimizer first, then gradients, then parameters: from the right end of the bar.
    aside = [float(row.get("offloaded_gb") or 0) * factor if row["status"] == "ok" else 0.0 for row in rows]
    if len(parts) > 1 and any(aside):
        lefts = [end - width for end, width in zip(ends, aside, strict=True)]
        style = {"facecolor": "none", "edgecolor": "white", "hatch": "////", "linewidth": 0}
        axes.barh(places, aside, left=lefts, height=0.66, **style)
    longest = max(ends, default=0) or 1.0
    for place, row, end in zip(places, rows, ends, strict=True):
        ok = row["status"] == "ok"
        text = note(row) if ok else textwrap.shorten(f"{row['status']}: {row['reason']}", 100, placeholder=" ...")
        style = {} if ok else {"color": GREY, "style": "italic"}
        axes.text(end + 0.01 * longest, place, text, va="center", fontsize=8.5, **style)
    reach = (
        max(
            end + 0.0094 * longest * len(note(row))
            for row, end in zip(rows, ends, strict=True)
            if row["status"] == "ok"
        )
        if any(ends)
        else longest
    )
    axes.set_xlim(0, max(reach, longest * (1.34 if len(parts) > 1 else 1.13)))
    axes.set_ylim(len(rows) - 0.4, -0.6)  # the first row on top
    axes.set_yticks(places, names(rows), fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(label)
    axes.grid(axis="x", color="#dddddd", linewidth=0.7)
    if len(parts) > 1:
        fig.legend(loc="outside lower center", ncols=len(parts), frameon=False, fontsize=9)
    fig.savefig(path, dpi=150)
    plt.close(fig)


def losses(path: Path, rows: list[dict], samples: list[dict], title: str, below: str) -> None:
    """All curves in one picture. Each is thinner than the one before and lies on top of it, so that curves
    that coincide show as nested stripes, and one that strays leaves them."""
    drawn = [row["strategy"] for row in rows if row["status"] == "ok"]
    fig, axes = figure(4.6, title, below)
    colours = plt.get_cmap("turbo")
    for i, strategy in enumerate(drawn):
        points = [(int(s["step"]), float(s["loss"])) for s in samples if s["strategy"] == strategy]
        share = i / max(1, len(drawn) - 1)
        axes.plot(
            *zip(*points, strict=True),
            color=colours(0.05 + 0.9 * share),
            linewidth=1.2 + 10 * (1 - share) if len(drawn) > 1 else 2,
            marker="o" if len(points) == 1 else None,
            solid_capstyle="butt",
            label=strategy,
        )
    if not drawn:
        axes.text(0.5, 0.5, "no strategy finished", transform=axes.transAxes, ha="center", color=GREY, style="italic")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("training loss (nats)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(color="#dddddd", linewidth=0.7)
    if drawn:
        fig.legend(loc="outside right center", frameon=False, fontsize=8.5)
    fig.savefig(path, dpi=150)
    plt.close(fig)


def spread(rows: list[dict], samples: list[dict]) -> str:
    """How far the curves are apart at most, relative to their mean, in words."""
    drawn = {row["strategy"] for row in rows if row["status"] == "ok"}
    at: dict[str, list[float]] = {}
    for sample in samples:
        if sample["strategy"] in drawn:
            at.setdefault(sample["step"], []).append(float(sample["loss"]))
    widths = [(max(v) - min(v)) / (sum(v) / len(v)) for v in at.values() if len(v) == len(drawn)]
    if len(drawn) < 2 or not widths:
        return ""
    return f"{len(drawn)} strategies; at no step are they further apart than {max(widths):.1g} of the loss"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder with summary.csv and samples.csv")
    args = parser.parse_args()
    try:
        rows, samples = read(args.folder / "summary.csv"), read(args.folder / "samples.csv")
    except FileNotFoundError as error:
        parser.error(f"there is no {error.filename}: run.sh or collect.py writes it")
    ok = [row for row in rows if row["status"] == "ok"]
    below = subtitle(args.folder, ok or rows)
    on_cpu = all(row["device"] in ("cpu", "-") for row in rows)
    memory = "resident set (RSS)" if on_cpu else "memory"

    name, factor = unit([float(row["model_states_gb"]) for row in ok])

    def states_note(row):
        size = float(row["model_states_gb"])
        each = {key: float(row[key]) * 2**30 / int(row["parameters"]) for key in ("offloaded_gb", "on_disk_gb")}
        text = f"{size * factor:.1f} {name}, {size * 2**30 / int(row['parameters']):.1f} B per parameter"
        if each["offloaded_gb"]:
            text += f", {each['offloaded_gb']:.1f} offloaded (hatched)"
        return text + (f", and {each['on_disk_gb']:.1f} on disk" if each["on_disk_gb"] else "")

    bars(
        args.folder / "model_states.png", rows, "Model states that each process holds", below,
        f"{name} per process", STATES, factor, states_note,
    )  # fmt: skip
    for column, title in [
        ("memory_max_gb", f"Maximum {memory} of a process"),
        ("memory_average_gb", f"Average {memory} of a process, between steps"),
    ]:
        name, factor = unit([float(row[column]) for row in ok])

        def note(row, column=column, name=name, factor=factor):
            return f"{float(row[column]) * factor:.{0 if name == 'MB' else 2}f} {name}"

        path = args.folder / f"{column.removesuffix('_gb')}.png"
        bars(path, rows, title, below, f"{name} per process", [(column, None, None)], factor, note)
    counted = [row for row in rows if row["status"] != "ok" or row.get("activations_gb", "-") != "-"]
    written = ["model_states", "memory_max", "memory_average", "throughput", "loss"]
    if any(row["status"] == "ok" for row in counted):
        name, factor = unit([float(row["activations_gb"]) for row in counted if row["status"] == "ok"])
        bars(
            args.folder / "activations.png", counted, "Activations that a process holds at most", below,
            f"{name} per process", [("activations_gb", None, None)], factor,
            lambda row: f"{float(row['activations_gb']) * factor:.2f} {name}",
        )  # fmt: skip
        written.insert(3, "activations")
    shared = any("(shared)" in row["device"] for row in rows)
    title = "Throughput, which means nothing here: the processes share a GPU" if shared else "Throughput"
    bars(
        args.folder / "throughput.png", rows, title, below, "samples per second, all processes together",
        [("samples_per_second", None, None)], 1.0, lambda row: f"{float(row['samples_per_second']):.4g}",
    )  # fmt: skip
    losses(args.folder / "loss.png", rows, samples, "Training loss over steps",
           below + ("\n" + apart if (apart := spread(rows, samples)) else ""))  # fmt: skip
    print(f"charts: {', '.join(f'{name}.png' for name in written)} in {args.folder.name}/")


if __name__ == "__main__":
    sys.exit(main())
