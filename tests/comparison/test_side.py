"""Sides of a comparison that differ in data type, compilation, quantisation or interventions."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookscope.comparison import Comparison, Side, compare, make_side
from hookscope.comparison.side import functions_of
from hookscope.errors import ModelError, UsageError
from hookscope.interventions import Zero
from tests.comparison.example import relative
from tests.helpers import hooked, hooks_on, seeded
from tests.nets import named


@pytest.mark.parametrize(
    ("functions", "types"),
    [
        (
            "conv",
            ["Conv2d", "Conv", "conv2d", "aten.conv2d.default", "aten::convolution", "QLinearConv", "ConvInteger"],
        ),
        ("conv", ["Conv2dSame", "StdConv2d", "PaddedConv", "QuantizedConv2d"]),
        ("conv relu", ["ConvReLU2d", "QuantizedConvReLU2d", "quantized.conv2d_relu"]),
        ("conv batchnorm relu", ["ConvBnReLU2d"]),
        ("conv add relu", ["ConvAddReLU2d"]),
        ("convtranspose", ["ConvTranspose2d", "ConvTranspose", "conv_transpose2d"]),
        ("linear", ["Linear", "Gemm", "MatMul", "aten.addmm.default", "NonDynamicallyQuantizableLinear"]),
        ("linear relu", ["LinearReLU"]),
        ("batchnorm", ["BatchNorm2d", "BatchNormalization", "FrozenBatchNorm2d", "SyncBatchNorm", "batch_norm"]),
        ("batchnorm relu", ["BNReLU2d"]),
        ("batchnorm act", ["BatchNormAct2d"]),
        ("layernorm", ["LayerNorm", "LayerNorm2d", "LayerNormalization", "layer_norm", "aten.layer_norm.default"]),
        ("relu", ["ReLU", "Relu", "relu_", "aten.relu_.default"]),
        ("relu6", ["ReLU6", "Clip", "relu6", "clamp"]),
        ("gelu", ["GELU", "Gelu", "GELUActivation", "NewGELUActivation", "gelu"]),
        ("silu", ["SiLU", "Swish", "silu_"]),
        ("hardswish", ["Hardswish", "HardSwish", "hardswish_"]),
        ("adaptivepool", ["AdaptiveAvgPool2d", "GlobalAveragePool", "ReduceMean", "mean", "adaptive_avg_pool2d"]),
        ("maxpool", ["MaxPool2d", "MaxPool", "max_pool2d", "AdaptiveMaxPool2d", "GlobalMaxPool"]),
        ("avgpool", ["AvgPool2d", "AveragePool", "avg_pool2d"]),
        ("add", ["add", "Add", "iadd", "aten.add.Tensor", "add_"]),
        ("add relu", ["add_relu"]),
        ("resize", ["Upsample", "Resize", "interpolate", "UpsamplingBilinear2d", "aten.upsample_bilinear2d.vec"]),
        ("multiheadattention", ["MultiheadAttention"]),
        ("zeropad", ["ZeroPad2d"]),
    ],
)
def test_names_of_classes_and_operators_say_what_is_computed(functions: str, types: Sequence[str]) -> None:
    assert {" ".join(functions_of(name)) for name in types} == {functions}


@pytest.fixture(scope="module")
def net() -> nn.Module:
    def build() -> nn.Module:
        body = named(conv=nn.Conv2d(3, 8, 3), norm=nn.BatchNorm2d(8), relu=nn.ReLU(inplace=True))
        return named(body=body, pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), head=nn.Linear(8, 5))

    return seeded(build)


@pytest.fixture(scope="module")
def batch() -> Tensor:
    return torch.rand(4, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def outputs(net: nn.Module, run: Callable[[], Any]) -> dict[str, Tensor]:
    """What the layers return while ``run`` runs, by plain hooks with copies."""
    found: dict[str, Tensor] = {}
    with hooked(net, lambda name, output: found.update({name: output.clone()})), torch.no_grad():
        run()
    return found


def check_differences(found: Comparison, a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for row in found.calls[1:-1]:
        assert row.difference is not None
        assert row.difference.relative_l2 == pytest.approx(relative(a[row.key], b[row.key]), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float64"])
def test_a_data_type_runs_in_a_copy(net: nn.Module, batch: Tensor, name: str) -> None:
    dtype = getattr(torch, name)
    found = compare(net, make_side(net, name), batch)
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}
    twin = make_side(net, dtype).net.model
    check_differences(found, outputs(net, lambda: net(batch)), outputs(twin, lambda: twin(batch.to(dtype))))
    assert (found.a.dtype, found.b.dtype) == ("float32", name)
    assert found.answer.kind == ("noise" if name == "float64" else found.answer.kind) != "same"


@pytest.mark.parametrize(("text", "dtype"), [("autocast", "bfloat16"), ("autocast:float16", "float16")])
def test_autocast_surrounds_each_pass(net: nn.Module, batch: Tensor, text: str, dtype: str) -> None:
    found = compare(net, make_side(net, text), batch)
    with torch.autocast("cpu", getattr(torch, dtype)):
        b = outputs(net, lambda: net(batch))
    check_differences(found, outputs(net, lambda: net(batch)), b)
    assert found.b.special == f"autocast {dtype}"
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("dtype", "says"),
    [
        ("float8", "no data type 'float8'; there are float16, bfloat16, float32, float64, autocast"),
        (torch.int8, "no data type 'int8'"),
        ("autocast:float64", "autocast cannot compute in 'float64'; it takes float16, bfloat16"),
    ],
)
def test_another_data_type_is_an_error(net: nn.Module, dtype: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make_side(net, dtype)


def test_a_data_type_that_the_device_lacks_is_one_line(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")

    monkeypatch.setattr(nn.Sequential, "to", refuse)
    with pytest.raises(UsageError, match="cpu does not support float64: Cannot convert"):
        make_side(net, "float64")


def test_interventions_act_before_the_outputs_are_compared(net: nn.Module, batch: Tensor) -> None:
    found = compare(net, make_side(net, changes={"body.norm": Zero()}), batch)
    by_key = {row.key: row.difference for row in found.calls}
    assert found.answer.first == "body.norm"
    assert by_key["body.norm"] is not None and by_key["body.norm"].relative_l2 == 1.0
    assert by_key["body.conv"] is not None and by_key["body.conv"].is_same
    assert found.b.special == "Zero at body.norm"
    assert hooks_on(net) == 0


def test_a_compiled_side_shows_what_its_layers_return(net: nn.Module, batch: Tensor) -> None:
    side = make_side(net, compiled="eager")
    found = compare(net, side, batch)
    keys = ["(input)", "body.conv", "body.norm", "body.relu", "pool", "flat", "head", "(model)"]
    assert [row.key for row in found.calls] == keys
    assert all(row.difference is not None and row.difference.is_same for row in found.calls)
    assert (found.answer.kind, found.b.special) == ("same", "torch.compile (eager)")
    assert hooks_on(net) == 0
    assert next(side.net.model.parameters()) is next(net.parameters())


def relu_as_relu6(graph: Any, inputs: Any) -> Any:
    """A backend of torch.compile with a fault."""
    for node in graph.graph.nodes:
        if "relu" in str(node.target):
            node.target, node.kwargs = torch.clamp, {"min": 0, "max": 0.1}
            node.args = node.args[:1]
    graph.recompile()
    return graph


def test_a_fault_of_a_compiler_is_found_at_its_layer(net: nn.Module, batch: Tensor) -> None:
    found = compare(net, make_side(net, compiled=relu_as_relu6), batch)
    a = outputs(net, lambda: net(batch))["body.relu"]
    row = next(row for row in found.calls if row.key == "body.relu")
    assert found.answer.first == "body.relu"
    assert row.difference is not None
    assert row.difference.relative_l2 == pytest.approx(relative(a, a.clamp(0, 0.1)), rel=1e-6)


def test_a_compiled_model_runs_through_its_inner_model(net: nn.Module) -> None:
    assert Side.of(torch.compile(net)).facts.special == "torch.compile"  # type: ignore[arg-type]


def test_what_a_compiled_side_cannot_do_is_an_error(net: nn.Module, batch: Tensor) -> None:
    with pytest.raises(UsageError, match="interventions cannot change a compiled model"):
        make_side(net, compiled=True, changes={"head": Zero()})
    with pytest.raises(UsageError, match="operations of a compiled model cannot be compared"):
        compare(net, make_side(net, compiled="eager"), batch, ops=True)
    with pytest.raises(UsageError, match=r"no backend 'inductr' of torch\.compile; nearest: inductor"):
        make_side(net, compiled="inductr")


def fails(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no C++ compiler")


def test_a_failing_compiler_is_one_line(net: nn.Module, batch: Tensor) -> None:
    with pytest.raises(ModelError, match=r"torch\.compile failed on Sequential: .*no C\+\+ compiler.*without compile"):
        compare(net, make_side(net, compiled=fails), batch)
