"""ResNet-18 and CIFAR-10: what another model and another data set must bring to be trained by the same scripts.

The scripts call two functions, as they do of gptlite.py:

    train_set, valid_set, num_classes = get_dataset()
    model = get_model(num_classes)

The model is torchvision's. What had to be done to it is in ResNet and its layers, and is what any model needs
that was not written for these strategies: weights that each layer draws in its own constructor, from a CPU
generator; `blocks`, the layers that FSDP gathers one by one; and, since ResNet has BatchNorm, statistics that stay
fp32 in mixed precision and can be taken over all processes (--sync-batchnorm). GPTlite has nothing of the last kind:
BatchNorm is where data parallelism is not the same as a larger batch, unless the processes share their statistics.

Without --sync-batchnorm each process normalises by the statistics of its own micro-batch, and its running statistics
are its own, too (under DDP, which by default sends rank 0's buffers to all before each forward, rank 0's and this
process's last micro-batch). harness.evaluate() takes their mean over the processes, so that all evaluate one model.
"""

import io
import math
import os
import pickle
import sys
import tarfile
import warnings

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset
from torchvision import models
from torchvision.datasets import CIFAR10, FakeData
from torchvision.transforms import PILToTensor

from gptlite import DataError, download, draw_normal, layer_generator

# ---- model ------------------------------------------------------------------------------------


# As in gptlite.py, weights are drawn in each layer's own constructor: deepspeed.zero.Init takes the parameters
# away as soon as it returns, and torchvision's ResNet, which draws after all layers are built, would find none.
class Conv2d(nn.Conv2d):
    """The shape of `like` with torchvision's initial weights: normal, "fan out" (He et al. 2015)."""

    def __init__(self, like: nn.Conv2d, generator: torch.Generator):
        super().__init__(
            like.in_channels, like.out_channels, like.kernel_size, like.stride, like.padding, bias=like.bias is not None
        )
        fan_out = like.out_channels * math.prod(like.kernel_size)
        draw_normal(self.weight, math.sqrt(2 / fan_out), generator)

    def reset_parameters(self):
        pass  # nn.Conv2d's own draw, from the global generator, would be overwritten


class Linear(nn.Linear):
    """The shape of `like`; initial weights with the variance of nn.Linear's, biases 0."""

    def __init__(self, like: nn.Linear, generator: torch.Generator):
        super().__init__(like.in_features, like.out_features)
        draw_normal(self.weight, math.sqrt(1 / (3 * like.in_features)), generator)
        nn.init.zeros_(self.bias)

    def reset_parameters(self):
        pass


class Fp32Statistics(nn.Module):  # a Module, so that zero.Init waits for this constructor to return, too
    """What the BatchNorms below have in common: fp32 wherever statistics are involved, and a scale to start with."""

    def __init__(self, channels: int, scale: float = 1.0):
        super().__init__(channels)
        nn.init.constant_(self.weight, scale)

    def keep_fp32(self) -> None:
        # DeepSpeed casts a whole model to bf16, buffers too, before its first step, when they are 0 and 1 and lose
        # nothing by it. A running mean kept in bf16 would lose most updates: 1 + 0.1 * 0.01 is 1.
        if self.running_mean.dtype in (torch.bfloat16, torch.float16):
            self.running_mean, self.running_var = self.running_mean.float(), self.running_var.float()

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        """Statistics of `x` in training, else the running ones. FSDP hands a bf16 layer's weights over in bf16."""
        mean, var = self.running_mean, self.running_var
        weight, bias = self.weight.to(mean.dtype), self.bias.to(mean.dtype)
        return F.batch_norm(x, mean, var, weight, bias, self.training, self.momentum, self.eps)


class BatchNorm2d(Fp32Statistics, nn.BatchNorm2d):
    """Each process takes mean and variance of its own micro-batch: x (B, C, H, W), fp32 or bf16, -> the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.keep_fp32()
        if self.training:
            self.num_batches_tracked += 1
        return self.normalize(x)


class SyncBatchNorm(BatchNorm2d):
    """Mean and variance of one micro-batch of all processes together: x (B, C, H, W), fp32 or bf16, -> the same.

    In evaluation it uses the running statistics and sends nothing. PyTorch's own SyncBatchNorm, whose kernels are
    faster, refuses the tensors of a CPU, and the bf16 weights that FSDP and DeepSpeed hand over in mixed precision.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(x)
        self.keep_fp32()
        self.num_batches_tracked += 1
        whole = x.to(self.running_mean.dtype)
        ones = whole.new_full((1,), x.numel() / x.shape[1])  # values per channel; processes may have different numbers
        total = SumOverProcesses.apply(torch.cat([whole.sum((0, 2, 3)), ones]))
        count = total[-1]
        mean = total[:-1] / count
        # The squares of what is left, not the mean square minus the squared mean, which cancels in fp32.
        centered = whole - mean[:, None, None]
        variance = SumOverProcesses.apply(centered.square().sum((0, 2, 3))) / count
        with torch.no_grad():  # as everywhere in PyTorch the running variance is the unbiased one
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        scale = self.weight.to(whole.dtype) * torch.rsqrt(variance + self.eps)
        return torch.addcmul(self.bias.to(whole.dtype)[:, None, None], centered, scale[:, None, None]).to(x.dtype)


class SumOverProcesses(torch.autograd.Function):
    """An all-reduce to differentiate through: what every process gets depends on what each has put in, so each
    one's gradient is the sum of all processes' gradients. PyTorch's public one is deprecated for a private one."""

    @staticmethod
    def forward(ctx, tensor):
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        return tensor

    @staticmethod
    def backward(ctx, gradient):
        return SumOverProcesses.apply(gradient)


class ResNet(models.ResNet):
    """torchvision's ResNet-18. forward: images (B, 3, H, W) -> logits (B, num_classes)."""

    def __init__(self, num_classes: int, norm: type[nn.Module] = BatchNorm2d, seed: int = 0):
        with torch.device("meta"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Initializing zero-element tensors")  # under zero.Init
            super().__init__(models.resnet.BasicBlock, [2, 2, 2, 2], num_classes)
        # That was shapes alone. The layers with weights are built again, one after the other, as we need them.
        for number, (name, layer) in enumerate(list(self.named_modules())):
            if isinstance(layer, nn.Conv2d):
                self.set_submodule(name, Conv2d(layer, layer_generator(seed, number)))
            elif isinstance(layer, nn.Linear):
                self.set_submodule(name, Linear(layer, layer_generator(seed, number)))
            elif isinstance(layer, nn.BatchNorm2d):
                # A block begins as the identity: what it adds to its input starts at 0 (torchvision's
                # zero_init_residual; Goyal et al. 2017). The first steps are calmer by it.
                self.set_submodule(name, norm(layer.num_features, 0.0 if name.endswith("bn2") else 1.0))

    @property
    def blocks(self) -> list[nn.Module]:
        """The residual blocks, first to last: FSDP's units."""
        return [block for layer in (self.layer1, self.layer2, self.layer3, self.layer4) for block in layer]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # Autocast and FSDP cast the input themselves; DeepSpeed, whose weights are bf16, leaves it as it is.
        return super().forward(images.to(self.conv1.weight.dtype))


def get_model(num_classes: int, *, sync_batchnorm: bool = False, seed: int = 0) -> ResNet:
    """A ResNet-18, which has 11,181,642 parameters for 10 classes."""
    return ResNet(num_classes, SyncBatchNorm if sync_batchnorm else BatchNorm2d, seed)


# ---- data -------------------------------------------------------------------------------------

DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data")
TRAIN_FILES = [name for name, _ in CIFAR10.train_list]  # data_batch_1, ...
VALID_FILES = [name for name, _ in CIFAR10.test_list]  # test_batch
META_FILE = CIFAR10.meta["filename"]
# Mean and standard deviation of the red, green and blue of CIFAR-10's training images, of values from 0 to 1.
MEAN = torch.tensor([0.4914, 0.4822, 0.4465])[:, None, None]
STD = torch.tensor([0.2470, 0.2435, 0.2616])[:, None, None]
IMAGE_SIZE = 32


class Images(Dataset):
    """Item i: image i (3, 32, 32) fp32, normalised, and its class, int64 of shape ().

    Nothing is drawn at random: the item depends on the index alone, so that every strategy sees the same images.
    `images` is (N, 3, 32, 32) uint8, `labels` (N,) int64.
    """

    def __init__(self, name: str, images: torch.Tensor, labels: torch.Tensor):
        self.name, self.images, self.labels = name, images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.images[i].float() / 255 - MEAN) / STD, self.labels[i]

    def checksum(self) -> int:
        """Differs, most likely, between different data."""
        return int(self.images.sum(dtype=torch.int64)) + int(self.labels.sum())


def get_dataset(path: str | None = None, fetch: bool = True) -> tuple[Images, Images, int]:
    """CIFAR-10's train set (50,000 images), its test set (10,000), and the number of classes.

    The files are in `path`; else in data/; else downloaded to there; else, offline, torchvision's FakeData stands
    in. fetch=False is for a process beside one that has already tried the download: it neither tries nor tells
    again. Raises DataError if the files of `path` or data/ are not there or not CIFAR-10's.
    """
    if path:
        found = locate(path)
        if found is None:
            what = "has none of CIFAR-10's files" if os.path.exists(path) else "does not exist"
            raise DataError(
                f"{path} {what}: give a folder with {TRAIN_FILES[0]} to {TRAIN_FILES[-1]}, {', '.join(VALID_FILES)} "
                f"and {META_FILE} in it, or with {CIFAR10.base_folder}/ or {CIFAR10.filename}"
            )
        return read_cifar10(found)
    reason = "no network"
    if fetch and locate(DATA) is None:
        try:
            url = os.environ.get("CIFAR10_URL", CIFAR10.url)
            archive = os.path.join(DATA, CIFAR10.filename)
            download(url, CIFAR10.tgz_md5, archive, algorithm="MD5", limit=300)  # 170 MB
        except (OSError, DataError) as error:
            reason = getattr(error, "reason", None) or error
    if found := locate(DATA):
        return read_cifar10(found)
    if fetch:
        print(
            f"NOT CIFAR-10: it could not be fetched ({reason}). Training on random images of torchvision's FakeData "
            f"instead, from which nothing can be learned; for the real ones give --data DIR, or copy "
            f"{CIFAR10.filename} or {CIFAR10.base_folder}/ to {DATA}",
            file=sys.stderr,
            flush=True,
        )
    return fake(512, 0), fake(128, 512), 10


def fake(size: int, offset: int) -> Images:
    """`size` images whose pixels and classes depend on their number, from `offset` on, and on nothing else."""
    data = FakeData(size, (3, IMAGE_SIZE, IMAGE_SIZE), transform=PILToTensor(), random_offset=offset)
    images, labels = zip(*(data[i] for i in range(size)), strict=True)
    return Images("fake-images", torch.stack(images), torch.tensor(labels))


def locate(path: str) -> str | None:
    """Where CIFAR-10's files are: `path` itself, the folder in it, or the archive in it, which need not be unpacked."""
    folder, archive = (os.path.join(path, name) for name in (CIFAR10.base_folder, CIFAR10.filename))
    for place in (path, folder):
        if any(os.path.exists(os.path.join(place, name)) for name in [*TRAIN_FILES, *VALID_FILES, META_FILE]):
            return place
    return next((place for place in (path, archive) if os.path.isfile(place)), None)


class Unpickler(pickle.Unpickler):
    """Reads a pickle of numbers, text and numpy arrays, and refuses all else.

    CIFAR-10 comes as pickles, and a pickle can run any command when it is read. torchvision's CIFAR10 is safe
    because it first compares checksums with the original's, and so reads no one else's files, such as a small data
    set in the same format. This one reads those, too: it knows only what numpy needs to rebuild an array.
    """

    ALLOWED = ("_reconstruct", "_frombuffer", "ndarray", "dtype")

    def find_class(self, module, name):
        if module.split(".")[0] == "numpy" and name in self.ALLOWED:
            # The original's arrays were pickled with a numpy that had this module under its former name.
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        if (module, name) == ("_codecs", "encode"):  # bytes, in a pickle that Python 2 could read
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no number, text or array")


def read_cifar10(place: str) -> tuple[Images, Images, int]:
    """Train set, test set and number of classes from a folder with the batch files, or from an archive of it.

    Raises DataError if a file is missing, damaged, or has something else in it.
    """
    name = os.path.basename(os.path.abspath(place))
    parts, file = [], name
    try:
        contents = read_files(place)
        for file in [META_FILE, *TRAIN_FILES, *VALID_FILES]:
            if file not in contents:
                raise ValueError("it is missing")
            entry = Unpickler(io.BytesIO(contents.pop(file)), encoding="latin1").load()
            entry = {key.decode() if isinstance(key, bytes) else key: value for key, value in entry.items()}
            if file == META_FILE:
                num_classes = len(entry[CIFAR10.meta["key"]])
            else:
                parts.append(to_tensors(entry, num_classes))
    except Exception as error:  # a damaged pickle can end in any of them
        reason = f"it has no {error}" if isinstance(error, KeyError) else getattr(error, "strerror", None) or str(error)
        reason = reason.splitlines()[0] if reason else type(error).__name__
        raise DataError(
            f"cannot read {file} of {place} ({reason}): give CIFAR-10's files, or others in their format"
        ) from None
    images, labels = zip(*parts, strict=True)
    n = len(TRAIN_FILES)
    train_set = Images(name, torch.cat(images[:n]), torch.cat(labels[:n]))
    return train_set, Images(name, torch.cat(images[n:]), torch.cat(labels[n:])), num_classes


def read_files(place: str) -> dict[str, bytes]:
    """The files of CIFAR-10 that are in a folder, or in an archive, which is read once from its start to its end."""
    names, contents = [META_FILE, *TRAIN_FILES, *VALID_FILES], {}
    if os.path.isfile(place):
        with tarfile.open(place) as archive:
            for member in archive:
                if os.path.basename(member.name) in names and member.isfile():
                    contents[os.path.basename(member.name)] = archive.extractfile(member).read()
        return contents
    for name in names:
        if os.path.exists(os.path.join(place, name)):
            with open(os.path.join(place, name), "rb") as file:
                contents[name] = file.read()
    return contents


def to_tensors(entry: dict, num_classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch file's images (N, 3, 32, 32) uint8 and labels (N,) int64; raises ValueError for anything else."""
    pixels, width = np.asarray(entry["data"]), 3 * IMAGE_SIZE**2
    labels = torch.tensor(entry["labels"], dtype=torch.int64)
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != width:
        raise ValueError(f"its data is {pixels.dtype} {pixels.shape}, not uint8 (N, {width})")
    if labels.shape != (len(pixels),):
        raise ValueError(f"it has {len(pixels)} images, and labels of shape {tuple(labels.shape)}")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise ValueError(f"it has labels other than 0 to {num_classes - 1}, the classes of {META_FILE}")
    return torch.from_numpy(pixels.copy()).view(-1, 3, IMAGE_SIZE, IMAGE_SIZE), labels
