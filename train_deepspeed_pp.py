"""DeepSpeed's pipeline engine: the model is a list of layers, cut into stages; ZeRO-1 over data-parallel pipelines.

      process 0            process 1
    [ p0 p1 .. .. ]      [ .. .. p2 p3 ]    parameters        (whole layers: the list of layers is cut)
    [ g0 g1 .. .. ]      [ .. .. g2 g3 ]    gradients
    [ o0 o1 .. .. ]      [ .. .. o2 o3 ]    optimizer state   (ZeRO-1 cuts it again between data-parallel processes)

Holds:  1/P of everything on each of P processes of a pipeline, and the activations of at most P micro-batches
        (the schedule is 1F1B). Over D pipelines ZeRO-1 leaves 1/D of that optimizer state on each process,
        with a copy of its part of the parameters. ZeRO-2 and 3 do not go with a pipeline: they send per
        micro-batch what a pipeline sends once per step.
Sends:  between neighbours, per micro-batch, the activations of one layer forward and their gradient back;
        once per step, between processes with the same layers, the gradients and the updated parameters.
Choose: it when DeepSpeed is given (its monitor, its other JSONs); else train_pp.py, which
        has more schedules.

    deepspeed --num_gpus=8 train_deepspeed_pp.py --deepspeed_config ds_configs/pp_zero1.json --pipeline-parallel-size 4
    torchrun --standalone --nproc_per_node=2 train_deepspeed_pp.py --deepspeed_config ds_configs/pp_zero1.json
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import accounting
import activations
import ds_config
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
    add("--deepspeed_config", metavar="JSON", help="the strategy: a file of ds_configs/; flags override what it says")
    add("--deepspeed", action="store_true", help="accepted, as DeepSpeed's own examples pass it")
    add("--pipeline-parallel-size", type=harness.number(int, 1), metavar="N", help="(default: all processes)")
    pipeline_parallel_size = pipeline.pick_size(parser.parse_args(), world_size)
    data_parallel_size = world_size // pipeline_parallel_size
    args, config, changes = ds_config.parse_args(parser, data_parallel_size)
    accumulation = harness.accumulation_steps(args, data_parallel_size)

    device, backend = harness.pick_device(args, local_rank)
    pipeline.check("1F1B", args, pipeline_parallel_size, accumulation)
    pipeline.check_model("1F1B", args, pipeline_parallel_size, device, backend)
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    import deepspeed  # only now: it looks for its device when it is imported
    from deepspeed.pipe import LayerSpec, PipelineModule

    stage = ds_config.prepare(config, args)
    if stage > 1:
        harness.fail(f"{args.deepspeed_config}: ZeRO-{stage} does not go with a pipeline: use ZeRO-1 or 0")
    deepspeed.init_distributed(backend)

    train_set, valid_set, vocab_size = harness.get_dataset(args, local_rank)

    # The strategy: a list of layers that are not yet built. Each process builds those of its stage; stages
    # have the same number of blocks, the first the embeddings and the last the head as well.
    shape = gptlite.get_config(args.model, args.n_layer, args.block_size, args.dropout)
    generators = [gptlite.layer_generator(args.seed, layer) for layer in range(shape.n_layer + 2)]
    layers = [
        LayerSpec(gptlite.Embeddings, vocab_size, shape, generators[0]),
        *(LayerSpec(gptlite.Block, shape, generator) for generator in generators[1:-1]),
        LayerSpec(nn.LayerNorm, shape.n_embd),
        LayerSpec(gptlite.Linear, shape.n_embd, vocab_size, bias=False, generator=generators[-1]),
    ]
    saved = activations.Saved(args, device)  # activation memory: its flags, and its count
    # (partition_method "parameters" would build every layer on every process, to count.)
    model = PipelineModule(
        layers,
        num_stages=pipeline_parallel_size,
        loss_fn=get_loss,
        partition_method="type:Block",
        activation_checkpoint_interval=int(args.activation_checkpointing),
        activation_checkpoint_func=saved.checkpoint,
        checkpointable_layers=["Block"],
    )
    if args.compile:
        model.compile()  # each layer
    n_parameters = torch.tensor(sum(p.numel() for p in model.parameters()), device=device)
    dist.all_reduce(n_parameters)
    torch.manual_seed(args.seed + rank)  # from here on, randomness (dropout) differs between processes

    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    # Each pipeline draws its own samples: the sampler deals one shuffled order out to all of them.
    data_rank = engine.grid.get_data_parallel_id()
    sampler = DistributedSampler(
        train_set, num_replicas=data_parallel_size, rank=data_rank, seed=args.seed, drop_last=True
    )
    loader = DataLoader(train_set, args.micro_batch_size, sampler=sampler, pin_memory=device.type != "cpu")
    batches = harness.endless(loader, sampler, len(train_set) // args.batch_size, accumulation)

    strategy = "deepspeed_pp" + ("_dp" if data_parallel_size > 1 else "")
    meter = harness.Meter(args, strategy, n_parameters.item() // data_parallel_size, train_set.name, device)
    meter.print(*changes)
    states = accounting.DeepSpeedStates(engine, config)
    # A backward pass ends at its stage's first parameters; the engine has no other place to look in between.
    counting = next(model.parameters()).register_post_accumulate_grad_hook(lambda _: states.count_gradients())

    for step in range(1, args.steps + 1):
        # All micro-batches, forward and backward, the reduction of the gradients, the optimizer and the schedule.
        # The loss is the mean over micro-batches and pipelines, sent from the last stage to all.
        step_loss = engine.train_batch(batches)
        if step == 1:
            counting.remove()
            meter.states = states.count() | saved.count()
        meter.step(step, step_loss)

    meter.close()
    harness.evaluate(args, LogitsOfLastStage(engine), valid_set, device, data_rank, data_parallel_size)
    dist.destroy_process_group()


def get_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


class LogitsOfLastStage(nn.Module):
    """tokens (B, T) -> logits (B, T, vocab) on the processes of the last stage, None on the others."""

    def __init__(self, engine):
        super().__init__()
        self.engine = engine

    def forward(self, tokens: torch.Tensor) -> torch.Tensor | None:
        self.engine.reset_activation_shape()  # the last batch may be smaller
        batch = iter([(tokens, tokens)])  # the engine wants targets too, for a loss that is not used
        options = {"return_logits": True, "reduce_output": None, "bcast_loss": False, "num_micro_batches": 1}
        _, logits = self.engine.eval_batch(batch, **options)
        return logits


if __name__ == "__main__":
    main()
