"""Runs a script's main() once per command line, all in one launch: starting the processes takes longer than the runs.

    torchrun --nproc_per_node=2 tests/several.py train_tp '[["--steps", "2"], ["--steps", "2", "--clip", "1"]]'
    python tests/several.py train_ddp '[["--steps", "2"]]'

Rank 0 prints "== 0", "== 1", ... before the output of each.
"""

import importlib
import json
import os
import sys
from functools import partial
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def start(init_process_group, backend=None, **given):
    """With the store, whatever address DeepSpeed would have it meet at."""
    given.pop("init_method", None)
    init_process_group(backend, **given)


def runs(script: str, command_lines: list[list[str]]):
    """Run them, and yield the number of each when it has ended."""
    module = importlib.import_module(script)
    launched = "RANK" in os.environ
    store, rank, world_size = None, int(os.environ.get("RANK", "0")), 1
    if launched and script != "train_deepspeed":
        store, rank, world_size = next(dist.rendezvous("env://"))
    init_process_group, destroy_process_group = dist.init_process_group, dist.destroy_process_group
    for number, arguments in enumerate(command_lines):
        if rank == 0:
            print(f"== {number}", flush=True)
        if script == "train_deepspeed" and launched:  # which remembers its first process group: one for all
            dist.destroy_process_group = lambda: None
        elif launched:  # the launcher's store is one for all: each process group gets keys of its own in it
            own = dist.PrefixStore(f"several-{number}", store)
            dist.init_process_group = partial(start, init_process_group, store=own, rank=rank, world_size=world_size)
        sys.argv = [f"{script}.py", *arguments]
        module.main()
        yield number
    if script == "train_deepspeed" and launched:
        destroy_process_group()


if __name__ == "__main__":
    for _ in runs(sys.argv[1], json.loads(sys.argv[2])):
        pass
