"""README.md shows what the code does: its generated parts are fresh, its links and flags exist."""

import csv
import re
import sys

from conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_generated_parts_are_fresh(run):
    done = run([sys.executable, "readme.py", "--check"], timeout=120)
    assert done.returncode == 0, done.stderr


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_flags_exist():
    sources = "".join(path.read_text(encoding="utf-8") for path in [*ROOT.glob("*.py"), *ROOT.glob("*.sh")])
    launchers = {"--nproc_per_node", "--num_gpus", "--standalone", "--nnodes", "--node_rank", "--master_addr"}
    for flag in set(re.findall(r"(?<![\w-])--[a-z_-]+[a-z]", README)) - launchers:
        assert flag in sources, flag


def test_every_module_and_strategy_is_named():
    for path in [*ROOT.glob("*.py"), *ROOT.glob("ds_configs/*.json")]:
        assert path.stem in README, path.name


def test_bytes_per_parameter_are_those_of_the_sweep():
    with open(ROOT / "results" / "cpu-2-cores-nano" / "summary.csv", encoding="utf-8") as file:
        measured = {row["strategy"]: row for row in csv.DictReader(file)}
    compared = 0
    for line in README.splitlines():
        # | `name`, `name` | script | holds | 8 (+ 2) | sends | when |
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) != 8 or not re.fullmatch(r"[\d.]+( \(\+ \d+\))?", cells[4]) or not cells[6].count(" "):
            continue
        claimed = sum(float(number) for number in re.findall(r"[\d.]+", cells[4]))
        for name in re.findall(r"`(\w+)`", cells[1]):
            found = float(measured[name]["model_states_gb"]) * 2**30 / int(measured[name]["parameters"])
            # What is not cut evenly: ZeRO-2's gradient that lies across two partitions, a pipeline's stages.
            assert abs(found - claimed) < 0.4, (name, found, claimed)
            compared += 1
    assert compared >= 15
