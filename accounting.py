"""What a process holds: its memory, and the model states in it, counted in bytes from the tensors themselves.

DDP and FSDP keep the states in the parameters and the optimizer: model_states() counts those.
DeepSpeed's optimizers keep flat partitions of their own, which differ by stage: DeepSpeedStates
counts each storage once, however many tensors look into it. GB = 2**30 bytes.
"""

import os

import psutil
import torch

GB = 2**30


def reset_peak_memory(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        return
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # Linux: the peak of the resident set starts anew
    except OSError:
        pass  # the peak then counts from the start of the process


def memory(device: torch.device) -> tuple[int, int]:
    """Bytes allocated now, and at the peak since training began; on a CPU, of the resident set (RSS)."""
    if device.type != "cpu":
        return torch.accelerator.memory_allocated(device), torch.accelerator.max_memory_allocated(device)
    rss = psutil.Process().memory_info().rss
    try:
        with open("/proc/self/status") as file:
            peak = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        import resource  # macOS: bytes, since the start of the process

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return rss, max(rss, peak)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor: the shard of a DTensor, all of any other."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def model_states(model, optimizer) -> dict[str, int]:
    """Bytes of the model states that this process holds, from the tensors themselves.

    Call after the first optimizer.step() and before zero_grad(), when all of them exist.
    """

    def total(tensors):
        return sum(local(t).numel() * t.element_size() for t in tensors)

    state = [v for values in optimizer.state.values() for v in values.values() if torch.is_tensor(v) and v.dim() > 0]
    return {
        "Parameters": total(model.parameters()),
        "Gradients": total(p.grad for p in model.parameters() if p.grad is not None),
        "OptimizerState": total(state),
    }


def flat(nested):
    """The tensors in nested lists, tuples and dicts."""
    if torch.is_tensor(nested):
        yield nested
    elif isinstance(nested, dict | list | tuple):
        for value in nested.values() if isinstance(nested, dict) else nested:
            yield from flat(value)


class DeepSpeedStates:
    """Counts one training step: count_gradients() after each backward, count() after the step.

    Offloaded is the part of the three in CPU memory in place of a GPU's (on a machine without a GPU:
    the part that would be); OnDisk is what ZeRO-Infinity has swapped out, which no memory holds.
    """

    def __init__(self, engine, config: dict):
        self.engine, self.optimizer = engine, engine.optimizer
        zero = config.get("zero_optimization", {})
        self.offloads_optimizer = zero.get("offload_optimizer", {}).get("device", "none") != "none"
        self.offloads_parameters = zero.get("offload_param", {}).get("device", "none") != "none"
        self.swap_folder = next(
            (
                zero[key]["nvme_path"]
                for key in ("offload_optimizer", "offload_param")
                if "nvme_path" in zero.get(key, {})
            ),
            None,
        )
        self.gradients = 0
        self.offloaded_gradients = 0

    def partitions(self) -> list[torch.Tensor]:
        """The flat fp32 tensors that this process's optimizer updates; none of their own in stage 0 with fp32."""
        names = ["single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"]  # ZeRO-1 and 2, ZeRO-3
        names += ["fp32_groups_flat_partition", "fp32_groups", "fp32_groups_flat"]  # stage 0 in bf16 or fp16
        for name in names:
            if hasattr(self.optimizer, name):
                return list(flat(getattr(self.optimizer, name)))
        return []

    def measure(self, tensors, would_be_offloaded: bool, counted: set[int]) -> tuple[int, int]:
        """Bytes, and bytes offloaded, of the storages under `tensors` that are not in `counted`; adds them to it."""
        total = offloaded = 0
        on_gpu_machine = self.engine.device.type != "cpu"
        for tensor in tensors:
            if not torch.is_tensor(tensor) or tensor.numel() == 0:
                continue
            storage = tensor.untyped_storage()
            if storage.data_ptr() in counted:
                continue
            counted.add(storage.data_ptr())
            total += storage.nbytes()
            if tensor.device.type == "cpu" if on_gpu_machine else would_be_offloaded:
                offloaded += storage.nbytes()
        return total, offloaded

    def count_gradients(self) -> None:
        """Call between engine.backward() and engine.step(); the largest of a step's micro-batches counts."""
        counted: set[int] = set()
        buffers = [
            getattr(self.optimizer, name, None)
            for name in (
                "averaged_gradients",
                "all_grad_tensors",
                "grad_partitions_flat_buffer",
                "fp32_groups_gradients_flat",
            )
        ]
        whole, _ = self.measure((p.grad for p in self.engine.module.parameters()), False, counted)
        shards = [*flat(buffers), *(partition.grad for partition in self.partitions())]
        sharded, offloaded = self.measure(shards, self.offloads_optimizer, counted)
        if whole + sharded > self.gradients:
            self.gradients, self.offloaded_gradients = whole + sharded, offloaded

    def count(self) -> dict[str, int]:
        """Parameters are what the forward pass reads (shards under ZeRO-3); OptimizerState has the moments
        and, where it is a tensor of its own, the fp32 copy of the parameters that the optimizer updates."""
        counted: set[int] = set()
        tensors = [getattr(p, "ds_tensor", p) for p in self.engine.module.parameters()]
        parameters, offloaded_parameters = self.measure(tensors, self.offloads_parameters, counted)
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        tensors = [*self.partitions(), *(t for t in flat(dict(inner.state)) if t.dim() > 0)]
        state, offloaded_state = self.measure(tensors, self.offloads_optimizer, counted)
        states = {"Parameters": parameters, "Gradients": self.gradients, "OptimizerState": state}
        if self.offloads_optimizer or self.offloads_parameters:
            states["Offloaded"] = offloaded_parameters + self.offloaded_gradients + offloaded_state
        if self.swap_folder:
            files = (os.path.join(root, name) for root, _, names in os.walk(self.swap_folder) for name in names)
            states["OnDisk"] = sum(os.path.getsize(file) for file in files)
        return states
