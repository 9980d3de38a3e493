"""A collector of whole models against NumPy on what `capture` stored of the same passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

import hookscope
from hookscope.errors import InputError, UsageError
from hookscope.hooks import as_float, by_channel, key_of, tensors_in
from hookscope.statistics import LayerStatistics, RunningStatistics, StatisticsCollector
from tests.helpers import hooks_on, seeded as seeded_with
from tests.nets import Function
from tests.statistics.judge import check_layer, check_same, measured, names

ALL = {"layers": "all", "types": ("all",)}
seeded = partial(seeded_with, seed=3)


def images(count: int = 6, channels: int = 3, side: int = 8) -> Tensor:
    return torch.randn(count, channels, side, side, generator=torch.Generator().manual_seed(count))


class Block(nn.Module):
    """One ReLU called three times, in place each time, and a BatchNorm after a convolution and after a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        first = self.relu(self.bn1(self.conv1(x)))
        second = self.relu(self.bn2(self.conv2(first) + first))
        return self.relu(second - 0.5)


def several_outputs(net: Any, x: Tensor) -> dict[str, Any]:
    output = net.conv(x)
    return {"out": net.act(output), "aux": (output, output.mean((2, 3))), "labels": output.argmax(1), "word": "cat"}


def tokens() -> nn.Module:
    return torchvision.models.VisionTransformer(8, 4, 2, 2, 12, 24, num_classes=3)


def windows() -> nn.Module:
    return torchvision.models.SwinTransformer([2, 2], 12, [2, 2], [2, 3], [2, 2], num_classes=3)


NETS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Tensor]] = {
    "block": (Block, {}, images()),
    "block, every leaf": (Block, ALL, images()),
    "several outputs": (
        lambda: Function(several_outputs, conv=nn.Conv2d(3, 4, 1), act=nn.Sigmoid()),
        {"layers": "re:.*"},
        images(),
    ),
    "resnet": (lambda: torchvision.models.resnet18(weights=None), {}, images(2, 3, 64)),
    **{
        f"{dtype}": (lambda dtype=dtype: nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()).to(dtype), {}, images().to(dtype))
        for dtype in (torch.float16, torch.bfloat16, torch.float64)
    },
    "vit": (tokens, ALL, images()),
    "swin": (windows, ALL, images(6, 3, 32)),
    "vectors": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 9), nn.Tanh()), ALL, images()),
    "signals": (lambda: nn.Sequential(nn.Conv1d(3, 5, 3), nn.BatchNorm1d(5), nn.ReLU6()), ALL, images()[..., 0]),
    "clips": (
        lambda: nn.Sequential(nn.Conv3d(3, 5, 3), nn.BatchNorm3d(5), nn.Hardtanh()),
        ALL,
        images(6, 12).unflatten(1, (3, 4)),
    ),
    "tokens": (lambda: nn.Sequential(nn.Linear(8, 5), nn.GELU(), nn.LayerNorm(5)), ALL, images()[:, 0]),
}


def captured(net: nn.Module, x: Any, collector: StatisticsCollector) -> dict[str, np.ndarray[Any, Any]]:
    """What `capture` stores of a pass, by the key of a statistic."""
    with torch.no_grad(), hookscope.capture(net, collector.layers, collector.types) as activations:
        net(x)
    stored = {}
    for call, value in zip(activations.calls, activations.values(), strict=True):
        for part, tensor in tensors_in(value).items():
            if not call.name and not tensor.is_floating_point():  # labels
                continue
            values = by_channel(as_float(tensor), dict(net.named_modules())[call.name])
            stored[key_of(call, part)] = values.double().numpy()
    return {key: values for key, values in stored.items() if key != "(model)" or key in keys(collector.totals)}


def collected(
    net: nn.Module, x: Tensor, *sizes: int, order: Sequence[int] | None = None, **options: Any
) -> StatisticsCollector:
    """A collector of ``x`` in batches of these sizes, in this order of images."""
    at = torch.tensor(list(order or range(len(x))))
    with StatisticsCollector(net, **options) as collector, torch.no_grad():
        for part in at.split(list(sizes) or len(at)):
            collector.name_images([names(len(x))[number] for number in part])
            net(x[part])
    assert hooks_on(net) == 0
    return collector


def keys(totals: RunningStatistics) -> list[str]:
    return [layer.key for layer in totals.statistics()]


@pytest.mark.parametrize(("make", "options", "x"), NETS.values(), ids=NETS)
def test_every_layer_against_numpy_on_captured_values(make: Any, options: dict[str, Any], x: Tensor) -> None:
    net = seeded(make)
    collector = collected(net, x, **options)
    stored = captured(net, x, collector)
    assert keys(collector.totals) == list(stored) and collector.totals.images == len(x)
    for layer in collector.totals.statistics():
        check_layer(layer, stored[layer.key])
        assert layer.items == len(stored[layer.key])


@pytest.mark.parametrize("name", ["block", "swin", "vit"])
def test_batches_order_and_shards_change_nothing(name: str) -> None:
    make, options, x = NETS[name]
    net, options = seeded(make), {"rank": True, **options}
    # a net computes other last digits of float32 in batches of another size
    same = partial(check_same, other=collected(net, x, **options).totals, places=False, rel=1e-6)
    for sizes in ((1,) * 6, (4, 2)):
        same(collected(net, x, *sizes, **options).totals)
    same(collected(net, x, 2, 4, order=[5, 0, 3, 1, 4, 2], **options).totals)
    joined = RunningStatistics()
    for part in ([3, 4, 5], [0], [1, 2]):
        shard = collected(net, x, order=part, **options)
        joined.merge(RunningStatistics.from_state(shard.totals.state_dict()))
    joined.merge(StatisticsCollector(net, **options).totals)
    same(joined)


def test_a_collector_continues_from_a_state_and_when_it_is_entered_again() -> None:
    net, x = seeded(Block), images()
    collector = StatisticsCollector(net, rank=True)
    collector.totals = RunningStatistics.from_state(collected(net, x[:2], rank=True).totals.state_dict())
    for part in (slice(2, 4), slice(4, 6)):
        with collector, torch.no_grad():
            collector.name_images(names(6)[part])
            net(x[part])
        assert hooks_on(net) == 0
    check_same(collector.totals, collected(net, x, rank=True).totals, rel=1e-6)


@pytest.mark.filterwarnings("ignore:no pass of")
def test_a_collector_that_saw_no_image_says_so() -> None:
    with StatisticsCollector(nn.Conv2d(3, 2, 1)) as collector:
        pass
    texts = [repr(collector), repr(collector.table()), repr(collector.findings()), repr(hookscope.diagnose(collector))]
    assert all("nothing was measured: no image passed through the model" in text for text in texts)
    with pytest.raises(UsageError, match="there is no plot: nothing was measured"):
        hookscope.plot(collector)


def test_a_layer_that_runs_three_times_in_place() -> None:
    net, x = seeded(Block), images()
    layers = {layer.key: layer for layer in collected(net, x).totals.statistics()}
    assert list(layers) == ["conv1", "relu", "conv2", "relu#1", "relu#2"], "usual layers"
    assert [layer.calls for layer in layers.values()] == [1, 3, 1, 3, 3]
    assert layers["relu"].min == 0 and layers["conv1"].min is not None and layers["conv1"].min < 0
    assert keys(measured(net, x, types=("BatchNorm2d",))) == ["bn1", "bn2"]
    assert keys(measured(net, x, layers="relu#1")) == ["relu#1"]


@pytest.mark.parametrize("named", [True, False])
def test_positions_name_images_by_name_or_number(named: bool) -> None:
    net = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False))
    nn.init.ones_(net[0].weight)
    x = torch.zeros(4, 1, 2, 3)
    x[2, 0, 1, 2], x[1, 0, 0, 1], x[3, 0, 1, 0] = 5, -5, torch.nan
    (layer,) = (collected(net, x, 1, 3).totals if named else measured(net, x, 1, 3)).statistics()
    low, high, nonfinite = names(4)[1:] if named else "123"
    assert (layer.low_at, layer.high_at) == ((low, 0, (0, 1)), (high, 0, (1, 2)))
    assert layer.nonfinite_at == (nonfinite, 0, (1, 0))


def test_names_hold_for_the_next_pass_only() -> None:
    net = nn.Conv2d(3, 2, 1)
    nn.init.ones_(net.weight)
    with StatisticsCollector(net) as collector, torch.no_grad():
        collector.name_images(["a"])
        net(images(1))
        net(images(1) + 100)
        collector.name_images(["one", "too", "many"])
        net(images(1) + 200)
    (layer,) = collector.totals.statistics()
    assert layer.low_at is not None and layer.high_at is not None
    assert {layer.low_at.image, layer.high_at.image} == {"a", "2"} and collector.totals.images == 3


@pytest.mark.parametrize(("count", "items", "image"), [(2, 128, None), (1, 64, "0.jpg")])
def test_items_that_are_no_images_have_a_name_only_for_one_image(count: int, items: int, image: str | None) -> None:
    net = Function(lambda net, x: net.head(x.flatten(2).mT.flatten(0, 1)), head=nn.Linear(3, 4))
    (layer,) = collected(net, images(count), layers="head").totals.statistics()
    assert layer.items == items and layer.low_at is not None and layer.low_at.image == image


def test_each_tensor_of_a_list_is_an_image() -> None:
    net = Function(lambda net, pictures, targets=None: list(net.body(torch.stack(pictures))), body=nn.Conv2d(3, 4, 1))
    targets = [{"boxes": torch.zeros(2, 4), "masks": torch.zeros(2, 8, 8)}] * 3
    for inputs in ((list(images(3)),), (list(images(3)), targets)):
        with StatisticsCollector(net, "body") as collector, torch.no_grad():
            collector.name_images(names(3))
            net(*inputs)
        (layer,) = collector.totals.statistics()
        assert collector.totals.images == layer.items == 3
        assert layer.low_at is not None and layer.low_at.image in names(3)


def test_an_image_without_a_batch_axis() -> None:
    net, x = seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Dropout())), images(1)
    with StatisticsCollector(net, **ALL) as collector, torch.no_grad():
        net(x[0])
    for layer, batched in zip(collector.totals.statistics(), measured(net, x, **ALL).statistics(), strict=True):
        assert (layer.channels, layer.shape, layer.items) == (batched.channels, batched.shape, 1) == (4, (4, 6, 6), 1)
        assert layer.mean == pytest.approx(batched.mean, rel=1e-6)


def put(*outputs: Any) -> list[LayerStatistics]:
    """Statistics of a layer with these outputs, one in each pass."""
    remaining = list(outputs)
    net = Function(lambda net, x: net.inner(remaining.pop(0)), inner=nn.Identity())
    return measured(net, images(len(outputs)), *[1] * len(outputs), layers="inner").statistics()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # torch warns once in a process
def test_complex_values_by_magnitude_and_quantised_values_decoded() -> None:
    values = torch.complex(images(2), images(2).flip(0))
    check_layer(put(values)[0], values.abs().double().numpy())
    values = torch.quantize_per_tensor(images(2), 0.05, 10, torch.quint8)
    check_layer(put(values)[0], values.dequantize().double().numpy())


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_whole_numbers_are_values_too(dtype: torch.dtype) -> None:
    values = (images(2) > 0).to(dtype) * (200 if dtype != torch.bool else 1)
    check_layer(put(values)[0], values.double().numpy())
    (large,) = put(torch.tensor([[2**40 + 1]]))
    assert large.max == 2**40 + 1


def test_outputs_without_values() -> None:
    assert put("word") == put(None) == put([]) == []
    for empty in (torch.zeros(0, 3, 4, 4), torch.zeros(2, 3, 0, 4), torch.zeros(2, 0)):
        (layer,) = put(empty)
        assert (layer.items, layer.values, layer.mean) == (0, 0, None)
    (layer,) = put(torch.tensor(2.5))
    assert (layer.items, layer.channels, layer.mean, layer.low_at) == (1, 1, 2.5, ("0", 0, ()))
    (layer,) = put(torch.zeros(0, 3, 7, 7), images(5, 3, 7), torch.zeros(0, 3, 7, 7))
    assert (layer.items, layer.shape) == (5, (3, 7, 7))
    check_layer(layer, images(5, 3, 7).double().numpy())


def test_channels_of_many_items_of_one_image_are_no_duplicates() -> None:
    """Such as proposals of a detector; with equal rotations sketches would hold only their sum, the same for all."""
    values = torch.randn(200, 300, 1, 1, generator=torch.Generator().manual_seed(5))
    values[:, 7] = values[:, 100]
    assert put(values)[0].duplicate_channels == ((7, 100),)


def test_another_number_of_channels_is_refused() -> None:
    with pytest.raises(InputError, match="inner returned 4 channels after 3; measure one size at a time"):
        put(images(2, 3), images(2, 4))


class Norms(nn.Module):
    """BatchNorms of a convolution, of a tensor changed in place, and of a sum; one is called twice."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 1)
        self.after_conv, self.after_write, self.after_sum, self.shared = (norm(8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        output = self.conv(x)
        self.inputs = [output.clone()]
        output = F.relu_(self.conv(self.after_conv(output)[:, :3]))
        self.inputs.append(output.clone())
        x = self.after_write(output)
        self.inputs.append(x + 1)
        x = self.after_sum(x + 1)
        self.inputs.append(torch.cat([x, x * 2]))
        keyword = "x" if isinstance(self.shared, FrozenBatchNorm2d) else "input"
        return self.shared(**{keyword: self.shared(x) * 0 + x * 2})


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, FrozenBatchNorm2d])
@pytest.mark.parametrize("layers", ["conv", None, "all"])
def test_drifts_are_those_of_the_inputs_of_batch_norms(mode: Any, norm: Any, layers: Any) -> None:
    net, x = seeded(lambda: Norms(norm)), images()
    with StatisticsCollector(net, layers, None if layers != "all" else ("all",)) as collector, mode():
        net(x)
    drifts = collector.totals.drifts()
    assert [drift.layer for drift in drifts] == ["after_conv", "after_write", "after_sum", "shared"]
    for drift, inputs in zip(drifts, net.inputs, strict=True):
        stored = inputs.detach().double().numpy().swapaxes(0, 1).reshape(8, -1)
        eps = getattr(net, drift.layer).eps
        assert drift.items == stored.shape[1]
        np.testing.assert_allclose(drift.shift, stored.mean(1) / np.sqrt(1 + eps), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(drift.ratio, (stored.var(1) + eps) / (1 + eps), rtol=1e-9)


def test_batch_norms_without_running_statistics_have_no_drift() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False), nn.InstanceNorm2d(4))
    assert measured(net, images()).drifts() == []


def test_a_batch_norm_reads_its_input_with_channels_on_axis_1() -> None:
    """A square of tokens: read as ``(N, L, C)`` by the collector, as ``(N, C, L)`` by the BatchNorm."""
    net = nn.Sequential(nn.Conv1d(3, 6, 3), nn.GELU(), nn.BatchNorm1d(6)).eval()
    x = images()[..., 0]
    stored = net[:2](x).detach().double().numpy()
    drift = measured(net, x).drifts()[0]
    np.testing.assert_allclose(drift.shift * np.sqrt(1 + net[2].eps), stored.mean((0, 2)), rtol=1e-6)


def fails_on_nan(net: Any, x: Tensor) -> Tensor:
    output = net.conv(x)
    if x.isnan().any():
        raise ValueError("as asked")
    return net.relu(output)


def test_a_pass_that_raises_is_not_counted_at_all() -> None:
    net, x = seeded(lambda: Function(fails_on_nan, conv=nn.Conv2d(3, 4, 1), relu=nn.ReLU())), images()
    spoiled = x.clone()
    spoiled[0, 0, 0, 0] = torch.nan
    with StatisticsCollector(net) as collector, torch.no_grad():
        net(x[:2])
        collector.name_images(names(6))
        with pytest.raises(ValueError, match="as asked"):
            net(spoiled)
        net(x[2:])
    assert collector.totals.images == 6 and hooks_on(net) == 0
    layers = collector.totals.statistics()
    assert [layer.items for layer in layers] == [6, 6] and layers[0].nan == 0
    with pytest.raises(ValueError, match="as asked"), StatisticsCollector(net) as collector, torch.no_grad():
        [net(inputs) for inputs in (x, spoiled)]
    assert collector.totals.images == 6 and hooks_on(net) == 0


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_the_model_is_unchanged(mode: Any, train: bool) -> None:
    x = images()
    plain, watched = (seeded(Block).train(train) for _ in range(2))
    with mode():
        expected = plain(x)
    random, threads = torch.get_rng_state(), torch.get_num_threads()
    with mode(), StatisticsCollector(watched, rank=True, **ALL) as collector:
        output = watched(x)
    assert torch.equal(output, expected) and output.requires_grad == expected.requires_grad
    assert torch.equal(torch.get_rng_state(), random) and torch.get_num_threads() == threads
    assert all(map(torch.equal, plain.state_dict().values(), watched.state_dict().values()))
    assert all(module.training is train for module in watched.modules())
    if expected.requires_grad:
        expected.sum().backward()
        output.sum().backward()
        for parameter, other in zip(plain.parameters(), watched.parameters(), strict=True):
            assert torch.equal(parameter.grad, other.grad)
    assert len(collector.totals.statistics()) == 7 and hooks_on(watched) == 0
    assert measured(plain, x).statistics()[0].rank is None


def test_autocast_around_the_model_does_not_reach_its_statistics() -> None:
    net, x = seeded(Block), images()
    with torch.autocast("cpu", torch.bfloat16):
        collector = collected(net, x, rank=True)
        stored = captured(net, x, collector)
    for layer in collector.totals.statistics():
        check_layer(layer, stored[layer.key])
        covariance = np.cov(stored[layer.key].swapaxes(0, 1).reshape(6, -1), bias=True)
        shares = np.linalg.eigvalsh(covariance).clip(min=1e-300) / covariance.trace()
        assert layer.rank == pytest.approx(np.exp(-(shares * np.log(shares)).sum()), rel=1e-5)


def test_a_convolution_that_never_runs_is_no_error() -> None:
    net = nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU(), nn.Identity())
    net[2].layer = nn.Conv2d(3, 4, 3)
    assert keys(measured(net, torch.rand(2, 3, 9))) == ["0", "1"]


def test_what_the_model_returns_is_measured_unless_a_measured_layer_returned_it() -> None:
    def of(forward: Callable[..., Any], **layers: nn.Module) -> list[str]:
        return keys(collected(Function(forward, **layers), images(3)).totals)

    fc = nn.Linear(192, 5)
    assert of(lambda net, x: net.fc(x.flatten(1)), fc=fc) == ["fc"]
    assert of(lambda net, x: net.fc(x.flatten(1)).softmax(1), fc=fc) == ["fc", "(model)"]
    assert of(lambda net, x: net.fc(x.flatten(1)).add_(1), fc=fc) == ["fc", "(model)"]
    several = of(lambda net, x: {"logits": net.fc(x.flatten(1)), "mean": x.mean((1, 2, 3))}, fc=fc)
    assert several == ["fc", "(model) mean"]
    assert of(lambda net, x: net.pool(x), pool=nn.MaxPool2d(2)) == ["(model)"]


def test_a_detector_returns_a_mapping_for_each_image() -> None:
    def found(net: Any, x: Tensor) -> list[dict[str, Tensor]]:
        counts = [int(number) for number in range(len(x))]
        return [{"boxes": torch.rand(n, 4) + 1, "labels": torch.full((n,), 7)} for n in counts]

    collector = collected(Function(found, conv=nn.Conv2d(3, 3, 1)), images(6), 4, 2)
    [boxes] = collector.totals.statistics()  # labels of one class are no dead channel
    assert (boxes.key, boxes.values, boxes.channels) == ("(model) boxes", 4 * (0 + 1 + 2 + 3 + 0 + 1), 4)
    assert boxes.low_at is not None and boxes.low_at.image in names(6)
    assert collector.coverage.idle == ("conv",)


def test_whole_numbers_that_a_model_returns_are_labels() -> None:
    def sure(net: Any, x: Tensor) -> dict[str, Tensor]:
        logits = net.fc(x.flatten(1)) + torch.tensor([0.0, 1000.0])
        return {"logits": logits, "label": logits.argmax(1), "seen": logits > 0}

    collector = collected(Function(sure, fc=nn.Linear(192, 2)), images(4))
    assert keys(collector.totals) == ["fc", "(model) logits"]
    alone = collected(Function(lambda x: x.flatten(1).argmax(1)), images(4))
    assert not alone.totals.statistics() and not alone.coverage.unmeasured


def test_one_number_for_each_image_is_one_channel() -> None:
    (layer,) = collected(Function(lambda x: x.mean((1, 2, 3))), images(5), 3, 2).totals.statistics()
    assert (layer.key, layer.items, layer.channels, layer.shape) == ("(model)", 5, 1, (1,))


def test_what_was_left_out_is_counted() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4), nn.Flatten())
    collector = collected(net.eval(), images(2))
    assert collector.coverage.left_out == {"BatchNorm2d": 2, "Flatten": 1}
    assert collector.coverage.words() == "not measured: 2 BatchNorm2d, 1 Flatten"
    assert collected(net, images(2), layers="0").coverage.words() == ""


@pytest.mark.filterwarnings("ignore")
def test_a_scripted_model_is_refused() -> None:
    with pytest.raises(hookscope.HookscopeError, match="scripted or traced: hooks do not fire in it"):
        StatisticsCollector(torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()))).__enter__()


@pytest.mark.parametrize(
    ("layers", "names"),
    [("-1", ["c"]), ("-2:", ["b", "c"]), ("0:-1:2", ["a"]), ("-1,1", ["b", "c"]), ("-1,::relu", ["::relu", "c"])],
)
def test_indices_from_the_end_choose_what_capture_chooses(layers: str, names: list[str]) -> None:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        return net.c(torch.relu(net.b(net.a(x))))

    net = seeded(lambda: Function(forward, a=nn.Conv2d(3, 3, 1), b=nn.Conv2d(3, 3, 1), c=nn.Conv2d(3, 3, 1)))
    ops = "::" in layers
    assert [*measured(net, images(4), 2, 2, layers=layers, ops=ops).layers] == names
    if not ops:
        with hookscope.capture(net, layers=layers) as activations, torch.no_grad():
            net(images(2))
        assert [*activations] == names


def test_a_pass_inside_vmap_is_refused() -> None:
    net = nn.Conv2d(3, 2, 1)
    with pytest.raises(InputError, match="inside torch"), StatisticsCollector(net, "all"):
        torch.vmap(lambda image: net(image[None]))(torch.rand(2, 3, 4, 4))
