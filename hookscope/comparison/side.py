"""One side of a comparison: a model, and how it runs."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from hookscope.comparison.compiled import CompiledPass
from hookscope.comparison.facts import SideFacts
from hookscope.errors import UsageError
from hookscope.hooks import Call
from hookscope.interventions import intervene
from hookscope.models import LoadedModel, as_loaded, dtype_name, is_quantized, parse_dtype

FUNCTIONAL = ("QFunctional", "FloatFunctional", "FXFloatFunctional")
"""Classes of torch.ao that add, multiply and concatenate; they are no calls, but the Identity in them is."""


@dataclass(frozen=True)
class Side:
    """A model, and how it runs in a comparison.

    Attributes:
        net: The model, on its device and in its data type; it prepares its own images.
        autocast: The data type of `torch.autocast` around each pass; None without it.
        changes: Interventions as `hookscope.intervene` takes them.
        compiled: The backend of `torch.compile` through which the model runs, such as ``inductor``, which True means
            too; False for an eager model. What layers return is then taken from a second program, which is compiled
            from the model with hooks on it.

    Raises:
        UsageError: interventions in a compiled model, or an ONNX file that shall be compiled.
    """

    net: LoadedModel
    autocast: torch.dtype | None = None
    changes: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = ()
    compiled: bool | str | Callable[..., Any] = False

    def __post_init__(self) -> None:
        if not self.compiled or hasattr(self.net.model, "_compiled_pass"):
            return
        if self.changes:
            raise UsageError(
                "interventions cannot change a compiled model", do="leave out compile or the interventions"
            )
        if self.is_onnx:
            raise UsageError(f"{self.net.name} runs in onnxruntime: torch cannot compile it", do="leave out compile")
        backend = "inductor" if self.compiled is True else self.compiled
        compiled = CompiledPass(self.net.model, backend).model
        object.__setattr__(self, "net", replace(self.net, model=compiled))

    @classmethod
    def of(cls, side: Side | LoadedModel | nn.Module) -> Side:
        """``side`` itself, or a model that runs as it is; what `torch.compile` returned runs through inductor."""
        if isinstance(side, Side):
            return side
        if isinstance(side, nn.Module) and "_orig_mod" in side._modules:
            return cls(as_loaded(side.get_submodule("_orig_mod")), compiled=True)
        return cls(as_loaded(side))

    @property
    def is_onnx(self) -> bool:
        """Whether the model is an ONNX file, whose layers are operators: a ``+`` is one too."""
        return getattr(self.net.model, "is_onnx", False)

    @contextmanager
    def conditions(self) -> Iterator[None]:
        """What surrounds every pass of this side; hooks that look on are put on inside, and see what changes left."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self.autocast is not None:
                stack.enter_context(torch.autocast(torch.device(self.net.device).type, self.autocast))
            if self.changes:
                stack.enter_context(intervene(self.net.model, self.changes))
            yield

    def named(self, call: Call) -> Call:
        """``call``; where it is the Identity that ends a sum in a quantized network, with the type of what sums."""
        layer, _, part = call.name.rpartition(".")
        if part != "activation_post_process":
            return call
        kind = type(self.net.model.get_submodule(layer)).__name__
        return replace(call, type=kind) if kind in FUNCTIONAL else call

    @property
    def facts(self) -> SideFacts:
        """What this side is, in words."""
        net, special = self.net, []
        if self.autocast is not None:
            special.append(f"autocast {dtype_name(self.autocast)}")
        if self.compiled:
            backend = getattr(self.compiled, "__name__", self.compiled)
            special.append("torch.compile" if backend is True else f"torch.compile ({backend})")
        pairs = self.changes.items() if isinstance(self.changes, dict) else self.changes
        special += [f"{change} at {where}" for where, change in pairs]
        dtypes = ", ".join([*map(dtype_name, _dtypes(net.model)), *(["qint8"] if is_quantized(net.model) else [])])
        words = net.preprocess.describe(), "; ".join(special)
        return SideFacts(net.name, net.weights, dtypes or "float32", net.device, *words)

    @property
    def provenance(self) -> dict[str, Any]:
        """What this side is, and the checksum of its checkpoint; JSON."""
        file, checkpoint = self.net.checkpoint, None
        if file and os.path.isfile(file):
            with open(file, "rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            checkpoint = {"file": os.path.basename(file), "sha256": digest}
        return {**asdict(self.facts), "checkpoint": checkpoint, "seed": None if file else self.net.seed}

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader should know of the passes so far."""
        compiled = getattr(self.net.model, "_compiled_pass", None)
        if compiled is None or not compiled.apart:
            return ()
        text = f"the layers of {self.net.name} are compared in a second compiled program; its output differs from that"
        return (f"{text} of the first by relative L2 {compiled.apart:.2g}",)


def make_side(
    net: LoadedModel | nn.Module,
    dtype: str | torch.dtype | None = None,
    *,
    compiled: bool | str | Callable[..., Any] = False,
    changes: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = (),
) -> Side:
    """A side of a comparison: a model in a data type, perhaps compiled or changed.

    Args:
        net: What `load_model` returns, or any module. It stays as it is: another data type makes a copy.
        dtype: ``float32``, ``float64``, ``float16`` or ``bfloat16`` for the parameters and the input; ``autocast`` for
            `torch.autocast` with the usual type of the device, or such as ``autocast:float16``. None leaves it.
        compiled: Whether the model runs through `torch.compile`, or its backend.
        changes: Interventions as `intervene` takes them.

    Raises:
        UsageError: a data type that the model cannot have, or a compiled model with interventions or of an ONNX file.

    Example:
        >>> import torch
        >>> side = make_side(torch.nn.Linear(2, 2), "bfloat16")
        >>> side.net.model.weight.dtype, side.facts.dtype
        (torch.bfloat16, 'bfloat16')
    """
    loaded = as_loaded(net)
    text = dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    if text is None:
        return Side(loaded, None, changes, compiled)
    kind, autocast = parse_dtype(text, loaded.device)
    return Side(loaded if kind is None else _converted(loaded, kind), autocast, changes, compiled)


def _converted(net: LoadedModel, dtype: torch.dtype) -> LoadedModel:
    """``net``, or a copy of it in another data type."""
    own = _dtypes(net.model)
    if is_quantized(net.model):
        raise UsageError(f"{net.name} is quantized and cannot be {dtype_name(dtype)}", do="leave its data type")
    if own in ((), (dtype,)):
        return net
    try:
        model = copy.deepcopy(net.model).to(dtype)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise UsageError(f"{net.device} does not support {dtype_name(dtype)}: {error}") from error
    return replace(net, model=model, preprocess=replace(net.preprocess, dtype=dtype))


def _dtypes(model: nn.Module) -> tuple[torch.dtype, ...]:
    """The data types of the floating-point parameters, in order of registration."""
    return tuple(dict.fromkeys(value.dtype for value in model.parameters() if value.is_floating_point()))
