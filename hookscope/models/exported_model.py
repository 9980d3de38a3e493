"""A program of ``torch.export`` as a module with the layers that it was exported from.

`torch.export.load` unpickles parts of a file, evaluates its expressions, and calls the functions that it names. So a
file is read only if it pickles nothing but sample inputs of tensors, and names nothing but operators and numbers.
"""

from __future__ import annotations

import io
import json
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.unflatten import UnflattenedModule

from hookscope.errors import InputError, ModelError
from hookscope.models.loaded import dtype_name
from hookscope.models.run import quiet_log

_OPERATORS = re.compile(
    r"torch\.ops\.(aten|prims|prim|torchvision|quantized_decomposed)(\.(?!__)\w+|\.__(and|or|xor)__)(\.[A-Za-z]\w*)?"
    r"|torch\.ops\.higher_order\.(cond|while_loop|wrap_with_set_grad_enabled|wrap_with_autocast)"
    r"|_operator\.(getitem|add|sub|mul|truediv|floordiv|mod|pow|neg|eq|ne|lt|le|gt|ge|and_|or_)"
    r"|math\.[a-z]\w*|torch\.sym_[a-z]\w*"
)
_SYMBOL = re.compile(
    r"[suz][a-z]{0,6}\d+|Max|Min|Eq|Ne|Lt|Le|Gt|Ge|And|Or|Not|Mod|PythonMod|FloorDiv|CeilDiv|CleanDiv|ModularIndexing"
    r"|IntTrueDiv|FloatTrueDiv|TruncToInt|TruncToFloat|FloorToInt|CeilToInt|LShift|RShift|Where|Pow|PowByNatural|FloatPow|true|false|True|False|oo|int_oo"
    r"|Symbol|Integer|Float|Rational|Add|Mul|Equality|Unequality|StrictLessThan|LessThan|StrictGreaterThan|GreaterThan"
    r"|positive|nonnegative|integer|precision|evaluate"
)
CAUSES = {
    "We ran into an error when deserializing": "torch lacks one of its operators, or one does not fit its arguments"
}
_QUOTED = re.compile(r"'[\w.]*'")
_EXPRESSION = re.compile(r"[\w\s+\-*/%(),<>=!&|~.]*")
_NAME = re.compile(r"[\w.:@/\- ]*")
_STACK = re.compile(r"[\w.,;@<>\[\]\- ]*")
_CONTAINERS = re.compile(r'"type": *+(?!null|"builtins\.(?:tuple|list|dict)"|"collections\.OrderedDict")|__')
_NEVER_READ = ("stack_trace", "guards_code", "torch_version", "torch_fn", "from_node")


def load(path: str) -> nn.Module:
    """The model in the file ``path``, with the exported layers; a ModelError if it cannot be trusted."""
    _check(torch._C.PyTorchFileReader(path), path)
    with warnings.catch_warnings(), quiet_log("torch.export"):  # it logs a traceback of every error
        warnings.simplefilter("ignore")
        program = torch.export.load(path)
        model: Any = torch.export.unflatten(program)
    shape, dtype = _input_of(program, path)
    for module in model.modules():
        kind = str(getattr(module, "_ty", None) or "").rpartition(".")[2]
        if kind.isidentifier():
            base = _Exported if module is model else type(module)
            module.__class__ = type(kind, (base,), {})
    model.path, model.batch, model.input_shape, model.input_dtype = path, shape[0], shape[1:], dtype
    loaded: nn.Module = model
    return loaded


class _Exported(UnflattenedModule):
    """The root, which refuses an input that the program was not exported for."""

    path: str
    batch: int
    input_shape: tuple[int, ...]

    def forward(self, pictures: Tensor) -> Any:
        shapes = (self.batch, *self.input_shape), tuple(pictures.shape)
        if len(shapes[1]) != 4 or any(size not in (0, given) for size, given in zip(*shapes, strict=True)):
            takes, got = ("x".join(str(size or "any") for size in shape) for shape in shapes)
            do = "give that ‹input_size and batch_size|--input-size and --batch-size›, or export it with dynamic_shapes"
            raise InputError(f"{self.path} takes {takes}", f"the input is {got}", do)
        for module in self.modules():
            if "_num_calls" in vars(module):  # a pass that ended early has left it in the middle
                vars(module)["_num_calls"] = 0
        return super().forward(pictures)  # type: ignore[no-untyped-call]


def _input_of(program: ExportedProgram, path: str) -> tuple[tuple[int, ...], torch.dtype]:
    """The shape of the only input, 0 for an axis of any length, and its data type."""
    wanted = program.graph_signature.user_inputs
    inputs = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder" and node.name in wanted]
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    words = [f"{dtype_name(tensor.dtype)} {'x'.join(map(str, tensor.shape))}" for tensor in tensors]
    if len(inputs) != 1 or len(words) != 1 or inputs[0].dim() != 4 or not inputs[0].is_floating_point():
        exists = f"it takes {', '.join(words) or 'no tensor'}"
        raise ModelError(f"{path} does not take one batch of images (N, C, H, W)", exists)
    return tuple(size if isinstance(size, int) else 0 for size in inputs[0].shape), inputs[0].dtype


def _check(file: Any, path: str) -> None:
    """Refuse a file that could run code when it is loaded."""
    names = file.get_all_records()
    programs = [name for name in names if name.startswith("models/")]
    if "archive_format" not in names or len(programs) != 1 or "version" in names:
        asked = f"{path} is not a file of torch.export.save"
        raise ModelError(asked, do="save it again, with the version of torch that is installed")
    reason = "two parts of one name" if len(set(names)) < len(names) else ""
    for name in names:
        if name.startswith("data/aotinductor"):
            reason = "compiled code"
        elif name.startswith(("data/weights/", "data/constants/")):
            if name.endswith(".json"):
                entries = json.loads(file.get_record(name))["config"].values()
                pickled = any(entry["use_pickle"] or "tensor_meta" not in entry for entry in entries)
                reason = "pickled tensors or objects" if pickled else reason
            elif name.endswith(".pt") or "_obj" in name:
                reason = "pickled tensors or objects"
        elif name.startswith("data/sample_inputs/"):
            try:
                torch.load(io.BytesIO(file.get_record(name)), weights_only=True)
            except Exception:
                reason = "sample inputs that are not tensors"
    reason = reason or next(_suspicious(json.loads(file.get_record(programs[0]))), "")
    if reason:
        raise ModelError(f"{path} holds {reason}, which could run code: it is not loaded", do="export it without")


def _suspicious(value: Any, key: str = "") -> Iterator[str]:
    """What in the description of a program could run code."""
    if isinstance(value, dict):
        for name, item in value.items():
            if not _NAME.fullmatch(name):
                yield f"the name {name[:80]!r}"
            yield from _suspicious(item, key if key in _NEVER_READ else name)
    elif isinstance(value, list):
        for item in value:
            yield from _suspicious(item, key)
    elif isinstance(value, str) and key not in (*_NEVER_READ, "as_string"):
        if key == "target":
            fine = _OPERATORS.fullmatch(value) is not None
        elif key == "expr_str":
            plain = _QUOTED.sub("", value)
            words = re.findall(r"[A-Za-z_]\w*", plain)
            fine = bool(_EXPRESSION.fullmatch(plain)) and all(_SYMBOL.fullmatch(word) for word in words)
        elif key in ("in_spec", "out_spec"):
            fine = not _CONTAINERS.search(value)
        else:
            fine = bool((_STACK if key == "nn_module_stack" else _NAME).fullmatch(value))
        if not fine:
            yield f"the {key} {value[:80]!r}"
