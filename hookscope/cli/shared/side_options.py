"""The two sides of ``compare``: each option of a model once for both sides, and once for each of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Self

import click

from hookscope import comparison, models
from hookscope.cli import process
from hookscope.cli.fields import Option, Options, option
from hookscope.cli.shared.intervention_options import Change, at_option
from hookscope.cli.shared.model import ModelOptions, note_assumption
from hookscope.errors import ModelError

_SIDES = ("a", "b")


class SideOptions(ModelOptions):
    """MODEL of one side, how it is loaded, and how it runs."""

    dtype: str | None = option(
        "Data type of the model: float16, bfloat16, float32 or float64; autocast or autocast:float16 for"
        " torch.autocast.  [default: as loaded]",
        metavar="TYPE",
        type=click.Choice(models.DTYPE_WORDS),
        topic="model",
    )
    compile: bool = option("Run the model through torch.compile.", topic="model")
    changes: tuple[Change, ...] = at_option()

    @classmethod
    def of(cls, side: str, values: Mapping[str, Any]) -> SideOptions:
        """The options of ``side``: its own, else the options of both sides; interventions of both and of its own."""
        holds = {each: _holds_weights(values[f"model_{each}"]) for each in _SIDES}
        own = {field.name: values[f"{field.name}_{side}"] for field in fields(cls)}
        both = {name: values.get(name) for name in own}
        if holds[side] and not all(holds.values()):  # --weights is then for the other side
            both["weights"] = "auto"
        given = {name: both[name] if own[name] is None else own[name] for name in own}
        compiled, changes = both["compile"] or own["compile"], (*(both["changes"] or ()), *(own["changes"] or ()))
        return cls(**{**given, "compile": compiled, "changes": changes})

    @property
    def says_values(self) -> bool:
        """Whether options say how colours become values."""
        return self.preprocess != "weights" or any((self.mean, self.std, self.range))

    def side(self, net: models.LoadedModel) -> comparison.Side:
        """The side that runs ``net`` as the options say."""
        with process.prints_to_standard_error():
            changes = [(change.where, change.build(net, None)) for change in self.changes]
        return comparison.make_side(net, self.dtype, changes=changes, compiled=self.compile)


class Sides(Options):
    """The options of both sides; each is also one for A and one for B."""

    a: SideOptions
    b: SideOptions

    @classmethod
    def click_parameters(cls, only: Sequence[str] = ()) -> Iterator[click.Parameter]:
        """MODEL_A and MODEL_B; ``--weights``, ``--weights-a`` and ``--weights-b``, and so on."""
        for both in SideOptions.click_parameters():
            for side in _SIDES:
                if isinstance(both, click.Argument):
                    own = copy.copy(both)
                    own.name, own.opts, own.metavar = f"model_{side}", [f"model_{side}"], f"MODEL_{side.upper()}"
                    yield own
            if isinstance(both, Option):
                yield both
                for side in _SIDES:
                    one = copy.copy(both)
                    one.name, one.opts = f"{both.name}_{side}", [f"{name}-{side}" for name in both.opts]
                    one.default = one.spelled = None
                    yield one
                both.spelled = f"{both.opts[0]}[-a|-b]"

    @classmethod
    def taken(cls, values: Mapping[str, Any]) -> Self:
        """The options of A and of B from the ``values`` that click has read."""
        return cls(**{side: SideOptions.of(side, values) for side in _SIDES})

    @classmethod
    def metadata(cls) -> dict[str, Mapping[str, Any]]:
        """Nothing: no option of a side needs another."""
        return {}


def load_sides(a: SideOptions, b: SideOptions) -> tuple[comparison.Side, comparison.Side]:
    """Load both sides. A model that does not state its preprocessing gets the other's, unless an option sets it."""
    nets = [options.load(pictures=False) for options in (a, b)]
    own = [net.preprocess for net in nets]
    for at in (0, 1):
        if not a.says_values and not b.says_values:
            nets[at] = replace(nets[at], preprocess=own[at].like(own[1 - at]))
    for net in nets[: 1 if nets[0].preprocess == nets[1].preprocess else 2]:
        note_assumption(net)
    return a.side(nets[0]), b.side(nets[1])


def _holds_weights(model: str) -> bool:
    """Whether a file of this name holds the weights too; loading says what is not a model."""
    try:
        return models.find_source(model).own_weights
    except ModelError:
        return False
