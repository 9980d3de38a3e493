"""What is done to the parameters' gradients before an optimizer sees them: freeze, scale, clamp to a sign, clip."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from hookscope.errors import LayerError, UsageError, nearest
from hookscope.findings import listed
from hookscope.gradients.modify import (
    ClampGradientSign,
    ClipGradientValue,
    ScaleGradient,
    ZeroGradient,
    clip_total_norm,
)
from hookscope.hooks import Selection

Change = Callable[[Mapping[str, "Tensor"]], Mapping[str, "Tensor"]]


@dataclass(frozen=True, slots=True)
class GradientChanges:
    """Changes of all parameters' gradients, made in this order: freeze, scale, sign, value, norm.

    Attributes:
        freeze: Names of layers (with all that is in them), patterns of such names, or names of single parameters,
            whose gradients become 0. What flows through a layer to those before it stays as it is.
        clip_value: Every value into ``[-clip_value, clip_value]``, as `torch.nn.utils.clip_grad_value_`.
        clip_norm: The norm of all gradients together at most this, as `torch.nn.utils.clip_grad_norm_`.
        scale: Every value times this; -1 turns the gradients round.
        sign: ``positive`` or ``negative``: values of the other sign become 0.

    Raises:
        UsageError: a limit that is not above 0, a factor that is not finite, another sign, or a selection that counts
            calls.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
        >>> change = GradientChanges(freeze=("0",), clip_value=2.0).of(net)
        >>> {name: g.tolist() for name, g in change({"0.bias": torch.ones(1), "1.bias": torch.full((1,), 9.0)}).items()}
        {'0.bias': [0.0], '1.bias': [2.0]}
    """

    freeze: tuple[str, ...] = ()
    clip_value: float | None = None
    clip_norm: float | None = None
    scale: float | None = None
    sign: str | None = None

    def __post_init__(self) -> None:
        for name, limit in (("clip value", self.clip_value), ("clip norm", self.clip_norm)):
            if limit is not None and not limit > 0:
                raise UsageError(f"no {name} {limit:g}: it would leave nothing", do="give a number above 0")
        if self.scale is not None and not math.isfinite(self.scale):
            raise UsageError(f"no scale {self.scale:g}", do="give a finite factor")
        if self.sign is not None:
            ClampGradientSign(self.sign)
        for term in _terms(self.freeze):
            if term.has_call_numbers:
                raise UsageError(f"cannot freeze '{term}'", "parameters have names, not calls", "name a layer: conv1")

    def __bool__(self) -> bool:
        given = (self.clip_value, self.clip_norm, self.scale, self.sign)
        return bool(self.freeze) or any(one is not None for one in given)

    def frozen(self, model: nn.Module, called: str = "") -> tuple[str, ...]:
        """Names of the parameters of ``model`` that `freeze` means.

        Raises:
            LayerError: a name that is neither a layer nor a parameter.
        """
        parameters = [name for name, _ in model.named_parameters()]
        layers = [name for name, _ in model.named_modules(remove_duplicate=False)]
        wanted: set[str] = set()
        for term in _terms(self.freeze):
            wanted.update([str(term)] if str(term) in parameters else _inside(term, layers, parameters, called))
        return tuple(name for name in parameters if name in wanted)

    def of(self, model: nn.Module, called: str = "") -> Change:
        """The change as a function of the gradients by the parameters' names; it makes new tensors.

        Args:
            model: Whose parameters.
            called: The model's name on a command line, for errors.

        Raises:
            LayerError: a name that is neither a layer nor a parameter.
        """
        frozen = set(self.frozen(model, called))

        def change(gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            changed = {name: ZeroGradient()(g) if name in frozen else g for name, g in gradients.items()}
            if self.scale is not None:
                changed = {name: ScaleGradient(self.scale)(g) for name, g in changed.items()}
            if self.sign is not None:
                changed = {name: ClampGradientSign(self.sign)(g) for name, g in changed.items()}
            if self.clip_value is not None:
                changed = {name: ClipGradientValue(self.clip_value)(g) for name, g in changed.items()}
            if self.clip_norm is not None:
                changed = dict(zip(changed, clip_total_norm(changed.values(), self.clip_norm), strict=True))
            return changed

        return change


def _terms(freeze: tuple[str, ...]) -> tuple[Selection, ...]:
    """Each name or pattern by itself."""
    if freeze and not "".join(freeze).strip(", "):
        raise UsageError("nothing to freeze", do="name a layer or a parameter")
    return Selection(freeze).terms if freeze else ()


def _inside(selection: Selection, layers: Sequence[str], parameters: Sequence[str], called: str) -> list[str]:
    """The parameters of every layer that ``selection`` names, and of all layers in them; a number is a name too."""
    term = str(selection)
    found = [term] if term in layers else [name for name in layers if selection.calls_by_name([name])]
    own = [p for p in parameters if any(not name or p.startswith(f"{name}.") for name in found)]
    if not found:
        some = nearest(term, [*layers, *parameters]) or f"there are {_outline(parameters)}"
        how = f"list them with `hookscope weights {called}`" if called else ""
        raise LayerError(f"no layer or parameter '{term}'", some, how)
    if not own:
        raise LayerError(f"cannot freeze '{term}'", "it has no parameters", "name another layer")
    return own


def _outline(parameters: Sequence[str]) -> str:
    """``conv1, bn1, layer1 and 4 more``: the outermost names with parameters."""
    return listed(list(dict.fromkeys(name.partition(".")[0] for name in parameters)), 6) or "no parameters"
