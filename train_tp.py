"""Tensor parallelism (TP): every process holds a part of each layer, and computes it for the whole batch.

      process 0            process 1
    [ p0 p1 .. .. ]      [ .. .. p2 p3 ]    parameters        (each layer is cut, and never put together)
    [ g0 g1 .. .. ]      [ .. .. g2 g3 ]    gradients
    [ o0 o1 .. .. ]      [ .. .. o2 o3 ]    optimizer state
    [ a0 a1 a2 a3 ]      [ a0 a1 a2 a3 ]    activations between the layers (--sequence-parallel: a0 a1, a2 a3)

    A pair of layers is cut so that one sum at its end is all that is sent: the first into rows (qkv into heads,
    up), the second into columns (proj, down). Embedding and lm_head are cut into characters of the vocabulary.

Holds:  1/N of everything on each of N processes (16/N bytes per parameter in fp32 with AdamW), except norms,
        positions and the biases of proj and down, which are small and whole on each.
Sends:  activations, (B, T, n_embd) of each micro-batch: per block two all-reduces in the forward pass and two
        in the backward pass, and nothing else can be done meanwhile. --sequence-parallel makes of each a
        reduce-scatter and an all-gather: as much is sent, and norms and dropout see 1/N of the sequence.
        With --tensor-parallel-size below the number of processes, the rest is data-parallel: FSDP cuts what
        a process holds once more, over the processes that hold the same part for other samples.
Choose: it inside a node, on fast links, when FSDP does not suffice: one layer or the activations of one sample
        are too large, or the batch is too small to give each process a sample.

    torchrun --standalone --nproc_per_node=2 train_tp.py --tensor-parallel-size 2
    torchrun --standalone --nproc_per_node=8 train_tp.py --tensor-parallel-size 4 --sequence-parallel
"""

import os

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

import accounting
import activations
import harness
import tensor_parallel
import workload


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
    tensor_parallel_size = tensor_parallel.pick_size(args, world_size)
    data_parallel_size = world_size // tensor_parallel_size
    accumulation = harness.accumulation_steps(args, data_parallel_size)
    dist.init_process_group(backend)

    # Neighbours in rank are tensor-parallel, which sends most: they share a node.
    shape = (data_parallel_size, tensor_parallel_size)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
    data_rank, tensor_rank = mesh.get_coordinate()

    # Each tensor-parallel group draws its own samples: the sampler deals one shuffled order out to all of them.
    train_set, valid_set, vocab_size = harness.get_dataset(args, local_rank)
    tensor_parallel.check_vocabulary(vocab_size, tensor_parallel_size)
    sampler = DistributedSampler(
        train_set, num_replicas=data_parallel_size, rank=data_rank, seed=args.seed, drop_last=True
    )
    loader = DataLoader(train_set, args.micro_batch_size, sampler=sampler, pin_memory=device.type != "cpu")
    batches = harness.endless(loader, sampler, len(train_set) // args.batch_size, accumulation)

    # No GPU ever holds the whole model: rank 0 has it in CPU memory, the others only its shapes.
    with torch.device("cpu" if rank == 0 else "meta"):
        model = workload.get_model(args, vocab_size)
    n_parameters = sum(p.numel() for p in model.parameters())
    whole = model.state_dict() if rank == 0 else {}
    saved = activations.Saved(args, device, model.blocks)  # activation memory: its flags, and its count

    # The strategy: each layer is cut over the tensor-parallel group. What a process then holds is cut once more
    # over the data-parallel ranks, by FSDP (over one process, FSDP only sees to the precision).
    parallelize(model.to("meta"), mesh["tensor"], args.sequence_parallel)
    if data_parallel_size > 1 or args.precision == "bf16":
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
    tensor_parallel.keep_layout_of_gradients(model)
    # Randomness (dropout) differs between processes, but not where a tensor-parallel group holds the same activation.
    torch.manual_seed(args.seed + (rank if args.sequence_parallel else data_rank))
    if not args.sequence_parallel:
        tensor_parallel.fork_randomness_in_attention(model, tensor_rank, device)

    optimizer = harness.get_optimizer(args, model.parameters())
    scheduler = harness.get_scheduler(args, optimizer)
    strategy = "tp" + ("_sp" if args.sequence_parallel else "") + ("_dp" if data_parallel_size > 1 else "")
    meter = harness.Meter(args, strategy, n_parameters, train_set.name, device)

    for step in range(1, args.steps + 1):
        step_loss = torch.zeros((), device=device)
        for _ in range(accumulation):
            inputs, targets = (tensor.to(device, non_blocking=True) for tensor in next(batches))
            with loss_parallel():  # each process has the logits of its part of the vocabulary, and keeps it so
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
            meter.states = accounting.model_states(model, optimizer) | saved.count()  # now all of them exist
        optimizer.zero_grad(set_to_none=True)
        meter.step(step, step_loss)

    meter.close()
    with loss_parallel():
        harness.evaluate(args, model, valid_set, device, data_rank, data_parallel_size, group=mesh["data"].get_group())
    dist.destroy_process_group()


def parallelize(model, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Cut the layers as Megatron-LM does (Shoeybi et al. 2019; sequence parallelism: Korthikanti et al. 2022)."""
    # What lies between the layers, (B, T, n_embd): the same on all, or to each a part of T.
    between = Shard(1) if sequence_parallel else Replicate()
    keep = {"input_layouts": between, "desired_input_layouts": between}
    norm = PrepareModuleInputOutput(**keep, output_layouts=between, desired_output_layouts=between)
    plan = {
        # Characters that another process has count as 0 here; the sum over processes is the embedding.
        "embeddings.token": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "embeddings.position": PrepareModuleInputOutput(  # (T,) -> (T, n_embd)
            input_layouts=Replicate(),
            desired_input_layouts=Replicate(),
            output_layouts=Replicate(),
            desired_output_layouts=Shard(0) if sequence_parallel else Replicate(),
        ),
        "blocks.*.norm1": norm,
        # Column-wise: all of x times some rows of the weight; whole heads, of which nothing need be sent.
        "blocks.*.attention": PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate()),
        "blocks.*.attention.qkv": ColwiseParallel(),
        # Row-wise: some features of x times their columns of the weight; then the sum, to which the bias is added once.
        "blocks.*.attention.proj": RowwiseParallel(output_layouts=between),
        "blocks.*.norm2": norm,
        "blocks.*.feed_forward.up": ColwiseParallel(input_layouts=between),
        "blocks.*.feed_forward.down": RowwiseParallel(output_layouts=between),
        "norm": norm,
        "lm_head": ColwiseParallel(input_layouts=between, use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    distribute_module(model, mesh)  # norms and positions: whole on each process


if __name__ == "__main__":
    main()
