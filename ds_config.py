"""Reads a DeepSpeed JSON, finds its mistakes before anything starts, and lets the flags override it.

DeepSpeed itself ignores a key it does not know, and starts processes before it reads the file.
"""

import atexit
import contextlib
import difflib
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import warnings

import torch

import buckets
import ds_sections
from harness import fail

# The top-level keys of DeepSpeed 0.19.8's documentation ("DeepSpeed Configuration JSON") and source.
KNOWN_KEYS = [
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "optimizer",
    "scheduler",
    "communication_data_type",
    "seq_parallel_communication_data_type",
    "prescale_gradients",
    "gradient_predivide_factor",
    "gradient_allreduce_op",
    "fp16",
    "bf16",
    "torch_autocast",
    "gradient_clipping",
    "zero_optimization",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "steps_per_print",
    "wall_clock_breakdown",
    "dump_state",
    "log_level",
    "memory_breakdown",
    "data_types",
    "aio",
    "gds",
    "flops_profiler",
    "autotuning",
    "activation_checkpointing",
    "data_efficiency",
    "monitor_config",
    "tensorboard",
    "wandb",
    "comet",
    "csv_monitor",
    "comms_logger",
    "checkpoint",
    "dataloader_drop_last",
    "disable_allgather",
    "hybrid_engine",
    "compile",
    "pipeline",
    "tensor_parallel",
    "weight_quantization",
    "use_data_before_expert_parallel_",
    "vocabulary_size",
    "expert_parallel",
    "sequence_parallel_size",
    "data_parallel_size",
    "zenflow",
    "timers",
    "managed_gradient_accumulation",
]


def read(path: str) -> dict:
    """The JSON at `path` (or in it: see ds_sections.from_autotuner); a mistake in it is one line and exit code 2."""
    given = ds_sections.from_autotuner(path)

    def unique(pairs):
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                fail(f'{path}: "{key}" is given twice: keep one')
        return dict(pairs)

    try:
        if given is None:
            with open(path, encoding="utf-8") as file:
                given = file.read()
        else:
            path = ds_sections.AUTOTUNER
        config = json.loads(given, object_pairs_hook=unique)
    except OSError as error:
        fail(f"cannot read the DeepSpeed config {path}: {error.strerror}")
    except UnicodeDecodeError:
        fail(f"{path} is not UTF-8 text: give a DeepSpeed config in JSON")
    except json.JSONDecodeError as error:
        fail(f"{path}, line {error.lineno}: not JSON: {error.msg} (comments and trailing commas are not allowed)")
    if not isinstance(config, dict):
        fail(f"{path}: a DeepSpeed config is a JSON object, {{...}}")
    for key, value in walk(config):
        if value == "auto":
            fail(f'{path}: "{key}" is "auto", which only Hugging Face\'s Trainer fills in: give a value')
    for key in config:
        if key not in KNOWN_KEYS + ds_sections.REMOVED:
            near = difflib.get_close_matches(key, KNOWN_KEYS, 1, cutoff=0.75)
            if near:
                fail(f'{path}: DeepSpeed does not know "{key}" and would ignore it: did you mean "{near[0]}"?')
            print(f'warning: {path}: DeepSpeed does not document "{key}" and may ignore it', file=sys.stderr)
    for key in ("zero_optimization", "optimizer", "scheduler", "bf16", "fp16", "activation_checkpointing", "pipeline"):
        if not isinstance(config.get(key, {}), dict):
            fail(f'{path}: "{key}" must be an object, {{...}}, not {json.dumps(config[key])}')
    ds_sections.check(config, path)
    return config


def walk(value, name=""):
    """Every (key, value) below a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield f"{name}{key}", inner
        yield from walk(inner, f"{name}{key}.")


# The numbers that a flag and the JSON both can give: flag, key, kind, least value.
NUMBERS = [
    ("batch_size", "train_batch_size", int, 1),
    ("micro_batch_size", "train_micro_batch_size_per_gpu", int, 1),
    ("lr", "optimizer.params.lr", float, 0),
    ("weight_decay", "optimizer.params.weight_decay", float, 0),
    ("warmup_steps", "scheduler.params.warmup_num_steps", int, 0),
    ("clip", "gradient_clipping", float, 0),
    ("log_every", "steps_per_print", int, 1),
]
KEYS = {name: key for name, key, _, _ in NUMBERS} | {"optimizer": "optimizer.type", "precision": "bf16.enabled"}


def get(config: dict, path: str):
    for key in path.split("."):
        config = config.get(key) if isinstance(config, dict) else None
    return config


def flag_values(config: dict, path: str, world_size: int) -> dict:
    """What the JSON says, as flags: {"batch_size": 256, ...}. The batch is completed as DeepSpeed completes it."""
    found = {}
    for name, key, kind, least in NUMBERS:
        value = get(config, key)
        if value is None:
            continue
        right_kind = isinstance(value, int) or (kind is float and isinstance(value, float))
        if not right_kind or isinstance(value, bool) or value < least:
            what = "whole number" if kind is int else "number"
            fail(f'{path}: "{key}" must be a {what} of at least {least}, not {json.dumps(value)}')
        found[name] = value
    accumulation = config.get("gradient_accumulation_steps", 1)
    if not isinstance(accumulation, int) or isinstance(accumulation, bool) or accumulation < 1:
        fail(f'{path}: "gradient_accumulation_steps" must be a whole number of at least 1, not {accumulation!r}')
    batch, micro, per_micro = found.get("batch_size"), found.get("micro_batch_size"), accumulation * world_size
    if batch is not None and micro is None:
        if batch % per_micro:
            fail(
                f'{path}: "train_batch_size" {batch} does not divide into {accumulation} accumulation steps on '
                f"{world_size} processes ({accumulation} x {world_size} = {per_micro})"
            )
        found["micro_batch_size"] = batch // per_micro
    elif batch is None and micro is not None:
        found["batch_size"] = micro * per_micro
    elif batch is not None and "gradient_accumulation_steps" in config and batch != micro * per_micro:
        fail(
            f'{path}: "train_batch_size" {batch} is not micro-batch {micro} x accumulation {accumulation} x '
            f"{world_size} processes = {micro * per_micro}: leave one of the three out"
        )
    if "optimizer" in config:
        found["optimizer"] = str(config["optimizer"].get("type")).lower()
    if not str(get(config, "scheduler.type")).startswith("Warmup"):
        found["warmup_steps"] = 0  # no scheduler: a constant rate; another one: its own keys decide
        if "scheduler" in config:
            found.setdefault("lr", 1e-3)
    fp16 = bool(get(config, "fp16.enabled"))
    found |= read_checkpointing(config, path)
    found["precision"] = "bf16" if get(config, "bf16.enabled") else "fp16" if fp16 else "fp32"
    return found


def apply_flags(config: dict, path: str, args, given: dict, world_size: int) -> list[str]:
    """Write the flags (args) into the config, whose own values are `given`; a line for each that differs."""
    changes = []
    for name, key in KEYS.items():
        value, old = getattr(args, name), given.get(name)
        if value != old:
            what = f'sets "{key}", which {path} leaves open' if old is None else f'replaces {old} ("{key}" of {path})'
            changes.append(f"config: --{name.replace('_', '-')} {value} {what}")

    changes += write_checkpointing(config, path, args)

    config["train_batch_size"] = args.batch_size
    config["train_micro_batch_size_per_gpu"] = args.micro_batch_size
    config["gradient_accumulation_steps"] = args.batch_size // (args.micro_batch_size * world_size)
    config["gradient_clipping"] = args.clip  # DeepSpeed's own default is to clip at 1.0
    config["steps_per_print"] = args.log_every
    config.setdefault("log_level", "info")  # at its own level DeepSpeed hides its throughput line
    if args.precision != given["precision"]:
        config.pop("fp16", None)
        config["bf16"] = {"enabled": args.precision == "bf16"}

    if args.optimizer == "sgd" != given.get("optimizer"):
        config["optimizer"] = {"type": "SGD", "params": {}}
    elif args.optimizer == "adamw" != given.get("optimizer"):
        params = {"betas": [0.8, 0.999], "eps": 1e-8, "torch_adam": True}
        config["optimizer"] = {"type": "AdamW", "params": params}
    if args.optimizer == "sgd":  # ZeRO and its CPU offload work with plain SGD, but want to be told
        config["zero_allow_untested_optimizer"] = True
        config["zero_force_ds_cpu_optimizer"] = False
    config["optimizer"].setdefault("params", {}).update(lr=args.lr, weight_decay=args.weight_decay)

    set_schedule(config, path, args, given)
    return changes


# Where DeepSpeed's and PyTorch's schedulers that do not start from the optimizer's rate have their own.
RATES = {
    "OneCycle": "cycle_max_lr",
    "LRRangeTest": "lr_range_test_min_lr",
    "OneCycleLR": "max_lr",
    "CyclicLR": "max_lr",
}


def set_schedule(config: dict, path: str, args, given: dict) -> None:
    """Write --lr and --warmup-steps into the scheduler, where it has keys for them; else say what to change."""
    kind = get(config, "scheduler.type")
    new_rate, new_warmup = args.lr != given.get("lr"), args.warmup_steps != given.get("warmup_steps")
    if kind in (None, "WarmupLR"):
        if args.warmup_steps == 0:
            config.pop("scheduler", None)
        elif new_rate or new_warmup:
            scheduler = config.setdefault("scheduler", {"type": "WarmupLR", "params": {"warmup_type": "linear"}})
            scheduler.setdefault("params", {}).update(warmup_max_lr=args.lr, warmup_num_steps=args.warmup_steps)
    elif kind in ("WarmupDecayLR", "WarmupCosineLR"):
        if args.warmup_steps == 0:
            fail(
                f"--warmup-steps 0 does not go with {kind}, which would not decay either: "
                f'take "scheduler" out of {path}'
            )
        if new_rate or new_warmup:
            params = config["scheduler"].setdefault("params", {})
            params["warmup_num_steps"] = args.warmup_steps
            if kind == "WarmupDecayLR":  # WarmupCosineLR scales the optimizer's rate
                params["warmup_max_lr"] = args.lr
    elif new_warmup:
        fail(f'{kind}, the scheduler of {path}, has no --warmup-steps: change "scheduler.params" there')
    elif new_rate and kind in RATES:
        fail(f'{kind}, the scheduler of {path}, has no --lr: change "scheduler.params.{RATES[kind]}" there')


def parse_args(parser, world_size: int):
    """The flags, the config with the flags written into it, and a line for each value that a flag changed.

    What a flag does not say, the JSON does; what neither says is the flag's default.
    """
    # Flags that not every script has.
    parser.set_defaults(estimate_memory=None, nvme_path=None, bucket_size=None, monitor_path=None)
    args = parser.parse_args()
    if importlib.util.find_spec("deepspeed") is None:
        fail("DeepSpeed is not installed (it needs Linux): pip install deepspeed==0.19.8")
    if args.estimate_memory:
        return args, {}, []
    path = args.deepspeed_config
    if path is None:
        fail("no strategy: give --deepspeed_config a file of ds_configs/")
    config = read(path)
    path = ds_sections.AUTOTUNER if ds_sections.from_autotuner(path) else path
    given = flag_values(config, path, world_size)
    parser.set_defaults(**given)
    args = parser.parse_args()
    args.deepspeed_config = path
    changes = apply_flags(config, path, args, given, world_size)
    changes += buckets.apply(config, args.bucket_size, path)
    changes += ds_sections.switch_off_autotuning(config, path)
    on_cpu = args.device == "cpu" or not torch.accelerator.is_available()
    if on_cpu:
        changes += switch_off_pinning(config)
    device = "cpu" if on_cpu else torch.accelerator.current_accelerator().type
    ds_sections.check_zeropp(config, path, device, world_size)
    changes += ds_sections.use_monitor_folder(config, args.monitor_path)
    return args, config, changes


def zero_config(config: dict, path: str):
    """DeepSpeed's own reading of "zero_optimization", which checks its keys and values and fills in defaults."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    try:
        return DeepSpeedZeroConfig(**config.get("zero_optimization", {}))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        known = list(DeepSpeedZeroConfig.model_fields)
        near = difflib.get_close_matches(key, known, 1)
        hint = f': did you mean "{near[0]}"?' if near and first["type"] == "extra_forbidden" else ""
        fail(f'{path}: "zero_optimization.{key}": {first["msg"]}{hint}')


# ---- offload ------------------------------------------------------------------------------------


def offload_sections(config: dict) -> list[dict]:
    zero = config.get("zero_optimization", {})
    return [zero[key] for key in ("offload_optimizer", "offload_param") if zero.get(key)]


def use_swap_folder(config: dict, path: str, nvme_path: str | None) -> None:
    """Where the config offloads to NVMe, give this process a folder of its own, removed when it ends.

    The folder lies in --nvme-path, else in the system's temporary folder.
    """
    sections = [section for section in offload_sections(config) if section.get("device") == "nvme"]
    if not sections:
        if nvme_path:
            fail(f"--nvme-path is for a config that offloads to NVMe, which {path} does not")
        return
    if not all(section.get("nvme_path") for section in sections):
        fail(f'{path}: offload to "nvme" needs an "nvme_path": name a folder on a fast disk')
    parent = nvme_path or tempfile.gettempdir()
    try:
        folder = tempfile.mkdtemp(prefix="zero-infinity-", dir=parent)
    except OSError as error:
        fail(f"cannot write swap files to {parent} ({error.strerror}): give a writable folder with --nvme-path")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # By default SIGTERM ends Python without running what is registered.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for section in sections:
        section["nvme_path"] = folder


def switch_off_pinning(config: dict) -> list[str]:
    """Without a GPU there is nothing to pin memory for; a line that says so where the config asked for it."""
    pinned = [section for section in offload_sections(config) if section.get("pin_memory")]
    for section in pinned:
        section["pin_memory"] = False
    return ["config: pin_memory is switched off: this machine has no GPU to copy to"] if pinned else []


# ---- activation checkpointing -------------------------------------------------------------------

# The options of DeepSpeed's own checkpoint function, which the scripts do not use: under ZeRO-3 its non-reentrant
# one, of DeepSpeed 0.19.8, ends in "The size of tensor a (0) must match"; it computes a block again without the
# autocast it had; and what it holds, it holds out of autograd's sight, where it is neither counted nor offloaded.
# PyTorch's works with every stage, and with the pipeline.
OPTIONS = {
    "cpu_checkpointing": bool,
    "number_checkpoints": int,
    "partition_activations": bool,
    "contiguous_memory_optimization": bool,
    "synchronize_checkpoint_boundary": bool,
    "profile": bool,
}


def read_checkpointing(config: dict, path: str) -> dict:
    """What "activation_checkpointing" and "pipeline" of the JSON say, as flags; the first does by being there."""
    section, found = config.get("activation_checkpointing"), {}
    for key, value in (section or {}).items():
        if key not in OPTIONS:
            near = difflib.get_close_matches(key, OPTIONS, 1)
            hint = f': did you mean "{near[0]}"?' if near else ""
            fail(f'{path}: DeepSpeed does not know "activation_checkpointing.{key}" and would ignore it{hint}')
        if type(value) is not OPTIONS[key] and (value is not None or key != "number_checkpoints"):
            what = "true or false" if OPTIONS[key] is bool else "a whole number"
            fail(f'{path}: "activation_checkpointing.{key}" must be {what}, not {json.dumps(value)}')
        if value is True and key != "cpu_checkpointing":
            fail(f'{path}: "activation_checkpointing.{key}" is not for these scripts: leave it out')
    interval = get(config, "pipeline.activation_checkpoint_interval") or 0
    if type(interval) is not int or interval < 0:
        fail(f'{path}: "pipeline.activation_checkpoint_interval" must be a whole number, not {json.dumps(interval)}')
    if section is not None or interval:
        found["activation_checkpointing"] = True
    if get(config, "activation_checkpointing.cpu_checkpointing"):
        found["activation_offload"] = True
    return found


def write_checkpointing(config: dict, path: str, args) -> list[str]:
    """Write the flags into the config; a line for each thing that they, or the scripts, change."""
    changes = []
    if args.activation_checkpointing and "activation_checkpointing" not in config:
        config["activation_checkpointing"] = {}
        changes.append(f'config: --activation-checkpointing sets "activation_checkpointing", which {path} leaves open')
    if args.activation_checkpointing and args.activation_offload:
        config["activation_checkpointing"]["cpu_checkpointing"] = True
    reentrant = config.get("pipeline", {}).pop("use_reentrant", False)  # false would bring in DeepSpeed's function
    if reentrant:
        changes.append(f'config: "pipeline.use_reentrant" of {path} is not used: checkpointing is non-reentrant')
    return changes


def prepare(config: dict, args) -> int:
    """Check what only DeepSpeed can check, make swap folder and C++ code ready; returns the ZeRO stage."""
    path = args.deepspeed_config
    # DeepSpeed 0.19.8 calls collectives by names that newer PyTorch renames, with a warning for each call.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed.c10d_logger")
    leave_collectives_to_gloo()
    if shutil.which("ninja") is None:  # pip's ninja lies beside Python, which may have been called by its path
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), os.path.dirname(sys.executable)])
    zero = zero_config(config, path)
    if zero.stage == 3 and args.compile:
        fail(
            f"{path}: ZeRO-3 fetches parameters inside of what --compile would compile, which then compiles anew for "
            "each layer and gives up: leave --compile out, or take ZeRO-2"
        )
    buffers = buckets.predict(zero, bytes_of_a_gradient(config))
    device = os.environ["DS_ACCELERATOR"]
    buckets.check(buffers, path, device, int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1))
    if args.bucket_size and int(os.environ["RANK"]) == 0:
        print(buckets.describe(zero, buffers), flush=True)
    use_swap_folder(config, path, args.nvme_path)
    load_ops(config, path)
    return int(zero.stage)


def bytes_of_a_gradient(config: dict) -> int:
    """Of one number of it, as it is reduced."""
    half = get(config, "bf16.enabled") or get(config, "fp16.enabled")
    named = config.get("communication_data_type") or ("fp16" if half else "fp32")
    return 4 if named in ("fp32", "float32") else 2


def leave_collectives_to_gloo() -> None:
    """Keep DeepSpeed from compiling collectives of its own for CPUs: gloo carries them, as it does for DDP and FSDP.

    Its own go through shared memory: 66 MB per process in /dev/shm, more than a container has by default,
    which stay there after the run. And they need a C++ compiler, which a laptop may not have.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def load_ops(config: dict, path: str) -> None:
    """Build or load the C++ code that offload needs, before training and its clock begin."""
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

    devices = {section.get("device") for section in offload_sections(config)}
    try:
        optimizer = config["optimizer"]
        is_adam = str(optimizer["type"]).lower() in ("adam", "adamw") and not optimizer["params"].get("torch_adam")
        if devices & {"cpu", "nvme"} and is_adam:
            with patience("cpu_adam"):
                CPUAdamBuilder().load(verbose=False)
        if ds_sections.quantizes(config):
            from deepspeed.ops.op_builder import QuantizerBuilder

            with patience("the quantizer of ZeRO++"):
                QuantizerBuilder().load(verbose=False)
        if "nvme" in devices:
            if not AsyncIOBuilder().is_compatible(verbose=False):
                fail("offload to NVMe needs libaio's headers: install them (Debian, Ubuntu: apt install libaio-dev)")
            with patience("async_io"):
                AsyncIOBuilder().load(verbose=False)
    except (RuntimeError, ImportError, OSError) as error:
        reason = str(error).strip().splitlines()[0][:100]
        if ds_sections.quantizes(config):
            fail(f"{path} quantizes, which needs the CUDA toolkit (nvcc) for DeepSpeed's operators: {reason}")
        fail(f"{path} offloads, which needs a C++ compiler for DeepSpeed's operators (apt install g++): {reason}")


@contextlib.contextmanager
def patience(what: str):
    """Say what takes so long when DeepSpeed compiles at first use (minutes) or waits for another process to."""
    message = f"DeepSpeed compiles {what}, or waits for a process that does: once, for one to several minutes"
    timer = threading.Timer(5, print, [message], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
