"""Patch, mean and steer, compared with passes by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet18

from hookscope.errors import LayerError, UsageError
from hookscope.hooks.activations import capture
from hookscope.hooks.calls import Call
from hookscope.interventions import Mean, Patch, Steer, intervene
from tests.helpers import refused, small_head
from tests.nets import Function

CALL = Call("layer", "Conv2d", 0, 0)


def twice() -> nn.Module:
    """Runs a layer twice and puts out a dictionary on the way."""

    def forward(net: Any, x: Tensor) -> Tensor:
        parts = net.split(net.conv(torch.relu(net.conv(x))))
        return parts["low"] + 10 * parts["high"][0]

    split = Function(lambda x: {"low": x.clamp(max=0), "high": [x.clamp(min=0), torch.arange(3)]})
    return Function(forward, conv=nn.Conv2d(2, 2, 1), split=split)


def tail_of_resnet18(model: Any, x: Tensor) -> Tensor:
    return model.fc(torch.flatten(model.avgpool(model.layer4(model.layer3(x))), 1))


def head_of_resnet18(model: Any, x: Tensor) -> Tensor:
    return model.layer2(model.layer1(model.maxpool(model.relu(model.bn1(model.conv1(x))))))


def test_patching_is_the_second_half_of_the_net_on_the_other_activation() -> None:
    model = resnet18(weights=None).eval()
    one, other = torch.randn(2, 1, 3, 64, 64)
    with torch.no_grad():
        with capture(model, "layer2") as kept:
            model(other)
        judge = tail_of_resnet18(model, head_of_resnet18(model, other))
        with intervene(model, {"layer2": Patch(kept)}) as block:
            found = model(one)
        assert torch.equal(found, judge) and not torch.equal(found, model(one)) and block.changed == {"layer2": 1}
        mixed = head_of_resnet18(model, one)
        mixed[:, 3:9, 2:5, 0:4] = head_of_resnet18(model, other)[:, 3:9, 2:5, 0:4]
        with intervene(model, {"layer2": Patch(kept, channels="3-8", positions="2-4x0-3")}):
            assert torch.equal(model(one), tail_of_resnet18(model, mixed))


def test_patching_before_an_in_place_layer_uses_the_true_activation() -> None:
    model = small_head("vgg11")
    one, other = torch.randn(2, 1, 3, 32, 32)
    with torch.no_grad():
        with capture(model, "features.3") as kept:
            model(other)
        with intervene(model, {"features.3": Patch(kept)}):
            found = [model(one), model(one)]  # the in-place ReLU has not written into what is patched in
        x = model.features[3](model.features[:3](other))
        judge = model.classifier(torch.flatten(model.avgpool(model.features[4:](x)), 1))
    assert torch.equal(found[0], judge) and torch.equal(found[1], judge)


def test_calls_parts_and_inputs_each_get_their_own() -> None:
    net, (one, other) = twice(), torch.randn(2, 1, 2, 4, 4)
    with torch.no_grad():
        with capture(net, "conv,split") as kept:
            plain = net(other)
        assert set(kept) == {"conv", "conv#1", "split"}
        for where in ("conv", "conv#1", "conv#0", "split"):
            with intervene(net, {where: Patch(kept)}):
                assert torch.equal(net(one), plain)
        parts = {"low": kept["split"]["low"], "high": [kept["split"]["high"][0]]}
        with intervene(net, {"split": Patch({"split": parts})}):
            assert torch.equal(net(one), plain)
        for where, source, says in (
            ("conv", kept["conv"], "no activation of 'conv#1' to patch with; there is conv"),
            ("split", {"low": parts["low"]}, "no part 'high.0' of 'split' to patch with; there is low"),
        ):
            with pytest.raises(LayerError, match=f"{says}$"), intervene(net, {where: Patch({where: source})}):
                net(one)
        with capture(net, "split", inputs=True) as kept:
            plain = net(other)
        with intervene(net, {"split": Patch(kept.inputs, on="input")}):
            assert torch.equal(net(one), plain)


def test_the_activation_of_one_image_goes_to_each_of_a_batch_and_takes_no_gradient() -> None:
    source = torch.randn(1, 3, 2, 2)
    found = Patch(source)(CALL, torch.randn(4, 3, 2, 2))
    assert torch.equal(found, source.expand(4, 3, 2, 2)) and found.is_contiguous()
    tensor = torch.randn(1, 3, 2, 2, requires_grad=True)
    source = torch.randn(1, 3, 2, 2, requires_grad=True)
    Patch(source, channels=1)(CALL, tensor).sum().backward()
    assert tensor.grad[0].sum((1, 2)).tolist() == [4, 0, 4] and source.grad is None


@pytest.mark.parametrize(
    ("source", "shape", "says"),
    [
        (torch.ones(1, 3, 2, 2), (1, 3, 4, 4), "the patch for 'layer' is 1x3x2x2; its activation is 1x3x4x4; take"),
        (torch.ones(2, 3), (3, 3), "the patch for 'layer' is 2x3; its activation is 3x3"),
        (torch.ones(()), (3, 3), "the patch for 'layer' is a single number; its activation is 3x3"),
        (torch.ones(3), (3, 3), "the patch for 'layer' is 3; its activation is 3x3"),
    ],
)
def test_a_patch_of_another_shape_is_refused(source: Tensor, shape: tuple[int, ...], says: str) -> None:
    with refused(UsageError, says):
        Patch(source)(CALL, torch.ones(shape))


@pytest.mark.parametrize("source", ["a.jpg", {"layer": None}, None])
def test_a_patch_without_a_tensor_is_refused(source: Any) -> None:
    with pytest.raises(LayerError, match="no part '' of 'layer' to patch with; there is no tensor"):
        Patch(source)(CALL, torch.ones(1, 2))


def test_the_mean_of_the_batch_or_of_other_images_of_its_shape() -> None:
    tensor, others = torch.randn(4, 3, 2, 2), torch.randn(9, 3, 2, 2)
    assert torch.equal(Mean()(CALL, tensor), tensor.mean(0, keepdim=True).expand(4, 3, 2, 2))
    found = Mean({"layer": others}, channels="0,2")(CALL, tensor)
    assert torch.equal(found[:, [0, 2]], others.mean(0)[[0, 2]].expand(4, 2, 2, 2))
    assert torch.equal(found[:, 1], tensor[:, 1])
    with pytest.raises(UsageError, match="no images to average at 'layer'; its tensor has no batch axis"):
        Mean()(CALL, torch.ones(3, 4, 5), nn.Conv2d(1, 1, 1))
    with pytest.raises(UsageError, match="the mean for 'layer' is 1x3x2x2; its activation is 2x3x4x4"):
        Mean(torch.ones(5, 3, 2, 2))(CALL, torch.ones(2, 3, 4, 4))
    with pytest.raises(LayerError, match="no activation of 'layer' to average; there is conv1, conv2"):
        Mean({"conv1": torch.ones(1), "conv2": torch.ones(1)})(CALL, torch.ones(1, 2))


SHAPES = [
    ((2, 3, 4, 5), None, (2, 3)),
    ((2, 4, 5, 3), nn.LayerNorm(3), (1, 2)),
    ((2, 9, 3), nn.Linear(1, 1), (1,)),
    ((3, 4, 5), nn.Conv2d(1, 1, 1), (1, 2)),
]


@pytest.mark.parametrize(("shape", "module", "axes"), SHAPES)
def test_the_mean_of_each_map(shape: tuple[int, ...], module: nn.Module | None, axes: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    assert torch.allclose(Mean(over="positions")(CALL, tensor, module), tensor.mean(axes, keepdim=True).expand(shape))


@pytest.mark.parametrize(("shape", "module", "axes"), SHAPES)
def test_steering_adds_the_direction_everywhere(
    shape: tuple[int, ...], module: nn.Module | None, axes: tuple[int, ...]
) -> None:
    reshaped = (3,) if shape[-1] == 3 else (3, 1, 1)
    tensor, direction = torch.randn(shape), torch.randn(3, dtype=torch.float64)
    judge = tensor + 2.5 * direction.float().reshape(reshaped)
    assert torch.equal(Steer(direction, 2.5)(CALL, tensor, module), judge)
    channel = Steer(direction, 2.5, channels=1)(CALL, tensor, module)
    assert torch.equal(channel != tensor, (judge != tensor) & (torch.arange(3) == 1).reshape(reshaped))


def test_steering_by_a_whole_activation_and_by_none() -> None:
    tensor, direction = torch.randn(2, 3, 4, 4), torch.randn(3, 4, 4)
    assert torch.equal(Steer(direction)(CALL, tensor), tensor + direction)
    at = Steer(direction, positions="1x2-3")(CALL, tensor)
    assert torch.equal(at[:, :, 1, 2:], (tensor + direction)[:, :, 1, 2:]) and torch.equal(
        at[:, :, 2:], tensor[:, :, 2:]
    )
    assert Steer(direction, scale=0)(CALL, tensor) is tensor
    with pytest.raises(UsageError, match="the direction for 'layer' is 1x5; its activation is 2x3x4x4"):
        Steer(torch.ones(5))(CALL, tensor)
