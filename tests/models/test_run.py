"""What the code of a user raises: the likely cause, type and message, file and line of that code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hookscope.errors import InputError, ModelError
from hookscope.models.load import load_model
from hookscope.models.run import model_errors_as_input_errors
from hookscope.scores import predict
from hookscope.tracing.cached_summary import listing

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
        ", at {file}:12 in forward; try another --input-size, or set input_size",
    ),
    "five": (
        "layer 'inner.0' (Conv2d) takes 5 channels and got 3; forward() failed on 1x3x224x224: RuntimeError: Given ",
        ", at {file}:12 in forward; ",
    ),
    "small": ("layer 'inner.0' (Conv2d) needs a larger input; forward() failed", "try another --input-size, or set"),
    "Own": (
        "forward() failed on 1x3x224x224: TypeError: no number: a Tensor",
        ", at {beside}:2 in double; set input_size",
    ),
    "Key": (
        "forward() failed on 1x3x224x224: RuntimeError: my own mistake, at {file}:20 in forward; --traceback shows",
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
    assert str(caught.value).endswith("; --traceback shows all")


def test_a_file_of_the_current_folder_is_named_without_its_folder(nets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(nets.parent)
    with pytest.raises(
        InputError, match=r"^nets\.py:Key: forward\(\) failed on 1x3x224x224: .*, at nets\.py:20 in forw"
    ):
        listing("nets.py:Key")


def test_a_factory_that_raises_in_another_file_names_that_file(nets: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(f"{nets}:broken")
    beside = nets.with_name("helpers_beside.py")
    said = f"{nets}:broken failed: TypeError: no number: a int, at {beside}:2 in double; --traceback shows all"
    assert str(caught.value) == said


def test_a_model_of_torchvision_has_no_line_of_a_user() -> None:
    net = load_model("squeezenet1_1", weights="none")
    with pytest.raises(InputError) as caught:
        predict(net, [torch.zeros(3, 2, 2)])
    assert " at " not in str(caught.value) and str(caught.value).endswith("; try another --input-size")


def test_a_layer_without_a_kernel_for_the_data_type_is_named() -> None:
    net, inputs = torch.nn.Sequential(torch.nn.MaxPool2d(2)), torch.zeros(1, 3, 4, 4).to(torch.float8_e4m3fn)
    said = r"^net: layer '0' \(MaxPool2d\) has no max_pool2d for Float8_e4m3fn on this device; forward\(\) failed"
    with pytest.raises(InputError, match=said), model_errors_as_input_errors("net", inputs):
        net(inputs)
