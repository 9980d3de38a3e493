"""Gradients of layers and parameters, judged by autograd, by full backward hooks and by arithmetic on paper."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookscope.errors import InputError, LayerError, ModelError, TargetError, UsageError
from hookscope.gradients import GradientChanges, layer_gradients
from hookscope.hooks import size_of, total_norm
from hookscope.hooks.model_state import ModelSnapshot
from hookscope.models.load import load_model
from hookscope.scores.objective import Loss
from tests.nets import Function, PaddedConv, conv, named


def two_blocks() -> nn.Sequential:
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return nn.Sequential(nn.Linear(3, 4), block, nn.Linear(4, 2))


def with_gradients(model: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    """A copy of ``model`` with gradients, and another copy of these."""
    twin = copy.deepcopy(model)
    (twin(torch.arange(3.0)[None]) * 40).sum().backward()
    return twin, {name: parameter.grad.clone() for name, parameter in twin.named_parameters()}


@pytest.mark.parametrize("limit", [0.01, 1.0, 1e9])
@pytest.mark.parametrize("freeze", [(), ("0.weight",)])
def test_changes_of_all_gradients_are_those_of_torch(freeze: tuple[str, ...], limit: float) -> None:
    net = two_blocks()
    judge, before = with_gradients(net)
    judge[0].weight.grad *= not freeze
    nn.utils.clip_grad_value_(judge.parameters(), limit)
    by_value = {name: parameter.grad.clone() for name, parameter in judge.named_parameters()}
    nn.utils.clip_grad_norm_(judge.parameters(), 0.1)
    by_norm = {name: parameter.grad for name, parameter in judge.named_parameters()}
    torch.testing.assert_close(GradientChanges(freeze, limit).of(net)(before), by_value, rtol=0, atol=0)
    torch.testing.assert_close(GradientChanges(freeze, limit, 0.1).of(net)(before), by_norm)
    assert bool(before["0.weight"].any())


def test_gradients_are_scaled_then_clamped_to_a_sign_then_clipped_or_not_changed() -> None:
    net = two_blocks()
    _, before = with_gradients(net)
    changed = GradientChanges(clip_value=0.5, scale=-2.0, sign="negative").of(net)(before)
    for name, gradient in before.items():
        assert torch.equal(changed[name], (gradient * -2).clamp(max=0).clamp(-0.5, 0.5))
    assert any(bool((gradient < 0).any()) for gradient in changed.values())
    assert not GradientChanges()
    for change in ({"scale": 1.0}, {"sign": "positive"}, {"clip_norm": 1.0}, {"freeze": ("a",)}, {"clip_value": 1.0}):
        assert GradientChanges(**change)


@pytest.mark.parametrize(
    ("freeze", "names"),
    [
        (("1",), ["1.0.weight", "1.0.bias", "1.2.weight", "1.2.bias"]),
        (("1.0", "2.bias"), ["1.0.weight", "1.0.bias", "2.bias"]),
        (("2.bias,1.2",), ["1.2.weight", "1.2.bias", "2.bias"]),
        (("re:^[02]$",), ["0.weight", "0.bias", "2.weight", "2.bias"]),
        (("1.*",), ["1.0.weight", "1.0.bias", "1.2.weight", "1.2.bias"]),
    ],
)
def test_freeze_selects_layers_with_their_children_and_parameters(freeze: tuple[str, ...], names: list[str]) -> None:
    changed = GradientChanges(freeze).of(two_blocks())({n: torch.ones(1) for n, _ in two_blocks().named_parameters()})
    assert [name for name, gradient in changed.items() if not gradient] == names


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("conv2", "no layer or parameter 'conv2'; nearest: conv1"),
        *((index, f"no layer or parameter '{index}'") for index in ("3", "0:2", "-1")),
        ("relu", "cannot freeze 'relu'; it has no parameters"),
    ],
)
def test_names_that_cannot_be_frozen_are_refused(name: str, message: str) -> None:
    with pytest.raises(LayerError, match=message):
        GradientChanges((name,)).of(named(conv1=nn.Linear(2, 2), relu=nn.ReLU()))


SCORE = Loss("score", "0")


def norm(*tensors: Tensor) -> float:
    return float(torch.cat([tensor.detach().flatten().double() for tensor in tensors]).norm())


def in_place(net: Any, x: Tensor) -> Tensor:
    """Everything that is hard for module backward hooks: in-place layers, a layer used twice, a shared addition."""
    x = net.relu(net.bn(net.conv1(x)))
    y = net.conv2(x)
    y += x
    y = net.relu(net.conv2(net.relu(y)))
    return net.fc(y.mean((2, 3)))


def out_of_place(net: Any, x: Tensor) -> Tensor:
    """The same without any write: what a full backward hook can see."""
    x = net.bn(net.conv1(x)).relu()
    y = net.conv2(x)
    y = net.conv2((y + x).relu()).relu()
    return net.fc(y.mean((2, 3)))


def hard() -> nn.Module:
    conv1, conv2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
    layers = {"conv1": conv1, "bn": nn.BatchNorm2d(4), "relu": nn.ReLU(inplace=True), "conv2": conv2}
    return Function(in_place, **layers, fc=nn.Linear(4, 3))


def pair() -> tuple[nn.Module, nn.Module]:
    net = hard().eval()
    nn.init.uniform_(net.bn.running_var, 0.5, 2)
    nn.init.uniform_(net.bn.bias, -1, 1)
    judge = copy.deepcopy(net)
    judge.function = out_of_place
    return net, judge


def picture(*shape: int) -> Tensor:
    return torch.rand(shape or (1, 3, 6, 6), generator=torch.Generator().manual_seed(3))


def test_gradients_are_those_of_full_backward_hooks_though_layers_work_in_place() -> None:
    net, judge = pair()
    names, loss = ["conv1", "bn", "conv2", "fc"], Loss("cross-entropy", "1")
    expected: dict[str, list[Any]] = {name: [] for name in names}
    for name in names:
        judge.get_submodule(name).register_full_backward_hook(
            lambda module, *both, name=name: expected[name].insert(0, both)
        )
    value, _ = loss.of(judge(picture().requires_grad_()))
    value.backward()
    report = layer_gradients(net, picture(), loss, names)
    assert [layer.call.key for layer in report.layers] == ["conv1", "bn", "conv2", "conv2#1", "fc"]
    for layer in report.layers:
        (at_input,), (at_output,) = expected[layer.call.name][layer.call.call]
        assert layer.grad_output is not None and layer.grad_input is not None
        assert layer.grad_output.norm == pytest.approx(norm(at_output), rel=1e-5)
        assert layer.grad_input.norm == pytest.approx(norm(at_input), rel=1e-5)
        assert layer.grad_output.mean_abs == pytest.approx(float(at_output.abs().mean()), rel=1e-5)
        assert (layer.output_shape, layer.input_shape) == (tuple(at_output.shape), tuple(at_input.shape))
    for own, (name, parameter) in zip(report.parameters, judge.named_parameters(), strict=True):
        assert parameter.grad is not None and own.gradient is not None
        assert (own.name, own.shape) == (name, tuple(parameter.shape))
        assert own.gradient.norm == pytest.approx(norm(parameter.grad), rel=1e-5)
        assert own.gradient.max_abs == pytest.approx(float(parameter.grad.abs().max()), rel=1e-5)
        assert own.ratio == pytest.approx(norm(parameter.grad) / norm(parameter), rel=1e-5)
    together = norm(*[p.grad for p in judge.parameters() if p.grad is not None])
    assert (report.total_norm, report.value) == pytest.approx((together, value.item()), rel=1e-5)


def test_numbers_worked_out_on_paper() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 1, bias=False))
    net[0].weight.data = torch.tensor([[1.0, 2.0], [-1.0, 0.0]])
    net[0].bias.data = torch.tensor([0.5, 0.0])
    net[2].weight.data = torch.tensor([[3.0, 4.0]])
    report = layer_gradients(net, torch.tensor([[2.0, 1.0]]), SCORE, "all", ("all",))
    first, relu, last = report.layers
    assert report.value == 3 * 4.5
    assert last.grad_output and last.grad_input and (last.grad_output.norm, last.grad_input.norm) == (1.0, 5.0)
    assert relu.grad_output and relu.grad_input and (relu.grad_output.norm, relu.grad_input.norm) == (5.0, 3.0)
    assert relu.grad_input.zeros == 0.5
    assert first.grad_output and first.grad_input and first.grad_output.norm == 3.0
    assert first.grad_input.norm == pytest.approx(math.hypot(3, 6))
    assert first.ratio == pytest.approx(3 / math.hypot(4.5, 2))
    weight = report.parameters[0]
    assert weight.gradient and weight.gradient.norm == pytest.approx(math.hypot(6, 3))
    assert (weight.gradient.max_abs, weight.gradient.zeros, weight.gradient.count) == (6.0, 0.5, 4)
    assert weight.weight_norm == pytest.approx(math.sqrt(6))


def add_double(a: Tensor, b: Tensor) -> dict[str, Any]:
    return {"sum": a + 2 * b, "parts": [a * 3]}


def test_several_inputs_containers_and_keywords() -> None:
    def feeds(net: Any, x: Tensor) -> Tensor:
        """One input of layer ``two`` is made from the other: the flow between them is not the layer's."""
        x = net.first(x)
        parts = net.two(x, b=x * 10)
        y = parts["sum"] + parts["parts"][0]
        return net.same(y, y)["sum"]

    net = Function(feeds, first=nn.Identity(), two=Function(add_double), same=Function(add_double))
    report = layer_gradients(net, torch.ones(1, 1), SCORE, "first,two,same")
    first, two, same = report.layers
    assert two.output_shape == {"sum": (1, 1), "parts.0": (1, 1)}
    assert two.input_shape == {"0": (1, 1), "1": (1, 1)}
    # of the loss 3y: 3 for the sum, 3 for the part; to a 3 + 9, to b 6, whatever b was made from
    assert two.grad_output and two.grad_output.norm == pytest.approx(math.hypot(3, 3))
    assert two.grad_input and two.grad_input.norm == pytest.approx(math.hypot(12, 6))
    assert first.grad_output and first.grad_output.norm == pytest.approx(12 + 60)
    # one tensor given twice is one input
    assert same.grad_input and (same.grad_input.norm, same.grad_input.count) == (3.0, 1)


def test_a_layer_that_writes_into_one_of_its_inputs() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        """The layer changes its second input, which shares memory with the first; the caller uses it further."""
        both = torch.stack([x * 1, x * 10])
        total = both[1]
        y = net.writes(both[0] + 0, total)
        return y + 2 * total + both[1]

    net = Function(forward, writes=Function(lambda x, total: (total.add_(x), x * 3)[1]))
    x = torch.full((1, 1), 2.0)
    report = layer_gradients(net, x, SCORE, "writes")
    assert report.value == float(net(x)) == 3 * 2 + 3 * 22
    (writes,) = report.layers
    assert writes.grad_output and writes.grad_output.norm == 1
    assert writes.grad_input and writes.grad_input.norm == 3


@pytest.mark.parametrize("way", ["root", "hook"])
def test_the_gradient_from_one_input_to_another_is_not_counted(way: str) -> None:
    def between(net: Any, x: Tensor) -> Tensor:
        """From one input of the layer to the other leads a root at 0, or a tensor hook that cannot take None."""
        x = x * 1
        if way == "root":
            b = (x - 1).sqrt()
        else:
            b = x * 2
            b.register_hook(lambda gradient: gradient * 0.5)
            b = b + 1
        return net.two(x, b)["sum"]

    (two,) = layer_gradients(Function(between, two=Function(add_double)), torch.ones(1, 1), SCORE, "two").layers
    assert two.grad_input and (two.grad_input.norm, two.grad_input.nan) == (pytest.approx(math.hypot(1, 2)), 0)


def test_attention_takes_one_tensor_as_three_inputs() -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    net = Function(lambda net, x: net.attention(x, x, x)[0].mean(1), attention=attention).eval()
    x = picture(1, 5, 4).requires_grad_()
    expected = torch.autograd.grad(net(x)[0, 0], x)[0]
    (layer,) = layer_gradients(net, x.detach(), SCORE, "attention").layers
    assert layer.grad_input and layer.grad_input.norm == pytest.approx(norm(expected), rel=1e-5)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_model_does_not_change(around: Any) -> None:
    net, _ = pair()
    net.train()
    net.bn.eval()
    net.conv1.weight.requires_grad_(False)
    net.fc.weight.grad = torch.ones_like(net.fc.weight)
    calls = []
    net.conv2.register_forward_hook(lambda *_: calls.append(1))
    state = ModelSnapshot(net)
    with around():
        report = layer_gradients(net, picture())
    assert state.changes() == []
    assert len(calls) == 2 and torch.equal(net.fc.weight.grad, torch.ones_like(net.fc.weight))
    assert all(layer.grad_output and layer.grad_output.norm > 0 for layer in report.layers)
    frozen = report.parameters[0]
    assert (frozen.frozen, frozen.gradient, frozen.ratio) == (True, None, None)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"loss": lambda output: 1 / 0}, ZeroDivisionError, "division by zero"),
        ({"layers": "conv7"}, LayerError, "no layer 'conv7'"),
        ({"layers": "9"}, LayerError, "no index 9"),
        ({"loss": Loss("score", "3")}, TargetError, "no class 3; the model has 3 classes"),
        ({"loss": 3}, UsageError, "no loss 3"),
        ({"loss": "nll"}, UsageError, "no loss .nll."),
        ({"loss": lambda output: output}, UsageError, "is not a loss: it returned 3 numbers"),
        (
            {"loss": lambda output: output.detach().sum()},
            ModelError,
            r"the result of '<lambda>' has no gradient, but the output of Function has",
        ),
    ],
)
def test_errors_leave_the_model_as_it_was(options: dict[str, Any], error: type[Exception], message: str) -> None:
    net = hard().train()
    state = ModelSnapshot(net)
    with pytest.raises(error, match=message):
        layer_gradients(net, picture(), **options)
    assert state.changes() == []


@pytest.mark.parametrize(("selection", "keys"), [("-1", ["conv2#1"]), ("conv2#1,fc", ["conv2#1", "fc"])])
def test_selections(selection: str, keys: list[str]) -> None:
    assert [layer.call.key for layer in layer_gradients(hard(), picture(), layers=selection).layers] == keys


def test_a_layer_that_does_not_run_is_reported() -> None:
    net = hard()
    net.idle = nn.Conv2d(1, 1, 1)
    report = layer_gradients(net, picture())
    assert report.did_not_run == ("idle",)
    assert [p.gradient for p in report.parameters if p.layer == "idle"] == [None, None]


def test_outputs_without_scores_or_without_a_graph_are_refused() -> None:
    with pytest.raises(ModelError, match="no score for each class"):
        layer_gradients(nn.Sequential(nn.Conv2d(3, 1, 1)), picture())
    cut = named(flat=nn.Flatten(), fc=nn.Linear(108, 2), cut=Function(lambda x: x.detach()))
    with pytest.raises(ModelError, match=r"no gradient; detached inside 'cut' by detach at .*s.py:\d+; let"):
        layer_gradients(cut, picture())


def test_changed_gradients_stand_beside_the_original_ones() -> None:
    net, _ = pair()

    def change(gradients: Any) -> Any:
        return {name: g * (0 if name.startswith("conv1") else 2) for name, g in gradients.items()}

    report = layer_gradients(net, picture(), change=change)
    for parameter in report.parameters:
        assert parameter.gradient and parameter.after
        factor = 0 if parameter.layer == "conv1" else 2
        assert parameter.after.norm == pytest.approx(factor * parameter.gradient.norm, rel=1e-6)
    rest = [p.gradient.norm for p in report.parameters if p.gradient and p.layer != "conv1"]
    assert report.total_after == pytest.approx(2 * math.hypot(*rest), rel=1e-6)


def test_sizes_count_nan_and_inf_and_do_not_overflow() -> None:
    size = size_of([torch.tensor([3.0, -4.0]), torch.tensor([float("nan"), float("-inf"), 0.0])])
    assert size is not None
    assert (size.norm, size.max_abs, size.nan, size.inf, size.count) == (5.0, 4.0, 1, 1, 5)
    assert (size.zeros, size.mean_abs) == (0.2, pytest.approx(7 / 3))
    bad = size_of([torch.tensor([float("nan")])])
    assert bad is not None and (bad.norm, bad.mean_abs, bad.max_abs) == (0.0, 0.0, 0.0)
    assert size_of([]) is None and size_of([torch.zeros(0)]) is None
    assert total_norm([torch.tensor([3.0, float("nan")]), torch.tensor([4.0])]) == 5.0
    for value, dtype in ((3e38, torch.float32), (6e4, torch.float16)):
        size = size_of([torch.full((4,), value, dtype=dtype)])
        assert size is not None and size.norm == pytest.approx(2 * value, rel=1e-3)
    x = torch.ones(1, 1, 1, 2)
    x[..., 1] = float("inf")
    (layer,) = layer_gradients(nn.Sequential(conv(1), nn.Flatten()), x, SCORE).layers
    assert (layer.activation_nonfinite, layer.activation_norm) == (1, 1.0)


@pytest.mark.parametrize("name", ["squeezenet1_1", "mobilenet_v3_small"])
def test_torchvision_models_as_autograd(name: str) -> None:
    net = load_model(name, "none", device="cpu", input_size=(32, 32))
    x, loss = picture(1, 3, 32, 32), Loss("cross-entropy", "7")
    state = ModelSnapshot(net.model)
    report = layer_gradients(net.model, x, loss, "all", ("Conv2d", "BatchNorm2d"))
    assert state.changes() == []
    expected = torch.autograd.grad(loss.of(net.model(x))[0], list(net.model.parameters()))
    for parameter, gradient in zip(report.parameters, expected, strict=True):
        assert parameter.gradient and parameter.gradient.norm == pytest.approx(norm(gradient), rel=1e-3, abs=1e-12)
    assert report.layers and all(layer.grad_input is not None for layer in report.layers)


def test_a_loss_by_its_name_or_by_a_function() -> None:
    net, _ = pair()
    assert layer_gradients(net, picture(), "cross-entropy") == layer_gradients(net, picture(), Loss("cross-entropy"))

    def second(output: Tensor) -> Tensor:
        return output[0, 1]

    report, expected = layer_gradients(net, picture(), loss=second), layer_gradients(net, picture(), Loss("score", "1"))
    assert (report.loss, report.targets, report.value) == ("second", (), expected.value)
    assert (report.layers, report.parameters) == (expected.layers, expected.parameters)


def test_an_image_without_batch_axis_is_refused() -> None:
    net, _ = pair()
    message = r"Function: .*forward\(\) failed on 3x6x6: .*; x\[None\] adds a batch axis"
    state = ModelSnapshot(net)
    with pytest.raises(InputError, match=message):
        layer_gradients(net, picture(3, 6, 6))
    assert state.changes() == []
    mlp = nn.Sequential(nn.Flatten(), nn.Linear(108, 2))
    with pytest.raises(InputError, match="adds a batch axis"):
        layer_gradients(mlp, picture(3, 6, 6))
    with pytest.raises(InputError, match="takes 3 channels and got 4"):  # another mistake
        layer_gradients(net, picture(1, 4, 6, 6))


def test_without_a_selection_layers_with_weights_are_measured() -> None:
    net = nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2))
    layers = [(layer.call.name, layer.call.index) for layer in layer_gradients(net, picture()).layers]
    assert layers == [("0", 0), ("4", None)]
    assert [layer.call.name for layer in layer_gradients(net, picture(), types=("ReLU",)).layers] == ["2"]
    assert [layer.call.name for layer in layer_gradients(net, picture(), layers="0:").layers] == ["0"]
    assert [layer.call.name for layer in layer_gradients(net, picture(), layers="all").layers] == [*"01234"]
    changed = nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(108, 2)))
    assert [layer.call.name for layer in layer_gradients(changed, picture()).layers] == ["1"]
    without = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten())
    assert [layer.call.name for layer in layer_gradients(without, picture()).layers] == ["0", "1"]
    net = nn.Sequential(PaddedConv(1, 2, 3), nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 2, 3)), nn.Flatten())
    report = layer_gradients(net, torch.rand(1, 1, 3, 3), lambda output: output.sum())
    assert [layer.call.key for layer in report.layers] == ["0", "1"]
    assert {p.layer for p in report.parameters} == {"0", "1"}


def test_a_loss_takes_the_class_names_of_a_loaded_model() -> None:
    net = load_model("shapes")
    report = layer_gradients(net, Path(__file__).parents[2] / "samples/shapes/star.png", Loss("cross_entropy", "star"))
    [target] = report.targets
    assert target.label == "star" and report.loss == "cross-entropy"
