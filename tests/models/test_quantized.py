"""``quantized:NAME``: torchvision's models with layers of 8 bits, made from the float weights of the same name."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hookscope.errors import ModelError, UsageError, WeightsError
from hookscope.models import load_model, torchvision_builders
from hookscope.models.loaded import LoadedModel
from hookscope.models.torchvision_builders import calibration_pictures

NAME = "shufflenet_v2_x0_5"


@pytest.fixture(scope="module")
def float_net() -> LoadedModel:
    return load_model(NAME, weights="none", seed=3)


@pytest.fixture(scope="module")
def quantized() -> LoadedModel:
    return load_model(f"quantized:{NAME}", weights="none", seed=3)


def folded(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> Tensor:
    """The weights of a convolution with the BatchNorm behind it in them, by hand."""
    assert norm.running_var is not None
    return conv.weight * (norm.weight / (norm.running_var + norm.eps).sqrt())[:, None, None, None]


def test_its_weights_are_those_of_the_float_model_with_the_same_seed(
    float_net: LoadedModel, quantized: LoadedModel
) -> None:
    own = dict(quantized.model.named_modules())
    pairs = [(name, layer) for name, layer in own.items() if type(layer).__name__ in ("Conv2d", "ConvReLU2d")]
    assert len(pairs) == 56
    for name, layer in pairs:
        block, _, number = name.rpartition(".")
        conv = float_net.model.get_submodule(name)
        norm = float_net.model.get_submodule(f"{block}.{int(number) + 1}")
        weight = layer.weight()  # type: ignore[operator]
        step = weight.q_per_channel_scales()[:, None, None, None]
        apart = (weight.dequantize() - folded(conv, norm)).abs() / step  # type: ignore[arg-type]
        assert float(apart.detach().max()) <= 0.501, name


def test_its_answers_are_near_those_of_the_float_model(float_net: LoadedModel, quantized: LoadedModel) -> None:
    pictures = calibration_pictures(float_net)[:2]
    with torch.no_grad():
        a, b = float_net.model(pictures), quantized.model(pictures)
    assert 0 < float((a - b).norm() / a.norm()) < 0.05


def test_it_says_that_it_was_quantized_here(quantized: LoadedModel) -> None:
    said = f"quantized:{NAME} is quantized here from float weights, with ranges of 8 synthetic pictures"
    assert (quantized.name, quantized.weights) == (f"quantized:{NAME}", "random (seed 3)")
    assert quantized.notes == (said,)


def test_a_float_checkpoint_is_quantized(float_net: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "own.pth"
    net = torchvision_builders.Architecture.of(NAME).build(num_classes=3)
    torch.save(net.state_dict(), path)
    loaded = load_model(f"quantized:{NAME}", weights=path)
    with torch.no_grad():
        assert loaded.model(calibration_pictures(loaded)[:1]).shape == (1, 3)
    assert loaded.weights == "own.pth"


def test_without_trained_weights_auto_takes_random_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise WeightsError("no network")

    monkeypatch.setattr(torchvision_builders, "fetch", refuse)
    assert load_model(f"quantized:{NAME}").weights == "random (seed 0)"
    with pytest.raises(WeightsError, match="no weights IMAGENET1K_FBGEMM_V1 for quantized_shufflenet_v2_x0_5"):
        load_model(f"quantized:{NAME}", weights="default")


@pytest.mark.parametrize(("name", "nearest"), [("resnet17", "quantized:resnet18"), ("", "quantized:")])
def test_a_model_that_torchvision_cannot_quantize_is_an_error(name: str, nearest: str) -> None:
    with pytest.raises(ModelError, match=f"no model 'quantized:{name}'; nearest: .*{nearest}"):
        load_model(f"quantized:{name}")


def test_it_runs_on_the_cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match="cannot run on 'cuda'; it runs on the CPU only; give device='cpu'"):
        load_model(f"quantized:{NAME}", weights="none", device="cuda")
    assert load_model(f"quantized:{NAME}", weights="none", input_size=(32, 32)).device == "cpu"
