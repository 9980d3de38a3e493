"""One side of a comparison: a model, and how it runs."""

from __future__ import annotations

import copy
import hashlib
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import list_backends, lookup_backend
from torch._dynamo.exc import TorchDynamoException
from torch.utils import _pytree as pytree

from hookscope.comparison.facts import SideFacts
from hookscope.errors import ModelError, UsageError, nearest
from hookscope.hooks import ACTIVATION_FUNCTIONS, Call, HookHandles, check_hookable, is_single, tensors_in
from hookscope.interventions import intervene
from hookscope.models import LoadedModel, as_loaded, dtype_name, is_quantized, note_input, parse_dtype


class CompiledPass:
    """The forward pass of a model whose layers give what they gave inside a compiled program.

    Hooks on a compiled model fire only if they were there at its first call, and then are part of its program. So two
    copies are compiled: a plain one gives the output. In the other one hooks copy what each layer returns; the layers
    of `model`, a third copy, are then called in the same order, without inputs, and return these copies. All copies
    share the parameters and buffers of the given model.

    Attributes:
        model: The module to hook and to call.
        apart: The largest relative L2 difference of the outputs of the two programs so far.
    """

    def __init__(self, model: nn.Module, backend: str | Callable[..., Any]) -> None:
        check_hookable(model)
        known = list_backends(exclude_tags=())
        if isinstance(backend, str) and backend not in known:
            raise UsageError(f"no backend '{backend}' of torch.compile", nearest(backend, known))
        self.model, self.apart = _copied(model), 0.0
        watched = _copied(model)
        self._name, self._backend = type(model).__name__, backend
        self._plain, self._watched = (self._compiled(net) for net in (_copied(model), watched))
        self._layers = {name: layer for name, layer in self.model.named_modules() if name and is_single(name, layer)}
        self._calls: list[tuple[str, Any]] = []
        self._handles = HookHandles()
        for name in self._layers:
            self._handles.forward(watched.get_submodule(name), partial(self._keep, name))
        self.model.forward = self._forward
        self.model._compiled_pass = self  # type: ignore[assignment]

    def _compiled(self, model: nn.Module) -> Any:
        # torch takes the program of another instance of a class if the backend is the same object, hooks or not
        return torch.compile(model, backend=lambda graph, inputs: lookup_backend(self._backend)(graph, inputs))

    def _keep(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._calls.append((name, pytree.tree_map_only(Tensor, torch.clone, output)))

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
        output = self._run(self._plain, *inputs)
        self._calls.clear()
        self.apart = max(self.apart, _apart(output, self._run(self._watched, args, kwargs)))
        for name, value in self._calls:
            layer = self._layers[name]
            layer.forward = lambda value=value: value
            layer()
        self._calls.clear()
        return output

    def _run(self, program: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return program(*args, **kwargs)
        except TorchDynamoException as error:
            why = str(error).partition("Set TORCHDYNAMO_VERBOSE")[0].split()
            what = f"torch.compile failed on {self._name}: {' '.join(why)[:200]}"
            raise ModelError(what, do="compare it without compile") from error


def _copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def _apart(a: Any, b: Any) -> float:
    pairs = [(a, b) for a, b in zip(tensors_in(a).values(), tensors_in(b).values(), strict=False) if a.shape == b.shape]
    moved = sum(float((b.double() - a.double()).nan_to_num().square().sum()) for a, b in pairs)
    size = sum(float(a.double().nan_to_num().square().sum()) for a, _ in pairs)
    return (moved / size) ** 0.5 if moved and size else 0.0


_ACTIVATIONS = tuple(sorted((name.lower() for name in ACTIVATION_FUNCTIONS), key=len, reverse=True))
# What stands in the name of a class or an operator for what it computes.
_WORDS = {
    "convtranspose": "convtranspose|deconv",
    "conv": "conv(olution)?",
    "linear": "(?<!bi)linear|gemm|matmul|addmm",
    "batchnorm": "batchnorm(alization)?|^bn|(?<=conv)bn|(?<=linear)bn",
    "layernorm": "layernorm(alization)?",
    "groupnorm": "groupnorm(alization)?",
    "add": "(^i?|(?<=conv))add(?=relu|$)",
    "adaptivepool": "(global|adaptive)(?!max).*pool|^(reduce)?mean$",
    "maxpool": "maxpool",
    "avgpool": "(avg|average)pool",
    "dropout": "drop(out|path|block)|stochasticdepth",
    "reshape": "^(un)?flatten|^reshape$|^view$|^(un)?squeeze$",
    "transpose": "^permute$|^transpose$|^m?t$|^(move|swap)(dim|axes)$",
    "copy": "^contiguous$|^clone$|^cast$|^to$|^float$|^half$",
    "quantize": "^(de)?quant(ize(?!d)|stub)",
    "cat": "^cat$|^concat(enate)?$",
    "resize": "upsampl|interpolate|^resize",
    "relu6": "^clip$|^clamp$",
    "silu": "(?<!hard)swish",
    "activation": "|".join(_ACTIVATIONS) + "|(?<=norm)act",
}
_WORD = re.compile("|".join(f"(?P<{kind}>{words})" for kind, words in _WORDS.items()))
_TAKES = ("slice", "split", "chunk", "getitem", "gather", "unbind", "select", "narrow", "expand")
WITH_WEIGHTS = ("conv", "convtranspose", "linear")  # a BatchNorm or a bias that follows can be folded into them
_FUSED = (*WITH_WEIGHTS, "batchnorm", "add")  # classes that compute them may compute what follows too


@lru_cache(maxsize=1024)
def functions_of(type_name: str) -> tuple[str, ...]:
    """What a class or an operator computes, in order: ``("conv", "batchnorm", "relu")`` for a ``ConvBnReLU2d``.

    The words are the same for classes of torch, functions, and operators of ATen and ONNX: ``conv`` for ``Conv2d``,
    ``conv2d``, ``aten.conv2d.default``, ``QLinearConv``.
    """
    name = re.sub(r"^.*::|^aten\.|^quantized\.|\.[A-Za-z]+$|^QLinear", "", type_name)
    name = re.sub(r"[123]d(?![a-z])|_", "", name.lower())
    words = [match[0] if match.lastgroup == "activation" else str(match.lastgroup) for match in _WORD.finditer(name)]
    words = words or [name]
    return tuple(words) if words[0] in _FUSED else (words[0],)


def is_layer_type(type_name: str) -> bool:
    """Whether a class or an operator computes what most models leave to a layer, unlike ``+`` or a slice."""
    function = functions_of(type_name)[0]
    return function not in ("add", "cat", "resize", "copy") and (function in _WORDS or is_activation(function))


def hands_on(type_name: str) -> bool:
    """Whether a class or an operator only hands values on or rearranges them."""
    return functions_of(type_name)[0] in ("identity", "dropout", "reshape", "transpose", "copy", "quantize")


def takes(type_name: str) -> bool:
    """Whether a class or an operator takes some of the values, which exporters do in ways of their own."""
    return functions_of(type_name)[0] in _TAKES


def is_activation(kind: str) -> bool:
    return kind in _ACTIVATIONS or kind == "act"


FUNCTIONAL = ("QFunctional", "FloatFunctional", "FXFloatFunctional")
"""Classes of torch.ao that add, multiply and concatenate; they are not calls, but the Identity in them is."""


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
        seed: What the random numbers of each pass begin with; None for the random state, as on the other side.

    Raises:
        UsageError: interventions in a compiled model, or an ONNX file that shall be compiled.
    """

    net: LoadedModel
    autocast: torch.dtype | None = None
    changes: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = ()
    compiled: bool | str | Callable[..., Any] = False
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.compiled or hasattr(self.net.model, "_compiled_pass"):
            return
        if self.changes:
            asked = "interventions cannot change a compiled model"
            raise UsageError(asked, do="leave out compile or the interventions")
        if self.is_onnx:
            raise UsageError(f"{self.net.name} runs in onnxruntime: torch cannot compile it", do="leave out compile")
        backend = "inductor" if self.compiled is True else self.compiled
        object.__setattr__(self, "net", replace(self.net, model=CompiledPass(self.net.model, backend).model))

    @classmethod
    def of(cls, side: Side | LoadedModel | nn.Module) -> Side:
        """``side`` itself, or a model that runs as it is; what `torch.compile` returned runs through inductor."""
        if isinstance(side, Side):
            return side
        if isinstance(side, nn.Module) and "_orig_mod" in side._modules:
            return cls(as_loaded(side.get_submodule("_orig_mod")), compiled=True)
        return cls(as_loaded(side))

    def prepared_like(self, other: Side, given: Any) -> Side:
        """This side, or with the preprocessing of ``other`` if it was ``given`` as a module without its own."""
        net = self.net
        like = net.preprocess.like(other.net.preprocess)
        if not isinstance(given, nn.Module) or like is net.preprocess:
            return self
        note_input(f"{net.name} does not say how an image becomes its input: it gets the steps of the other model")
        return replace(self, net=replace(net, preprocess=like))

    @property
    def is_onnx(self) -> bool:
        """Whether the model is an ONNX file, whose layers are operators: a ``+`` is one too."""
        return getattr(self.net.model, "is_onnx", False)

    @contextmanager
    def conditions(self) -> Iterator[None]:
        """What surrounds every pass of this side; hooks that look on are put on inside, and see what changes left."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self.seed is not None:
                torch.manual_seed(self.seed)
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
    return tuple(dict.fromkeys(value.dtype for value in model.parameters() if value.is_floating_point()))
