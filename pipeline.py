"""What pipeline parallelism needs beside the training loop: the cut of the model, the schedule's picture, its bubble.

p processes hold the stages of one pipeline, v stages each, and m micro-batches pass through them in a step.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

import gptlite
import harness


@dataclass(frozen=True)
class Schedule:
    """One of the library's schedules, and what is known of it."""

    build: type
    strategy: str  # its name in logs and results
    stages_per_process: int  # v
    least_micro_batches: Callable[[int], int]  # of p: with fewer, the pipeline never fills
    bubble: Callable[[int, int], float]  # of p and m: the share of a step in which a process is idle
    formula: str
    v_shape: bool = False  # the second half of the stages lies on the processes in reverse order


# The bubble, where a backward takes twice as long as a forward and sending takes no time:
# GPipe     Huang et al. 2018 (arXiv 1811.06965), section 2.3.
# 1F1B      Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.1: the same bubble as GPipe, but at most p
#           micro-batches' activations are kept, not m.
# Interleaved1F1B  the same paper, section 2.2.2: (p-1)/(v m) of the computing time, here as share of the whole.
# ZBVZeroBubble    Qi et al. 2023 (arXiv 2401.10241), section 6: the backward is split into that of the input (I)
#           and that of the weights (W), which waits for no one and fills the gaps. When F, I and W take equally
#           long, all that is left is that process i starts i slots late: p-1 of the 6 m + p-1 slots of a step.
SCHEDULES = {
    "GPipe": Schedule(ScheduleGPipe, "pp_gpipe", 1, lambda p: p, lambda p, m: (p - 1) / (m + p - 1), "(p-1)/(m+p-1)"),
    "1F1B": Schedule(Schedule1F1B, "pp_1f1b", 1, lambda p: p, lambda p, m: (p - 1) / (m + p - 1), "(p-1)/(m+p-1)"),
    "Interleaved1F1B": Schedule(
        ScheduleInterleaved1F1B,
        "pp_interleaved",
        2,
        lambda p: p,
        lambda p, m: (p - 1) / (2 * m + p - 1),
        "(p-1)/(2m+p-1)",
    ),
    "ZBVZeroBubble": Schedule(
        ScheduleZBVZeroBubble,
        "pp_zbv",
        2,
        lambda p: 2 * p - 1,
        lambda p, m: (p - 1) / (6 * m + p - 1),
        "(p-1)/(6m+p-1)",
        v_shape=True,
    ),
}


# ---- flags --------------------------------------------------------------------------------------


def pick_size(args, world_size: int) -> int:
    """Processes per pipeline: --pipeline-parallel-size, by default all; the rest is data-parallel."""
    size = args.pipeline_parallel_size or world_size
    if world_size % size:
        divisors = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        harness.fail(
            f"{world_size} process(es) do not divide into pipelines of {size}: give a --pipeline-parallel-size "
            f"that divides {world_size} ({divisors})"
        )
    return size


def check(schedule_name: str, args, p: int, m: int) -> None:
    """End with one line, on every process alike, if `m` micro-batches or the model's layers are too few."""
    if args.sample:
        harness.fail("--sample grows a text token by token, which a pipeline is not made for: leave it out")
    if schedule_name == "ZBVZeroBubble" and (args.activation_checkpointing or args.compile):
        harness.fail(
            "ZBVZeroBubble takes the backward pass of a block apart, so that it can be neither checkpointed nor "
            "compiled: give another --schedule, or leave --activation-checkpointing and --compile out"
        )
    schedule = SCHEDULES[schedule_name]
    least = schedule.least_micro_batches(p)
    rounds = max(1, m // p)
    if m < least:
        harness.fail(
            f"{schedule_name} on {p} processes needs at least {least} micro-batches per step to fill the pipeline, and "
            f"a batch of {args.batch_size} in micro-batches of {args.micro_batch_size} gives {m}: give a larger "
            "--batch-size, a smaller --micro-batch-size, or fewer processes per pipeline (--pipeline-parallel-size)"
        )
    if schedule_name == "Interleaved1F1B" and m % rounds:
        harness.fail(
            f"Interleaved1F1B on {p} processes takes micro-batches in {rounds} rounds, and {m} do not divide into "
            f"{rounds}: give a --batch-size for {m - m % p} or {m - m % p + p} micro-batches"
        )


def check_model(schedule_name: str, args, p: int, device: torch.device, backend: str) -> None:
    """End with one line if there are more stages than layers to put into them, or nothing that sends."""
    n_layer = gptlite.get_config(args.model, args.n_layer).n_layer
    v = SCHEDULES[schedule_name].stages_per_process
    if p * v > n_layer:
        cure = f"at most {n_layer // v} processes per pipeline (--pipeline-parallel-size), or " if n_layer >= v else ""
        harness.fail(
            f"{schedule_name} on {p} processes cuts the model into {p * v} stages, {v} per process, and {args.model} "
            f"has {n_layer} layer(s): give {cure}--n-layer {p * v} or more"
        )
    if backend == "gloo" and device.type != "cpu":
        harness.fail("processes that share a GPU cannot send to each other (gloo sends CPU memory): give --device cpu")


# ---- stages -------------------------------------------------------------------------------------


def placement(schedule: Schedule, p: int) -> list[int]:
    """The process of each stage: 0 1 2 0 1 2 in a loop, or 0 1 2 2 1 0 in a V."""
    n_stages = p * schedule.stages_per_process
    if schedule.v_shape:
        return [min(stage, n_stages - 1 - stage) for stage in range(n_stages)]
    return [stage % p for stage in range(n_stages)]


def split_blocks(config: gptlite.GPTConfig, vocab_size: int, n_stages: int) -> list[range]:
    """The blocks of each stage, so that the stages cost about the same.

    Cost is the matrix products of a forward pass, per token: a block has 12 d^2 weights, each a multiplication and
    an addition, and attention compares a token with T others, twice (scores, values); the head is d x vocab_size.
    Looking up embeddings multiplies nothing. So the last stage gets fewer blocks where the vocabulary is large.
    """
    d, T = config.n_embd, config.block_size
    block = 24 * d * d + 4 * T * d
    costs = [0] * n_stages
    costs[-1] = 2 * d * vocab_size
    counts = [0] * n_stages
    for _ in range(config.n_layer):
        cheapest = costs.index(min(costs))
        counts[cheapest] += 1
        costs[cheapest] += block
    starts = [sum(counts[:stage]) for stage in range(n_stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def shapes(args, config: gptlite.GPTConfig, vocab_size: int, index: int, n_stages: int, device: torch.device):
    """What goes into stage `index` and what comes out of it, for one micro-batch: tensors without values."""
    B, T = args.micro_batch_size, config.block_size
    compute = torch.bfloat16 if args.precision == "bf16" else torch.float32
    between = torch.empty(B, T, config.n_embd, device=device, requires_grad=True)  # the sum of all blocks, in fp32
    tokens = torch.empty(B, T, dtype=torch.int64, device=device)
    logits = torch.empty(B, T, vocab_size, dtype=compute, device=device, requires_grad=True)
    return tokens if index == 0 else between, logits if index == n_stages - 1 else between


def blocks(stages) -> list[nn.Module]:
    """The decoder blocks of this process's stages."""
    return [block for stage in stages for block in stage.submod.blocks.values()]


class ForwardThroughStages(nn.Module):
    """tokens (B, T) -> logits (B, T, vocab) on the process of the last stage, None on the others: no schedule.

    With one stage per process, several calls fill the pipeline by themselves: whoever has sent goes on to the next.
    """

    def __init__(self, stages, schedule: Schedule, group: dist.ProcessGroup, n_embd: int, device: torch.device):
        super().__init__()
        self.stages = nn.ModuleDict({str(stage.stage_index): stage.submod for stage in stages})
        self.placement = placement(schedule, dist.get_world_size(group))
        self.rank, self.group, self.n_embd, self.device = dist.get_rank(group), group, n_embd, device

    def forward(self, tokens: torch.Tensor) -> torch.Tensor | None:
        x, before = tokens, None
        for stage, process in enumerate(self.placement):
            if process == self.rank:
                if before not in (None, self.rank):
                    x = torch.empty(*tokens.shape, self.n_embd, device=self.device)
                    dist.recv(x, group=self.group, group_src=before)
                x = self.stages[str(stage)](x)
            elif before == self.rank:
                dist.send(x.float().contiguous(), group=self.group, group_dst=process)
            before = process
        return x if before == self.rank else None


# ---- bubble -------------------------------------------------------------------------------------

SLOTS = {"F": 1, "B": 2, "I": 1, "W": 1}  # how long forward, backward, and the backward's two halves take


def order(name: str, p: int, m: int) -> list[list[tuple[int, str, int]]]:
    """What each process computes in a step, in order: (stage, one of SLOTS, micro-batch)."""
    schedule = SCHEDULES[name]
    # The library runs these two without a plan; in this order.
    if name == "GPipe":
        return [[(i, kind, micro) for kind in "FB" for micro in range(m)] for i in range(p)]
    if name == "1F1B":
        rows = []
        for i in range(p):
            ahead = min(p - 1 - i, m)  # forwards before the first backward can be there
            row = [(i, "F", micro) for micro in range(ahead)]
            for micro in range(m):
                if ahead + micro < m:
                    row.append((i, "F", ahead + micro))
                row.append((i, "B", micro))
            rows.append(row)
        return rows
    # The library plans the others when it builds them; all that it asks of a stage is its place.
    v = schedule.stages_per_process
    stage = SimpleNamespace(num_stages=p * v, group_size=p, group_rank=0, submod=None)
    plan = schedule.build([stage] * v, m).pipeline_order
    return [[(a.stage_index, a.computation_type.value, a.microbatch_index) for a in plan[i] if a] for i in range(p)]


def timetable(name: str, p: int, m: int) -> list[list[tuple[int, int, str, int]]]:
    """When each process computes what: (first slot, stage, one of SLOTS, micro-batch), as early as the order allows.

    A forward needs the stage before, a backward the stage after, both of the same micro-batch.
    """
    queues = order(name, p, m)
    last = p * SCHEDULES[name].stages_per_process - 1
    rows, free, done = [[] for _ in range(p)], [0] * p, {}
    while any(queues):
        for i in range(p):
            while queues[i]:
                stage, kind, micro = queues[i][0]
                if kind == "F":
                    needs = (stage - 1, "F", micro) if stage > 0 else None
                elif kind == "W":
                    needs = (stage, "B", micro)
                else:
                    needs = (stage + 1, "B", micro) if stage < last else (stage, "F", micro)
                if needs is not None and needs not in done:
                    break
                start = max(free[i], done.get(needs, 0))
                rows[i].append((start, stage, kind, micro))
                free[i] = start + SLOTS[kind]
                done[stage, "B" if kind == "I" else kind, micro] = free[i]
                queues[i].pop(0)
    return rows


def draw(name: str, p: int, m: int) -> str:
    """The schedule as a picture: a row per process, a column per slot of time."""
    schedule = SCHEDULES[name]
    rows = timetable(name, p, m)
    stages = [[stage for stage, process in enumerate(placement(schedule, p)) if process == i] for i in range(p)]
    length = max(start + SLOTS[kind] for row in rows for start, _, kind, _ in row)
    width = len(str(m - 1)) + 1
    legend = ["F forward", "B backward, twice as long"]
    if name == "ZBVZeroBubble":
        legend = ["F forward", "I backward of the input", "W backward of the weights"]
    if schedule.stages_per_process == 2:
        legend.append("small letters: the process's second stage")
    lines = [f"{name}, {p} processes, {m} micro-batches ({', '.join(legend)}, . idle)"]
    for i, row in enumerate(rows):
        cells = ["."] * length
        for start, stage, kind, micro in row:
            for slot in range(start, start + SLOTS[kind]):
                cells[slot] = f"{kind.lower() if stage != stages[i][0] else kind}{micro}"
        lines.append(f"process {i}  " + " ".join(cell.ljust(width) for cell in cells).rstrip())
    lines.append(f"bubble: predicted={schedule.bubble(p, m):.4f}, formula={schedule.formula}")
    return "\n".join(lines)


class IdleMeter:
    """Measures the bubble: the share of a step's time in which this process computes no forward or backward.

    A step lasts from the start of the schedule until all processes have the loss, which they reach together; on a
    GPU it is the device's own clock (events) that counts. What is not computing is waiting, or sending.
    """

    STEPS = 50  # enough to average, and few enough events to keep

    def __init__(self, stages, device: torch.device):
        self.device = device
        self.steps = []  # (start, end, [(start, end) of each forward and backward])
        self.calls = []
        for stage in stages:
            for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
                setattr(stage, name, self.timed(getattr(stage, name)))

    def mark(self):
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def seconds(self, start, end) -> float:
        return end - start if self.device.type == "cpu" else start.elapsed_time(end) / 1000

    def timed(self, function):
        def call(*args, **kwargs):
            start = self.mark()
            result = function(*args, **kwargs)
            self.calls.append((start, self.mark()))
            return result

        return call

    @contextlib.contextmanager
    def step(self):
        self.calls, start = [], self.mark()
        yield
        if len(self.steps) < harness.WARMUP_STEPS + self.STEPS:
            self.steps.append((start, self.mark(), self.calls))

    def report(self, schedule: Schedule, p: int, m: int) -> str:
        """One line with the predicted and the measured bubble; call on every process."""
        harness.synchronize(self.device)
        measured = self.steps[harness.WARMUP_STEPS :] or self.steps
        computing = sum(self.seconds(*call) for _, _, calls in measured for call in calls)
        whole = sum(self.seconds(start, end) for start, end, _ in measured)
        total = torch.tensor([computing, whole], dtype=torch.float32, device=self.device)
        dist.all_reduce(total)
        return (
            f"bubble: predicted={schedule.bubble(p, m):.4f}, measured={1 - (total[0] / total[1]).item():.4f}, "
            f"formula={schedule.formula}, processes={p}, micro_batches={m}, steps={len(measured)} "
            "(measured: share of a step's time outside the stages' forward and backward)"
        )
