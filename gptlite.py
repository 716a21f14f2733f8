"""GPTlite, a small GPT, and Tiny Shakespeare, the text it learns.

The model is the decoder of "Language Models are Few-Shot Learners" (Brown et al. 2020), at the
eight sizes of the paper's Table 2.1 and two that a laptop can train. The training scripts need
two functions from here, and would work with any other module that has them:

    train_set, valid_set, vocab_size = get_dataset(block_size=2048)
    model = get_model(vocab_size, "gpt3-small")

Everything random about the weights comes from CPU generators inside the constructors, one per
layer, so every device and every strategy starts from the same weights, also one that builds only
some of the layers, or that shards each layer as soon as it is built.
"""

import hashlib
import math
import os
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset


@dataclass(frozen=True)
class GPTConfig:
    n_layer: int  # decoder blocks
    n_embd: int  # d_model: features per token
    n_head: int  # attention heads; n_embd / n_head features each
    block_size: int  # the longest sequence, in tokens (n_ctx in the paper)
    dropout: float = 0.0


# Table 2.1 of the GPT-3 paper. Two of its rows do not divide: XL has 24 heads on 2048 features and
# 13B has 5140 features for 40 heads. As in common practice they take 16 heads and 5120 features.
PRESETS = {
    "nano": GPTConfig(n_layer=4, n_embd=128, n_head=4, block_size=64),
    "baby": GPTConfig(n_layer=6, n_embd=384, n_head=6, block_size=256),
    "gpt3-small": GPTConfig(n_layer=12, n_embd=768, n_head=12, block_size=2048, dropout=0.1),
    "gpt3-medium": GPTConfig(n_layer=24, n_embd=1024, n_head=16, block_size=2048, dropout=0.1),
    "gpt3-large": GPTConfig(n_layer=24, n_embd=1536, n_head=16, block_size=2048, dropout=0.1),
    "gpt3-xl": GPTConfig(n_layer=24, n_embd=2048, n_head=16, block_size=2048, dropout=0.1),
    "gpt3-2.7b": GPTConfig(n_layer=32, n_embd=2560, n_head=32, block_size=2048, dropout=0.1),
    "gpt3-6.7b": GPTConfig(n_layer=32, n_embd=4096, n_head=32, block_size=2048, dropout=0.1),
    "gpt3-13b": GPTConfig(n_layer=40, n_embd=5120, n_head=40, block_size=2048, dropout=0.1),
    "gpt3-175b": GPTConfig(n_layer=96, n_embd=12288, n_head=96, block_size=2048, dropout=0.1),
}


# ---- model ------------------------------------------------------------------------------------


def layer_generator(seed: int, layer: int) -> torch.Generator:
    """The CPU generator of one layer's weights: 0 the embeddings, 1 to n_layer the blocks, then the head."""
    return torch.Generator("cpu").manual_seed(seed * 1_000_003 + layer)


@torch.no_grad()
def draw_normal(weight: torch.Tensor, std: float, generator: torch.Generator) -> None:
    """Fill `weight` (any shape and device) with N(0, std), drawn on the CPU; the meta device has nothing to fill."""
    if not weight.is_meta:
        weight.copy_(torch.normal(0.0, std, weight.shape, generator=generator, device="cpu"))


# Weights are drawn in each layer's own constructor, not by a parent's `apply` afterwards:
# deepspeed.zero.Init takes the parameters away as soon as the layer's constructor returns.
class Linear(nn.Linear):
    def __init__(self, in_features, out_features, bias, generator, std=0.02):
        super().__init__(in_features, out_features, bias)
        draw_normal(self.weight, std, generator)
        if bias:
            nn.init.zeros_(self.bias)

    def reset_parameters(self):
        pass  # nn.Linear's own draw, from the global generator, would be overwritten


class Embedding(nn.Embedding):
    def __init__(self, num_embeddings, embedding_dim, generator, std=0.02):
        super().__init__(num_embeddings, embedding_dim)
        draw_normal(self.weight, std, generator)

    def reset_parameters(self):
        pass


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, generator: torch.Generator):
        super().__init__()
        if config.n_embd % config.n_head:
            raise ValueError(f"n_embd {config.n_embd} is not divisible by n_head {config.n_head}")
        self.head_size = config.n_embd // config.n_head
        self.dropout = config.dropout
        self.qkv = Linear(config.n_embd, 3 * config.n_embd, bias=False, generator=generator)
        # GPT-2: what adds to the residual stream starts smaller, so that the sum of all layers does not grow.
        residual_std = 0.02 / math.sqrt(2 * config.n_layer)
        self.proj = Linear(config.n_embd, config.n_embd, bias=True, generator=generator, std=residual_std)
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, n_embd) -> (B, T, n_embd)
        B, T, _ = x.shape
        # The rows of qkv lie head by head (q, k and v of head 0, then of head 1, ...), so that a
        # contiguous shard of the rows is a number of whole heads: -1 is the heads held here.
        q, k, v = self.qkv(x).view(B, T, -1, 3, self.head_size).permute(3, 0, 2, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        y = y.transpose(1, 2).reshape(B, T, -1)  # heads side by side again
        return self.residual_dropout(self.proj(y))


class FeedForward(nn.Module):
    def __init__(self, config: GPTConfig, generator: torch.Generator):
        super().__init__()
        self.up = Linear(config.n_embd, 4 * config.n_embd, bias=True, generator=generator)
        residual_std = 0.02 / math.sqrt(2 * config.n_layer)
        self.down = Linear(4 * config.n_embd, config.n_embd, bias=True, generator=generator, std=residual_std)
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.residual_dropout(self.down(F.relu(self.up(x))))


class Block(nn.Module):
    def __init__(self, config: GPTConfig, generator: torch.Generator):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.n_embd)
        self.attention = CausalSelfAttention(config, generator)
        self.norm2 = nn.LayerNorm(config.n_embd)
        self.feed_forward = FeedForward(config, generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Embeddings(nn.Module):
    """Token plus position: tokens (B, T) int64 -> (B, T, n_embd)."""

    def __init__(self, vocab_size: int, config: GPTConfig, generator: torch.Generator):
        super().__init__()
        self.block_size = config.block_size
        self.token = Embedding(vocab_size, config.n_embd, generator)
        self.position = Embedding(config.block_size, config.n_embd, generator)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        if length > self.block_size:
            raise ValueError(f"{length} tokens do not fit the model's block size of {self.block_size}")
        positions = torch.arange(length, device=tokens.device)
        return self.dropout(self.token(tokens) + self.position(positions))


class GPTlite(nn.Module):
    """Decoder-only transformer with pre-LayerNorm and an untied head.

    forward: tokens (B, T) int64, T <= block_size -> logits (B, T, vocab_size).
    """

    def __init__(self, vocab_size: int, config: GPTConfig, seed: int = 0):
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(vocab_size, config, layer_generator(seed, 0))
        self.blocks = nn.ModuleList(Block(config, layer_generator(seed, 1 + i)) for i in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd)
        head_generator = layer_generator(seed, 1 + config.n_layer)
        self.lm_head = Linear(config.n_embd, vocab_size, bias=False, generator=head_generator)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))

    @torch.no_grad()
    def generate(self, tokens, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        """Continue tokens (B, T) by `max_new_tokens` sampled ones: -> (B, T + max_new_tokens) int64.

        temperature 0 takes the likeliest token; `top_k` samples among that many likeliest ones;
        `generator` is a CPU generator. Call it on every process alike, with equal generators, where
        the parameters are sharded. Dropout is off meanwhile.
        """
        training = self.training
        self.eval()
        for _ in range(max_new_tokens):
            logits = self(tokens[:, -self.config.block_size :])[:, -1].float()
            if hasattr(logits, "full_tensor"):  # tensor parallelism: each process has a part of the vocabulary
                logits = logits.full_tensor()
            logits = logits.cpu()
            if top_k is not None:
                kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < kth, float("-inf"))
            if temperature == 0:
                token = logits.argmax(-1, keepdim=True)
            else:
                token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, token.to(tokens.device)], dim=1)
        self.train(training)
        return tokens


def get_config(preset="gpt3-small", n_layer=None, block_size=None, dropout=None) -> GPTConfig:
    """The preset's shape with what is given (not None) in place of its own."""
    given = {"n_layer": n_layer, "block_size": block_size, "dropout": dropout}
    return replace(PRESETS[preset], **{name: value for name, value in given.items() if value is not None})


def get_model(vocab_size: int, preset: str = "gpt3-small", *, seed: int = 0, **overrides) -> GPTlite:
    """A GPTlite of a preset's shape; overrides: n_layer, block_size, dropout.

    Raises KeyError for an unknown preset.
    """
    return GPTlite(vocab_size, get_config(preset, **overrides), seed)


# ---- data -------------------------------------------------------------------------------------

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "tinyshakespeare.txt")
# Tiny Shakespeare's 65 characters. Text that stands in for it is reduced to them.
CHARACTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
IGNORE = -100  # a target that does not count, as in cross_entropy's ignore_index


class DataError(Exception):
    """The text cannot be used; the message says why, and what would do."""


class Text:
    """A text as tokens: its characters, numbered in sorted order.

    `name` says which text it is; `tokens` is (length,) int64.
    """

    def __init__(self, name: str, text: str, characters: str | None = None):
        self.name = name
        self.characters = characters or "".join(sorted(set(text)))
        number = {character: i for i, character in enumerate(self.characters)}
        self.tokens = torch.tensor([number[character] for character in text], dtype=torch.int64)

    @property
    def vocab_size(self) -> int:
        return len(self.characters)

    def encode(self, string: str) -> torch.Tensor:
        return torch.tensor([self.characters.index(c) for c in string], dtype=torch.int64)

    def decode(self, tokens: torch.Tensor) -> str:
        return "".join(self.characters[i] for i in tokens.tolist())


class TrainSet(Dataset):
    """Item i is the window that starts at token i: inputs (block_size,) and targets, one token on.

    The item depends on the index alone: the sampler shuffles, and gives each process its own indices.
    """

    def __init__(self, text: Text, tokens: torch.Tensor, block_size: int):
        self.text, self.tokens, self.block_size = text, tokens, block_size
        self.name = text.name

    def __len__(self) -> int:
        return len(self.tokens) - self.block_size

    def checksum(self) -> int:
        """Differs, most likely, between different texts."""
        return int(self.text.tokens.sum())

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= i < len(self):
            raise IndexError(i)
        window = self.tokens[i : i + self.block_size + 1]
        return window[:-1], window[1:]


class ValidSet(Dataset):
    """Windows side by side, so that each token is a target once; the last is filled up with IGNORE."""

    def __init__(self, text: Text, tokens: torch.Tensor, block_size: int):
        self.text, self.tokens, self.block_size = text, tokens, block_size

    def __len__(self) -> int:
        return math.ceil(max(len(self.tokens) - 1, 0) / self.block_size)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= i < len(self):
            raise IndexError(i)
        window = self.tokens[i * self.block_size : (i + 1) * self.block_size + 1]
        missing = self.block_size + 1 - len(window)
        return F.pad(window[:-1], (0, missing)), F.pad(window[1:], (0, missing), value=IGNORE)


def get_dataset(block_size: int = 2048, path: str | None = None, fetch: bool = True) -> tuple[TrainSet, ValidSet, int]:
    """Train set (the first 90 % of the text), validation set (the rest) and vocabulary size.

    The text is `path`; else data/tinyshakespeare.txt; else that file, downloaded; else, offline,
    the English text that every Python ships. fetch=False is for a process beside one that has
    already tried the download: it neither tries nor tells again. Raises DataError if `path` cannot be read or the
    text is shorter than one window (block_size + 1 characters).
    """
    text = read_text(path) if path else find_tiny_shakespeare(fetch)
    if len(text.tokens) < block_size + 1:
        raise DataError(
            f"{text.name} has {len(text.tokens)} characters; a block of {block_size} needs at least {block_size + 1}: "
            "give a longer text or a smaller --block-size"
        )
    # A very short text still has one whole window to train on.
    split = max(int(0.9 * len(text.tokens)), block_size + 1)
    train_set = TrainSet(text, text.tokens[:split], block_size)
    return train_set, ValidSet(text, text.tokens[split:], block_size), text.vocab_size


def read_text(path: str) -> Text:
    try:
        with open(path, encoding="utf-8") as file:
            return Text(os.path.basename(path), file.read())
    except OSError as error:
        raise DataError(f"cannot read the text {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from None


def find_tiny_shakespeare(fetch: bool) -> Text:
    if os.path.exists(FILE):
        return read_text(FILE)
    reason = "no network"
    if fetch:
        try:
            download(os.environ.get("TINYSHAKESPEARE_URL", URL), SHA256, FILE)
            return read_text(FILE)
        except (OSError, DataError) as error:
            reason = getattr(error, "reason", None) or error
    try:
        from pydoc_data.topics import topics  # the text of Python's help()
    except ImportError:
        raise DataError(
            f"no Tiny Shakespeare ({reason}); give a text with --data FILE, or copy one to {FILE}"
        ) from None
    text = "".join(c for c in "\n\n".join(topics.values()) if c in CHARACTERS)
    if fetch:
        print(
            f"NOT TINY SHAKESPEARE: it could not be fetched ({reason}). Training on Python's help text instead; "
            f"for the real one give --data FILE or copy it to {FILE}",
            file=sys.stderr,
            flush=True,
        )
    return Text("python-help", text, CHARACTERS)


def download(url: str, checksum: str, path: str, timeout: float = 10, *, algorithm="SHA-256", limit=None) -> None:
    """Fetch `url` to `path`, which appears whole or not at all.

    `timeout` is the time in seconds to wait for an answer, `limit` (by default as long) the time for all of it.

    Raises OSError (no network, read-only folder) or DataError (other bytes than expected).
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".download-")
    try:
        deadline = time.monotonic() + (limit or timeout)  # the socket's own timeout is only per read
        digest = hashlib.new(algorithm.replace("-", ""), usedforsecurity=False)
        with os.fdopen(descriptor, "wb") as file, urllib.request.urlopen(url, timeout=timeout) as response:
            while chunk := response.read(1 << 16):
                file.write(chunk)
                digest.update(chunk)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{url} took longer than {limit or timeout} s")
        if digest.hexdigest() != checksum:
            raise DataError(f"{url} is not the expected file: its {algorithm} differs")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
