"""Around train_tp.py: how many processes share a model, and what PyTorch's tensor parallelism leaves to its user.

That is the layout of gradients, and randomness: which dropout masks agree, and which differ.
"""

from contextlib import ExitStack

import torch
import torch.distributed as dist

import gptlite
import harness


def pick_size(args, world_size: int) -> int:
    """Processes that together hold one copy of the model."""
    size = args.tensor_parallel_size or world_size
    if world_size % size:
        harness.fail(f"{world_size} processes do not divide into groups of {size}: give another --tensor-parallel-size")
    config = gptlite.get_config(args.model, block_size=args.block_size)
    if config.n_head % size:
        harness.fail(
            f"the {config.n_head} heads of {args.model} do not divide over {size} processes: "
            f"give a --tensor-parallel-size that divides {config.n_head}"
        )
    if args.sequence_parallel and config.block_size % size:
        harness.fail(
            f"a block of {config.block_size} tokens does not divide over {size} processes, as --sequence-parallel "
            f"needs it: give a --block-size that is a multiple of {size}"
        )
    if args.sequence_parallel and args.sample:
        harness.fail(
            "--sample grows a text token by token, which --sequence-parallel cannot cut: leave one of them out"
        )
    return size


def check_vocabulary(vocab_size: int, size: int) -> None:
    """A process holds ceil(vocab_size / size) characters, the last one what is left: it must not be nothing."""
    if -(-vocab_size // size) * (size - 1) >= vocab_size:
        dist.destroy_process_group()
        harness.fail(
            f"a vocabulary of {vocab_size} characters leaves some of {size} tensor-parallel processes without any: "
            "give a text with more characters or a smaller --tensor-parallel-size"
        )


def keep_layout_of_gradients(model) -> None:
    """Lay each gradient out as its parameter, after every micro-batch. (Under FSDP these hooks rest: it does the same.)

    Autograd hands some over in another layout: a norm that saw part of the sequence gives its part of
    a sum, which is added up here; the token embedding gives all rows, of which its own are kept.
    """
    for parameter in model.parameters():
        parameter.register_hook(lambda grad, layout=parameter.placements: grad.redistribute(placements=layout))


def fork_randomness_in_attention(model, tensor_rank: int, device: torch.device) -> None:
    """Let the dropout of attention weights differ between the processes of a tensor-parallel group.

    They draw the same random numbers, since outside they drop from the same activations. But between
    qkv and proj each has heads of its own, and equal masks would make head i of one process drop what
    head i of the other drops. Each seed there is drawn from the shared numbers: a block that is
    computed again from the same state drops the same again.
    """
    if not model.config.dropout:
        return
    forked = ExitStack()

    def fork(*_):
        seed = int(torch.randint(2**31, ()))
        forked.enter_context(torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type))
        torch.manual_seed(seed + 1 + tensor_rank)

    for block in model.blocks:
        block.attention.qkv.register_forward_hook(fork)
        block.attention.proj.register_forward_pre_hook(lambda *_: forked.close())
