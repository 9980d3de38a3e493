"""Tests of what a user's file declares about the input of its model."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hookscope.cli.main import main
from hookscope.errors import HookscopeError
from hookscope.hooks import capture
from hookscope.images import read_picture
from hookscope.models import load_model
from hookscope.tracing import list_layers, listing, rows_of_type
from hookscope.verification import noise_pictures, verify
from tests.helpers import refused

CAT = Path(__file__).parents[2] / "samples" / "cat.jpg"
NETS = """
import torch
from torch import nn
from torchvision import transforms as T


def net(channels=3):
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )


class PictureAndWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.words = net(), nn.Embedding(5, 3)

    def forward(self, *, pixel_values, input_ids):
        return {"logits": self.body(pixel_values) + self.words(input_ids).mean(1)}


class OneDictionary(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = net()

    def forward(self, batch):
        return self.body(batch["image"])


class Clips(nn.Module):
    input_size = 24

    def __init__(self):
        super().__init__()
        self.body = net()

    def forward(self, clips):
        return self.body(clips.flatten(0, 1)).unflatten(0, clips.shape[:2]).mean(1)

    def preprocess(self, picture):
        raise AssertionError("a method of the model, not a declaration")
"""


@pytest.fixture
def declare(tmp_path, monkeypatch):
    """A function from the lines that follow the networks to the MODEL that names ``make`` in that file."""
    monkeypatch.chdir(tmp_path)

    def write(lines, name="make"):
        (tmp_path / "nets.py").write_text(NETS + lines)
        return f"nets.py:{name}"

    return write


KEYWORDS = """
def make():
    return PictureAndWords()


input_size = 20


def model_inputs(pictures):
    words = torch.ones(len(pictures), 2, dtype=torch.long, device=pictures.device)
    return {"pixel_values": pictures, "input_ids": words}
"""
OF_A_CLASS = """
class Captions(PictureAndWords):
    input_size = 20

    @staticmethod
    def model_inputs(pictures):
        return {"pixel_values": pictures, "input_ids": torch.ones(len(pictures), 2, dtype=torch.long)}

    def preprocess(self, picture):
        return None


make = Captions
"""
DECLARED = {
    "grey pictures": ("def make(): return net(1)\nmake.input_size = (1, 28, 26)", (1, 28, 26)),
    "five channels": ("def make(): return net(5)\ninput_size = (5, 24, 24)", (5, 24, 24)),
    "a volume": (
        "def make(): return nn.Sequential(nn.Conv3d(2, 4, 3), nn.ReLU())\ninput_size = (2, 6, 20, 20)",
        (2, 6, 20, 20),
    ),
    "keywords": (KEYWORDS, (3, 20, 20)),
    "attributes of a class": (OF_A_CLASS, (3, 20, 20)),
    "one dictionary": (
        "make = OneDictionary\ninput_size = (18, 18)\nmodel_inputs = lambda pictures: ({'image': pictures},)",
        (3, 18, 18),
    ),
    "frames before channels": (
        "make = Clips\nmodel_inputs = lambda pictures: pictures[:, None].expand(-1, 2, -1, -1, -1)",
        (3, 24, 24),
    ),
    "pictures for a model of volumes": (
        "def make(): return nn.Sequential(nn.Conv3d(3, 4, (1, 3, 3)), nn.ReLU())\ninput_size = (3, 16, 18)\n"
        "model_inputs = lambda pictures: pictures[:, :, None]",
        (3, 16, 18),
    ),
    "a preprocess": ("make = net\npreprocess = T.Compose([T.Resize((12, 14)), T.ToTensor()])", (3, 12, 14)),
}


@pytest.mark.parametrize(("lines", "shape"), DECLARED.values(), ids=DECLARED)
def test_what_the_file_declares_is_what_list_layers_and_verify_run_on(declare, lines, shape):
    model = declare(lines)
    net = load_model(model, device="cpu")
    assert net.preprocess.input_shape == shape
    size, trace = listing(model)
    assert size == shape[-2:]
    assert all(check.holds is not False for check in verify(net, noise_pictures(net)))
    pictures = noise_pictures(net)
    with capture(net.model, "all", ("all",)) as activations, torch.no_grad():
        net.model(*net.inputs(*pictures))
    assert len(activations) == sum(row.index is not None for row in rows_of_type(trace, ("all",)))


def test_keyword_inputs_are_what_the_model_gets_and_the_layers_keep_their_names(declare):
    net = load_model(declare(KEYWORDS), device="cpu")
    pictures = torch.rand(2, 3, 20, 20)
    plain = load_model(declare("make = PictureAndWords"), device="cpu").model
    plain.load_state_dict(net.model.state_dict())
    truth = plain(pixel_values=pictures, input_ids=torch.ones(2, 2, dtype=torch.long))["logits"]
    assert torch.equal(net.model(pictures)["logits"], truth)
    assert [name for name, _ in net.model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert type(net.model).__name__ == "PictureAndWords"


def test_a_declared_preprocess_prepares_the_picture_and_a_mode_replaces_it(declare):
    lines = """
normalise = T.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
make = net
preprocess = T.Compose([T.Resize(40), T.CenterCrop(32), T.ToTensor(), normalise])
"""
    model = declare(lines)
    picture = read_picture(str(CAT))
    net = load_model(model, device="cpu")
    from torchvision import transforms

    unscaled = transforms.Compose([transforms.Resize(40), transforms.CenterCrop(32), transforms.ToTensor()])
    truth = unscaled(picture.image)
    tensor = net.prepare(picture)
    mean, std = torch.tensor([0.5, 0.4, 0.3])[:, None, None], torch.tensor([0.2, 0.3, 0.4])[:, None, None]
    assert torch.allclose(tensor, (truth - mean) / std, atol=1e-6)
    seen = transforms.functional.to_tensor(net.preprocess.denormalise(tensor))
    assert (seen - truth).abs().max() <= 1 / 255 + 1e-6
    assert net.preprocess.describe() == "preprocess of nets.py, mean 0.5 0.4 0.3, std 0.2 0.3 0.4"
    stretched = load_model(model, device="cpu", preprocess="stretch", input_size=(16, 16))
    assert stretched.prepare(picture).shape == (3, 16, 16)
    assert stretched.preprocess.describe() == "stretch 16x16, range 0..1"


WORDS = {
    "'half'": "resize 256, crop 224, mean 0.5, std 0.5",
    "{'resize': 'pad', 'mean': 0.5, 'std': (0.1, 0.2, 0.3)}": "pad to 224x224, mean 0.5, std 0.1 0.2 0.3",
    "{'range': '-1..1'}": "range -1..1, assumed resize 256, crop 224",
    "models.ResNet50_Weights.IMAGENET1K_V2.transforms()": "resize 232, crop 224, ImageNet mean and std",
    "v2.Compose([v2.Resize((12, 14)), v2.ToImage(), v2.ToDtype(torch.float, True), v2.Normalize([0.4], [0.3])])": (
        "preprocess of nets.py, mean 0.4, std 0.3"
    ),
    "torch.nn.Sequential(T.Resize((12, 14)), v2.PILToTensor(), v2.ToDtype(torch.float, True), T.Normalize(0.4, 0.3))": (
        "preprocess of nets.py, mean 0.4, std 0.3"
    ),
}


@pytest.mark.parametrize(("value", "words"), WORDS.items())
def test_a_file_declares_its_preprocessing_in_words_or_with_transforms_of_torchvision(declare, value, words):
    imports = "from torchvision import models\nfrom torchvision.transforms import v2\nmake = net\n"
    net = load_model(declare(f"{imports}preprocess = {value}"), device="cpu")
    assert net.preprocess.describe() == words
    picture = read_picture(str(CAT))
    tensor = net.prepare(picture)
    assert type(tensor) is torch.Tensor and torch.isfinite(net.model(*net.inputs(tensor))).all()
    if "12, 14" in value:
        small = np.asarray(picture.image.resize((14, 12), Image.Resampling.BILINEAR), dtype=int)
        assert np.abs(np.asarray(net.preprocess.denormalise(tensor), dtype=int) - small).max() <= 1


def test_maps_are_drawn_on_the_picture_that_a_declared_preprocess_makes(declare, capsys):
    model = declare("make = net\npreprocess = T.Compose([T.CenterCrop(32), T.ToTensor()])")
    net, picture = load_model(model, device="cpu"), Image.new("RGB", (64, 48), "red")
    shown, box = net.preprocess.shown(picture, net.preprocess(picture))
    assert (shown.size, box) == ((32, 32), (0.0, 0.0, 32.0, 32.0))
    with pytest.raises(SystemExit) as end:
        main(["cam", model, str(CAT), "-o", "cam.png"])
    assert end.value.code == 0
    assert "preprocess of nets.py" not in capsys.readouterr().err


REFUSED = {
    "a wrong word": ("make = net\npreprocess = 'hlaf'", "preprocess of nets.py: no preprocessing 'hlaf'; there are"),
    "the name of a function": (
        "make = net\npreprocess = 'a.py:f'",
        "preprocess of nets.py: 'a.py:f' names a function; import the function and name it itself",
    ),
    "a wrong key": (
        "make = net\npreprocess = {'average': 1}",
        "preprocess of nets.py: unknown key 'average'",
    ),
    "a number": (
        "make = net\npreprocess = 3",
        "preprocess of nets.py is not a function but int; make it a function of",
    ),
    "no size": ("make = net\ninput_size = 'big'", "input_size in nets.py is 'big'; set it to (H, W), (C, H, W)"),
    "no positive size": ("make = net\ninput_size = (3, 0, 8)", "give numbers above 0"),
    "no function": ("make = net\nmodel_inputs = 3", "model_inputs in nets.py is not a function but int"),
    "preprocess fails": (
        "make = net\ndef preprocess(picture): return 1 / 0",
        "preprocess of nets.py failed on an image: ZeroDivisionError: division by zero",
    ),
    "preprocess ends the program": (
        "make = net\ndef preprocess(picture): raise SystemExit(0)",
        "preprocess of nets.py failed on an image: SystemExit: 0",
    ),
    "no tensor": (
        "make = net\npreprocess = lambda picture: [1]",
        "preprocess of nets.py returned list; return a tensor (C, H, W) of one image",
    ),
    "no such keyword": (
        "make = net\nmodel_inputs = lambda pictures: {'nope': pictures}",
        "keyword argument 'nope'; set input_size, preprocess or model_inputs next to its factory",
    ),
    "a sentence": (
        "def refuse(x): raise ValueError('Wrong.')\ndef make():\n    m = net()\n    m.forward = refuse\n    return m",
        "forward() failed on 1x3x224x224: ValueError: Wrong, at nets.py:43 in refuse; set input_size",
    ),
    "nothing declared": (
        "make = PictureAndWords",
        "takes 1 positional argument but 2 were given; set model_inputs next to its factory: it makes what forward",
    ),
    "a mapping": (
        "class Mapped(nn.Module):\n    def forward(self, batch): return batch['image'].mean()\nmake = Mapped",
        "forward(batch) takes no image tensor; forward() failed on 1x3x224x224: IndexError: too many indices",
    ),
    "a mapping with a short name": (
        "class Mapped(nn.Module):\n    def forward(self, batch): return batch.get('x').mean()\nmake = Mapped",
        "forward(batch) takes no image tensor; forward() failed on 1x3x224x224: AttributeError: 'Tensor' object",
    ),
}


@pytest.mark.parametrize(("lines", "message"), REFUSED.values(), ids=REFUSED)
def test_an_error_names_what_the_file_should_declare(declare, lines, message):
    with refused(HookscopeError, message, part="holds"):
        listing(declare(lines))


def test_a_photograph_does_not_become_five_channels_by_itself(declare):
    net = load_model(declare("def make(): return net(5)\ninput_size = (5, 24, 24)"), device="cpu")
    with pytest.raises(HookscopeError, match="takes 5 channels, and an image has 3; give preprocess=function"):
        net.prepare(read_picture(str(CAT)))
    own = "def make(): return net(5)\npreprocess = lambda p: T.functional.to_tensor(p.resize((9, 9)))[[0, 1, 2, 0, 1]]"
    net = load_model(declare(own), device="cpu")
    tensor = net.prepare(read_picture(str(CAT)))
    assert tensor.shape == (5, 9, 9)
    assert net.preprocess.denormalise(tensor).mode == "RGB"


def test_a_size_that_a_declared_preprocess_does_not_make_is_refused(declare):
    model = declare("make = net\npreprocess = T.Compose([T.Resize((12, 14)), T.ToTensor()])")
    net = load_model(model, device="cpu", input_size=(20, 20))
    with pytest.raises(HookscopeError, match="makes an input of 12x14, and the input size is 20x20"):
        net.prepare(read_picture(str(CAT)))


@pytest.mark.parametrize("of", ["config", "timm"])
def test_a_size_that_the_model_itself_states_is_the_default(declare, of):
    line = "m.config = type('Config', (), {'image_size': [30, 31]})()"
    if of == "timm":
        line = "m.default_cfg = {'input_size': (3, 30, 31)}"
    model = declare(f"def make():\n    m = net()\n    {line}\n    return m\n")
    assert load_model(model, device="cpu").preprocess.input_shape == (3, 30, 31)
    assert len(list_layers(load_model(model, device="cpu").model, (30, 31))) == 1


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_is_taken_from_its_wrapper(declare):
    net = load_model(declare("def make(): return torch.compile(net(), backend='eager')"), device="cpu")
    assert net.notes == ("nets.py:make is compiled by torch.compile: this is the eager model inside",)
    assert [name for name, _ in net.model.named_children()] == ["0", "1", "2", "3", "4"]
