"""What every training script needs and no strategy is about: flags, device, meter, schedule, evaluation.

Units: GB = 2**30 bytes; throughput is samples of the global batch per second of wall time.
"""

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

import accounting
import activations
import gptlite
import launcher
import workload

WARMUP_STEPS = 2  # left out of the throughput: allocation, compilation, the first touch of the data


# ---- flags --------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """A wrong flag is one line and exit code 2, the same on every process."""

    def error(self, message):
        fail(f"{message} (see --help)")


def fail(message: str):
    """A user's mistake: one line on stderr, no traceback, exit code 2."""
    # In one write: all processes say it, and print() would write the newline apart from its line.
    sys.stderr.write(f"{os.path.basename(sys.argv[0])}: error: {message}\n")
    sys.stderr.flush()
    sys.stdout.flush()
    sys.exit(2)


def number(kind, least, below=float("inf")):
    """The type of a flag: an int or float of at least `least` and less than `below`."""

    def parse(string):
        value = kind(string)
        if not least <= value < below:
            limit = f" and below {below}" if below < float("inf") else ""
            raise argparse.ArgumentTypeError(f"{string} is not at least {least}{limit}")
        return value

    parse.__name__ = "whole number" if kind is int else "number"
    return parse


def build_parser(description: str) -> Parser:
    """The flags that all scripts share; a script adds its strategy's own."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--model", choices=gptlite.PRESETS, help="shape of GPTlite (default: gpt3-small on a GPU, nano on a CPU)")
    add("--n-layer", type=number(int, 1), help="number of decoder blocks, in place of the model's own")
    add("--block-size", type=number(int, 1), help="tokens per sample, in place of the model's own")
    add("--dropout", type=number(float, 0, below=1), help="dropout rate, in place of the model's own")
    add("--data", metavar="PATH", help="a UTF-8 text, or CIFAR-10's folder (default: data/, else a download)")
    add("--steps", type=number(int, 1), default=100, help="optimizer steps (default: %(default)s)")
    add("--batch-size", type=number(int, 1), default=256, help="global batch: samples per step (default: %(default)s)")
    add(
        "--micro-batch-size",
        type=number(int, 1),
        default=1,
        help="samples per process and forward (default: %(default)s)",
    )
    add("--optimizer", choices=["adamw", "sgd"], default="adamw", help="(default: %(default)s)")
    add("--lr", type=number(float, 0), default=1e-3, help="learning rate after the warm-up (default: %(default)s)")
    add("--weight-decay", type=number(float, 0), default=3e-7, help="(default: %(default)s)")
    add("--warmup-steps", type=number(int, 0), default=1000, help="linear warm-up; 0 for none (default: %(default)s)")
    add("--clip", type=number(float, 0), default=0.0, help="clip the norm of the gradients; 0 for never (default: 0)")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="bf16: bf16 compute, fp32 weights and optimizer")
    add("--device", choices=["cpu"], help="force the CPU (default: the accelerator PyTorch finds, else the CPU)")
    add("--share-gpu", action="store_true", help="allow more processes than GPUs: memory is right, speed means nothing")
    add("--eval-steps", type=number(int, 0), help="forwards per process in the evaluation; 0 for none (default: all)")
    add(
        "--log-every", type=number(int, 1), default=10, help="steps between two lines of the log (default: %(default)s)"
    )
    add("--sample", type=number(int, 0), default=0, metavar="N", help="write N characters after the training")
    add("--seed", type=number(int, 0), default=0, help="of the weights, the order of the data and the dropout")
    activations.add_flags(add)
    parser.set_defaults(workload="gptlite", sync_batchnorm=False)  # workload.add_flags() lets one choose
    # deepspeed's launcher and torch's old one pass it; the environment says the same.
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser


def accumulation_steps(args, data_parallel_size: int) -> int:
    """Micro-batches that each data-parallel process adds up before an optimizer step."""
    per_forward = args.micro_batch_size * data_parallel_size
    if args.batch_size % per_forward:
        fail(
            f"the global batch of {args.batch_size} samples does not divide into micro-batches of "
            f"{args.micro_batch_size} on {data_parallel_size} data-parallel processes ({args.micro_batch_size} x "
            f"{data_parallel_size} = {per_forward}): give a --batch-size that is a multiple of {per_forward}"
        )
    return args.batch_size // per_forward


# ---- device -------------------------------------------------------------------------------------


def pick_device(args, local_rank: int) -> tuple[torch.device, str]:
    """The device of this process and the backend that carries its collectives.

    Fills in what depends on the device (--model), and sees to it that this process ends as it should.
    """
    if mistake := workload.find_mistake(args, int(os.environ["WORLD_SIZE"])):
        fail(mistake)
    launcher.end_with_launcher()
    launcher.let_threads_finish()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if args.device == "cpu" or accelerator is None or accelerator.type == "mps":  # MPS has no collectives
        device, backend = torch.device("cpu"), "gloo"
    else:
        count = torch.accelerator.device_count()
        processes = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
        if processes > count and not args.share_gpu:
            fail(
                f"{processes} processes on a machine with {count} GPU(s): start at most {count}, or give --share-gpu "
                "to share (right memory, meaningless speed), or --device cpu"
            )
        device = torch.device(accelerator.type, local_rank % count)
        torch.accelerator.set_device_index(device.index)
        # gloo beside it carries what lies in CPU memory (offload).
        backend = (
            "gloo" if processes > count else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
        )
    if problem := activations.find_problem(args):
        fail(problem)
    if args.workload == "resnet":
        args.model = workload.RESNET
    args.model = args.model or ("nano" if device.type == "cpu" else "gpt3-small")
    # One process without a launcher needs an address too; port 0 is any free one.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    return device, backend


# ---- data ---------------------------------------------------------------------------------------


def get_dataset(args, local_rank: int):
    """`get_dataset` of the workload on every process: first one per node, which may download, then the others.

    An error on one process ends all of them alike, and so do nodes that found different data.
    """
    result, error = None, None
    for my_turn in (local_rank == 0, local_rank != 0):
        if my_turn:
            try:
                result = workload.get_dataset(args, fetch=local_rank == 0)
                if len(result[0]) < args.batch_size:
                    error = (
                        f"{result[0].name} has {len(result[0])} training samples, fewer than one global batch of "
                        f"{args.batch_size}: give more data or a smaller --batch-size"
                    )
            except gptlite.DataError as failure:
                error = str(failure)
        dist.barrier()
    digest = None if error else f"{result[0].name} ({result[0].checksum()})"
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, (error, digest))
    errors = [other for other, _ in found if other]
    if not errors and len({digest for _, digest in found}) > 1:
        errors = [f"the processes read different data: {sorted({digest for _, digest in found})}; give the same --data"]
    if errors:
        dist.destroy_process_group()
        fail(errors[0])
    return result


def endless(loader, sampler, steps_per_epoch: int, accumulation: int):
    """Micro-batches, epoch after epoch, each newly shuffled; samples that do not fill a global batch are left out."""
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for _, batch in zip(range(steps_per_epoch * accumulation), loader, strict=False):
            yield batch
        epoch += 1


# ---- optimizer ----------------------------------------------------------------------------------


def get_optimizer(args, parameters) -> torch.optim.Optimizer:
    if args.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=args.lr, weight_decay=args.weight_decay)
    return torch.optim.AdamW(parameters, lr=args.lr, betas=(0.8, 0.999), eps=1e-8, weight_decay=args.weight_decay)


def get_scheduler(args, optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """DeepSpeed's linear WarmupLR, step by step: lr x 0, 0, 1/N, 2/N, ..., 1. Call step() after the optimizer's.

    DeepSpeed takes N as at least 2; N = 0 is no warm-up.
    """
    n = max(2, args.warmup_steps)
    if args.warmup_steps == 0:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, max(0, step - 1) / n))


# ---- meter --------------------------------------------------------------------------------------


class Meter:
    """Measures a run and prints it: the run's own line first, then a line every `log_every` steps.

    Loss is the mean over processes; memory and model states are the maximum over processes;
    throughput leaves the first WARMUP_STEPS steps out where there are more.
    """

    def __init__(self, args, strategy: str, n_parameters: int, data: str, device: torch.device):
        self.args, self.device = args, device
        self.rank = dist.get_rank()
        self.states: dict[str, int] = {}  # bytes of the model states, set by the script after the first step
        if self.rank == 0:
            print(
                f"run: strategy={strategy}, model={args.model}, parameters={n_parameters}, {workload.shape(args)}, "
                f"processes={dist.get_world_size()}, "
                f"device={device_name(device)}, precision={args.precision}, batch={args.batch_size}, "
                f"micro_batch={args.micro_batch_size}, optimizer={args.optimizer}, steps={args.steps}, data={data}, "
                f"shared_gpu={dist.get_backend() == 'gloo' and device.type != 'cpu'}, torch={torch.__version__}",
                flush=True,
            )
        self.bar = None
        self.print(*activations.notes(args, device))
        if self.rank == 0 and sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=args.steps, unit="step")
        accounting.reset_peak_memory(device)
        self.start_step, self.start_time = 0, time.perf_counter()
        self.last_step, self.last_time = 0, self.start_time

    def step(self, step: int, loss: torch.Tensor) -> None:
        """Call at the end of each optimizer step (from 1) with this process's mean loss over its micro-batches."""
        if self.bar:
            self.bar.update()
        if step % self.args.log_every == 0 or step == self.args.steps:
            self.log(step, loss)
        if step == min(WARMUP_STEPS, self.args.steps - 1):  # the clock of the averages starts here
            synchronize(self.device)
            dist.barrier()
            self.start_step, self.start_time = step, time.perf_counter()
            self.last_step, self.last_time = self.start_step, self.start_time

    def log(self, step: int, loss: torch.Tensor) -> None:
        synchronize(self.device)
        loss = loss.detach().to(self.device, torch.float32) / dist.get_world_size()
        dist.all_reduce(loss)  # also waits for the slowest process, so the clock below is everyone's
        loss = loss.item()
        now = time.perf_counter()
        allocated, peak = accounting.memory(self.device)
        largest = (
            torch.tensor([allocated, peak, *self.states.values()], dtype=torch.float32, device=self.device)
            / accounting.GB
        )
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        allocated, peak, *states = largest.tolist()
        batch = self.args.batch_size
        average = batch * (step - self.start_step) / (now - self.start_time)
        current = batch * (step - self.last_step) / (now - self.last_time)
        self.last_step, self.last_time = step, now
        if self.rank == 0:
            named = ", ".join(f"{name}={value:.6f}GB" for name, value in zip(self.states, states, strict=True))
            self.print(
                f"meter: step={step}/{self.args.steps}, RunningAvgSamplesPerSec={average:.6g}, "
                f"CurrSamplesPerSec={current:.6g}, MemAllocated={allocated:.4f}GB, MaxMemAllocated={peak:.4f}GB, "
                f"loss={loss:.7f}, {named}"
            )

    def print(self, *lines: str) -> None:
        """Print on rank 0, around the progress bar."""
        if self.bar:
            self.bar.clear()
        if self.rank == 0:
            print(*lines, sep="\n", end="\n" if lines else "", flush=True)

    def close(self) -> None:
        if self.bar:
            self.bar.close()


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def device_name(device: torch.device) -> str:
    return device.type if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)


# ---- evaluation ---------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(args, model, valid_set, device, rank: int, world_size: int, autocast: bool = False, group=None) -> None:
    """Print the mean loss over the validation set, each token (or image) counted once, and a sample if asked for.

    Every process does the same number of forwards, since sharded models communicate in them: where
    windows run out, it computes one that does not count. Where several processes compute one loss
    together (tensor parallelism), `rank` and `world_size` are those of `group`, which adds the losses up.
    """
    windows = len(valid_set)
    if args.eval_steps is not None:
        windows = min(windows, args.eval_steps * args.micro_batch_size * world_size)
    mine = list(range(rank, windows, world_size))
    forwards = -(-windows // (args.micro_batch_size * world_size))
    total = torch.zeros(3, dtype=torch.float32, device=device)
    for buffer in model.buffers():  # BatchNorm's running statistics: each process has its own, take their mean
        if buffer.is_floating_point():
            dist.all_reduce(buffer, group=group)
            buffer /= world_size
    model.eval()
    for i in range(forwards):
        indices = mine[i * args.micro_batch_size : (i + 1) * args.micro_batch_size]
        samples = [valid_set[index] for index in indices] or [valid_set[0]]
        inputs, targets = (torch.stack(column).to(device) for column in zip(*samples, strict=True))
        if not indices:
            targets = torch.full_like(targets, gptlite.IGNORE)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            logits = model(inputs)
        if logits is None:
            continue  # another process of the pipeline has them
        total[0] += accounting.local(F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction="sum"))
        total[1] += (targets != gptlite.IGNORE).sum()
        if args.workload == "resnet":
            total[2] += (logits.argmax(-1) == targets).sum()
    model.train()
    dist.all_reduce(total, group=group)
    loss, correct, count = (total[0] / total[1]).item(), (total[2] / total[1]).item(), int(total[1])
    if dist.get_rank() == 0:
        result = f"validation_loss={loss:.6f}" if count else "validation_loss=none"
        if args.workload == "resnet":
            result += f", validation_accuracy={correct:.6f}" if count else ", validation_accuracy=none"
        print(f"result: {result}, validation_{workload.counted(args)}={count}", flush=True)
    if args.sample:  # on every process alike: sharded models communicate in each forward
        generator = torch.Generator().manual_seed(args.seed)
        start = torch.zeros((1, 1), dtype=torch.int64, device=device)
        tokens = getattr(model, "module", model).generate(start, args.sample, generator=generator)
        if dist.get_rank() == 0:
            print(f"sample:\n{valid_set.text.decode(tokens[0, 1:])}", flush=True)
