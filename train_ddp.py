"""Distributed Data Parallel (DDP): every process holds the whole model and learns from its own part of the batch.

      process 0            process 1
    [ p0 p1 p2 p3 ]      [ p0 p1 p2 p3 ]    parameters
    [ g0 g1 g2 g3 ]      [ g0 g1 g2 g3 ]    gradients
    [ o0 o1 o2 o3 ]      [ o0 o1 o2 o3 ]    optimizer state

Holds:  everything: 16 bytes per parameter in fp32 with AdamW, on each process.
Sends:  the gradients, once per step: all-reduced in buckets while the backward pass goes on, so
        that the network works on the last layers' buckets while the first layers' are computed.
        --comm-hook sends them as 16 bits, or as PowerSGD's thin matrices, where the network is slow.
Choose: it when the model fits. Nothing that shards is faster.

    torchrun --standalone --nproc_per_node=8 train_ddp.py
    python train_ddp.py                  (one process, no launcher)
    torchrun --standalone --nproc_per_node=8 train_ddp.py --workload resnet --micro-batch-size 8 --sync-batchnorm
"""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import accounting
import activations
import comm_hooks
import harness
import workload


def main():
    # The launcher tells each process its place: rank among all of them, local_rank on this node.
    rank = int(os.environ.setdefault("RANK", "0"))
    local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))
    world_size = int(os.environ.setdefault("WORLD_SIZE", "1"))

    parser = harness.build_parser(__doc__)
    workload.add_flags(parser.add_argument)
    args = comm_hooks.parse_args(parser)
    accumulation = harness.accumulation_steps(args, world_size)

    device, backend = harness.pick_device(args, local_rank)
    dist.init_process_group(backend)

    # Each process draws its own samples: the sampler deals one shuffled order out to all of them.
    train_set, valid_set, vocab_size = harness.get_dataset(args, local_rank)
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, seed=args.seed, drop_last=True)
    loader = DataLoader(train_set, args.micro_batch_size, sampler=sampler, pin_memory=device.type != "cpu")
    batches = harness.endless(loader, sampler, len(train_set) // args.batch_size, accumulation)

    model = workload.get_model(args, vocab_size)
    n_parameters = sum(p.numel() for p in model.parameters())
    torch.manual_seed(args.seed + rank)  # from here on, randomness (dropout) differs between processes
    saved = activations.Saved(args, device, model.blocks)  # activation memory: its flags, and its count

    # The strategy: gradients are averaged over all processes as the backward pass produces them,
    # and live in the buckets they are sent from, not in a copy beside them.
    model = DistributedDataParallel(model.to(device), gradient_as_bucket_view=True)
    comm_hooks.register(model, args)  # --comm-hook: what is sent in place of fp32

    optimizer = harness.get_optimizer(args, model.parameters())
    scheduler = harness.get_scheduler(args, optimizer)
    meter = harness.Meter(args, comm_hooks.strategy(args), n_parameters, train_set.name, device)

    for step in range(1, args.steps + 1):
        step_loss = torch.zeros((), device=device)
        for micro_step in range(accumulation):
            inputs, targets = (tensor.to(device, non_blocking=True) for tensor in next(batches))
            # Only the last micro-batch's backward pass sends gradients; DDP decides that in the forward pass.
            with model.no_sync() if micro_step < accumulation - 1 else nullcontext():
                with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
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
    harness.evaluate(args, model, valid_set, device, rank, world_size, autocast=args.precision == "bf16")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
