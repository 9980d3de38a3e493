"""A watched run that stops at the first value that is not finite."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookscope.errors import NonFiniteError
from hookscope.training import Monitor
from hookscope.training.log.file import read_runs
from tests.nets import Function, named
from tests.training.watched import filled, sgd, step


def spoils_its_weight(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.fc.weight.div_(x.amax() < 2)
    return net.fc(x)


def of_fc(forward: Callable[..., Tensor], bias: float = 0.0, **layers: nn.Module) -> Function:
    return Function(forward, fc=filled(nn.Linear(3, 3), 0, bias), **layers)


NON_FINITE = {
    "layer": (
        named(**{"0": filled(nn.Linear(3, 3), 1e30), "1": filled(nn.Linear(3, 3), 0)}),
        1e20,
        "Inf in the output of 0 (Linear); its input and its parameters are finite",
        "Linear",
    ),
    "weight": (of_fc(spoils_its_weight), 2.0, "the output of fc (Linear); fc.weight is not finite", "weight of fc"),
    "input": (
        of_fc(lambda net, x: net.fc(x)),
        float("nan"),
        "NaN in the input of fc (Linear); it comes from the data; look at the data of this step",
        "input",
    ),
    "function before it": (
        of_fc(lambda net, x: net.fc((x * net.fc.bias.exp()).log())),
        -1.0,
        "NaN in the input of fc (Linear); made by log",
        "log",
    ),
    "overwritten input": (
        of_fc(lambda net, x: net.relu((net.fc(x) - 1e3 * x).log()), 1e4, relu=nn.ReLU(inplace=True)),
        1e4,
        "NaN in the input of relu (ReLU); made by log",
        "log",
    ),
    "after the last layer": (
        of_fc(lambda net, x: (net.fc(x) - x).log(), 9),
        10.0,
        "NaN in the output of the model (Function); made by log",
        "log",
    ),
}


class TestStop:
    @pytest.mark.parametrize("name", NON_FINITE)
    def test_a_value_in_a_pass(self, name: str, tmp_path: Path) -> None:
        net, x, words, operation = NON_FINITE[name]
        optimizer, log = sgd(net), tmp_path / "run.ndjson"
        with pytest.raises(NonFiniteError) as caught, Monitor(every=50, stop_on="non-finite", log=log):  # noqa: PT012
            step(net, optimizer, torch.ones(2, 3))
            step(net, optimizer, torch.full((2, 3), x))
        text = str(caught.value)
        assert text.startswith("step 1: ") and words in text and "\n" not in text and caught.value.exit_code == 3
        [run] = read_runs(log)
        [note] = run.notes
        assert (note["note"], note["text"], note["operation"], note["step"]) == ("non-finite", text, operation, 1)
        assert run.end["reason"] == "stopped"

    def test_the_loss(self) -> None:
        net = filled(nn.Linear(1, 1), 0, -1)
        match = "step 0: the loss is NaN; made by log"
        with pytest.raises(NonFiniteError, match=match), Monitor(stop_on="non-finite"):  # noqa: PT012
            (net(torch.ones(1, 1)).log() * 2).mean().neg().backward()
            pytest.fail("backward went on")

    def test_the_gradient_before_the_weights_are_spoilt(self) -> None:
        net = nn.Sequential(filled(nn.Linear(1, 1), 0), nn.Linear(1, 1, bias=False))
        optimizer = sgd(net)
        before = copy.deepcopy(net.state_dict())
        match = r"gradient of 1\.weight"
        with pytest.raises(NonFiniteError, match=match), Monitor(stop_on="non-finite"):  # noqa: PT012
            net(torch.ones(1, 1)).abs().sqrt().sum().backward()
            optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())

    def test_an_error_that_is_caught_is_raised_again_and_a_sum_that_overflows_is_none(self) -> None:
        net, errors = nn.Linear(1, 1), 0
        with Monitor(stop_on="non-finite"):
            for value in (float("inf"), 1.0, 1.0):
                try:
                    net(torch.full((1, 1), value))
                except NonFiniteError:
                    errors += 1
        assert errors == 3
        net = nn.Identity()
        with Monitor(stop_on="non-finite"):
            net(torch.full((8,), 3e38, requires_grad=True))
            net(torch.full((999,), 6e4, dtype=torch.float16, requires_grad=True))
