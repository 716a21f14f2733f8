"""What DDP sends in place of the fp32 gradients, for train_ddp.py --comm-hook.

A communication hook gets each bucket of gradients when the backward pass has filled it, and answers
with the average that all processes agree on. These are PyTorch's own; they send less, and lose something:

    bf16, fp16    half the bytes: the bucket is rounded to 16 bits, averaged, and put back as fp32. bf16
                  has fp32's range and 3 digits; fp16 has 4 digits, and gradients above 65504 are infinite.
    powersgd      each gradient matrix (n x m) as the product of two thin ones (n x r, r x m), which are
                  averaged instead: r (n + m) numbers for n m. What that loses is added to the next step's
                  gradient. (Vogels, Karimireddy, Jaggi 2019: "PowerSGD", arXiv 1905.13727.) It keeps that
                  loss, as large as the gradients, on each process: memory for bandwidth.
"""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import harness

NAMES = ["bf16", "fp16", "powersgd"]
HELP = "send gradients as bf16 or fp16 (half the bytes), or as PowerSGD's thin matrices; all are lossy (default: fp32)"
RANK_HELP = "powersgd: the rank r of the matrices; more is slower and more exact (default: 4)"


def parse_args(parser):
    """The flags, with those of this module."""
    parser.add_argument("--comm-hook", choices=NAMES, help=HELP)
    parser.add_argument("--powersgd-rank", type=harness.number(int, 1), metavar="R", help=RANK_HELP)
    args = parser.parse_args()
    if args.powersgd_rank and args.comm_hook != "powersgd":
        harness.fail("--powersgd-rank belongs to --comm-hook powersgd")
    if args.comm_hook == "powersgd" and args.device == "cpu" and torch.cuda.is_available():
        harness.fail("PowerSGD takes the GPU it sees, --device cpu or not: set CUDA_VISIBLE_DEVICES= (empty) as well")
    return args


def strategy(args) -> str:
    return f"ddp_{args.comm_hook}_hook" if args.comm_hook else "ddp"


def exact_steps(steps: int) -> int:
    """Steps that PowerSGD sends uncompressed at first: a tenth, at least 2 and at most 1000.

    Early gradients change too fast for a low rank. 1000 is PyTorch's default, with which a run of 100 steps
    would never compress; 2 is the least, as DDP orders its buckets anew after the first step.
    """
    return min(1000, max(2, steps // 10))


def register(model, args) -> None:
    """Have the DDP model send its gradients by args.comm_hook; accumulation and clipping stay as they are."""
    if args.comm_hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=None,  # all processes
            matrix_approximation_rank=args.powersgd_rank or 4,
            start_powerSGD_iter=exact_steps(args.steps),
            orthogonalization_epsilon=1e-8,  # a gradient of zeros (a matrix that nothing uses) is not divided by 0
            random_seed=args.seed % 2**32,  # as NumPy wants it
        )
        on_gloo = dist.get_backend() == "gloo"
        model.register_comm_hook(state, one_bucket_at_a_time if on_gloo else powerSGD_hook.powerSGD_hook)
    elif args.comm_hook:
        hook = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}[args.comm_hook]
        model.register_comm_hook(None, hook)


def one_bucket_at_a_time(state, bucket):
    """PowerSGD on gloo: it sends three times per bucket, from callbacks that wait for their answer.

    gloo runs callbacks on the two threads that also send. Two buckets would occupy both for good, or send
    in an order that differs between the processes; NCCL has no such threads.
    """
    future = powerSGD_hook.powerSGD_hook(state, bucket)
    future.wait()
    return future
