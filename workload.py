"""What is trained: GPTlite on a text, or with --workload resnet ResNet-18 on images. The scripts do not care.

The place where a third model would be named. resnet.py, and torchvision with it, is imported only where it is used.
"""

import torch

import gptlite

RESNET = "resnet18"  # its name where GPTlite has a preset's
N_OUTPUTS = {"gptlite": 65, "resnet": 10}  # characters of Tiny Shakespeare, classes of CIFAR-10


def add_flags(add) -> None:
    """`add` is a parser's add_argument. The strategies that cut up GPTlite itself do not call this."""
    add("--workload", choices=["gptlite", "resnet"], default="gptlite", help="what to train (default: %(default)s)")
    add(
        "--sync-batchnorm",
        action="store_true",
        help="with --workload resnet: BatchNorm's statistics of the micro-batches of all processes together",
    )


def find_mistake(args, world_size: int) -> str | None:
    """What is wrong with the flags that belong to one workload alone; None if nothing is."""
    if args.workload == "gptlite":
        return "--sync-batchnorm is for --workload resnet: GPTlite has no BatchNorm" if args.sync_batchnorm else None
    for name in ("model", "n_layer", "block_size", "dropout", "sample"):
        if getattr(args, name) is not None and (name != "sample" or args.sample):
            return f"--{name.replace('_', '-')} is for GPTlite and does not apply to --workload resnet: leave it out"
    if args.activation_checkpointing:
        return (
            "--activation-checkpointing computes each block twice, and BatchNorm would take its running statistics "
            "twice: leave it out of --workload resnet"
        )
    if args.compile:
        return "--compile is for GPTlite, whose blocks are alike: compiled for each of ResNet's, Dynamo gives up"
    # After five halvings an image of 32 x 32 is one pixel, of which nobody can take a variance.
    together = args.micro_batch_size * (world_size if args.sync_batchnorm else 1)
    if together < 2 and not getattr(args, "estimate_memory", None):
        return (
            "BatchNorm needs more than one sample to take statistics of: give --workload resnet a --micro-batch-size "
            "of at least 2, 16 for example"
        )
    return None


def get_dataset(args, fetch: bool):
    """Train set, validation set, and vocabulary size or number of classes. Raises gptlite.DataError."""
    if args.workload == "resnet":
        import resnet

        return resnet.get_dataset(args.data, fetch)
    block_size = gptlite.get_config(args.model, block_size=args.block_size).block_size
    return gptlite.get_dataset(block_size, args.data, fetch)


def get_model(args, n_outputs: int) -> torch.nn.Module:
    """For `n_outputs` characters or classes, from args.seed; on the device that is torch's default, the CPU or meta."""
    if args.workload == "resnet":
        import resnet

        return resnet.get_model(n_outputs, sync_batchnorm=args.sync_batchnorm, seed=args.seed)
    return gptlite.get_model(
        n_outputs, args.model, n_layer=args.n_layer, block_size=args.block_size, dropout=args.dropout, seed=args.seed
    )


def shape(args) -> str:
    """The part of the run line that is the workload's own."""
    if args.workload == "resnet":
        return f"image_size=32, sync_batchnorm={args.sync_batchnorm}"
    config = gptlite.get_config(args.model, args.n_layer, args.block_size, args.dropout)
    return f"n_layer={config.n_layer}, block_size={config.block_size}, dropout={config.dropout}"


def counted(args) -> str:
    """What the loss is the mean over."""
    return "images" if args.workload == "resnet" else "tokens"
