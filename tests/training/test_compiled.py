"""A watched loop with compiled parts compiles what the same loop compiles unwatched, and ends with the same bits."""

import gc
import shutil
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hookscope.training import Monitor
from tests.nets import Function
from tests.training.watched import step

pytestmark = pytest.mark.filterwarnings("ignore")


def net() -> Any:
    block = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3))
    layers = {"conv": nn.Conv2d(1, 4, 3), "bn": nn.BatchNorm2d(4), "block": block}
    return Function(lambda net, x: net.block(net.bn(net.conv(x))), **layers)


class Loop:
    """Nine steps, of which a part is compiled. ``facts`` are its compilations, its error, its weights and a number."""

    backend = "eager"

    def __init__(self, part: str, options: dict[str, Any], watched: bool) -> None:
        from torch._dynamo.utils import counters

        gc.collect()  # the optimizers of earlier tests
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        self.part, self.net, self.notes = part, net(), []
        self.optimizer = torch.optim.Adam(self.net.parameters(), 0.01)
        sizes, stance = options.get("sizes", (5,)), options.get("stance")
        settings = {name: value for name, value in options.items() if name not in ("sizes", "stance", "fullgraph")}
        step = self.compiled(options.get("fullgraph", False))
        monitor = Monitor(every=3, on_trouble=self.notes.append) if watched else nullcontext()
        error = None
        with torch._dynamo.config.patch(**settings), monitor as self.monitor:
            try:
                for at in range(9):
                    if at == 2 and stance:
                        torch.compiler.set_stance(stance)
                    size = sizes[at % len(sizes)]
                    step(torch.randn(size, 1, 6, 6), torch.randint(0, 3, (size,)))
            except Exception as raised:
                error = type(raised).__name__
            finally:
                torch.compiler.set_stance("default")
        weights = b"".join(value.numpy().tobytes() for value in self.net.state_dict().values())
        stats = counters["stats"]
        self.facts = stats["unique_graphs"], stats["calls_captured"], error, weights, torch.rand(1).item()

    def compiled(self, fullgraph: bool) -> Any:
        net, optimizer = self.net, self.optimizer
        options = {"backend": self.backend or self.counter, "fullgraph": fullgraph}
        forward, update = net, optimizer.step
        if self.part == "model":
            forward = torch.compile(net, **options)
        elif self.part == "model in place":
            net.compile(**options)
        elif self.part == "block":
            net.block = torch.compile(net.block, **options)
        elif self.part == "block in place":
            net.block.compile(**options)
        elif self.part == "function":
            forward = torch.compile(lambda x: net(x) * 2, **options)
        elif self.part == "step":
            update = torch.compile(optimizer.step, **options)
        elif self.part == "function that steps":
            update = torch.compile(lambda: optimizer.step(), **options)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            F.cross_entropy(forward(x), y).backward()
            update()
            optimizer.zero_grad()

        return torch.compile(step, **options) if self.part == "whole step" else step

    def layers(self, metric: str) -> list[str]:
        """The layers that have a metric, in the last sampled step."""
        return [row["layer"] for row in self.monitor.rows if row["step"] == 6 and row[metric] is not None]


PARTS = {
    "model": ([""], ["conv", "bn", "block.2"]),
    "model in place": ([""], ["conv", "bn", "block.2"]),
    "block": (["conv", "bn", "block"], ["conv", "bn", "block.2"]),
    "block in place": (["conv", "bn", "block"], ["conv", "bn", "block.2"]),
    "function": ([], ["conv", "bn", "block.2"]),
    "step": (["conv", "bn", "block.0", "block.1", "block.2"], ["conv", "bn", "block.2"]),
    "function that steps": (["conv", "bn", "block.0", "block.1", "block.2"], ["conv", "bn", "block.2"]),
    "whole step": ([], []),  # the gradients are zero at its end
}


MANY = ("model", "model in place", "block", "step", "function", "function that steps")  # the others show the same


@pytest.mark.parametrize("part", [pytest.param(part, marks=[pytest.mark.slow] * (part in MANY)) for part in PARTS])
def test_as_often_as_unwatched_and_what_is_eager_is_seen(part: str) -> None:
    plain, watched = Loop(part, {}, False), Loop(part, {}, True)
    assert plain.facts == watched.facts and plain.facts[0] > 0 and plain.facts[2] is None
    assert (watched.layers("activation_mean"), watched.layers("gradient_norm")) == PARTS[part]
    assert watched.monitor.steps == 9 and watched.monitor.sampled == 5
    assert [row["step"] for row in watched.monitor.rows if row["update_to_weight"]][:: 5 * 3] == [0]
    assert ["compiled" in note for note in watched.notes] == [True] * ("model" in part or "block" in part)


@pytest.mark.parametrize("part", [pytest.param("model", marks=pytest.mark.slow), "block in place"])
@pytest.mark.parametrize(
    "options",
    [
        {"recompile_limit": 1, "fullgraph": True},
        pytest.param({"error_on_recompile": True}, marks=pytest.mark.slow),
        pytest.param({"stance": "fail_on_recompile"}, marks=pytest.mark.slow),
        {"stance": "force_eager"},
        pytest.param({"sizes": (5, 6, 7), "fullgraph": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_loop_that_must_not_compile_again_runs(part: str, options: dict[str, Any]) -> None:
    plain, watched = Loop(part, options, False), Loop(part, options, True)
    assert plain.facts == watched.facts and plain.facts[2] is None


def test_a_model_that_was_compiled_before_is_not_compiled_again() -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter, model = CompileCounter(), net()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for watching in (nullcontext(), Monitor(every=2), Monitor(model, optimizer, every=2), nullcontext()):
        with watching:
            for _ in range(3):
                step(compiled, optimizer, torch.ones(2, 1, 6, 6))
    assert counter.frame_count == 1


def test_a_function_that_is_not_to_be_compiled_is_seen_within_one_that_is() -> None:
    torch._dynamo.reset()
    model = net()
    eager = torch.compiler.disable(lambda x: model.block(x))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    forward = torch.compile(lambda x: eager(model.bn(model.conv(x))), backend="eager")
    with Monitor(every=1, on_trouble=lambda text: None) as monitor:
        step(forward, optimizer, torch.ones(2, 1, 6, 6))
    seen = {row["layer"] for row in monitor.rows if row["activation_mean"] is not None}
    assert seen == {"block.0", "block.1", "block.2"}


@pytest.mark.parametrize(("is_compiled", "most"), [(False, 45), (True, 60)])
def test_a_step_that_is_not_sampled_calls_few_functions_of_the_watching(is_compiled: bool, most: int) -> None:
    torch._dynamo.reset()
    layer = net()
    model = torch.compile(layer, backend="eager") if is_compiled else layer
    optimizer = torch.optim.SGD(layer.parameters(), 0.01)
    calls: list[str] = []

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("hookscope."):
            calls.append(frame.f_code.co_qualname)

    with Monitor(every=1000):
        for step in range(6):
            if step == 5:
                sys.setprofile(count)
            optimizer.zero_grad()
            model(torch.ones(2, 1, 6, 6)).sum().backward()
            nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()
        sys.setprofile(None)
    assert {"TrainingWatcher._before_step", "TrainingWatcher._after_step"} <= set(calls)
    assert len(calls) <= most, calls


@pytest.mark.slow
@pytest.mark.parametrize("part", ["model", "step", "whole step"])
def test_with_the_backend_inductor(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no compiler of C++")
    monkeypatch.setattr(Loop, "backend", "inductor")
    plain, watched = Loop(part, {}, False), Loop(part, {}, True)
    assert plain.facts == watched.facts and plain.facts[0] > 0 and watched.monitor.steps == 9
