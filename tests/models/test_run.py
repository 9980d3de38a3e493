"""What the code of a user raises: the likely cause, type and message, file and line of that code."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import regnet_y_400mf

from hookscope.errors import InputError, ModelError
from hookscope.hooks.model_state import ModelSnapshot
from hookscope.models.load import load_model
from hookscope.models.run import build_on_meta, meta_forward, model_errors_as_input_errors, quiet_and_seeded
from hookscope.scores import predict
from hookscope.tracing.cached_summary import listing
from tests.helpers import refused


def test_a_dry_model_has_the_shapes_of_a_real_one() -> None:
    with quiet_and_seeded(0):
        dry = build_on_meta(lambda: regnet_y_400mf(weights=None)).state_dict()  # its builder computes with tensors
    real = load_model("regnet_y_400mf", weights="none").model.state_dict()
    assert [(key, value.shape, value.dtype, value.device.type) for key, value in dry.items()] == [
        (key, value.shape, value.dtype, "meta") for key, value in real.items()
    ]


def test_a_model_larger_than_memory_is_built_at_once() -> None:
    start = time.process_time()
    model = build_on_meta(lambda: nn.Sequential(*(nn.Linear(10**6, 10**6) for _ in range(20))))
    assert sum(parameter.numel() for parameter in model.parameters()) > 2 * 10**13
    assert meta_forward(model, (torch.zeros(3, 10**6),)).shape == (3, 10**6)
    assert time.process_time() - start < 5


def test_building_dry_leaves_torch_as_it_was() -> None:
    with pytest.raises(ZeroDivisionError):
        build_on_meta(lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    assert torch.empty(1).device.type == "cpu"


def test_a_dry_pass_leaves_the_model_unchanged() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
    before = ModelSnapshot(net)
    ids = [id(parameter) for parameter in net.parameters()]
    out = meta_forward(net, (torch.full((2, 3, 9, 8), float("nan")),))
    assert out.is_meta and out.shape == (2, 4, 7, 6) and not out.requires_grad
    assert before.changes() == []
    assert [id(parameter) for parameter in net.parameters()] == ids


def test_tensors_inside_arguments_go_along() -> None:
    class Many(nn.Module):
        def forward(self, pictures: list[Tensor], extra: dict[str, Tensor], factor: int) -> Tensor:
            return torch.stack(pictures).sum(0) * extra["scale"] * factor

    out = meta_forward(Many(), ([torch.zeros(3, 4), torch.zeros(3, 4)], {"scale": torch.zeros(4)}, 2))
    assert (out.shape, out.device.type) == ((3, 4), "meta")


def test_tied_weights_stay_tied() -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    assert meta_forward(net, (torch.zeros(2, 4),)).shape == (2, 4)
    assert net[1].weight is net[0].weight and not net[0].weight.is_meta


def test_a_model_that_needs_values_raises_and_stays_unchanged() -> None:
    class Values(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x)[: int(x.sum())]

    net = Values()
    with pytest.raises(Exception, match="meta"):
        meta_forward(net, (torch.zeros(1, 3, 2, 2),))
    assert not net.conv.weight.is_meta


NETS = """\
from torch import nn
from helpers_beside import double

def net(channels=3, features=4, out=8):
    return nn.Sequential(nn.Conv2d(channels, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, out))

class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, x):
        return self.inner(x)

class Own(nn.Module):
    def forward(self, x):
        return double(x)

class Key(nn.Module):
    def forward(self, x):
        raise RuntimeError("my own mistake")

def narrow(): return Outer(net(features=9))
def five(): return Outer(net(channels=5))
def small(): return Outer(nn.Sequential(nn.Conv2d(3, 4, 300)))
def broken(): return double(3)
"""
REFUSED = {
    "narrow": (
        "layer 'inner.3' (Linear) takes 9 features and got 4; forward() failed on 1x3x224x224: RuntimeError: ",
        ", at {file}:12 in forward; try another input_size, or set input_size",
    ),
    "five": (
        "layer 'inner.0' (Conv2d) takes 5 channels and got 3; forward() failed on 1x3x224x224: RuntimeError: Given ",
        ", at {file}:12 in forward; ",
    ),
    "small": ("layer 'inner.0' (Conv2d) needs a larger input; forward() failed", "try another input_size, or set"),
    "Own": (
        "forward() failed on 1x3x224x224: TypeError: no number: a Tensor",
        ", at {beside}:2 in double; set input_size",
    ),
    "Key": (
        "forward() failed on 1x3x224x224: RuntimeError: my own mistake, at {file}:20 in forward; its cause shows",
        "",
    ),
}


@pytest.fixture
def nets(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "helpers_beside.py").write_text(
        "def double(x):\n    raise TypeError(f'no number:\\n a {type(x).__name__}')\n"
    )
    (tmp_path / "nets.py").write_text(NETS)
    yield tmp_path / "nets.py"
    sys.modules.pop("helpers_beside", None)


@pytest.mark.parametrize("factory", REFUSED)
def test_an_error_of_forward_says_cause_type_message_and_line(nets: Path, factory: str) -> None:
    net = load_model(f"{nets}:{factory}")
    picture = torch.zeros(1, 3, 224, 224)
    with pytest.raises(InputError) as caught, model_errors_as_input_errors(net.name, picture):
        net.model(picture)
    first, second = (text.format(file=nets, beside=nets.with_name("helpers_beside.py")) for text in REFUSED[factory])
    assert str(caught.value).startswith(f"{nets}:{factory}: {first}")
    assert second in str(caught.value)
    assert str(caught.value).endswith("; its cause shows all")


def test_a_file_of_the_current_folder_is_named_without_its_folder(nets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(nets.parent)
    with pytest.raises(
        InputError, match=r"^nets\.py:Key: forward\(\) failed on 1x3x224x224: .*, at nets\.py:20 in forw"
    ):
        listing("nets.py:Key")


def test_a_factory_that_raises_in_another_file_names_that_file(nets: Path) -> None:
    beside = nets.with_name("helpers_beside.py")
    said = f"{nets}:broken failed: TypeError: no number: a int, at {beside}:2 in double; its cause shows all"
    with refused(ModelError, said):
        load_model(f"{nets}:broken")


def test_a_model_of_torchvision_has_no_line_of_a_user() -> None:
    net = load_model("squeezenet1_1", weights="none")
    with pytest.raises(InputError) as caught:
        predict(net, [torch.zeros(3, 2, 2)])
    assert " at " not in str(caught.value) and str(caught.value).endswith("; try another input_size")


def test_a_layer_without_a_kernel_for_the_data_type_is_named() -> None:
    net, inputs = torch.nn.Sequential(torch.nn.MaxPool2d(2)), torch.zeros(1, 3, 4, 4).to(torch.float8_e4m3fn)
    said = r"^net: layer '0' \(MaxPool2d\) has no max_pool2d for Float8_e4m3fn on this device; forward\(\) failed"
    with pytest.raises(InputError, match=said), model_errors_as_input_errors("net", inputs):
        net(inputs)
