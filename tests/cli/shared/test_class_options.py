"""Options about classes: what completes, what converts, which names are taken."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner
from torch import nn

from hookscope.cli.command import Command
from hookscope.cli.fields import argument
from hookscope.cli.shared.options import (
    categories_of,
    categories_option,
    complete_categories,
    complete_targets,
    target_option,
)
from hookscope.errors import CategoriesError
from hookscope.scores.target import Target


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


@dataclasses.dataclass
class Typed:
    """What click knows of a half-typed line."""

    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    args: tuple[str, ...] = ()


def completed(incomplete: str, typed: Typed) -> list[str]:
    context: Any = typed
    parameter: Any = None
    return [item.value for item in complete_targets(context, parameter, incomplete)]


def test_names_of_classes_are_completed_where_they_are_known(
    shapes_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = [f"shape {number}" for number in range(10)]
    assert completed("", Typed({"model": "shapes"})) == ["top:1", "top:3", "top:5", *words]
    assert completed("SHAPE 7", Typed(args=("shapes",))) == ["shape 7"]
    assert completed("to", Typed({"model": "shapes"})) == ["top:1", "top:3", "top:5"]
    assert completed("c", Typed({"model": "resnet34", "categories": ("cat", "Cow", "dog")})) == ["cat", "Cow"]
    (item,) = complete_categories(click.Context(command), command.params[2], "na")
    assert (item.value, item.type) == ("na", "file")
    assert completed("tiger c", Typed({"model": "resnet34"})) == ["tiger cat"]
    assert completed("PotteD", Typed({"model": "fcn_resnet50"})) == ["pottedplant"]
    assert len(completed("", Typed({"model": "r3d_18"}))) == 3 + 400
    monkeypatch.setenv("_HOOKSCOPE_COMPLETE", "bash_complete")  # which puts a name down as it is
    assert completed("tiger c", Typed({"model": "resnet34"})) == [r"tiger\ cat"]
    assert completed("jack-o", Typed({"model": "resnet34"})) == [r"jack-o\'-lantern"]
    for model in ("raft_small", "nets.py:mine", "no_such_model", None):
        assert completed("", Typed({"model": model})) == ["top:1", "top:3", "top:5"]
    monkeypatch.setattr("hookscope.models.names.package_folder", lambda: str(tmp_path / "nowhere" / "package"))
    assert completed("x", Typed({"model": "shapes"})) == []


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
