"""README.md shows what the code does: its generated parts are fresh, its links and flags exist."""

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
