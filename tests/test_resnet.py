"""ResNet-18 on CIFAR-10: another model and another data set, trained to the same numbers by the same scripts.

The images are made here, in CIFAR-10's own files: four classes, each a coarse pattern under noise. BatchNorm is what
GPTlite has not got: without --sync-batchnorm two processes take other statistics than one, and with it the same.
"""

import pickle
import shutil
import sys
import tarfile

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torchvision
import training
from conftest import ROOT
from training import distance, read

import gptlite
import resnet

PARITY = 1e-4
RATES = {"sgd": ("--optimizer", "sgd", "--lr", "0.01"), "adamw": ("--optimizer", "adamw", "--lr", "3e-4")}
# Rates at which the loss of 16 noisy images falls by half in 20 steps. At much higher ones a ResNet on so few images
# magnifies rounding: one process whose weights are changed by 1e-7 strays by 1e-1, too.
COMMON = ("--workload", "resnet", "--batch-size", "16", "--steps", "20", "--warmup-steps", "4", "--log-every", "1")
CLASSES = 4


def write_cifar10(folder, per_file=64, in_test=40):
    """Five training files and a test file in CIFAR-10's format, and the names of the classes."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    patterns = random.integers(60, 196, (CLASSES, 3, 4, 4)).repeat(8, 2).repeat(8, 3).reshape(CLASSES, -1)
    for name, size in [*((f"data_batch_{i}", per_file) for i in range(1, 6)), ("test_batch", in_test)]:
        labels = random.integers(0, CLASSES, size)
        pixels = np.clip(patterns[labels] + random.normal(0, 60, (size, 3072)), 0, 255).astype(np.uint8)
        entry = {b"batch_label": name.encode(), b"labels": labels.tolist(), b"data": pixels, b"filenames": []}
        (folder / name).write_bytes(pickle.dumps(entry, protocol=2))
    names = {b"label_names": [b"a", b"b", b"c", b"d"], b"num_vis": 3072}
    (folder / "batches.meta").write_bytes(pickle.dumps(names, protocol=2))
    return folder


@pytest.fixture(scope="session")
def cifar10(tmp_path_factory):
    return write_cifar10(tmp_path_factory.mktemp("images") / "cifar-10-batches-py")


def several(*arguments, **options):
    """The logs of several command lines of a script, run in one launch."""
    parts, _ = training.several(*arguments, **options)
    return [read(part) for part in parts]


# ---- parity -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def reference(run, torchrun, cifar10):
    """reference(optimizer): the run of one process."""
    cache = {}

    def get(optimizer):
        if optimizer not in cache:
            line = [*COMMON, *RATES[optimizer], "--data", cifar10, "--micro-batch-size", "16"]
            (cache[optimizer],) = several(run, torchrun, 1, "train_ddp", [line])
        return cache[optimizer]

    return get


def check_parity(log, expected):
    assert len(log.losses) == 20
    assert distance(log.losses, expected.losses) < PARITY
    # The evaluation takes the running statistics: they are one process's, too.
    assert float(log.result["validation_loss"]) == pytest.approx(float(expected.result["validation_loss"]), rel=PARITY)
    for name in ("validation_accuracy", "validation_images"):
        assert log.result[name] == expected.result[name]


def check_difference(log, expected):
    """Statistics of 8 images are not those of 16, already before the first update."""
    assert abs(log.losses[0] / expected.losses[0] - 1) > PARITY
    assert distance(log.losses, expected.losses) > 1e-2


def test_two_processes_with_synchronised_batchnorm_follow_one(run, torchrun, cifar10, reference):
    common = [*COMMON, "--data", cifar10, "--micro-batch-size", "8"]
    lines = [[*common, *RATES["sgd"], "--sync-batchnorm"], [*common, *RATES["sgd"]]]
    synchronised, separate = several(run, torchrun, 2, "train_ddp", lines)
    check_parity(synchronised, reference("sgd"))
    check_difference(separate, reference("sgd"))
    assert synchronised.run["model"] == "resnet18"
    assert synchronised.run["data"] == "cifar-10-batches-py"
    assert (synchronised.run["sync_batchnorm"], separate.run["sync_batchnorm"]) == ("True", "False")
    losses = reference("sgd").losses  # and it learns
    assert sum(losses[-3:]) < 0.6 * sum(losses[:3])


STRATEGIES = {
    "ddp": ("train_ddp", []),
    "fsdp_full_shard": ("train_fsdp", []),
    **{
        f"zero{stage}": ("train_deepspeed", ["--deepspeed_config", f"ds_configs/zero{stage}.json"])
        for stage in (1, 2, 3)
    },
}


@pytest.mark.full
@pytest.mark.parametrize("script", ["train_ddp", "train_fsdp", "train_deepspeed"])
def test_parity(run, torchrun, cifar10, reference, script):
    cases, lines = [], []
    for name, (its_script, arguments) in STRATEGIES.items():
        if its_script != script:
            continue
        common = [*arguments, *COMMON, "--data", cifar10]
        for optimizer, rates in RATES.items():
            cases.append((name, optimizer, True))
            lines.append([*common, *rates, "--micro-batch-size", "8", "--sync-batchnorm"])
        if name in ("fsdp_full_shard", "zero3"):  # the short test has ddp
            cases.append((name, "sgd", False))
            lines.append([*common, *RATES["sgd"], "--micro-batch-size", "8"])
    logs = several(run, torchrun, 2, script, lines, timeout=900)
    for (name, optimizer, synchronised), log in zip(cases, logs, strict=True):
        assert log.run["strategy"] == name
        (check_parity if synchronised else check_difference)(log, reference(optimizer))


@pytest.mark.full
def test_accumulation_takes_statistics_of_each_micro_batch(run, torchrun, cifar10):
    """Two processes of 4 x 2 are one process of 8 x 2: BatchNorm sees micro-batches, not the step's whole batch."""
    common = [*COMMON, *RATES["sgd"], "--data", cifar10]
    (one,) = several(run, torchrun, 1, "train_ddp", [[*common, "--micro-batch-size", "8"]])
    flags = ["--micro-batch-size", "4", "--sync-batchnorm"]
    for script in ("train_ddp", "train_fsdp"):
        (two,) = several(run, torchrun, 2, script, [[*common, *flags]])
        check_parity(two, one)


@pytest.mark.full
@pytest.mark.parametrize("script", ["train_ddp", "train_fsdp", "train_deepspeed"])
def test_bf16_follows_fp32(run, torchrun, cifar10, reference, script):
    common = [*COMMON, *RATES["adamw"], "--data", cifar10, "--micro-batch-size", "8", "--precision", "bf16"]
    stages = [["--deepspeed_config", f"ds_configs/zero{stage}.json"] for stage in (2, 3)]
    lines = []
    for arguments in stages if script == "train_deepspeed" else [[]]:
        lines.append([*arguments, *common, "--sync-batchnorm"])
    for log in several(run, torchrun, 2, script, lines, timeout=900):
        # bf16 has 8 bits of precision; statistics of each process's own images would be 2e-1 away.
        assert 1e-6 < distance(log.losses, reference("adamw").losses) < 3e-2
        assert float(log.result["validation_accuracy"]) > 0.7


# ---- the model ----------------------------------------------------------------------------------


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_it_is_torchvisions_resnet18():
    ours, theirs = resnet.get_model(10), torchvision.models.resnet18(num_classes=10, zero_init_residual=True)
    assert {name: p.shape for name, p in ours.state_dict().items()} == {
        name: p.shape for name, p in theirs.state_dict().items()
    }
    assert len(ours.blocks) == 8
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if name != "fc.bias":  # drawn from the same distributions
            assert one.std().item() == pytest.approx(other.std().item(), rel=0.1, abs=1e-9), name
    images = torch.randn(4, 3, 32, 32)
    ours.load_state_dict(theirs.state_dict())
    for mode in (True, False):
        assert torch.equal(ours.train(mode)(images), theirs.train(mode)(images))
    for one, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        assert torch.equal(one, other)


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    one = resnet.get_model(10, seed=3).state_dict()
    torch.manual_seed(2)
    with torch.device("cpu"):  # as train_fsdp.py builds it
        same = resnet.get_model(10, seed=3, sync_batchnorm=True).state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["conv1.weight"], resnet.get_model(10, seed=4).conv1.weight)
    with torch.device("meta"):
        model = resnet.get_model(10)
    assert {p.device.type for p in [*model.parameters(), *model.buffers()]} == {"meta"}


@pytest.mark.full
def test_zero_3_starts_from_the_same_weights(run, tmp_path):
    """deepspeed.zero.Init takes each layer's parameters away as its constructor returns: none may be drawn later."""
    script = """
import torch, deepspeed, resnet
deepspeed.init_distributed("gloo")
expected = resnet.get_model(10, seed=3).state_dict()
config = {"train_batch_size": 4, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
for synchronised in (False, True):
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = resnet.get_model(10, seed=3, sync_batchnorm=synchronised)
    for name, parameter in model.named_parameters():
        assert parameter.numel() == 0, name
        with deepspeed.zero.GatheredParameters(parameter):
            assert torch.equal(parameter, expected[name]), name
    for name, buffer in model.named_buffers():  # not taken apart
        assert torch.equal(buffer, expected[name]), name
print("equal")
"""
    address = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    done = run([sys.executable, "-c", script], 120, DS_ACCELERATOR="cpu", **address)
    assert "equal" in done.stdout, done.stderr[-3000:]
    assert "zero-element" not in done.stderr


def test_synchronised_batchnorm_is_batchnorm_of_all_samples(run, torchrun, tmp_path):
    """In fp64, forward, gradients and running statistics; two processes with 5 and 3 samples, against one with 8."""
    script = tmp_path / "batchnorm.py"
    script.write_text(f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch, torch.distributed as dist, resnet
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x, weight, bias = torch.randn(8, 6, 3, 3).double() * 3 + 5, torch.randn(6).double(), torch.randn(6).double()
slope = torch.randn(8, 6, 3, 3).double()
part = slice(0, 5) if rank == 0 else slice(5, 8)
results = []
for layer, mine in ((torch.nn.BatchNorm2d(6), slice(0, 8)), (resnet.SyncBatchNorm(6), part)):
    layer.double().load_state_dict(layer.state_dict() | {{"weight": weight, "bias": bias}})
    for _ in range(2):
        inputs = x[mine].clone().requires_grad_()
        layer.zero_grad()
        out = layer(inputs)
        (out * out * slope[mine]).sum().backward()
    layer.eval()
    sums = torch.cat([layer.weight.grad, layer.bias.grad])
    if mine == part:
        dist.all_reduce(sums)
        reduce, dist.all_reduce = dist.all_reduce, None  # in evaluation nothing is sent
    evaluated = layer(inputs)
    whole = mine != part
    results.append([t.detach()[part] if whole and len(t) == 8 else t.detach()
                    for t in (out, inputs.grad, sums, layer.running_mean, layer.running_var, evaluated)])
    assert layer.num_batches_tracked == 2
dist.all_reduce = reduce
for one, other in zip(*results, strict=True):
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
# Values far from 0 next to their spread: a mean of squares in fp32 would lose the variance.
layer, far = resnet.SyncBatchNorm(2), torch.randn(4, 2, 2, 2) + 1000
assert abs(layer(far).std().item() - 1) < 0.05
# bf16 in and out, fp32 inside, also after a cast of the whole layer.
layer = resnet.SyncBatchNorm(2).to(torch.bfloat16)
assert layer(far.bfloat16()).dtype == torch.bfloat16
assert layer.running_mean.dtype == layer.running_var.dtype == torch.float32
dist.destroy_process_group()
print("done", rank)
""")
    done = run(torchrun(2, script), 120)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("done") == 2


# ---- the data -----------------------------------------------------------------------------------


@pytest.fixture
def no_data(monkeypatch, tmp_path):
    """data/ is an empty folder, and the download fails at once."""
    monkeypatch.setattr(resnet, "DATA", str(tmp_path / "data"))
    monkeypatch.setenv("CIFAR10_URL", "http://127.0.0.1:9/closed")
    return tmp_path / "data"


def test_items_are_the_files_images(cifar10):
    train_set, valid_set, classes = resnet.get_dataset(str(cifar10))
    assert (len(train_set), len(valid_set), classes) == (320, 40, CLASSES)
    entry = pickle.loads((cifar10 / "data_batch_2").read_bytes())
    image, label = train_set[64 + 7]
    assert (image.shape, image.dtype) == ((3, 32, 32), torch.float32)
    assert (label.shape, label.dtype, label.item()) == ((), torch.int64, entry[b"labels"][7])
    pixels = (image * resnet.STD + resnet.MEAN) * 255
    assert torch.equal(pixels.round().to(torch.uint8), torch.from_numpy(entry[b"data"][7]).view(3, 32, 32))
    assert torch.equal(train_set[71][0], image)


def test_the_files_are_found(no_data, cifar10, tmp_path):
    """A folder that holds CIFAR-10's, its archive, and data/, which comes first."""
    expected = resnet.get_dataset(str(cifar10))[0]
    archive = tmp_path / "archive" / "cifar-10-python.tar.gz"
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as file:
        file.add(cifar10, "cifar-10-batches-py")
    for path in (cifar10.parent, archive, archive.parent):
        assert torch.equal(resnet.get_dataset(str(path))[0].images, expected.images)
    no_data.mkdir()
    shutil.copy(archive, no_data)
    assert resnet.get_dataset()[0].name == "cifar-10-python.tar.gz"
    shutil.copytree(cifar10, no_data / "cifar-10-batches-py")  # unpacked, it is read sooner
    assert resnet.get_dataset()[0].name == "cifar-10-batches-py"


def test_offline_fake_images_stand_in_loudly(no_data, capsys):
    train_set, valid_set, classes = resnet.get_dataset()
    loud = capsys.readouterr().err.splitlines()
    assert len(loud) == 1
    assert all(words in loud[0] for words in ("NOT CIFAR-10", "FakeData", "--data DIR"))
    assert (train_set.name, len(train_set), len(valid_set), classes) == ("fake-images", 512, 128, 10)
    again = resnet.get_dataset(fetch=False)[0]
    assert capsys.readouterr().err == ""
    assert torch.equal(again.images, train_set.images)
    assert torch.equal(again.labels, train_set.labels)
    assert not any(path.is_file() for path in no_data.rglob("*"))  # nothing half-loaded


def test_a_download_is_checked_and_appears_whole(no_data, cifar10, monkeypatch, tmp_path, capsys):
    import hashlib

    with tarfile.open(tmp_path / "remote.tar.gz", "w:gz") as file:
        file.add(cifar10, "cifar-10-batches-py")
    monkeypatch.setenv("CIFAR10_URL", (tmp_path / "remote.tar.gz").as_uri())
    assert resnet.get_dataset()[0].name == "fake-images"  # not the archive that torchvision knows
    assert "MD5 differs" in capsys.readouterr().err
    assert list(no_data.iterdir()) == []
    checksum = hashlib.md5((tmp_path / "remote.tar.gz").read_bytes()).hexdigest()
    monkeypatch.setattr(resnet.CIFAR10, "tgz_md5", checksum)
    assert resnet.get_dataset()[0].name == "cifar-10-python.tar.gz"
    assert [path.name for path in no_data.iterdir()] == ["cifar-10-python.tar.gz"]
    assert resnet.get_dataset(fetch=False)[2] == CLASSES


def damage(folder, how):
    """Damage a folder of CIFAR-10's in one way; returns words that the message must have."""
    file = folder / "data_batch_3"
    entry = pickle.loads(file.read_bytes())
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:5000])
    elif how == "no pickle":
        file.write_text("<html>404</html>")
    elif how == "no dictionary":
        file.write_bytes(pickle.dumps([1, 2]))
    elif how == "no labels":
        file.write_bytes(pickle.dumps({b"data": entry[b"data"]}))
        return ["labels"]
    elif how == "fewer labels":
        file.write_bytes(pickle.dumps(entry | {b"labels": [0, 1]}))
        return ["64 images"]
    elif how == "a label too high":
        file.write_bytes(pickle.dumps(entry | {b"labels": [CLASSES] * 64}))
        return [f"0 to {CLASSES - 1}"]
    elif how == "other images":
        file.write_bytes(pickle.dumps(entry | {b"data": np.zeros((64, 784), np.uint8)}))
        return ["(64, 784)"]
    elif how == "missing":
        file.unlink()
        return ["missing"]
    elif how == "a command":
        file.write_bytes(b"cos\nsystem\n(S'touch " + str(folder / "run").encode() + b"'\ntR.")
        return ["os.system"]
    return []


DAMAGES = ["truncated", "no pickle", "no dictionary", "no labels", "fewer labels", "a label too high"]
DAMAGES += ["other images", "missing", "a command"]


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_files(cifar10, tmp_path, how):
    folder = tmp_path / "images"
    shutil.copytree(cifar10, folder)
    words = damage(folder, how)
    with pytest.raises(gptlite.DataError) as error:
        resnet.get_dataset(str(folder))
    message = str(error.value)
    assert len(message.splitlines()) == 1
    assert all(word in message for word in ["data_batch_3", str(folder), *words]), message
    assert not (folder / "run").exists()


def test_a_damaged_archive_and_what_is_none(no_data, cifar10, tmp_path):
    no_data.mkdir()
    with tarfile.open(no_data / "cifar-10-python.tar.gz", "w:gz") as file:
        file.add(cifar10, "cifar-10-batches-py")
    whole = (no_data / "cifar-10-python.tar.gz").read_bytes()
    (no_data / "cifar-10-python.tar.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.txt").write_text("To be, or not to be")
    (tmp_path / "empty").mkdir()
    for path, words in [
        (None, ["cifar-10-python.tar.gz"]),
        (tmp_path / "text.txt", ["text.txt"]),
        (tmp_path / "empty", ["has none of CIFAR-10's files", "data_batch_1"]),
        (tmp_path / "none", ["does not exist"]),
    ]:
        with pytest.raises(gptlite.DataError) as error:
            resnet.get_dataset(path and str(path))
        assert len(str(error.value).splitlines()) == 1
        assert all(word in str(error.value) for word in words), error.value


# ---- by real command lines ----------------------------------------------------------------------


@pytest.mark.full
def test_every_rank_says_what_is_wrong_with_the_files(run, torchrun, cifar10, tmp_path):
    shutil.copytree(cifar10, tmp_path / "images")
    damage(tmp_path / "images", "truncated")
    (tmp_path / "empty").mkdir()
    for path, words in [("images", "cannot read data_batch_3"), ("empty", "has none of"), ("none", "does not exist")]:
        flags = ["--workload", "resnet", "--batch-size", "4", "--micro-batch-size", "2", "--data", tmp_path / path]
        done = run(torchrun(2, "train_ddp.py", *flags), timeout=90)
        lines = [line for line in done.stderr.splitlines() if line.startswith("train_ddp.py: error:")]
        assert len(lines) == 2
        assert lines[0] == lines[1]
        assert words in lines[0]
        assert done.stderr.count("exitcode  : 2") >= 1
        assert "Traceback" not in done.stderr.split("ChildFailedError")[0].split("torch/distributed")[0]


FLAGS = [
    (["--model", "nano"], "--model"),
    (["--n-layer", "2"], "--n-layer"),
    (["--block-size", "8"], "--block-size"),
    (["--activation-checkpointing"], "running statistics twice"),
    (["--compile"], "--compile"),
    (["--dropout", "0"], "--dropout"),
    (["--sample", "9"], "--sample"),
    ([], "--micro-batch-size"),  # 1 by default: no variance
]


@pytest.mark.parametrize("script", ["train_ddp", "train_fsdp", "train_deepspeed"])
def test_flags_that_do_not_apply(script, monkeypatch, capsys):
    import importlib

    module = importlib.import_module(script)
    config = ["--deepspeed_config", str(ROOT / "ds_configs" / "zero3.json")] if script == "train_deepspeed" else []
    cases = [(["--workload", "resnet", *flags], word) for flags, word in FLAGS]
    for arguments, word in [*cases, (["--sync-batchnorm"], "--workload resnet"), (["--workload", "vgg"], "vgg")]:
        monkeypatch.setattr(sys, "argv", ["train.py", *config, *arguments])
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as stop:
            module.main()
        error = capsys.readouterr().err
        assert stop.value.code == 2
        assert len(error.splitlines()) == 1
        assert word in error


def test_it_learns_from_data(run, cifar10, tmp_path):
    """In a copy of the repository with the files in data/: far above the 25 % that guessing finds."""
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    shutil.copytree(cifar10, tmp_path / "data" / "cifar-10-batches-py")
    flags = ["--workload", "resnet", "--batch-size", "16", "--micro-batch-size", "16", "--steps", "20"]
    done = run([sys.executable, "train_ddp.py", *flags, "--warmup-steps", "4"], 120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    log = read(done.stdout)
    assert log.run["data"] == "cifar-10-batches-py"
    assert log.result["validation_images"] == "40"
    assert float(log.result["validation_accuracy"]) > 0.6
    assert "validation_tokens" not in log.result


@pytest.mark.full
def test_processes_offline_train_on_fake_images(run, torchrun, tmp_path):
    """One process looks for the network, and says once what is used; the last batch of the evaluation is filled up."""
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    flags = ["--workload", "resnet", "--batch-size", "6", "--micro-batch-size", "3", "--steps", "1"]
    command = torchrun(2, "train_fsdp.py", *flags)
    done = run(command, 200, cwd=tmp_path, CIFAR10_URL="http://127.0.0.1:9/")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("NOT CIFAR-10") == 1
    log = read(done.stdout)
    assert (log.run["data"], log.result["validation_images"]) == ("fake-images", "128")


@pytest.mark.full
def test_the_sweep(run, cifar10, tmp_path):
    """What cuts up GPTlite is skipped with the reason; the table has accuracies and no tokens."""
    command = [
        "./run.sh",
        "--steps",
        "4",
        "--data",
        cifar10,
        "--out",
        tmp_path / "out",
        "ddp",
        "zero2",
        "tp",
        "pp_gpipe",
        "ddp_checkpointing",
    ]
    command += ["--", "--workload", "resnet", "--sync-batchnorm"]
    done = run(command, 400, CUDA_VISIBLE_DEVICES="", PYTHON=sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    import csv

    with open(tmp_path / "out" / "summary.csv", newline="") as file:
        rows = {row["strategy"]: row for row in csv.DictReader(file)}
    assert {name: row["status"] for name, row in rows.items()} == {
        "ddp": "ok", "zero2": "ok", "tp": "skipped", "pp_gpipe": "skipped", "ddp_checkpointing": "skipped",
    }  # fmt: skip
    assert "GPTlite" in rows["tp"]["reason"]
    assert float(rows["ddp"]["final_loss"]) == pytest.approx(float(rows["zero2"]["final_loss"]), rel=PARITY)
    for name in ("ddp", "zero2"):
        row = rows[name]
        assert (row["model"], row["image_size"], row["tokens_per_second"]) == ("resnet18", "32", "-")
        assert 0 <= float(row["validation_accuracy"]) <= 1
        assert float(row["samples_per_second"]) > 0
    assert "accuracy" in done.stdout
    assert "tokens/s" not in done.stdout
