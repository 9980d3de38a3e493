"""Faults of deployment, planted in exported files: the comparison points to the layer where each one is."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from PIL import Image
from torch import Tensor

from hookscope import compare, load_model
from hookscope.comparison import make_side
from hookscope.errors import UsageError
from hookscope.models import as_loaded
from tests.exports import deployed, to_onnx, to_pt2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of the network: ``folded.onnx`` without its BatchNorms, and ``whole.onnx`` with them."""
    path = tmp_path_factory.mktemp("deployed")
    to_onnx(deployed(), path / "folded.onnx")
    to_onnx(deployed(), path / "whole.onnx", training=torch.onnx.TrainingMode.PRESERVE, do_constant_folding=False)
    return path


@pytest.fixture
def batch() -> Tensor:
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def node(model: Any, name: str) -> Any:
    return next(each for each in model.graph.node if each.name == name)


def weight_of(model: Any, name: str) -> Any:
    """The weight of a node as a tensor of the file."""
    return next(tensor for tensor in model.graph.initializer if tensor.name == node(model, name).input[1])


def rewrite(tensor: Any, change: Callable[[Any], Any]) -> None:
    values = np.ascontiguousarray(change(numpy_helper.to_array(tensor)))
    tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float32), tensor.name))


def set_attribute(found: Any, name: str, value: Any) -> None:
    kept = [attribute for attribute in found.attribute if attribute.name != name]
    del found.attribute[:]
    found.attribute.extend([*kept, helper.make_attribute(name, value)])


def folded_without_epsilon(model: Any) -> None:
    bn: Any = deployed().bn2
    wrong = torch.sqrt(bn.running_var + bn.eps) / torch.sqrt(bn.running_var)
    rewrite(weight_of(model, "/conv2/Conv"), lambda weight: weight * wrong.numpy()[:, None, None, None])


def transposed_matrix(model: Any) -> None:
    rewrite(weight_of(model, "/fc/Gemm"), np.transpose)


def transposed_kernels(model: Any) -> None:
    rewrite(weight_of(model, "/head/head.0/Conv"), lambda weight: weight.transpose(0, 1, 3, 2))


def clipped(model: Any) -> None:
    relu = node(model, "/head/head.1/Relu")
    limits = {"low": np.float32(0), "high": np.float32(0.5)}
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in limits.items())
    relu.op_type = "Clip"
    relu.input.extend(limits)


def aligned_corners(model: Any) -> None:
    resize = next(each for each in model.graph.node if each.op_type == "Resize")
    set_attribute(resize, "coordinate_transformation_mode", "align_corners")


def other_epsilon(model: Any) -> None:
    set_attribute(node(model, "/bn2/BatchNormalization"), "epsilon", 1e-2)


def moved_pad(model: Any) -> None:
    set_attribute(node(model, "/head/head.0/Conv"), "pads", [2, 2, 0, 0])


def old_statistics(model: Any) -> None:
    names = node(model, "/bn1/BatchNormalization").input
    rewrite(next(tensor for tensor in model.graph.initializer if tensor.name == names[3]), lambda mean: mean + 0.1)


@pytest.mark.parametrize(
    ("file", "fault", "layer", "layer_b"),
    [
        ("folded", folded_without_epsilon, "bn2", "conv2"),
        ("folded", transposed_matrix, "fc", "fc"),
        ("folded", transposed_kernels, "head.0", "head.0"),
        ("folded", clipped, "head.1", "head.1"),
        ("folded", aligned_corners, "up", "up"),
        ("folded", moved_pad, "head.0", "head.0"),
        ("whole", other_epsilon, "bn2", "bn2"),
        ("whole", old_statistics, "bn1", "bn1"),
        ("folded", None, "", ""),
        ("whole", None, "", ""),
    ],
)
def test_a_planted_fault_is_found_in_its_layer(
    folder: Path,
    tmp_path: Path,
    batch: Tensor,
    file: str,
    fault: Callable[[Any], None] | None,
    layer: str,
    layer_b: str,
) -> None:
    model = onnx.load(folder / f"{file}.onnx")
    if fault is not None:
        fault(model)
    onnx.save(model, tmp_path / "deployed.onnx")
    found = compare(deployed(), load_model(str(tmp_path / "deployed.onnx")), batch)
    assert (found.answer.first, found.answer.most) == (layer, layer)
    assert not found.unpaired_a and not found.unpaired_b  # the Add of the file is an operation of the module
    if layer:
        row = next(row for row in found.calls if row.key == layer)
        assert row.key_b == layer_b and (row.paired_by == "folded") == (layer != layer_b)
        assert row.isolated_l2 is not None and row.difference is not None and row.difference.relative_l2 is not None
        others = [each.isolated_l2 for each in found.calls if each is not row and each.isolated_l2 is not None]
        assert row.isolated_l2 > 1e-5 > 1e-6 > max(others)  # every other layer is sound on the same inputs


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"mean": 0, "std": 1}, "B lacks the ImageNet mean and std"),
        ({"mean": "0.229,0.224,0.225", "std": "0.485,0.456,0.406"}, "B's input is 0.472"),
        ({"range": "0..255", "mean": 0, "std": 1}, "B lacks the ImageNet mean and std"),
        ("bgr", "RGB in one, BGR in the other"),
    ],
)
def test_other_preprocessing_is_found_in_the_input(folder: Path, choice: Any, words: str) -> None:
    values = np.random.default_rng(0).integers(0, 256, (4, 24, 24, 3), np.uint8)
    pictures = [Image.fromarray(each) for each in values]
    sound = load_model(str(folder / "folded.onnx"))
    a = replace(as_loaded(deployed()), preprocess=sound.preprocess)
    other = {"preprocess": lambda image: sound.preprocess(image).flip(0)} if choice == "bgr" else choice
    found = compare(a, load_model(str(folder / "folded.onnx"), **other), pictures)
    assert (found.answer.kind, found.answer.first) == ("input", "(input)") and words in found.answer.sentence
    assert max(row.isolated_l2 for row in found.calls if row.isolated_l2 is not None) < 1e-5  # no layer is to blame


def test_a_file_is_not_compiled(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"folded\.onnx runs in onnxruntime: torch cannot compile it"):
        make_side(load_model(str(folder / "folded.onnx")), compiled=True)


@pytest.mark.slow
def test_an_exported_program_is_the_same_to_the_bit(tmp_path: Path, batch: Tensor) -> None:
    found = compare(deployed(), load_model(to_pt2(deployed(), tmp_path / "net.pt2")), batch)
    assert found.answer.kind == "same" and not found.unpaired_a and not found.unpaired_b


class Calibration:
    """Batches by which onnxruntime chooses the ranges."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.batches = iter([{"input": random.standard_normal((4, 3, 16, 16), np.float32)} for _ in range(4)])

    def get_next(self) -> Any:
        return next(self.batches, None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["QDQ", "QOperator", "dynamic"])
def test_files_of_eight_bits(folder: Path, tmp_path: Path, batch: Tensor, form: str) -> None:
    from onnxruntime import quantization

    source, target = str(folder / "folded.onnx"), str(tmp_path / "int8.onnx")
    if form == "dynamic":
        quantization.quantize_dynamic(source, target)
    else:
        kind = quantization.QuantFormat[form]
        quantization.quantize_static(source, target, Calibration(), quant_format=kind, per_channel=True)
    net = load_model(target)
    torch.testing.assert_close(net.model(batch), deployed()(batch), atol=0.1, rtol=0.1)
    found = compare(deployed(), net, batch)
    alone = {row.key_b: row.isolated_l2 for row in found.calls if row.isolated_l2 is not None}
    assert {"conv1", "conv2", "up", "head.0", "fc", "fc2"} <= alone.keys()
    assert all(1e-4 < alone[name] < 0.02 for name in ("conv1", "conv2", "head.0", "fc", "fc2"))
    assert found.answer.first in ("bn1", "relu")
