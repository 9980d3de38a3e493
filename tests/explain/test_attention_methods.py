"""Rollout and attention times gradient, judged by NumPy and autograd on a net that computes attention in the open."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hookscope.errors import LayerError, NoMapError, TargetError
from hookscope.explain.cam import class_activation_maps
from hookscope.explain.cam_maps import fuse_maps
from hookscope.explain.cam_methods import ATTENTION_METHODS
from hookscope.hooks.model_state import ModelSnapshot
from tests.attention.nets import Vit, fused, picture, plain, swin, vit, vit_of_torch
from tests.helpers import hooks_on

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
    net, x = vit(attend, class_token=class_token), picture()
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
        class_activation_maps(vit_of_torch(need_weights), picture(), target="top:2", method=method)
        for need_weights in (True, False)
    )
    for first, second in zip(one, other, strict=True):
        assert first.values == pytest.approx(second.values, rel=1e-4, abs=1e-7) and first.prediction.index is not None


@METHODS
def test_a_function_of_the_output_can_be_the_target_and_layers_can_be_fused(method: str) -> None:
    net, x = vit(), picture()
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
            class_activation_maps(net, picture(), method=method, **options)
        assert hooks_on(net) == 0


def test_a_score_that_no_attention_reaches_is_said() -> None:
    net = vit()
    with pytest.raises(LayerError, match="the score does not depend on any attention; no gradient"):
        class_activation_maps(net, picture(), target=lambda output: output.detach()[:, 0], method="attention-gradient")
    nn.init.zeros_(net.head.weight)
    assert class_activation_maps(net, picture(), target=0, method="attention-gradient")[0].unreached


@METHODS
def test_the_model_stays_as_it_is(method: str) -> None:
    net = vit().train()
    net.head.weight.requires_grad_(False)
    state = ModelSnapshot(net)
    with torch.no_grad():
        class_activation_maps(net, picture(), method=method)
    assert state.changes() == [] and hooks_on(net) == 0
