"""The names of the layers of an ONNX file: those of torch's modules where the exporter wrote them."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress

from onnx import NodeProto

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
    return [str(each) for each in ast.literal_eval(text)]


def call_names(layers: Sequence[tuple[str, Sequence[NodeProto]]], constants: Container[str]) -> list[str]:
    """The names of layers, given with their nodes: different ones, unless they are calls of the same layer."""
    seen: dict[str, str] = {}
    calls: Counter[str] = Counter()
    names = []
    for name, nodes in layers:
        content = _content(nodes, constants)
        base = re.sub(r"_\d+$", "", name)  # torch's older exporter calls the second call of relu relu_1
        if base != name and seen.get(base) == content and name == f"{base}_{calls[base]}":
            name = base
        if any(above in seen for above in enclosing(name.rpartition(".")[0])):
            name = name.replace(".", "_")
        number, own = 0, name
        while seen.get(name, content) != content or any(other.startswith(f"{name}.") for other in seen):
            number += 1
            name = f"{own}_{number}"
        seen[name] = content
        calls[name] += 1
        names.append(name)
    return names


def _content(nodes: Iterable[NodeProto], constants: Container[str]) -> str:
    """What the nodes compute: their operators, attributes and constants."""
    lines = []
    for node in nodes:
        own = [name if name in constants else "" for name in node.input]
        lines.append(repr((node.op_type, node.domain, own, [each.SerializeToString() for each in node.attribute])))
    return "\n".join(lines)
