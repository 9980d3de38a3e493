"""Changes of all parameter gradients of a model at once, as ``hookscope gradients`` takes them."""

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
    check_positive,
    clip_total_norm,
)
from hookscope.hooks import Selection

Change = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class GradientChanges:
    """Changes of all parameter gradients, applied in this order: freeze, scale, sign, clip value, clip norm.

    ``freeze`` names layers (with their children) or parameters whose gradients become 0; gradients that flow through
    these layers stay unchanged. The clips are those of `torch.nn.utils`, ``sign`` is that of `ClampGradientSign`.

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
            if limit is not None:
                check_positive(name, limit)
        if self.scale is not None and not math.isfinite(self.scale):
            raise UsageError(f"scale {self.scale:g} is not finite", do="give a finite factor")
        if self.sign is not None:
            ClampGradientSign(self.sign)
        for term in _terms(self.freeze):
            if term.has_call_numbers:
                raise UsageError(f"cannot freeze '{term}'", "freeze takes names, not calls", "name a layer: conv1")

    def __bool__(self) -> bool:
        return self != GradientChanges()

    def describe(self) -> list[str]:
        """The changes in the order in which they are applied: ``['freezing fc', 'clipping the norm to 1']``."""
        steps = [f"freezing {', '.join(self.freeze)}"] if self.freeze else []
        steps += [f"scaling by {self.scale:g}"] if self.scale is not None else []
        steps += [f"clamping to {self.sign}"] if self.sign is not None else []
        steps += [f"clipping values to ±{self.clip_value:g}"] if self.clip_value is not None else []
        return steps + ([f"clipping the norm to {self.clip_norm:g}"] if self.clip_norm is not None else [])

    def frozen(self, model: nn.Module, model_name: str = "") -> tuple[str, ...]:
        """Names of the parameters of ``model`` that ``freeze`` selects."""
        parameters = [name for name, _ in model.named_parameters()]
        layers = [name for name, _ in model.named_modules(remove_duplicate=False)]
        frozen: set[str] = set()
        for term in _terms(self.freeze):
            frozen.update([str(term)] if str(term) in parameters else _inside(term, layers, parameters, model_name))
        return tuple(name for name in parameters if name in frozen)

    def of(self, model: nn.Module, model_name: str = "") -> Change:
        """The change as a function from gradients by parameter name to new gradients.

        ``model_name`` is the name of the model on the command line, for the LayerError of an unknown name.
        """
        frozen = set(self.frozen(model, model_name))
        steps: list[Callable[[Tensor], Tensor]] = []
        steps += [ScaleGradient(self.scale)] if self.scale is not None else []
        steps += [ClampGradientSign(self.sign)] if self.sign is not None else []
        steps += [ClipGradientValue(self.clip_value)] if self.clip_value is not None else []

        def change(gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            changed = {name: ZeroGradient()(g) if name in frozen else g for name, g in gradients.items()}
            for step in steps:
                changed = {name: step(gradient) for name, gradient in changed.items()}
            if self.clip_norm is not None:
                changed = dict(zip(changed, clip_total_norm(changed.values(), self.clip_norm), strict=True))
            return changed

        return change


def _terms(freeze: tuple[str, ...]) -> tuple[Selection, ...]:
    """One selection for each name or pattern."""
    if freeze and not "".join(freeze).strip(", "):
        raise UsageError("nothing to freeze", do="name a layer or a parameter")
    return Selection(freeze).terms if freeze else ()


def _inside(selection: Selection, layers: Sequence[str], parameters: Sequence[str], model_name: str) -> list[str]:
    """The parameters of every layer that ``selection`` names, and of their children; a number is a name here."""
    term = str(selection)
    chosen = [term] if term in layers else [name for name in layers if selection.calls_by_name([name])]
    frozen = [p for p in parameters if any(not name or p.startswith(f"{name}.") for name in chosen)]
    if not chosen:
        outline = listed(list(dict.fromkeys(name.partition(".")[0] for name in parameters)), 6)
        some = nearest(term, [*layers, *parameters]) or f"there are {outline or 'no parameters'}"
        how = f"list them with `hookscope weights {model_name}`" if model_name else ""
        raise LayerError(f"no layer or parameter '{term}'", some, how)
    if not frozen:
        raise LayerError(f"cannot freeze '{term}'", "it has no parameters", "name another layer")
    return frozen
