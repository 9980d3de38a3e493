"""Which calls are handed on, under which index, in which pass; and when a pass ends early."""

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hookscope.errors import LayerError, ModelError
from hookscope.hooks.activations import capture
from hookscope.hooks.calls import Call
from hookscope.hooks.observer import Observer
from hookscope.hooks.registration import StopForward
from tests.helpers import hooks_on
from tests.nets import Function, conv

X = torch.ones(1, 1, 2, 2)


class Pyramid(nn.Module):
    """Registers out of order, runs its head three times, has a layer that never runs and one with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.head, self.stem = conv(1), nn.Sequential(conv(1), nn.ReLU()), conv(1)
        self.alias = self.stem
        self.fc = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = self.fc(self.stem(x))
        return [self.head(x) for _ in range(3)]


class Keys:
    """A callback that notes the key and index of every call, and returns what ``change`` makes of its arguments."""

    def __init__(self, change: Callable[[Any, Any], Any] = lambda args, kwargs: None) -> None:
        self.calls: list[tuple[str, int | None]] = []
        self.change = change

    def __call__(self, call: Any, module: nn.Module, args: Any, kwargs: Any, *output: Any) -> Any:
        self.calls.append((call.key, call.index))
        return self.change(args, kwargs)


def observed(layers: Any, types: Any = ("Conv2d",), net: nn.Module | None = None) -> list[tuple[str, int | None]]:
    """The wanted calls, which have the same key and index before they run as after."""
    before, after, net = Keys(), Keys(), net or Pyramid()
    with Observer(net, layers, types, after, on_before=before):
        net(X)
    assert hooks_on(net) == 0 and before.calls == after.calls
    return after.calls


@pytest.mark.parametrize(
    ("layers", "types", "expected"),
    [
        ("all", ("Conv2d",), [("stem", 0), ("head.0", 1), ("head.0#1", 2), ("head.0#2", 3)]),
        ("1:3", ("Conv2d",), [("head.0", 1), ("head.0#1", 2)]),
        ("all", ("Linear", "ReLU"), [("fc", 0), ("head.1", 1), ("head.1#1", 2), ("head.1#2", 3)]),
        ("all", nn.Linear, [("fc", 0)]),
        ("all", ("_ConvNd",), [("stem", 0), ("head.0", 1), ("head.0#1", 2), ("head.0#2", 3)]),
        ("0:3", ("all",), [("stem", 0), ("fc", 1), ("head.0", 2)]),
        ("fc", ("Conv2d",), [("fc", None)]),
        ("fc", ("NoSuchType",), [("fc", None)]),
        ("head", ("Conv2d",), [("head", None), ("head#1", None), ("head#2", None)]),
        ("head.0#1,fc", ("Conv2d",), [("fc", None), ("head.0#1", 2)]),
        ("alias", ("Conv2d",), [("stem", 0)]),
        ("ali*,stem,0", ("Conv2d",), [("stem", 0)]),
        ("alias#0", ("Conv2d",), [("stem", 0)]),
        ("re:^$", ("Conv2d",), [("", None)]),
        ("idle", ("Conv2d",), []),
    ],
)
def test_wanted_calls_in_order_of_execution(layers: str, types: Any, expected: list[Any]) -> None:
    assert observed(layers, types) == expected


def test_a_model_that_is_itself_the_layer() -> None:
    assert observed("all", net=conv(1)) == [("", 0)]


@pytest.mark.parametrize(("layers", "keys"), [("-2,fc", ["fc", "head.0#1"]), ("alias", ["stem"])])
def test_calls_that_may_be_wanted_are_handed_on_and_sorted_out_at_the_end(layers: str, keys: list[str]) -> None:
    net, calls = Pyramid(), []
    with (observer := Observer(net, layers, ("Conv2d",), lambda call, *rest: calls.append(call))):
        net(X)
    assert [call.key for call in calls if observer.wanted(call)] == keys
    assert observer.progress.total == 4 and observer.progress.complete


def test_what_did_not_run_in_order_of_registration() -> None:
    net = Pyramid()
    observer = Observer(net, "all,fc", ("Conv2d",), Keys())
    with observer:
        assert observer.progress.did_not_run == ("idle", "head.0", "stem", "fc")
        net.stem(X)
        assert observer.progress.did_not_run == ("idle", "head.0", "fc")
        net(X)
    assert observer.progress.did_not_run == ("idle",)


def test_each_pass_starts_anew_and_a_part_called_alone_continues_the_count() -> None:
    net, keys, events = Pyramid(), Keys(), []
    callbacks = {"on_start": lambda *_: events.append("on"), "on_end": lambda: events.append("off")}
    with Observer(net, "0", ("Conv2d",), keys, **callbacks):
        net(X)
        net(X)
    assert keys.calls == [("stem", 0), ("stem", 0)] and events == ["on", "off", "on", "off"]
    net, keys = Pyramid(), Keys()
    with Observer(net, "all", ("Conv2d",), keys):
        net.stem(X)
        net.head(X)
        net.head(X)
        net(X)
    assert keys.calls[:3] == [("stem", 0), ("head.0", 1), ("head.0#1", 2)] and keys.calls[3:][0] == ("stem", 0)


def countdown(net: Any, x: torch.Tensor, left: int) -> torch.Tensor:
    """Calls itself until nothing is left, and fails at ``fails_at``."""
    if left == net.fails_at:
        raise ValueError("as asked")
    return net.conv(net(x, left=left - 1) if left else x)


def test_a_model_that_calls_itself_is_in_one_pass() -> None:
    net, keys, said = Function(countdown, conv=conv(1)), Keys(), []
    net.fails_at = -1
    observer = Observer(
        net, "all", ("Conv2d",), keys, on_start=lambda *inputs: said.append("on"), on_end=lambda: said.append("off")
    )
    with observer:
        net(X, left=2)
        assert observer.progress.complete
        net.fails_at = 0
        with pytest.raises(ValueError, match="as asked"):
            net(X, left=2)
        assert not observer.progress.complete
        net.fails_at = -1
        net(X, left=1)
        assert observer.progress.complete
    assert said == ["on", "off", "on", "on", "off"]
    assert keys.calls == [("conv", 0), ("conv#1", 1), ("conv#2", 2), ("conv", 0), ("conv#1", 1)]
    assert hooks_on(net) == 0


def test_a_layer_that_calls_itself_returns_innermost_first_with_its_own_input() -> None:
    net, inputs = nn.Sequential(Function(countdown, conv=conv(1))), []
    net[0].forward = lambda x, left=2: net[0](x + 1, left=left - 1) * 2 if left else x

    def on_call(call: Any, module: Any, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        inputs.append((call.key, observer.input, output[0, 0, 0, 0].item()))

    observer = Observer(
        net, "*", ("Conv2d",), on_call, on_input=lambda module, args, kwargs: args[0][0, 0, 0, 0].item()
    )
    with observer:
        net(X)
    assert inputs == [("0", 3, 3), ("0#1", 2, 6), ("0#2", 1, 12), ("", 1, 12)]


def test_a_failed_inner_call_does_not_leave_its_input_to_the_outer_one() -> None:
    def stumbles(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 4:
            raise ValueError("too much")
        try:
            return net[0](x + 1)
        except ValueError:
            return x

    net, inputs = nn.Sequential(Function(stumbles)), []
    observer = Observer(
        net, "0", "all", lambda *call: inputs.append(observer.input), on_input=lambda module, args, kw: args[0].sum()
    )
    with observer:
        net(X)
    assert inputs == [4]


def test_inputs_of_unwanted_calls_are_neither_taken_nor_held_nor_mixed_up() -> None:
    net, held = Pyramid(), []

    def on_call(call: Any, *rest: Any) -> None:
        held.append(observer.input)
        assert not any(layer.open_inputs for layer in observer.progress.layers)

    observer = Observer(net, "3", ("Conv2d",), on_call, on_input=lambda module, args, kwargs: "expected")
    with observer:
        net(X)
    assert held == ["expected"] and observer.input is None
    net, taken = Pyramid(), []
    with Observer(net, "fc", ("Conv2d",), Keys(), on_input=lambda module, args, kwargs: taken.append(module)):
        net(X)
    assert taken == [net.fc]
    net, inputs = Pyramid(), []
    observer = Observer(net, "all", ("Conv2d",), lambda *call: inputs.append(observer.input), on_input=lambda *call: 7)
    with observer:
        handle = net.stem.register_forward_pre_hook(lambda module, args, kwargs: (args, {}), with_kwargs=True)
        net(X)
        handle.remove()
    assert inputs == [7] * 4


def test_the_input_of_a_call_that_failed_is_not_held() -> None:
    net, inputs = Pyramid(), []

    def on_input(*call: Any) -> set[Any]:
        inputs.append(weakref.ref(value := set()))
        return value

    def fails(*call: Any) -> None:
        raise ValueError("as asked")

    observer = Observer(net, "fc", ("Conv2d",), Keys(), on_input=on_input)
    with observer:
        failing = net.fc.register_forward_pre_hook(fails)  # after ours
        with pytest.raises(ValueError, match="as asked"):
            net(X)
        assert inputs[0]() is not None
        failing.remove()
        net(X)
        gc.collect()
        assert [reference() for reference in inputs] == [None, None]
        net.fc.register_forward_pre_hook(fails)
        with pytest.raises(ValueError, match="as asked"):
            net(X)
    gc.collect()
    assert len(inputs) == 3 and inputs[2]() is None and observer.progress.did_not_run == ("fc",)


def test_returned_values_replace_the_output_and_the_arguments() -> None:
    net = nn.Sequential(conv(1), nn.Identity())
    with Observer(net, "0", ("Conv2d",), lambda call, module, args, kwargs, output: output * 0 + 5):
        assert net(X).unique().tolist() == [5]
    net = Function(lambda x, *, by: x * by)
    doubled = Keys(lambda args, kwargs: ((args[0] * 2,), {"by": kwargs["by"] + 1}))
    with Observer(net, "re:^$", ("Conv2d",), Keys(), on_before=doubled):
        assert torch.equal(net(X, by=2.0), X * 2 * 3)


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ("7", r"no index 7; there are 4 Conv2d calls: 0 to 3"),
        ("alias#1", r"no call 'alias#1'; the layer ran once"),
        ("steam", r"no layer 'steam' in Pyramid; nearest: stem"),
        ("2:2", "the range 2:2 is empty"),
    ],
)
@pytest.mark.parametrize("stop", [False, True])
def test_a_selection_without_a_call_is_an_error(layers: str, says: str, stop: bool) -> None:
    net = Pyramid()
    with pytest.raises(LayerError, match=says):  # noqa: PT012
        observer = Observer(net, layers, ("Conv2d",), Keys())
        if stop:
            observer.stop_early()
        with observer:
            net(X)
    assert hooks_on(net) == 0


def test_an_error_in_the_block_is_not_hidden_by_the_error_of_the_selection() -> None:
    net = Pyramid()
    with pytest.raises(ZeroDivisionError), Observer(net, "99", ("Conv2d",), Keys()):  # noqa: PT012
        net(X)
        _ = 1 / 0
    assert hooks_on(net) == 0


@pytest.mark.filterwarnings("ignore")
def test_a_model_without_the_type_or_in_which_hooks_do_not_fire_is_refused() -> None:
    with pytest.raises(ModelError):
        observed("all", "all", torch.jit.script(nn.ReLU()))
    with pytest.raises(LayerError, match=r"no layer of type Conv3d/Q\*; the model has Conv2d \(3\), .*perhaps Conv2d"):
        observed("0", ("Conv3d", "Q*"))


@pytest.mark.parametrize("method", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("at", ["idle", "stem", "fc", ""])
def test_nothing_is_left_of_a_registration_that_failed_half_way(
    monkeypatch: pytest.MonkeyPatch, method: str, at: str
) -> None:
    net = Pyramid()

    def refuse(*args: object, **kwargs: object) -> None:
        raise MemoryError("full")

    monkeypatch.setattr(net.get_submodule(at), method, refuse)
    entered = False
    with pytest.raises(MemoryError), Observer(net, "all,fc", ("Conv2d",), Keys(), on_input=lambda *call: None):
        entered = True
    assert not entered and hooks_on(net) == 0


class TestStop:
    def stopped(self, layers: str, net: nn.Module | None = None) -> tuple[list[str], Observer]:
        net, keys = net or Pyramid(), Keys()
        observer = Observer(net, layers, ("Conv2d",), keys)
        observer.stop_early()
        after = False
        with observer:
            net(X)
            after = True
        assert hooks_on(net) == 0
        assert observer.progress.complete is after
        return [key for key, _ in keys.calls], observer

    @pytest.mark.parametrize(
        ("layers", "keys_of", "ran"),
        [
            ("0", ["stem"], 1),
            ("2", ["head.0#1"], 3),
            ("0:2", ["stem", "head.0"], 2),
            ("0:4:2", ["stem", "head.0#1"], 3),
            ("2,0", ["stem", "head.0#1"], 3),
            ("fc", ["fc"], 0),  # of another type: no index is counted
            ("alias", ["stem"], 1),
            ("stem,alias", ["stem"], 1),
            ("head", ["head"], 0),
            ("head.0#1", ["head.0#1"], 3),
            ("fc,head.*#1", ["fc", "head.0#1", "head.1#1"], 3),
        ],
    )
    def test_after_the_last_wanted_call(self, layers: str, keys_of: list[str], ran: int) -> None:
        keys, observer = self.stopped(layers)
        assert keys == keys_of and not observer.progress.complete and observer.progress.total == ran

    @pytest.mark.parametrize("layers", ["all", "-1", "1:", "idle", "fc,idle", "0:-1"])
    def test_no_early_stop_where_the_last_wanted_call_is_known_only_at_the_end(self, layers: str) -> None:
        _, observer = self.stopped(layers)
        assert observer.progress.complete and observer.progress.total == 4

    def test_a_model_that_catches_its_layers_failures_does_not_catch_the_stop(self) -> None:
        class Careful(Pyramid):
            def forward(self, x: torch.Tensor) -> Any:
                try:
                    return super().forward(x)
                except Exception:
                    return None

        assert self.stopped("0", Careful())[0] == ["stem"]

    def test_a_foreign_stop_goes_on(self) -> None:
        net = Pyramid()
        with pytest.raises(StopForward), Observer(net, "all", ("Conv2d",), Keys()):
            raise StopForward
        assert hooks_on(net) == 0


def test_a_copy_made_inside_the_block_is_a_model_like_any_other() -> None:
    net = nn.Sequential(conv(1))
    with Observer(net, "all", ("Conv2d",), keys := Keys()):
        twin = copy.deepcopy(net)
        twin(X)
        assert keys.calls == []
        net(X)
    twin(X)
    assert keys.calls == [("0", 0)]


def test_an_index_that_is_not_known_before_a_call_is_refused() -> None:
    net = nn.Sequential(nn.Sequential(conv(1), nn.ReLU()))
    message = "the index of '' is not known before it runs: '0' inside it ends first; choose the layer by"
    with pytest.raises(LayerError, match=message), Observer(net, "0", ("Sequential",), Keys(), on_before=Keys()):
        pass
    with Observer(net, "re:^0$", ("Sequential",), Keys(), on_before=(named := Keys())):
        net(X)
    assert named.calls == [("0", 0)] and hooks_on(net) == 0


def again(times: int, reentrant: bool) -> nn.Module:
    """Computes its layer ``a`` so many times, each of them again in the backward pass."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(times):
            # what comes after the layer needs its output: else the recomputation ends within the layer
            x = checkpoint(lambda y: net.a(y).sigmoid(), x, use_reentrant=reentrant)
        return x

    return Function(forward, a=conv(1))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("layers", ["a", "all", "0", "a#0", "0:"])
def test_what_is_computed_again_is_the_same_call_once_more(reentrant: bool, layers: str) -> None:
    net, before, after = again(1, reentrant), Keys(), Keys()
    with Observer(net, layers, ("Conv2d",), after, on_before=before, again=True) as observer:
        net(X.clone().requires_grad_()).sum().backward()
        assert before.calls == after.calls == [("a", 0), ("a", 0)] and observer.progress.total == 1
    with Observer(net, layers, ("Conv2d",), once := Keys()):
        net(X.clone().requires_grad_()).sum().backward()
    assert once.calls == [("a", 0)] and net.a.weight.grad is not None


@pytest.mark.parametrize("layers", ["a", "all"])
def test_all_of_several_calls_are_computed_again(layers: str) -> None:
    net = again(3, reentrant=False)
    with Observer(net, layers, ("Conv2d",), keys := Keys(), again=True):
        net(X.clone().requires_grad_()).sum().backward()
    assert [key for key, _ in keys.calls[:3]] == ["a", "a#1", "a#2"] and len(keys.calls) == 6


@pytest.mark.parametrize("layers", ["a#1", "1", "0:2"])
def test_which_of_several_calls_is_computed_again_is_unknown(layers: str) -> None:
    net, message = again(3, reentrant=False), "computes 'a' again, and which of its 3 calls that is, is unknown"
    with pytest.raises(LayerError, match=message), Observer(net, layers, ("Conv2d",), Keys(), again=True):
        net(X.clone().requires_grad_()).sum().backward()
    assert hooks_on(net) == 0


def test_a_model_pickled_inside_the_block_has_hooks_that_do_nothing() -> None:
    net, before = nn.Sequential(conv(1), nn.ReLU()), Keys()
    with Observer(net, "all", ("all",), after := Keys(), on_before=before):
        saved = pickle.dumps(net)
        output = net(X)
    assert b"hookscope" not in saved
    twin = pickle.loads(saved)
    assert torch.equal(twin(X), output) and len(after.calls) == len(before.calls) == 2


def test_without_types_all_is_every_layer_and_indices_count_convolutions() -> None:
    net = nn.Sequential(nn.Conv2d(3, 2, 1), nn.ReLU(), nn.Sequential(nn.Conv2d(2, 2, 1), nn.Flatten()))

    def calls(layers: Any, types: Any = None) -> list[tuple[str, int | None, int | None]]:
        found: list[Call] = []
        with Observer(net, layers, types, lambda call, *_: found.append(call), ordered=True):
            net(torch.ones(1, 3, 2, 2))
        return [(call.name, call.index, call.order) for call in found]

    assert calls("all") == [("0", 0, 0), ("1", None, 1), ("2.0", 1, 2), ("2.1", None, 3)]
    assert calls("0:") == [("0", 0, 0), ("2.0", 1, 2)]
    assert calls("all", ("ReLU",)) == calls(0, ("ReLU",)) == [("1", 0, 1)]
    assert calls("*") == [*calls("all"), ("2", None, None), ("", None, None)]
    clips = nn.Sequential(nn.Conv3d(1, 1, 1), nn.ReLU())
    with capture(clips) as activations:
        clips(torch.ones(1, 1, 1, 1, 1))
    assert [(call.name, call.index, call.order) for call in activations.calls] == [("0", 0, None)]


@pytest.mark.parametrize(("layers", "told"), [("1", True), ("0", False), ("name:1", False), ("0:2", False)])
def test_an_index_that_is_the_name_of_another_layer_is_told(layers: str, told: bool) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    with warnings.catch_warnings(record=True) as kept:
        warnings.simplefilter("always")
        for _ in range(2):
            with Observer(net, layers, ("Conv2d",), lambda *call: None):
                net(torch.rand(1, 3, 4, 4))
    words = "index 1 is the layer '2'; the layer named 1 is name:1"
    assert {str(each.message) for each in kept} == ({words} if told else set())
