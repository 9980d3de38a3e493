"""The gradient of a kept activation is that of what the layer returned, against autograd and numbers from paper."""

import copy
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookscope
from hookscope.errors import LayerError
from hookscope.hooks import Activations
from hookscope.hooks.registration import HookHandles
from hookscope.hooks.tensors import tensors_in
from tests.helpers import hooks_on, not_in_place, numbers, small_head
from tests.nets import Function, Twice, X, chain, conv, named, row

FROM_PAPER = {"0": [0, 0], "2": [0, 50], "4": [1, 10]}
"""Gradients of ``(chain()(X) * row(1, 10)).sum()``: times 5, through a ReLU, times -3, through a ReLU."""


def gradients_of(activations: Activations) -> dict[str, list[float]]:
    return {key: numbers(gradient) for key, gradient in activations.grad.items()}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_gradients_from_paper_inside_and_after_the_block(inplace: bool, inside: bool) -> None:
    net = chain(inplace=inplace)
    with hookscope.capture(net, gradients=True) as activations:
        loss = (net(X) * row(1, 10)).sum()
        if inside:
            loss.backward()
            assert len(activations.grad) == 3
    if not inside:
        assert len(activations.grad) == 0
        loss.backward()
    assert gradients_of(activations) == FROM_PAPER
    assert [numbers(kept) for kept in activations.values()] == [[2, -4], [-5, 1], [5 * 0 + 3, 5 * 1 + 3]]
    assert hooks_on(net) == 0
    assert not any(gradient.requires_grad for gradient in activations.grad.values())


def test_gradients_are_listed_in_the_order_of_the_forward_pass() -> None:
    net = chain()
    with hookscope.capture(net, types=("all",), gradients=True) as activations:
        net(X).sum().backward()
    keys = ["0", "1", "2", "3", "4"]
    assert list(activations.grad) == list(activations.grad.keys()) == keys
    assert [call.key for call in activations.grad.calls] == keys
    assert [call.index for call in activations.grad.calls] == [0, 1, 2, 3, 4]
    assert [numbers(gradient) for gradient in activations.grad.values()] == [
        numbers(activations.grad[index]) for index in range(5)
    ]
    assert numbers(activations.grad[-1]) == numbers(activations.grad["4#0"]) == [1, 1]


@pytest.mark.parametrize(
    ("name", "side"), [("alexnet", 64), ("vgg11", 32), ("squeezenet1_1", 32), ("densenet121", 32), ("resnet18", 32)]
)
def test_every_convolution_of_torchvisions_models_against_autograd(name: str, side: int) -> None:
    net = small_head(name)
    x = torch.rand(1, 3, side, side)
    with hookscope.capture(net, gradients=True) as activations:
        net(x)[0, 3].backward()
    plain, outputs = not_in_place(copy.deepcopy(net)), {}
    with HookHandles() as handles:
        for key in activations:
            handles.forward(plain.get_submodule(key), lambda *call, key=key: outputs.update({key: call[-1]}))
        score = plain(x)[0, 3]
    expected = torch.autograd.grad(score, list(outputs.values()))
    assert list(activations.grad) == list(activations) == list(outputs)
    for key, gradient in zip(outputs, expected, strict=True):
        assert torch.allclose(activations.grad[key], gradient, rtol=1e-4, atol=1e-7 * float(gradient.abs().max())), key
    # the kept activations are in the graph, and autograd has the same gradients of them
    with hookscope.capture(net, gradients=True) as again:
        (own,) = torch.autograd.grad(net(x)[0, 3], again[0])
    assert torch.equal(own, activations.grad[0])


def test_a_loss_on_an_activation_itself() -> None:
    net = chain()
    with hookscope.capture(net, gradients=True) as activations:
        net(X)
    (activations["2"] * row(7, 8)).sum().backward()
    assert gradients_of(activations) == {"0": [-21, 0], "2": [7, 8]}


def test_a_layer_that_runs_twice() -> None:
    net = Twice()
    with hookscope.capture(net, gradients=True) as activations:
        net(row(1)).sum().backward()
    assert gradients_of(activations) == {"layer": [3], "layer#1": [1]}
    assert numbers(activations.grad["twin#1"]) == numbers(activations.grad[-1]) == [1]
    with hookscope.capture(net, "layer#1", gradients=True) as one:
        net(row(1)).sum().backward()
    assert list(one.grad) == ["layer#1"]


def splits(x: Tensor) -> Any:
    """A tuple with a dictionary: 2x, 3x, 5x, a word, numbers without a gradient."""
    return 2 * x, {"three": [3 * x], "five": 5 * x}, "word", x.argmax(), x.detach() * 9


def test_containers_of_tensors() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        two, rest, *_ = net.splits(x)
        return two.relu_() * rest["three"][0]

    x = row(1, 4).requires_grad_()
    net = Function(forward, splits=Function(splits))
    with hookscope.capture(net, "splits", gradients=True) as activations:
        net(x).sum().backward()
    two, rest, word, *without = activations.grad["splits"]
    assert (numbers(two), numbers(rest["three"][0])) == ([3, 12], [2, 8])
    assert (rest["five"], word, without) == (None, "word", [None, None])
    net = nn.Sequential(Function(lambda x: (x * 2,) * 2))
    with hookscope.capture(net, types=("all",), gradients=True) as activations:
        one, other = net(row(1).requires_grad_())
        (one * 3 + other * 4).sum().backward()
    first, second = activations.grad[0]
    assert numbers(first) == numbers(second) == [7]


def test_the_parts_of_a_call_have_the_names_that_tables_show(tmp_path: Path) -> None:
    net = nn.Sequential(Function(lambda x: (2 * x, {"b": 3 * x})))
    with hookscope.capture(net, "all,re:^$", gradients=True) as activations:
        sum(net(row(1).requires_grad_())[1].values()).sum().backward()
    parts = ["0 0", "0 1.b", "(model) 0", "(model) 1.b"]
    assert "0:1x1x1x1 1.b:1x1x1x1" in repr(activations) and "(model)" in repr(activations)
    assert [numbers(activations[part]) for part in parts] == [[2], [3]] * 2
    assert numbers(activations.grad["0:1.b"]) == numbers(activations.grad["(model)"][1]["b"]) == [1]
    activations.save(tmp_path / "kept.npz")
    with np.load(tmp_path / "kept.npz") as saved:
        assert {key: saved[key].tolist() for key in saved} == {key: activations.array(key).tolist() for key in parts}
    with pytest.raises(LayerError, match=r"nothing kept of '0:2'; the parts of 0 are 0, 1.b$"):
        activations["0:2"]
    with pytest.raises(LayerError, match=r"'0' holds 2 tensors; 0, 1.b; give one as '0:PART'$"):
        activations.array("0")


@pytest.mark.parametrize(
    ("function", "used"),
    [
        (lambda x: SimpleNamespace(a=2 * x, b=3 * x), lambda output: output.b),
        (lambda x: OrderedDict(a=[(2 * x,)], b=3 * x), lambda output: output["b"]),
        (lambda x: [2 * x, {"b": 3 * x}], lambda output: output[1]["b"]),
    ],
)
def test_gradients_come_in_containers_of_the_same_kind(
    function: Callable[[Tensor], Any], used: Callable[[Any], Tensor]
) -> None:
    net = nn.Sequential(Function(function))
    with hookscope.capture(net, types=("all",), gradients=True) as activations:
        (used(net(row(1).requires_grad_())) * 7).sum().backward()
    gradients = activations.grad[0]
    assert type(gradients) is type(activations[0])
    assert numbers(used(gradients)) == [7]
    assert list(tensors_in(gradients).values()) == [used(gradients)]  # all else is None


def test_a_second_pass_starts_anew() -> None:
    net = chain()
    with hookscope.capture(net, gradients=True) as activations:
        first = net(X).sum()
        first.backward(retain_graph=True)
        assert len(activations.grad) == 3
        second = net(row(10, 10)).sum()
        assert len(activations.grad) == 0
        first.backward()  # of a pass that is no longer kept
        assert len(activations.grad) == 0
        second.backward()
    assert gradients_of(activations) == {"0": [0, 0], "2": [0, 0], "4": [1, 1]}


def test_a_second_backward_pass_replaces_what_the_first_brought() -> None:
    net = nn.Sequential(Function(splits))
    with hookscope.capture(net, types=("all",), gradients=True) as activations:
        two, rest, *_ = net(row(1).requires_grad_())
    two.sum().backward(retain_graph=True)
    assert numbers(activations.grad[0][0]) == [1]
    (3 * rest["five"]).sum().backward()
    two, rest, *_ = activations.grad[0]
    assert two is None and numbers(rest["five"]) == [3]


def test_double_backward() -> None:
    net = nn.Sequential(conv(3))
    with hookscope.capture(net, gradients=True) as activations:
        x = row(1).requires_grad_()
        (slope,) = torch.autograd.grad(net(x).pow(3).sum(), x, create_graph=True)  # y = 3x: 9 y^2
    assert numbers(activations.grad[0]) == [27] and not activations.grad[0].requires_grad
    slope.sum().backward()
    assert numbers(x.grad) == [162]
    assert numbers(activations.grad[0]) == [54]  # d slope / d y = 18 y


def test_what_is_kept_does_not_change_with_the_gradient_of_a_parameter() -> None:
    # autograd hands the gradient of the sum on as that of the weight: both would be one tensor
    net = Function(lambda net, x: x + net.layer.weight, layer=nn.PReLU(2))
    with hookscope.capture(net, "re:^$", gradients=True) as activations:
        net(torch.tensor([0.75, 1.75])).square().sum().backward()
    net.layer.weight.grad.zero_()
    assert numbers(activations.grad[""]) == [2, 4]
    activations.grad[""].fill_(9)
    assert numbers(net.layer.weight.grad) == [0, 0]


def test_indices_from_the_end_wait_for_no_more_than_is_wanted() -> None:
    net = chain()
    with hookscope.capture(net, -1, types=("all",), gradients=True) as activations:
        net(X).sum().backward()
    assert list(activations.grad) == list(activations) == ["4"]
    with pytest.raises(LayerError, match="no gradient of '2'"):
        activations.grad["2"]


def test_an_early_stop() -> None:
    net = chain()
    with hookscope.capture(net, "2", types=("all",), gradients=True, stop=True) as activations:
        net(X)
        raise AssertionError("the pass went on")
    (activations[2] * row(4, 5)).sum().backward()
    assert gradients_of(activations) == {"2": [4, 5]}
    assert net[4].weight.grad is None


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float64},
        {"dtype": torch.float16},
        {"transform": lambda output: output.mean()},
        {"transform": lambda output: None},
        {"transform": lambda output: output},
        {"transform": lambda output: output[..., :1], "dtype": torch.float64, "inputs": True},
        {"device": "cpu"},
        {"inputs": True},
    ],
    ids=["double", "half", "mean", "nothing", "itself", "part", "device", "inputs"],  # the same in every process
)
@pytest.mark.parametrize("inplace", [False, True])
def test_gradients_are_those_of_what_the_layer_returned(options: dict[str, Any], inplace: bool) -> None:
    net = chain(inplace=inplace)
    with hookscope.capture(net, gradients=True, **options) as activations:
        output = net(X)
        (output * row(1, 10)).sum().backward()
    assert numbers(output) == [3, 8]
    assert gradients_of(activations) == FROM_PAPER
    assert {gradient.dtype for gradient in activations.grad.values()} == {torch.float32}


@pytest.mark.parametrize("options", [{}, {"dtype": torch.float64}, {"device": "cpu"}], ids=str)
def test_a_view_that_the_next_layer_overwrites(options: dict[str, Any]) -> None:
    # a hook on the view itself would never fire: autograd makes it anew after the write
    net = nn.Sequential(conv(2), Function(lambda x: x[..., :1]), Function(lambda x: x.mul_(3)))
    with hookscope.capture(net, types=("all",), gradients=True, **options) as activations:
        (net(X) * 7).sum().backward()
    assert gradients_of(activations) == {"0": [21, 0], "1": [21], "2": [7]}
    assert [numbers(kept) for kept in activations.values()] == [[2, -4], [2], [6]]


def error_of(activations: Activations, key: str | int) -> str:
    with pytest.raises(LayerError) as caught:
        activations.grad[key]
    assert key not in activations.grad and activations.grad.get(key) is None
    return str(caught.value)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_without_a_graph(around: Any) -> None:
    net = chain()
    with around(), hookscope.capture(net, gradients=True) as activations:
        net(X)
    assert len(activations) == 3 and len(activations.grad) == 0
    why = "its output is in no autograd graph: under no_grad, or nothing before it requires a gradient"
    assert error_of(activations, "2") == f"no gradient of '2'; {why}"
    assert error_of(activations, 1) == f"no gradient of '2'; {why}"


def test_frozen_layers_have_gradients_behind_the_first_that_is_not_or_behind_an_input_that_asks() -> None:
    net = chain()
    net[0].requires_grad_(False)
    with hookscope.capture(net, gradients=True) as activations:
        net(X).sum().backward()
    assert list(activations.grad) == ["2", "4"]
    assert "nothing before it requires a gradient" in error_of(activations, "0")
    net = chain().requires_grad_(False)
    with hookscope.capture(net, gradients=True) as activations:
        net(X.clone().requires_grad_()).sum().backward()
    assert list(activations.grad) == ["0", "2", "4"]


def test_no_gradient_before_backward_or_where_the_loss_does_not_depend_on_the_layer() -> None:
    net = chain()
    with hookscope.capture(net, gradients=True) as activations:
        net(X)
    why = "no backward pass has run yet, or the loss does not depend on this layer"
    assert error_of(activations, "4") == f"no gradient of '4'; {why}"
    activations["2"].sum().backward()
    assert error_of(activations, -1) == f"no gradient of '4'; {why}"
    assert "0" in activations.grad


def test_unknown_names_and_indices() -> None:
    net = named(features=nn.Sequential(conv(1)))
    with hookscope.capture(net, "0,features", gradients=True) as activations:
        net(X).sum().backward()
    assert error_of(activations, "feature.0") == "no gradient of 'feature.0'; nearest: features.0, features"
    outline = "expected: 2 calls (indices 0 to 0): features.0, features"
    assert error_of(activations, 7) == f"no gradient at index 7; {outline}"


def test_clear_forgets_everything_and_a_capture_without_gradients_says_how_to_get_them() -> None:
    net = chain()
    with hookscope.capture(net, inputs=True, gradients=True) as activations:
        loss = net(X).sum()
        loss.backward(retain_graph=True)
        activations.clear()
        assert dict(activations) == dict(activations.inputs) == dict(activations.grad) == {}
        loss.backward()
    assert dict(activations.grad) == {}
    with hookscope.capture(net) as activations:
        net(X).sum().backward()
    assert "capture with gradients=True" in error_of(activations, "2")
    assert dict(activations.grad) == {}


def test_tensors_are_freed_with_the_activations_and_the_loss() -> None:
    net = chain()
    gc.disable()  # at once, by counting references, not when the collector comes
    try:
        with hookscope.capture(net, gradients=True) as activations:
            loss = net(X).sum()
            loss.backward()
        references = [weakref.ref(t) for t in (*activations.values(), *activations.grad.values(), activations.grad)]
        del activations, loss
        assert [reference() for reference in references] == [None] * 7
    finally:
        gc.enable()


def test_neither_earlier_passes_nor_graphs_are_held() -> None:
    net = chain()
    alive: list[weakref.ref[Tensor]] = []
    with hookscope.capture(net, gradients=True) as activations:
        for _ in range(4):
            net(X).sum().backward()
            alive.append(weakref.ref(activations.grad["2"]))
    gc.collect()
    assert [reference() is not None for reference in alive] == [False, False, False, True]
    with hookscope.capture(net, transform=lambda output: None, gradients=True) as activations:
        output = net(X)
        output.sum().backward()
    held = weakref.ref(output)
    del output
    gc.collect()
    assert held() is None and len(activations.grad) == 3
    with hookscope.capture(net, gradients=True) as activations:
        loss = net(X).sum()
    grad = weakref.ref(activations.grad)
    del activations
    gc.collect()
    assert grad() is None
    loss.backward()
    assert net[0].weight.grad is not None


def test_a_checkpointed_layer() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.last(checkpoint(net.inner, x, use_reentrant=False))

    net = Function(forward, inner=chain(), last=conv(2))
    with hookscope.capture(net, gradients=True) as activations:
        net(X).sum().backward()
    assert numbers(activations.grad["last"]) == [1, 1]
    assert numbers(activations.grad["inner.4"]) == [2, 2]
    assert numbers(activations.grad["inner.2"]) == [0, 10]


def test_two_captures_at_once_keep_the_same_gradients() -> None:
    net, options = chain(), {"gradients": True}
    with hookscope.capture(net, **options) as outer, hookscope.capture(net, **options, dtype=torch.float64) as inner:
        F.mse_loss(net(X), row(0, 0)).backward()
    assert list(outer.grad) == list(inner.grad) == ["0", "2", "4"]
    assert all(map(torch.equal, outer.grad.values(), inner.grad.values()))
