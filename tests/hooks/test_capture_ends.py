"""How a capture ends, by itself, by a failure or a stop, alone or nested: the model is as it was."""

import copy
import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookscope
from hookscope.errors import InputError, UsageError
from hookscope.hooks.model_state import ModelSnapshot
from tests.helpers import hooks_on, numbers
from tests.hooks.nets import MODES, ZOO, built, captured, raises
from tests.nets import Function, X, chain, conv, row


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ZOO)
def test_the_model_is_as_it_was(name: str, mode: str) -> None:
    model, inputs = built(name)
    twin, twin_inputs = built(name)
    before, attributes = ModelSnapshot(model), [list(vars(module)) for module in model.modules()]
    with MODES[mode](), hookscope.capture(model, "*", types=("all",), inputs=True):
        torch.manual_seed(1)
        model(**inputs)
    random = torch.get_rng_state()
    with MODES[mode]():
        torch.manual_seed(1)
        twin(**twin_inputs)
    assert [c for c in before.changes() if not c.what.startswith(("buffer", "random state"))] == []
    assert [list(vars(module)) for module in model.modules()] == attributes
    assert all(map(torch.equal, model.buffers(), twin.buffers())) and torch.equal(random, torch.get_rng_state())


def oddly_set() -> nn.Sequential:
    """Modes, gradient flags and hooks that nobody would restore by chance."""
    net = nn.Sequential(
        conv(2), nn.BatchNorm2d(1), nn.ReLU(inplace=True), nn.Sequential(conv(3), nn.Dropout()), conv(1)
    )
    net[1].eval()
    net[3].eval()
    net[0].weight.requires_grad_(False)
    net[4].weight.grad = torch.ones(1, 1, 1, 1)
    net[3].register_forward_hook(lambda *call: None)
    net[0].register_forward_pre_hook(lambda *call: None)
    net[4].register_full_backward_hook(lambda *call: None)
    return net


@pytest.mark.parametrize("at", range(5))
def test_a_model_is_as_it_was_after_a_failure_in_a_layer(at: int) -> None:
    net = oddly_set()
    net[at].register_forward_pre_hook(raises)
    before = ModelSnapshot(net)
    with pytest.raises(RuntimeError, match="as asked"), hookscope.capture(net, "*", inputs=True):
        net(X)
    assert before.changes() == []


@pytest.mark.parametrize("stop", [False, True])
def test_a_model_is_as_it_was_after_success_and_after_a_stop(stop: bool) -> None:
    net = oddly_set()
    before = ModelSnapshot(net)
    with hookscope.capture(net, "3.0", stop=stop, transform=lambda output: output.mean()):
        net(X)
    assert before.changes() == []
    net[3].train()
    before = ModelSnapshot(net)
    with hookscope.capture(net, "0", stop=True):
        net(X)
    assert before.changes() == []  # the dropout was not reached, and drew no number


def test_an_exception_half_way_keeps_what_ran_and_the_next_pass_starts_anew() -> None:
    net, failing = chain(1), []
    with torch.no_grad(), hookscope.capture(net, inputs=True) as activations:
        failing.append(net[3].register_forward_hook(raises))
        with pytest.raises(RuntimeError):
            net(X)
        assert list(activations) == ["0", "2"] and not activations.complete and activations.did_not_run == ("4",)
        assert numbers(activations["2"]) == [-5, 1]
        failing.pop().remove()
        net(row(2, -4))
        assert list(activations) == ["0", "2", "4"] and activations.complete and activations.did_not_run == ()
    assert [numbers(activations[index]) for index in range(3)] == [[4, -8], [-11, 1], [3, 4]]
    assert [numbers(kept) for kept in activations.inputs.values()] == [[2, -4], [4, 0], [0, 1]]


def test_what_was_undecided_in_a_failed_pass_is_not_dropped_from_the_next() -> None:
    def forward(net: Any, order: str) -> None:
        for name in order:
            getattr(net, name)(X)
        if order == "ab":
            raise RuntimeError("as asked")

    net = Function(forward, a=conv(1), b=conv(1), c=conv(1))
    with torch.no_grad(), hookscope.capture(net, "-2:") as activations:
        with pytest.raises(RuntimeError, match="as asked"):
            net("ab")
        net("cba")
    assert list(activations) == ["b", "a"]


def test_a_capture_entered_again_gives_new_activations() -> None:
    net = chain(1)
    again = hookscope.capture(net, 0, stop=True)
    with torch.no_grad(), again as first:
        net(X)
    with torch.no_grad(), again as second:
        net(row(3, 3))
    assert (numbers(first[0]), numbers(second[0])) == ([2, -4], [6, 6]) and second.did_not_run == ("2", "4")


@pytest.mark.parametrize("mode", MODES)
def test_nested_captures_keep_the_same_values(mode: str) -> None:
    net = chain(1)
    with MODES[mode](), hookscope.capture(net) as outer, hookscope.capture(net, types=("all",)) as inner:
        assert numbers(net(X)) == [3, 4]
    assert [numbers(kept) for kept in outer.values()] == [[2, -4], [-5, 1], [3, 4]]
    assert [numbers(kept) for kept in inner.values()] == [[2, -4], [2, 0], [-5, 1], [0, 1], [3, 4]]
    assert hooks_on(net) == 0


def test_each_of_two_nested_blocks_ends_by_its_own_stop() -> None:
    net = chain(1)
    with torch.no_grad(), hookscope.capture(net) as outer:
        with hookscope.capture(net, 1, stop=True) as inner:
            net(X)
            raise AssertionError("not reached")
        assert list(inner) == ["2"] and list(outer) == ["0", "2"] and not outer.complete
        net(row(2, -4))
        assert outer.complete
    assert [numbers(kept) for kept in outer.values()] == [[4, -8], [-11, 1], [3, 4]] and numbers(inner[1]) == [-5, 1]
    assert hooks_on(net) == 0
    with torch.no_grad(), hookscope.capture(net, 0, stop=True) as outer:
        with hookscope.capture(net) as inner:
            net(X)
        raise AssertionError("not reached")
    assert list(outer) == ["0"] and list(inner) == []
    with torch.no_grad(), hookscope.capture(net, 2, stop=True) as outer:
        with hookscope.capture(net, 0, stop=True) as inner:
            net(X)
        net(X)
        raise AssertionError("not reached")
    assert list(outer) == ["4"] and list(inner) == ["0"]


def test_a_stop_ends_the_pass_after_the_last_wanted_call() -> None:
    net, ran = chain(1), []
    for layer in net:
        layer.register_forward_hook(lambda layer, *call: ran.append(layer))
    with torch.no_grad(), hookscope.capture(net, "0,1", stop=True) as activations:
        net(X)
        raise AssertionError("not reached")
    assert ran == list(net[:3]) and list(activations) == ["0", "2"] and not activations.complete
    assert activations.did_not_run == ("4",)


def test_a_stop_leaves_nothing_behind() -> None:
    net, references = chain(1), []
    net[1].register_forward_hook(lambda layer, args, output: references.append(weakref.ref(output)))
    gc.disable()
    try:
        with (
            torch.no_grad(),
            hookscope.capture(net, 1, stop=True, transform=lambda output: output.sum().item()) as kept,
        ):
            references.append(weakref.ref(x := X * 1))
            net(x)
        del x
        assert len(references) == 2 and [reference() for reference in references] == [None, None]
    finally:
        gc.enable()
    assert kept[1] == -4 and torch.is_grad_enabled()
    assert numbers(net(X)) == [3, 4]


def test_a_failure_leaves_nothing_behind_and_activations_do_not_hold_the_model() -> None:
    net, references = chain(1), []
    with torch.no_grad(), hookscope.capture(net, "all", types=("all",), inputs=True) as activations:
        net[1].register_forward_hook(raises)
        x = X * 1
        references.append(weakref.ref(x))
        with pytest.raises(RuntimeError):
            net(x)
    del x
    activations.clear()
    gc.collect()
    assert references[0]() is None
    net = chain(1)
    activations = captured(net)
    model = weakref.ref(net)
    del net
    gc.collect()
    assert model() is None and numbers(activations[0]) == [2, -4]


def captures(net: nn.Module, x: Tensor) -> None:
    with hookscope.capture(net, gradients=True, inputs=True, transform=torch.relu):
        net(x)


def measures(net: nn.Module, x: Tensor) -> None:
    with hookscope.StatisticsCollector(net):
        net(x)


USES: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "capture": captures,
    "statistics": measures,
    "list_layers": lambda net, x: hookscope.list_layers(net, inputs=(x,)),
    "trace_events": lambda net, x: hookscope.trace_events(net, x),
    "ablate_each": lambda net, x: hookscope.ablate_each(net, x, layers="0"),
    "layer_gradients": lambda net, x: hookscope.layer_gradients(net, x),
    "cam": lambda net, x: hookscope.class_activation_maps(net, x, "0"),
}


@pytest.mark.parametrize("use", USES)
def test_a_model_is_freed_with_its_last_name(use: str) -> None:
    net = nn.Sequential(conv(1), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2)).eval()
    x = torch.ones(1, 1, 2, 2)
    USES[use](copy.deepcopy(net), x)  # imports inside of the first use may keep its frame
    freed = weakref.ref(net)
    gc.disable()  # it would free the model later, in a cycle
    try:
        USES[use](net, x)
        del net
        assert freed() is None
    finally:
        gc.enable()


def test_a_capture_is_open_once() -> None:
    net = chain()
    capture = hookscope.capture(net)
    for _ in range(2):  # one block after the other is fine
        with capture as activations:
            net(X)
            with pytest.raises(UsageError, match="open already"), capture:
                pass
        assert len(activations) == 3 and hooks_on(net) == 0


@pytest.mark.parametrize("wrong", [None, "resnet18", nn.Conv2d, [chain()]])
def test_what_is_no_model_is_refused_in_one_line(wrong: Any) -> None:
    with pytest.raises(UsageError, match="is not a model; give an "):
        hookscope.capture(wrong)


def holds_itself(x: Tensor) -> Any:
    values: list[Any] = [x]
    return [*values, values.append(values) or values]


def nested(x: Tensor) -> Any:
    value: Any = x
    for _ in range(3000):
        value = [value]
    return value


@pytest.mark.parametrize("odd", [holds_itself, nested])
def test_an_output_that_cannot_be_walked_is_an_error_of_one_line(odd: Callable[[Tensor], Any]) -> None:
    net = nn.Sequential(Function(odd), Function(lambda values: X))
    with pytest.raises(InputError, match="nested too deeply, or holds itself"), hookscope.capture(net, "*"):
        net(X)
    assert hooks_on(net) == 0


BLOCKS: list[Callable[[nn.Module], Any]] = [
    hookscope.capture,
    hookscope.StatisticsCollector,
    lambda net: hookscope.intervene(net, {"0": hookscope.interventions.Zero()}),
    lambda net: hookscope.change_gradients(net, {"0": hookscope.ZeroGradient()}),
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_compiled_model_that_calls_no_hook_is_told_at_the_end(block: Callable[[nn.Module], Any]) -> None:
    torch._dynamo.reset()  # beyond its limit of compilations a model runs as it is, and calls its hooks
    net = nn.Sequential(conv(2))
    compiled = torch.compile(net, backend="eager")
    compiled(X)
    with pytest.warns(UserWarning, match="torch.compile calls none") as warned, block(net):
        compiled(X)
    assert {warning.filename for warning in warned} == {__file__}


def test_statistics_of_a_first_compiled_pass_are_as_without_it() -> None:
    net = nn.Sequential(conv(2), nn.BatchNorm2d(1)).eval()
    with hookscope.StatisticsCollector(net) as expected:
        net(X)
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="eager")
    with warnings.catch_warnings(action="ignore"), hookscope.StatisticsCollector(net) as collector:
        compiled(X)
    assert str(collector.table()) == str(expected.table())


def per_image(net: nn.Module, x: Tensor) -> Any:
    return torch.vmap(lambda image: net(image[None])[0], in_dims=1)(x.movedim(0, 1))


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "vmap": per_image,
    "grad": lambda net, x: torch.func.grad(lambda y: net(y).sum())(x),
    "jacrev": lambda net, x: torch.func.jacrev(lambda y: net(y).sum())(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_values_kept_inside_a_transform_are_plain_after_it(transform: str) -> None:
    net, x = nn.Conv2d(3, 2, 1), torch.rand(4, 3, 2, 2)
    with hookscope.capture(net, inputs=True) as activations:
        TRANSFORMS[transform](net, x)
    kept, taken = activations[0], activations.inputs[0]
    expected = net(x)
    assert torch.allclose(kept.detach().reshape(expected.shape), expected)
    assert kept.detach().numpy().shape == (expected[:, None] if transform == "vmap" else expected).shape
    assert taken.detach().numpy().size == x.numel()


@pytest.mark.parametrize("stop", [False, True])
def test_the_pass_of_another_thread_goes_on_when_a_capture_begins_and_ends(stop: bool) -> None:
    net, own, other = chain(), X, X + 1
    expected = net(other)
    switch, results, ended = sys.getswitchinterval(), list[bool](), threading.Event()

    def work() -> None:
        while not ended.is_set():
            results.append(bool(torch.equal(net(other), expected)))

    threads = [threading.Thread(target=work) for _ in range(2)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for _ in range(50):
            with hookscope.capture(net, "0", stop=stop) as activations:
                net(own)
            assert torch.equal(activations["0"], net[0](own))
    finally:
        ended.set()
        sys.setswitchinterval(switch)
        for thread in threads:
            thread.join()
    assert results and all(results)


def test_parts_of_a_pass_that_run_in_other_threads_are_kept() -> None:
    pool = ThreadPoolExecutor(2)
    branches = Function(
        lambda net, x: sum(pool.map(lambda part: part(x), (net.a, net.b))), a=nn.Conv2d(1, 4, 1), b=nn.Conv2d(1, 4, 1)
    )
    with hookscope.capture(branches) as activations:
        branches(X)
    assert sorted(activations) == ["a", "b"] and torch.equal(activations["b"], branches.b(X))


def test_a_function_of_a_hook_may_wait_for_a_pass_of_another_thread() -> None:
    net, pool = chain(), ThreadPoolExecutor(1)
    transform = lambda kept: (pool.submit(net, X).result(), kept)[1]  # noqa: E731
    with hookscope.capture(net, "0", transform=transform) as activations:
        net(X)
    assert torch.equal(activations["0"], net[0](X))


def test_hooks_are_gone_where_the_warning_about_compiled_code_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    net = chain()
    utils = SimpleNamespace(counters={"frames": {"ok": 1}})
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", utils)
    with pytest.raises(UserWarning, match="calls none"), hookscope.capture(net):
        pass
    assert not any(layer._forward_hooks for layer in net.modules())
