"""Fully Sharded Data Parallel (FSDP2): every process holds a shard of each layer, and gathers a layer to compute it.

      process 0            process 1
    [ p0 p1 .. .. ]      [ .. .. p2 p3 ]    parameters        (each layer is cut, not the list of layers)
    [ g0 g1 .. .. ]      [ .. .. g2 g3 ]    gradients
    [ o0 o1 .. .. ]      [ .. .. o2 o3 ]    optimizer state

Holds:  1/P of everything on each of P processes (16/P bytes per parameter in fp32 with AdamW), and
        one or two whole layers while they are computed.
Sends:  FULL_SHARD      all-gather of each layer's parameters before its forward, again before its
                        backward, and reduce-scatter of its gradients: 1.5 times what DDP sends.
        SHARD_GRAD_OP   keeps the gathered parameters from forward to backward: as much as DDP.
        HYBRID_SHARD    the same as FULL_SHARD inside a group of --shard-size processes (a node, say),
                        and an all-reduce of the gradient shards between the groups.
        NO_SHARD        replicates; all-reduce of the gradients, as DDP.
Choose: it when the model does not fit; HYBRID_SHARD when the network between nodes is slow.

    torchrun --nproc_per_node=8 train_fsdp.py
    torchrun --nproc_per_node=8 train_fsdp.py --sharding-strategy HYBRID_SHARD --shard-size 4
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import accounting
import activations
import harness
import workload


def main():
    # The launcher tells each process its place: rank among all of them, local_rank on this node.
    rank = int(os.environ.setdefault("RANK", "0"))
    local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))
    world_size = int(os.environ.setdefault("WORLD_SIZE", "1"))

    parser = harness.build_parser(__doc__)
    workload.add_flags(parser.add_argument)
    strategies = ["NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD"]
    parser.add_argument("--sharding-strategy", choices=strategies, default="FULL_SHARD", help="(default: %(default)s)")
    parser.add_argument("--shard-size", type=harness.number(int, 1), help="HYBRID_SHARD: processes that share one copy")
    parser.add_argument("--offload", action="store_true", help="keep parameters, gradients, optimizer in CPU memory")
    args = parser.parse_args()
    accumulation = harness.accumulation_steps(args, world_size)
    shard_size = pick_shard_size(args, world_size)

    device, backend = harness.pick_device(args, local_rank)
    dist.init_process_group(backend)

    # Each process draws its own samples: the sampler deals one shuffled order out to all of them.
    train_set, valid_set, vocab_size = harness.get_dataset(args, local_rank)
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, seed=args.seed, drop_last=True)
    loader = DataLoader(train_set, args.micro_batch_size, sampler=sampler, pin_memory=device.type != "cpu")
    batches = harness.endless(loader, sampler, len(train_set) // args.batch_size, accumulation)

    # No GPU ever holds the whole model: rank 0 has it in CPU memory, the others only its shapes.
    with torch.device("cpu" if rank == 0 else "meta"):
        model = workload.get_model(args, vocab_size)
    n_parameters = sum(p.numel() for p in model.parameters())
    whole = model.state_dict() if rank == 0 else {}
    torch.manual_seed(args.seed + rank)  # from here on, randomness (dropout) differs between processes
    saved = activations.Saved(args, device, model.blocks)  # activation memory: its flags, and its count

    # The strategy: each block is a unit that is gathered, computed and dropped again; the root takes
    # what is left (embeddings, last norm, head). Dimension 0 of the mesh replicates, dimension 1 shards.
    mesh = init_device_mesh(device.type, (world_size // shard_size, shard_size), mesh_dim_names=("replicate", "shard"))
    options = {
        "mesh": mesh if shard_size < world_size else mesh["shard"],
        "reshard_after_forward": args.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD"),
        "offload_policy": CPUOffloadPolicy() if args.offload and device.type != "cpu" else OffloadPolicy(),
    }
    if args.precision == "bf16":  # gather and compute in bf16; shards, gradients and optimizer stay fp32
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = model.to("meta")
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    # Memory for the shards alone, then the weights: sent by rank 0 one by one, each process keeps its part.
    model.to_empty(device="cpu" if args.offload else device)
    load = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=args.offload)
    set_model_state_dict(model, whole, options=load)
    del whole
    for buffer in model.buffers():  # running statistics of a BatchNorm are neither sharded nor offloaded
        buffer.data = buffer.to(device)

    optimizer = harness.get_optimizer(args, model.parameters())
    scheduler = harness.get_scheduler(args, optimizer)
    strategy = f"fsdp_{args.sharding_strategy.lower()}" + ("_offload" if args.offload else "")
    meter = harness.Meter(args, strategy, n_parameters, train_set.name, device)
    if args.offload and device.type == "cpu":
        meter.print("config: --offload changes nothing: on a machine without a GPU everything is in CPU memory")

    for step in range(1, args.steps + 1):
        step_loss = torch.zeros((), device=device)
        for micro_step in range(accumulation):
            inputs, targets = (tensor.to(device, non_blocking=True) for tensor in next(batches))
            # Gradients are reduced to shards after every micro-batch, so that they never pile up whole; only
            # what replicates waits for the last one. (set_requires_gradient_sync(False) would wait in all
            # strategies, as DDP's no_sync does, and hold 4 bytes per parameter meanwhile.)
            last = micro_step == accumulation - 1
            model.set_requires_gradient_sync(last or args.sharding_strategy != "NO_SHARD")
            model.set_requires_all_reduce(last)
            logits = model(inputs)
            loss = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
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
    harness.evaluate(args, model, valid_set, device, rank, world_size)
    dist.destroy_process_group()


def pick_shard_size(args, world_size: int) -> int:
    """Processes that together hold one copy of the model."""
    if args.sharding_strategy != "HYBRID_SHARD":
        if args.shard_size is not None:
            harness.fail("--shard-size belongs to --sharding-strategy HYBRID_SHARD")
        return 1 if args.sharding_strategy == "NO_SHARD" else world_size
    # As in PyTorch, a group is by default one node.
    shard_size = args.shard_size or int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if world_size % shard_size:
        harness.fail(f"{world_size} processes do not divide into groups of {shard_size}: give another --shard-size")
    return shard_size


if __name__ == "__main__":
    main()
