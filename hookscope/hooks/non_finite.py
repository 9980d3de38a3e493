"""The search for the first NaN or Inf of a pass: which operation makes it, and which only pass it on."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from hookscope.hooks.calls import OPERATION, Call, call_key
from hookscope.hooks.operations import is_closed, is_single, type_of_operation, without_check
from hookscope.hooks.registration import HookHandles
from hookscope.hooks.tensors import as_plain, storage_key, tensors_in

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # the folder of the package


class WatchedPass(TorchFunctionMode):
    """Observes every operation of torch, and each layer before and after it runs, inside a ``with`` block."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
        self._handles = HookHandles()

    def __enter__(self) -> Self:
        with HookHandles() as handles:
            for module in self._names:
                handles.forward_pre(module, self._before)
                handles.forward(module, self._after)
            super().__enter__()  # type: ignore[no-untyped-call]
            self._handles = handles.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._handles.close()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        raise NotImplementedError

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        raise NotImplementedError


def place_of_code() -> str:
    """The line that called the running ``__torch_function__``, ``net.py:17``; empty if it is a line of hookscope."""
    library = os.path.dirname(torch.__file__) + os.sep
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "__torch_function__":
        frame = frame.f_back
    frame = frame and frame.f_back
    while frame is not None:
        own = frame.f_code.co_filename.startswith(_OWN)
        if own and frame.f_code.co_name != "__torch_function__":
            return ""
        if not own and not frame.f_code.co_filename.startswith(library):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def operation_name(func: Any) -> str:
    """The name of a function of torch; the name of the attribute for a property such as ``data``."""
    name = str(getattr(func, "__name__", func))
    return str(getattr(getattr(func, "__self__", None), "__name__", name)) if name == "__get__" else name


UNKNOWN = "a tensor of unknown origin"
_INPUT = ("the input", "")
_KINDS = ("Inf", "NaN")  # an Inf often comes before the NaN that it becomes
_MASKS = ("buffer", "attribute", UNKNOWN)


@dataclass(frozen=True, slots=True)
class Anomaly:
    """The operation after which values are not finite.

    ``phase`` is ``forward`` or ``backward``; ``operation`` is ``sqrt``, or in the backward pass the node
    ``SqrtBackward0`` with ``forward`` ``sqrt``. ``layer`` is the key of the innermost running layer, empty for the
    model. ``place`` is the line of code, ``net.py:17``. ``source`` names the parameter or tensor that already held the
    NaN, empty if the operation made it. ``infinite`` is the origin of the Inf that became NaN. ``deliberate``: an Inf
    that the code writes as a number, or holds as a constant, such as a mask. ``call`` is the call of a layer of torch,
    else of the operation.
    """

    phase: str
    kind: str
    operation: str
    layer: str
    place: str
    source: str = ""
    infinite: Anomaly | None = None
    forward: str = ""
    deliberate: bool = False
    call: Call | None = field(default=None, compare=False)

    def __str__(self) -> str:
        where = f" in '{self.layer}'" if self.layer else ""
        return f"{self.operation_and_place}{where}"

    @property
    def operation_and_place(self) -> str:
        """``SqrtBackward0 of sqrt at net.py:17``."""
        name = self.operation or "an unnamed operation"
        name += f" of {self.forward}" if self.forward else ""
        return f"{name} at {self.place}" if self.place else name

    @property
    def origin(self) -> Anomaly:
        return self.infinite or self


class NonFiniteSearch(WatchedPass):
    """Tests the result of every operation of torch inside a ``with`` block.

    ``nan`` is the origin of the first NaN, ``infinite`` has every Inf that an operation made or the pass was given.
    """

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        super().__init__(model)
        self.nan: Anomaly | None = None
        self.infinite: list[Anomaly] = []
        self._behind = WeakTensorKeyDictionary()  # the origin of the Inf in a tensor
        self._owners = {  # kind and name
            id(value): ("attribute", f"{name}.{attribute}" if name else attribute)
            for module, name in self._names.items()
            for attribute, value in vars(module).items()
            if isinstance(value, torch.Tensor)
        }
        self._owners |= {id(tensor): ("parameter", name) for name, tensor in model.named_parameters()}
        self._owners |= {id(tensor): ("buffer", name) for name, tensor in model.named_buffers()}
        self._owners |= {id(tensor): _INPUT for tensor in tensors_in(inputs).values()}
        self._blank: dict[int | None, Tensor] = {}  # uninitialised memory
        self._constants: dict[int | None, tuple[Tensor, Anomaly]] = {}
        self._running: list[tuple[nn.Module, str]] = []
        self._times: dict[nn.Module, int] = {}
        self._operations: Counter[str] = Counter()
        self._order = 0
        self._latest: Sequence[Tensor] = ()  # results that were tested last

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and test its result."""
        kwargs = kwargs or {}
        name = operation_name(func)
        if func is Tensor.__iter__:
            return iter(self.__torch_function__(Tensor.unbind, types, args))
        if name == "multi_head_attention_forward":  # a layer in a function
            TorchFunctionMode.__enter__(self)
            try:
                return without_check(func)(*args, **kwargs)
            finally:
                TorchFunctionMode.__exit__(self, None, None, None)
        arguments = list(tensors_in((args, kwargs)).values())
        targets = list(tensors_in(kwargs.get("out")).values())
        if may_write(name, args, kwargs):
            targets = arguments[:1] or targets
        carriers = kinds_of(arguments) if targets else None
        result = func(*args, **kwargs)
        results = list({id(tensor): tensor for tensor in (*tensors_in(result).values(), *targets)}.values())
        if "empty" in name:
            self._note_blank(results)
        elif not arguments or name.startswith("new_") or name.endswith("_like"):
            # constants with NaN or Inf count once an operation uses them: they may be overwritten first
            spoiled = [tensor for tensor in results if any(kinds_of([tensor]).values())]
            self._constants |= {storage_key(tensor): (tensor, self._here(func)) for tensor in spoiled}
        elif results:
            numbers = [value for value in (*args, *kwargs.values()) if isinstance(value, float)]
            given = not all(map(math.isfinite, numbers))
            if not self._test(results, arguments, func, targets, carriers, given):
                self._test_lost(results, arguments, func)
            self._latest = results
        kind = type_of_operation(func)
        if kind and self._place is not None and (tensors_in(result) or kind == "setitem"):
            self._operations[f"{self._place}{OPERATION}{kind}"] += 1
            self._order += 1
        return result

    @property
    def _place(self) -> str | None:
        """The innermost module that runs; None inside a layer of torch itself, and outside of the model."""
        if not self._running or is_closed(self._running[-1][0]):
            return None
        return self._names[self._running[-1][0]]

    def origin_of_inf(self, tensors: Iterable[Tensor]) -> Anomaly | None:
        """Where the Inf in one of ``tensors`` comes from, as far as it was followed."""
        return next((self._behind[tensor] for tensor in tensors if tensor in self._behind), None)

    def _here(self, func: Any = None, located: bool = True) -> Anomaly:
        """The call of ``func`` that runs; without a function, the innermost call of a layer."""
        layer = self._running[-1][1] if self._running else ""
        name, place = "" if func is None else word_of(func), place_of_code() if located else ""
        return Anomaly("forward", "NaN", name, layer, place, call=self._call_of(func))

    def _call_of(self, func: Any) -> Call | None:
        if not self._running:
            return None
        if func is not None and self._place is not None:
            kind = word_of(func)
            name = f"{self._place}{OPERATION}{kind}"
            return Call(name, kind, self._operations[name], None, self._order)
        module = self._running[-1][0]
        name = self._names[module]
        order = self._order if is_single(name, module) else None
        return Call(name, type(module).__name__, self._times[module] - 1, None, order)

    def _add(self, anomaly: Anomaly, results: Sequence[Tensor], carrier: Tensor | None = None) -> None:
        """Record an origin; ``results`` hold what it made, or what ``carrier`` brought."""
        if anomaly.kind == "Inf":
            self.infinite.append(anomaly)
            self._follow(results if carrier is None else [*results, carrier], anomaly)
        else:
            self.nan = self.nan or anomaly

    def _follow(self, results: Iterable[Tensor], anomaly: Anomaly) -> None:
        for tensor in results:
            self._behind[tensor] = anomaly

    def _note_blank(self, tensors: Iterable[Tensor]) -> None:
        self._blank |= {storage_key(tensor): tensor for tensor in tensors}

    def _test(
        self,
        results: Sequence[Tensor],
        arguments: Sequence[Tensor],
        here: Any,
        targets: Sequence[Tensor] = (),
        carriers: dict[str, list[Tensor]] | None = None,
        given: bool = False,
    ) -> bool:
        """Whether ``results`` hold NaN or Inf; record who made it, if their ``arguments`` did not hold it.

        ``here`` is the place or the function that ran. ``carriers`` already held NaN or Inf, by kind, before it wrote
        to ``targets``. ``given``: a number among its arguments is not finite.
        """
        held = kinds_of(results)
        for kind in _KINDS:
            if not held[kind]:
                continue
            here = here if isinstance(here, Anomaly) else self._here(here)
            carriers = carriers or kinds_of(arguments)
            if not carriers[kind]:
                infinite = None
                if kind == "NaN" and carriers["Inf"]:
                    infinite = self.origin_of_inf(carriers["Inf"]) or next(iter(self.infinite), None)
                    if infinite is None and here.phase == "forward":
                        infinite = self._origin(replace(here, kind="Inf"), carriers["Inf"][0])
                made = replace(here, kind=kind, infinite=infinite, deliberate=given and kind == "Inf")
                self._add(made, held[kind])
            elif here.phase == "forward":
                self._test_carriers(replace(here, kind=kind), carriers[kind], held[kind], targets)
        return any(held.values())

    def _test_carriers(
        self, here: Anomaly, carriers: Sequence[Tensor], results: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> None:
        """Record who brought NaN or Inf into the pass, if no operation with tensors made it."""
        if here.kind == "Inf" and (known := self.origin_of_inf(carriers)):
            self._follow(results, known)
        elif any(_is_among(tensor, self._blank) for tensor in carriers):
            self._note_blank(results)
        elif any(tensor is target for tensor in carriers for target in targets):
            return  # the other elements may be overwritten too
        elif here.kind == "Inf" or self.nan is None:
            self._add(self._origin(here, carriers[0]), results, carriers[0])

    def _test_lost(self, results: Sequence[Tensor], arguments: Sequence[Tensor], func: Any) -> None:
        """Record NaN or Inf of the input of which finite ``results`` are made, as by ``quantize`` and ``clamp``."""
        given = [tensor for tensor in arguments if self._owners.get(id(tensor)) == _INPUT]
        memory = {storage_key(tensor) for tensor in results if tensor.is_floating_point() or tensor.is_quantized}
        for kind, carriers in kinds_of(given).items() if memory else ():
            if carriers and memory.isdisjoint(map(storage_key, carriers)):
                self._test_carriers(replace(self._here(func), kind=kind), carriers, (), ())

    def _origin(self, here: Anomaly, carrier: Tensor) -> Anomaly:
        """Who brought ``carrier``, which no operation with tensors made."""
        if _is_among(carrier, self._constants):
            constant = self._constants[storage_key(carrier)][1]
            return replace(constant, kind=here.kind, deliberate=here.kind == "Inf")
        kind, name = self._owners.get(id(carrier), (UNKNOWN, ""))
        source = f"{kind} '{name}'" if name else kind
        return replace(here, source=source, deliberate=here.kind == "Inf" and kind in _MASKS)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        times = self._times.get(module, 0)
        self._times[module] = times + 1
        self._running.append((module, call_key(self._names[module], times)))

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        while self._running and self._running[-1][0] is not module:
            self._running.pop()
        with torch._C.DisableTorchFunction():  # what NumPy or an extension made appears here
            results = [
                tensor
                for tensor in tensors_in(output).values()
                if not any(tensor is tested for tested in self._latest) and tensor not in self._behind
            ]
            self._test_unseen(results, (args, kwargs))
            self._latest = results or self._latest
        if self._running:
            self._running.pop()
        self._order += is_single(self._names[module], module)

    def _test_unseen(self, results: Sequence[Tensor], arguments: Any) -> None:
        held = kinds_of(results)
        if not any(held.values()):
            return
        carriers = kinds_of(tensors_in(arguments).values())
        for kind in _KINDS:
            if held[kind] and not carriers[kind] and (kind == "Inf" or self.nan is None):
                self._test_carriers(replace(self._here(None, False), kind=kind), held[kind], held[kind], ())


def word_of(func: Any) -> str:
    """``div`` for ``Tensor.__rdiv__``, and ``data`` for the property."""
    return type_of_operation(func) or operation_name(func)


def may_write(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a function of torch may write to its first argument."""
    in_place = name.startswith("__i") or name in ("__set__", "__setitem__") or (name[-1:] == "_" and name[-2:] != "__")
    return in_place or kwargs.get("inplace") is True or any(value is True for value in args)


def kinds_of(tensors: Iterable[Tensor]) -> dict[str, list[Tensor]]:
    """The tensors that hold Inf, and the tensors that hold NaN."""
    kinds: dict[str, list[Tensor]] = {"Inf": [], "NaN": []}
    with torch.no_grad(), torch._C.DisableTorchFunction():
        for tensor in tensors:
            nan, inf = _holds(tensor)
            kinds["NaN"] += [tensor] * nan
            kinds["Inf"] += [tensor] * inf
    return kinds


def _holds(tensor: Tensor) -> tuple[bool, bool]:
    """Whether a tensor holds NaN, and whether it holds Inf; of a distributed one only the local part counts."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    if tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return False, False
    tensor = as_plain(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.element_size() < 2:  # not every small type has a lowest value
        tensor = tensor.float()
    low, high = torch.aminmax(tensor)  # one pass over finite values, in which every NaN and Inf shows
    if math.isfinite(low) and math.isfinite(high):
        return False, False
    return bool(torch.isnan(tensor).any()), bool(torch.isinf(tensor).any())


def _is_among(tensor: Tensor, marked: Container[int | None]) -> bool:
    key = storage_key(tensor)
    return key is not None and key in marked
