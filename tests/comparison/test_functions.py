"""What classes and operators compute, by their names."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hookscope.comparison.functions import functions_of


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
        ("maxpool", ["MaxPool2d", "MaxPool", "max_pool2d"]),
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
