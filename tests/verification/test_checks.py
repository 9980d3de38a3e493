"""Six checks against independent judges: healthy nets pass, and each planted fault fails its own check by name."""

import copy
import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

import hookscope.hooks.activations
import hookscope.hooks.kept
import hookscope.verification.checks
from hookscope.errors import InputError, LayerError, ModelError
from hookscope.hooks.activations import capture
from hookscope.hooks.model_state import ModelSnapshot, random_states
from hookscope.hooks.registration import HookHandles
from hookscope.models.load import load_model
from hookscope.models.loaded import LoadedModel, family_of
from hookscope.models.preprocess import Preprocess
from hookscope.verification.checks import Check, each_check, verify
from hookscope.verification.paired_passes import Edge, noise_pictures, run_fx_graph
from tests.helpers import hooked, hooks_on
from tests.nets import Function

NAMES = ["feature-extractor", "re-computation", "model-output", "inputs", "untouched", "shapes"]


def as_net(model: nn.Module) -> LoadedModel:
    family = family_of(model)
    return LoadedModel(model.eval(), "a net", "none", Preprocess(family, default_size=(8, 8)), None, family, "cpu")


def checks(model: nn.Module, layers: Any = "all", types: Any = ("all",)) -> dict[str, Check]:
    net = as_net(model)
    return {check.name: check for check in verify(net, noise_pictures(net), layers, types)}


def failing(results: dict[str, Check]) -> list[tuple[str, str]]:
    return [(name, check.layer) for name, check in results.items() if check.holds is False]


class Reused(nn.Module):
    """In-place layers, one of them called twice, a residual sum and a layer that is given keywords alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(x + self.conv2(input=x))
        return {"out": self.fc(x.mean((2, 3))), "map": x}


class Counting(nn.Module):
    """Counts its calls in a buffer, and puts the count out or not."""

    def __init__(self, shows: bool) -> None:
        super().__init__()
        self.shows = shows
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x + self.count if self.shows else x + 1


class WritesToItsInput(nn.Module):
    """Goes on with a tensor that a layer has overwritten, without taking what it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu, self.last = nn.Conv2d(3, 4, 1), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        self.relu(x)
        return self.last(x)


class Attending(nn.Module):
    """Attention that looks whether its inputs are one object, called with keywords, returning a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, 0]
        return self.attention(x, key=x, value=x, need_weights=True)[0]


def drawing(shows: bool) -> nn.Module:
    """Draws a random number, and puts it out or not."""
    return Function(lambda x: x + torch.rand(()) * shows)


def fill(value: float) -> nn.Module:
    """Puts a value into the first row of each map."""
    return Function(lambda x: torch.cat([torch.full_like(x[:, :, :1], value), x[:, :, 1:]], 2))


HEALTHY: dict[str, Callable[[], nn.Module]] = {
    "reused": Reused,
    "overwrites": WritesToItsInput,
    "first in place": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 2, 1), nn.Dropout(0.5)),
    "not a number": lambda: nn.Sequential(nn.Conv2d(3, 2, 1), fill(math.nan), nn.ReLU(), fill(math.inf)),
    "nothing inside": lambda: nn.Sequential(nn.Conv2d(3, 2, 1), nn.Identity(), nn.Flatten()),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_nets_pass(name: str) -> None:
    model = HEALTHY[name]()
    results = checks(model)
    assert list(results) == NAMES
    assert {check.holds for check in results.values()} == {True}
    assert {check.largest_difference for check in results.values()} == {0.0}
    assert hooks_on(model) == 0


def test_the_numbers_of_comparisons_and_what_limits_them() -> None:
    results = checks(Reused())
    leaves = ["conv1", "bn1", "relu", "conv2", "relu#1", "fc"]
    assert results["feature-extractor"].compared == results["re-computation"].compared == len(leaves)
    assert results["shapes"].compared == len(leaves)
    assert results["model-output"].compared == 2
    assert results["inputs"].compared == 3  # conv1 -> bn1 -> relu -> conv2
    results = checks(Reused(), layers=["relu#1", "-1"], types=("Conv2d",))
    assert [results[name].compared for name in ("feature-extractor", "re-computation", "shapes")] == [2, 2, 2]
    assert (results["inputs"].holds, results["inputs"].note) == (None, "no chosen call feeds another")
    assert not failing(results)


@pytest.mark.parametrize("types", [("all",), ("Conv2d",), ("Conv3d",)])
def test_layers_selected_by_name_alone(types: Any) -> None:
    results = checks(Reused(), layers=["conv2", "relu#1"], types=types)
    assert not failing(results)
    assert results["re-computation"].compared == results["shapes"].compared == 2


def test_containers_and_the_model_itself() -> None:
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(inplace=True)), nn.Conv2d(4, 2, 1))
    results = checks(model, layers=["0", "re:^$"], types=("Sequential",))
    assert results["re-computation"].compared == 2
    assert results["feature-extractor"].holds is None
    assert not failing(results)


def test_a_value_overwritten_on_the_way_is_not_compared() -> None:
    check = checks(WritesToItsInput())["inputs"]
    assert (check.holds, check.compared) == (True, 1)
    assert check.note == "1 input overwritten in place, not compared"


def test_a_model_that_fx_cannot_trace_is_no_failure() -> None:
    results = checks(Function(lambda net, x: net.conv(x if x.sum() > 0 else -x), conv=nn.Conv2d(3, 4, 1)))
    assert results["feature-extractor"].holds is None
    assert results["feature-extractor"].note.startswith("fx cannot trace it: ")
    assert (results["inputs"].holds, results["inputs"].note) == (None, "there is no graph")
    assert results["re-computation"].holds is results["shapes"].holds is True


def test_tensors_that_are_one_object_are_one_in_the_re_computation() -> None:
    results = checks(Attending(), layers="attention")
    assert (results["re-computation"].holds, results["re-computation"].largest_difference) == (True, 0.0)
    assert not failing(results)


class Layouts(nn.Module):
    """Gives a layer a slice, a transposed, a contiguous and a channels-last input."""

    def __init__(self) -> None:
        super().__init__()
        # its result depends on the strides of its input, as the last bit of vectorised kernels does
        self.layer = Function(lambda x: x * torch.tensor(x.stride()).sum())

    def forward(self, x: Tensor) -> Tensor:
        half = self.layer(x.chunk(2, dim=-1)[0])
        turned = self.layer(half.transpose(1, 3))
        wide = self.layer(turned.mean(1, keepdim=True).expand(-1, 3, -1, -1).contiguous())
        return self.layer(wide.contiguous(memory_format=torch.channels_last))


def test_a_re_computation_gets_its_inputs_in_the_same_memory_layout() -> None:
    results = checks(Layouts())
    assert results["re-computation"].holds and results["re-computation"].compared == 4


def test_a_layer_that_cannot_be_copied_is_noted() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    model[1].kept = torch.ones(1, requires_grad=True) * 2
    results = checks(model)
    assert results["feature-extractor"].holds is None
    assert results["feature-extractor"].note.startswith("it cannot be copied: ")
    assert (results["re-computation"].holds, results["re-computation"].compared) == (True, 1)
    assert results["re-computation"].note == "1 of 2 calls are of layers that cannot be copied"
    assert not failing(results)


def plant(monkeypatch: pytest.MonkeyPatch, keep: Callable[[nn.Module, Any], tuple[Any, Any]]) -> None:
    """Let captures keep and hand on what ``keep`` makes of a layer and its output."""
    planted = lambda module, args, kwargs, output, leaves: keep(module, output)  # noqa: E731
    monkeypatch.setattr(hookscope.hooks.activations, "keep_and_hand_on", planted)


def test_a_capture_that_keeps_references_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda module, output: (output, None))
    results = checks(Reused())
    assert failing(results) == [("feature-extractor", "bn1"), ("re-computation", "bn1"), ("inputs", "relu")]
    assert results["feature-extractor"].largest_difference > 0
    assert results["feature-extractor"].note == "1 of 6 differ"


def test_a_capture_that_mixes_up_calls_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    first: dict[nn.Module, Any] = {}
    plant(monkeypatch, lambda module, output: (first.setdefault(module, output.clone()), None))
    assert failing(checks(Reused())) == [("feature-extractor", "relu#1"), ("re-computation", "relu#1")]


def test_a_capture_that_changes_the_output_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda module, out: (out.clone(), out + 1e-3 if isinstance(module, nn.Linear) else None))
    results = checks(Reused())
    assert failing(results) == [("model-output", "")]
    assert results["model-output"].largest_difference == pytest.approx(1e-3, rel=1e-3)
    assert results["model-output"].note == "1 of 2 differ; part 'out' of the output"


def test_wrongly_recorded_inputs_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_own", lambda self, value, live, spare=(): value)  # no copies
    results = checks(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 1)))
    assert failing(results) == [("inputs", "1")]


@pytest.mark.parametrize(
    ("always", "note"), [(True, "hooks changed"), (False, "hooks changed by a pass left half-way")]
)
def test_a_hook_left_behind_is_found(monkeypatch: pytest.MonkeyPatch, always: bool, note: str) -> None:
    model, close = Reused(), HookHandles.__exit__

    def leave_one(self: HookHandles, kind: Any, error: Any, trace: Any) -> None:
        close(self, kind, error, trace)
        if always or error is not None:
            model.conv2.register_forward_hook(lambda *call: None)

    monkeypatch.setattr(HookHandles, "__exit__", leave_one)
    results = checks(model)
    assert failing(results) == [("untouched", "conv2")]
    assert results["untouched"].note.endswith(note)


@pytest.mark.parametrize("shows", [False, True])
def test_a_layer_that_changes_its_buffer_is_found(shows: bool) -> None:
    results = checks(nn.Sequential(nn.Conv2d(3, 4, 1), Counting(shows)))
    failures = failing(results)
    assert ("untouched", "1") in failures
    assert results["untouched"].largest_difference == 1.0
    assert "buffer 'count' changed, without hooks too: the layer itself changes it" in results["untouched"].note
    assert (("re-computation", "1") in failures) == shows


def test_a_layer_that_draws_random_numbers_is_found() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), drawing(shows=False))
    before = random_states()
    results = checks(model)
    assert failing(results) == [("untouched", "1")]
    assert "random state of torch changed, without hooks too" in results["untouched"].note
    assert random_states() == before


def test_random_outputs_are_compared_from_one_random_state_unless_a_re_computation_draws_others() -> None:
    results = checks(nn.Sequential(nn.Conv2d(3, 4, 1), drawing(shows=True), drawing(shows=True)))
    assert failing(results) == [("untouched", "1")]
    results = checks(nn.Sequential(drawing(shows=True), drawing(shows=True)), layers="1", types=("Function",))
    assert failing(results) == [("re-computation", "1"), ("untouched", "0")]
    assert results["re-computation"].note == "1 of 1 differ; '1' is random: two re-computations differ too"


class Padding(nn.Module):
    """Appends to a list that it was given, as video transformers do with their window sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(padded(x, [1, 1]))


@torch.fx.wrap
def padded(x: Tensor, sides: list[int]) -> Tensor:
    sides += [0, 0]
    return nn.functional.pad(x, sides)


def test_a_function_may_change_the_list_it_is_given() -> None:
    assert checks(Padding())["feature-extractor"].holds is True


def test_a_changed_mode_and_flag_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Reused()

    def spoil(module: nn.Module, output: Any) -> tuple[Any, None]:
        model.conv2.weight.requires_grad_(False)
        model.relu.train()
        model.fc.bias.grad = torch.zeros(2)
        return output.clone(), None

    plant(monkeypatch, spoil)
    check = checks(model)["untouched"]
    assert (check.holds, check.layer) == (False, "relu")
    assert check.note.startswith("3 of ")


def alter_trace(monkeypatch: pytest.MonkeyPatch, change: Callable[[tuple[Any, ...]], Any]) -> None:
    def altered(*args: Any, **options: Any) -> Any:
        summary = hookscope.tracing.trace(*args, **options).without_operations()
        return dataclasses.replace(summary, calls=change(summary.calls))

    monkeypatch.setattr(hookscope.verification.checks, "trace", altered)


def test_a_wrong_shape_in_the_trace_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    alter_trace(
        monkeypatch, lambda calls: (*calls[:3], dataclasses.replace(calls[3], output_shape=(1, 4, 8, 9)), *calls[4:])
    )
    results = checks(Reused())
    assert failing(results) == [("shapes", "conv2")]
    assert results["shapes"].largest_difference == 1.0


def test_a_call_missing_from_the_trace_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    alter_trace(monkeypatch, lambda calls: calls[:4] + calls[5:])
    check = checks(Reused())["shapes"]
    assert (check.holds, check.layer, check.largest_difference) == (False, "relu#1", math.inf)
    assert "the trace has 5 calls, the pass 6" in check.note


def test_a_capture_that_loses_a_call_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    add = hookscope.hooks.kept.CallMapping._add
    monkeypatch.setattr(
        hookscope.hooks.kept.CallMapping,
        "_add",
        lambda self, call, value: call.key == "fc" or add(self, call, value),
    )
    results = checks(Reused())
    assert failing(results) == [("feature-extractor", "fc"), ("re-computation", "fc"), ("shapes", "fc")]


def test_refused_inputs_unknown_layers_and_models_that_end_the_program_are_errors() -> None:
    with pytest.raises(InputError, match=r"a net: a layer takes 4 channels and got 3; forward\(\) failed on 3x8x8"):
        checks(nn.Conv2d(4, 4, 1).requires_grad_(False))
    with pytest.raises(LayerError, match="no layer 'conv9'"):
        checks(Reused(), layers="conv9")
    with pytest.raises(InputError, match=r"a net ends the program in its forward pass, by sys.exit\(5\)"):
        checks(Function(lambda x: sys.exit(5)))


def test_an_abandoned_iterator_leaves_everything_as_before() -> None:
    model = Reused()
    state = ModelSnapshot(model)
    net = as_net(model)
    results = each_check(net, noise_pictures(net), "all", None)
    next(results)
    assert torch.is_grad_enabled()
    del results
    assert not [change for change in state.changes() if change.what != "train/eval mode"]
    assert hooks_on(model) == 0


def test_pictures_are_not_written_to() -> None:
    net = as_net(nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 2, 1)))
    pictures = noise_pictures(net)
    kept = copy.deepcopy(pictures)
    list(verify(net, pictures))
    assert torch.equal(pictures[0], kept[0])


def test_noise_is_seeded_and_fits_the_family() -> None:
    before = random_states()
    shapes = {
        "resnet18": [(3, 224, 224)],
        "raft_small": [(3, 224, 224)] * 2,
        "r3d_18": [(3, 16, 112, 112)],
        "ssdlite320_mobilenet_v3_large": [(3, 224, 224)],
    }
    for name, expected in shapes.items():
        net = load_model(name, weights="none", device="cpu")
        assert [tuple(picture.shape) for picture in noise_pictures(net)] == expected
    (noise,), (again,), (other,) = noise_pictures(net, 1), noise_pictures(net, 1), noise_pictures(net, 2)
    assert torch.equal(noise, again)
    assert not torch.equal(noise, other)
    assert 0 <= noise.min() <= noise.max() <= 1
    assert random_states() == before


@torch.no_grad()
def node_outputs(model: nn.Module, x: Tensor) -> dict[str, Any]:
    results: dict[str, Any] = {}
    run_fx_graph(model, (x.clone(),), lambda key, output: results.update({key: copy.deepcopy(output)}))
    return results


def key_of(node: str, modules: set[str]) -> str | None:
    """``relu_1`` as torchvision names it to ``relu#1``; None for a node that is no module."""
    if node in modules:
        return node
    name, _, number = node.rpartition("_")
    return f"{name}#{number}" if name in modules and number.isdecimal() else None


@pytest.mark.parametrize(
    ("build", "side", "every", "nodes"), [(Reused, 8, 1, 6), (torchvision.models.squeezenet1_1, 64, 5, 57)]
)
@torch.no_grad()
def test_nodes_are_those_of_torchvisions_feature_extractor(build: Any, side: int, every: int, nodes: int) -> None:
    model, x = build().eval(), torch.randn(1, 3, side, side)
    modules = {name for name, _ in model.named_modules() if name}
    names = get_graph_node_names(copy.deepcopy(model))[1]
    keys = {node: key for node in names if (key := key_of(node, modules)) is not None}
    outputs = node_outputs(model, x)
    assert set(outputs) == set(keys.values()) and len(keys) == nodes
    for node, key in list(keys.items())[::every]:
        extractor = create_feature_extractor(copy.deepcopy(model), {node: "out"}).eval()
        assert torch.equal(outputs[key], extractor(x.clone())["out"]), node


def test_edges_say_what_feeds_what_and_layers_inside_torchvisions_blocks_are_nodes() -> None:
    edges = run_fx_graph(Reused().eval(), (torch.randn(1, 3, 8, 8),), lambda key, output: None)
    expected = [("conv1", "bn1", 0), ("bn1", "relu", 0), ("relu", "conv2", "input")]
    assert [edge for edge in edges if not edge.overwritten] == [Edge(*edge) for edge in expected]
    model = nn.Sequential(torchvision.ops.Conv2dNormActivation(3, 4)).eval()
    assert list(node_outputs(model, torch.randn(1, 3, 8, 8))) == ["0.0", "0.1", "0.2"]


def test_the_model_is_not_touched_by_a_graph_that_does_not_run() -> None:
    model = Reused().eval()
    state = ModelSnapshot(model)
    with pytest.raises(ModelError, match="its graph does not run: "):
        run_fx_graph(model, (torch.ones(1, 5, 8, 8),), lambda key, output: None)
    assert state.changes() == []


FAMILIES = [
    ("fcn_resnet50", 64), ("ssdlite320_mobilenet_v3_large", 64), ("raft_small", 128), ("r3d_18", 32),
    ("quantized_mobilenet_v2", 64),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "side"), FAMILIES)
def test_every_family_holds(name: str, side: int) -> None:
    holds(name, side)


@pytest.mark.slow
@pytest.mark.parametrize("name", torchvision.models.list_models(module=torchvision.models))
def test_every_classification_model_holds(name: str) -> None:
    side = {"alexnet": 64, "inception_v3": 96}.get(name, None if name.startswith(("vit_", "maxvit")) else 64)
    assert [check for check in holds(name, side) if check.holds is not True] == []


def holds(name: str, side: int | None) -> list[Check]:
    net = load_model(name, weights="none", device="cpu", input_size=(side, side) if side else None)
    results = list(verify(net, noise_pictures(net)))
    assert [check.name for check in results] == NAMES
    assert [check for check in results if check.holds is False] == []
    assert hooks_on(net.model) == 0
    return results


@torch.no_grad()
def test_a_node_of_torchvisions_extractor_may_be_another_layer_and_ours_is_not() -> None:
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 16, "num_classes": 3}
    model = torchvision.models.VisionTransformer(image_size=16, patch_size=8, **sizes).eval()
    x = torch.randn(1, 3, 16, 16)
    first, second = (f"encoder.layers.encoder_layer_0.ln_{number}" for number in (1, 2))
    truth: dict[str, Tensor] = {}
    with hooked(model, lambda name, output: truth.update({name: output.clone()}), first, second):
        model(x)
    theirs = create_feature_extractor(copy.deepcopy(model), [first]).eval()(x.clone())[first]
    assert torch.equal(theirs, truth[second]) and not torch.equal(theirs, truth[first])
    alone = node_outputs(model, x)
    with capture(model, [first, second]) as activations:
        model(x.clone())
    for name in (first, second):
        assert torch.equal(activations[name], truth[name]) and torch.equal(alone[name], truth[name]), name


class Once(nn.Module):
    """Works only in the pass of its parent, which gives it a factor."""

    factor: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Residual(nn.Module):
    """Hangs its input on the tensor that the second layer gets, as fastai's U-Net does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.merge, self.once = nn.Conv2d(3, 3, 1), Function(lambda x: torch.cat([x, x.orig], 1)), Once()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv(x)
        hidden.orig = x
        merged = self.merge(hidden)
        hidden.orig = None
        self.once.factor = 2
        doubled = self.once(merged)
        self.once.factor = None
        return doubled


def test_layers_that_cannot_run_alone_are_noted_and_the_rest_is_checked() -> None:
    results = checks(Residual())
    assert list(results) == NAMES and not failing(results)
    check = results["re-computation"]
    assert (check.holds, check.compared) == (True, 1)
    assert check.note == "'merge' cannot run alone: 'Tensor' object has no attribute 'orig', nor can 1 more"
    only = checks(Residual(), "merge")["re-computation"]
    assert (only.holds, only.compared) == (None, 0) and only.note.startswith("nothing can be computed again; 'merge'")
