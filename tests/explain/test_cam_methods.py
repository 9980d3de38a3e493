"""Every method of class activation mapping against its formula and against other implementations."""

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from numpy.typing import NDArray
from torch import Tensor, nn

from hookscope.errors import LayerError, NoMapError, TargetError
from hookscope.explain.cam import class_activation_maps
from hookscope.explain.cam_maps import fuse_maps
from hookscope.explain.cam_methods import ATTENTION_METHODS, CAM_METHODS, CamInputs, xgradcam
from hookscope.hooks.model_state import ModelSnapshot
from tests.attention.nets import Vit, fused, picture as photo, plain, swin, vit, vit_of_torch
from tests.explain.nets import picture, small
from tests.helpers import hooks_on, seeded
from tests.nets import named

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of libraries that grad-cam imports
    import pytorch_grad_cam as judge
    from captum.attr import LayerGradCam


X = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])


def paper(first: tuple[float, float] = (1, 0), second: tuple[float, float] = (-1, 5)) -> nn.Sequential:
    """Channels ``a x + b``, by default ``x`` and ``5 - x``; the score of class 1 is ``sum G A``, that of class 0 its negative."""  # noqa: E501
    net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten(), nn.Linear(8, 2, bias=False))
    gradient = torch.tensor([1.0, 0, 0, 3, -2, 0, 0, 0])  # G_0 = [[1, 0], [0, 3]], G_1 = [[-2, 0], [0, 0]]
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([first[0], second[0]]).reshape(2, 1, 1, 1))
        net[0].bias.copy_(torch.tensor([first[1], second[1]]))
        net[2].weight.copy_(torch.stack([-gradient, gradient]))
    return net


def by(method: str, net: nn.Module | None = None, target: int = 1) -> list[list[float]]:
    [cam] = class_activation_maps(net or paper(), X, "0", target, method)
    assert (cam.call.name, cam.method, cam.channels, cam.prediction.index) == ("0", method, 2, target)
    return cam.values.tolist()


SURE = 1 / (1 + math.exp(-9))  # scores 2 and -7 under the masks (x - 1) / 3 and 1 - that
ON_PAPER = {
    "gradcam": [[0, 0.5], [2, 3.5]],  # A_0 - A_1 / 2, cut off at 0
    "gradcam++": [[17 / 96, 34 / 96], [51 / 96, 68 / 96]],  # (1/12 + 3/32) A_0
    "hirescam": [[-7, 0], [0, 12]],
    "layercam": [[1, 0], [0, 12]],
    "xgradcam": [[0, 0.2], [2.3, 4.4]],  # 13/10 A_0 - 8/10 A_1
    "scorecam": [[SURE + 4 * (1 - SURE), 2 * SURE + 3 * (1 - SURE)], [3 * SURE + 2 * (1 - SURE), 4 * SURE + 1 - SURE]],
    "ablationcam": [[0, 0.4], [4.6, 8.8]],  # of a score of 5, without A_0 -8, without A_1 13: 13/5 A_0 - 8/5 A_1
}


@pytest.mark.parametrize("method", ON_PAPER)
def test_the_map_is_the_one_from_paper(method: str) -> None:
    assert by(method) == [pytest.approx(row, abs=2e-6) for row in ON_PAPER[method]]


def test_eigencam_is_the_first_component_high_where_the_activation_is_large() -> None:
    length = math.sqrt(5)  # of (1, 2): A_0 = x, A_1 = 2 x
    expected = [[-1.5 * length, -0.5 * length], [0.5 * length, 1.5 * length]]
    rising = by("eigencam", paper((1, 0), (2, 0)))
    assert rising == [pytest.approx(row, abs=1e-5) for row in expected]
    falling = by("eigencam", paper((-1, 5), (-2, 10)))  # largest where x is smallest
    assert falling == [pytest.approx([-value for value in row], abs=1e-5) for row in expected]
    assert by("eigencam", paper((1, 0), (2, 0)), target=0) == rising  # it knows no class
    negative = by("eigencam", paper((-1, 0), (-2, 0)))  # -1 to -4: large means far from 0
    assert negative == rising


def test_a_gradient_of_nothing_gives_a_map_of_nothing_and_a_negative_score_is_not_turned_round() -> None:
    net = paper()
    with torch.no_grad():
        net[2].weight.zero_()
    for method in ("gradcam", "gradcam++", "hirescam", "layercam", "xgradcam", "ablationcam"):
        [cam] = class_activation_maps(net, X, "0", 1, method)
        assert cam.is_empty and cam.peak is None and cam.unreached is CAM_METHODS[method].gradient
    assert by("ablationcam", target=0) == [pytest.approx([3.8, 0], abs=1e-6), [0, 0]]


def test_every_method_cites_its_paper() -> None:
    for name, method in CAM_METHODS.items():
        text = method.weigh.__doc__ or ""
        assert "arXiv" in text and "``" in text, name


JUDGES = {
    "gradcam": judge.GradCAM,
    "gradcam++": judge.GradCAMPlusPlus,
    "hirescam": judge.HiResCAM,
    "layercam": judge.LayerCAM,
    "xgradcam": judge.XGradCAM,
    "eigencam": judge.EigenCAM,
}


def judged(method: str, net: nn.Module, layer: str, x: Tensor, index: int) -> NDArray[np.float32]:
    """The raw map of grad-cam, before it is brought to 0..1."""
    target = judge.utils.model_targets.ClassifierOutputTarget(index)
    module = net.get_submodule(layer)
    with JUDGES[method](net, [module]) as cam:
        cam.activations_and_grads(x)[0, index].backward()
        [activation] = (kept.numpy() for kept in cam.activations_and_grads.activations)
        [gradient] = (kept.numpy() for kept in cam.activations_and_grads.gradients)
        with np.errstate(all="ignore"):
            raw = cam.get_cam_image(x, module, [target], activation, gradient, False)[0]
    net.zero_grad()
    return np.maximum(raw, 0) if CAM_METHODS[method].relu else raw


def off(ours: NDArray[Any], theirs: NDArray[Any]) -> float:
    """The largest difference, as a share of the largest value."""
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def random_net(name: str) -> nn.Module:
    return seeded(lambda: torchvision.models.get_model(name, weights=None, num_classes=10))


# each where grad-cam is right: nothing works in place on what the layer put out
WHERE_IT_IS_RIGHT = {
    "resnet18": ("layer4", "layer3.0.conv1", "layer2"),
    "densenet121": ("features.denseblock4", "features.transition2.conv", "features.denseblock1"),
    "mobilenet_v2": ("features.18", "features.10.conv.1", "features.4.conv.0"),
    "mobilenet_v3_small": ("features.12", "features.6"),
    "vgg11_bn": ("features.28", "features.25", "features.13"),
    "vgg11": ("features.20", "features.19", "features.12"),
}
AGREES = [(name, WHERE_IT_IS_RIGHT[name][:2], 64) for name in ("resnet18", "mobilenet_v2")]
AGREES += [pytest.param(*at, size, marks=pytest.mark.slow) for at in WHERE_IT_IS_RIGHT.items() for size in (64, 96)]


@pytest.mark.parametrize("method", JUDGES)
@pytest.mark.parametrize(("name", "layers", "size"), AGREES)
def test_grad_cam_agrees(name: str, layers: tuple[str, ...], size: int, method: str) -> None:
    net, x = random_net(name), picture(size, size)
    if method == "xgradcam":  # which divides by sums of a channel that are nearly 0 with random weights
        net, x = net.double(), x.double()
    for layer in layers:
        # the first class with a map that is not all zero: random weights often speak against a class everywhere
        maps = ((index, judged(method, net, layer, x, index)) for index in range(10))
        index, theirs = next((index, theirs) for index, theirs in maps if (theirs > 0).any())
        [ours] = class_activation_maps(net, x, layer, index, method)
        assert (ours.call.name, ours.prediction.index) == (layer, index)
        if method == "eigencam" and (ours.values * theirs).sum() < 0:
            theirs = -theirs  # whose sign is that of LAPACK
        assert off(ours.values, theirs) < 1e-5, (method, name, layer)


def captums(net: nn.Module, layer: str, x: Tensor, index: int) -> NDArray[np.float32]:
    kept = LayerGradCam(net, net.get_submodule(layer)).attribute(x, index, relu_attributions=True)
    assert isinstance(kept, Tensor)
    values: NDArray[np.float32] = kept[0, 0].detach().numpy()
    return values


@pytest.mark.parametrize("method", JUDGES)
def test_before_a_relu_in_place_grad_cam_agrees_on_the_same_net_without(method: str) -> None:
    net, x = small(), picture()
    [ours] = class_activation_maps(net, x, "second", 2, method)
    theirs = judged(method, small(inplace=False), "second", x, 2)
    theirs = -theirs if method == "eigencam" and (ours.values * theirs).sum() < 0 else theirs
    assert off(ours.values, theirs) < 1e-5
    if method == "gradcam":  # on the net itself captum agrees, and grad-cam does not
        assert off(ours.values, captums(net, "second", x, 2)) < 1e-5
        assert off(ours.values, judged("gradcam", net, "second", x, 2)) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vgg11", "alexnet", "squeezenet1_1"])
def test_captum_agrees_on_convolutions_before_relus_in_place(name: str) -> None:
    net, x = random_net(name), picture(96, 96)
    convolutions = [layer for layer, module in net.named_modules() if isinstance(module, nn.Conv2d)]
    for layer in convolutions[-4:-1]:
        [ours] = class_activation_maps(net, x, layer, 2, "gradcam")
        assert off(ours.values, captums(net, layer, x, 2)) < 1e-5, layer
    if name == "vgg11":
        assert off(ours.values, judged("gradcam", net, layer, x, 2)) > 0.05


@pytest.fixture
def apart() -> nn.Module:
    """Nothing works in place, channels differ, and maps are smaller than the picture."""
    return seeded(
        lambda: named(
            first=nn.Conv2d(3, 7, 3, stride=2, padding=1),
            relu=nn.ReLU(),
            second=nn.Conv2d(7, 9, 3, padding=1),
            again=nn.ReLU(),
            mean=nn.AdaptiveAvgPool2d(1),
            flat=nn.Flatten(),
            head=nn.Linear(9, 4),
        ),
        seed=5,
    )


@pytest.mark.parametrize("layer", ["relu", "second"])
def test_grad_cams_score_cam_agrees(layer: str, apart: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    # grad-cam enlarges from corner to corner; between the middles of cells is what all the rest of the world does
    def enlarge(size: tuple[int, int]) -> nn.Module:
        return nn.Upsample(tuple(size), mode="bilinear", align_corners=False)

    monkeypatch.setattr(torch.nn, "UpsamplingBilinear2d", enlarge)
    monkeypatch.setattr("tqdm.tqdm", lambda values: values)
    x, module = 5 * picture(), apart.get_submodule(layer)
    target = judge.utils.model_targets.ClassifierOutputTarget(2)
    with judge.ScoreCAM(apart, [module]) as cam, torch.no_grad():
        cam.activations_and_grads(x)
        [activation] = (kept.numpy() for kept in cam.activations_and_grads.activations)
        # its own hooks would add the activations of the masked passes
        theirs = np.maximum(cam.get_cam_image(x, module, [target], activation, None, False)[0], 0)
    [ours] = class_activation_maps(apart, x, layer, 2, "scorecam")
    assert off(ours.values, theirs) < 1e-5


@pytest.mark.parametrize("method", ["scorecam", "ablationcam"])
def test_the_model_runs_once_for_a_layer_whatever_the_number_of_classes(method: str, apart: nn.Module) -> None:
    x, pictures = picture(), []
    apart.get_submodule("first").register_forward_hook(lambda module, args, output: pictures.append(len(args[0])))
    maps = class_activation_maps(apart, x, "first,second", "0,1,2,3", method, batch_size=5)
    shown = sum(pictures)
    pictures.clear()
    class_activation_maps(apart, x, "first,second", "0", method, batch_size=5)
    assert shown == sum(pictures)
    # the pass of the activations, then one image per channel; ablation copies the activation instead where it can
    assert shown == 1 + 7 + 9 if method == "scorecam" else shown < 1 + 7 + 9
    assert len(maps) == 8 and len({cam.values.tobytes() for cam in maps if not cam.is_empty}) > 2
    for cam in maps:
        [alone] = class_activation_maps(apart, x, cam.call.name, cam.prediction.index, method)
        assert np.allclose(cam.values, alone.values, rtol=0, atol=1e-5 * np.abs(alone.values).max())


def test_xgradcam_sums_channels_whose_values_cancel_in_double_precision() -> None:
    numbers = torch.Generator().manual_seed(0)
    activation, gradient = torch.randn(2, 4, 3000, 10, generator=numbers) * 1000
    activation[:, 1::2] = 0.01 - activation[:, ::2]
    given = CamInputs(activation, gradient, 1.0, lambda masks: masks, lambda: activation)
    ours, a, g = xgradcam(given), activation.double().numpy(), gradient.double().numpy()
    assert ours.dtype == torch.float32
    assert off(ours.numpy(), ((a * g).sum((1, 2)) / (a.sum((1, 2)) + 1e-7))) < 1e-6


def test_the_masks_of_all_constant_channels_are_one_pass(apart: nn.Module) -> None:
    first, pictures, done = apart.get_submodule("first"), list[int](), list[tuple[int, int]]()
    with torch.no_grad():
        first.weight[[0, 2, 6]] = 0
        maps, black = first(picture())[0], apart(torch.zeros_like(picture()))[0, 1]
        scores = torch.full((7,), float(black))
        for channel in (1, 3, 4, 5):
            whole = nn.functional.interpolate(maps[None, channel, None], picture().shape[2:], mode="bilinear")
            scores[channel] = apart(picture() * (whole - whole.min()) / (whole.max() - whole.min()))[0, 1]
    first.register_forward_hook(lambda module, args, output: pictures.append(len(args[0])))
    [found] = class_activation_maps(
        apart, picture(), "first", 1, "scorecam", on_progress=lambda *progress: done.append(progress)
    )
    assert sum(pictures) == 1 + 5 and done[-1] == (7, 7)
    assert off(found.values, (scores.softmax(0)[:, None, None] * maps).sum(0).relu().numpy()) < 1e-5


def test_masked_images_come_in_larger_batches_while_there_is_room(
    apart: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hookscope.explain.cam._FIRST", {"cpu": 1})
    rooms, pictures = iter([True, True, False]), list[int]()
    monkeypatch.setattr("hookscope.explain.cam.has_room", lambda device: next(rooms))
    apart.get_submodule("first").register_forward_hook(lambda module, args, output: pictures.append(len(args[0])))
    [grown] = class_activation_maps(apart, picture(), "first", 1, "scorecam")
    assert pictures == [1, 1, 2, 4]  # the pass of the activations, then 7 channels
    [fixed] = class_activation_maps(apart, picture(), "first", 1, "scorecam", batch_size=3)
    assert off(grown.values, fixed.values) < 1e-6


METHODS = pytest.mark.parametrize("method", ATTENTION_METHODS)


def in_the_open(net: Vit, x: Tensor) -> tuple[list[Tensor], Tensor]:
    """The weights ``(1, heads, L, L)`` of each block in the graph, and the scores of classes, by plain products."""
    tokens, weights = net.patches(x).flatten(2).mT, []
    tokens = tokens if net.token is None else torch.cat([net.token, tokens], 1)
    for block in net.blocks:
        q, k, v = block.attention.split(block.norm(tokens))
        weights.append((q @ k.mT / 2).softmax(-1))
        tokens = tokens + (weights[-1] @ v).transpose(1, 2).flatten(2)
    return weights, net.head(tokens.mean(1) if net.token is None else tokens[:, 0])[0]


@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize("attend", [fused, plain])
@METHODS
def test_maps_are_those_of_the_paper_on_fused_and_plain_attention(method: str, attend: Any, class_token: bool) -> None:
    net, x = vit(attend, class_token=class_token), photo()
    weights, scores = in_the_open(net, x)
    for target in (0, 3):
        gradients = torch.autograd.grad(scores[target], weights, retain_graph=True)
        joined, expected = np.eye(weights[0].shape[-1]), []
        for weight, gradient in zip(weights, gradients, strict=True):
            a, g = weight[0].detach().double().numpy(), gradient[0].double().numpy()
            if method == "rollout":
                joined = (a.mean(0) + np.eye(len(joined))) / 2 @ joined
            else:
                joined = joined + np.maximum(a * g, 0).mean(0) @ joined
            rows = joined if method == "rollout" else joined - np.eye(len(joined))
            expected.append((rows[0, 1:] if class_token else rows.mean(0)).reshape(4, 6))
        maps = class_activation_maps(net, x, "blocks.*", target, method)
        assert [(cam.call.name, cam.channels) for cam in maps] == [("blocks.0.attention", 2), ("blocks.1.attention", 4)]
        for cam, values in zip(maps, expected, strict=True):
            assert cam.values == pytest.approx(values, rel=1e-4, abs=1e-6)
            assert cam.prediction.score == pytest.approx(scores[target].item(), abs=1e-5) and not cam.unreached
        [last] = class_activation_maps(net, x, target=target, method=method)
        assert np.array_equal(last.values, maps[1].values)


@METHODS
def test_torchs_attention_with_and_without_weights_gives_the_same_map(method: str) -> None:
    one, other = (
        class_activation_maps(vit_of_torch(need_weights), photo(), target="top:2", method=method)
        for need_weights in (True, False)
    )
    for first, second in zip(one, other, strict=True):
        assert first.values == pytest.approx(second.values, rel=1e-4, abs=1e-7) and first.prediction.index is not None


@METHODS
def test_a_function_of_the_output_can_be_the_target_and_layers_can_be_fused(method: str) -> None:
    net, x = vit(), photo()
    by_function = class_activation_maps(net, x, target=lambda output: output[:, 2] - output[:, 1], method=method)
    assert by_function[0].prediction.target == "<lambda>"
    assert fuse_maps(class_activation_maps(net, x, "blocks.*", 0, method))[0].values.shape == (4, 6)


@METHODS
def test_models_whose_attention_cannot_be_joined_are_refused_in_a_line(method: str) -> None:
    cases: list[tuple[nn.Module, dict[str, Any], type[Exception], str]] = [
        (nn.Sequential(nn.Conv2d(3, 4, 16), nn.Flatten()), {}, NoMapError, "Sequential has no attention"),
        (swin(), {}, NoMapError, "the attention of first.attention cannot be joined over layers; it looks within 6"),
        (vit(), {"layers": "head"}, LayerError, "no attention in head; the model has 2 calls"),
        (vit(), {"layers": "nothing"}, LayerError, "no layer 'nothing' in Vit"),
        (vit(), {"target": 4}, TargetError, "no class 4; the model has 4 classes"),
    ]
    for net, options, error, text in cases:
        with pytest.raises(error, match=text):
            class_activation_maps(net, photo(), method=method, **options)
        assert hooks_on(net) == 0


def test_a_score_that_no_attention_reaches_is_said() -> None:
    net = vit()
    with pytest.raises(LayerError, match="the score does not depend on any attention; no gradient"):
        class_activation_maps(net, photo(), target=lambda output: output.detach()[:, 0], method="attention-gradient")
    nn.init.zeros_(net.head.weight)
    assert class_activation_maps(net, photo(), target=0, method="attention-gradient")[0].unreached


@METHODS
def test_the_model_stays_as_it_is(method: str) -> None:
    net = vit().train()
    net.head.weight.requires_grad_(False)
    state = ModelSnapshot(net)
    with torch.no_grad():
        class_activation_maps(net, photo(), method=method)
    assert state.changes() == [] and hooks_on(net) == 0
