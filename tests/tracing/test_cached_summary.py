"""The cached trace: true, keyed by all that it depends on, and never worth more than a fresh one."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hookscope import models
from hookscope.errors import InputError, ModelError
from hookscope.models.metadata import find_models
from hookscope.models.sources import model_names
from hookscope.models.torchvision_builders import build_skeleton
from hookscope.system import cache
from hookscope.tracing import cached_summary as listing
from hookscope.tracing.cached_summary import cached_listing, listing as listed
from hookscope.tracing.facts import rows_of_type, totals_of_type

ROOT = Path(__file__).parents[2]
NAME = "squeezenet1_1"
TRACES: dict[Any, Any] = {}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hookscope"


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The traces that were made anew; a trace of one model at one size is always the same."""
    traces: list[Any] = []
    real = listing._traced

    def trace(name: str, source: Any, size: Any, *more: Any) -> Any:
        traces.append((name, size))
        if (name, size) not in TRACES:
            TRACES[name, size] = real(name, source, size, *more)
        return TRACES[name, size]

    monkeypatch.setattr(listing, "_traced", trace)
    return traces


def test_the_second_answer_is_the_first_also_with_shapes_of_several_tensors(traced: list[Any]) -> None:
    assert cached_listing(NAME) is None
    first = listed(NAME)
    assert first[0] == (224, 224)
    assert cached_listing(NAME) == listed(NAME) == first
    assert traced == [(NAME, (224, 224))]
    first, again = listed("lraspp_mobilenet_v3_large", (32, 32)), listed("lraspp_mobilenet_v3_large", (32, 32))
    assert first == again
    assert any(isinstance(call.output_shape, dict) for call in again[1].calls)
    assert len(traced) == 2


def test_the_size_is_in_the_key(traced: list[Any]) -> None:
    assert listed(NAME, (33, 57))[0] == (33, 57)
    assert cached_listing(NAME) is None
    assert rows_of_type(listed(NAME, (33, 57))[1])[0].output_shape == (1, 64, 16, 28)
    assert rows_of_type(listed(NAME)[1])[0].output_shape == (1, 64, 111, 111)
    assert len(traced) == 2


@pytest.mark.parametrize("package", ["hookscope", "torch", "torchvision"])
def test_another_version_of_a_package_is_traced_anew(
    traced: list[Any], monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    listed(NAME)
    versions = models.package_versions() | {package: "9.9"}
    monkeypatch.setattr(models, "package_versions", lambda: versions)
    assert cached_listing(NAME) is None
    listed(NAME)
    assert len(traced) == 2


def edited(**fields: Any) -> Callable[[str], str]:
    """What replaces fields of the stored value."""
    return lambda text: json.dumps({**(entry := json.loads(text)), "value": entry["value"] | fields})


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "\0" * 100,
        lambda text: "[]",
        lambda text: text.replace('"size"', '"sise"'),
        lambda text: json.dumps({**json.loads(text), "value": None}),
        lambda text: json.dumps({**json.loads(text), "value": [1, 2]}),
        lambda text: json.dumps({**json.loads(text), "header": {}}),
        edited(calls=[[1, 2]]),
        edited(calls=[["x", None, None, 0, None]]),
        edited(layers=[]),
        edited(layers=3),
        edited(layers=[["a", ["Conv2d"], True, 0, "", 1]]),
    ],
)
def test_a_damaged_cache_is_ignored_and_replaced(folder: Path, traced: list[Any], damage: Callable[[str], str]) -> None:
    first = listed(NAME, (32, 32))
    (path,) = folder.glob("*.json")
    path.write_text(damage(path.read_text()))
    assert cached_listing(NAME, (32, 32)) is None
    assert listed(NAME, (32, 32)) == first
    assert len(traced) == 2
    assert cached_listing(NAME, (32, 32)) == first  # mended


def test_an_unwritable_cache_is_ignored_and_so_is_none_at_all(
    folder: Path, traced: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_text("a file where a folder should be")
    assert listed(NAME, (32, 32)) == listed(NAME, (32, 32))
    assert len(traced) == 2
    monkeypatch.setattr(cache, "folder", lambda: None)
    assert listed(NAME, (32, 32))[0] == (32, 32)


def test_a_failed_trace_is_not_stored(folder: Path) -> None:
    with pytest.raises(ModelError, match="no model 'squeezenet'; nearest: squeezenet1_"):
        listed("squeezenet")
    with pytest.raises(InputError, match=r"^squeezenet1_1: .*forward\(\) failed on 1x3x3x3: "):
        listed(NAME, (3, 3))
    assert not folder.exists()


def test_a_size_that_is_too_small_builds_no_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(name: str) -> Any:
        raise AssertionError("a model of gigabytes, for an error")

    monkeypatch.setattr("hookscope.models.load_model", never)
    with pytest.raises(InputError, match="Wrong image height! Expected 224 but got 100"):
        listed("vit_h_14", (100, 224))


@pytest.mark.parametrize(
    ("name", "size", "convolutions", "real"),
    [
        ("inception_v3", (299, 299), 94, False),
        ("vit_b_16", (224, 224), 1, False),
        pytest.param("raft_small", (224, 224), 152, False, marks=pytest.mark.slow),
        ("r3d_18", (112, 112), 0, False),
        ("quantized_mobilenet_v2", (224, 224), 52, False),
        ("regnet_y_400mf", (224, 224), 85, False),
        ("fcn_resnet50", (520, 520), 55, False),
        ("fasterrcnn_mobilenet_v3_large_320_fpn", (320, 320), 75, True),
        ("shapes", (128, 128), 26, False),
    ],
)
def test_each_family_at_its_own_size(name: str, size: tuple[int, int], convolutions: int, real: bool) -> None:
    found_size, summary = listed(name)
    types = ("Conv2d",) if convolutions else ("Conv3d",)
    rows = [row for row in rows_of_type(summary, types) if row.index is not None]
    assert (found_size, summary.real) == (size, real)
    assert len(rows) == (convolutions or 20)
    if name == "raft_small":
        assert any(row.note.startswith("call 12 of 12") for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in model_names() if name.startswith("quantized:")])
def test_every_quantized_model_lists(name: str) -> None:
    size, summary = listed(name)
    assert min(size) >= 224 and summary.real
    judge = build_skeleton(f"quantized_{name.partition(':')[2]}").model
    norms = [module for module in judge.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    biases = sum(norm.num_features for norm in norms)  # one takes the place of weight and bias of each
    assert rows_of_type(summary, ("Conv2d",)) and summary.macs > 0
    assert summary.params == sum(parameter.numel() for parameter in judge.parameters()) - biases


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in model_names() if not name.startswith("quantized:")])
def test_every_model_lists(name: str) -> None:
    size, summary = listed(name)
    assert min(size) >= 112
    assert rows_of_type(summary, ("Conv2d", "Conv3d"))
    from_package = name == "efficientnet-lite0"
    judge = models.load_model(name, weights="none").model if from_package else build_skeleton(name).model
    totals = totals_of_type(summary, ("all",))
    assert summary.params == totals.type_params == sum(parameter.numel() for parameter in judge.parameters())
    assert summary.macs == totals.type_macs > 0
    [stated] = find_models(f"re:^{name}$")
    # torchvision counts no bias, and rounds; its vit_h_14 is for pictures of 518 pixels
    if stated.task in ("classification", "video") and stated.gflops and name != "vit_h_14":
        assert summary.macs / 1e9 == pytest.approx(stated.gflops, rel=0.02, abs=0.006)
    assert summary.real == (summary.layers[0].types[-1] in ("GeneralizedRCNN", "FCOS", "RetinaNet", "SSD"))


def test_a_second_process_imports_no_torch() -> None:
    size, summary = listed(NAME)
    code = (
        f"import sys; from hookscope.tracing import listing; size, summary = listing('{NAME}')\n"
        "print(size, summary.macs, len(summary.calls), {'torch', 'torchvision'} & sys.modules.keys())"
    )
    second = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, text=True)
    assert second.stdout == f"{size} {summary.macs} {len(summary.calls)} set()\n"
