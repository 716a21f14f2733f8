"""DeepSpeed ZeRO: one training loop, eight strategies; the JSON decides which.

                    process 0                process 1
    stage 0     [ pppp gggg oooo ]      [ pppp gggg oooo ]     nothing is sharded, as in DDP
    stage 1     [ pppp gggg oo.. ]      [ pppp gggg ..oo ]     optimizer state
    stage 2     [ pppp gg.. oo.. ]      [ pppp ..gg ..oo ]     and gradients
    stage 3     [ pp.. gg.. oo.. ]      [ ..pp ..gg ..oo ]     and parameters

Holds:  16, 8 + 8/P, 4 + 12/P or 16/P bytes per parameter, for stages 0 to 3 in fp32 with AdamW on P
        processes. Stages 1 and 2 add 4/P: the optimizer updates a copy of its part of the parameters.
        ZeRO-Offload (zero2_offload.json) keeps gradient shards and optimizer in CPU memory and updates
        there; ZeRO-Infinity the parameters too (zero3_offload.json), or all on disk (zero3_nvme.json).
Sends:  stages 0 to 2, on paper, as much as DDP: the gradients are reduced, and after the step stages 1
        and 2 gather the updated parameters. Stage 3 gathers each layer's parameters before its forward
        and again before its backward instead: 1.5 times as much.
Choose: the lowest stage that fits; offload when none does.

    deepspeed --num_gpus=8 train_deepspeed.py --deepspeed_config ds_configs/zero3_offload.json
    torchrun --standalone --nproc_per_node=2 train_deepspeed.py --deepspeed_config ds_configs/zero3.json
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

import accounting
import activations
import buckets
import ds_config
import harness
import workload


def main():
    # The launcher tells each process its place: rank among all of them, local_rank on this node.
    rank = int(os.environ.setdefault("RANK", "0"))
    local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))
    world_size = int(os.environ.setdefault("WORLD_SIZE", "1"))

    parser = harness.build_parser(__doc__)
    workload.add_flags(parser.add_argument)
    add = parser.add_argument
    add("--deepspeed_config", metavar="JSON", help="the strategy: a file of ds_configs/; flags override what it says")
    add("--deepspeed", action="store_true", help="accepted, as DeepSpeed's own examples pass it")
    add("--nvme-path", metavar="DIR", help="where ZeRO-Infinity swaps to (default: the system's temporary folder)")
    add("--bucket-size", type=buckets.elements, metavar="N", help="elements of all communication buckets (500000, 5e8)")
    add("--monitor-path", metavar="DIR", help="where DeepSpeed's monitor writes (default: what the JSON says)")
    add("--estimate-memory", type=harness.number(int, 1), nargs="?", const=8, metavar="GPUS", help=ESTIMATE_HELP)
    args, config, changes = ds_config.parse_args(parser, world_size)
    accumulation = harness.accumulation_steps(args, world_size)

    device, backend = harness.pick_device(args, local_rank)
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    import deepspeed  # only now: it looks for its device when it is imported

    if args.estimate_memory:
        return estimate_memory(args, rank)
    stage = ds_config.prepare(config, args)
    deepspeed.init_distributed(backend)

    train_set, valid_set, vocab_size = harness.get_dataset(args, local_rank)

    # ZeRO-3 takes each layer's parameters apart as soon as it is built: no process holds the whole model.
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = workload.get_model(args, vocab_size)
    n_parameters = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    torch.manual_seed(args.seed + rank)  # from here on, randomness (dropout) differs between processes
    saved = activations.Saved(args, device, model.blocks)  # activation memory: its flags, and its count

    # The strategy: the engine takes model, data, optimizer and schedule, and does with them what the
    # JSON says. Its loader has a sampler that deals one shuffled order out to all processes.
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=train_set, config=config
    )
    loader.data_sampler.seed = args.seed
    loader.num_local_io_workers = 0  # a sample is a slice of a tensor: worker processes cost more than they save
    loader.pin_memory = device.type != "cpu"
    batches = harness.endless(loader, loader.data_sampler, len(train_set) // args.batch_size, accumulation)

    strategy = os.path.splitext(os.path.basename(args.deepspeed_config))[0]
    strategy += f"_bucket_{buckets.name(args.bucket_size)}" if args.bucket_size else ""
    meter = harness.Meter(args, strategy, n_parameters, train_set.name, device)
    meter.print(*changes)
    states = accounting.DeepSpeedStates(engine, config)

    for step in range(1, args.steps + 1):
        step_loss = torch.zeros((), device=device)
        for _ in range(accumulation):
            inputs, targets = (tensor.to(device, non_blocking=True) for tensor in next(batches))
            logits = engine(inputs)
            loss = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
            # The engine counts micro-batches: it divides the loss by their number, sends gradients when
            # the stage needs it, and steps, schedules and zeroes after the last one.
            engine.backward(loss)
            if step == 1:
                states.count_gradients()
            engine.step()
            step_loss += loss.detach() / accumulation
        if step == 1:
            meter.states = states.count() | saved.count()
        meter.step(step, step_loss)

    meter.close()
    harness.evaluate(args, engine, valid_set, device, rank, world_size)
    dist.destroy_process_group()


ESTIMATE_HELP = "print DeepSpeed's estimate of the model states on a node with GPUS GPUs (default: 8), and end"


def estimate_memory(args, rank: int) -> None:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_live

    model = workload.get_model(args, workload.N_OUTPUTS[args.workload])
    if rank == 0:
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        print(f"{args.model}: {size / accounting.GB:.3f}GB of fp32 parameters")
        estimate_zero2_model_states_mem_needs_all_live(model, num_gpus_per_node=args.estimate_memory, num_nodes=1)
        estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=args.estimate_memory, num_nodes=1)


if __name__ == "__main__":
    main()
