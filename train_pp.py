"""Pipeline parallelism: every process holds some of the layers, and micro-batches pass through them in turn.

      process 0            process 1
    [ p0 p1 .. .. ]      [ .. .. p2 p3 ]    parameters        (whole layers: the list of layers is cut)
    [ g0 g1 .. .. ]      [ .. .. g2 g3 ]    gradients
    [ o0 o1 .. .. ]      [ .. .. o2 o3 ]    optimizer state

    process 0  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3     forward and backward of micro-batches
    process 1  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .      0 to 3; the dots are the bubble (1F1B)

Holds:  1/P of everything on each of P processes (16/P bytes per parameter in fp32 with AdamW), and the
        activations of the micro-batches on their way: of all M (GPipe) or at most about P (the others);
        besides, the library keeps what it receives, one layer's activations, for all M.
Sends:  between neighbours, per micro-batch, the activations of one layer forward and their gradient back:
        far less than the weights. With --pipeline-parallel-size below the number of processes the rest is
        data-parallel: the gradients, once per step, all-reduced between the processes with the same layers.
Choose: it when the model does not fit and the network is slow (between nodes), with many more micro-batches
        than processes: the bubble is (P-1)/(M+P-1) of the time with GPipe and 1F1B, less with the others.

    torchrun --standalone --nproc_per_node=2 train_pp.py --pipeline-parallel-size 2
    torchrun --standalone --nproc_per_node=8 train_pp.py --pipeline-parallel-size 4 --schedule Interleaved1F1B
    python train_pp.py --pipeline-parallel-size 4 --batch-size 8 --show-schedule
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.utils.data import DataLoader, DistributedSampler

import accounting
import activations
import gptlite
import harness
import pipeline


def main():
    # The launcher tells each process its place: rank among all of them, local_rank on this node.
    rank = int(os.environ.setdefault("RANK", "0"))
    local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))
    world_size = int(os.environ.setdefault("WORLD_SIZE", "1"))

    parser = harness.build_parser(__doc__)
    add = parser.add_argument
    add("--schedule", choices=pipeline.SCHEDULES, default="1F1B", help="(default: %(default)s)")
    add("--pipeline-parallel-size", type=harness.number(int, 1), metavar="N", help="(default: all processes)")
    add("--show-schedule", action="store_true", help="draw who computes what when, and end")
    args = parser.parse_args()
    if args.show_schedule:  # one process can draw any number of them
        world_size = args.pipeline_parallel_size or world_size
    pipeline_parallel_size = pipeline.pick_size(args, world_size)
    data_parallel_size = world_size // pipeline_parallel_size
    accumulation = harness.accumulation_steps(args, data_parallel_size)
    pipeline.check(args.schedule, args, pipeline_parallel_size, accumulation)
    if args.show_schedule:
        if rank == 0:
            print(pipeline.draw(args.schedule, pipeline_parallel_size, accumulation))
        return

    device, backend = harness.pick_device(args, local_rank)
    pipeline.check_model(args.schedule, args, pipeline_parallel_size, device, backend)
    dist.init_process_group(backend)

    # Neighbours in rank are data-parallel, which sends more: the pipeline may cross the slow network.
    shape = (pipeline_parallel_size, data_parallel_size)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pipeline", "data"))
    pipeline_group, data_group = mesh.get_group("pipeline"), mesh.get_group("data")
    pipeline_rank, data_rank = mesh.get_coordinate()

    # Each pipeline draws its own samples: the sampler deals one shuffled order out to all of them.
    train_set, valid_set, vocab_size = harness.get_dataset(args, local_rank)
    sampler = DistributedSampler(
        train_set, num_replicas=data_parallel_size, rank=data_rank, seed=args.seed, drop_last=True
    )
    loader = DataLoader(train_set, args.micro_batch_size, sampler=sampler, pin_memory=device.type != "cpu")
    batches = harness.endless(loader, sampler, len(train_set) // args.batch_size, accumulation)

    # The strategy: each process builds only the layers of its own stages; a schedule says in which
    # order it computes forwards and backwards, and sends and receives between them.
    config = gptlite.get_config(args.model, args.n_layer, args.block_size, args.dropout)
    schedule_kind = pipeline.SCHEDULES[args.schedule]
    placement = pipeline.placement(schedule_kind, pipeline_parallel_size)
    blocks = pipeline.split_blocks(config, vocab_size, len(placement))
    stages = []
    for index, process in enumerate(placement):
        if process == pipeline_rank:
            stage = Stage(args, config, vocab_size, blocks[index], index == 0, index == len(placement) - 1)
            # Told what comes in and goes out, the library need not find out by a forward and backward of its own.
            shapes = pipeline.shapes(args, config, vocab_size, index, len(placement), device)
            stages.append(PipelineStage(stage.to(device), index, len(placement), device, *shapes, group=pipeline_group))
    model = nn.ModuleList(stage.submod for stage in stages)
    n_parameters = torch.tensor(sum(p.numel() for p in model.parameters()), device=device)
    dist.all_reduce(n_parameters, group=pipeline_group)
    torch.manual_seed(args.seed + rank)  # from here on, randomness (dropout) differs between processes
    saved = activations.Saved(args, device, pipeline.blocks(stages))  # activation memory: its flags, and its count
    # The step's gradient is the mean over its micro-batches: the schedule divides by their number at the end.
    idle = pipeline.IdleMeter(stages, device)
    schedule = schedule_kind.build(
        stages if schedule_kind.stages_per_process > 1 else stages[0], accumulation, get_loss, scale_grads=True
    )

    optimizer = harness.get_optimizer(args, model.parameters())
    scheduler = harness.get_scheduler(args, optimizer)
    strategy = schedule_kind.strategy + ("_dp" if data_parallel_size > 1 else "")
    meter = harness.Meter(args, strategy, n_parameters.item(), train_set.name, device)

    for step in range(1, args.steps + 1):
        micro_batches = [next(batches) for _ in range(accumulation)]
        inputs = [(inputs.to(device, non_blocking=True),) for inputs, _ in micro_batches]
        targets = [targets.to(device, non_blocking=True) for _, targets in micro_batches]
        losses = []
        with idle.step():
            # All micro-batches, forward and backward. The first stage reads the inputs, the last the targets.
            schedule.step(arg_mbs=inputs, target_mbs=targets, losses=losses, return_outputs=False)
            # Only the last stage knows the loss: the others add 0.
            step_loss = torch.stack(losses).detach().mean() if losses else torch.zeros((), device=device)
            dist.all_reduce(step_loss, group=pipeline_group)
        if data_parallel_size > 1:  # averaged over the processes that hold the same layers
            for parameter in model.parameters():
                parameter.grad /= data_parallel_size
                dist.all_reduce(parameter.grad, group=data_group)
        if args.clip:  # by the norm over all stages
            norm = torch.nn.utils.get_total_norm(parameter.grad for parameter in model.parameters()) ** 2
            dist.all_reduce(norm, group=pipeline_group)
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), args.clip, norm.sqrt())
        optimizer.step()
        scheduler.step()
        if step == 1:
            meter.states = accounting.model_states(model, optimizer) | saved.count()  # now all of them exist
        optimizer.zero_grad(set_to_none=True)
        meter.step(step, step_loss)

    meter.close()
    meter.print(idle.report(schedule_kind, pipeline_parallel_size, accumulation))
    forward = pipeline.ForwardThroughStages(stages, schedule_kind, pipeline_group, config.n_embd, device)
    harness.evaluate(args, forward, valid_set, device, data_rank, data_parallel_size)
    dist.destroy_process_group()


def get_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


class Stage(nn.Module):
    """The blocks of one stage, with the embeddings before the first block and the head behind the last.

    Built and named as in the whole model: each layer has its own generator, so no other layer is needed.
    """

    def __init__(self, args, config: gptlite.GPTConfig, vocab_size: int, blocks: range, is_first: bool, is_last: bool):
        super().__init__()
        self.autocast = args.precision == "bf16"
        generators = [gptlite.layer_generator(args.seed, layer) for layer in range(config.n_layer + 2)]
        self.embeddings = gptlite.Embeddings(vocab_size, config, generators[0]) if is_first else None
        self.blocks = nn.ModuleDict({str(i): gptlite.Block(config, generators[1 + i]) for i in blocks})
        self.norm = nn.LayerNorm(config.n_embd) if is_last else None
        self.lm_head = gptlite.Linear(config.n_embd, vocab_size, False, generators[-1]) if is_last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # tokens (B, T) in the first stage, else (B, T, n_embd) -> (B, T, n_embd), in the last (B, T, vocab)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.autocast):
            x = self.embeddings(x) if self.embeddings else x
            for block in self.blocks.values():
                x = block(x)
            return self.lm_head(self.norm(x)) if self.lm_head else x


if __name__ == "__main__":
    main()
