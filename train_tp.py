"""Tensor parallel (TP): every process holds a part of each layer, and computes that part for the whole batch.

      process 0            process 1
    [ p0 p1 .. .. ]      [ .. .. p2 p3 ]    parameters        (each weight is cut, and never put together again)
    [ g0 g1 .. .. ]      [ .. .. g2 g3 ]    gradients
    [ o0 o1 .. .. ]      [ .. .. o2 o3 ]    optimizer state

    token           qkv, up           proj, down        lm_head
    [ vocabulary ]  [ rows: heads ]   [  :  ]           [ vocabulary ]    process 0
    [ vocabulary ]  [ rows: heads ]   [  :  ] columns   [ vocabulary ]    process 1
    sum of parts    no messages       sum of parts      loss from parts

Holds:  1/N of the large weights on each of N processes (16/N bytes per parameter in fp32 with AdamW);
        norms, positions and the biases of proj and down are small, and whole on each process.
Sends:  activations, not parameters. Per block and micro-batch, two all-reduces of (B, T, n_embd) in
        the forward pass and two in the backward pass, each waited for: this needs a fast link.
        With --sequence-parallel each is a reduce-scatter and an all-gather: as much is sent, and
        between the layers each process holds and computes only its part of the sequence.
Choose: it inside a node, when a layer or its activations do not fit, or one sample must be faster.
        --tensor-parallel-size below the number of processes makes a mesh: rows are tensor-parallel
        groups, and each shard is FSDP's over its column, where data differ.

    torchrun --standalone --nproc_per_node=2 train_tp.py --tensor-parallel-size 2
    torchrun --standalone --nproc_per_node=8 train_tp.py --tensor-parallel-size 4 --sequence-parallel
"""

import os
from contextlib import ExitStack

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, DistributedSampler

import gptlite
import harness


def main():
    # The launcher tells each process its place: rank among all of them, local_rank on this node.
    rank = int(os.environ.setdefault("RANK", "0"))
    local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))
    world_size = int(os.environ.setdefault("WORLD_SIZE", "1"))

    parser = harness.build_parser(__doc__)
    parser.add_argument("--tensor-parallel-size", type=harness.number(int, 1), help="processes per copy (default: all)")
    parser.add_argument("--sequence-parallel", action="store_true", help="shard norms and dropout over the sequence")
    args = parser.parse_args()

    device, backend = harness.pick_device(args, local_rank)
    tensor_parallel_size = pick_tensor_parallel_size(args, world_size)
    data_parallel_size = world_size // tensor_parallel_size
    accumulation = harness.accumulation_steps(args, data_parallel_size)
    dist.init_process_group(backend)

    # Dimension 0 of the mesh is data-parallel; dimension 1, of neighbouring ranks, tensor-parallel.
    mesh = init_device_mesh(device.type, (data_parallel_size, tensor_parallel_size), mesh_dim_names=("data", "tensor"))
    data_rank = mesh.get_local_rank("data")

    # Each data-parallel rank draws its own samples, the same for its whole tensor-parallel group.
    train_set, valid_set, vocab_size = harness.get_dataset(args, local_rank)
    sampler = DistributedSampler(
        train_set, num_replicas=data_parallel_size, rank=data_rank, seed=args.seed, drop_last=True
    )
    loader = DataLoader(train_set, args.micro_batch_size, sampler=sampler, pin_memory=device.type != "cpu")
    batches = harness.endless(loader, sampler, len(train_set) // args.batch_size, accumulation)

    # No GPU ever holds the whole model: rank 0 has it in CPU memory, the others only its shapes.
    with torch.device("cpu" if rank == 0 else "meta"):
        model = harness.get_model(args, vocab_size)
    n_parameters = sum(p.numel() for p in model.parameters())
    whole = model.state_dict() if rank == 0 else {}

    # The strategy: cut each weight over the tensor-parallel group, then each shard over the data-parallel ranks.
    model = parallelize(model.to("meta"), mesh["tensor"], args.sequence_parallel)
    if data_parallel_size > 1 or args.precision == "bf16":  # FSDP over one process is only its mixed precision
        options = {"mesh": mesh["data"]}
        if args.precision == "bf16":  # gather and compute in bf16; shards, gradients and optimizer stay fp32
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
    # Memory for the shards alone, then the weights: sent by rank 0 one by one, each process keeps its part.
    model.to_empty(device=device)
    load = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=load)
    del whole
    # DTensor hands some gradients over in another layout than their parameter's: a norm that saw a part of the
    # sequence has a part of the sum (added up here), the token embedding has all rows (its own are kept).
    for parameter in model.parameters():
        parameter.register_hook(lambda grad, layout=parameter.placements: grad.redistribute(placements=layout))

    # Randomness (dropout) differs where the activations do: always between data-parallel ranks.
    torch.manual_seed(args.seed + (rank if args.sequence_parallel else data_rank))
    if not args.sequence_parallel:
        fork_dropout_of_heads(model, mesh.get_local_rank("tensor"), device)

    optimizer = harness.get_optimizer(args, model.parameters())
    scheduler = harness.get_scheduler(args, optimizer)
    strategy = "tp" + ("_sp" if args.sequence_parallel else "") + ("_dp" if data_parallel_size > 1 else "")
    meter = harness.Meter(args, strategy, n_parameters, train_set.text.name, device)

    for step in range(1, args.steps + 1):
        step_loss = torch.zeros((), device=device)
        for _ in range(accumulation):
            inputs, targets = (tensor.to(device, non_blocking=True) for tensor in next(batches))
            with loss_parallel():
                logits = model(inputs)
                loss = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten()).to_local()
                # The step's gradient is the mean over its micro-batches, so each counts 1/accumulation.
                (loss / accumulation).backward()
            step_loss += loss.detach() / accumulation
        if args.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        scheduler.step()
        if step == 1:
            meter.states = harness.model_states(model, optimizer)  # now all of them exist
        optimizer.zero_grad(set_to_none=True)
        meter.step(step, step_loss)

    meter.close()
    with loss_parallel():
        harness.evaluate(args, model, valid_set, device, data_rank, data_parallel_size, group=mesh["data"].get_group())
    dist.destroy_process_group()


def pick_tensor_parallel_size(args, world_size: int) -> int:
    """Processes that together hold one copy of the model."""
    size = args.tensor_parallel_size or world_size
    if world_size % size:
        harness.fail(f"{world_size} processes do not divide into groups of {size}: give another --tensor-parallel-size")
    config = gptlite.get_config(args.model, block_size=args.block_size)
    if config.n_head % size:
        harness.fail(f"the {config.n_head} heads of {args.model} do not divide by --tensor-parallel-size {size}")
    if args.sequence_parallel and config.block_size % size:
        harness.fail(f"--sequence-parallel: a block of {config.block_size} tokens does not divide by {size} processes")
    return size


def parallelize(model, mesh: DeviceMesh, sequence_parallel: bool):
    between = Shard(1) if sequence_parallel else Replicate()
    keep = {"input_layouts": between, "desired_input_layouts": between}
    norm = PrepareModuleInputOutput(**keep, output_layouts=between, desired_output_layouts=between)
    position = PrepareModuleInputOutput(
        input_layouts=Replicate(),
        desired_input_layouts=Replicate(),
        output_layouts=Replicate(),
        desired_output_layouts=Shard(0) if sequence_parallel else Replicate(),
    )
    plan = {
        "embeddings.token": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "embeddings.position": position,
        "blocks.*.norm1": norm,
        "blocks.*.attention": PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate()),
        "blocks.*.attention.qkv": ColwiseParallel(),
        "blocks.*.attention.proj": RowwiseParallel(output_layouts=between),
        "blocks.*.norm2": norm,
        "blocks.*.feed_forward.up": ColwiseParallel(input_layouts=between),
        "blocks.*.feed_forward.down": RowwiseParallel(output_layouts=between),
        "norm": norm,
        "lm_head": ColwiseParallel(input_layouts=between, use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    return distribute_module(model, mesh)  # what is left, replicated


def fork_dropout_of_heads(model, tensor_rank: int, device: torch.device) -> None:
    forked = ExitStack()

    def fork(*_):
        seed = int(torch.randint(2**31, ()))
        forked.enter_context(torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type))
        torch.manual_seed(seed + 1 + tensor_rank)

    def join(*_):
        forked.close()

    for block in model.blocks:
        block.attention.qkv.register_forward_hook(fork)
        block.attention.proj.register_forward_pre_hook(join)


if __name__ == "__main__":
    main()
