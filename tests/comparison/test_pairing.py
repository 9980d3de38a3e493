"""Which calls pair: by name, by order and kind, by a map, in runs; on calls written by hand."""

import pytest
import torch
import torchvision
from torch import Tensor, nn

from hookscope import HookscopeError, compare
from hookscope.comparison.pairing import Pairing, SeenCall, nothing_pairs, pair_calls
from hookscope.errors import LayerError, UsageError
from hookscope.hooks import Call, Observer, is_single, tensors_in

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


def pairs(found: Pairing) -> list[str]:
    return [f"{pair.a.key} {pair.b.key}" for pair in found.pairs]


def runs(found: Pairing) -> list[str]:
    """``first..last partner`` of folded pairs."""
    return [
        f"{pair.first.key + '..' if pair.first else ''}{pair.a.key} "
        f"{pair.first_b.key + '..' if pair.first_b else ''}{pair.b.key}"
        for pair in found.pairs
        if pair.paired_by == "folded"
    ]


def hows(found: Pairing) -> set[str]:
    return {pair.paired_by for pair in found.pairs}


BLOCK = ("c1 Conv2d", "b1 BatchNorm2d", "r ReLU", "c2 Conv2d", "b2 BatchNorm2d", "r#1 ReLU", "fc Linear")


def test_the_same_names_pair_even_where_shapes_differ() -> None:
    found = pair_calls(calls(*BLOCK), calls(*(text + " 16" if "Conv2d" in text else text for text in BLOCK)))
    assert pairs(found) == [f"{text.split()[0]} {text.split()[0]}" for text in BLOCK]
    assert hows(found) == {"name"}
    assert found.only_a == found.only_b == ()


@pytest.mark.parametrize("prefix", ["module.", "backbone.", "_orig_mod.", "model.net."])
def test_a_prefix_of_one_side_is_no_other_name(prefix: str) -> None:
    a, b = (
        calls(*BLOCK, "::add add", "head Linear"),
        calls(*(prefix + text for text in BLOCK), "::add add", "head Linear"),
    )
    for found in (pair_calls(a, b), pair_calls(b, a)):
        assert hows(found) == {"name"}
        assert len(found.pairs) == len(a)


def test_different_prefixes_of_both_sides_are_no_other_names() -> None:
    found = pair_calls(calls(*("module." + text for text in BLOCK)), calls(*("net.model." + text for text in BLOCK)))
    assert hows(found) == {"name"}


def test_calls_out_of_order_pair_by_name() -> None:
    found = pair_calls(calls("x Conv2d", "y ReLU", "z Linear"), calls("y ReLU", "x Conv2d", "z Linear"))
    assert pairs(found) == ["x x", "y y", "z z"]


def numbered(*types: str) -> list[SeenCall]:
    return calls(*(f"{at} {kind}" for at, kind in enumerate(types)))


def test_a_layer_that_is_inserted_or_removed_leaves_the_others_paired() -> None:
    short = numbered("Conv2d", "ReLU", "MaxPool2d", "Conv2d", "ReLU", "Linear")
    long = numbered("Conv2d", "Sigmoid", "ReLU", "MaxPool2d", "Conv2d", "GroupNorm", "ReLU", "Linear")
    assert pairs(pair_calls(short, long)) == ["0 0", "1 2", "2 3", "3 4", "4 6", "5 7"]
    assert [call.name for call in pair_calls(short, long).only_b] == ["1", "5"]
    assert pairs(pair_calls(long, short)) == ["0 0", "2 1", "3 2", "4 3", "6 4", "7 5"]


def test_of_equal_blocks_one_pairs_as_a_whole() -> None:
    block = ("Conv2d", "ReLU", "Tanh")
    found = pair_calls(
        numbered("Linear", *block), calls("x Linear", *(f"y{i}.{t} {t}" for i in range(3) for t in block))
    )
    assert pairs(found) == ["0 x", "1 y0.Conv2d", "2 y0.ReLU", "3 y0.Tanh"]


def test_widths_tell_convolutions_apart() -> None:
    found = pair_calls(calls("a Conv2d 16", "b Conv2d 32"), calls("p Conv2d 24", "q Conv2d 16", "r Conv2d 32"))
    assert pairs(found) == ["a q", "b r"]


def test_a_name_does_not_pair_another_function() -> None:
    found = pair_calls(numbered("Conv2d", "ReLU", "Conv2d"), numbered("Conv2d", "BatchNorm2d", "ReLU", "Conv2d"))
    assert "1 2" in pairs(found)


@pytest.mark.parametrize("other", ["ReLU6", "Clip", "GELU", "relu_", "HardSwish"])
def test_another_activation_in_the_same_place_pairs(other: str) -> None:
    found = pair_calls(numbered("Conv2d", "ReLU", "Linear"), calls("x Conv2d", f"y {other}", "z Linear"))
    assert pairs(found) == ["0 x", "1 y", "2 z"]


CHAIN = ("c1 Conv2d", "b1 BatchNorm2d", "r1 ReLU", "c2 Conv2d", "b2 BatchNorm2d", "fc Linear")


def test_a_batchnorm_that_is_folded_into_a_convolution_makes_a_run() -> None:
    folded = calls("Conv_0 Conv", "Relu_1 Relu", "Conv_2 Conv", "Gemm_3 Gemm")
    found = pair_calls(calls(*CHAIN), folded)
    assert pairs(found) == ["b1 Conv_0", "r1 Relu_1", "b2 Conv_2", "fc Gemm_3"]
    assert runs(found) == ["c1..b1 Conv_0", "c2..b2 Conv_2"]
    assert found.only_a == found.only_b == ()
    assert runs(pair_calls(folded, calls(*CHAIN))) == ["Conv_0 c1..b1", "Conv_2 c2..b2"]


def test_a_batchnorm_that_one_convolution_alone_has_folded_makes_one_run() -> None:
    found = pair_calls(calls(*CHAIN), calls(*(text for text in CHAIN if text[:2] != "b1")))
    assert runs(found) == ["c1..b1 c1"]
    assert pairs(found)[1:] == ["r1 r1", "c2 c2", "b2 b2", "fc fc"]


QUANTIZED = ("quant Quantize", "c1 ConvReLU2d", "b1 Identity", "r1 Identity", "c2 Conv2d", "b2 Identity", "fc Linear")


def test_a_fused_layer_does_the_work_of_the_run_that_its_class_names() -> None:
    found = pair_calls(calls(*CHAIN), calls(*QUANTIZED, "dequant DeQuantize"))
    assert pairs(found) == ["r1 c1", "b2 c2", "fc fc"]
    assert runs(found) == ["c1..r1 c1", "c2..b2 c2"]
    assert found.only_a == found.only_b == ()


def test_a_fused_activation_that_no_call_shows_leaves_the_layer_without_a_partner() -> None:
    found = pair_calls(calls("c Conv2d", "b BatchNorm2d", "fc Linear"), calls("c ConvReLU2d", "fc Linear"))
    assert pairs(found) == ["fc fc"]
    assert ([call.name for call in found.only_a], [call.name for call in found.only_b]) == (["c", "b"], ["c"])
    with_operation = pair_calls(
        calls("c Conv2d", "b BatchNorm2d", "::relu relu", "fc Linear"), calls("c ConvReLU2d", "fc Linear")
    )
    assert runs(with_operation) == ["c..::relu c"]


def test_what_is_inside_a_layer_needs_no_partner() -> None:
    b = calls("c Conv2d", "n.act ReLU", "n BatchNormAct2d", "fc Linear")
    found = pair_calls(calls("c Conv2d", "b BatchNorm2d", "r ReLU", "fc Linear"), b)
    assert pairs(found) == ["c c", "r n", "fc fc"]
    assert runs(found) == ["b..r n"]
    assert found.only_b == ()


def test_one_call_between_two_pairs_does_the_work_of_a_run() -> None:
    a = calls("n LayerNorm", "attention MultiheadAttention", "drop Dropout", "fc Linear")
    found = pair_calls(a, calls("x LayerNorm", "qkv Linear 24", "proj Conv2d", "y Linear"))
    assert runs(found) == ["attention qkv..proj"]


def test_a_run_ends_before_a_residual_connection() -> None:
    a = calls("n LayerNorm", "attention MultiheadAttention", "m LayerNorm", "fc Linear")
    operators = "MatMul_1 MatMul", "Softmax_2 Softmax", "MatMul_3 MatMul", "Transpose_4 Transpose", "Add_5 Add"
    found = pair_calls(a, calls("x LayerNorm", *operators, "y LayerNorm", "z Linear"))
    assert runs(found) == ["attention MatMul_1..Transpose_4"]
    assert [call.name for call in found.only_b] == ["Add_5"]


def test_a_bias_that_is_an_operator_belongs_to_the_product() -> None:
    b = calls("MatMul_0 MatMul", "Add_1 Add", "Relu_2 Relu")
    b[0] = SeenCall(b[0].call, (10,), {"weight": (8, 10)})
    b[1] = SeenCall(b[1].call, (10,), {"bias": (10,)})
    b[2] = SeenCall(b[2].call, (10,), {})
    assert runs(pair_calls(calls("fc Linear", "r ReLU"), b)) == ["fc MatMul_0..Add_1"]


def test_names_choose_partners_and_the_rest_pairs_as_usual() -> None:
    b = calls("x1 Conv2d", "x2 Conv2d", "fc Linear")
    found = pair_calls(calls("y1 Conv2d", "fc Linear"), b, {"y1": "x2"})
    assert [(pair.a.key, pair.b.key, pair.paired_by) for pair in found.pairs] == [
        ("y1", "x2", "map"),
        ("fc", "fc", "name"),
    ]


def test_a_star_stands_for_the_same_text_in_both_names() -> None:
    a, b = calls("s1.c Conv2d", "s1.r ReLU", "s1.r#1 ReLU"), calls("t.1.c Conv2d", "t.1.r ReLU", "t.1.r#1 ReLU")
    found = pair_calls(a, calls("other Conv2d") + b, {"s*": "t.*"})
    assert pairs(found) == ["s1.c t.1.c", "s1.r t.1.r", "s1.r#1 t.1.r#1"]
    assert hows(found) == {"map"}


def test_names_take_calls_and_exact_names_before_stars() -> None:
    a, b = calls("r ReLU", "r#1 ReLU", "q ReLU"), calls("r1 ReLU", "r2 ReLU", "x.q ReLU")
    assert pairs(pair_calls(a, b, {"*": "x.*", "r": "r2", "r#1": "r1"})) == ["r r2", "r#1 r1", "q x.q"]


def test_a_layer_mapped_to_a_fused_one_ends_a_run() -> None:
    found = pair_calls(calls(*CHAIN), calls("Conv_0 ConvReLU2d", "Conv_2 Conv2d", "fc Linear"), {"r1": "Conv_0"})
    assert (found.pairs[0].paired_by, found.pairs[0].first) == ("map", Call("c1", "Conv2d", 0, None))
    assert found.only_a == ()


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
    found = compare(nn.Sequential(nn.Linear(3, 8)), nn.Sequential(nn.Linear(3, 4)), torch.rand(6, 3), matrix=True)
    row = found.calls[1]
    assert row.difference is None
    assert found.matrix is not None
    assert row.cka == pytest.approx(found.matrix.values[0, 0])


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
