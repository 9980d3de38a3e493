"""Checkpoint files of every sort: what fits is loaded whole, what does not is refused in one line."""

import io
import json
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save as serialized, save_file
from torch import Tensor, nn
from torchvision.models import get_model

from hookscope.errors import WeightsError
from hookscope.models.checkpoints import fitted, load_into, mismatches, read_checkpoint
from hookscope.models.load import load_model
from tests.helpers import Trap, same_values

State = dict[str, Tensor]


@pytest.fixture(scope="module")
def squeezenet() -> State:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        state = load_model("squeezenet1_1", weights="none").model.state_dict()
        return {key: torch.rand_like(value) for key, value in state.items()}


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., str]:
    def save(content: Any, name: str = "own.pth", **options: Any) -> str:
        torch.save(content, tmp_path / name, **options)
        return str(tmp_path / name)

    return save


def refused(path: str | Path, model: str | None = None) -> str:
    with pytest.raises(WeightsError) as caught:
        load_model(model, weights=str(path)) if model else read_checkpoint(path)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 500 and "weights_only" not in text
    return text


@pytest.mark.parametrize("form", ["zip", "old format", "safetensors", "safetensors called own.pth"])
def test_a_whole_checkpoint_gives_its_values(squeezenet: State, tmp_path: Path, form: str) -> None:
    path = tmp_path / ("own.safetensors" if form == "safetensors" else "own.pth")
    content = serialized(squeezenet) if "safetensors" in form else saved(squeezenet, zipped=form == "zip")
    path.write_bytes(content)
    net = load_model("squeezenet1_1", weights=path)
    assert (net.weights, net.notes) == (path.name, ())
    assert not net.model.training
    assert net.categories is not None and len(net.categories) == 1000
    assert same_values(net.model, squeezenet)


HEAD = {"classifier.1.weight": torch.ones(10, 512, 1, 1), "classifier.1.bias": torch.ones(10)}
DESCRIPTION = {
    "model": "squeezenet1_1",
    "categories": [f"kind {number}" for number in range(10)],
    "resize_size": 40,
    "crop_size": 32,
    "mean": [0.5, 0.25, 0.75],
    "std": [1.0, 2.0, 4.0],
}


@pytest.fixture
def described(squeezenet: State, tmp_path: Path) -> Callable[..., str]:
    """Ten classes in half precision, in a safetensors file with this description."""

    def write(description: Any) -> str:
        state = {key: value.half() for key, value in (squeezenet | HEAD).items()}
        save_file(state, tmp_path / "own.safetensors", {"hookscope": json.dumps(description)})
        return str(tmp_path / "own.safetensors")

    return write


def test_a_described_file_brings_its_classes_and_transforms(squeezenet: State, described: Callable[..., str]) -> None:
    net = load_model("squeezenet1_1", weights=described(DESCRIPTION), device="cpu")
    assert (net.weights, net.notes) == ("own.safetensors", ())
    assert net.categories == tuple(DESCRIPTION["categories"])
    assert net.preprocess.describe() == "resize 40, crop 32, mean 0.5 0.25 0.75, std 1 2 4"
    tensor = net.preprocess(Image.new("RGB", (60, 50), (255, 0, 51)))
    assert tensor.shape == (3, 32, 32)
    assert tensor[:, 5, 5].tolist() == pytest.approx([0.5, -0.125, (0.2 - 0.75) / 4])
    weight = net.model.features[0].weight
    assert weight.dtype == torch.float32
    assert torch.equal(weight, squeezenet["features.0.weight"].half().float())


def test_a_described_file_names_its_architecture(described: Callable[..., str]) -> None:
    assert refused(described(DESCRIPTION), "resnet18").endswith("it would fit squeezenet1_1")
    assert "it would fit" not in refused(described(DESCRIPTION | {"model": "alexnet"}), "resnet18")
    assert "it would fit" not in refused(described(DESCRIPTION | {"model": "no such model"}), "resnet18")


@pytest.mark.parametrize(
    ("name", "flag", "aux", "classes"),
    [
        ("googlenet", "aux_logits", True, 10),
        ("googlenet", "aux_logits", False, 10),
        ("googlenet", "aux_logits", False, None),
        ("deeplabv3_mobilenet_v3_large", "aux_loss", True, 10),
        ("deeplabv3_mobilenet_v3_large", "aux_loss", False, 10),
    ],
)
def test_auxiliary_heads_may_come_or_go(
    save: Callable[..., str], name: str, flag: str, aux: bool, classes: int | None
) -> None:
    options: dict[str, Any] = {"init_weights": False} if name == "googlenet" else {"weights_backbone": None}
    options |= {"num_classes": classes} if classes else {}
    state = get_model(name, weights=None, **{flag: aux}, **options).state_dict()
    model = load_model(name, weights=save(state)).model
    assert same_values(model, state)


@pytest.mark.parametrize("name", ["mnasnet0_5", pytest.param("ssdlite320_mobilenet_v3_large", marks=pytest.mark.slow)])
def test_models_with_versions_of_their_layout(save: Callable[..., str], name: str) -> None:
    state = load_model(name, weights="none").model.state_dict()
    without = {key: value for key, value in state.items() if "num_batches_tracked" not in key}
    for content in (state, without):
        assert same_values(load_model(name, weights=save(dict(content))).model, state)


def test_weights_that_are_not_finite_are_noted(save: Callable[..., str], squeezenet: State) -> None:
    state = {key: value.clone() for key, value in squeezenet.items()}
    state["features.0.bias"][:3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    path = save(state)
    assert load_model("squeezenet1_1", weights=path).notes == (f"{path} holds 3 values that are NaN or infinite",)


def test_another_architecture_or_a_part_of_a_model_is_refused(save: Callable[..., str], squeezenet: State) -> None:
    text = refused(save(squeezenet), "resnet18")
    start = (
        "own.pth does not fit resnet18; 0 of 62 keys of the model match, and the file has 52; "
        "62 missing: conv1.weight, bn1.weight and 60 more; "
    )
    assert f"{start}52 unexpected: features.0.weight, features.0.bias and 50 more; " in text
    assert text.endswith("it would fit squeezenet1_1")
    part = {key: value for key, value in squeezenet.items() if not key.startswith("classifier")}
    text = refused(save(part), "squeezenet1_1")
    assert text.endswith(
        "50 of 52 keys of the model match, and the file has 50; 2 missing: classifier.1.weight, classifier.1.bias"
    )


def test_mismatches_are_missing_unknown_and_of_another_shape() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    state = dict(net.state_dict())
    assert mismatches(net, state) == []
    del state["1.num_batches_tracked"]
    assert mismatches(net, state) == []
    del state["0.bias"]
    state |= {"0.weight": torch.zeros(4, 2), "extra": torch.zeros(1), "2.num_batches_tracked": torch.zeros(())}
    assert mismatches(net, state) == ["0.bias", "0.weight", "2.num_batches_tracked", "extra"]


def test_values_that_a_model_cannot_hold() -> None:
    with pytest.raises(WeightsError, match=r"^own\.pth does not fit Linear: "):
        load_into(nn.Linear(2, 2), {"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}, "own.pth")


@pytest.mark.parametrize("force", ["", "1"])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_runs_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[..., str], zipped: bool, force: str
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", force)
    trap = tmp_path / "sprung"
    path = save({"a": Trap(trap)}, _use_new_zipfile_serialization=zipped)
    assert refused(path).endswith("loading it would run code (posix.mkdir); refused; save model.state_dict()")
    assert not trap.exists()
    torch.load(path, weights_only=False)
    assert trap.exists()


def test_a_model_instead_of_weights_is_refused(save: Callable[..., str], tmp_path: Path) -> None:
    text = refused(save(nn.Linear(2, 2)), "alexnet")
    assert "more than weights: loading it would run code (torch.nn.modules.linear.Linear)" in text
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "own.pt")
    assert "would run code (TorchScript); refused" in refused(tmp_path / "own.pt")


def saved(content: Any, zipped: bool = True) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


STATE = {"a": torch.arange(1000.0)}
HEADER = json.dumps({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 9]}}).encode()
DAMAGED = "damaged, incomplete or not a checkpoint"
FILES = {
    "empty": (b"", "the file is empty"),
    "text": (b"not a checkpoint, whatever its name says\n", DAMAGED),
    "zeros": (bytes(100), DAMAGED),
    "pickle": (pickle.dumps({"a": 3}), "loading it could run code"),
    "zip, cut early": (saved(STATE)[:40], DAMAGED),
    "zip, cut late": (saved(STATE)[:-40], DAMAGED),
    "old format, cut early": (saved(STATE, zipped=False)[:40], DAMAGED),
    "old format, cut late": (saved(STATE, zipped=False)[:-40], DAMAGED),
    "safetensors, cut": (serialized(STATE)[:2000], "damaged or incomplete"),
    "safetensors, inconsistent": (struct.pack("<Q", len(HEADER)) + HEADER + b"x" * 9, "damaged or incomplete"),
    "list": (saved([torch.zeros(2)]), "no state dict in {path}; it holds a list; save model.state_dict()"),
    "tensor": (saved(torch.zeros(2)), "no state dict in {path}; it holds a Tensor; save model.state_dict()"),
    "nothing": (saved({}), "no state dict in {path}; it holds nothing; save model.state_dict()"),
    "numbers": (
        saved({"epoch": 3, "loss": 0.1}),
        "no state dict in {path}; it holds epoch, loss; save model.state_dict()",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_or_one_of_another_kind_is_refused(tmp_path: Path, name: str) -> None:
    content, words = FILES[name]
    path = tmp_path / "own.pth"
    path.write_bytes(content)
    assert words.format(path=path) in refused(path)


@pytest.mark.parametrize(("suffix", "kind"), [(".onnx", "an ONNX file"), (".pt2", "a program of torch.export")])
def test_a_model_given_as_weights_is_named(tmp_path: Path, suffix: str, kind: str) -> None:
    (tmp_path / f"own{suffix}").write_bytes(b"\x08\x07")
    assert refused(tmp_path / f"own{suffix}").endswith(f"own{suffix}: it is {kind}; give it as MODEL")


def test_a_model_whose_state_holds_more_than_tensors_is_refused(save: Callable[..., str]) -> None:
    class Packed(nn.Linear):
        def get_extra_state(self) -> Any:
            return torch.qint8

        def set_extra_state(self, state: Any) -> None: ...

    with pytest.raises(WeightsError, match=r"own\.pth into Packed; its state holds more than tensors"):
        fitted(Packed(2, 2), read_checkpoint(save(nn.Linear(2, 2).state_dict())))


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("none.pth", "No such file"),
        ("", "no weights in the folder"),
        ("a\0b.pth", "null"),
        ("x" * 300 + ".pth", "too long"),
    ],
)
def test_files_that_cannot_be_opened(tmp_path: Path, place: str, words: str) -> None:
    assert words in refused(f"{tmp_path}/{place}")


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64])
def test_other_numbers_than_floats_are_refused(
    tmp_path: Path, squeezenet: State, suffix: str, dtype: torch.dtype
) -> None:
    state = {key: value.to(dtype) if key.startswith("features.0") else value for key, value in squeezenet.items()}
    path = tmp_path / f"own.{suffix}"
    (torch.save if suffix == "pth" else save_file)(state, path)
    text = refused(path, "squeezenet1_1")
    name = str(dtype).removeprefix("torch.")
    assert f"features.0.weight is {name} where the model has float32, and so are 1 more" in text


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floats_of_any_precision_are_loaded(squeezenet: State, dtype: torch.dtype) -> None:
    net = load_model("squeezenet1_1", weights="none").model
    load_into(net, {key: value.to(dtype) for key, value in squeezenet.items()}, "own.pth")
    assert all(torch.equal(value, squeezenet[key].to(dtype).float()) for key, value in net.state_dict().items())


def test_counts_may_be_floats_if_they_are_whole() -> None:
    net = nn.BatchNorm2d(2)
    net.register_buffer("index", torch.tensor([1, 2]))
    floats = {key: value.double() for key, value in net.state_dict().items()}
    assert load_into(net, floats | {"num_batches_tracked": torch.tensor(3.0)}, "own.pth") == []
    assert net.num_batches_tracked.dtype == torch.int64 and int(net.num_batches_tracked) == 3
    with pytest.raises(WeightsError, match="index is float32 where the model has int64"):
        load_into(net, floats | {"index": torch.tensor([0.5, 2])}, "own.pth")


def test_a_packed_checkpoint_that_does_not_swell_is_read(tmp_path: Path, squeezenet: State) -> None:
    torch.save(squeezenet, tmp_path / "own.pth")
    with zipfile.ZipFile(tmp_path / "own.pth") as plain, zipfile.ZipFile(tmp_path / "packed.pth", "w") as packed:
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry), zipfile.ZIP_DEFLATED)
    assert (tmp_path / "packed.pth").stat().st_size < (tmp_path / "own.pth").stat().st_size
    assert read_checkpoint(tmp_path / "packed.pth").states[""].keys() == squeezenet.keys()
