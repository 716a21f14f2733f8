"""Activation memory: what autograd saves in the forward pass for the backward pass, and three ways to hold less of it.

    --activation-checkpointing   holds a block's input alone, and computes the block again in the backward pass
    --activation-offload         holds what is saved in CPU memory, in place of the GPU's
    --compile                    compiles each block; the compiler decides what is saved, and what is computed again

A script gains two lines: Saved(...), which sets up the three and begins to count, and `saved.count()` after the
first step, which ends the counting. predict() says what theory gives for GPTlite; both, side by side, as CSV:

    python activations.py nano baby > results/activations-cpu.csv
    python activations.py baby --micro-batch-size 2 --dropout 0.1

Bytes are those that one process holds; GB = 2**30 bytes.
"""

import argparse
import collections
import csv
import os
import shlex
import shutil
import sys
import weakref
from functools import partial

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.multiprocessing.reductions import StorageWeakRef

import accounting
import gptlite

# ---- flags --------------------------------------------------------------------------------------


def add_flags(add) -> None:
    """`add` is a parser's add_argument."""
    add("--activation-checkpointing", action="store_true", help="hold only the inputs of blocks; compute them again")
    add("--activation-offload", action="store_true", help="hold what the backward pass needs in CPU memory")
    add("--compile", action="store_true", help="compile each block (torch.compile)")


def find_problem(args) -> str | None:
    """Why the flags cannot be had here, in a line; None if they can."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")  # as torch.compile looks
    if args.compile and shutil.which(shlex.split(compiler)[0]) is None:  # CXX may be "ccache g++"
        return f"--compile needs a C++ compiler, and there is no {compiler} (Debian, Ubuntu: apt install g++)"
    return None


def notes(args, device: torch.device) -> list[str]:
    """What a flag does not do here, in a line each."""
    if args.activation_offload and device.type == "cpu":
        return ["config: --activation-offload changes nothing: on a machine without a GPU everything is in CPU memory"]
    return []


# ---- what is saved ------------------------------------------------------------------------------


class Saved:
    """What autograd saves: offloaded if the flags say so, and counted until count() is called, after the first step.

    `blocks` are the model's blocks, which are compiled and checkpointed as the flags say.

    Each storage counts once, for as long as autograd holds it. Not counted are parameters, also where a strategy
    has gathered them; integers: tokens, targets and positions are the data, not activations; and what offload has
    moved to CPU memory. While its hooks are in force, autograd does not notice that a saved tensor is changed in
    place: a model that does so raises an error after the first step, or, with offload, never.
    """

    hooks = None  # those that are in force: one pair at a time

    def __init__(self, args, device: torch.device, blocks=()):
        self.checkpoints, self.device = args.activation_checkpointing, device
        self.more_steps = getattr(args, "steps", 1) > 1
        self.offload = Offload(device) if args.activation_offload else None
        self.counting = True
        self.holders: dict[int, int] = {}  # address of a storage: how many tensors that autograd holds look into it
        self.held = self.peak = 0  # bytes now, and at most
        self.block: int | None = None  # bytes that one block holds beside its input
        for block in blocks:
            # In place of `forward`: names stay as they are, and the hooks of FSDP and ZeRO run outside, once.
            if args.compile:
                block.forward = torch.compile(block.forward)
            if self.checkpoints:
                block.forward = partial(self.checkpoint, block.forward)
        # In force until count(); where they offload, to the end, or until the next training.
        self.stop_hooks()
        Saved.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        Saved.hooks.__enter__()

    def count(self) -> dict[str, int]:
        """Bytes at the peak of the first step; ends the counting.

        Activations is all of it. With checkpointing BlockActivations is the part of it that one block holds while it
        is computed again; the rest is the inputs of all blocks, and what is saved outside of them.
        """
        self.counting = False
        if not self.offload:
            self.stop_hooks()
        if self.checkpoints and self.more_steps:
            # The first step held one block more than the others will (see checkpoint()).
            accounting.reset_peak_memory(self.device)
        return {"Activations": self.peak} | ({"BlockActivations": self.block or 0} if self.checkpoints else {})

    @staticmethod
    def stop_hooks() -> None:
        if Saved.hooks:
            Saved.hooks.__exit__(None, None, None)
        Saved.hooks = None

    def checkpoint(self, function, *inputs):
        """function(*inputs), of which only the inputs are held until the backward pass computes it again."""
        if not torch.is_grad_enabled():
            return function(*inputs)
        if self.counting and self.block is None:
            # What a block saves when it is computed again does not pass the hooks. So the very first time it is not
            # checkpointed: the block holds now what any block will hold for a while. That changes no number.
            # (Nor is it offloaded: what is computed again is not.)
            before, self.block = self.held, 0
            offload, self.offload = self.offload, None
            outputs = function(*inputs)
            self.offload = offload
            self.block = self.held - before - sum(storage_of(x).nbytes() for x in inputs)
            return outputs
        return torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=False)

    def pack(self, tensor: torch.Tensor):
        """The hook that autograd calls with each tensor it saves: it holds what this returns."""
        if is_parameter(tensor) or tensor.dtype == torch.int64:
            return tensor
        packed = self.offload.pack(tensor) if self.offload else tensor
        return Kept(self, tensor, packed) if self.counting else packed

    def unpack(self, packed) -> torch.Tensor:
        """The hook that autograd calls in the backward pass, with what pack() returned."""
        packed = packed.packed if isinstance(packed, Kept) else packed
        return packed.tensor() if isinstance(packed, Offloaded) else packed


def is_parameter(tensor: torch.Tensor) -> bool:
    """A parameter, or a view of one (a layer saves its weight transposed)."""
    tensor = tensor if tensor._base is None else tensor._base
    return tensor.is_leaf and tensor.requires_grad


@torch.no_grad()
def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The memory of a tensor; of one that is cut over processes, this process's part."""
    tensor = accounting.local(tensor)
    tensor = tensor.wait() if hasattr(tensor, "wait") else tensor  # the result of a collective that is under way
    return tensor.untyped_storage()


class Kept:
    """A saved tensor, counted as long as this object lives: autograd drops it when the backward pass has passed."""

    def __init__(self, saved: Saved, tensor: torch.Tensor, packed):
        self.packed, self.saved, self.key = packed, saved, None
        if isinstance(packed, Offloaded) and packed.copy.has_left:
            return
        storage = storage_of(tensor)
        self.key, self.size = storage.data_ptr(), storage.nbytes()
        saved.holders[self.key] = saved.holders.get(self.key, 0) + 1
        if saved.holders[self.key] == 1:
            saved.held += self.size
            saved.peak = max(saved.peak, saved.held)

    def __del__(self):
        if self.key is not None:
            self.saved.holders[self.key] -= 1
            if not self.saved.holders[self.key]:
                del self.saved.holders[self.key]
                self.saved.held -= self.size


# ---- offload ------------------------------------------------------------------------------------


class Offload:
    """Moves saved tensors to CPU memory and back, on a stream of their own, as vDNN does (Rhu et al. 2016).

    The copy out goes on while the forward pass computes the next layers; in the backward pass the copy back of
    what is needed next goes on while the layers behind it are computed. On a CPU nothing moves.
    """

    LEAST = 2**20  # bytes: what is smaller stays, it would cost more time than it saves memory
    WINDOW = 2**27  # bytes that are on their way at once, out or back: about a block's

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = None if device.type == "cpu" else torch.Stream(device)
        self.copies = weakref.WeakValueDictionary()  # address and version of a storage: its Copy
        self.last = lambda: None  # the Copy that was made last (a weak reference)
        self.leaving = collections.deque()  # memory on its way out, and the event of its arrival
        self.leaving_bytes = 0

    def pack(self, tensor: torch.Tensor):
        """What is kept in place of `tensor`: an Offloaded, or the tensor itself where that is not worth it."""
        storage = storage_of(tensor)
        if storage.nbytes() < self.LEAST or storage.device.type != self.device.type:
            return tensor
        key = storage.data_ptr(), tensor._version
        copy = self.copies.get(key)
        if copy is None or copy.source.expired():  # its memory has been freed, and is another tensor's now
            copy = self.copies[key] = Copy(self, storage)
            self.last = weakref.ref(copy)
        return Offloaded(copy, tensor)

    def leave(self, memory: torch.Tensor, event: torch.Event) -> None:
        """Hold `memory` until it has been copied. The next layers wait for the copies where these lag behind, so
        that they find memory that is free: what only record_stream() held would be free too late for them."""
        self.leaving.append((memory, event))
        self.leaving_bytes += memory.numel()
        while self.leaving_bytes > self.WINDOW:
            self.let_go()

    def let_go(self) -> None:
        memory, event = self.leaving.popleft()
        self.leaving_bytes -= memory.numel()
        torch.accelerator.current_stream(self.device).wait_event(event)


class Copy:
    """The copy of one storage in CPU memory; q, k and v, say, are views of one. Freed with the last view of it."""

    def __init__(self, offload: Offload, storage: torch.UntypedStorage):
        self.offload, self.stream, self.device = offload, offload.stream, offload.device
        self.has_left = self.stream is not None
        self.source = StorageWeakRef(storage)
        self.before = offload.last  # in the backward pass it is needed after this one
        self.here = self.arrived = None
        memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        if not self.has_left:
            self.here = memory
            return
        self.there = torch.empty(memory.shape, dtype=torch.uint8, pin_memory=True)
        self.stream.wait_stream(torch.accelerator.current_stream(self.device))  # which is to compute the values first
        with self.stream:
            self.there.copy_(memory, non_blocking=True)
        offload.leave(memory, self.stream.record_event())

    def fetch(self) -> None:
        """Begin the copy back, behind all other copies."""
        if self.here is None:
            # Of the current stream's memory, which that stream may have used until now.
            self.here = torch.empty(self.there.shape, dtype=torch.uint8, device=self.device)
            self.stream.wait_stream(torch.accelerator.current_stream(self.device))
            with self.stream:
                self.here.copy_(self.there, non_blocking=True)
            self.arrived = self.stream.record_event()

    def get(self) -> torch.UntypedStorage:
        """The storage, on the device again; begins to fetch those that are needed next."""
        if self.has_left:
            while self.offload.leaving:
                self.offload.let_go()
            self.fetch()
            if self.arrived:
                torch.accelerator.current_stream(self.device).wait_event(self.arrived)
                self.arrived = None
            copy, ahead = self.before(), 0
            while copy is not None and ahead < Offload.WINDOW:
                copy.fetch()
                ahead += copy.there.numel()
                copy = copy.before()
        return self.here.untyped_storage()

    def __del__(self):
        if self.arrived:  # fetched in vain: its memory is free when the copy has ended
            self.here.record_stream(self.stream)


class Offloaded:
    """A saved tensor whose storage is in a Copy: its shape, and, of a DTensor, how it is cut."""

    def __init__(self, copy: Copy, tensor: torch.Tensor):
        with torch.no_grad():
            local = accounting.local(tensor)
        self.copy, self.dtype = copy, local.dtype
        self.view = (local.storage_offset(), local.shape, local.stride())
        self.cut = None
        if local is not tensor:
            self.cut = {"device_mesh": tensor.device_mesh, "placements": tensor.placements}
            self.cut |= {"shape": tensor.shape, "stride": tensor.stride()}

    def tensor(self) -> torch.Tensor:
        storage = self.copy.get()
        local = torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, *self.view)
        if self.cut is None:
            return local
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(local, run_check=False, **self.cut)


# ---- theory -------------------------------------------------------------------------------------


def predict(config: gptlite.GPTConfig, vocab_size: int, batch: int, checkpointing: bool = False) -> int:
    """Bytes that autograd holds at the peak, for `batch` sequences of block_size tokens in fp32.

    Counted operation by operation, as Korthikanti et al. 2022 do (arXiv 2205.05198); the idea of computing again is
    from Chen et al. 2016 (arXiv 1604.06174). Each operation saves what its gradient is computed from: without dropout
    a block 12 d + H + 4 numbers of 4 bytes per token (d = n_embd, H = n_head). Of a checkpointed block only the d of
    its input are left, but for the one that is just computed again. The factor between both goes towards 12, the more
    blocks there are.
    """
    T, d, H = config.block_size, config.n_embd, config.n_head
    norm = d + 2  # its input, and of each token mean and 1/deviation
    if config.dropout:
        # The kernel that needs no T x T matrix has no dropout on a CPU: q and k are copied, scaled, and v (of a single
        # sequence v is not copied, and with it all of q, k, v is held); each head holds its T x T weights three
        # times: after the softmax, their mask, and what is left of them.
        attention = 2 * d + (d if batch > 1 else 3 * d) + 3 * H * T
        mask = d  # fp32 on a CPU
    else:
        attention = 3 * d + H  # q, k, v, and for each head the logarithm of the softmax's sum
        mask = 0
    #        norm1  qkv's input   proj's input    norm2  up's input  ReLU's output, down's input
    block = norm + d + attention + d + mask + norm + d + 4 * d + mask
    # Embeddings save tokens alone (and a mask). The loss saves the log-softmax of the logits, and one number.
    outside = mask + norm + d + vocab_size
    blocks = config.n_layer * d + block - d if checkpointing else config.n_layer * block
    return 4 * (batch * T * (outside + blocks) + 1)


# ---- measured beside theory ---------------------------------------------------------------------

VARIANTS = [[], ["--activation-checkpointing"], ["--activation-offload"]]
VARIANTS += [["--activation-checkpointing", "--activation-offload"], ["--compile"]]
VARIANTS += [["--activation-checkpointing", "--compile"]]


def measure(config: gptlite.GPTConfig, vocab_size: int, batch: int, args, device=None) -> tuple[int, int | None]:
    """Bytes at the peak of a training step on random tokens: as counted, and on a GPU as its allocator says.

    The allocator's peak also has what lives for a moment only, such as the gradients of activations.
    """
    device = device or torch.device("cpu")
    model = gptlite.GPTlite(vocab_size, config).to(device)
    tokens = torch.randint(vocab_size, (batch, config.block_size), device=device)
    saved = Saved(args, device, model.blocks)

    def step():
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, -2), tokens.flatten()).backward()

    step()
    counted, allocated = saved.count()["Activations"], None
    if device.type != "cpu":  # once more: the gradients of the parameters are there now
        accounting.reset_peak_memory(device)
        before, _ = accounting.memory(device)
        step()
        allocated = accounting.memory(device)[1] - before
    saved.stop_hooks()
    return counted, allocated


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["nano", "baby"], help="shapes of GPTlite (default: nano baby)")
    parser.add_argument("--micro-batch-size", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--block-size", type=int, help="tokens per sample, in place of the model's own")
    parser.add_argument("--dropout", type=float, default=0.0, help="(default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=65, help="(default: %(default)s, Tiny Shakespeare's)")
    options = parser.parse_args()
    for name in options.models:
        if name not in gptlite.PRESETS:
            parser.error(f"there is no model {name}: there are {', '.join(gptlite.PRESETS)}")
    flags = argparse.ArgumentParser()
    add_flags(flags.add_argument)
    batch, vocab_size = options.micro_batch_size, options.vocab_size
    rows = csv.writer(sys.stdout, lineterminator="\n")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = accelerator if accelerator and accelerator.type != "mps" else torch.device("cpu")
    columns = ["model", "block size", "micro batch", "flags", "counted (MB)", "theory (MB)", "times less"]
    rows.writerow(columns + (["allocator's peak (MB)"] if device.type != "cpu" else []))
    for name in options.models:
        config = gptlite.get_config(name, block_size=options.block_size, dropout=options.dropout)
        plain = None
        for variant in VARIANTS:
            args = flags.parse_args(variant)
            if problem := find_problem(args):
                print(f"warning: {problem}", file=sys.stderr)
                continue
            counted, allocated = measure(config, vocab_size, batch, args, device)
            plain = plain or counted
            # What a compiled block saves, and what it computes again, is for the compiler to decide.
            # (Nor does theory know how much of what is offloaded stays.)
            known = not args.compile and not (args.activation_offload and device.type != "cpu")
            theory = None if not known else predict(config, vocab_size, batch, args.activation_checkpointing)
            rows.writerow(
                [
                    *(name, config.block_size, batch, " ".join(variant) or "none"),
                    f"{counted / 2**20:.2f}",
                    f"{theory / 2**20:.2f}" if theory else "-",
                    f"{plain / max(1, counted):.2f}",
                    *([f"{allocated / 2**20:.2f}"] if allocated is not None else []),
                ]
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
