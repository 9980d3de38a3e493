"""Registered hooks are removed again: only these, and whatever is raised."""

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from hookscope.errors import ModelError
from hookscope.hooks.registration import HookHandles, check_hookable, hook_tensor, other_hooks_set_aside
from tests.helpers import HOOK_TABLES, hooks_on


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def test_the_count_of_hooks_sees_every_kind() -> None:
    net = chain()
    assert {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs"} <= set(HOOK_TABLES)
    net[0].register_forward_hook(print, with_kwargs=True, always_call=True)
    assert hooks_on(net) == 3


def test_the_three_kinds_fire_and_come_off() -> None:
    net, fired = chain(), []
    with HookHandles() as handles:
        handles.forward_pre(net[0], lambda module, args, kwargs: fired.append("pre"))
        handles.forward(net[0], lambda module, args, kwargs, output: fired.append("forward"))
        output = net(torch.ones(1, 2))
        handles.tensor(output, lambda gradient: fired.append("tensor"))
        output.sum().backward(retain_graph=True)
        assert fired == ["pre", "forward", "tensor"]
    assert hooks_on(net) == 0
    output.sum().backward()
    net(torch.ones(1, 2))
    assert fired == ["pre", "forward", "tensor"]


@pytest.mark.parametrize(
    "register",
    [
        lambda handles, y: handles.tensor(y, lambda gradient: gradient * 5),
        lambda handles, y: handles.node_before(y.grad_fn, lambda gradients: (gradients[0] * 5,)),
    ],
    ids=["of a tensor", "before a node"],
)
def test_a_hook_may_replace_the_gradient_and_comes_off(register: Callable[[HookHandles, Tensor], None]) -> None:
    x = torch.tensor(3.0, requires_grad=True)
    y = x * 4
    with HookHandles() as handles:
        register(handles, y)
        assert torch.autograd.grad(y * 2, x, retain_graph=True)[0] == 40
    assert torch.autograd.grad(y * 2, x)[0] == 8


def test_a_tensor_hook_without_handles_lives_as_long_as_the_tensor() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    y, fired = x * 1, []
    hook_tensor(y, lambda gradient: fired.append(gradient.item()))
    hook_tensor(y, lambda gradient: gradient * 5)
    assert torch.autograd.grad(y * 2, x, retain_graph=True)[0] == 10
    assert torch.autograd.grad(y * 3, x)[0] == 15
    assert fired == [2, 3]


def test_a_hook_on_a_node_sees_what_goes_in_and_out_of_it_and_comes_off() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    y, fired = x * 4, []
    with HookHandles() as handles:
        handles.node(y.grad_fn, lambda inputs, outputs: fired.append((inputs[0].item(), outputs[0].item())))
        torch.autograd.grad(y * 2, x, retain_graph=True)
        assert fired == [(8, 2)]
    torch.autograd.grad(y * 2, x)
    assert fired == [(8, 2)]


class TestCheckHookable:
    def test_takes_an_eager_model(self) -> None:
        check_hookable(chain())

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("inside", [False, True])
    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (torch.jit.script, "is scripted or traced.*pass the eager model"),
            (lambda net: torch.jit.trace(net, torch.ones(1)), "is scripted or traced.*pass the eager model"),
            (torch.compile, "is compiled.*_orig_mod"),
            (lambda net: net.compile() or net, r"is compiled.*before `.compile\(\)`"),
        ],
        ids=["scripted", "traced", "compiled", "compiled in place"],
    )
    def test_refuses_models_that_hide_their_layers(
        self, change: Callable[[nn.Module], nn.Module], says: str, inside: bool
    ) -> None:
        model = change(nn.ReLU())
        with pytest.raises(ModelError, match=f"'0' {says}" if inside else f"the model {says}"):
            check_hookable(nn.Sequential(model) if inside else model)

    @pytest.mark.filterwarnings("ignore")
    def test_takes_the_eager_model_inside_a_compiled_one(self) -> None:
        check_hookable(torch.compile(chain())._orig_mod)


class TestOtherHooksSetAside:
    def test_no_hook_fires_inside_and_all_fire_after_even_an_exception(self) -> None:
        net, fired = chain(), []
        net.register_forward_pre_hook(lambda *args: fired.append("pre"))
        net[0].register_forward_hook(lambda *args: fired.append("forward"))
        net[1].register_full_backward_hook(lambda *args: fired.append("backward"))
        with other_hooks_set_aside(net):
            net(torch.ones(1, 2)).sum().backward()
            assert fired == []
        net(torch.ones(1, 2)).sum().backward()
        assert fired == ["pre", "forward", "backward"]
        net, fired = chain(), []
        net[0].register_forward_hook(lambda *args: fired.append("forward"))
        with pytest.raises(ValueError, match="x"), other_hooks_set_aside(net):
            raise ValueError("x")
        net(torch.ones(1, 2))
        assert fired == ["forward"]

    def test_hooks_registered_inside_fire_and_come_off_and_a_handle_removed_inside_stays_removed(self) -> None:
        net, fired = chain(), []
        theirs = net[0].register_forward_hook(lambda *args: fired.append("theirs"))
        with other_hooks_set_aside(net), HookHandles() as handles:
            handles.forward(net[0], lambda *args: fired.append("ours"))
            net(torch.ones(1, 2))
        assert fired == ["ours"]
        theirs.remove()
        assert hooks_on(net) == 0
        net, fired = chain(), []
        theirs = net[0].register_forward_hook(lambda *args: fired.append("theirs"))
        with other_hooks_set_aside(net):
            theirs.remove()
        net(torch.ones(1, 2))
        assert fired == [] and hooks_on(net) == 0

    def test_hooks_of_the_library_that_defines_the_class_fire(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "site-packages").mkdir()
        (tmp_path / "site-packages" / "library_of_models.py").write_text(LIBRARY)
        monkeypatch.syspath_prepend(tmp_path / "site-packages")
        net, fired = importlib.import_module("library_of_models").Model(), []
        net.register_forward_hook(lambda *args: fired.append("theirs"))
        with other_hooks_set_aside(net):
            assert float(net(torch.ones(1))) == 1
        assert fired == []
        net(torch.ones(1))
        assert fired == ["theirs"]

    def test_hooks_of_torch_fire(self) -> None:
        net = nn.Sequential(prune.l1_unstructured(nn.Linear(4, 1), "weight", 2))
        with torch.no_grad(), other_hooks_set_aside(net):
            net[0].weight_orig.fill_(1.0)
            net[0].bias.zero_()
            assert float(net(torch.ones(1, 4))) == 2


LIBRARY = """
import torch

class Model(torch.nn.Module):
    \"\"\"Needs its own hook, as models of transformers do after their first pass.\"\"\"

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Identity()
        self.kept = []
        self.register_forward_pre_hook(keep)

    def forward(self, x):
        return self.kept.pop()

def keep(model, args):
    model.kept.append(args[0])
"""
