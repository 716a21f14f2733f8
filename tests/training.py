"""Runs the training scripts by their real command lines and reads their logs."""

import json
import re
import sys
from dataclasses import dataclass

SCRIPTS = {
    "ddp": ("train_ddp.py",),
    "fsdp_no_shard": ("train_fsdp.py", "--sharding-strategy", "NO_SHARD"),
    "fsdp_shard_grad_op": ("train_fsdp.py", "--sharding-strategy", "SHARD_GRAD_OP"),
    "fsdp_full_shard": ("train_fsdp.py",),
    "fsdp_hybrid_shard": ("train_fsdp.py", "--sharding-strategy", "HYBRID_SHARD", "--shard-size", "2"),
    **{
        name: ("train_deepspeed.py", "--deepspeed_config", f"ds_configs/{name}.json")
        for name in ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "zero3_nvme")
    },
}
PROCESSES = {"fsdp_hybrid_shard": 4}  # 2 x 2; the others run on 2
# Steps that go somewhere from the first on: at the tutorial's own rate and warm-up the curves would hardly
# move, and SGD would not notice a schedule that is off by one, nor AdamW a gradient twice too large.
SETTINGS = {
    "adamw": ("--optimizer", "adamw", "--lr", "1e-3", "--warmup-steps", "4"),
    "sgd": ("--optimizer", "sgd", "--lr", "0.1", "--warmup-steps", "4"),
}
COMMON = ("--model", "nano", "--steps", "20", "--batch-size", "16", "--log-every", "1")


@dataclass
class Log:
    """What a run printed: the run line's fields, a dict per meter line, the result line's fields."""

    run: dict[str, str]
    meter: list[dict[str, float]]
    result: dict[str, str]
    text: str

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.meter]

    def states(self) -> dict[str, float]:
        """Bytes per parameter of the model states, on the process that holds most."""
        n = int(self.run["parameters"])
        names = ("Parameters", "Gradients", "OptimizerState", "Offloaded", "OnDisk")
        return {name: self.meter[-1][name] * 2**30 / n for name in names if name in self.meter[-1]}


def fields(line: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=([^,]*)", line.split(": ", 1)[1]))


def read(text: str) -> Log:
    lines = {prefix: [] for prefix in ("run", "meter", "result")}
    for line in text.splitlines():
        prefix = line.split(":", 1)[0]
        if prefix in lines:
            lines[prefix].append(fields(line))
    assert len(lines["run"]) == len(lines["result"]) == 1, text[-3000:]
    meter = []
    for line in lines["meter"]:
        step, _ = line.pop("step").split("/")
        meter.append({"step": int(step), **{name: float(value.removesuffix("GB")) for name, value in line.items()}})
    return Log(lines["run"][0], meter, lines["result"][0], text)


def train(run, torchrun, strategy, *flags, processes=None, timeout=300, **options) -> Log:
    """Run a strategy on 2 processes (or as many as it needs), or on one without a launcher."""
    if "offload" in strategy or "nvme" in strategy:
        timeout = 1500  # the first of them on a machine compiles DeepSpeed's C++, for minutes
    processes = processes or PROCESSES.get(strategy, 2)
    command = [sys.executable, *SCRIPTS[strategy]] if processes == 1 else torchrun(processes, *SCRIPTS[strategy])
    done = run([*command, *flags], timeout, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert "destroy_process_group" not in done.stderr  # a clean run ends its process group itself
    return read(done.stdout)


def several(run, torchrun, processes, script, lines, timeout=600, **options):
    """Run a script by several command lines, in one launch (several.py): what each has printed, and all of stderr."""
    lines = json.dumps([[str(word) for word in line] for line in lines])
    arguments = ["tests/several.py", script, lines]
    done = run([sys.executable, *arguments] if processes == 1 else torchrun(processes, *arguments), timeout, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return re.split(r"^== \d+$", done.stdout, flags=re.MULTILINE)[1:], done.stderr


def distance(losses, reference) -> float:
    """The largest relative difference of two loss curves of equal length."""
    return max(abs(a - b) / b for a, b in zip(losses, reference, strict=True))
