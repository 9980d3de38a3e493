"""The metrics of a training step against NumPy, and the facts of a step against numbers worked out by hand."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hookscope.training import Monitor
from hookscope.training.loss_graph import loss_facts
from hookscope.training.reductions import BatchMoments, StepWeights, is_bias, is_finite, norm, output_sums, values_of
from tests.training.watched import OwnOptimizer, train


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4, 5), (2, 3, 2, 4, 5)])
def test_sums_are_those_of_numpy_far_from_zero_too(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 1000
    (sums,) = output_sums(values)
    array = values.double().numpy()
    assert sums.count == array.size and np.isclose(sums.mean.item(), array.mean())
    assert np.isclose(sums.spread.item() / array.size**0.5, array.std(), rtol=1e-3)
    assert (sums.alive is None) == (len(shape) < 2) and sums.non_finite == 0


def test_channels_parts_and_values_that_are_not_finite_are_counted_where_they_are() -> None:
    tokens = torch.zeros(2, 5, 3)
    tokens[1, 4, 2] = 1
    (sums,) = output_sums(tokens, nn.Linear(3, 3))
    assert sums.alive is not None and sums.alive.tolist() == [False, False, True] and int(sums.nonzero) == 1
    parts = {"a": torch.ones(2), "b": (torch.zeros(3), torch.ones(1, dtype=torch.long), "word", torch.empty(0))}
    assert [sums.count for sums in output_sums(parts)] == [2, 3]
    assert values_of(torch.empty(2, device="meta")) == []
    values = torch.tensor([[1.0, float("nan")], [float("inf"), -float("inf")]])
    (sums,) = output_sums(values)
    assert int(sums.non_finite) == 3
    (large,) = output_sums(torch.full((4,), 3e38))
    assert int(large.non_finite) == 0


def test_norms_of_other_numbers() -> None:
    assert norm(torch.tensor([3 + 4j])).item() == 5
    assert norm(torch.full((4,), 60000.0).half()).item() == 120000
    assert norm(torch.sparse_coo_tensor([[1, 1]], [3.0, 4.0], (3,), check_invariants=True)).item() == 7
    assert is_finite(torch.full((9,), 60000.0).half()) and not is_finite(torch.tensor([1 + float("nan") * 1j]))


def test_moments_of_parts_are_those_of_the_whole() -> None:
    values = torch.randn(9, 2, 5, generator=torch.Generator().manual_seed(1)) * 3 + 7
    whole, parts = (BatchMoments(torch.zeros(2), torch.ones(2), 0.0) for _ in range(2))
    whole.add(values)
    for part in values.split([1, 6, 2]):
        parts.add(part)
    array = values.double().numpy()
    shift = np.sqrt((array.mean((0, 2)) ** 2).mean())
    ratio = np.exp(np.log(array.var((0, 2))).mean())
    for moments in (whole, parts):
        assert np.allclose([each.item() for each in moments.drift()], [shift, ratio], rtol=1e-4)


def test_weights_around_a_step() -> None:
    layer = nn.Linear(2, 1)
    own = dict(layer.named_parameters())
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[3.0, 4.0]]))
        layer.weight.grad, layer.bias.grad = torch.tensor([[1.0, float("inf")]]), torch.tensor([float("nan")])
        weights = StepWeights([own, own], gradients=True)
        layer.weight[0, 0] = 2
        weights.step_is_done()
    metrics = weights.metrics(own)
    assert metrics["weight_norm"] == 5 and metrics["update_to_weight"] == pytest.approx(0.2)
    assert metrics["gradient_non_finite"] == 2 and metrics["weight_non_finite"] == 0
    assert weights.metrics({}) == dict.fromkeys(metrics)
    assert [name for name in ("bias", "bias_ih_l0", "in_proj_bias", "weight", "alpha") if not is_bias(name)] == [
        "weight", "alpha"]  # fmt: skip


Facts = dict[str, Any]


def watched(run: Callable[[nn.Module, torch.optim.Optimizer], object]) -> list[Facts]:
    """The facts of every step of ``run``, which gets a model ``(N, 4)`` to ``(N, 3)`` and its optimizer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with Monitor(every=1, on_trouble=lambda text: None) as monitor:
        run(net, optimizer)
    assert monitor.trouble is None or "backward pass counts as a step" in monitor.trouble
    return monitor.facts


TARGETS = torch.tensor([0, 1, 2, 2, 1, 2])
STEPS = [(torch.full((6, 4), 2.0) + step, TARGETS) for step in range(3)]


def facts_of(data: Any = STEPS, **loop: Any) -> list[Facts]:
    """The facts of every step of the plain loop."""
    return watched(lambda net, optimizer: train(net, optimizer, data, **loop))


def test_the_input_is_that_of_the_first_layer_with_weights() -> None:
    data = torch.randn(6, 4) * 3 + 1
    [facts] = facts_of([(data, TARGETS)])
    assert facts["input_shape"] == [6, 4]
    assert facts["input_mean"] == pytest.approx(float(data.mean()), rel=1e-5)
    assert facts["input_std"] == pytest.approx(float(data.std(correction=0)), rel=1e-5)
    assert (facts["input_min"], facts["input_max"]) == (float(data.min()), float(data.max()))
    assert facts["input_spread"] == pytest.approx(float((data - data[0]).abs().max()))


def test_gradients_modes_batch_loss_and_settings_of_a_step() -> None:
    norms: list[list[float]] = []
    steps = facts_of(before_step=lambda net: norms.append([float(p.grad.norm()) for p in net.parameters()]))
    assert [facts["gradient_norm"] for facts in steps] == pytest.approx([math.hypot(*each) for each in norms], rel=1e-5)
    first, second, _ = steps
    assert (first["parameters"], first["trainable"], first["with_gradient"], first["backwards"]) == (6, 6, 6, 1)
    assert "stale_gradients" not in first and second["stale_gradients"] == 0
    assert (first["train_mode"], first["modes"], first["eval_modes"]) == (True, 2, 0)
    assert (first["batchnorm"], first["batchnorm_values"], first["batchnorm_samples"]) == ("1", 6, 6)
    assert (first["loss_function"], first["loss_input"], first["classes"]) == ("cross_entropy", "Addmm", 3)
    assert (first["targets"], first["target_min"], first["target_max"]) == (6, 0, 2)
    assert (first["optimizer_type"], first["rate"], first["momentum"], first["maximize"]) == ("SGD", 0.1, 0, False)
    assert (first["input_spread"], first["input_std"]) == (0, 0)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize(("leaves_out", "stale"), [("", 0), ("zero_grad", 6)])
def test_gradients_are_stale_only_without_zero_grad(leaves_out: str, stale: int, passes: int) -> None:
    def more(net: nn.Module) -> None:
        for x, y in STEPS[1:passes]:
            F.cross_entropy(net(x), y).backward()

    later = facts_of(before_step=more, leaves_out=leaves_out)[1:]
    assert [(facts["stale_gradients"], facts["backwards"]) for facts in later] == [(stale, passes)] * 2


def test_gradients_of_another_loss_that_are_cleared_before_its_own_are_not_stale() -> None:
    """The generator's loss leaves gradients in the discriminator, which clears them before its own."""
    torch.manual_seed(0)
    one, other = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in (one, other)]
    with Monitor(every=1) as monitor:
        for _ in range(4):
            for net, optimizer in zip((other, one), reversed(optimizers), strict=True):
                net.zero_grad()
                other(one(torch.ones(3, 2))).mean().backward()
                optimizer.step()
    assert {facts.get("stale_gradients", 0) for facts in monitor.facts} == {0}


def test_only_the_gradients_of_an_optimizers_own_parameters_count_as_cleared() -> None:
    """The loss of the generator does not reach it, and leaves gradients in the discriminator."""
    one, other = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in (other, one)]
    with Monitor(every=1) as monitor:
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
                other(one(torch.ones(3, 2)).detach()).mean().backward()
                optimizer.step()
    after = [(facts["optimizer"], facts["gradients_after_backward"]) for facts in monitor.facts]
    assert after == [(0, 2), (1, 0)] * 3


@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
def test_the_last_clipping_of_a_step_and_the_gradient_that_it_left(name: str) -> None:
    original = getattr(nn.utils, name)
    [facts] = facts_of(STEPS[:1], before_step=lambda net: getattr(nn.utils, name)(net.parameters(), 0.0))
    assert (facts["clip_function"], facts["clip_limit"], facts["clip_scaled"]) == (name, 0, False)
    assert (facts["zero_gradients"], facts["gradients_after_backward"], facts["zero_after_backward"]) == (6, 6, False)
    assert getattr(nn.utils, name) is original


@pytest.mark.parametrize("unscales", [True, False])
def test_clipping_knows_whether_the_gradients_still_have_the_loss_scale(unscales: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def run(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(net(torch.randn(6, 4)).square().mean()).backward()
            if unscales:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

    facts = watched(run)
    assert [each["clip_scaled"] for each in facts if "clip_scaled" in each] == [not unscales] * 2
    assert {each["loss_scale"] for each in facts} == {1024.0}


def test_a_run_without_steps_differs_from_one_with_an_optimizer_of_its_own() -> None:
    def own(net: nn.Module, _: torch.optim.Optimizer, rate: float = 0.1) -> None:
        data = ((torch.randn(6, 4), TARGETS) for _ in range(12))
        train(net, OwnOptimizer(net, rate), data, leaves_out="zero_grad")

    steps = watched(own)
    assert [(facts["optimizer"], facts["backwards"], facts["parameters"]) for facts in steps] == [(0, 1, 6)] * 12
    still = watched(partial(own, rate=0.0))
    assert [(facts["backwards"], facts["weights_changed"]) for facts in still] == [(10, False), (12, False)]
    assert still[-1]["optimizers"] == ["SGD"]


LOGITS = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
BCE = F.binary_cross_entropy_with_logits


@pytest.mark.parametrize(
    ("loss_of", "function", "fed_by"),
    [
        (lambda x: F.cross_entropy(x * 2, TARGETS), "cross_entropy", "Mul"),
        (lambda x: F.cross_entropy(x.softmax(1).reshape(6, 3), TARGETS), "cross_entropy", "Softmax"),
        (lambda x: F.cross_entropy(x.softmax(1), TARGETS, label_smoothing=0.1) + x.sum(), "cross_entropy", "Softmax"),
        (lambda x: F.cross_entropy(x.sigmoid().double(), TARGETS) / 4, "cross_entropy", "Sigmoid"),
        (lambda x: F.cross_entropy(x.relu(), F.one_hot(TARGETS).float()), "cross_entropy", "Relu"),
        (lambda x: F.nll_loss(F.log_softmax(x.tanh(), 1), TARGETS), "cross_entropy", "Tanh"),
        (lambda x: F.nll_loss(x.softmax(1), TARGETS), "nll_loss", "Softmax"),
        (lambda x: F.nll_loss((x.softmax(1) + 1e-9).log(), TARGETS), "nll_loss", "Log"),
        (lambda x: BCE(x.sigmoid(), torch.ones(6, 3)), BCE.__name__, "Sigmoid"),
        (lambda x: F.mse_loss(x.softmax(1), torch.ones(6, 3)), "mse_loss", "Softmax"),
    ],
)  # fmt: skip
def test_the_graph_names_the_loss_function_and_what_feeds_it(
    loss_of: Callable[[Tensor], Tensor], function: str | None, fed_by: str | None
) -> None:
    facts = loss_facts([loss_of(LOGITS.clone().requires_grad_())])
    assert (facts.get("loss_function"), facts.get("loss_input")) == (function, fed_by)


@pytest.mark.parametrize(
    ("loss_of", "negated"),
    [
        (lambda loss: -loss, True),
        (lambda loss: -(loss / 4), True),
        (lambda loss: -1 * loss, True),
        (lambda loss: loss / -2, True),
        (lambda loss: 0 - loss, True),
        (lambda loss: -1 * (loss * -0.5), False),
        (lambda loss: loss.neg().neg(), False),
        (lambda loss: loss, False),
        (lambda loss: loss.detach() - loss, False),  # not the loss alone
    ],
)
def test_a_negated_loss(loss_of: Callable[[Tensor], Tensor], negated: bool) -> None:
    loss = F.cross_entropy(LOGITS.clone().requires_grad_() * 2, TARGETS)
    assert loss_facts([loss_of(loss)])["loss_negated"] is negated


@pytest.mark.parametrize(
    ("loss_of", "is_mean"),
    [
        (lambda x: F.cross_entropy(x, TARGETS), True),
        (lambda x: F.cross_entropy(x, TARGETS, reduction="sum"), False),
        (lambda x: F.cross_entropy(x, TARGETS, reduction="none").sum(), False),
        (lambda x: 50 * F.cross_entropy(x, TARGETS), False),
        (lambda x: F.cross_entropy(x, TARGETS) + 30, False),
    ],
)
def test_a_loss_that_is_the_mean_of_its_function_is_told(loss_of: Callable[[Tensor], Tensor], is_mean: bool) -> None:
    assert loss_facts([loss_of(LOGITS.clone().requires_grad_() * 2)])["loss_is_mean"] is is_mean


def test_ignored_targets_tensors_to_fetch_and_losses_without_a_graph_have_no_facts() -> None:
    targets = torch.tensor([1, -100, 1, 1, -100, 1])
    facts = loss_facts([F.cross_entropy(LOGITS.clone().requires_grad_() * 2, targets)])
    assert (facts["targets"], int(facts["target_min"]), int(facts["target_max"])) == (4, 1, 1)
    fetched: list[Tensor] = []

    def fetch(kept: Tensor) -> Tensor:
        fetched.append(kept)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, fetch):
        loss = F.cross_entropy(LOGITS.clone().requires_grad_() * 2, TARGETS)
    assert "targets" not in loss_facts([loss]) and not fetched
    assert loss_facts([torch.tensor(1.0, requires_grad=True)]) == {"loss_without_graph": True}
