"""The model states that a process holds, in bytes, counted from DeepSpeed's own tensors and partitions.

DDP and FSDP keep their states in the parameters and the optimizer (harness.model_states). DeepSpeed's
optimizers keep flat partitions of their own, which differ by stage; each storage is counted once.
"""

import torch


def storage_bytes(tensors, counted: set[int]) -> int:
    """Bytes of the storages under `tensors` that are not in `counted` yet; adds them to it."""
    total = 0
    for tensor in tensors:
        if not torch.is_tensor(tensor) or tensor.numel() == 0 or tensor.is_meta:
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def flat(nested):
    """The tensors in nested lists, tuples and dicts."""
    if torch.is_tensor(nested):
        yield nested
    elif isinstance(nested, dict):
        for value in nested.values():
            yield from flat(value)
    elif isinstance(nested, list | tuple):
        for value in nested:
            yield from flat(value)


def master_partitions(engine) -> list[torch.Tensor]:
    """The flat fp32 partition that this process updates: ZeRO-1 and 2, ZeRO-3, or none (stage 0 in fp32)."""
    optimizer = engine.optimizer
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition"):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    return []


def deepspeed_gradients(engine) -> int:
    """Bytes of gradients that this process holds. Call between engine.backward() and the engine.step() that updates."""
    optimizer = engine.optimizer
    tensors = [p.grad for p in engine.module.parameters()]
    tensors += [p.grad for p in master_partitions(engine)]
    for name in ("averaged_gradients", "grad_partitions_flat_buffer", "fp32_groups_gradients_flat"):
        tensors += flat(getattr(optimizer, name, None))
    return storage_bytes(tensors, set())


def deepspeed_states(engine, gradients: int) -> dict[str, int]:
    """Bytes of each model state that this process holds in memory. Call after an engine.step() that updated.

    Parameters are the ones the forward pass reads (a partition of each under ZeRO-3). OptimizerState
    has the moments and, where it is a tensor of its own, the fp32 master partition.
    """
    counted: set[int] = set()
    parameters = storage_bytes((getattr(p, "ds_tensor", p) for p in engine.module.parameters()), counted)
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    state = [*master_partitions(engine), *(t for t in flat(dict(inner.state)) if t.dim() > 0)]
    return {"Parameters": parameters, "Gradients": gradients, "OptimizerState": storage_bytes(state, counted)}
