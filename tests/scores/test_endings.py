"""Models that end in a softmax or a sigmoid, and models with several outputs: which scores, and what is said."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hookscope.errors import ModelError, OutputNote
from hookscope.explain import class_activation_maps, saliency_maps
from hookscope.faithfulness import measure_faithfulness
from hookscope.hooks import capture, ending_of, output_of
from hookscope.interventions import ablate_each
from hookscope.models import load_model
from hookscope.scores import class_scores, predict, predictions, probabilities
from hookscope.scores.target import Target
from tests.exports import to_onnx, to_pt2
from tests.nets import Function

ENDS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "nn.Softmax": ("softmax", lambda: nn.Softmax(1)),
    "F.softmax": ("softmax", lambda: Function(lambda x: F.softmax(x, dim=-1))),
    "softmax of maps": ("softmax", lambda: Function(lambda x: x[:, :, None, None].softmax(1).flatten(1))),
    "nn.LogSoftmax": ("log_softmax", lambda: nn.LogSoftmax(1)),
    "nn.Sigmoid": ("sigmoid", nn.Sigmoid),
    "torch.sigmoid": ("sigmoid", lambda: Function(torch.sigmoid)),
}


def body() -> nn.Sequential:
    torch.manual_seed(3)
    layers = nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)
    return nn.Sequential(*layers).eval()


def image() -> Tensor:
    return torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(1)) * 20


def shares_by_hand(kind: str, logits: Tensor) -> Any:
    z = logits.detach().double().numpy()
    if kind == "sigmoid":
        return 1 / (1 + np.exp(-z))
    return np.exp(z - z.max(1, keepdims=True)) / np.exp(z - z.max(1, keepdims=True)).sum(1, keepdims=True)


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_scores_are_the_logits_and_probabilities_are_the_models_own(name: str, grad: Any) -> None:
    kind, end = ENDS[name]
    net, x = body(), image()
    with grad():
        logits = net(x)
        output = output_of(nn.Sequential(*net, end()), x)
    assert (found := ending_of(output)) is not None and found.kind == kind
    with pytest.warns(OutputNote, match=f"mine ends in a {kind}: the scores are the values before it"):
        scores = class_scores(output, "mine")
    assert torch.equal(scores.as_subclass(Tensor), logits)
    np.testing.assert_allclose(probabilities(scores).numpy(), shares_by_hand(kind, logits), rtol=1e-12)
    top = predictions(scores[0], None, Target("top:1"))[0]
    assert top.probability == pytest.approx(float(shares_by_hand(kind, logits).max()), rel=1e-12)


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.filterwarnings("ignore::hookscope.errors.OutputNote")
def test_maps_and_ablations_are_of_the_logit(name: str) -> None:
    kind, end = ENDS[name]
    net, x = body(), image()
    ended = nn.Sequential(*net, end())
    cams = [class_activation_maps(each, x, "name:2", 2)[0].values for each in (net, ended)]
    maps = [saliency_maps(each, x, 2)[0].values.numpy() for each in (net, ended)]
    np.testing.assert_array_equal(*cams)
    np.testing.assert_array_equal(*maps)
    assert cams[0].any() and maps[0].any()
    plain_rows, own_rows = (ablate_each(each, x, "0", 2).channels for each in (net, ended))
    assert [row.score_after for row in own_rows] == [row.score_after for row in plain_rows]
    with torch.no_grad():  # by hand: channel 1 of the first convolution at 0
        net[0].weight[1], net[0].bias[1] = 0, 0  # type: ignore[index,operator]
        by_hand = shares_by_hand(kind, net(x))[0, 2]
    row = next(row for row in own_rows if row.channel == 1)
    assert row.probability_after == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize("name", ["F.softmax", "torch.sigmoid"])
@pytest.mark.filterwarnings("ignore::hookscope.errors.OutputNote")
def test_deletion_follows_the_models_own_probability(name: str) -> None:
    kind, end = ENDS[name]
    x, values = image(), np.arange(256.0).reshape(16, 16)
    [found] = measure_faithfulness(nn.Sequential(*body(), end()), x, {"map": values}, 2, steps=4, baselines=False)
    mean = x.mean((2, 3), keepdim=True).expand_as(x)
    ends = [shares_by_hand(kind, body()(each))[0, 2] for each in (x, mean)]
    assert found.curves["deletion"][[0, -1]].tolist() == pytest.approx(ends, rel=1e-5)


@pytest.mark.filterwarnings("ignore::hookscope.errors.OutputNote")
def test_hooks_that_hand_on_copies_keep_the_ending() -> None:
    net = nn.Sequential(*body(), nn.Softmax(1))
    with capture(net, "*", leaves=True):
        output = output_of(net, image())
    assert torch.equal(class_scores(output), body()(image()))


def test_probabilities_of_an_unknown_operation_are_taken_by_their_logarithms() -> None:
    shares = torch.tensor([[0.7, 0.2, 0.1]])
    with pytest.warns(OutputNote, match="returns probabilities: the scores are their logarithms"):
        scores = class_scores(shares)
    np.testing.assert_allclose(probabilities(scores).numpy(), shares.numpy(), rtol=1e-6)
    sure = torch.tensor([[40.0, 1.0, 0.0]]).softmax(1)  # its largest value is exactly 1
    with pytest.warns(OutputNote, match="returns probabilities"):
        np.testing.assert_allclose(probabilities(class_scores(sure)).numpy(), sure.numpy(), rtol=1e-6)
    for logits in (torch.tensor([[0.7, 0.2, 0.2]]), torch.tensor([[1.0, 0.0]]), torch.tensor([[1.2, -0.2]])):
        assert class_scores(logits) is logits


V, W, MAPS = torch.tensor([[3.0, 1.0]]), torch.tensor([[9.0, 8.0, 7.0]]), torch.zeros(1, 4, 6, 6)


@pytest.mark.parametrize(
    ("output", "chosen"),
    [
        ({"features": MAPS, "embedding": W, "scores": V}, "scores"),
        ({"hidden": W, "y": V}, "y"),
        ((W, V), "0"),
        ((V[:, :1], V, W), "1"),
        ({"score": V[:, :1], "y": V}, "score"),
        ((MAPS, V), "1"),
        ({"x": W, "y": W.softmax(1)}, "y"),
    ],
)
@pytest.mark.filterwarnings("ignore:mine returns prob")
def test_of_several_outputs_what_looks_like_scores_is_named_and_taken(output: Any, chosen: str) -> None:
    with pytest.warns(OutputNote, match=f"{chosen} is taken as the scores of classes; load_model"):
        scores = class_scores(output, "mine")
    taken = output[chosen] if isinstance(output, dict) else output[int(chosen)]
    assert torch.allclose(scores.softmax(1), taken if chosen == "y" and len(taken[0]) == 3 else taken.softmax(1))


def test_outputs_that_are_as_likely_are_not_chosen_from() -> None:
    with pytest.raises(ModelError, match=r"0 of 1x4x6x6.*choose one with load_model\(..., model_output=NAME\)"):
        class_scores((MAPS, V, W), "mine")


NETS = """
import torch
class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(12, 4), torch.nn.Linear(12, 3)
    def forward(self, x):
        return {"first": self.a(x.flatten(1)), "second": self.b(x.flatten(1))}
"""


def test_an_output_is_chosen_by_name_or_position(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(NETS)
    x = torch.rand(1, 3, 2, 2)
    whole = load_model(f"{tmp_path}/two.py:Two", seed=4).model(x)
    for name in ("second", "1", 1):
        net = load_model(f"{tmp_path}/two.py:Two", seed=4, model_output=name)
        assert torch.equal(net.model(x), whole["second"])
    assert type(net.model).__name__ == "Two"
    (tmp_path / "box.py").write_text(NETS.replace("second", "Pred_Box"))
    net = load_model(f"{tmp_path}/box.py:Two", seed=4, model_output="Pred_Box")  # no classes, so that its name says so
    assert torch.equal(net.model(x)["Pred_Box"], whole["second"])
    assert [row.probability for row in predict(net, x)] == [None] * 3
    assert len(predict(Function(lambda x: {0: x.mean((2, 3))}), x)) == 3
    with pytest.raises(ModelError, match=r"has no output 'third'; it returns first, second"):
        load_model(f"{tmp_path}/two.py:Two", model_output="third").model(x)


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("write", [to_onnx, to_pt2])
def test_files_of_other_formats_give_the_same(tmp_path: Path, name: str, write: Any) -> None:
    kind, end = ENDS[name]
    suffix = "onnx" if write is to_onnx else "pt2"
    net = load_model(write(nn.Sequential(*body(), end()), tmp_path / f"net.{suffix}"), device="cpu")
    with torch.no_grad():
        logits = body()(image())
        output = output_of(net.model, image())
    told = f"mine (ends in a {kind}|returns probabilities)"
    with pytest.warns(OutputNote, match=told):
        scores = class_scores(output, "mine")
    np.testing.assert_allclose(probabilities(scores).numpy(), shares_by_hand(kind, logits), rtol=1e-4)
    if name != "softmax of maps":
        np.testing.assert_allclose(scores.as_subclass(Tensor).numpy(), logits.numpy(), rtol=1e-4)


def test_what_was_written_over_is_no_softmax_any_more() -> None:
    def zeroed(net: nn.Module, x: Tensor) -> Tensor:
        shares = net.head(x.flatten(1)).softmax(1)  # type: ignore[operator]
        shares[:, 0] = 0
        return shares

    def emptied(net: nn.Module, x: Tensor) -> Tensor:
        logits = net.head(x.flatten(1))  # type: ignore[operator]
        shares: Tensor = logits.softmax(1)
        logits.zero_()
        return shares

    x = torch.rand(1, 3, 2, 2)
    for forward in (zeroed, emptied):
        net = Function(forward, head=nn.Linear(12, 3)).eval()
        with torch.no_grad():
            output = output_of(net, x)
            assert ending_of(output) is None and torch.equal(output, net(x))


def test_an_output_alone_keeps_what_was_before_it() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 3), nn.Softmax(1), nn.Identity())
    with capture(net, "*", leaves=True) as activations:
        output = output_of(net, torch.rand(1, 3, 2, 2))
    ending = ending_of(output)
    assert ending is not None and torch.equal(ending.before().softmax(1), output)
    assert ending_of(activations["2"]) is None and pickle.loads(pickle.dumps(activations["2"].detach())) is not None


def test_a_gradient_inside_the_forward_pass_is_no_convolution() -> None:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = net.conv(x.detach()).sum()  # type: ignore[operator]
            (slope,) = torch.autograd.grad(y, [net.conv.weight])  # type: ignore[union-attr]
        return x.flatten(1)[:, :3] + slope.sum()

    net = Function(forward, conv=nn.Conv2d(3, 2, 1))
    assert output_of(net, torch.rand(1, 3, 2, 2)).shape == (1, 3)
