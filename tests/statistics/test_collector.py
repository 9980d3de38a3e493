"""A collector of whole models against NumPy on what `capture` kept of the same passes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

import hookscope
from hookscope.errors import InputError, LayerError
from hookscope.hooks import as_float, by_channel
from hookscope.hooks.tensors import tensors_in
from hookscope.statistics.collector import StatisticsCollector
from hookscope.statistics.layer_statistics import LayerStatistics
from hookscope.statistics.totals import RunningStatistics
from tests.helpers import hooks_on

ALL = {"layers": "all", "types": ("all",)}


def images(count: int = 6, channels: int = 3, side: int = 8) -> Tensor:
    return torch.randn(count, channels, side, side, generator=torch.Generator().manual_seed(count))


def names(count: int) -> list[str]:
    return [f"{number}.jpg" for number in range(count)]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make().eval()


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


class Several(nn.Module):
    """Puts out a dictionary of a tensor and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(3, 4, 1), nn.Sigmoid()

    def forward(self, x: Tensor) -> dict[str, Any]:
        found = self.conv(x)
        return {"out": self.act(found), "aux": (found, found.mean((2, 3))), "labels": found.argmax(1), "word": "cat"}


def tokens() -> nn.Module:
    return torchvision.models.VisionTransformer(8, 4, 2, 2, 12, 24, num_classes=3)


def windows() -> nn.Module:
    return torchvision.models.SwinTransformer([2, 2], 12, [2, 2], [2, 3], [2, 2], num_classes=3)


NETS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Tensor]] = {
    "block": (Block, {}, images()),
    "block, every leaf": (Block, ALL, images()),
    "several": (Several, {"layers": "re:.*"}, images()),
    "vit": (tokens, ALL, images()),
    "swin": (windows, ALL, images(6, 3, 32)),
    "channels last memory": (Block, {}, images().to(memory_format=torch.channels_last)),
    "strided": (Block, ALL, images(6, 3, 17)[..., ::2, 1::2]),
    "one picture expanded": (Block, {}, images(1).expand(6, 3, 8, 8)),
    "vectors": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 9), nn.Tanh()), ALL, images()),
    "signals": (lambda: nn.Sequential(nn.Conv1d(3, 5, 3), nn.BatchNorm1d(5), nn.ReLU6()), ALL, images()[..., 0]),
    "clips": (
        lambda: nn.Sequential(nn.Conv3d(3, 5, 3), nn.BatchNorm3d(5), nn.Hardtanh()),
        ALL,
        images(6, 12).unflatten(1, (3, 4)),
    ),
    "tokens": (lambda: nn.Sequential(nn.Linear(8, 5), nn.GELU(), nn.LayerNorm(5)), ALL, images()[:, 0]),
}  # fmt: skip


def judged(found: LayerStatistics, stored: np.ndarray[Any, Any]) -> None:
    """The numbers of a layer against NumPy's on what was stored, ``(N, C, *positions)``."""
    finite = stored[np.isfinite(stored)]
    assert (found.values, found.nan, found.inf) == (stored.size, np.isnan(stored).sum(), np.isinf(stored).sum())
    assert found.zeros == pytest.approx((stored == 0).mean(), rel=1e-12)
    assert (found.min, found.max) == (finite.min(), finite.max())
    scale = np.abs(finite).mean()
    assert found.mean == pytest.approx(finite.mean(), rel=1e-12, abs=1e-12 * scale)
    assert found.std == pytest.approx(finite.std(), rel=1e-9, abs=1e-12 * scale)
    assert found.rms == pytest.approx(np.sqrt((finite**2).mean()), rel=1e-9)
    constant = [(one == one[0]).all() for one in stored.swapaxes(0, 1).reshape(stored.shape[1], -1)]
    assert found.dead_channels == tuple(np.flatnonzero(constant) if stored.size > stored.shape[1] else ())
    low = np.unravel_index(stored.argmin(), stored.shape)
    assert found.low_at is not None and (found.low_at.channel, *found.low_at.position) == low[1:]


def kept(net: nn.Module, x: Any, collector: StatisticsCollector) -> dict[str, np.ndarray[Any, Any]]:
    """What `capture` keeps of a pass, by the key of a statistic."""
    with torch.no_grad(), hookscope.capture(net, collector.layers, collector.types) as activations:
        net(x)
    found = {}
    for call, value in zip(activations.calls, activations.values(), strict=True):
        for part, tensor in tensors_in(value).items():
            if tensor.is_floating_point():
                values = by_channel(as_float(tensor), dict(net.named_modules())[call.name])
                found[f"{call.key} {part}" if part else call.key] = values.double().numpy()
    return found


def collected(
    net: nn.Module, x: Tensor, *sizes: int, order: Sequence[int] | None = None, **told: Any
) -> StatisticsCollector:
    """A collector of ``x`` in batches of these sizes, in this order of images."""
    at = torch.tensor(list(order or range(len(x))))
    with StatisticsCollector(net, **told) as collector, torch.no_grad():
        for part in at.split(list(sizes) or len(at)):
            collector.name_images([names(len(x))[number] for number in part])
            net(x[part])
    assert hooks_on(net) == 0
    return collector


@pytest.mark.parametrize(("make", "told", "x"), NETS.values(), ids=NETS)
def test_every_layer_against_numpy_on_what_capture_kept(make: Any, told: dict[str, Any], x: Tensor) -> None:
    net = seeded(make)
    collector = collected(net, x, **told)
    stored = kept(net, x, collector)
    statistics = collector.totals.statistics()
    assert [found.key for found in statistics] == list(stored) and collector.totals.images == len(x)
    for found in statistics:
        judged(found, stored[found.key])
        assert found.items == len(stored[found.key])


def same(one: RunningStatistics, other: RunningStatistics, places: bool = True, rel: float = 1e-6) -> None:
    """What the network computes differs in the last digits of float32 with the size of its batches: ``rel``."""
    assert one.images == other.images
    for a, b in zip(one.statistics(), other.statistics(), strict=True):
        assert (a.key, a.calls, a.items, a.shape, a.values) == (b.key, b.calls, b.items, b.shape, b.values)
        assert (a.dead_channels, a.duplicate_channels) == (b.dead_channels, b.duplicate_channels)
        scale = b.rms
        for field in ("mean", "std", "min", "max", "rms", "between_images"):
            assert getattr(a, field) == pytest.approx(getattr(b, field), rel=rel, abs=rel * scale), (a.key, field)
        assert a.zeros == pytest.approx(b.zeros, abs=2 / a.values)
        if places:
            assert (a.low_at, a.high_at) == (b.low_at, b.high_at)
        assert a.rank == pytest.approx(b.rank, rel=1e-4)
    for c, d in zip(one.drifts(), other.drifts(), strict=True):
        assert (c.layer, c.items) == (d.layer, d.items)
        np.testing.assert_allclose(c.shift, d.shift, rtol=rel, atol=rel)


@pytest.mark.parametrize("name", ["block", "swin", "vit"])
def test_batches_order_and_shards_change_nothing(name: str) -> None:
    make, told, x = NETS[name]
    net = seeded(make)
    whole = collected(net, x, rank=True, **told).totals
    for sizes in ((1,) * 6, (3, 3), (4, 2)):
        same(collected(net, x, *sizes, rank=True, **told).totals, whole, places=False)
    same(collected(net, x, 2, 4, order=[5, 0, 3, 1, 4, 2], rank=True, **told).totals, whole, places=False)
    joined = RunningStatistics()
    for part in ([3, 4, 5], [], [0], [1, 2]):
        shard = (
            collected(net, x, order=part, rank=True, **told) if part else StatisticsCollector(net, rank=True, **told)
        )
        joined.merge(RunningStatistics.from_state(shard.totals.state_dict()))
    same(joined, whole, places=False)


def test_taken_up_again_it_goes_on() -> None:
    net, x = seeded(Block), images()
    first = collected(net, x[:2], rank=True).totals
    collector = StatisticsCollector(net, rank=True)
    collector.totals = RunningStatistics.from_state(first.state_dict())
    with collector, torch.no_grad():
        collector.name_images(names(6)[2:])
        net(x[2:])
    same(collector.totals, collected(net, x, rank=True).totals)


# -- what is measured --------------------------------------------------------------------------------------------------


def test_a_layer_that_runs_three_times_and_overwrites_what_others_put_out() -> None:
    net, x = seeded(Block), images()
    collector = collected(net, x)
    found = {one.key: one for one in collector.totals.statistics()}
    assert list(found) == ["conv1", "relu", "conv2", "relu#1", "relu#2"]
    assert [found[key].calls for key in found] == [1, 3, 1, 3, 3]
    with torch.no_grad():
        assert found["conv1"].mean == pytest.approx(net.conv1(x).double().mean().item(), rel=1e-6)
    assert found["relu"].min == 0 and found["conv1"].min is not None and found["conv1"].min < 0


def test_images_are_known_by_their_names_or_numbers() -> None:
    net = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False))
    nn.init.ones_(net[0].weight)
    x = torch.zeros(4, 1, 2, 3)
    x[2, 0, 1, 2], x[1, 0, 0, 1], x[3, 0, 1, 0] = 5, -5, torch.nan
    for given, low, high, bad in ((names(4), "1.jpg", "2.jpg", "3.jpg"), (None, "1", "2", "3")):
        with StatisticsCollector(net) as collector, torch.no_grad():
            for part in (slice(0, 1), slice(1, 4)):
                if given is not None:
                    collector.name_images(given[part])
                net(x[part])
        (found,) = collector.totals.statistics()
        assert (found.low_at, found.high_at, found.nonfinite_at) == (
            (low, 0, (0, 1)), (high, 0, (1, 2)), (bad, 0, (1, 0)),
        )  # fmt: skip


def test_names_are_those_of_the_next_pass_alone() -> None:
    net = nn.Conv2d(3, 2, 1)
    nn.init.ones_(net.weight)
    with StatisticsCollector(net) as collector, torch.no_grad():
        collector.name_images(["a"])
        net(images(1))
        net(images(1) + 100)
        collector.name_images(["one", "too", "many"])
        net(images(1) + 200)
    (found,) = collector.totals.statistics()
    assert found.low_at is not None and found.high_at is not None
    assert {found.low_at.image, found.high_at.image} == {"a", "2"} and collector.totals.images == 3


def test_items_that_are_no_images_have_no_name() -> None:
    class Proposals(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x.flatten(2).mT.flatten(0, 1))

    net = Proposals()
    with StatisticsCollector(net, "head") as collector, torch.no_grad():
        net(images(2))
    (found,) = collector.totals.statistics()
    assert found.items == 128 and found.low_at is not None and found.low_at.image is None
    with StatisticsCollector(net, "head") as collector, torch.no_grad():
        collector.name_images(["cat"])
        net(images(1))
    (found,) = collector.totals.statistics()
    assert found.low_at is not None and found.low_at.image == "cat"


def test_pictures_in_a_list_are_as_many_images() -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Conv2d(3, 4, 1)

        def forward(self, pictures: list[Tensor], targets: Any = None) -> list[dict[str, Tensor]]:
            return [OrderedDict(boxes=one) for one in self.body(torch.stack(pictures))]

    net, pictures = Detector(), list(images(3))
    targets = [{"boxes": torch.zeros(2, 4), "masks": torch.zeros(2, 8, 8)}] * 3
    for given in ((pictures,), (pictures, targets)):
        with StatisticsCollector(net) as collector, torch.no_grad():
            collector.name_images(names(3))
            net(*given)
        (found,) = collector.totals.statistics()
        assert collector.totals.images == found.items == 3
        assert found.low_at is not None and found.low_at.image in names(3)


def test_a_picture_without_a_batch() -> None:
    net, x = seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Dropout())), images(1)
    with StatisticsCollector(net, **ALL) as collector, torch.no_grad():
        net(x[0])
    batched = collected(net, x, **ALL).totals.statistics()
    for one, other in zip(collector.totals.statistics(), batched, strict=True):
        assert (one.channels, one.shape, one.items) == (other.channels, other.shape, 1) == (4, (4, 6, 6), 1)
        assert one.mean == pytest.approx(other.mean, rel=1e-6)


def test_the_usual_layers() -> None:
    net = seeded(Block)
    assert [one.call.name for one in collected(net, images()).totals.statistics()] == [
        "conv1", "relu", "conv2", "relu", "relu",
    ]  # fmt: skip
    assert [one.key for one in collected(net, images(), types=("BatchNorm2d",)).totals.statistics()] == ["bn1", "bn2"]
    assert [one.key for one in collected(net, images(), layers="relu#1").totals.statistics()] == ["relu#1"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_kinds_of_numbers(dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()).to(dtype)
    x = images().to(dtype)
    collector = collected(net, x)
    for key, stored in kept(net, x, collector).items():
        judged(next(one for one in collector.totals.statistics() if one.key == key), stored)


class Puts(nn.Module):
    """Puts out what it was made with, whatever it is given."""

    def __init__(self, *outputs: Any) -> None:
        super().__init__()
        self.outputs, self.inner = list(outputs), nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return self.inner(self.outputs.pop(0))


def put(*outputs: Any) -> list[LayerStatistics]:
    net = Puts(*outputs)
    with StatisticsCollector(net, "inner") as collector, torch.no_grad():
        for _ in outputs:
            net(images(2))
    return collector.totals.statistics()


def test_complex_values_by_their_size() -> None:
    values = torch.complex(images(2), images(2).flip(0))
    (found,) = put(values)
    judged(found, values.abs().double().numpy())


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # torch says it once, to whoever comes first
def test_quantised_values_decoded() -> None:
    values = torch.quantize_per_tensor(images(2), 0.05, 10, torch.quint8)
    (found,) = put(values)
    judged(found, values.dequantize().double().numpy())


def test_what_holds_no_values() -> None:
    assert put(torch.zeros(2, 3, dtype=torch.int64)) == put("word") == put(None) == put([]) == []
    for empty in (torch.zeros(0, 3, 4, 4), torch.zeros(2, 3, 0, 4), torch.zeros(2, 0)):
        (found,) = put(empty)
        assert (found.items, found.values, found.mean) == (0, 0, None)
    (found,) = put(torch.tensor(2.5))
    assert (found.items, found.channels, found.mean, found.low_at) == (1, 1, 2.5, (None, 0, ()))


def test_a_head_without_proposals_in_one_pass() -> None:
    found, *_ = put(torch.zeros(0, 3, 7, 7), images(5, 3, 7), torch.zeros(0, 3, 7, 7))
    assert (found.items, found.shape) == (5, (3, 7, 7))
    judged(found, images(5, 3, 7).double().numpy())


def test_nan_and_inf_in_the_first_batch_alone() -> None:
    bad = images(2)
    bad[1, 2, 3, 4], bad[0, 0] = torch.nan, torch.inf
    (found,) = put(bad, images(3))
    assert (found.nan, found.inf, found.items) == (1, 64, 5)
    finite = torch.cat([bad, images(3)]).double().numpy()
    assert found.mean == pytest.approx(finite[np.isfinite(finite)].mean(), rel=1e-12)
    assert found.nonfinite_at == ("0", 0, (0, 0))


def test_another_number_of_channels_is_refused() -> None:
    with pytest.raises(InputError, match="inner put out 4 channels after 3; measure one size at a time"):
        put(images(2, 3), images(2, 4))


# -- BatchNorms --------------------------------------------------------------------------------------------------------


class Norms(nn.Module):
    """Each BatchNorm is given something else: a convolution, what a function made of one, in place or not."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 1)
        self.after_conv, self.after_write, self.after_sum, self.shared = (norm(8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        found = self.conv(x)
        self.seen = [found.clone()]
        x = self.after_conv(found)
        found = F.relu_(self.conv(x[:, :3]))
        self.seen.append(found.clone())
        x = self.after_write(found)
        self.seen.append(x + 1)
        x = self.after_sum(x + 1)
        self.seen.append(torch.cat([x, x * 2]))
        keyword = "x" if isinstance(self.shared, FrozenBatchNorm2d) else "input"
        return self.shared(**{keyword: self.shared(x) * 0 + x * 2})


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, FrozenBatchNorm2d])
@pytest.mark.parametrize("layers", ["conv", None, "all"])
def test_batch_norms_are_judged_by_what_they_are_given(mode: Any, norm: Any, layers: Any) -> None:
    net, x = seeded(lambda: Norms(norm)), images()
    with StatisticsCollector(net, layers, None if layers != "all" else ("all",)) as collector, mode():
        net(x)
    drifts = collector.totals.drifts()
    assert [one.layer for one in drifts] == ["after_conv", "after_write", "after_sum", "shared"]
    for drift, seen in zip(drifts, net.seen, strict=True):
        stored = seen.detach().double().numpy().swapaxes(0, 1).reshape(8, -1)
        eps = getattr(net, drift.layer).eps
        assert drift.items == stored.shape[1]
        np.testing.assert_allclose(drift.shift, stored.mean(1) / np.sqrt(1 + eps), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(drift.ratio, (stored.var(1) + eps) / (1 + eps), rtol=1e-9)


def test_no_drift_where_running_statistics_are_the_data_s_own() -> None:
    net, x = seeded(Block), images()
    with torch.no_grad():
        before = net.conv1(x)
        net.bn1.running_mean.copy_(before.mean((0, 2, 3)))
        net.bn1.running_var.copy_(before.var((0, 2, 3), correction=0))
    drift = collected(net, x, 2, 4).totals.drifts()[0]
    assert drift.updated
    np.testing.assert_allclose(drift.shift, 0, atol=1e-5)
    np.testing.assert_allclose(drift.ratio, 1, rtol=1e-5)


def test_batch_norms_without_running_statistics_have_no_drift() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False), nn.InstanceNorm2d(4))
    assert collected(net, images()).totals.drifts() == []


def test_the_channels_of_what_was_measured_are_those_of_the_batch_norm() -> None:
    """A square of tokens: read as ``(N, L, C)`` by the collector, as ``(N, C, L)`` by the BatchNorm."""
    net = nn.Sequential(nn.Conv1d(3, 6, 3), nn.GELU(), nn.BatchNorm1d(6)).eval()
    x = images()[..., 0]
    stored = net[:2](x).detach().double().numpy()
    drift = collected(net, x).totals.drifts()[0]
    np.testing.assert_allclose(drift.shift * np.sqrt(1 + net[2].eps), stored.mean((0, 2)), rtol=1e-6)


# -- nothing is left behind --------------------------------------------------------------------------------------------


class Fails(nn.Module):
    """Raises between its two layers where the first value is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(3, 4, 1), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        found = self.conv(x)
        if x.isnan().any():
            raise ValueError("as asked")
        return self.relu(found)


def test_a_pass_that_raises_half_way_is_not_counted_at_all() -> None:
    net, x = seeded(Fails), images()
    bad = x.clone()
    bad[0, 0, 0, 0] = torch.nan
    with StatisticsCollector(net) as collector, torch.no_grad():
        net(x[:2])
        collector.name_images(names(6))
        with pytest.raises(ValueError, match="as asked"):
            net(bad)
        net(x[2:])
    assert collector.totals.images == 6 and hooks_on(net) == 0
    assert [one.items for one in collector.totals.statistics()] == [6, 6] and collector.totals.statistics()[0].nan == 0
    with pytest.raises(ValueError, match="as asked"), StatisticsCollector(net) as collector, torch.no_grad():
        [net(one) for one in (x, bad)]
    assert collector.totals.images == 6 and hooks_on(net) == 0


def test_the_same_survey_entered_twice_goes_on() -> None:
    net, x = seeded(Block), images()
    collector = StatisticsCollector(net, rank=True)
    for part in (slice(0, 4), slice(4, 6)):
        with collector, torch.no_grad():
            collector.name_images(names(6)[part])
            net(x[part])
        assert hooks_on(net) == 0
    same(collector.totals, collected(net, x, rank=True).totals)


def test_a_layer_that_does_not_exist_leaves_no_hook() -> None:
    net = seeded(Block)
    with pytest.raises(LayerError), StatisticsCollector(net, "conv9"):
        pass
    assert hooks_on(net) == 0


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_the_model_never_knows(mode: Any, train: bool) -> None:
    x = images()
    plain, watched = (seeded(Block).train(train) for _ in range(2))
    with mode():
        expected = plain(x)
    random, threads = torch.get_rng_state(), torch.get_num_threads()
    with mode(), StatisticsCollector(watched, rank=True, **ALL) as collector:
        found = watched(x)
    assert torch.equal(found, expected) and found.requires_grad == expected.requires_grad
    assert torch.equal(torch.get_rng_state(), random) and torch.get_num_threads() == threads
    for (name, one), (_, other) in zip(plain.state_dict().items(), watched.state_dict().items(), strict=True):
        assert torch.equal(one, other), name
    assert all(module.training is train for module in watched.modules())
    if expected.requires_grad:
        expected.sum().backward()
        found.sum().backward()
        for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
    assert len(collector.totals.statistics()) == 7 and hooks_on(watched) == 0


def test_autocast_around_the_model_is_for_the_model() -> None:
    net, x = seeded(Block), images()
    with torch.autocast("cpu", torch.bfloat16):
        collector = collected(net, x, rank=True)
        stored = kept(net, x, collector)
    for found in collector.totals.statistics():
        judged(found, stored[found.key])
        covariance = np.cov(stored[found.key].swapaxes(0, 1).reshape(6, -1), bias=True)
        shares = np.linalg.eigvalsh(covariance).clip(min=1e-300) / covariance.trace()
        assert found.rank == pytest.approx(np.exp(-(shares * np.log(shares)).sum()), rel=1e-5)


def test_the_whole_of_resnet() -> None:
    net = seeded(lambda: torchvision.models.resnet18(weights=None))
    x = images(2, 3, 64)
    collector = collected(net, x)
    stored = kept(net, x, collector)
    assert len(stored) == 37 and len(collector.totals.drifts()) == 20
    for found in collector.totals.statistics():
        judged(found, stored[found.key])


def test_a_convolution_that_never_runs_and_one_of_another_kind_are_no_error() -> None:
    idle = nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU(), nn.Identity())
    idle[2].layer = nn.Conv2d(3, 4, 3)
    with StatisticsCollector(idle) as collector, torch.no_grad():
        idle(torch.rand(2, 3, 9))
    assert [found.key for found in collector.totals.statistics()] == ["0", "1"]
