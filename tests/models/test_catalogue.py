"""The catalogue, judged by torchvision's metadata read in another way."""

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchvision
from safetensors.torch import save_file

from hookscope.errors import ModelError, SelectionError
from hookscope.models import metadata as registry
from hookscope.models.metadata import ModelInfo, catalogue, find_models
from hookscope.models.names import BUNDLED, torchvision_names
from hookscope.models.sources import model_names
from hookscope.system import cache


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for each test, and torchvision's models alone, whatever extras are installed."""
    monkeypatch.setattr(cache, "folder", lambda: str(tmp_path))
    monkeypatch.setattr(registry, "BUNDLED", {})
    monkeypatch.setattr(registry, "lite_names", lambda: ())
    monkeypatch.setattr("hookscope.models.sources.lite_names", lambda: ())
    return tmp_path


def by_name() -> dict[str, ModelInfo]:
    return {model.name: model for model in catalogue()}


def test_every_model_is_there_once_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuple(model.name for model in catalogue()) == torchvision_names()
    monkeypatch.setattr(registry, "BUNDLED", BUNDLED)
    assert tuple(model.name for model in catalogue()) == tuple(
        name
        for name in model_names()
        if not name.startswith("quantized:")  # made of a model of the catalogue
    )


def test_facts_are_those_of_the_default_weights() -> None:
    for model in catalogue():
        members = torchvision.models.get_model_weights(model.name).__members__
        default, meta = members["DEFAULT"], members["DEFAULT"].meta
        assert (model.params, model.file_size, model.gflops) == (meta["num_params"], meta["_file_size"], meta["_ops"])
        assert model.weights[0] == default.name
        assert sorted(model.weights) == sorted(set(members) - {"DEFAULT"})
        data_set, metric = model.metric.split(" ")
        assert model.accuracy == meta["_metrics"][data_set][metric]
        assert [data_set, metric] == [next(iter(meta["_metrics"])), next(iter(meta["_metrics"][data_set]))]


def test_tasks_are_the_folders_of_torchvision() -> None:
    counts = Counter(model.task for model in catalogue())
    folders = {task: getattr(torchvision.models, task) for task in ("detection", "segmentation", "video")}
    folders |= {"optical_flow": torchvision.models.optical_flow, "quantized": torchvision.models.quantization}
    expected = {task: len(torchvision.models.list_models(module=folder)) for task, folder in folders.items()}
    assert {task: counts[task] for task in expected} == expected
    assert counts["classification"] == len(torchvision.models.list_models(module=torchvision.models))


def test_a_quantized_model_names_its_float_weights_too() -> None:
    models = by_name()
    assert models["quantized_resnet50"].weights == ("IMAGENET1K_FBGEMM_V2", "IMAGENET1K_FBGEMM_V1")
    assert models["quantized_resnet50"].float_weights == ("IMAGENET1K_V2", "IMAGENET1K_V1")
    for model in models.values():
        assert bool(model.float_weights) == (model.task == "quantized")
        if model.task == "quantized":
            twin = models[model.name.removeprefix("quantized_")]
            assert set(model.float_weights) <= set(twin.weights)
            assert model.params == twin.params


def test_the_second_catalogue_comes_from_the_cache(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = catalogue()
    assert len(list(place.iterdir())) == 1
    monkeypatch.setattr(registry, "_from_torchvision", lambda: (ModelInfo("new", "video"),))
    assert catalogue() == first
    versions = {**registry.package_versions(), "torchvision": "9.9.9"}
    monkeypatch.setattr(registry, "package_versions", lambda: versions)
    assert catalogue() == (ModelInfo("new", "video"),)


@pytest.mark.parametrize("rows", [{}, [], [[]], ["text"], [{"name": "x"}], [{"name": "x", "task": "y", "more": 1}], 7])
def test_a_damaged_value_in_the_cache_is_replaced(monkeypatch: pytest.MonkeyPatch, rows: Any) -> None:
    monkeypatch.setattr(cache, "load", lambda kind, key: rows)
    monkeypatch.setattr(registry, "_from_torchvision", lambda: (ModelInfo("new", "video"),))
    assert catalogue() == (ModelInfo("new", "video"),)


def test_models_of_a_program_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.models import _api

    monkeypatch.setattr(_api, "BUILTIN_MODELS", {**_api.BUILTIN_MODELS, "mine": place})
    assert "mine" in torchvision.models.list_models()
    assert "mine" not in by_name()


FIRST = SimpleNamespace(name="FIRST", meta={})
METRICS = {"A": {"x": math.nan}, "B": {"y": "no", "z": 3}}
SECOND = SimpleNamespace(name="SECOND", meta={"num_params": 5, "_metrics": METRICS})


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([FIRST, SECOND], ModelInfo("new", "classification", weights=("FIRST", "SECOND"))),
        ([SECOND], ModelInfo("new", "classification", 5, accuracy=3.0, metric="B z", weights=("SECOND",))),
        (None, ModelInfo("new", "classification")),
    ],
    ids=["no facts", "the first finite number", "no weights"],
)
def test_missing_facts_are_none(weights: Any, expected: ModelInfo) -> None:
    def members(name: str) -> Any:
        if weights is None:
            raise ValueError("The method is missing the 'weights' argument.")
        return weights

    builder = SimpleNamespace(__module__="torchvision.models.new.folder")
    models = SimpleNamespace(get_model_builder=lambda name: builder, get_model_weights=members)
    assert registry._describe("new", models) == expected


@pytest.fixture
def shapes(shapes_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in for the bundled file, and two other models."""
    monkeypatch.setattr(registry, "BUNDLED", BUNDLED)
    monkeypatch.setattr(registry, "_from_torchvision", lambda: (ModelInfo("a", "video"), ModelInfo("z", "video")))
    return shapes_file


def test_a_bundled_model_is_described_by_its_file(shapes: Path) -> None:
    built = torchvision.models.squeezenet1_1(num_classes=10)
    assert by_name()["shapes"] == ModelInfo(
        name="shapes",
        task="classification",
        params=sum(parameter.numel() for parameter in built.parameters()),
        file_size=round(shapes.stat().st_size / 1024 / 1024, 3),
        gflops=None,
        accuracy=93.75,
        metric="shapes acc@1",
        weights=("shapes.safetensors",),
    )
    assert [model.name for model in catalogue()] == ["a", "shapes", "z"]
    assert [model.name for model in find_models("shap*")] == ["shapes"]


def test_a_bundled_file_is_read_each_time(shapes: Path) -> None:
    assert by_name()["shapes"].accuracy == 93.75
    save_file({"a": torch.zeros(2, 3)}, shapes, {"hookscope": json.dumps({"accuracy": 0.5})})
    assert (by_name()["shapes"].accuracy, by_name()["shapes"].params) == (50.0, 6)
    save_file({"a": torch.zeros(2, 3)}, shapes)
    assert (by_name()["shapes"].accuracy, by_name()["shapes"].metric) == (None, "")


def write_nonsense(path: Path) -> None:
    save_file({"a": torch.zeros(2, 3)}, path, {"hookscope": json.dumps({"accuracy": 98.15})})


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"no such thing"), write_nonsense])
def test_a_file_that_is_missing_or_damaged_states_nothing(shapes: Path, damage: Callable[[Path], object]) -> None:
    damage(shapes)
    model = by_name()["shapes"]
    assert (model.name, model.task) == ("shapes", "classification")
    assert (model.params, model.gflops, model.accuracy, model.metric) == (None, None, None, "")


@pytest.fixture
def five(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("alexnet", "quantized_resnet18", "resnet18", "resnet34", "vgg16_bn")
    monkeypatch.setattr(registry, "_from_torchvision", lambda: tuple(ModelInfo(name, "video") for name in names))


@pytest.mark.usefixtures("five")
@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("resnet*", ["resnet18", "resnet34"]),
        ("*resnet*", ["quantized_resnet18", "resnet18", "resnet34"]),
        ("resnet", ["quantized_resnet18", "resnet18", "resnet34"]),
        ("ResNet34", ["resnet34"]),
        ("VGG??_[ab]n", ["vgg16_bn"]),
        ("re:^resnet|BN$", ["resnet18", "resnet34", "vgg16_bn"]),
        ("re:", ["alexnet", "quantized_resnet18", "resnet18", "resnet34", "vgg16_bn"]),
    ],
)
def test_patterns(pattern: str | None, expected: list[str]) -> None:
    assert [model.name for model in find_models(pattern)] == expected


@pytest.mark.usefixtures("five")
@pytest.mark.parametrize(
    ("pattern", "exists"),
    [
        ("resnet35", "nearest: resnet34, resnet18"),
        ("alexnt*", "nearest: alexnet"),
        ("re:^AlexNot$", "nearest: alexnet"),
        ("@@@", "there are 5 models"),
    ],
)
def test_no_match_lists_the_nearest_names(pattern: str, exists: str) -> None:
    with pytest.raises(ModelError) as caught:
        find_models(pattern)
    assert caught.value.asked == f"no model matches '{pattern}'"
    assert caught.value.exists.startswith(exists)
    assert "find_models" in caught.value.do


def test_a_bad_regular_expression_needs_no_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "catalogue", lambda: pytest.fail("asked for the catalogue"))
    with pytest.raises(SelectionError, match=r"'re:\[' is not a regular expression: unterminated character set"):
        find_models("re:[")
