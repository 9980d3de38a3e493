"""An ONNX file as a module with a layer for each node; onnxruntime computes."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from hookscope.errors import InputError, ModelError
from hookscope.findings import counted
from hookscope.hooks import Ending, same_bits
from hookscope.models.loaded import dtype_name
from hookscope.models.onnx_graph import OnnxGraph, OnnxPart, make_session

_DTYPES = {1: torch.float32, 10: torch.float16, 11: torch.float64}
"""The data types of an input that hookscope can fill with a picture, by their number in ONNX."""

_ENDINGS = {"Softmax": "softmax", "LogSoftmax": "log_softmax", "Sigmoid": "sigmoid"}

# What the two packages say of a file, and what it means.
CAUSES = {
    r"Error parsing message|protobuf parsing failed|DecodeError": "it is damaged, or not an ONNX file",
    r"Fatal error: (\S+?)\(-?\d+\) is not a registered": "onnxruntime has no operator {0}",
    r"Could not find an implementation for (\S+?)\((\d+)\)": "onnxruntime has no implementation of {0} of opset {1}",
    r"(?:No Op registered for|No opset import for domain) (\S+)": "onnxruntime has no operator {0}",
    r"Opset \d+ is under development .*|Unsupported model IR version: (\d+)": "it is newer than this onnxruntime",
}


class OnnxLayer(nn.Module):
    """Nodes of an ONNX file that run in a session of their own; the class is named by the operator.

    It takes the values that depend on the image. Values that depend on its shape alone come from the latest pass. A
    file with a fixed batch runs on one piece of the images after the other.
    """

    def __init__(self, graph: OnnxGraph, part: OnnxPart) -> None:
        super().__init__()
        self._graph, self._part = graph, part
        self.shapes: tuple[Any, ...] = ()
        self.chunks = 1
        self.latest: tuple[Any, ...] | None = None
        for name, (constant, transposed) in part.parameters.items():
            value = torch.from_numpy(np.array(graph.constants[constant]))
            value = value.t().contiguous() if transposed else value
            if name.startswith("running_"):
                self.register_buffer(name, value)
            else:
                self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_session"}

    @functools.cached_property
    def _session(self) -> Any:
        return self._graph.session(self._part)

    def forward(self, *inputs: Any) -> Any:
        part = self._part
        if len(inputs) > len(part.inputs):  # attention takes one tensor as query, key and value
            inputs = tuple({id(tensor): tensor for tensor in inputs if isinstance(tensor, Tensor)}.values())
        if len(inputs) != len(part.inputs):
            raise TypeError(f"it takes {counted(len(part.inputs), 'input')}, not {len(inputs)}")
        outputs = self.run_part(inputs)
        output = outputs[0] if len(outputs) == 1 else tuple(outputs)
        if self.latest == ():  # a hook may run the layer again on other inputs
            self.latest = inputs, output
        return output

    def run_part(self, inputs: Sequence[Any]) -> list[Any]:
        """The outputs of the part."""
        part, name_of, chunks = self._part, self._graph.fed_name, self.chunks
        shared = {name: _array(value) for name, value in zip(part.shapes, self.shapes, strict=True)}
        for name, (constant, transposed) in part.parameters.items():
            own = getattr(self, name)
            shared[constant] = _array(own.t() if transposed else own)
        feeds = [shared | {} for _ in range(chunks if any(part.varying) else 1)]
        for name, value in zip(part.inputs, inputs, strict=True):
            pieces = value.chunk(chunks) if chunks > 1 else [value]
            for feed, piece in zip(feeds, pieces, strict=False):
                feed[name_of(name)] = _array(piece)
        names = [name_of(name) for name in part.outputs]
        return _joined([self._session.run(names, feed) for feed in feeds], part.varying)


class OnnxModel(nn.Module):
    """An ONNX file, which takes ``(N, C, H, W)``; its layers run one after the other, each in its own session.

    What it returns comes from one session of the whole file, which the runtime optimises, unless a layer was changed:
    by a hook that replaced what it takes or gives, or by other parameters.
    """

    is_onnx = True

    def __init__(self, path: str, graph: OnnxGraph) -> None:
        super().__init__()
        self._path, self._graph, self._session = path, graph, make_session(path, optimised=True)
        (value,) = graph.inputs
        shape = value.type.tensor_type.shape.dim
        sizes = [dim.dim_value if dim.HasField("dim_value") else 0 for dim in shape]
        self.channels_last = sizes[-1] in (1, 3) and sizes[1] not in (1, 3)
        self.batch = sizes[0]
        self.input_shape = (sizes[3], *sizes[1:3]) if self.channels_last else tuple(sizes[1:])
        self.rounds = any("Quant" in node.op_type for part in graph.parts for node in part.nodes)
        self.input_dtype = _DTYPES[value.type.tensor_type.elem_type]
        self._steps = [(part, self._layer(part) if part.name else OnnxLayer(graph, part)) for part in graph.parts]
        self._endings = {
            part.outputs[0]: (_ENDINGS[part.nodes[-1].op_type], part.inputs[0])
            for part in graph.parts
            if len(part.nodes) == len(part.inputs) == 1 and part.nodes[0].op_type in _ENDINGS
        }
        uses = [name for part in graph.parts for name in (*part.inputs, *part.shapes)] + graph.outputs
        uses += [self._endings[name][1] for name in graph.outputs if name in self._endings]
        self._uses = Counter(uses)
        self._as_loaded = self._versions()

    def _layer(self, part: OnnxPart) -> OnnxLayer:
        """The layer of ``part`` inside modules that do nothing; one that was there before is called again."""
        *above, name = part.name.split(".")
        place: nn.Module = self
        for parent in above:
            if parent not in place._modules:
                place.add_module(parent, nn.Module())
            place = getattr(place, parent)
        if name not in place._modules:
            dimensions = [self._graph.constants[constant].ndim for constant, _ in part.parameters.values()]
            place.add_module(name, _class_of(part.type, 4 in dimensions)(self._graph, part))
        layer: OnnxLayer = getattr(place, name)
        return layer

    def forward(self, pictures: Tensor) -> Any:
        with torch._C.DisableTorchFunction():  # what hands tensors to the runtime is not an operation of the model
            return self._computed(pictures)

    def _computed(self, pictures: Tensor) -> Any:
        taken = self._taken(pictures)
        chunks = len(taken) // self.batch if self.batch else 1
        values: dict[str, Any] = {self._graph.inputs[0].name: taken}
        left, changed = self._uses.copy(), self._versions() != self._as_loaded
        for part, layer in self._steps:
            given = tuple(values[name] for name in part.inputs)
            shapes = tuple(values[name] for name in part.shapes)
            layer.shapes, layer.chunks = shapes, chunks
            if part.name:
                layer.latest = ()
                returned = layer(*given)
                ran, layer.latest = layer.latest, None
                changed = changed or not _same(ran, (given, returned))
                outputs: Sequence[Any] = returned if isinstance(returned, tuple) else (returned,)
            else:
                outputs = layer.run_part(given)
            values |= zip(part.outputs, outputs, strict=True)
            for name in (*part.inputs, *part.shapes):
                left[name] -= 1
                if not left[name]:
                    values.pop(name, None)
        names = self._graph.outputs
        if changed:
            results = [values[name] for name in names]
        else:
            fed = [{self._graph.inputs[0].name: _array(chunk)} for chunk in taken.chunk(chunks)]
            results = _joined([self._session.run(names, feed) for feed in fed], [True] * len(names))
            results = [_into(values[name], result) for name, result in zip(names, results, strict=True)]
        results = [result.to(pictures.device) if isinstance(result, Tensor) else result for result in results]
        for name, result in zip(names, results, strict=True):
            if isinstance(result, Tensor) and name in self._endings:
                kind, before = self._endings[name]
                Ending(kind, partial(values[before].to, result.device)).mark(result)
        return results[0] if len(results) == 1 else dict(zip(names, results, strict=True))

    def _taken(self, pictures: Tensor) -> Tensor:
        """``pictures`` as the file takes them."""
        if torch.is_grad_enabled() and pictures.requires_grad:
            asked = f"no gradient can flow through {self._path}: onnxruntime computes no gradients"
            raise ModelError(asked, do="use a method without gradient, or the program of torch.export")
        if pictures.is_meta:
            raise InputError(f"{self._path} cannot run on tensors without values", "onnxruntime computes every pass")
        want = [size or "any" for size in self.input_shape]
        if any(size not in (have, "any") for size, have in zip(want, pictures.shape[1:], strict=True)):
            exists = f"it takes {'x'.join(map(str, want))}, and the input is {'x'.join(map(str, pictures.shape[1:]))}"
            raise InputError(f"{self._path} does not take this input", exists, "try another ‹input_size|--input-size›")
        if self.batch and len(pictures) % self.batch:
            exists = f"it takes batches of {self.batch}, and got {len(pictures)}"
            do = f"give a multiple of {self.batch} images with ‹batch_size=|--batch-size ›{self.batch}, or export"
            raise InputError(f"{self._path} has a fixed batch size", exists, f"{do} it with a dynamic batch axis")
        return pictures.movedim(1, -1) if self.channels_last else pictures

    def _versions(self) -> list[Any]:
        return [(tensor.data_ptr(), tensor._version) for tensor in [*self.parameters(), *self.buffers()]]

    def _apply(self, function: Any, recurse: bool = True) -> Any:
        before = [tensor.dtype for tensor in self.parameters()]
        moved = super()._apply(function, recurse)  # type: ignore[no-untyped-call]
        if before != (after := [tensor.dtype for tensor in self.parameters()]):
            asked = f"{self._path} computes in the data types of the file, and cannot be {dtype_name(after[0])}"
            raise ModelError(asked, do="export it in that data type")
        self._as_loaded = self._versions()
        return moved

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._session = make_session(self._path, optimised=True)


@functools.cache
def _class_of(kind: str, is_conv2d: bool) -> type[OnnxLayer]:
    """The class of the layers of an operator; a convolution of images counts as a Conv2d too."""
    base = type("Conv2d", (OnnxLayer,), {}) if is_conv2d and kind != "Conv2d" and "Conv" in kind else OnnxLayer
    return type(kind, (base,), {})


def _same(ran: Any, called: Any) -> bool:
    """Whether a layer was given, and has returned, what it was called with and what it computed."""
    (given, output), (taken, returned) = ran, called
    if output is returned and all(a is b for a, b in zip(given, taken, strict=False)):
        return True
    return same_bits((given, output), (taken, returned))


def _into(own: Any, result: Any) -> Any:
    """``result`` in a copy of what the layers computed: torch knows of which layer that is."""
    same = isinstance(own, Tensor) and isinstance(result, Tensor) and own.shape == result.shape
    return own.clone().copy_(result) if same else result


def _array(value: Any) -> Any:
    return value.detach().cpu().contiguous().numpy() if isinstance(value, Tensor) else value


def _joined(runs: list[list[Any]], varying: Sequence[bool]) -> list[Any]:
    """The outputs of one or more runs, those that vary one after the other along the first axis."""
    outputs = [[torch.from_numpy(array) if isinstance(array, np.ndarray) else array for array in run] for run in runs]
    if len(outputs) == 1:
        return outputs[0]
    each_output = zip(zip(*outputs, strict=True), varying, strict=True)
    return [torch.cat(torch.atleast_1d(runs)) if vary else runs[0] for runs, vary in each_output]


def load(path: str) -> OnnxModel:
    """The model in the file ``path``; a ModelError if it takes other inputs than one picture."""
    file = onnx.load(path)
    constants = {tensor.name for tensor in file.graph.initializer}
    inputs = [value for value in file.graph.input if value.name not in constants]
    if not file.graph.node:
        raise ModelError(f"{path} has no nodes: it is damaged, or not an ONNX file")
    if len(inputs) != 1:
        asked = f"{path} takes {counted(len(inputs), 'input')}, and hookscope gives it a batch of images"
        raise ModelError(asked, ", ".join(map(_describe, inputs)), "export the part that takes images")
    tensor = inputs[0].type.tensor_type
    if len(tensor.shape.dim) != 4 or tensor.elem_type not in _DTYPES:
        asked = f"{path} takes no images (N, C, H, W) in floating point"
        raise ModelError(asked, f"it takes {_describe(inputs[0])}", "export it with such an input")
    return OnnxModel(path, OnnxGraph(file))


def _describe(value: Any) -> str:
    tensor = value.type.tensor_type
    sizes = [str(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param or "?" for dim in tensor.shape.dim]
    return f"{value.name} ({onnx.TensorProto.DataType.Name(tensor.elem_type).lower()}, {'x'.join(sizes) or 'a number'})"
