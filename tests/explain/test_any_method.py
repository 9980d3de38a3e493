"""What holds for every method of class activation maps and of saliency: refusals, modes, and a model left as it was."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hookscope.errors import HookscopeError, InputError, ModelError, TargetError, UsageError
from hookscope.explain.cam import class_activation_maps, landmark_layers
from hookscope.explain.cam_methods import CAM_METHODS
from hookscope.explain.saliency import saliency_maps
from hookscope.explain.saliency_methods import SALIENCY_METHODS
from hookscope.explain.saliency_settings import SaliencySettings
from hookscope.hooks.model_state import ModelSnapshot
from tests.explain.nets import Gives, busy, picture, small
from tests.helpers import hooks_on, refused, seeded
from tests.nets import Fails, named

FEW = SaliencySettings(samples=5, steps=6, batch_size=4)
EXPLAIN: dict[str, Callable[..., list[Any]]] = {
    **{name: partial(class_activation_maps, layers="second", method=name) for name in CAM_METHODS},
    **{name: partial(saliency_maps, method=name, settings=FEW) for name in SALIENCY_METHODS},
}
METHODS = pytest.mark.parametrize("method", EXPLAIN)


def values_of(method: str, net: nn.Module, x: Tensor, target: Any = 3, **options: Any) -> NDArray[Any]:
    [answer] = EXPLAIN[method](net, x, target=target, **options)
    assert np.isfinite(answer.still).all() and answer.still.dtype == np.float32
    assert isinstance(answer.values, np.ndarray) or not (answer.values.requires_grad or answer.values.is_inference())
    return np.asarray(answer.values)


@METHODS
def test_a_class_is_chosen_by_index_name_or_rank(method: str) -> None:
    explain = partial(EXPLAIN[method], small(), picture(), categories="abcde")
    for wish in (3, "3", torch.tensor(3), "d"):
        assert [answer.prediction.index for answer in explain(target=wish)] == [3]
    assert [answer.prediction.index for answer in explain(target="d,0,3")] == [3, 0]


def refuses(method: str, net: nn.Module, x: Any, error: type[HookscopeError], text: str, **options: Any) -> None:
    with refused(error, text, part="holds"):
        EXPLAIN[method](net, x, **options)
    assert hooks_on(net) == 0


@METHODS
def test_classes_and_pictures_that_do_not_exist_are_refused(method: str) -> None:
    for target, error, text in (
        (5, TargetError, "no class 5; the model has 5 classes: 0 to 4"),
        ("fox", TargetError, "no class 'fox'; the class names are unknown"),
        (1.0, UsageError, "a target cannot be float; give a class number"),
        ("top:0", UsageError, "bad target 'top:0'"),
    ):
        refuses(method, small(), picture(), error, text, target=target)
    refuses(method, small(), torch.zeros(2, 3, 16, 16), UsageError, "expected one image, got 2")


@pytest.mark.parametrize("method", ["gradcam", "gradient"])
@pytest.mark.parametrize(
    ("output", "text"),
    [
        (lambda x: x.mean((2, 3))[:, :0], "the model has no classes"),
        (lambda x: [{"boxes": x[0, 0], "labels": x[0, 0], "scores": x[0, 0]}], "gives boxes, labels and scores"),
        (lambda x: [x[:, :2], x[:, :2]], "gives a list of 2 tensors"),
        (lambda x: x, "gives 1x4x16x16"),
        (lambda x: None, "gives no tensor"),
        (lambda x: x.mean((2, 3)).argmax(1, keepdim=True), "gives 1x1"),
    ],
)
def test_a_model_without_classes_is_refused_with_what_works_on_it(output: Any, text: str, method: str) -> None:
    net = seeded(lambda: Gives(output))
    options = {"layers": "conv"} if method == "gradcam" else {}
    refuses(method, net, picture(), ModelError, text, **options)
    works = "explain a box: BoxTarget(0)" if "boxes" in text else "inspect, capture and layer_gradients(loss='mse')"
    refuses(method, net, picture(), ModelError, works, **options)


@METHODS
def test_scores_that_are_not_finite_are_refused(method: str) -> None:
    says = "is not finite; see find_non_finite"
    for layer, bad, target in (("first", torch.nan, "top:5"), ("head", torch.inf, "1,0"), ("head", torch.nan, 0)):
        net = small()
        with torch.no_grad():
            net.get_submodule(layer).weight.view(-1)[0] = bad
        refuses(method, net, picture(), InputError, says, target=target)


def test_weights_made_in_inference_mode_are_refused() -> None:
    with torch.inference_mode():
        net = small()
    for method in ("gradcam", "gradient"):
        refuses(method, net, picture(), ModelError, "'first.weight' was made inside torch.inference_mode")


@METHODS
def test_grad_modes_frozen_parameters_train_mode_and_a_default_device_do_not_count(method: str) -> None:
    net, x = small(), picture()
    plain = values_of(method, net, x)
    assert plain.any()
    for context in (torch.no_grad(), torch.inference_mode(), torch.device("meta")):
        with context:
            assert np.array_equal(plain, values_of(method, net, x))
    with torch.inference_mode():
        made_inside = x.clone()
        assert np.array_equal(plain, values_of(method, net, made_inside)) and torch.is_inference_mode_enabled()
    with torch.device("meta"):
        assert landmark_layers(net, x) == ["relu", "again"]
    net.requires_grad_(False)
    assert np.array_equal(plain, values_of(method, net, x))
    net.requires_grad_(True)
    net.train()
    net.norm.eval()
    assert np.array_equal(plain, values_of(method, net, x))
    assert net.training and net.drop.training and not net.norm.training


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@METHODS
def test_other_precisions_give_nearly_the_same_values(method: str, dtype: torch.dtype) -> None:
    options = {"layers": "relu"} if method in CAM_METHODS else {}
    plain = values_of(method, small(), picture(), **options)
    other = values_of(method, small().to(dtype), picture().to(dtype), **options)
    wide = np.float64 if dtype == torch.float64 and method in SALIENCY_METHODS else np.float32
    assert other.dtype == wide and plain.any()
    # the coarse formats have 8 and 11 bits, and a maximum may fall on its neighbour
    within = 1e-4 if dtype == torch.float64 else 0.5
    assert np.linalg.norm(other - plain) <= within * np.linalg.norm(plain)


@METHODS
def test_nothing_of_the_model_or_the_picture_changes(method: str) -> None:
    net, x = busy(), picture().requires_grad_()
    hooks, before, state = hooks_on(net), x.detach().clone(), ModelSnapshot(net)
    EXPLAIN[method](net, x, target="top:2")
    assert state.changes() == [] and hooks_on(net) == hooks
    assert torch.equal(x, before) and x.grad is None and x.requires_grad


@METHODS
def test_nothing_of_the_model_changes_when_a_layer_or_a_hook_fails(method: str) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("as planned")

    passes = 1 + (method in ("scorecam", "ablationcam") or method in SALIENCY_METHODS)
    for at in range(1, passes + 1):
        net = named(**dict(small().named_children()), fails=Fails(at)).train()
        state = ModelSnapshot(net)
        with pytest.raises(InputError, match="as planned"):
            EXPLAIN[method](net, picture(), target=0)
        assert state.changes() == [] and hooks_on(net) == 0
    net = busy()
    net.again.register_forward_hook(fail)
    state = ModelSnapshot(net)
    with pytest.raises(InputError, match="as planned"):
        EXPLAIN[method](net, picture(), target=0)
    assert state.changes() == []
    if passes > 1:
        net = busy()
        state = ModelSnapshot(net)
        with pytest.raises(RuntimeError, match="as planned"):
            EXPLAIN[method](net, picture(), target=0, on_progress=fail)
        assert state.changes() == []


# channels of two layers, and images for two classes
RUNS = dict.fromkeys(("scorecam", "ablationcam"), (6, 8)) | dict.fromkeys(("smoothgrad", "rise"), (7, 7))
RUNS["integrated-gradients"] = (7, 7)


@pytest.mark.parametrize("method", RUNS)
def test_the_size_of_a_batch_does_not_count_and_progress_is_complete(method: str) -> None:
    found = {}
    for size in (1, 3, 7, 50):
        options: dict[str, Any] = {"layers": "first,second", "batch_size": size}
        if method in SALIENCY_METHODS:
            options = {"settings": SaliencySettings(samples=7, steps=7, most_steps=7, batch_size=size)}
        steps: list[tuple[int, int]] = []
        options["on_progress"] = lambda *at, to=steps: to.append(at)
        found[size] = EXPLAIN[method](small(), picture(), target="top:2", **options)
        assert steps[-1] == (14, 14) and steps == sorted(steps) and {total for _, total in steps} == {14}
        assert len(steps) == sum(-(-number // size) for number in RUNS[method])
    for several in zip(*found.values(), strict=True):
        first, *others = (np.asarray(answer.values) for answer in several)
        within = 1e-4 if method == "rise" else 1e-5  # rise subtracts the mean of scores that differ little
        assert all(np.abs(values - first).max() <= within * np.abs(first).max() for values in others)
