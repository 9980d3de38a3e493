"""The two sides of ``compare``: each option of a model once for both sides, and once for each of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import click

from hookscope import comparison, models
from hookscope.cli import process
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.intervention_options import Change, at_option
from hookscope.cli.shared.model import ModelOptions, note_assumption
from hookscope.errors import ModelError

_SIDES = ("a", "b")


class _OfBoth(click.Option):
    """An option of both sides; its help names those of one side too."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """``--weights[-a|-b] WEIGHTS`` and the help."""
        record = super().get_help_record(ctx)
        return record and (record[0].replace(self.opts[0], f"{self.opts[0]}[-a|-b]", 1), record[1])


class _OfOne(click.Option):
    """An option of one side; the help of the one of both sides names it."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """None: it has no line of its own."""
        return None


def _sided(option: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``option``, and the same with ``-a`` and ``-b`` for one side."""
    command: Any = option(lambda: None)
    [both], options = command.__click_params__, []
    for end in ("", *(f"-{side}" for side in _SIDES)):
        default = {} if end else {"default": both.default, "show_default": both.show_default}
        options.append(
            click.option(
                f"{both.name}{end.replace('-', '_')}",
                *(f"{name}{end}" for name in both.opts),
                cls=_OfOne if end else _OfBoth,
                type=None if both.is_flag else both.type,
                is_flag=both.is_flag,
                nargs=both.nargs,
                multiple=both.multiple,
                metavar=both.metavar,
                callback=both.callback,
                shell_complete=lambda ctx, param, incomplete: both.shell_complete(ctx, incomplete),
                help=both.help,
                **default,
            )
        )
    return lambda command: shared.apply_options(options, command)


_OPTIONS = [
    *map(
        _sided,
        [
            shared.weights_option,
            shared.seed_option,
            click.option(
                "--dtype",
                metavar="TYPE",
                type=click.Choice(models.DTYPE_WORDS),
                help="Data type of the model: float16, bfloat16, float32 or float64; autocast or autocast:float16 for"
                " torch.autocast.  [default: as loaded]",
            ),
            shared.device_option,
            click.option("--compile", is_flag=True, help="Run the model through torch.compile."),
            at_option,
            *shared.preprocess_options,
            shared.size_option,
        ],
    )
]


_OF_MODEL = [field.name for field in fields(ModelOptions) if field.name != "model"]
_NAMES = (*_OF_MODEL, "dtype", "compile", "changes")


@dataclass(frozen=True)
class SideOptions:
    """MODEL of one side, how it is loaded, and how it runs."""

    model: ModelOptions
    dtype: str | None
    compile: bool
    changes: tuple[Change, ...]

    @classmethod
    def of(cls, side: str, values: dict[str, Any]) -> SideOptions:
        """The options of ``side``: its own, else those of both sides; interventions are those of both and its own."""

        def value(name: str) -> Any:
            own = values[f"{name}_{side}"]
            if name == "weights" and own is None and leaves_weights:
                return "auto"
            return values[name] if own is None else own

        holds = {each: _holds_weights(values[f"model_{each}"]) for each in _SIDES}
        leaves_weights = holds[side] and not all(holds.values())  # --weights is then for the other side

        model = ModelOptions(values[f"model_{side}"], **{name: value(name) for name in _OF_MODEL})
        changes = [*values["changes"], *values[f"changes_{side}"]]
        compiled = values["compile"] or values[f"compile_{side}"]
        return cls(model, value("dtype"), compiled, tuple(Change.parse(*change) for change in changes))

    @property
    def says_values(self) -> bool:
        """Whether options say how colours become values."""
        return self.model.preprocess != "weights" or any((self.model.mean, self.model.std, self.model.range))

    def side(self, net: models.LoadedModel) -> comparison.Side:
        """The side that runs ``net`` as the options say."""
        with process.prints_to_standard_error():
            changes = [(change.where, change.build(net, None)) for change in self.changes]
        return comparison.make_side(net, self.dtype, changes=changes, compiled=self.compile)


def load_sides(a: SideOptions, b: SideOptions) -> tuple[comparison.Side, comparison.Side]:
    """Both sides; one whose model says nothing of preprocessing has that of the other, unless options say it."""
    nets = [options.model.load(pictures=False) for options in (a, b)]
    own = [net.preprocess for net in nets]
    for at in (0, 1):
        if not a.says_values and not b.says_values:
            nets[at] = replace(nets[at], preprocess=own[at].like(own[1 - at]))
    for net in nets[: 1 if nets[0].preprocess == nets[1].preprocess else 2]:
        note_assumption(net)
    return a.side(nets[0]), b.side(nets[1])


def side_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of both sides, which the command gets as ``a`` and ``b``; its arguments are the two models."""

    @functools.wraps(command)
    def with_sides(**values: Any) -> Any:
        names = [f"{name}{end}" for name in _NAMES for end in ("", "_a", "_b")]
        own = {name: values.pop(name) for name in (*names, "model_a", "model_b")}
        a, b = (SideOptions.of(side, own) for side in _SIDES)
        return command(a=a, b=b, **values)

    return shared.apply_options(_OPTIONS, with_sides)


def _holds_weights(model: str) -> bool:
    """Whether a file of this name holds the weights too; what is no model is said when it is loaded."""
    try:
        return models.find_source(model).own_weights
    except ModelError:
        return False
