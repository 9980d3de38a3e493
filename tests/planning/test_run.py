"""Plans, judged by arithmetic on paper, by real passes that save tensors, and by real steps of optimizers."""

import itertools

import pytest
import torch
from torch import nn

from hookscope.drawing import draw_rows, figure_bytes
from hookscope.errors import InputError, LayerError, ModelError, UsageError
from hookscope.planning import plan_plot
from hookscope.planning.run import _largest_batch, plan
from tests.drawing.rows import ends, spans, titles
from tests.helpers import refused
from tests.nets import Function, named


def small() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 49, 10))


def test_a_plan_on_paper() -> None:
    cost = plan(small(), batch_size=2, input_size=(9, 9), train=True)
    assert [call.call.name for call in cost.calls] == ["0", "1", "2", "3", "4"]
    assert [call.params for call in cost.calls] == [224, 16, 0, 0, 3930]
    assert [call.macs for call in cost.calls] == [2 * 8 * 49 * 28, 0, 0, 0, 2 * 3920]
    assert [call.receptive_field for call in cost.calls] == [(3, 3)] * 3 + [(9, 9)] * 2
    assert [call.stride for call in cost.calls] == [(1, 1)] * 3 + [None] * 2
    map_bytes = 2 * 8 * 49 * 4
    # the input of the normalisation with its means and deviations, the output of the ReLU, which the linear layer reads
    assert [call.saved for call in cost.calls] == [0, map_bytes + 2 * 8 * 4, map_bytes, 0, 0]
    assert cost.calls[0].bytes_moved == 4 * (2 * 3 * 81 + 224) + map_bytes
    memory = cost.memory
    assert (memory.parameters, memory.gradients, memory.buffers) == (4170 * 4, 4170 * 4, 16 * 4 + 8)
    assert (memory.optimizer, memory.input, memory.saved) == (0, 2 * 3 * 81 * 4, 2 * map_bytes + 64)
    assert sum(memory.at_peak.values()) == memory.peak


def test_inference_keeps_nothing() -> None:
    cost = plan(small(), batch_size=2, input_size=(9, 9))
    map_bytes = 2 * 8 * 49 * 4
    assert (cost.memory.saved, cost.memory.gradients, cost.optimizer) == (0, 0, "")
    assert cost.memory.temporary == 2 * map_bytes  # the input and the output of a layer
    assert cost.memory.peak == sum(
        (cost.memory.parameters, cost.memory.buffers, cost.memory.input, cost.memory.temporary)
    )


def test_the_model_stays_as_it_was() -> None:
    net = small().eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    plan(net, input_size=(9, 9), train=True, optimizer="adam", checkpoint=["1"])
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not net.training
    assert all(parameter.grad is None for parameter in net.parameters())
    assert "forward" not in vars(net[1])


@pytest.mark.parametrize("limit", [10, 2000, 12345, 10**9])
def test_the_largest_batch_fits_and_the_next_one_does_not(limit: int) -> None:
    def peak(batch: int) -> int:
        return max(1000 + batch, 7 * batch + 500)

    largest = _largest_batch(peak, limit)
    assert (largest == 0 or peak(largest) <= limit) and peak(largest + 1) > limit


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"batch_size": 0}, UsageError, ""),
        ({"batch_size": 1.5}, UsageError, ""),
        ({"batch_size": 2**63}, UsageError, ""),
        ({"dtype": "float33"}, UsageError, ""),
        ({"device": "toaster"}, UsageError, ""),
        ({"train": True, "optimizer": "sgdm"}, UsageError, ""),
        ({"train": True, "checkpoint": ["block"]}, LayerError, ""),
        ({"memory": 0}, UsageError, ""),
        ({"input_size": (12, 12)}, InputError, "layer '4' (Linear) takes 392 features and got 800"),
        ({"measure": True, "repeats": 0}, UsageError, ""),
        ({"measure": True, "warm_up": -1}, UsageError, ""),
    ],
)
def test_what_cannot_be_is_one_line(wrong: dict[str, object], error: type[Exception], says: str) -> None:
    with refused(error, says, part="holds"):
        plan(small(), **({"input_size": (9, 9)} | wrong))


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has it")
def test_a_device_that_is_not_there_cannot_be_measured() -> None:
    with pytest.raises(UsageError):
        plan(nn.Linear(2, 2), input_size=(1, 2), measure=True, device="mps")


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookscope.planning.timing.speed", lambda *where: (2e9, 1e9))


@pytest.mark.usefixtures("speed")
def test_measuring_adds_times_to_every_call_and_the_memory_of_a_real_step() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 50), nn.ReLU(), nn.Linear(50, 2))  # no kernel needs a workspace
    found = plan(net, 3, (8, 8), train=True, dtype="float64", measure=True, repeats=1, warm_up=0)
    assert found.measured is not None and found.measured.saved == found.memory.saved
    assert found.measured.peak == pytest.approx(found.memory.peak, rel=0.2)
    assert all(call.forward is not None for call in found.calls)
    assert next(net.parameters()).dtype is torch.float32


@pytest.mark.usefixtures("speed")
def test_measuring_adds_the_effective_field_of_layers_with_weights_and_positions() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.Flatten(), nn.Linear(18, 2)).train()
    nn.init.ones_(net[0].weight)  # each of the 3 x 3 pixels has the same gradient
    found = plan(net, 2, (7, 7), measure=True, repeats=1, warm_up=0)
    assert [call.effective_field for call in found.calls] == [3, None, 3, None, None]
    assert [call.stride for call in found.calls] == [(2, 2)] * 3 + [None] * 2
    assert net.training and net[0].weight.grad is None
    # a model without gradient is measured without them
    net = Function(lambda net, x: torch.from_numpy(net.conv(x).numpy()), conv=nn.Conv2d(3, 4, 3))
    found = plan(net, 1, (7, 7), measure=True, repeats=1, warm_up=0)
    assert "fields were not measured" in found.notes[-1] and found.measured is not None


def test_batch_norm_of_one_value_needs_a_larger_batch() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(8))
    with pytest.raises(InputError, match=r"layer '2' \(BatchNorm2d\) needs several values.*; give a larger batch$"):
        plan(net, input_size=(9, 9), train=True)
    largest = plan(net, 4, (9, 9), train=True, memory=1e5).largest_batch  # type: ignore[arg-type]
    assert largest is not None and largest > 2
    assert plan(net, largest, (9, 9), train=True).memory.peak <= 100_000


def test_a_plan_needs_trained_parameters_but_no_grad_mode() -> None:
    with pytest.raises(ModelError, match="no parameter that is trained"):
        plan(small().requires_grad_(False), input_size=(9, 9), train=True)
    expected = plan(small(), input_size=(9, 9), train=True, optimizer="adam").memory
    with torch.inference_mode():
        assert plan(small(), input_size=(9, 9), train=True, optimizer="adam").memory == expected


NET = named(conv=nn.Conv2d(3, 8, 3), act=nn.Sigmoid(), pool=nn.AvgPool2d(2))


def test_panels_of_training_and_bars_of_the_numbers() -> None:
    found = plan(NET, 2, (9, 9), train=True, optimizer="adam")
    plot = plan_plot(found)
    assert titles(plot) == ["memory so far (kB)", "kept (kB)", "MACs (thousand)", "bytes moved (kB)"]
    held = sum(getattr(found.memory, kind) for kind in ("parameters", "buffers", "optimizer", "input"))
    kept = [held + size for size in itertools.accumulate(call.saved for call in found.calls)]
    so_far = [high for _, _, high in spans(plot, "memory", "bar", "#009e73")]
    assert so_far == pytest.approx([end / 1000 for end in kept])
    assert list(ends(plot, "kept", "bar").values()) == [call.saved / 1000 for call in found.calls]
    assert sorted(ends(plot, "MACs", "bar").values()) == sorted(call.macs / 1000 for call in found.calls)
    assert figure_bytes(draw_rows(plot, lines=["a line"]), ".png").startswith(b"\x89PNG")


@pytest.mark.usefixtures("speed")
def test_inference_has_no_memory_panels_and_times_where_they_were_measured() -> None:
    found = plan(NET, 2, (9, 9), measure=True, repeats=2, warm_up=0)
    plot = plan_plot(found)
    *others, time = titles(plot)
    assert others == ["MACs (thousand)", "bytes moved (kB)"]
    forward = [call.forward.median for call in found.calls if call.forward]
    unit = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[time.split("(")[1].rstrip(")")]
    assert [end * unit for _, _, end in spans(plot, "time", "bar")] == pytest.approx(forward)


def test_a_size_may_be_of_features_or_a_shape_with_its_batch() -> None:
    assert plan(nn.Linear(6, 2), 3, (6,)).input_shape == (3, 6)
    assert plan(nn.Conv2d(3, 2, 1), 3, (1, 3, 5, 4)).input_shape == (3, 3, 5, 4)
