"""The model and its data: shapes, counts, initial weights, windows, and every way to find a text."""

import hashlib
import http.server
import math
import threading

import pytest
import torch
import torch.nn.functional as F

import gptlite

# Parameters of a GPTlite with 65 characters, by hand: embeddings, blocks, last norm and head.
TABLE = {
    "gpt3-small": (12, 768, 12),
    "gpt3-medium": (24, 1024, 16),
    "gpt3-large": (24, 1536, 16),
    "gpt3-xl": (24, 2048, 16),
    "gpt3-2.7b": (32, 2560, 32),
    "gpt3-6.7b": (32, 4096, 32),
    "gpt3-13b": (40, 5120, 40),
    "gpt3-175b": (96, 12288, 96),
}


def build(vocab_size=65, preset="nano", device="cpu", **overrides):
    with torch.device(device):
        return gptlite.get_model(vocab_size, preset, **overrides)


def test_gpt3_small_has_the_published_size():
    parameters = list(build(65, "gpt3-small", device="meta").parameters())
    assert sum(p.numel() for p in parameters) == 86_701_056
    assert round(sum(p.numel() * 4 for p in parameters) / 2**30, 3) == 0.323


@pytest.mark.parametrize("preset", TABLE)
def test_presets_are_table_2_1(preset):
    config = gptlite.PRESETS[preset]
    assert (config.n_layer, config.n_embd, config.n_head) == TABLE[preset]
    assert (config.block_size, config.dropout) == (2048, 0.1)
    assert config.n_embd % config.n_head == 0


def test_overrides_replace_the_preset():
    config = gptlite.get_config("gpt3-small", n_layer=2, block_size=32, dropout=0.0)
    assert config == gptlite.GPTConfig(n_layer=2, n_embd=768, n_head=12, block_size=32, dropout=0.0)


def test_initial_loss_is_that_of_a_guess(text_file):
    train_set, _, vocab_size = gptlite.get_dataset(64, str(text_file))
    inputs, targets = (torch.stack(column) for column in zip(*[train_set[i * 50] for i in range(64)], strict=True))
    logits = build(vocab_size)(inputs)
    assert logits.shape == (64, 64, 65)
    assert F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item() == pytest.approx(math.log(65), abs=0.1)


def test_weights_start_as_in_gpt2_and_depend_on_the_seed_alone():
    first, again, other = build(), build(), build(seed=1)
    for (name, p), q in zip(first.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    attention = first.blocks[0].attention
    assert attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert attention.proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(2 * 4), rel=0.05)
    assert not torch.equal(attention.qkv.weight, first.blocks[1].attention.qkv.weight)
    assert attention.qkv.bias is None
    assert first.lm_head.bias is None
    assert not attention.proj.bias.any()


def test_a_layer_is_the_same_without_the_others():
    """A pipeline stage builds only its own layers, from the same generators."""
    model = build()
    alone = gptlite.Block(model.config, gptlite.layer_generator(0, 1 + 2))
    for p, q in zip(alone.parameters(), model.blocks[2].parameters(), strict=True):
        assert torch.equal(p, q)


def test_the_global_generator_is_not_touched():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    build()
    assert torch.equal(torch.rand(1), expected)


def test_attention_sees_only_the_past():
    model = build().eval()
    tokens = torch.randint(65, (1, 64))
    changed = tokens.clone()
    changed[0, 40:] = (changed[0, 40:] + 1) % 65
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 40], after[:, 40])


def test_rows_of_qkv_lie_head_by_head():
    """The first half of qkv's rows gives the first half of the heads: what tensor parallelism cuts."""
    model = build()
    attention, x = model.blocks[0].attention, torch.randn(2, 8, 128)
    half = F.linear(x, attention.qkv.weight[: 3 * 64]).view(2, 8, 2, 3, 32)
    whole = attention.qkv(x).view(2, 8, 4, 3, 32)
    torch.testing.assert_close(half, whole[:, :, :2])


def test_too_many_tokens_are_an_error():
    with pytest.raises(ValueError, match="65 tokens do not fit the model's block size of 64"):
        build()(torch.zeros(1, 65, dtype=torch.int64))


def test_generate_continues_and_repeats_itself_with_equal_generators():
    model = build(dropout=0.5).train()
    start = torch.zeros(2, 3, dtype=torch.int64)
    first = model.generate(start, 70, generator=torch.Generator().manual_seed(1))
    again = model.generate(start, 70, generator=torch.Generator().manual_seed(1))
    assert first.shape == (2, 73)  # longer than the block of 64
    assert torch.equal(first, again)
    assert torch.equal(first[:, :3], start)
    assert model.training
    greedy = model.generate(start, 5, temperature=0)
    assert torch.equal(greedy, model.generate(start, 5, top_k=1))


# ---- data -------------------------------------------------------------------------------------


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_train_windows_start_at_their_index(tmp_path):
    text = "".join(chr(65 + i % 26) for i in range(200))
    train_set, _, vocab_size = gptlite.get_dataset(8, write(tmp_path / "abc.txt", text))
    assert vocab_size == 26
    assert len(train_set) == 180 - 8  # 90 % of 200
    inputs, targets = train_set[5]
    assert train_set.text.decode(inputs) == text[5:13]
    assert train_set.text.decode(targets) == text[6:14]
    assert torch.equal(train_set.text.encode(text[5:13]), inputs)
    assert torch.equal(train_set[171][1], train_set.tokens[172:180])
    with pytest.raises(IndexError):
        train_set[172]


@pytest.mark.parametrize("length", [200, 210, 213, 219])
def test_validation_counts_each_token_once(tmp_path, length):
    text = "".join(chr(65 + i % 26) for i in range(length))
    _, valid_set, _ = gptlite.get_dataset(8, write(tmp_path / "abc.txt", text))
    held_out = text[int(0.9 * length) :]
    targets = torch.cat([valid_set[i][1] for i in range(len(valid_set))])
    inputs = torch.cat([valid_set[i][0] for i in range(len(valid_set))])
    counts = targets != gptlite.IGNORE
    assert valid_set.text.decode(targets[counts]) == held_out[1:]
    assert valid_set.text.decode(inputs[counts]) == held_out[:-1]


def test_exactly_one_window_works_and_one_less_does_not(tmp_path):
    train_set, valid_set, _ = gptlite.get_dataset(8, write(tmp_path / "nine.txt", "abcdefghi"))
    assert (len(train_set), len(valid_set)) == (1, 0)
    path = write(tmp_path / "eight.txt", "abcdefgh")
    with pytest.raises(gptlite.DataError, match=r"8 characters; a block of 8 needs at least 9"):
        gptlite.get_dataset(8, path)


@pytest.mark.parametrize("kind", ["missing", "folder", "binary", "empty"])
def test_unreadable_texts_say_why(tmp_path, kind):
    path = tmp_path / "text"
    if kind == "folder":
        path.mkdir()
    elif kind == "binary":
        path.write_bytes(b"\xff\xfe\x00")
    elif kind == "empty":
        path.touch()
    with pytest.raises(gptlite.DataError, match="text"):
        gptlite.get_dataset(8, str(path))


@pytest.fixture
def server():
    """An HTTP server on this machine: /text answers `content`, /slow never finishes; counts its hits."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.hits += 1
            self.send_response(200)
            self.end_headers()
            if self.path == "/slow":
                for _ in range(100):
                    if self.server.stop.wait(0.1):
                        return
                    self.wfile.write(b"a")
                    self.wfile.flush()
            self.wfile.write(self.server.content)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.hits, server.content, server.stop = 0, b"To be, or not to be\n" * 50, threading.Event()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.stop.set()
    server.shutdown()
    thread.join()
    server.server_close()


def url(server, path="text"):
    return f"http://127.0.0.1:{server.server_address[1]}/{path}"


def test_download_appears_whole(server, tmp_path):
    path = tmp_path / "data" / "text.txt"
    gptlite.download(url(server), hashlib.sha256(server.content).hexdigest(), str(path))
    assert path.read_bytes() == server.content
    assert [p.name for p in path.parent.iterdir()] == ["text.txt"]  # no temporary file beside it


def test_download_of_other_bytes_leaves_nothing(server, tmp_path):
    with pytest.raises(gptlite.DataError, match="SHA-256"):
        gptlite.download(url(server), "0" * 64, str(tmp_path / "text.txt"))
    assert list(tmp_path.iterdir()) == []


def test_download_gives_up(server, tmp_path):
    with pytest.raises(OSError, match="longer than"):
        gptlite.download(url(server, "slow"), "0" * 64, str(tmp_path / "text.txt"), timeout=0.5)
    assert list(tmp_path.iterdir()) == []


def test_offline_python_help_stands_in_loudly(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gptlite, "FILE", str(tmp_path / "data" / "tinyshakespeare.txt"))
    monkeypatch.setenv("TINYSHAKESPEARE_URL", "http://127.0.0.1:9/closed")
    train_set, _, vocab_size = gptlite.get_dataset(64)
    assert (train_set.text.name, vocab_size) == ("python-help", 65)
    loud = capsys.readouterr().err.splitlines()
    assert len(loud) == 1
    assert "NOT TINY SHAKESPEARE" in loud[0]
    assert "--data FILE" in loud[0]


def test_a_copied_text_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(gptlite, "FILE", write(tmp_path / "tinyshakespeare.txt", "To be, or not to be\n" * 50))
    monkeypatch.setenv("TINYSHAKESPEARE_URL", "http://127.0.0.1:9/closed")
    assert gptlite.get_dataset(64)[0].text.name == "tinyshakespeare.txt"
