"""A quantized side: fused layers, sums and the error of each layer alone, judged by torch and by torch.ao.ns."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization
from torch.ao.ns import _numeric_suite as numeric_suite
from torch.nn.modules.module import register_module_forward_hook

from hookscope.comparison import Comparison, PairedCall, compare
from hookscope.hooks import call_key
from hookscope.models import LoadedModel, load_model
from hookscope.models.torchvision_builders import calibration_pictures, quantize
from tests.comparison.example import relative
from tests.helpers import seeded

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.ao.quantization is deprecated


class Residual(nn.Module):
    """A convolution with BatchNorm and ReLU, another whose result is added, and a classifier; ready to be quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = quantization.QuantStub(), quantization.DeQuantStub()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.skip = nn.quantized.FloatFunctional()
        self.last, self.pool, self.fc = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(self.quant(x))))
        x = self.last(self.skip.add(x, self.bn2(self.conv2(x))))
        answer: Tensor = self.dequant(self.fc(torch.flatten(self.pool(x), 1)))
        return answer

    def fuse_model(self, is_qat: bool) -> None:
        quantization.fuse_modules(self, [["conv1", "bn1", "relu"], ["conv2", "bn2"]], inplace=True)


@pytest.fixture(scope="module")
def batch() -> Tensor:
    return torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def fused() -> nn.Module:
    net: Any = seeded(Residual)
    net.fuse_model(is_qat=False)
    return net  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def quantized(fused: nn.Module, batch: Tensor) -> nn.Module:
    net: Any = copy.deepcopy(fused)
    net.qconfig = quantization.get_default_qconfig(torch.backends.quantized.engine)
    quantization.prepare(net, inplace=True)
    net(batch)
    return quantization.convert(net, inplace=True)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def found(quantized: nn.Module, batch: Tensor) -> Comparison:
    return compare(seeded(Residual), quantized, batch)


def row(found: Comparison, key: str) -> PairedCall:
    return next(each for each in found.calls if each.key == key)


def test_a_fused_layer_stands_for_the_run_that_it_computes(found: Comparison) -> None:
    rows = {each.key: (each.key_b, each.paired_by) for each in found.calls}
    assert (rows["relu"], rows["bn2"]) == (("conv1", "folded"), ("conv2", "folded"))
    assert not rows.keys() & {"conv1", "bn1", "conv2"}
    assert rows["skip.activation_post_process"] == ("skip.activation_post_process", "name")
    assert found.unpaired_a == ()


def test_its_differences_are_those_of_torch_ao_ns(
    found: Comparison, fused: nn.Module, quantized: nn.Module, batch: Tensor
) -> None:
    outputs = numeric_suite.compare_model_outputs(copy.deepcopy(fused), copy.deepcopy(quantized), batch)
    places = {"relu": "conv1", "bn2": "conv2", "fc": "fc"}
    for key, place in places.items():
        both = next(value for name, value in outputs.items() if name.startswith(f"{place}."))
        difference = row(found, key).difference
        assert difference is not None
        judged = relative(both["float"][0], both["quantized"][0])
        assert difference.relative_l2 == pytest.approx(judged, rel=1e-3), key


def by_hand(a: nn.Module, b: nn.Module, images: Tensor, found: Comparison) -> dict[str, float]:
    """The error of the layer of B alone, of each pair for which it was measured."""
    seen: list[dict[str, tuple[Tensor, Tensor]]] = []
    for net in (a, b):
        names, ran = {layer: name for name, layer in net.named_modules()}, Counter[nn.Module]()
        seen.append({})

        def keep(layer: nn.Module, args: Any, output: Tensor, names: Any = names, ran: Any = ran) -> None:
            seen[-1][call_key(names[layer], ran[layer])] = args[0].clone(), output.clone()
            ran[layer] += 1

        handle = register_module_forward_hook(keep)
        with torch.no_grad():
            net(images)
        handle.remove()
    errors = {}
    for each in found.calls:
        if each.isolated_l2 is None:
            continue
        value, scale = seen[0][each.key_b if each.paired_by == "folded" else each.key][0], seen[1][each.key_b][0]
        if scale.is_quantized:
            value = torch.quantize_per_tensor(value, scale.q_scale(), scale.q_zero_point(), scale.dtype)
        with torch.no_grad():
            output = b.get_submodule(each.b.name)(value)
        errors[each.key] = relative(seen[0][each.key][1], output)
    return errors


def test_the_error_of_a_layer_alone_is_that_of_a_float_input_quantized_for_it(
    found: Comparison, quantized: nn.Module, batch: Tensor
) -> None:
    judged = by_hand(seeded(Residual), quantized, batch, found)
    assert judged.keys() == {"quant", "relu", "bn2", "last", "pool", "fc", "dequant"}
    for key, alone in judged.items():
        assert row(found, key).isolated_l2 == pytest.approx(alone, rel=1e-9), key


def test_a_layer_that_is_quantized_badly_adds_most(quantized: nn.Module, batch: Tensor) -> None:
    faulty: Any = copy.deepcopy(quantized)
    faulty.conv2.scale *= 8  # so its output has sixteen levels
    found = compare(seeded(Residual), faulty, batch)
    assert found.answer.most == "bn2"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
def test_the_layers_of_real_models_alone_are_those_quantized_one_at_a_time(name: str) -> None:
    a, b = (with_statistics(load_model(model, weights="none")) for model in (name, f"quantized_{name}"))
    images = calibration_pictures(a)[:4]
    b = quantize(b)
    found = compare(a, b, images)
    judged = by_hand(a.model, b.model, images, found)
    assert len(judged) == sum(each.isolated_l2 is not None for each in found.calls) > 20
    for each in found.calls:
        if each.isolated_l2 is not None:
            assert each.isolated_l2 == pytest.approx(judged[each.key], rel=1e-9), each.key
    assert found.answer.most == max(judged, key=lambda key: judged[key])


def with_statistics(net: LoadedModel) -> LoadedModel:
    """The model with the statistics of synthetic pictures in its BatchNorms: with those of no picture values vanish."""
    for layer in net.model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None
            layer.train()
    with torch.no_grad():
        net.model(calibration_pictures(net))
    net.model.eval()
    return net
