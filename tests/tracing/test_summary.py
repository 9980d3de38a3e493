"""The trace, judged by torchinfo, by plain hooks on a real pass and by comparing values."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torchinfo
from torch import Tensor, nn

from hookscope.errors import InputError, LayerError, ModelError
from hookscope.hooks.layer_types import is_leaf
from hookscope.hooks.registration import HookHandles
from hookscope.hooks.tensors import shape_of
from hookscope.models.inputs import example_inputs
from hookscope.models.load import load_model
from hookscope.models.names import torchvision_names
from hookscope.models.torchvision_builders import build_skeleton
from hookscope.tracing.facts import Trace, rows_of_type
from hookscope.tracing.summary import count_macs, list_layers, trace

SMALL = {
    "alexnet": 63,
    "efficientnet_b0": 32,
    "googlenet": 32,
    "mobilenet_v3_small": 32,
    "mnasnet0_5": 32,
    "resnet18": 33,
    "shufflenet_v2_x0_5": 32,
    "squeezenet1_1": 32,
    "vgg11": 32,
}
OTHERS = ("detection", "segmentation", "video", "optical_flow", "quantization")


def is_classification(name: str) -> bool:
    import torchvision

    return not any(f".{word}." in f"{torchvision.models.get_model_builder(name).__module__}." for word in OTHERS)


def judged_by_torchinfo(model: nn.Module, size: tuple[int, int], found: Trace) -> None:
    inputs = example_inputs(model, size)
    device = "meta" if next(model.parameters()).is_meta else "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        judge = torchinfo.summary(
            model, input_data=[tensor.to(device) for tensor in inputs], device=device, verbose=0, depth=99
        )
    assert found.params == judge.total_params
    assert found.macs == judge.total_mult_adds
    expected = Counter(
        (layer.class_name, tuple(layer.output_size), layer.macs)
        for layer in judge.summary_list
        if layer.is_leaf_layer and layer.output_size  # those that ran
    )
    leaves = ((found.layers[call.layer], call) for call in found.calls)
    ours = Counter((layer.types[0], first(call.output_shape), call.macs) for layer, call in leaves if layer.leaf)
    assert ours == expected


def first(shape: Any) -> tuple[int, ...]:
    return next(iter(shape.values())) if isinstance(shape, dict) else shape


def judged_by_plain_hooks(model: nn.Module, inputs: tuple[Any, ...], found: Trace) -> int:
    """Shapes and order of a real pass, and whose output another layer wrote to; returns how many convolutions."""
    seen: list[tuple[str, Any, Tensor | None, int, Tensor | None]] = []

    def hook(name: str) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            tensor = output if isinstance(output, Tensor) else None
            clone = None if tensor is None else tensor.clone()
            seen.append((name, shape_of(output), tensor, 0 if tensor is None else tensor._version, clone))

        return keep

    handles = [module.register_forward_hook(hook(name)) for name, module in model.eval().named_modules()]
    with torch.no_grad():
        model(*inputs)
    for handle in handles:
        handle.remove()
    assert [(found.layers[call.layer].name, call.output_shape) for call in found.calls] == [at[:2] for at in seen]
    for call, (name, _, tensor, version, clone) in zip(found.calls, seen, strict=True):
        if tensor is None:
            continue
        assert (call.overwritten_by is not None) == (tensor._version != version), name
        if not torch.equal(tensor, clone):  # the values themselves changed
            assert call.overwritten_by is not None, name
    return sum(call.overwritten_by is not None for call in found.calls if found.layers[call.layer].types[0] == "Conv2d")


@pytest.mark.parametrize("name", SMALL)
def test_shapes_macs_and_writes_are_those_of_a_real_pass(name: str) -> None:
    size = (SMALL[name], SMALL[name])
    model = load_model(name, weights="none", device="cpu").model
    found = trace(build_skeleton(name).model, example_inputs(model, size))
    assert not found.real
    judged_by_torchinfo(model, size, found)
    torch.manual_seed(0)
    overwritten = judged_by_plain_hooks(model, (torch.rand(1, 3, *size),), found)
    counted = {"alexnet": 5, "vgg11": 8, "squeezenet1_1": 26, "efficientnet_b0": 16}
    assert overwritten == counted.get(name, 0)


@pytest.mark.parametrize("name", ["vit_b_16", "swin_t", "convnext_tiny", "densenet121", "regnet_y_400mf"])
def test_macs_of_larger_families(name: str) -> None:
    skeleton = build_skeleton(name)
    found = trace(skeleton.model, example_inputs(skeleton.model, skeleton.size))
    judged_by_torchinfo(skeleton.model, skeleton.size, found)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in torchvision_names() if is_classification(name)])
def test_macs_of_every_classification_model(name: str) -> None:
    skeleton = build_skeleton(name)
    found = trace(skeleton.model, example_inputs(skeleton.model, skeleton.size))
    assert not found.real
    judged_by_torchinfo(skeleton.model, skeleton.size, found)


@pytest.mark.slow
@pytest.mark.parametrize("name", torchvision_names())
def test_the_real_pass_of_every_model(name: str) -> None:
    skeleton = build_skeleton(name)
    if sum(parameter.numel() for parameter in skeleton.model.parameters()) > 150e6:
        pytest.skip("gigabytes")
    model = load_model(name, weights="none", device="cpu").model
    inputs = example_inputs(model, skeleton.size)
    judged_by_plain_hooks(model, inputs, trace(model, inputs))


def note_of(model: nn.Module, name: str, types: tuple[str, ...] = ("all",)) -> str:
    (row,) = [row for row in list_layers(model, (8, 8), types) if row.name == name]
    return row.note


def test_overwritten_names_the_layer_that_writes() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 1), nn.ReLU())
    assert [row.note for row in list_layers(net, (8, 8))] == ["overwritten by 1", ""]


class Add(nn.Module):
    def __init__(self, own: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.inner = None if own else Add()

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv(x)
        if self.inner is not None:
            return self.inner(out) + out
        out += x
        return out


def test_a_write_of_the_model_itself_and_of_a_block() -> None:
    assert note_of(Add(), "conv") == "overwritten by the model"
    assert note_of(Add(own=False), "inner.conv") == "overwritten by inner"
    assert note_of(Add(own=False), "conv") == ""


def test_a_write_through_a_view_counts_and_one_to_a_copy_does_not() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.ReLU(inplace=True))
    assert note_of(net, "0") == "overwritten by 2"

    class Copied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x).clone().relu_()

    assert note_of(Copied(), "conv") == ""


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.idle = nn.Conv2d(3, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.conv(self.conv(x)))


def test_a_layer_that_runs_thrice_and_one_that_does_not() -> None:
    rows = list_layers(Twice(), (8, 8))
    assert [(row.index, row.name, row.call, row.note) for row in rows] == [
        (0, "conv", 0, "call 1 of 3"),
        (1, "conv", 1, "call 2 of 3"),
        (2, "conv", 2, "call 3 of 3"),
        (None, "idle", None, "did not run"),
    ]
    assert (rows[3].input_shape, rows[3].output_shape, rows[3].params, rows[3].macs) == (None, None, 20, 0)


def test_one_module_under_two_names() -> None:
    conv = nn.Conv2d(3, 3, 1)
    rows = list_layers(nn.Sequential(conv, nn.ReLU(), conv), (8, 8))
    assert [(row.name, row.note) for row in rows] == [
        ("0", "call 1 of 2; shared with 2"),
        ("0", "call 2 of 2; shared with 2"),
    ]


def test_tied_weights_share_and_count_once() -> None:
    net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1))
    net[1].weight = net[0].weight
    found = trace(net, (torch.zeros(1, 3, 8, 8),))
    assert [row.note for row in rows_of_type(found)] == ["shared with 1", "shared with 0"]
    assert found.params == 9 + 3 + 3
    assert not found.real


def test_a_real_pass_records_the_same() -> None:
    net = load_model("squeezenet1_1", weights="none", device="cpu").model
    dry, real = (trace(net, (torch.zeros(1, 3, 32, 32),), dry=dry) for dry in (True, False))
    assert (dry.real, real.real) == (False, True)
    assert (dry.calls, dry.layers, dry.macs) == (real.calls, real.layers, real.macs)


def test_googlenets_auxiliary_heads_did_not_run() -> None:
    rows = rows_of_type(trace(build_skeleton("googlenet").model, (torch.zeros(1, 3, 64, 64),)))
    assert [(row.name, row.note) for row in rows if row.index is None] == [
        ("aux1.conv.conv", "did not run"),
        ("aux2.conv.conv", "did not run"),
    ]
    assert [row.index for row in rows[:-2]] == list(range(57))


def test_order_is_that_of_execution() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second, self.first = nn.Conv2d(4, 5, 1), nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    assert [row.name for row in list_layers(Backwards(), (8, 8))] == ["first", "second"]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, num_layers=2, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.lstm(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.fc = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.attention(x, x, value=x, need_weights=False)[0])


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (Recurrent(), (2, 5, 8)),
        (Attention(), (2, 5, 8)),
        (nn.Sequential(nn.ConvTranspose2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.PReLU(4)), (2, 3, 7, 9)),
        (nn.Sequential(nn.Conv1d(3, 4, 3, groups=1), nn.GroupNorm(2, 4)), (2, 3, 20)),
        (nn.Sequential(nn.Conv3d(1, 4, 3), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 2)), (1, 1, 5, 6, 7)),
        (nn.Sequential(nn.Conv2d(4, 8, 3, groups=4, dilation=2, padding="same", bias=False)), (3, 4, 12, 10)),
        (nn.Sequential(nn.Embedding(10, 4), nn.LayerNorm(4)), None),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 5, 8)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_macs_of_odd_layers_are_torchinfos(net: nn.Module, shape: tuple[int, ...] | None) -> None:
    net.eval()
    data = torch.zeros(2, 5, dtype=torch.long) if shape is None else torch.zeros(shape)
    found = trace(net, (data,))
    judge = torchinfo.summary(copy.deepcopy(net), input_data=data, device="cpu", verbose=0, depth=9)
    assert (found.macs, found.params) == (judge.total_mult_adds, judge.total_params)
    assert found.macs > 0


def test_input_shapes_by_position_and_keyword() -> None:
    found = trace(Attention(), (torch.zeros(2, 5, 8),))
    (call,) = [call for call in found.calls if found.layers[call.layer].name == "attention"]
    assert call.input_shape == {"0": (2, 5, 8), "1": (2, 5, 8), "value": (2, 5, 8)}

    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(input=x)

    assert list_layers(Keywords(), (8, 9))[0].input_shape == (1, 3, 8, 9)


def test_a_pruned_layer_counts_what_the_mask_leaves() -> None:
    from torch.nn.utils import prune

    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    prune.random_unstructured(net[0], "weight", amount=0.5)
    (row,) = list_layers(net, (5, 5))
    assert row.macs == (54 + 4) * 9
    assert row.output_shape == (1, 4, 3, 3)
    assert len(net[0]._forward_pre_hooks) == 1


def test_a_parametrised_layer_is_still_of_its_type() -> None:
    net = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)))
    assert [(row.name, row.output_shape) for row in list_layers(net, (5, 5))] == [("0", (1, 4, 3, 3))]


def test_macs_of_a_container_are_those_of_what_ran_in_it() -> None:
    (row,) = list_layers(nn.Sequential(nn.Sequential(Twice())), (8, 8), ("Twice",))
    assert row.macs == 3 * 12 * 64
    assert row.params == 12 + 20


@pytest.mark.parametrize(("shape", "macs"), [(None, 0), ((), 0), ({}, 0), ({"0": (2, 5, 7)}, 2 * 56)])
def test_macs_of_odd_outputs(shape: Any, macs: int) -> None:
    assert count_macs(nn.Linear(7, 7), shape) == macs


def test_a_failure_that_the_model_catches_misplaces_nothing() -> None:
    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.good = nn.Conv2d(7, 1, 1), nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.bad(x)
            except RuntimeError:
                return self.good(x)

    rows = list_layers(Tries(), (8, 8))
    assert [(row.name, row.input_shape, row.note) for row in rows] == [
        ("good", (1, 3, 8, 8), ""),
        ("bad", None, "did not run"),
    ]


def state_of(model: nn.Module) -> Any:
    return [
        (
            name,
            module.training,
            [id(hook) for table in (module._forward_hooks, module._forward_pre_hooks) for hook in table.values()],
            {key: (id(value), value.clone()) for key, value in module._parameters.items() if value is not None},
            {key: (id(value), value.clone()) for key, value in module._buffers.items() if value is not None},
            {key: id(value) for key, value in vars(module).items()},
            [value.requires_grad for value in module.parameters()],
        )
        for name, module in model.named_modules()
    ]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


class Moody(nn.Module):
    """Keeps things as attributes, buffers and lists, draws random numbers, and may fail."""

    def __init__(self, wants_values: bool, fails: bool) -> None:
        super().__init__()
        self.conv, self.bn, self.drop = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout()
        self.register_buffer("count", torch.zeros(()))
        self.history: list[Any] = []
        self.anchors: Any = None
        self.wants_values, self.fails = wants_values, fails

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.anchors = torch.zeros(3, device=x.device)
        self.history.append(x)
        y = self.drop(self.bn(self.conv(x))) + torch.rand(1).item()
        if self.wants_values:
            self.count += float(y.sum().item())
        if self.fails:
            raise RuntimeError("moody")
        return y


@pytest.mark.parametrize("wants_values", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_before(wants_values: bool, fails: bool) -> None:
    net = nn.Sequential(Moody(wants_values, fails), nn.ReLU())
    net.train()
    net[0].bn.eval()
    net[0].conv.weight.requires_grad_(False)
    fired: list[str] = []
    net[0].conv.register_forward_hook(lambda *args: fired.append("forward"))
    net[0].register_forward_pre_hook(lambda *args: fired.append("pre"))
    before, random = state_of(net), torch.get_rng_state()
    if fails:
        with pytest.raises(InputError, match=r"^Sequential refuses an input of 1x3x8x8: moody$"):
            list_layers(net, (8, 8))
    else:
        assert trace(net, (torch.zeros(1, 3, 8, 8),)).real == wants_values
    assert same(state_of(net), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert fired == []
    assert net[0].history == [] and net[0].anchors is None
    if not fails:
        net(torch.zeros(1, 3, 8, 8))
        assert fired == ["pre", "forward"]


def test_a_detector_still_works_after_being_listed() -> None:
    model = load_model("fasterrcnn_mobilenet_v3_large_320_fpn", weights="none", device="cpu").model
    picture = torch.rand(3, 100, 120, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model([picture])
        rows = list_layers(model, (64, 64))
        after = model([picture])
    assert len(rows) > 60
    assert all(torch.equal(before[0][key], after[0][key]) for key in before[0])


def test_a_model_in_train_mode_is_listed_as_in_eval() -> None:
    net = load_model("googlenet", weights="none", device="cpu").model.train()
    assert sum(row.note == "did not run" for row in list_layers(net, (64, 64))) == 2
    assert all(module.training for module in net.modules())


def test_gradients_and_surroundings_stay() -> None:
    net = nn.Conv2d(3, 4, 1)
    net(torch.ones(1, 3, 2, 2)).sum().backward()
    assert net.weight.grad is not None
    grad = net.weight.grad.clone()
    with torch.inference_mode():
        assert len(list_layers(net, (4, 4))) == 1
        assert torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    assert torch.equal(net.weight.grad, grad)


def test_models_of_grey_pictures_and_whole_shapes() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU())
    assert list_layers(net, (28, 30))[0].input_shape == (1, 1, 28, 30)
    assert list_layers(net, (5, 1, 28, 30))[0].output_shape == (5, 4, 26, 28)
    assert list_layers(nn.Conv1d(7, 2, 3), (2, 7, 9), ("Conv1d",))[0].output_shape == (2, 2, 7)


def test_inputs_of_ones_own() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor, scale: float) -> Tensor:
            return self.conv(x) * scale

    assert list_layers(Two(), inputs=(torch.zeros(2, 3, 4, 5), 2.0))[0].output_shape == (2, 4, 4, 5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_of_other_numbers(dtype: torch.dtype) -> None:
    assert list_layers(nn.Sequential(nn.Conv2d(3, 4, 3)).to(dtype), (5, 5))[0].output_shape == (1, 4, 3, 3)


def test_an_input_that_is_too_small_is_one_line() -> None:
    with pytest.raises(InputError) as caught:
        list_layers(load_model("alexnet", weights="none", device="cpu").model, (20, 20))
    assert str(caught.value).startswith("AlexNet refuses an input of 1x3x20x20: ")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 1


def test_no_layer_of_the_type_says_which_there_are() -> None:
    with pytest.raises(LayerError) as caught:
        list_layers(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)), (4, 4), ("Conv3d",))
    assert "no layer of type Conv3d; the model has Conv2d (2), Sequential (1), ReLU (1)" in str(caught.value)


def test_types_by_base_class_glob_and_class() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.ConvTranspose2d(4, 4, 1), nn.Flatten())
    assert [row.type for row in list_layers(net, (4, 4), ("Conv*",))] == ["Conv2d", "ConvTranspose2d"]
    assert [row.type for row in list_layers(net, (4, 4), (nn.ReLU, "_ConvNd"))] == ["Conv2d", "ReLU", "ConvTranspose2d"]
    assert len(list_layers(net, (4, 4), ("all",))) == 4


def test_scripted_and_lazy_models_are_refused_whole() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Conv2d(3, 4, 1))
    with pytest.raises(ModelError, match="scripted"):
        list_layers(scripted, (4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lazy = nn.Sequential(nn.LazyConv2d(4, 1))
    with pytest.raises(ModelError, match="lazy"):
        list_layers(lazy, (4, 4))
    assert isinstance(lazy[0], nn.LazyConv2d)


def test_a_door_that_is_open_stays_open() -> None:
    net, seen = nn.Sequential(nn.Conv2d(3, 4, 1)), []
    with HookHandles() as handles:
        handles.forward(net[0], lambda *args: seen.append(1))
        list_layers(net, (4, 4))
        assert seen == []
        net(torch.zeros(1, 3, 4, 4))
    assert seen == [1]
    assert is_leaf(net[0]) and not net[0]._forward_hooks


def test_a_pending_backward_is_not_spoilt() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)).eval()
    out = net(torch.rand(1, 3, 8, 8))
    list_layers(net, (8, 8))
    out.sum().backward()  # raises where a saved buffer was written to
    assert net[0].weight.grad is not None


def test_a_model_built_in_inference_mode() -> None:
    with torch.inference_mode():
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
        assert [row.output_shape for row in list_layers(net, (8, 8))] == [(1, 4, 6, 6)]
