"""Which calls pair: by name, by order and kind, by a map, in runs; on calls written by hand."""

import pytest
import torch
import torchvision
from torch import Tensor, nn

from hookscope import HookscopeError, compare
from hookscope.comparison.pairing import Pairing, SeenCall, nothing_pairs, pair_calls
from hookscope.errors import LayerError, UsageError
from hookscope.hooks import Call, Observer, is_single, tensors_in
from tests.nets import named

_OUT = {"Conv2d": (8, 4, 4), "Linear": (10,)}  # of other types as before
_WEIGHTS = {"Conv2d": {"weight": (8, 8, 3, 3)}, "Linear": {"weight": (10, 8)}, "BatchNorm2d": {"weight": (8,)}}


def calls(*texts: str) -> list[SeenCall]:
    """Calls from ``name Type`` or ``name#1 Type``; ``conv Conv2d 16`` has 16 channels."""
    seen: list[SeenCall] = []
    shape: tuple[int, ...] = (8, 4, 4)
    for order, text in enumerate(texts):
        key, kind, *width = text.split()
        name, _, number = key.partition("#")
        shape = _OUT.get(kind, shape)
        weights = _WEIGHTS.get(kind, {})
        if width:
            shape, weights = (int(width[0]), *shape[1:]), {"weight": (int(width[0]), 8, 3, 3)}
        seen.append(SeenCall(Call(name, kind, int(number or 0), None, order), shape, weights))
    return seen


def described(found: Pairing) -> str:
    """``a b`` for each pair, ``first..last`` for a run; then the calls without a partner of A and of B."""
    pairs = []
    for pair in found.pairs:
        ends = (pair.first, pair.a), (pair.first_b, pair.b)
        a, b = (f"{first.key}.." if first != last else "" for first, last in ends)
        pairs.append(f"{a}{pair.a.key} {b}{pair.b.key}{' (map)' if pair.paired_by == 'map' else ''}")
        assert (pair.paired_by == "folded") == bool(a or b) or pair.paired_by == "map"
    sides = (", ".join(call.key for call in calls) for calls in (found.only_a, found.only_b))
    return " | ".join([", ".join(pairs), *sides]).rstrip("| ")


def hows(found: Pairing) -> set[str]:
    return {pair.paired_by for pair in found.pairs}


BLOCK = ("c1 Conv2d", "b1 BatchNorm2d", "r ReLU", "c2 Conv2d", "b2 BatchNorm2d", "r#1 ReLU", "fc Linear")


def test_the_same_names_pair_even_where_shapes_differ() -> None:
    found = pair_calls(calls(*BLOCK), calls(*(text + " 16" if "Conv2d" in text else text for text in BLOCK)))
    assert described(found) == "c1 c1, b1 b1, r r, c2 c2, b2 b2, r#1 r#1, fc fc"
    assert hows(found) == {"name"}


@pytest.mark.parametrize("of_a", ["", "module.", "net.model."])
@pytest.mark.parametrize("of_b", ["module.", "backbone.", "_orig_mod.", "model.net."])
def test_prefixes_are_no_other_names(of_a: str, of_b: str) -> None:
    a, b = (calls(*(prefix + text for text in BLOCK), "::add add", "head Linear") for prefix in (of_a, of_b))
    for found in (pair_calls(a, b), pair_calls(b, a)):
        assert hows(found) == {"name"} and len(found.pairs) == len(a)


CHAIN = "c1 Conv2d, b1 BatchNorm2d, r1 ReLU, c2 Conv2d, b2 BatchNorm2d, fc Linear"
SHORT = "0 Conv2d, 1 ReLU, 2 MaxPool2d, 3 Conv2d, 4 ReLU, 5 Linear"
LONG = "0 Conv2d, 1 Sigmoid, 2 ReLU, 3 MaxPool2d, 4 Conv2d, 5 GroupNorm, 6 ReLU, 7 Linear"
BLOCKS = "x Linear, y0 Conv2d, y1 ReLU, y2 Tanh, z0 Conv2d, z1 ReLU, z2 Tanh, w0 Conv2d, w1 ReLU, w2 Tanh"
OPERATORS = "Conv_0 Conv, Relu_1 Relu, Conv_2 Conv, Gemm_3 Gemm"
QUANTIZED = "q Quantize, c1 ConvReLU2d, b1 Identity, r1 Identity, c2 Conv2d, b2 Identity, fc Linear, d DeQuantize"
ATTENTION = "n LayerNorm, attention MultiheadAttention, m LayerNorm, fc Linear"
SUM = "x LayerNorm, M1 MatMul, S2 Softmax, M3 MatMul, T4 Transpose, A5 Add, y LayerNorm, z Linear"
PAIRED = {
    "calls out of order": ("x Conv2d, y ReLU, z Linear", "y ReLU, x Conv2d, z Linear", "x x, y y, z z"),
    "layers inserted": (SHORT, LONG, "0 0, 1 2, 2 3, 3 4, 4 6, 5 7 |  | 1, 5"),
    "layers removed": (LONG, SHORT, "0 0, 2 1, 3 2, 4 3, 6 4, 7 5 | 1, 5"),
    "of equal blocks one": (
        "0 Linear, 1 Conv2d, 2 ReLU, 3 Tanh", BLOCKS, "0 x, 1 y0, 2 y1, 3 y2 |  | z0, z1, z2, w0, w1, w2",
    ),
    "widths": ("a Conv2d 16, b Conv2d 32", "p Conv2d 24, q Conv2d 16, r Conv2d 32", "a q, b r |  | p"),
    "a name of another function": (
        "0 Conv2d, 1 ReLU, 2 Conv2d", "0 Conv2d, 1 BatchNorm2d, 2 ReLU, 3 Conv2d", "0 0..1, 1 2, 2 3",
    ),
    **{
        f"activation {other}": ("0 Conv2d, 1 ReLU, 2 Linear", f"x Conv2d, y {other}, z Linear", "0 x, 1 y, 2 z")
        for other in ("ReLU6", "Clip", "GELU", "relu_", "HardSwish")
    },
    "BatchNorms folded in B": (CHAIN, OPERATORS, "c1..b1 Conv_0, r1 Relu_1, c2..b2 Conv_2, fc Gemm_3"),
    "BatchNorms folded in A": (OPERATORS, CHAIN, "Conv_0 c1..b1, Relu_1 r1, Conv_2 c2..b2, Gemm_3 fc"),
    "one BatchNorm folded": (
        CHAIN, CHAIN.replace("b1 BatchNorm2d, ", ""), "c1..b1 c1, r1 r1, c2 c2, b2 b2, fc fc",
    ),
    "a layer fused with those of its class": (CHAIN, QUANTIZED, "c1..r1 c1, c2..b2 c2, fc fc"),
    "a fused activation that no call shows": (
        "c Conv2d, b BatchNorm2d, fc Linear", "c ConvReLU2d, fc Linear", "fc fc | c, b | c",
    ),
    "a fused activation that an operation shows": (
        "c Conv2d, b BatchNorm2d, ::relu relu, fc Linear", "c ConvReLU2d, fc Linear", "c..::relu c, fc fc",
    ),
    "what is inside a layer": (
        "c Conv2d, b BatchNorm2d, r ReLU, fc Linear", "c Conv2d, n.act ReLU, n BatchNormAct2d, fc Linear",
        "c c, b..r n, fc fc",
    ),
    "one call for a run between two pairs": (
        "n LayerNorm, attention MultiheadAttention, drop Dropout, fc Linear",
        "x LayerNorm, qkv Linear 24, proj Conv2d, y Linear", "n x, attention qkv..proj, fc y",
    ),
    "a run before a residual connection": (ATTENTION, SUM, "n x, attention M1..T4, m y, fc z |  | A5"),
}  # fmt: skip


@pytest.mark.parametrize(("a", "b", "expected"), PAIRED.values(), ids=PAIRED)
def test_which_calls_pair_without_names(a: str, b: str, expected: str) -> None:
    assert described(pair_calls(calls(*a.split(", ")), calls(*b.split(", ")))) == expected


def test_a_bias_that_is_an_operator_belongs_to_the_product() -> None:
    b = calls("MatMul_0 MatMul", "Add_1 Add", "Relu_2 Relu")
    parameters: list[dict[str, tuple[int, ...]]] = [{"weight": (8, 10)}, {"bias": (10,)}, {}]
    b = [SeenCall(seen.call, (10,), own) for seen, own in zip(b, parameters, strict=True)]
    assert described(pair_calls(calls("fc Linear", "r ReLU"), b)) == "fc MatMul_0..Add_1, r Relu_2"


@pytest.mark.parametrize(
    ("a", "b", "names", "expected"),
    [
        ("y1 Conv2d, fc Linear", "x1 Conv2d, x2 Conv2d, fc Linear", {"y1": "x2"}, "y1 x2 (map), fc fc |  | x1"),
        (  # a star stands for the same text in both names
            "s1.c Conv2d, s1.r ReLU, s1.r#1 ReLU", "o Conv2d, t.1.c Conv2d, t.1.r ReLU, t.1.r#1 ReLU", {"s*": "t.*"},
            "s1.c t.1.c (map), s1.r t.1.r (map), s1.r#1 t.1.r#1 (map) |  | o",
        ),
        (  # exact names win, and may name a call
            "r ReLU, r#1 ReLU, q ReLU", "r1 ReLU, r2 ReLU, x.q ReLU", {"*": "x.*", "r": "r2", "r#1": "r1"},
            "r r2 (map), r#1 r1 (map), q x.q (map)",
        ),
        (  # a layer mapped to a fused one ends a run
            CHAIN, "Conv_0 ConvReLU2d, Conv_2 Conv2d, fc Linear", {"r1": "Conv_0"},
            "c1..r1 Conv_0 (map), c2..b2 Conv_2, fc fc",
        ),
    ],
)  # fmt: skip
def test_names_choose_partners_and_the_rest_pairs_as_usual(
    a: str, b: str, names: dict[str, str], expected: str
) -> None:
    assert described(pair_calls(calls(*a.split(", ")), calls(*b.split(", ")), names)) == expected


@pytest.mark.parametrize(
    ("names", "error", "words"),
    [
        ({"convv1": "x"}, LayerError, "no layer 'convv1' ran in A; nearest: conv1"),
        ({"conv1": "y"}, LayerError, "no layer 'y' ran in B"),
        ({"conv*": "y.*"}, LayerError, "no layer 'y.*' ran in B"),
        ({"conv*": "x"}, UsageError, "'conv*' does not map to 'x'; write one * in both names"),
        ({"c*v*": "x*y*"}, UsageError, "write one * in both names"),
        ({"conv1": "x", "conv2": "x"}, UsageError, "'conv1' and 'conv2' map to the same 'x'"),
    ],
)
def test_names_that_cannot_be_are_an_error(names: dict[str, str], error: type[HookscopeError], words: str) -> None:
    with pytest.raises(error) as raised:
        pair_calls(calls("conv1 Conv2d", "conv2 Conv2d"), calls("x Conv2d"), names)
    assert words in str(raised.value)


def test_the_error_of_models_that_do_not_pair_names_the_nearest() -> None:
    a, b = calls("c Conv2d 16", "fc Linear"), calls("p Conv2d 4", "q Conv2d 12")
    assert pair_calls(a, b).pairs == ()
    assert "nearest: c (Conv2d, 16x4x4) and q (Conv2d, 12x4x4)" in str(nothing_pairs(a, b))
    assert "A has Conv2d, Linear; B has Tanh" in str(nothing_pairs(a, calls("t Tanh")))
    with pytest.raises(LayerError, match="no layer of A pairs with one of B"):
        compare(nn.Sequential(nn.Conv2d(3, 2, 3)), nn.Sequential(nn.Flatten()), torch.rand(1, 3, 5, 5))


def test_a_folded_batchnorm_is_compared_where_it_was_folded_in() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)).eval()
    net[1].running_mean.uniform_()  # type: ignore[union-attr,operator]
    fused = nn.utils.fuse_conv_bn_eval(net[0], net[1])  # type: ignore[arg-type]
    twin = nn.Sequential(fused, nn.ReLU(), net[3])
    found = compare(net, twin, torch.rand(4, 3, 8, 8))
    assert [(row.key, row.key_b, row.paired_by) for row in found.calls[1:-1]] == [
        ("1", "0", "folded"),
        ("2", "1", "order"),
        ("3", "2", "order"),
    ]
    assert all(row.difference is not None and (row.difference.relative_l2 or 0) < 1e-5 for row in found.calls)
    assert found.calls[1].isolated_l2 == pytest.approx(0, abs=1e-5)


def test_operations_that_the_comparison_needs_are_not_compared() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    found = compare(net, net, torch.rand(4, 3, 8, 8), ops=True)
    assert [row.key for row in found.calls] == ["(input)", "0", "1", "(model)"]


def test_cka_needs_no_equal_shapes() -> None:
    found = compare(named(a=nn.Linear(3, 8)), named(b=nn.Linear(3, 4)), torch.rand(6, 3), matrix=True)
    row, matrix = found.calls[1], found.matrix
    assert row.difference is None and matrix is not None
    assert (matrix.names_a, matrix.names_b, matrix.images) == (("a",), ("b",), 6)
    assert row.cka == pytest.approx(matrix.values[0, 0])


def torchvision_calls(name: str, device: str = "meta", **options: object) -> list[SeenCall]:
    seen: list[SeenCall] = []

    def on_call(call: Call, module: nn.Module, args: object, kwargs: object, output: Tensor) -> None:
        if is_single(call.name, module):
            shapes = {name: tuple(values.shape) for name, values in module.named_parameters(recurse=False)}
            shape = tuple(next(iter(tensors_in(output).values())).shape[1:])
            seen.append(SeenCall(call, shape, shapes))

    with torch.device(device), torch.no_grad():
        net = torchvision.models.get_model(name, weights=None, **options).eval()
        with Observer(net, "*", None, on_call, ordered=True):
            net(torch.rand(1, 3, 64, 64))
    return seen


def test_the_blocks_of_a_shorter_resnet_are_found_in_a_longer_one() -> None:
    found = pair_calls(torchvision_calls("resnet18"), torchvision_calls("resnet34"))
    assert (len(found.pairs), hows(found), len(found.only_a), len(found.only_b)) == (60, {"name"}, 0, 48)


@pytest.mark.slow
@pytest.mark.parametrize("a", ["vgg11", "vgg13", "vgg16", "vgg19"])
def test_every_batchnorm_of_a_vgg_with_them_is_in_a_run(a: str) -> None:
    found = pair_calls(torchvision_calls(a), torchvision_calls(f"{a}_bn"))
    convolutions = [pair for pair in found.pairs if pair.a.type == "Conv2d"]
    assert found.only_a == found.only_b == ()
    assert {pair.b.type for pair in convolutions} == {"BatchNorm2d"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "resnet50", "shufflenet_v2_x1_0", "mobilenet_v3_large"])
def test_every_layer_of_a_quantized_twin_has_its_run(name: str) -> None:
    found = pair_calls(torchvision_calls(name), torchvision_calls(f"quantized_{name}", "cpu", quantize=True))
    assert found.only_b == ()
    assert {call.type for call in found.only_a} <= {"ReLU", "Hardswish", "Hardsigmoid", "AdaptiveAvgPool2d"}
