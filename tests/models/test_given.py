"""Models and inputs as people give them: what is understood, and one line on what is not."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import hookscope
from hookscope.errors import HookscopeError, UsageError
from hookscope.images import ImageWarning
from hookscope.models import LoadedModel, given_inputs, takes_inputs
from hookscope.models.loaded import note_input

STAR = Path(__file__).parents[2] / "samples" / "shapes" / "star.png"
CALLS = {
    "class_activation_maps": hookscope.class_activation_maps,
    "find_non_finite": hookscope.find_non_finite,
    "layer_gradients": hookscope.layer_gradients,
    "saliency_maps": hookscope.saliency_maps,
    "trace_events": hookscope.trace_events,
}


@pytest.fixture(scope="module")
def net() -> LoadedModel:
    return hookscope.load_model("shapes", device="cpu")


@pytest.mark.parametrize("image", [str(STAR), STAR, Image.open(STAR)], ids=["text", "Path", "Pillow"])
def test_an_image_is_prepared_as_the_model_states(net: LoadedModel, image: Any) -> None:
    [prepared] = given_inputs(net, image)
    assert torch.equal(prepared, net.preprocess(Image.open(STAR).convert("RGB"))[None])
    assert hookscope.predict(net, image)[0].label == "star"


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (None, "None is not a model"),
        ("shapes", "is not a model; give an nn.Module"),
        (nn.Conv2d, r"the class Conv2d is not a model; give an instance, such as Conv2d\(\)$"),
        (torch.optim.SGD([torch.zeros(1)]), "SGD is not a model; give an nn.Module"),
        (lambda x: x, "function is not a model"),
    ],
    ids=["nothing", "a name", "a class", "an optimizer", "a function"],
)
def test_what_is_not_a_model_is_refused(model: Any, text: str) -> None:
    x = torch.zeros(1, 3, 8, 8)
    takers: list[Any] = [partial(call, inputs=x) for call in CALLS.values()]
    for take in [*takers, hookscope.capture, hookscope.list_layers, hookscope.draw_kernels, hookscope.Monitor]:
        if model is not None or take is not hookscope.Monitor:
            with pytest.raises(UsageError, match=text):
                take(model)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("given", "text"),
    [
        (lambda x: x.double(), "takes float and got double.*: x.to"),
        (lambda x: x.half(), "takes float and got c10::Half.*: x.to"),
        (lambda x: x[:, :1], "takes 3 channels and got 1"),
        (lambda x: x[None], "forward.. failed on 1x1x3x128x128|expected one image|got 1x1x3x128x128"),
        (lambda x: x[..., :2, :2], "needs a larger input"),
        (lambda x: {"x": x}, "forward.. failed|expected one image"),
        (lambda x: None, "the input holds no tensor: it is None"),
        (lambda x: "/nowhere/a.png", "no image '/nowhere/a.png'"),
        (lambda x: str(STAR.parent), "is a folder, not an image"),
    ],
    ids=["double", "half", "grey", "5d", "tiny", "dict", "None", "missing", "folder"],
)
def test_a_wrong_input_is_one_line(net: LoadedModel, name: str, given: Any, text: str) -> None:
    x = net.preprocess(Image.open(STAR).convert("RGB"))[None]
    with pytest.raises(HookscopeError, match=text) as caught:
        CALLS[name](net, given(x))
    assert "\n" not in str(caught.value)


def test_a_defect_outside_the_forward_pass_is_not_an_error_of_the_input(net: LoadedModel) -> None:
    @takes_inputs
    def broken(model: Any, inputs: Any) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken(net, torch.zeros(1, 3, 8, 8))


@pytest.mark.parametrize("kind", [None, "maps", 3, [None], torch.zeros(2)], ids=str)
def test_a_drawing_function_says_what_it_draws(net: LoadedModel, kind: Any) -> None:
    with pytest.raises(
        UsageError, match=r"expected ClassActivationMap, got .*; give what hookscope.class_activation_maps"
    ):
        hookscope.draw_cam(kind, STAR, net)
    with pytest.raises(UsageError, match=r"expected Saliency, got .*; give what hookscope.saliency_maps returns"):
        hookscope.draw_saliency(kind, STAR, net)


def test_one_result_is_as_good_as_a_list_and_a_path_as_an_image(net: LoadedModel) -> None:
    maps, image = hookscope.class_activation_maps(net, STAR), hookscope.open_image(STAR)
    assert hookscope.draw_cam(maps[0], image, net) == hookscope.draw_cam(maps, image, net)
    [saliency] = found = hookscope.saliency_maps(net, STAR)
    assert hookscope.draw_saliency(found, image, net) == hookscope.draw_saliency(saliency, image, net)
    by_path = hookscope.draw_cam(maps, STAR, net).info["hookscope"]
    assert "star.png" in str(by_path) and "star.png" not in str(hookscope.draw_cam(maps, image, net).info["hookscope"])


def test_a_loaded_model_takes_an_image_its_path_or_its_bytes_in_its_own_type() -> None:
    net = hookscope.load_model("shapes")
    picture = hookscope.open_image(STAR)
    expected = net(net.prepare(picture)[None])
    for image in (picture, STAR, str(STAR), np.asarray(picture)):
        assert torch.equal(net(image), expected)
        assert hookscope.predict(net, image)[0].label == "star"
    net.model.double()
    assert net.prepare(picture).dtype == torch.float64 and hookscope.predict(net, picture)[0].label == "star"


def test_what_the_module_has_is_named_where_the_loaded_model_lacks_it() -> None:
    net = hookscope.load_model("shapes")
    with pytest.raises(AttributeError, match=r"no attribute 'eval'; the module has it: \.model\.eval"):
        net.eval  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        net.nonsense  # noqa: B018
    assert copy.deepcopy(net).name == "shapes" and not hasattr(net, "__array__")


@pytest.mark.parametrize(
    "take",
    [
        lambda net: hookscope.predict(net, STAR),
        lambda net: hookscope.class_activation_maps(net, STAR, 0),
        lambda net: hookscope.saliency_maps(net, STAR),
        lambda net: hookscope.list_layers(net, inputs=STAR),
        lambda net: hookscope.inspect(net, STAR),
        lambda net: list(hookscope.extract(net, STAR, layers=0)),
        lambda net: hookscope.find_exemplars(net, [STAR], 0, channels=[1], top=1),
        lambda net: hookscope.compare(net, net, STAR),
        lambda net: list(hookscope.verify(net, [STAR], 0)),
    ],
    ids=["predict", "cam", "saliency", "layers", "inspect", "extract", "exemplars", "compare", "verify"],
)
def test_what_is_assumed_of_a_plain_module_is_said_once_by_every_call(take: Callable[[Any], Any]) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    note_input.cache_clear()
    said = "Sequential does not say .*: assumed resize 256, crop 224, ImageNet mean and std; hookscope.load_model"
    with pytest.warns(ImageWarning, match=said) as told:
        take(net)
    assert len(told) == 1
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        take(net)
    assert not shown


def test_an_image_of_a_plain_module_is_prepared_for_imagenet(net: LoadedModel) -> None:
    image = Image.open(STAR).convert("RGB")
    bytes_of = torch.from_numpy(np.asarray(image.resize((256, 256), Image.Resampling.BILINEAR))[16:240, 16:240].copy())
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    expected = ((bytes_of / 255 - mean) / std).permute(2, 0, 1)[None]
    torch.testing.assert_close(given_inputs(net.model, image)[0], expected)


class _Scaled(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.register_buffer("mean", torch.tensor(120.0))


@pytest.mark.parametrize(
    ("model", "values", "told"),
    [
        (nn.Conv2d(3, 2, 1), 255.0, True),
        (nn.Conv2d(3, 2, 1), 1.0, False),
        (nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 2, 1)).eval(), 255.0, False),
        (_Scaled(), 255.0, False),
        (hookscope.load_model("shapes"), 255.0, True),
        (hookscope.load_model("shapes", range=(0, 255), mean=0, std=1), 255.0, False),
    ],
    ids=["plain", "0..1", "norm", "buffer", "loaded", "bytes"],
)
def test_a_tensor_with_the_values_of_bytes_is_named_unless_the_model_takes_them(
    model: Any, values: float, told: bool
) -> None:
    x = torch.linspace(0, values, 3 * 128 * 128).view(1, 3, 128, 128)
    note_input.cache_clear()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        hookscope.list_layers(model, inputs=x)
    assert [warning.category for warning in shown] == [ImageWarning] * told
    assert not told or "has values up to 255, as bytes have" in str(shown[0].message)


def test_a_wrong_keyword_names_the_function_and_an_error_shows_the_line_of_the_user() -> None:
    with pytest.raises(TypeError, match=r"class_activation_maps\(\) got an unexpected keyword argument 'layer'"):
        hookscope.class_activation_maps(hookscope.load_model("shapes"), STAR, layer="features.3")
    with pytest.raises(UsageError) as error:
        hookscope.predict(None, STAR)  # type: ignore[arg-type]
    line, last = error.value._render_traceback_()
    assert "hookscope.predict(None, STAR)" in line and last == f"UsageError: {error.value}"
