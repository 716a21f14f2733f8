"""Writes the generated parts of README.md, so that what it shows is what the code does.

    python readme.py            rewrite the parts between <!-- begin: ... --> and <!-- end -->
    python readme.py --check    exit with 1, and name them, if parts are out of date

A part names what it shows: `diff A B` (two scripts without their docstrings), `table FOLDER` (a
sweep's summary.csv), `csv FILE` (a table as it is), `bubble FOLDER` (predicted and measured, of its
pipelines), `buckets FOLDER` (predicted and measured, of run.sh --bucket-sizes), `output COMMAND...`
(what a command prints).
"""

import ast
import csv
import difflib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PART = re.compile(r"(<!-- begin: (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def body(script: str) -> list[str]:
    """The lines of a script after its docstring."""
    text = (ROOT / script).read_text(encoding="utf-8")
    return text.splitlines()[ast.parse(text).body[0].end_lineno :]


def diff(first: str, second: str) -> str:
    lines = difflib.unified_diff(body(first), body(second), first, second, n=0, lineterm="")
    # Line numbers would change with every docstring.
    return fenced("\n".join("@@" if line.startswith("@@") else line for line in lines), "diff")


def fenced(text: str, language: str = "text") -> str:
    return f"```{language}\n{text.rstrip()}\n```\n"


def command(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{done.stderr}")
    return done.stdout


def csv_table(path: str) -> str:
    with open(ROOT / path, newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    rule = ["---:" if rows and re.fullmatch(r"[\d.]+", rows[0][i]) else "---" for i in range(len(header))]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [header, rule, *rows])


def bubble(folder: str) -> str:
    lines = [
        "| schedule | processes | micro-batches | formula | predicted | measured |",
        "|---|---:|---:|---|---:|---:|",
    ]
    for log in sorted((ROOT / folder / "log").glob("pp_*.log")):
        for line in re.findall(r"^bubble: (.*)", log.read_text(encoding="utf-8"), re.MULTILINE):
            found = dict(re.findall(r"(\w+)=([^, ]+)", line))
            cells = [found[key] for key in ("processes", "micro_batches", "formula", "predicted", "measured")]
            lines.append(f"| {' | '.join([f'`{log.stem}`', *cells])} |")
    return "\n".join(lines) + "\n"


def content(name: str) -> str:
    kind, *arguments = name.split()
    if kind == "diff":
        return diff(*arguments)
    if kind == "table":
        return command("collect.py", arguments[0], "--markdown")
    if kind == "csv":
        return csv_table(arguments[0])
    if kind == "bubble":
        return bubble(arguments[0])
    if kind == "buckets":
        return command("buckets.py", arguments[0])
    if kind == "output":
        return fenced(command(*arguments))
    sys.exit(f"README.md: no such kind of part: {name}")


def main():
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    new = PART.sub(lambda part: part[1] + content(part[2]) + part[4], text)
    if "--check" in sys.argv:
        stale = [part[2] for part in PART.finditer(text) if part[3] != content(part[2])]
        if stale:
            sys.exit(f"README.md is out of date, run python readme.py: {', '.join(stale)}")
    else:
        readme.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
