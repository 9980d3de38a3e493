"""How the parameters of a layer of B follow from the parameters of a layer of A: a factor, a permutation, an axis."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hookscope.comparison.facts import PairedCall
from hookscope.comparison.pairing import Pair
from hookscope.comparison.rows import DifferenceSums
from hookscope.comparison.side import functions_of
from hookscope.hooks import MODEL, as_plain, buffers_kept, is_leaf
from hookscope.models import dtype_name

_FEW = 4  # channels whose order is said
_SIMPLE = (bool, int, float, str, tuple, type(None))  # an argument of a layer that can be compared and shown
_RESET = "{} holds the values of a new layer: load them, or measure lost running statistics by images in training mode."
_CONVERTED = "Look where B was converted or saved, or load this layer of A into B and compare again."
_MAPPED = "Check how the names in the checkpoint of B were mapped to layers."
_AXES = {  # of a weight, by what its layer computes
    "conv": ("output channels", "input channels", "rows of the kernels", "columns of the kernels"),
    "convtranspose": ("input channels", "output channels", "rows of the kernels", "columns of the kernels"),
    "linear": ("output channels", "input channels"),
    "batchnorm": ("channels",),
    "layernorm": ("channels",),
    "groupnorm": ("channels",),
}


@dataclass
class Weights:
    """The parameters and buffers of both sides; ``uses`` are the parameters that pairs of operations take, by key."""

    a: nn.Module
    b: nn.Module
    uses: Mapping[str, tuple[Sequence[str], Sequence[str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._modules = dict(self.a.named_modules()), dict(self.b.named_modules())

    def held(
        self, pair: Pair | PairedCall, buffers: bool = False
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        """The tensors that both calls of a pair hold themselves, by name; None if they do not belong together."""
        if pair.paired_by == "folded":
            return None
        a, b = (
            self._of(side, call.name, () if buffers else uses, buffers)
            for side, call, uses in zip((0, 1), (pair.a, pair.b), self.uses.get(pair.a.key, ((), ())), strict=True)
        )
        if len(a) == len(b) == 1 and pair.a.key in self.uses and any(self.uses[pair.a.key]):
            b = dict(zip(a, b.values(), strict=True))  # an operation calls it by another name
        return (a, b) if a.keys() == b.keys() and all(a[name].shape == b[name].shape for name in a) else None

    def _of(self, side: int, name: str, uses: Sequence[str], buffers: bool) -> dict[str, Tensor]:
        if uses:
            return {name: (self.a, self.b)[side].get_parameter(name) for name in uses}
        module = self._modules[side].get("" if name == MODEL else name)
        if module is None:
            return {}
        return dict((module.named_buffers if buffers else module.named_parameters)(recurse=False))

    def change(self, pair: Pair | PairedCall, buffers: bool = False) -> float | None:
        """How far the tensors are apart that both calls of a pair hold; None if they do not pair or are none."""
        sums = DifferenceSums()
        for one, two in zip(*map(_floating, self.held(pair, buffers) or ({}, {})), strict=True):
            sums.add(one[1], two[1], (0,))
        return sums.apart if sums.values else None

    def relation(self, pair: PairedCall) -> tuple[str, str, str]:
        """The names of what differs where no layer but a block or the model holds it, what it is in B, and advice.

        Such as ``B's weight is A's times 10``; empty if it is not known. Of equal tensors it names the arguments of the
        layer that differ.
        """
        held = [self.held(pair, buffers) or ({}, {}) for buffers in (False, True)]
        a, b = (dict(item for both in held for item in _floating(both[side])) for side in (0, 1))
        module = self._modules[0].get("" if pair.a.name == MODEL else pair.a.name)
        own = module is not None and is_leaf(module)
        above = "" if own or module in (None, self.a) else f"{pair.a.name}."
        both = {name: (as_plain(a[name]).detach(), as_plain(b[name]).detach().to(a[name].device)) for name in a}
        changed = [name for name, (one, two) in both.items() if not torch.equal(one.to(two.dtype), two)]
        words: dict[tuple[str, str, str], list[str]] = {}
        kind = functions_of(pair.a.type)[0]
        for name in changed:
            reset = [side for side, value in zip("AB", both[name], strict=True) if _is_initial(kind, name, value)]
            if len(reset) == 1 and own:
                found = (reset[0], "at the initial values", _RESET.format(reset[0]))
            elif said := relation(*both[name], _AXES.get(kind, ()) if own else ()):
                found = ("B", said, _CONVERTED)
            else:
                said = self._other(b[name], name)
                found = ("B", said, _MAPPED if said else "")
            words.setdefault(found, []).append(above + name)
        place = "" if own else " and ".join(above + name for name in changed)
        known = {it: _joined(names) + (" are" if names[1:] else " is") for it, names in words.items() if it[1]}
        said = " and ".join(f"{side}'s {names} {it}" for (side, it, _), names in known.items())
        if not said and own and len(changed) < len(a) and any(name in held[0][0] for name in changed):
            said = f"only its {_joined(changed)}"
        return place, said or ("" if changed else self._arguments(pair)), next((it[2] for it in known), "")

    def _arguments(self, pair: PairedCall) -> str:
        """Whose statistics two BatchNorms use, or the arguments in which two layers of one class differ."""
        a, b = (side.get(call.name) for side, call in zip(self._modules, (pair.a, pair.b), strict=True))
        if a is None or b is None or not is_leaf(a):
            return ""
        layers = ((pair.a, a, "A"), (pair.b, b, "B"))
        norms = {_mixes(it, pair.shape_a): side for of, it, side in layers if functions_of(of.type)[0] == "batchnorm"}
        if norms.keys() == {True, False}:
            return f"it uses the statistics of the batch in {norms[True]}, and running statistics in {norms[False]}"
        if type(a) is not type(b):
            return ""
        one, two = (
            {key: value for key, value in vars(layer).items() if key[0] != "_" and isinstance(value, _SIMPLE)}
            for layer in (a, b)
        )
        names = [name for name in one.keys() & two.keys() if one[name] != two[name]]
        words = " and ".join(f"{name} is {one[name]} in A and {two[name]} in B" for name in sorted(names))
        return f"its {words}" if words else ""

    def _other(self, value: Tensor, name: str) -> str:
        """The parameter or buffer of another layer of A that ``value`` equals."""
        last = name.rpartition(".")[2]
        for other, tensor in itertools.chain(self.a.named_parameters(), self.a.named_buffers()):
            same = tensor.shape == value.shape and tensor.numel() > 1 and other.rpartition(".")[2] == last
            if same and torch.equal(tensor, value.to(tensor.device, tensor.dtype)):
                return f"{other} of A"
        return ""


def _joined(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _floating(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """The floating-point ones, or all if there is none: a count of batches says little."""
    return [item for item in tensors.items() if item[1].is_floating_point()] or list(tensors.items())


def _is_initial(kind: str, name: str, value: Tensor) -> bool:
    """Whether a parameter or statistic of a normalisation is as in a new layer."""
    first = {"weight": 1, "running_var": 1, "bias": 0, "running_mean": 0}.get(name)
    return kind.endswith("norm") and first is not None and bool((value == first).all())


def _mixes(layer: nn.Module, shape: object) -> bool | None:
    """Whether the output of a layer for an image of this shape changes with the other images; None if not known."""
    with suppress(Exception), torch.no_grad(), buffers_kept(layer):  # of a layer that takes other inputs
        like = next(itertools.chain(layer.parameters(), layer.buffers()), torch.zeros(()))
        images = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0)).to(like)  # type: ignore[misc]
        one, two = (layer.forward(images[:count])[:2] for count in (2, 4))
        return not torch.allclose(one, two, rtol=1e-2, atol=1e-2)
    return None


def stored_as(model: nn.Module) -> str:
    """The data type to whose numbers all float32 weights were rounded, such as ``float16``; empty if to none."""
    weights = [value for value in model.parameters() if value.dtype == torch.float32 and value.dim() > 1]
    for kind in (torch.bfloat16, torch.float16):
        if weights and all(torch.equal(value, value.to(kind).to(value.dtype)) for value in weights):
            return dtype_name(kind)
    return ""


def relation(a: Tensor, b: Tensor, axes: Sequence[str] = ()) -> str:
    """How ``b`` follows from ``a``, two different tensors of one shape: ``A's times 10``; empty if it is not known."""
    rounding = max((torch.finfo(side.dtype).eps for side in (a, b) if side.is_floating_point()), default=0.0)
    x, y = a.cpu().double(), b.cpu().double()
    near = max(1e-5, 8 * rounding) * float(y.norm())

    def is_b(value: Tensor) -> bool:
        return float((value - y).norm()) <= near

    if x.numel() < 2 or not (x.isfinite().all() and y.isfinite().all()) or is_b(x):
        return ""
    if bool((y == y.flatten()[0]).all()):
        return f"{float(y.flatten()[0]) + 0.0:.4g} everywhere"
    factor = float((x * y).sum() / (x * x).sum().clamp(min=1e-300))
    if abs(factor - 1) > 1e-3 and is_b(factor * x):
        return "A's with the sign flipped" if abs(factor + 1) < 1e-3 else f"A's times {factor:.4g}"
    for one, two in itertools.combinations(range(x.dim()), 2):
        if x.shape[one] == x.shape[two] > 1 and is_b(x.transpose(one, two)):
            return f"A's with {_axis(one, axes)} and {_axis(two, axes)} exchanged"
    for axis, order in _orders(x, y):
        if is_b(x.index_select(axis, order)):
            said = f" ({', '.join(map(str, order.tolist()))})" if len(order) <= _FEW else ""
            return f"A's with {_axis(axis, axes)} permuted{said}"
    return ""


def _axis(axis: int, axes: Sequence[str]) -> str:
    return axes[axis] if axis < len(axes) else f"axis {axis}"


def _orders(x: Tensor, y: Tensor) -> Iterator[tuple[int, Tensor]]:
    """For each axis the only order of the slices of ``x`` that may give ``y``: by one random projection of each."""
    for axis in range(x.dim()):
        rows, others = (side.movedim(axis, 0).flatten(1) if side.dim() > 1 else side[:, None] for side in (x, y))
        weights = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        order = torch.empty(len(rows), dtype=torch.long)
        order[(others @ weights).argsort()] = (rows @ weights).argsort()
        yield axis, order
