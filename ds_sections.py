"""DeepSpeed's other tools in its JSON: checks their sections before anything starts, and prepares what they need.

A section that DeepSpeed 0.19.8 has removed, a key that it would ignore, a package that is missing, a ZeRO++
that has no GPU to quantize on: each is one line and exit code 2, on every process.
"""

import base64
import binascii
import difflib
import importlib.util
import itertools
import os

import torch

from harness import fail

# Sections that DeepSpeed 0.19.8 refuses when its engine starts ("has been removed").
REMOVED = ["amp", "compression_training", "curriculum_learning", "eigenvalue", "elasticity", "graph_harvesting"]
REMOVED += ["nebula", "progressive_layer_drop", "quantize_training", "sparse_attention", "sparse_gradients"]
REMOVED_OPTIMIZERS = ["onebitadam", "onebitlamb", "zerooneadam"]
# DeepSpeed's own, optimizers in any case; other names are PyTorch's.
OPTIMIZERS = ["adam", "adamw", "adagrad", "lamb", "lion", "muon", "muadam", "muadamw", "musgd"]
SCHEDULERS = ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"]
# The package that each needs.
MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml", "csv_monitor": ""}
KEYS = {
    "flops_profiler": "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
    "csv_monitor": "enabled output_path job_name",
    "tensorboard": "enabled output_path job_name",
    "wandb": "enabled group team project",
    "comet": "enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode",
    "autotuning": "enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric metric_path "
    "tuner_type tuner_early_stopping tuner_num_trials arg_mappings model_info model_info_path mp_size "
    "max_train_batch_size min_train_batch_size max_train_micro_batch_size_per_gpu "
    "min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes",
    "comms_logger": "enabled verbose prof_all debug prof_ops",
}
AUTOTUNER = "autotuner.json"  # how the config that the autotuner passes is called in messages and logs


def check(config: dict, path: str) -> None:
    for key in REMOVED:
        if key in config:
            fail(f'{path}: DeepSpeed 0.19.8 has removed "{key}" and refuses it: take it out')
    for section, keys in KEYS.items():
        values = config.get(section, {})
        if not isinstance(values, dict):
            fail(f'{path}: "{section}" must be an object, {{...}}')
        for key in values:
            if key not in keys.split():
                near = difflib.get_close_matches(key, keys.split(), 1)
                hint = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(keys.split())}"
                fail(f'{path}: DeepSpeed does not know "{section}.{key}": {hint}')
        if not isinstance(values.get("enabled", False), bool):
            fail(f'{path}: "{section}.enabled" must be true or false')
    for section, package in MONITORS.items():
        if package and config.get(section, {}).get("enabled") and importlib.util.find_spec(package) is None:
            fail(
                f'{path}: "{section}" needs a package that is not installed: pip install {package}, '
                'or take "csv_monitor"'
            )
    step = config.get("flops_profiler", {}).get("profile_step", 1)
    if not isinstance(step, int) or isinstance(step, bool) or step < 1:
        fail(f'{path}: "flops_profiler.profile_step" must be a whole number of at least 1, not {step!r}')
    check_type(config, path, "optimizer", torch.optim, OPTIMIZERS)
    check_type(config, path, "scheduler", torch.optim.lr_scheduler, SCHEDULERS)


def check_type(config: dict, path: str, section: str, module, own: list[str]) -> None:
    """The optimizer or scheduler is one of DeepSpeed's own or, by its exact name, one of PyTorch's."""
    if section not in config:
        return
    name = config[section].get("type") if isinstance(config[section], dict) else None
    if not isinstance(name, str):
        fail(f'{path}: "{section}" needs a "type", for example "{"AdamW" if section == "optimizer" else "WarmupLR"}"')
    if section == "optimizer" and name.lower() in REMOVED_OPTIMIZERS:
        fail(f'{path}: DeepSpeed 0.19.8 has removed "{name}" (1-bit optimizers): use "AdamW", or DDP\'s --comm-hook')
    if name in own or (section == "optimizer" and name.lower() in own) or isinstance(getattr(module, name, None), type):
        return
    known = own + [other for other in dir(module) if isinstance(getattr(module, other), type)]
    near = difflib.get_close_matches(name.lower(), [other.lower() for other in known], 1, cutoff=0.5)
    named = next((other for other in known if near and other.lower() == near[0]), own[0])
    fail(f'{path}: DeepSpeed has no {section} "{name}": did you mean "{named}"?')


# ---- ZeRO++ -------------------------------------------------------------------------------------


def quantizes(config: dict) -> list[str]:
    """The keys that ask for ZeRO++'s quantized communication."""
    zero = config.get("zero_optimization", {})
    names = ["zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"]
    return [name for name in names if zero.get(name)]


def check_zeropp(config: dict, path: str, device: str, world_size: int) -> None:
    """ZeRO++ needs CUDA, and groups that lie inside a node. (DeepSpeed would fail later, with an assertion.)"""
    keys = quantizes(config)
    if keys and device != "cuda":
        fail(
            f'{path}: "{keys[0]}" (ZeRO++) is done by a CUDA kernel: it needs NVIDIA GPUs, and this run is on '
            f"{device}; without them use ds_configs/zero3.json"
        )
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world_size)
    if "zero_quantized_gradients" in keys and torch.accelerator.device_count() != local:
        fail(
            f'{path}: "zero_quantized_gradients" needs a process for each GPU that is visible, and there are {local} '
            f"processes and {torch.accelerator.device_count()} GPUs: start as many, or set CUDA_VISIBLE_DEVICES"
        )
    if "zero_quantized_gradients" in keys and world_size > local and not config.get("fp16", {}).get("enabled"):
        # On one node DeepSpeed 0.19.8 reduces gradients as they are.
        fail(
            f'{path}: "zero_quantized_gradients" reads gradients as fp16, whatever they are, and makes garbage of '
            'others: set "fp16": {"enabled": true}, and leave --precision out'
        )
    size = config.get("zero_optimization", {}).get("zero_hpz_partition_size", 1)
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        fail(f'{path}: "zero_hpz_partition_size" must be a whole number, the processes of a node, not {size!r}')
    group = min(size, world_size)  # as DeepSpeed does
    if group > 1 and local % group:
        fail(
            f'{path}: "zero_hpz_partition_size" {size} does not divide the {local} processes of a node, in which a '
            f"group keeps a second copy of the parameters: give {local}"
        )


# ---- monitor ------------------------------------------------------------------------------------


def use_monitor_folder(config: dict, folder: str | None) -> list[str]:
    """Have each run write to a folder of its own, in `folder`, the JSON's output_path or results/monitor.

    DeepSpeed by itself writes where the script was started, and appends to the files of the run before.
    """
    sections = [config[name] for name in ("csv_monitor", "tensorboard") if config.get(name, {}).get("enabled")]
    if folder and not sections:
        fail("--monitor-path is for a config with csv_monitor or tensorboard: ds_configs/zero1_monitor.json")
    places = []
    for section in sections:
        parent = folder or section.get("output_path") or os.path.join("results", "monitor")
        try:
            os.makedirs(parent, exist_ok=True)
            if not os.access(parent, os.W_OK):
                raise PermissionError(0, "Permission denied")
        except OSError as error:
            fail(f"cannot write the monitor's files to {parent} ({error.strerror}): give a folder with --monitor-path")
        name = section.get("job_name", "DeepSpeedJobName")
        taken = os.listdir(parent)
        free = (f"{name}-{number}" for number in itertools.count(2))
        section["output_path"] = parent
        section["job_name"] = name if name not in taken else next(other for other in free if other not in taken)
        places.append(f"config: the monitor writes to {os.path.join(parent, section['job_name'])}")
    return places


# ---- autotuning ---------------------------------------------------------------------------------


def from_autotuner(argument: str) -> str | None:
    """The JSON text, where `argument` is one in base64 and not the name of a file: so the autotuner passes it."""
    if os.path.exists(argument):
        return None
    try:
        text = base64.urlsafe_b64decode(argument).decode()
    except (binascii.Error, ValueError):
        return None
    return text if text.startswith("{") else None


def switch_off_autotuning(config: dict, path: str) -> list[str]:
    """A run that the autotuner did not start has no experiment to end after five steps; says so."""
    if path == AUTOTUNER or not config.get("autotuning", {}).get("enabled"):
        return []
    config["autotuning"]["enabled"] = False
    return ["config: this run trains as usual; to tune, start it by deepspeed --autotuning tune"]
