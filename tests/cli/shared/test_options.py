"""What options take, and what a shell is offered."""

import json
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner
from torch import nn

from hookscope.cli.command import Command
from hookscope.cli.commands.list_layers import ListLayers
from hookscope.cli.fields import argument
from hookscope.cli.shared import options
from hookscope.cli.shared.options import (
    categories_of,
    categories_option,
    complete_categories,
    complete_targets,
    input_size,
    number_from,
    rank,
    seed,
    share,
    size,
    target_option,
    threshold_option,
)
from hookscope.errors import CategoriesError, UsageError
from hookscope.models.choices import PREPROCESS_WORDS, PreprocessChoice
from hookscope.models.load import load_model
from hookscope.scores.target import Target
from hookscope.statistics.findings import StatisticsThresholds
from hookscope.system import cache
from hookscope.tracing.cached_summary import listing

list_layers = ListLayers.made("list-layers")


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "folder", lambda: str(tmp_path))
    listing("squeezenet1_1")


READ: list[tuple[Callable[[str], object], dict[str, object]]] = [
    (input_size, {"224x320": (224, 320), "33X57": (33, 57), "7×9": (7, 9), " 64 ": (64, 64), "16384x1": (16384, 1)}),
    (input_size, {"8x64x32": (8, 64, 32)}),
    (size, {"20MB": 20_000_000, "512 KiB": 524_288, "1.5kb": 1500, "2gib": 2**31, "0.1GB": 10**8, " 7 ": 7}),
    (seed, {"9223372036854775807": 2**63 - 1}),
    (share, {"5%": 0.05, " 5 % ": 0.05, "0.05": 0.05, "0": 0.0, "0%": 0.0, "100%": 1.0, "1%": 0.01, "1.0": 1.0}),
    (share, {f"{tenths / 10:.1f}%": float(Fraction(tenths, 1000)) for tenths in range(1001)}),  # the nearest number
    (number_from(), {"1e4": 10000.0}),
    (number_from(1.0), {"1": 1.0}),
    (number_from(endless=True), {"inf": float("inf")}),
    (rank, {"8": (8.0, None), "5%": (None, 0.05)}),
]


@pytest.mark.parametrize(("read", "values"), READ)
def test_what_is_read(read: Callable[[str], object], values: dict[str, object]) -> None:
    assert {text: read(text) for text in values} == values


@pytest.mark.parametrize(
    ("read", "texts", "says"),
    [
        (input_size, "|x|224x|x224|0x5|5x0|-3|2.5|1x2x3x4|1x0x3|16385|1e3|9x9px", "a size; write height x width in"),
        (size, "|20M|MB|-1MB|0kB|1e3|٣MB|inf|20 000", "a size; write 20MB, 500kB or 512KiB"),
        (seed, "-1|9223372036854775808", "in the range 0<=x<=9223372036854775807"),
        (share, "x|nan|inf|-1|-0.1%|150%|100.1%||%|5%%|5|1e400|5,0%", r"a share; write 5% or 0\.05"),
        (number_from(), "x|nan|-1||inf|1e400|-inf", "a number of at least 0"),
        (number_from(1.0), "0.9", "a number of at least 1"),
        (number_from(most=1.0), "1.1", "a number of 0 to 1"),
        (rank, "x|nan|-1|inf|", "a rank; write a number of directions"),
        (rank, "150%", "a share"),
    ],
)
def test_what_is_not_read(read: Callable[[str], object], texts: str, says: str) -> None:
    for text in texts.split("|"):
        with pytest.raises(click.BadParameter, match=f"{re.escape(text)}'? is not {says}"):
            read(text)


def test_a_bare_1_is_asked_back() -> None:
    with pytest.raises(click.BadParameter, match="write 1% or 100%"):
        share("1")


def test_words_that_are_offered_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookscope.models.torchvision_builders.fetch", lambda *words: pytest.fail("none needs nothing"))
    assert load_model("squeezenet1_1", weights="none").weights == "random (seed 0)"
    words = offered(options.complete_preprocess, "")
    assert words == list(PREPROCESS_WORDS) and all(PreprocessChoice.parse(word).base == word for word in words)


def offered(complete: Any, incomplete: str, *args: str, **params: Any) -> list[str]:
    context = click.Context(list_layers)
    context.params.update(params)
    context.args = [*args]
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


class Toy(Command):
    """Say what came."""

    thresholds: dict[str, Any] = threshold_option("activations")

    def run(self) -> None:
        click.echo(repr(StatisticsThresholds.of(self.thresholds)))


toy = Toy.made("toy")


def test_every_threshold_has_its_name_and_the_default_of_the_library() -> None:
    assert CliRunner().invoke(toy, []).output == f"{StatisticsThresholds()!r}\n"
    texts = (
        "dead-share=1% saturated-share=2% vanishing=3 exploding=4 duplicate-correlation=.5 low-rank=6% drift-shift=7"
    )
    words = [word for text in f"{texts} drift-ratio=8 few-images=9".split() for word in ("--threshold", text)]
    answer = CliRunner().invoke(toy, words)
    assert answer.output == f"{StatisticsThresholds(0.01, 0.02, 3.0, 4.0, 0.5, 0.06, 7.0, 8.0, 9)!r}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dead=1%", "no threshold 'dead'; nearest: dead-share"),
        ("dead-share", "--threshold dead-share: '' is not a share"),
        ("few-images=-1", "--threshold few-images: -1 is not in the range"),
        ("vanishing=x", "--threshold vanishing: 'x' is not a number of at least 0"),
    ],
)
def test_what_is_no_threshold_is_said(text: str, message: str) -> None:
    error = CliRunner().invoke(toy, ["--threshold", text]).exception
    assert isinstance(error, UsageError) and message in str(error), error


class Say(Command):
    """Say what came."""

    model: str = argument("MODEL")
    target: Target = target_option("Which class to explain")
    categories: tuple[str, ...] | None = categories_option()

    def run(self) -> None:
        click.echo(json.dumps([str(self.target), self.categories]))


command = Say.made("say")


def invoked(*words: str) -> Any:
    result = CliRunner().invoke(command, ["shapes", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_several_targets_are_joined() -> None:
    assert invoked("--target", "star,circle")[0] == "star,circle"
    assert invoked("--target", "star", "--target", "7,top:2")[0] == "star,7,top:2"
    target = Target(invoked("--target", "star", "--target", "circle", "--target", "star")[0])
    assert target.indices([0, 0, 0], ["circle", "square", "star"]) == (2, 0)
    assert target.count == 3


def test_names_of_classes_are_completed_where_they_are_known(
    shapes_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = [f"shape {number}" for number in range(10)]
    assert offered(complete_targets, "", model="shapes") == ["top:1", "top:3", "top:5", *words]
    assert offered(complete_targets, "SHAPE 7", "shapes") == ["shape 7"]
    assert offered(complete_targets, "to", model="shapes") == ["top:1", "top:3", "top:5"]
    assert offered(complete_targets, "c", model="resnet34", categories=("cat", "Cow", "dog")) == ["cat", "Cow"]
    (item,) = complete_categories(click.Context(command), command.params[2], "na")
    assert (item.value, item.type) == ("na", "file")
    assert offered(complete_targets, "tiger c", model="resnet34") == ["tiger cat"]
    assert offered(complete_targets, "PotteD", model="fcn_resnet50") == ["pottedplant"]
    assert len(offered(complete_targets, "", model="r3d_18")) == 3 + 400
    monkeypatch.setenv("_HOOKSCOPE_COMPLETE", "bash_complete")  # which puts a name down as it is
    assert offered(complete_targets, "tiger c", model="resnet34") == [r"tiger\ cat"]
    assert offered(complete_targets, "jack-o", model="resnet34") == [r"jack-o\'-lantern"]
    for model in ("raft_small", "nets.py:mine", "no_such_model", None):
        assert offered(complete_targets, "", model=model) == ["top:1", "top:3", "top:5"]
    monkeypatch.setattr("hookscope.models.names.package_folder", lambda: str(tmp_path / "nowhere" / "package"))
    assert offered(complete_targets, "x", model="shapes") == []


def net(categories: tuple[str, ...] | None, outputs: int = 2) -> Any:
    return SimpleNamespace(name="mynet", categories=categories, model=nn.Linear(2, outputs))


def test_the_models_own_names_unless_a_file_of_as_many_is_given() -> None:
    assert categories_of(net(("a", "b")), None) == ("a", "b")
    assert categories_of(net(None), None) is None
    assert categories_of(net(("a", "b")), ("c", "d")) == ("c", "d")
    assert categories_of(net(None), ("c", "d", "e")) == ("c", "d", "e")
    with pytest.raises(CategoriesError, match="3 class names for 2 classes of mynet; give the class names of this"):
        categories_of(net(("a", "b")), ("c", "d", "e"))


@pytest.mark.parametrize(
    ("categories", "outputs", "says"), [(None, 1000, True), (None, 10, False), (("a",), 1000, False)]
)
def test_a_thousand_classes_without_names_say_how_to_name_them(
    capsys: pytest.CaptureFixture[str], categories: tuple[str, ...] | None, outputs: int, says: bool
) -> None:
    categories_of(net(categories, outputs), None)
    note = "Note: class names unknown; --categories imagenet if these are ImageNet's classes\n"
    assert capsys.readouterr().err == note * says
    categories_of(net(None, outputs), ("a",))
    assert capsys.readouterr().err == ""
