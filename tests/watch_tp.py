"""Runs train_tp as several.py does, and writes down what each process does in its first micro-batch.

    torchrun --nproc_per_node=4 tests/watch_tp.py FOLDER '[["--steps", "1", "--dropout", "0.5"]]'

FOLDER/<command line>-<rank>.json has a digest of each dropout mask, and the number of
collectives by name in forward, loss and backward.
"""

import contextlib
import hashlib
import json
import os
import sys

import torch
import torch.nn.functional as F
from several import runs
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import loss_parallel

import train_tp

seen = {}


def digest(tensor):
    return hashlib.sha1(tensor.contiguous().numpy().tobytes()).hexdigest()


def watch_dropout(module, inputs, output):
    if isinstance(module, nn.Dropout) and module.training:
        seen["between"].append(digest(output == 0))


def watch_attention(q, k, v, dropout_p=0.0, **options):
    if dropout_p:  # equal weights and the unit matrix as values: what comes out are the weights that are left
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            values = torch.eye(q.shape[-2]).expand(*q.shape[:-1], -1)
            left = attention(torch.zeros_like(q), torch.zeros_like(k), values, dropout_p=dropout_p, **options)
        seen["attention"].append(digest(left == 0))
    return attention(q, k, v, dropout_p=dropout_p, **options)


@contextlib.contextmanager
def watch_collectives():
    with CommDebugMode() as mode, loss_parallel():
        yield
    counts = {str(name).split(".")[-1]: count for name, count in mode.get_comm_counts().items()}
    seen.setdefault("collectives", counts)  # of the first micro-batch, not of the evaluation


if __name__ == "__main__":
    attention, F.scaled_dot_product_attention = F.scaled_dot_product_attention, watch_attention
    nn.modules.module.register_module_forward_hook(watch_dropout)
    train_tp.loss_parallel = watch_collectives
    folder, command_lines = sys.argv[1], json.loads(sys.argv[2])
    seen.update(between=[], attention=[])
    for number in runs("train_tp", command_lines):
        with open(f"{folder}/{number}-{os.environ['RANK']}.json", "w") as file:
            json.dump(seen, file)
        seen.clear()
        seen.update(between=[], attention=[])
