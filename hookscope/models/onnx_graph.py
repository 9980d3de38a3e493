"""The graph of an ONNX file cut into parts, each of which is a layer or computes shapes for one."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from hookscope.hooks import enclosing

_WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul", "ConvInteger", "MatMulInteger")


class Scopes:
    """To which module of torch each node belongs, as torch's two exporters write it, and the names of other nodes."""

    def __init__(self, nodes: Sequence[NodeProto]) -> None:
        self._of = {id(node): _module_of(node) for node in nodes}
        scopes = {scope for scope in self._of.values() if scope}
        above = {name for scope in scopes for name in enclosing(scope.rpartition(".")[0])}
        self._leaves = scopes - above
        self._counts: Counter[str] = Counter()

    def leaf_of(self, node: NodeProto) -> str:
        """The module that ``node`` belongs to if no other module lies in it, else an empty text."""
        scope = self._of[id(node)]
        return scope if scope in self._leaves else ""

    def is_unknown(self, node: NodeProto) -> bool:
        """Whether ``node`` says nothing of a module, as those that quantisers add."""
        return self._of[id(node)] is None

    def name_of(self, node: NodeProto) -> str:
        """A name for a node that has no such module: ``layer1.0.Add``, ``layer1.0.Add_1``, or its own."""
        scope = self._of[id(node)]
        if scope is None and node.name:
            own = ".".join(filter(None, re.sub(r"[^\w./@-]", "_", node.name).replace("/", ".").split(".")))
            base = own or node.op_type
        else:
            base = f"{scope}.{node.op_type}" if scope else node.op_type
        self._counts[base] += 1
        return base if self._counts[base] == 1 else f"{base}_{self._counts[base] - 1}"

    def type_of(self, nodes: Sequence[NodeProto]) -> str:
        """The operator of a single node; of several the class of torch, the operator with weights, or all of them."""
        main = [node for node in nodes if "QuantizeLinear" not in node.op_type and node.op_type != "DequantizeLinear"]
        main = main or list(nodes[:1])
        if len(main) == 1:
            return main[0].op_type
        with suppress(LookupError, ValueError, SyntaxError):
            return str(_metadata(main[0], "class_hierarchy")[-2].rpartition(".")[2])
        kinds = list(dict.fromkeys(node.op_type for node in main))
        return "+".join([kind for kind in kinds if kind in _WEIGHTED] or kinds)


def _module_of(node: NodeProto) -> str | None:
    """The dotted name of torch's module in which ``node`` runs, empty for the model itself; None if it says nothing."""
    with suppress(LookupError, ValueError, SyntaxError):
        scopes = _metadata(node, "name_scopes")
        # a BatchNorm that is folded into a convolution has left its own name on it
        weight = node.input[1].rpartition(".")[0] if node.op_type in ("Conv", "ConvTranspose", "Gemm") else ""
        scope = re.sub(r"@\d+", "", scopes[-2]) if len(scopes) > 1 else ""
        return weight if weight and not weight.startswith(f"{scope}.") and "." in node.input[1] else scope
    if not node.name.startswith("/"):
        return None
    path: list[str] = []
    before = ""
    for part in node.name.split("/")[1:-1]:  # /layer1/layer1.0/conv1/Conv
        path.append(part.removeprefix(f"{before}."))
        before = part
    return ".".join(path)


def _metadata(node: NodeProto, name: str) -> list[str]:
    """What the exporter of torch has written about the modules around ``node``, outermost first, then the operation."""
    text = [entry.value for entry in node.metadata_props if entry.key == f"pkg.torch.onnx.{name}"][0]  # noqa: RUF015
    return [str(word) for word in ast.literal_eval(text)]


def call_names(layers: Sequence[tuple[str, Sequence[NodeProto]]], constants: Container[str]) -> list[str]:
    """The names of layers, given with their nodes: different ones, unless they are calls of the same layer."""
    contents: dict[str, str] = {}
    calls: Counter[str] = Counter()
    names = []
    for name, nodes in layers:
        content = _content(nodes, constants)
        base = re.sub(r"_\d+$", "", name)  # torch's older exporter calls the second call of relu relu_1
        if base != name and contents.get(base) == content and name == f"{base}_{calls[base]}":
            name = base
        if any(above in contents for above in enclosing(name.rpartition(".")[0])):
            name = name.replace(".", "_")
        number, own = 0, name
        while contents.get(name, content) != content or any(other.startswith(f"{name}.") for other in contents):
            number += 1
            name = f"{own}_{number}"
        contents[name] = content
        calls[name] += 1
        names.append(name)
    return names


def _content(nodes: Iterable[NodeProto], constants: Container[str]) -> str:
    """What the nodes compute: their operators, attributes and constants."""
    lines = []
    for node in nodes:
        own = [name if name in constants else "" for name in node.input]
        lines.append(repr((node.op_type, node.domain, own, [entry.SerializeToString() for entry in node.attribute])))
    return "\n".join(lines)


Array = NDArray[Any]

# The names that torch gives to the constant inputs of an operator, by their position.
_NORMS = ("LayerNormalization", "InstanceNormalization", "GroupNormalization")
_PARAMETERS = {kind: {1: "weight", 2: "bias"} for kind in ("Conv", "ConvTranspose", "Gemm", *_NORMS)} | {
    "BatchNormalization": {1: "weight", 2: "bias", 3: "running_mean", 4: "running_var"},
    "PRelu": {1: "weight"},
    "MatMul": {1: "weight"},
    "Mul": {0: "weight", 1: "weight"},
    "Add": {0: "bias", 1: "bias"},
}
# Where an operator on 8-bit numbers has the scale and the zero point of its output among its inputs.
_SCALES = {"QuantizeLinear": 1, "QLinearConv": 6, "QLinearMatMul": 6, "QLinearAdd": 6, "QLinearMul": 6, "QGemm": 7}
_SCALES |= {"QLinearGlobalAveragePool": 3, "QLinearAveragePool": 3, "QLinearSigmoid": 3, "QLinearLeakyRelu": 3}
_SCALES |= {"QLinearSoftmax": 3, "QLinearConcat": 0}
_PASSES_ON = {"MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Relu", "Identity", "Slice", "Pad"}
_PASSES_ON |= {"Resize", "Split", "Gather", "Expand", "DepthToSpace", "SpaceToDepth", "Clip"}
_EIGHT_BITS = (TensorProto.UINT8, TensorProto.INT8)
_NO_VALUES_OF_A_LAYER = (TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING, TensorProto.INT32)
_LARGE = 1024  # values: of such a constant only type and shape matter for the types of the other tensors


@dataclass
class OnnxPart:
    """Nodes that run in one session: a layer called ``name``, or without a name what computes shapes.

    ``inputs`` and ``outputs`` name values that depend on the image; ``shapes``, and all outputs of a part that is
    ``by_shape``, depend on its shape alone. ``type`` is the operator, or torch's class where several nodes do its work.
    ``parameters`` have the name of the constant and whether it is stored transposed. ``varying`` says of each output
    whether it depends on the values of the image.
    """

    nodes: list[NodeProto] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    name: str = ""
    type: str = ""
    parameters: dict[str, tuple[str, bool]] = field(default_factory=dict)
    by_shape: bool = False
    varying: list[bool] = field(default_factory=list)


class OnnxGraph:
    """The parts of a file in order of execution, and the types and the constants that they need."""

    def __init__(self, model: ModelProto) -> None:
        self._opsets, self._ir_version, self._functions = model.opset_import, model.ir_version, model.functions
        graph = model.graph
        self.constants = _Constants({tensor.name: tensor for tensor in graph.initializer})
        self.inputs = [value for value in graph.input if value.name not in self.constants]
        self.outputs = [value.name for value in graph.output]
        nodes = self._fold(graph.node)
        self.types = self._types_of(nodes)
        self._quantized = self._scales_of(nodes)
        self.parts = self._parts(nodes)

    def session(self, part: OnnxPart) -> onnxruntime.InferenceSession:
        """The session that runs ``part``; parameters and values of 8 bits are floating-point inputs and outputs."""
        nodes, inputs, outputs = list(part.nodes), [], []
        parameters = [name for name, _ in part.parameters.values()]
        taken = {name for node in part.nodes for name in _inputs_of(node)}.difference(parameters)
        embedded = {name: self.constants[name] for name in taken if name in self.constants}
        for name in [*part.inputs, *part.shapes, *parameters]:
            scale, fed = self._quantized.get(name, ()), self.fed_name(name)
            if scale:
                nodes.insert(0, helper.make_node("QuantizeLinear", [fed, *scale], [name]))
            embedded |= {constant: self.constants[constant] for constant in scale}
            inputs.append(helper.make_tensor_value_info(fed, self.type_of(scale[0] if scale else name), None))
        for name in part.outputs:
            scale, fed = self._quantized.get(name, ()), self.fed_name(name)
            if scale:
                nodes.append(helper.make_node("DequantizeLinear", [name, *scale], [fed]))
            embedded |= {constant: self.constants[constant] for constant in scale}
            outputs.append(helper.make_empty_tensor_value_info(fed))
        return self._session(nodes, inputs, outputs, embedded)

    def fed_name(self, name: str) -> str:
        """The name of the input or output of a session for the value ``name``."""
        return f"{name}::float" if name in self._quantized else name

    def type_of(self, name: str) -> int:
        if name in self.constants:
            return helper.np_dtype_to_tensor_dtype(self.constants[name].dtype)
        return self.types[name]

    def _session(self, nodes: Any, inputs: Any, outputs: Any, constants: Mapping[str, Array]) -> Any:
        tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
        graph = helper.make_graph(nodes, "part", inputs, outputs, tensors)
        model = helper.make_model(graph, opset_imports=self._opsets, ir_version=self._ir_version)
        model.functions.extend(self._functions)
        return make_session(model.SerializeToString(), optimised=False)

    def _fold(self, nodes: Iterable[NodeProto]) -> list[NodeProto]:
        """The nodes that depend on the image or its shape; what the others give becomes constants."""
        left, folded, known = [], [], set[str]()
        for node in nodes:
            inputs = _inputs_of(node)
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                self.constants.tensors[node.output[0]] = node.attribute[0].t
            elif all(name in self.constants or name in known for name in inputs) and "Random" not in node.op_type:
                folded.append(node)
                known.update(node.output)
            else:
                left.append(node)
        wanted = known & {name for node in left for name in _inputs_of(node)}.union(self.outputs)
        if wanted:
            needed = {name for node in folded for name in _inputs_of(node) if name in self.constants}
            outputs = [helper.make_empty_tensor_value_info(name) for name in sorted(wanted)]
            session = self._session(folded, [], outputs, {name: self.constants[name] for name in needed})
            self.constants.arrays |= dict(zip(sorted(wanted), session.run(None, {}), strict=True))
        return left

    def _types_of(self, nodes: list[NodeProto]) -> dict[str, int]:
        """The element type of each value, as the runtime infers it."""
        used = {name for node in nodes for name in _inputs_of(node) if name in self.constants}
        large = {name for name in used if self.constants[name].size > _LARGE}
        inputs = [helper.make_tensor_value_info(name, self.type_of(name), self.constants[name].shape) for name in large]
        names = [name for node in nodes for name in node.output if name]
        outputs = [helper.make_empty_tensor_value_info(name) for name in names]
        small = {name: self.constants[name] for name in used - large}
        session = self._session(nodes, [*self.inputs, *inputs], outputs, small)
        types = {value.name: value.type.tensor_type.elem_type for value in self.inputs}
        return types | {value.name: _TYPES.get(value.type, 0) for value in session.get_outputs()}

    def _scales_of(self, nodes: list[NodeProto]) -> dict[str, tuple[str, str]]:
        """The names of scale and zero point of each value of 8 bits, where they are constants."""
        scales: dict[str, tuple[str, str]] = {}
        for node in nodes:
            at = _SCALES.get(node.op_type)
            if at is not None and len(node.input) > at + 1:
                scale = (node.input[at], node.input[at + 1])
                if all(name in self.constants and self.constants[name].size == 1 for name in scale):
                    scales[node.output[0]] = scale
            elif node.op_type in _PASSES_ON and node.input[0] in scales:
                scales[node.output[0]] = scales[node.input[0]]
        return {name: scale for name, scale in scales.items() if self.types.get(name) in _EIGHT_BITS}

    def _parts(self, nodes: list[NodeProto]) -> list[OnnxPart]:
        scopes = Scopes(nodes)
        by_value = {value.name for value in self.inputs}
        users = Counter(name for node in nodes for name in _inputs_of(node)) + Counter(self.outputs)
        parts, last = list[OnnxPart](), OnnxPart()
        made: dict[str, OnnxPart] = {}
        rounded: dict[str, NodeProto] = {}
        for node in nodes:
            inputs, scope = _inputs_of(node), scopes.leaf_of(node)
            by_shape = node.op_type in ("Shape", "Size") or by_value.isdisjoint(inputs)
            if not by_shape:
                by_value.update(node.output)
            if node.op_type == "DynamicQuantizeLinear":  # part of each layer that takes what it rounds
                rounded |= dict.fromkeys(node.output, node)
                continue
            part = self._rounded(node, made, users)  # rounding to 8 bits belongs to the layer that it follows
            if node.op_type == "Cast" and scopes.is_unknown(node) and made.get(inputs[0]) is last:
                part = last
            if part is None and scope and scope == last.name:
                part = last
            elif part is None and not by_shape and self._computes(node):
                part = last = OnnxPart(name=scope or scopes.name_of(node))
                parts.append(part)
            elif part is None and any(made.get(name) is last for name in inputs):
                part = last = OnnxPart(by_shape=by_shape)
                parts.append(part)
            elif part is None:  # it runs before the last layer, to which more nodes may belong
                at = len(parts) - bool(last.name)
                if not (at and not parts[at - 1].name and parts[at - 1].by_shape == by_shape):
                    parts.insert(at, OnnxPart(by_shape=by_shape))
                    at += 1
                part = parts[at - 1]
            for rounding in (rounded[name] for name in inputs if name in rounded):
                if rounding not in part.nodes:
                    part.nodes.append(rounding)
            part.nodes.append(node)
            made |= dict.fromkeys(node.output, part)
        self._connect(parts, by_value)
        for part in parts:
            if part.name:
                part.type = scopes.type_of(part.nodes) + self._clips(part)
                part.parameters = self._parameters_of(part)
        layers = [part for part in parts if part.name]
        names = call_names([(part.name, part.nodes) for part in layers], self.constants)
        for part, name in zip(layers, names, strict=True):
            part.name = name
        return parts

    def _clips(self, part: OnnxPart) -> str:
        """``Relu`` where the output is rounded to 8 bits of which the lowest is 0: quantisers drop the ReLU then."""
        scales = [self._quantized[name] for name in part.outputs if name in self._quantized]
        scales += [self._quantized[node.output[0]] for node in part.nodes if node.op_type == "QuantizeLinear"][-1:]
        kinds = {node.op_type.removeprefix("QLinear") for node in part.nodes}
        if not scales or kinds.isdisjoint(("Conv", "Gemm", "QGemm", "Add", "MatMul")) or "Relu" in kinds:
            return ""
        zero = self.constants[scales[-1][1]]
        return "Relu" if int(zero.item()) == np.iinfo(zero.dtype).min else ""

    def _computes(self, node: NodeProto) -> bool:
        """Whether a node gives values of a layer, and no positions, shapes or conditions."""
        counts = all(self.types[name] in _NO_VALUES_OF_A_LAYER for name in node.output if name)
        return not counts or node.op_type.endswith("Integer")

    def _rounded(self, node: NodeProto, made: Mapping[str, OnnxPart], users: Mapping[str, int]) -> OnnxPart | None:
        """The layer whose output ``node`` rounds to 8 bits, or takes back from 8 bits."""
        part = made.get(node.input[0]) if node.input else None
        if part is None or not part.name:
            return None
        if node.op_type == "DequantizeLinear":
            return part if node.input[0] in self._quantized else None
        rounds = any(member.op_type == "QuantizeLinear" for member in part.nodes)
        return part if node.op_type == "QuantizeLinear" and users[node.input[0]] == 1 and not rounds else None

    def _connect(self, parts: list[OnnxPart], by_value: set[str]) -> None:
        """Set what each part takes and gives."""
        taken = Counter(name for part in parts for name in {n for node in part.nodes for n in _inputs_of(node)})
        for part in parts:
            own = {name for node in part.nodes for name in node.output}
            used = dict.fromkeys(name for node in part.nodes for name in _inputs_of(node))
            outside = [name for name in used if name not in own and name not in self.constants]
            part.inputs = [name for name in outside if name in by_value]
            part.shapes = [name for name in outside if name not in by_value]
            given = [n for node in part.nodes if node.op_type != "DynamicQuantizeLinear" for n in node.output if n]
            part.outputs = [name for name in given if taken[name] > (name in used) or name in self.outputs]
            part.outputs = part.outputs or [name for name in part.nodes[-1].output if name]  # nothing takes them
            part.varying = [name in by_value for name in part.outputs]

    def _parameters_of(self, part: OnnxPart) -> dict[str, tuple[str, bool]]:
        """The constants with floating-point values that are parameters, named as in torch."""
        parameters: dict[str, tuple[str, bool]] = {}
        for node in part.nodes:
            for at, usual in _PARAMETERS.get(node.op_type, {}).items():
                name = node.input[at] if at < len(node.input) else ""
                if name not in self.constants or any(name == other for other, _ in parameters.values()):
                    continue
                value = self.constants[name]
                if value.dtype.kind != "f" or value.size == 1:
                    continue
                turned = any(attribute.i for attribute in node.attribute if attribute.name == "transB")
                matrix = node.op_type == "MatMul" or (node.op_type == "Gemm" and not turned)
                own = name.removeprefix(f"{part.name}.").replace(".", "_") if name.startswith(f"{part.name}.") else ""
                label = own or usual
                while label in parameters:
                    label = f"{label}_"
                parameters[label] = (name, matrix and at == 1 and value.ndim == 2)
        return parameters


class _Constants:
    """Constants by name; an array is made of a tensor of the file when it is asked for."""

    def __init__(self, tensors: dict[str, TensorProto]) -> None:
        self.tensors, self.arrays = tensors, dict[str, Array]()

    def __contains__(self, name: object) -> bool:
        return name in self.arrays or name in self.tensors

    def __getitem__(self, name: str) -> Array:
        if name not in self.arrays:
            self.arrays[name] = numpy_helper.to_array(self.tensors.pop(name))
        return self.arrays[name]


def _inputs_of(node: NodeProto) -> list[str]:
    """The values that a node takes, with those that its inner graphs take from outside."""
    names = [name for name in node.input if name]
    for attribute in node.attribute:
        graphs = [attribute.g] if attribute.type == AttributeProto.GRAPH else list(attribute.graphs)
        for graph in graphs:
            own = {value.name for value in [*graph.input, *graph.initializer]}
            own |= {name for inner in graph.node for name in inner.output}
            names += [name for inner in graph.node for name in _inputs_of(inner) if name not in own]
            names += [value.name for value in graph.output if value.name not in own]
    return list(dict.fromkeys(names))


_TYPES = {f"tensor({name.lower()})": number for name, number in TensorProto.DataType.items()}


def make_session(model: str | bytes, optimised: bool) -> onnxruntime.InferenceSession:
    """A session of onnxruntime on the processor, which logs nothing."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # there are many sessions
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimised else levels.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
