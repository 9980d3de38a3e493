"""What a layer, a function of torch, or an operator of ATen or ONNX computes, by its name."""

from __future__ import annotations

import re
from functools import lru_cache

from hookscope.hooks import ACTIVATION_FUNCTIONS

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
    "adaptivepool": "(global|adaptive).*pool|^(reduce)?mean$",
    "maxpool": "maxpool",
    "avgpool": "(avg|average)pool",
    "dropout": "drop(out|path|block)|stochasticdepth",
    "reshape": "^(un)?flatten|^reshape$|^view$|^permute$|^(un)?squeeze$|^transpose$",
    "quantize": "^(de)?quant(ize(?!d)|stub)",
    "cat": "^cat$|^concat(enate)?$",
    "resize": "upsampl|interpolate|^resize",
    "relu6": "^clip$|^clamp$",
    "silu": "(?<!hard)swish",
    "activation": "|".join(_ACTIVATIONS) + "|(?<=norm)act",
}
_WORD = re.compile("|".join(f"(?P<{kind}>{words})" for kind, words in _WORDS.items()))
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
    return function not in ("add", "cat", "resize") and (function in _WORDS or is_activation(function))


def is_activation(kind: str) -> bool:
    return kind in _ACTIVATIONS or kind == "act"
