"""Folders and sharded files of transformers, accelerate, timm and Lightning."""

import base64
import json
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Callable
from functools import cache
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hookscope.errors import HookscopeError, WeightsError
from hookscope.jobs.state_file import BEGINNING, _digest
from hookscope.models.checkpoints import load_checkpoint, load_content, read_checkpoint
from hookscope.models.load import load_model
from hookscope.models.model_source import WeightsChoice, WeightsKind
from hookscope.statistics.run import load_statistics
from hookscope.training.log.file import read_runs
from tests.helpers import Trap, same_values

State = dict[str, Tensor]
STATE = {"0.weight": torch.rand(4, 3, 3, 3), "0.bias": torch.rand(4), "1.weight": torch.rand(2, 4)}
HALVES = [{key: STATE[key] for key in list(STATE)[:2]}, {"1.weight": STATE["1.weight"]}]


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 2, bias=False))


def write_shards(folder: Path, stem: str = "model", suffix: str = ".safetensors") -> None:
    places = {}
    for number, half in enumerate(HALVES, 1):
        name = f"{stem}-{number:05d}-of-00002{suffix}"
        (save_file if suffix == ".safetensors" else torch.save)(half, folder / name)
        places |= dict.fromkeys(half, name)
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def write_links(folder: Path) -> None:
    """A snapshot of a cache of models."""
    write_shards(folder.parent)
    for path in folder.parent.glob("model*"):
        (folder / path.name).symlink_to(path)


FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "one file": (lambda folder: save_file(STATE, folder / "model.safetensors"), "model.safetensors"),
    "a pickle": (lambda folder: torch.save(STATE, folder / "pytorch_model.bin"), "pytorch_model.bin"),
    "shards": (write_shards, "model.safetensors.index.json"),
    "links to shards": (write_links, "model.safetensors.index.json"),
    "pickled shards": (
        lambda folder: write_shards(folder, "pytorch_model", ".bin"),
        "pytorch_model.bin.index.json",
    ),
    "one checkpoint of Lightning": (
        lambda folder: torch.save({"state_dict": STATE, "epoch": 3}, folder / "epoch=1-step=2.ckpt"),
        "epoch=1-step=2.ckpt",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with what accelerate, transformers and Git put beside the weights."""
    path = tmp_path / "checkpoint-500"
    path.mkdir()
    (path / "config.json").write_text("{}")
    torch.save({"state": {}, "param_groups": []}, path / "optimizer.pt")
    torch.save({}, path / "scheduler.bin")
    torch.save(Trap(tmp_path / "sprung"), path / "training_args.bin")
    (path / ".git").mkdir()
    return path


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_is_a_checkpoint(folder: Path, tmp_path: Path, kind: str) -> None:
    write, file = FOLDERS[kind]
    write(folder)
    model = net()
    assert load_checkpoint(model, f"{folder}{os.sep}", "net") == (f"checkpoint-500/{file}", [])
    assert same_values(model, STATE)
    assert not (tmp_path / "sprung").exists()


def test_a_folder_is_weights_without_a_slash(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert WeightsChoice.parse("checkpoint-500").kind is WeightsKind.FILE
    write_shards(folder)
    index = "checkpoint-500/model.safetensors.index.json"
    assert set(read_checkpoint(index).states[""]) == set(STATE)


def _index(content: Any) -> Callable[[Path], Any]:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(
        content if isinstance(content, str) else json.dumps({"weight_map": content})
    )


def _two(folder: Path) -> None:
    for name in ("last.ckpt", "epoch=1.ckpt"):
        torch.save({"state_dict": STATE}, folder / name)


def _nested(folder: Path) -> None:
    (folder / "checkpoint-9").mkdir()


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing": (lambda folder: None, "no weights in the folder {folder}; it holds .git, config.json, optimizer.pt"),
    "folders": (_nested, "; name a folder in it, such as {folder}/checkpoint-9"),
    "several": (
        _two,
        "{folder} holds several checkpoints; it holds epoch=1.ckpt, last.ckpt; name one, such as {folder}",
    ),
    "no JSON": (_index("{"), "it is not an index: Expecting"),
    "deep JSON": (_index("[" * 100_000), "it is not an index: "),
    "no map": (_index("[]"), "it is not an index: "),
    "list for map": (_index([1]), "it is not an index: "),
    "numbers": (_index({"a": 3}), "it is not an index: weight_map"),
    "outside": (_index({"a": "../x.safetensors"}), "it names a file outside its folder; '../x.safetensors'"),
    "absolute": (_index({"a": "/etc/passwd"}), "it names a file outside its folder"),
    "parent": (_index({"a": ".."}), "it names a file outside its folder"),
    "missing shard": (_index({"a": "x.safetensors"}), "it names x.safetensors, which is missing"),
    "a pickle that runs code": (_index({"a": "training_args.bin"}), "would run code (posix.mkdir); refused"),
    "no such key": (
        lambda folder: (save_file(STATE, folder / "x.safetensors"), _index({"0.weigh": "x.safetensors"})(folder)),
        "x.safetensors lacks 0.weigh; nearest: 0.weight",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_folder_that_gives_no_weights_is_refused_in_one_line(folder: Path, tmp_path: Path, kind: str) -> None:
    write, words = REFUSED[kind]
    write(folder)
    with pytest.raises(WeightsError, match=r"\A.{,500}\Z") as caught:
        read_checkpoint(folder)
    assert words.format(folder=folder) in str(caught.value) and not (tmp_path / "sprung").exists()


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        return {"pixel_values": torch.full((3, 8, 8), float(at)), "labels": torch.tensor(at % 2)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_the_trainer_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], num_labels=2)
    model = transformers.ResNetForImageClassification(config)
    options = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True
    )
    transformers.Trainer(model, options, train_dataset=Data()).train()
    (tmp_path / "nets.py").write_text(
        "import transformers as t\ndef make():\n    return t.ResNetForImageClassification("
        "t.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], num_labels=2))\n"
    )
    loaded = load_model(f"{tmp_path}/nets.py:make", weights=tmp_path / "checkpoint-1")
    assert loaded.weights == "checkpoint-1/model.safetensors"
    assert same_values(loaded.model, model.state_dict())
    model.save_pretrained(tmp_path / "sharded", max_shard_size="2KB")
    again = load_model(f"{tmp_path}/nets.py:make", weights=tmp_path / "sharded")
    assert again.weights == "sharded/model.safetensors.index.json"
    assert same_values(again.model, model.state_dict())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_state_saved_by_accelerate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = net()
    prepared, _ = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    accelerator.save_state(str(tmp_path / "state"))
    other = net()
    load_checkpoint(other, str(tmp_path / "state"), "net")
    assert same_values(other, accelerator.unwrap_model(prepared).state_dict())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Task(lightning.LightningModule):
        def __init__(self, width: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.model = net()
            self.register_buffer("class_weight", torch.ones(2))

        def training_step(self, batch: Any, at: int) -> Tensor:
            return self.model[0](batch["pixel_values"]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    task = Task()
    trainer = lightning.Trainer(
        max_steps=1, logger=False, accelerator="cpu", enable_progress_bar=False, default_root_dir=tmp_path
    )
    trainer.fit(task, torch.utils.data.DataLoader(Data()))
    model = net()
    label, notes = load_checkpoint(model, str(tmp_path / "checkpoints"), "net")
    assert label == "checkpoints/epoch=0-step=1.ckpt"
    assert notes == [
        f"{label}: keys had the prefix model.: taken off",
        f"{label}: left out 1 key without this prefix: class_weight",
    ]
    assert same_values(model, task.model.state_dict())


def read_in_little_memory(files: list[tuple[str, str]], answers: Connection) -> None:
    """Send the error of each kind of file, with 150 MB beside what this process has."""
    import resource

    [used] = re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    resource.setrlimit(resource.RLIMIT_DATA, (int(used) * 1024 + (150 << 20),) * 2)
    readers = {"checkpoint": load_content, "statistics": load_statistics, "log": read_runs}
    for kind, path in files:
        try:
            readers[kind](path)
            answers.send("read")
        except HookscopeError as error:
            answers.send(str(error))


SIZE = 1 << 28


def zip_of(name: str, size: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file, file.open(name, "w") as entry:
            for _ in range(size >> 20):
                entry.write(bytes(1 << 20))

    return write


@cache
def packed_zeros(size: int) -> str:
    packer = zlib.compressobj(1)
    parts = [packer.compress(bytes(1 << 20)) for _ in range(size >> 20)]
    return base64.b64encode(b"".join([*parts, packer.flush()])).decode()


def statistics_of(shape: list[int], size: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        tally = {"images": {"array": "float64", "shape": shape, "data": packed_zeros(size)}, "layers": []}
        content = {"source": dict.fromkeys(SOURCE, ""), "progress": None, "tally": tally | {"batch_norms": []}}
        whole = {"hookscope": "1", "format": 1, "sha256": _digest(content), "content": content}
        path.write_text(json.dumps(whole))

    return write


SOURCE = ("model", "weights", "fingerprint", "preprocess", "layers")


def many_calls(path: Path) -> None:
    rows = [{"row": "run"}, *({"row": "layer", "step": 0, "layer": str(number)} for number in range(20_001))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def safetensors_header(path: Path) -> None:
    path.write_bytes((100 << 20).to_bytes(8, "little") + b"{" + b" " * 100)


def sparse(beginning: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with open(path, "wb") as file:
            file.write(beginning)
            file.truncate(300 * SIZE)

    return write


BOMBS = [
    ("checkpoint", zip_of("archive/data/0", SIZE), "would unpack to 268,435,456; save model.state_dict()"),
    ("checkpoint", zip_of("archive/data.pkl", 65 << 20), "its list of tensors has 68,157,440 bytes"),
    ("checkpoint", safetensors_header, "its list of tensors has 104,857,600 bytes"),
    ("checkpoint", sparse(b""), "damaged, incomplete or not a checkpoint"),
    ("checkpoint", "/dev/zero", "it is a pipe or a device; give a file"),
    ("statistics", statistics_of([SIZE >> 3], SIZE), "its arrays are far larger than the file"),
    ("statistics", statistics_of([1], SIZE), "is damaged"),
    ("statistics", lambda path: path.write_bytes(BEGINNING + b"[]," * 2_000_000), "is too large for saved statistics"),
    ("statistics", sparse(b""), "holds no saved statistics"),
    ("statistics", sparse(BEGINNING), "holds no saved statistics, or is damaged"),
    ("statistics", "/dev/zero", "holds no saved statistics"),
    ("log", many_calls, "a run has more than 20,000 layer calls"),
    ("log", sparse(b""), "is not the log of a run"),
    ("log", "/dev/zero", "is not the log of a run"),
]


@pytest.mark.skipif(sys.platform != "linux", reason="the memory in use is read from /proc")
def test_files_that_swell_are_refused_before_they_fill_the_memory(tmp_path: Path) -> None:
    files = []
    for number, (kind, content, _) in enumerate(BOMBS):
        path = content if isinstance(content, str) else str(tmp_path / str(number))
        if not isinstance(content, str):
            content(Path(path))
        files.append((kind, path))
    answers, end = Pipe(duplex=False)
    process = get_context("fork").Process(target=read_in_little_memory, args=(files, end))
    process.start()
    end.close()
    for kind, _, text in BOMBS:
        answer = answers.recv()
        assert text in answer, (kind, answer)
    process.join()
