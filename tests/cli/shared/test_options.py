"""What options take, and what a shell is offered."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from hookscope.cli.commands.list_layers import ListLayers
from hookscope.cli.shared import options
from hookscope.cli.shared.options import input_size, seed, size
from hookscope.models.choices import PREPROCESS_WORDS, PreprocessChoice
from hookscope.models.load import load_model
from hookscope.system import cache
from hookscope.tracing.cached_summary import listing

list_layers = ListLayers.made("list-layers")


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "folder", lambda: str(tmp_path))
    listing("squeezenet1_1")


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (input_size, "224x320", (224, 320)),
        (input_size, "33X57", (33, 57)),
        (input_size, "7×9", (7, 9)),
        (input_size, " 64 ", (64, 64)),
        (input_size, "16384x1", (16384, 1)),
        (input_size, "8x64x32", (8, 64, 32)),
        (size, "20MB", 20_000_000),
        (size, "512 KiB", 524_288),
        (size, "1.5kb", 1500),
        (size, "2gib", 2**31),
        (size, "0.1GB", 10**8),
        (size, " 7 ", 7),
    ],
)
def test_sizes(read: Callable[[str], object], text: str, value: object) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "texts", "says"),
    [
        (
            input_size,
            "|x|224x|x224|0x5|5x0|-3|2.5|1x2x3x4|1x0x3|16385|1e3|9x9px",
            "write height x width in pixels, such as",
        ),
        (size, "|20M|MB|-1MB|0kB|1e3|٣MB|inf|20 000", "write 20MB, 500kB or 512KiB"),
    ],
)
def test_texts_that_are_no_size(read: Callable[[str], object], texts: str, says: str) -> None:
    for text in texts.split("|"):
        with pytest.raises(click.BadParameter, match=f"is not a size; {says}"):
            read(text)


def test_seeds_and_words_are_those_that_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seed("9223372036854775807") == 2**63 - 1
    for text in ("-1", "9223372036854775808"):
        with pytest.raises(click.BadParameter, match=f"{text} is not in the range 0<=x<=9223372036854775807"):
            seed(text)
    monkeypatch.setattr("hookscope.models.torchvision_builders.fetch", lambda *words: pytest.fail("none needs nothing"))
    assert load_model("squeezenet1_1", weights="none").weights == "random (seed 0)"
    words = offered(options.complete_preprocess, "")
    assert words == list(PREPROCESS_WORDS) and all(PreprocessChoice.parse(word).base == word for word in words)


def offered(complete: Any, incomplete: str, **params: Any) -> list[str]:
    context = click.Context(list_layers)
    context.params.update(params)
    return [item.value for item in complete(context, list_layers.params[0], incomplete)]


def test_a_shell_is_offered_models_layers_types_and_words(listed: None) -> None:
    assert offered(options.complete_models, "squeezenet") == ["squeezenet1_0", "squeezenet1_1"]
    assert offered(options.complete_models, "shap") == ["shapes"]
    assert len(offered(options.complete_models, "")) > 100
    assert offered(options.complete_models, "nope") == []
    names = offered(options.complete_layers, "features.3.", model="squeezenet1_1")
    assert names[:2] == ["features.3.squeeze", "features.3.squeeze_activation"]
    assert all(name.startswith("features.3.") for name in names)
    assert "Fire" in offered(options.complete_types, "", model="squeezenet1_1")
    assert offered(options.complete_types, "a", model="squeezenet1_1") == ["all", ] + [
        name for name in offered(options.complete_types, "", model="squeezenet1_1")[1:] if name.startswith("a")
    ]  # fmt: skip
    assert offered(options.complete_layers, "features.3.", model="squeezenet1_1", input_size=(64, 64)) == names
    assert offered(options.complete_layers, "", model="vgg19") == []
    assert offered(options.complete_types, "", model="vgg19") == ["all", "Conv2d"]
    assert offered(options.complete_weights, "") == ["auto", "default", "none"]
    assert offered(options.complete_weights, "d") == ["default"]
    context = click.Context(list_layers)
    (item,) = options.complete_weights(context, list_layers.params[0], "./own")
    assert item.type == "file"
    assert offered(options.complete_devices, "c") == ["cpu", "cuda"]
    assert "viridis" in offered(options.complete_colour_maps, "vi")
