"""The trace, judged by torchinfo, torch's FLOP counter, plain hooks on a real pass and by comparing values."""

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torchinfo
import torchvision
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hookscope.errors import InputError, LayerError, ModelError
from hookscope.hooks.activations import capture
from hookscope.hooks.model_state import ModelSnapshot
from hookscope.hooks.tensors import shape_of
from hookscope.models.load import load_model
from hookscope.models.loaded import example_inputs
from hookscope.models.names import torchvision_names
from hookscope.models.torchvision_builders import build_skeleton
from hookscope.tracing.facts import Trace, rows_of_type
from hookscope.tracing.summary import layer_totals, list_layers, trace
from tests.helpers import hooked
from tests.nets import Function, PaddedConv


def judged_by_torchinfo(model: nn.Module, size: tuple[int, int], summary: Trace) -> None:
    summary = summary.without_operations()
    inputs = example_inputs(model, size)
    device = "meta" if next(model.parameters()).is_meta else "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        judge = torchinfo.summary(
            model, input_data=[tensor.to(device) for tensor in inputs], device=device, verbose=0, depth=99
        )
    torchinfo.torchinfo.clear_cached_forward_pass()  # which keeps a model of each class
    expected = Counter(
        (layer.class_name, tuple(layer.output_size), layer.macs if "Conv" in layer.class_name else None)
        for layer in judge.summary_list
        if layer.is_leaf_layer and layer.output_size  # those that ran
    )
    calls = [(summary.layers[call.layer], call) for call in summary.calls]
    blocks = {layer.name.rpartition(".")[0] for layer in summary.layers if layer.name}
    ours = Counter(
        (layer.types[0], first(call.output_shape), call.macs if "Conv" in layer.types[0] else None)
        for layer, call in calls
        if layer.name not in blocks
    )
    assert ours == expected


def judged_by_the_flop_counter(model: nn.Module, inputs: tuple[Any, ...], summary: Trace) -> None:
    """Totals, and the MACs of each block of the model; without the biases of convolutions, which FLOPs leave out."""
    biases: Counter[str] = Counter()

    def note(name: str, output: Tensor) -> None:
        if getattr(convolutions.get(name), "bias", None) is not None:
            for depth in range(name.count(".") + 2):
                biases[".".join(name.split(".")[:depth])] += output.numel()

    convolutions = {name: m for name, m in model.eval().named_modules() if isinstance(m, nn.modules.conv._ConvNd)}
    device = next(model.parameters()).device
    # with gradients on: its count misses torch's fused attention
    with hooked(model, note, *convolutions), FlopCounterMode(display=False) as judge:
        model(*(tensor.to(device) for tensor in inputs))
    assert summary.macs == judge.get_total_flops() // 2 + biases[""]
    summary = summary.without_operations()
    assert summary.macs == judge.get_total_flops() // 2 + biases[""]
    assert summary.params == sum(parameter.numel() for parameter in model.parameters())
    for name, flops in judge.get_flop_counts().items():
        if name not in ("Global", type(model).__name__):
            inside = name.partition(".")[2]
            calls = [call for call in summary.calls if f"{summary.layers[call.layer].name}.".startswith(f"{inside}.")]
            assert sum(call.macs for call in calls) == sum(flops.values()) // 2 + biases[inside], inside


def first(shape: Any) -> tuple[int, ...]:
    return next(iter(shape.values())) if isinstance(shape, dict) else shape


def judged_by_plain_hooks(model: nn.Module, inputs: tuple[Any, ...], summary: Trace) -> int:
    """Shapes and order of a real pass, and whose output another layer wrote to; returns how many convolutions."""
    outputs: list[tuple[str, Any, Any, Any, Any]] = []
    summary = summary.without_operations()

    def keep(name: str, output: Any) -> None:
        tensor = output if isinstance(output, Tensor) else torch.empty(0)
        outputs.append((name, shape_of(output), tensor, tensor._version, tensor.clone()))

    with torch.no_grad(), hooked(model.eval(), keep):
        model(*inputs)
    calls = [(summary.layers[call.layer], call) for call in summary.calls]
    assert [(layer.name, call.output_shape) for layer, call in calls] == [output[:2] for output in outputs]
    for (_, call), (name, _, tensor, version, clone) in zip(calls, outputs, strict=True):
        if tensor.numel():
            assert (call.overwritten_by is not None) == (tensor._version != version), name
        if not torch.equal(tensor, clone):  # the values themselves changed
            assert call.overwritten_by is not None, name
    return sum(call.overwritten_by is not None for layer, call in calls if layer.types[0] == "Conv2d")


@pytest.mark.parametrize(
    ("name", "side", "overwritten"),
    [("alexnet", 63, 5), ("efficientnet_b0", 32, 16), ("mobilenet_v3_small", 32, 0), ("resnet18", 33, 0),
     ("shufflenet_v2_x0_5", 32, 0), ("squeezenet1_1", 32, 26)],
)  # fmt: skip
def test_shapes_macs_and_writes_are_those_of_a_real_pass(name: str, side: int, overwritten: int) -> None:
    model = load_model(name, weights="none", device="cpu").model
    summary = trace(build_skeleton(name).model, example_inputs(model, (side, side)))
    assert not summary.real
    judged_by_torchinfo(model, (side, side), summary)
    judged_by_the_flop_counter(model, example_inputs(model, (side, side)), summary)
    assert judged_by_plain_hooks(model, (torch.rand(1, 3, side, side),), summary) == overwritten


@pytest.mark.parametrize(
    ("name", "params", "gmacs"),  # as torchvision states them
    [
        ("vit_b_32", 88_224_232, 4.409),
        ("swin_t", 28_288_354, 4.491),
        pytest.param("maxvit_t", 30_919_624, 5.558, marks=pytest.mark.slow),
        pytest.param("convnext_tiny", 28_589_128, 4.456, marks=pytest.mark.slow),
    ],
)
def test_totals_of_larger_families(name: str, params: int, gmacs: float) -> None:
    skeleton = build_skeleton(name)
    inputs = example_inputs(skeleton.model, skeleton.size)
    summary = trace(skeleton.model, inputs)
    judged_by_torchinfo(skeleton.model, skeleton.size, summary)
    judged_by_the_flop_counter(skeleton.model, inputs, summary)
    assert summary.params == params
    assert summary.macs / 1e9 == pytest.approx(gmacs, abs=0.006)
    rows = rows_of_type(summary, ("all",))
    assert sum(row.macs for row in rows) == summary.macs
    assert sum(row.params for row in rows if not row.call) == summary.params


@pytest.mark.slow
@pytest.mark.parametrize("name", torchvision.models.list_models(module=torchvision.models))
def test_macs_of_every_classification_model(name: str) -> None:
    skeleton = build_skeleton(name)
    summary = trace(skeleton.model, example_inputs(skeleton.model, skeleton.size))
    assert not summary.real
    judged_by_torchinfo(skeleton.model, skeleton.size, summary)
    judged_by_the_flop_counter(skeleton.model, example_inputs(skeleton.model, skeleton.size), summary)


@pytest.mark.slow
@pytest.mark.parametrize("name", torchvision_names())
def test_the_real_pass_of_every_model(name: str) -> None:
    skeleton = build_skeleton(name)
    if sum(parameter.numel() for parameter in skeleton.model.parameters()) > 150e6:
        pytest.skip("gigabytes")
    model = load_model(name, weights="none", device="cpu").model
    inputs = example_inputs(model, skeleton.size)
    judged_by_plain_hooks(model, inputs, trace(model, inputs))


def test_a_model_that_turns_inference_mode_on_or_is_built_in_it() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        with torch.inference_mode():
            return net.relu(net.conv(x))

    net = Function(forward, conv=nn.Conv2d(3, 3, 1), relu=nn.ReLU())
    assert [row.name for row in list_layers(net, (8, 8), ("all",))] == ["conv", "relu"]
    with torch.inference_mode():
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
        assert [row.output_shape for row in list_layers(net, (8, 8))] == [(1, 4, 6, 6)]


def add() -> nn.Module:
    """Writes to the output of its convolution itself."""

    def forward(net: Any, x: Tensor) -> Tensor:
        out = net.conv(x)
        out += x
        return out

    return Function(forward, conv=nn.Conv2d(3, 3, 1))


CONV, BLOCK = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
WRITES: dict[str, tuple[nn.Module, list[tuple[str, str]]]] = {
    "a layer": (nn.Sequential(CONV, nn.ReLU(inplace=True), BLOCK, nn.ReLU()), [("0", "overwritten by 1"), ("2", "")]),
    "a view": (nn.Sequential(CONV, nn.Flatten(), nn.ReLU(inplace=True)), [("0", "overwritten by 2")]),
    "a copy": (Function(lambda net, x: net.conv(x).clone().relu_(), conv=CONV), [("conv", "")]),
    "the model": (add(), [("conv", "overwritten by the model")]),
    "a block": (
        Function(lambda net, x: net.inner(out := net.conv(x)) + out, conv=CONV, inner=add()),
        [("conv", ""), ("inner.conv", "overwritten by inner")],
    ),
    "one module under two names": (
        nn.Sequential(CONV, nn.ReLU(), CONV),
        [("0", f"call {n} of 2; shared with 2") for n in (1, 2)],
    ),
    "another order than that of execution": (
        Function(lambda net, x: net.second(net.first(x)), second=CONV, first=BLOCK),
        [("first", ""), ("second", "")],
    ),
}


@pytest.mark.parametrize("case", WRITES)
def test_notes_say_who_overwrites_and_shares_in_the_order_of_execution(case: str) -> None:
    net, notes = WRITES[case]
    assert [(row.name, row.note) for row in list_layers(net, (8, 8))] == notes


def thrice() -> nn.Module:
    """A layer that runs three times, and one that does not."""
    return Function(lambda net, x: net.conv(net.conv(net.conv(x))), conv=nn.Conv2d(3, 3, 1), idle=nn.Conv2d(3, 5, 1))


def test_a_layer_that_runs_thrice_and_one_that_does_not() -> None:
    rows = list_layers(thrice(), (8, 8))
    assert [(row.index, row.name, row.call, row.note) for row in rows] == [
        (0, "conv", 0, "call 1 of 3"), (1, "conv", 1, "call 2 of 3"), (2, "conv", 2, "call 3 of 3"),
        (None, "idle", None, "did not run"),
    ]  # fmt: skip
    assert (rows[3].input_shape, rows[3].output_shape, rows[3].params, rows[3].macs) == (None, None, 20, 0)
    (container,) = list_layers(nn.Sequential(nn.Sequential(thrice())), (8, 8), ("Function",))
    assert (container.macs, container.params) == (3 * 12 * 64, 12 + 20)


def test_tied_weights_share_and_count_once() -> None:
    net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1))
    net[1].weight = net[0].weight
    summary = trace(net, (torch.zeros(1, 3, 8, 8),))
    assert [row.note for row in rows_of_type(summary)] == ["shared with 1", "shared with 0"]
    assert summary.params == 9 + 3 + 3
    assert not summary.real
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    rows = list_layers(net, inputs=(torch.zeros(1, 4),), types=("all",))
    assert [(row.params, row.note) for row in rows] == [(20, "shared with 1"), (20, "shared with 0")]
    totals = layer_totals(net, torch.zeros(1, 4), types=("Linear",))  # inputs in the place of their size
    assert totals.type_params == 24 and "<th" in totals._repr_html_()


def test_a_real_pass_records_the_same() -> None:
    net = load_model("squeezenet1_1", weights="none", device="cpu").model
    on_meta, real = (trace(net, (torch.zeros(1, 3, 32, 32),), on_meta=on_meta) for on_meta in (True, False))
    assert (on_meta.real, real.real) == (False, True)
    assert (on_meta.calls, on_meta.layers, on_meta.macs) == (real.calls, real.layers, real.macs)


def test_googlenets_auxiliary_heads_did_not_run() -> None:
    rows = rows_of_type(trace(build_skeleton("googlenet").model, (torch.zeros(1, 3, 64, 64),)))
    assert [(row.name, row.note) for row in rows if row.index is None] == [
        ("aux1.conv.conv", "did not run"),
        ("aux2.conv.conv", "did not run"),
    ]
    assert [row.index for row in rows[:-2]] == list(range(57))


def attention() -> nn.Module:
    return Function(
        lambda net, x: net.fc(net.attention(x, x, value=x, need_weights=False)[0]),
        attention=nn.MultiheadAttention(8, 2, batch_first=True),
        fc=nn.Linear(8, 2),
    )


def recurrent() -> nn.Module:
    lstm = nn.LSTM(8, 16, num_layers=2, batch_first=True, bidirectional=True)
    return Function(lambda net, x: net.fc(net.lstm(x)[0][:, -1]), lstm=lstm, fc=nn.Linear(32, 3))


UNUSUAL = {
    "lstm": (recurrent, (2, 5, 8), 2 * 5 * 2 * 4 * 16 * ((8 + 16) + (32 + 16)) + 2 * 32 * 3),
    # projections in, scores and mixture in 2 heads, projection out, and a Linear over the tokens
    "attention": (attention, (2, 5, 8), 10 * 8 * 24 + 2 * (2 * 2 * 5 * 5 * 4) + 10 * 8 * 8 + 10 * 8 * 2),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        (2, 5, 8),
        10 * 8 * 24 + 2 * (2 * 2 * 5 * 5 * 4) + 10 * 8 * 8 + 2 * 10 * 8 * 16,
    ),
    # each value of the input meets the whole kernel, each value of the output the bias
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.PReLU(4)),
        (2, 3, 7, 9),
        2 * 7 * 9 * 3 * 4 * 9 + 2 * 4 * 15 * 19,
    ),
    "1d": (lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.GroupNorm(2, 4)), (2, 3, 20), 2 * 18 * 4 * (3 * 3 + 1)),
    "3d": (
        lambda: nn.Sequential(nn.Conv3d(1, 4, 3), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 2)),
        (1, 1, 5, 6, 7),
        3 * 4 * 5 * 4 * (27 + 1) + 4 * 2,
    ),
    "groups": (
        lambda: nn.Conv2d(4, 8, 3, groups=4, dilation=2, padding="same", bias=False),
        (3, 4, 12, 10),
        3 * 12 * 10 * 8 * 9,
    ),
    "functional": (lambda: Function(lambda x: torch.einsum("nc,mc->nm", x, x)), (5, 7), 5 * 5 * 7),
    "embedding": (lambda: nn.Sequential(nn.Embedding(10, 4), nn.LayerNorm(4)), None, 0),
}


@pytest.mark.parametrize("on_meta", [True, False])
@pytest.mark.parametrize("case", UNUSUAL)
def test_macs_of_unusual_layers_as_on_paper(case: str, on_meta: bool) -> None:
    make, shape, macs = UNUSUAL[case]
    data = torch.zeros(2, 5, dtype=torch.long) if shape is None else torch.zeros(shape)
    net = make()
    summary = trace(net, (data,), on_meta=on_meta)
    assert (summary.macs, summary.real) == (macs, not on_meta)
    assert summary.params == sum(parameter.numel() for parameter in net.parameters())
    assert torch.backends.mha.get_fastpath_enabled()


def test_rows_of_all_add_up_and_those_of_a_block_count_what_is_inside() -> None:
    net = Function(lambda net, x: torch.relu(net.block(x) @ net.scale), block=attention())
    net.scale = nn.Parameter(torch.ones(2, 2))
    data = torch.zeros(2, 5, 8)
    rows = list_layers(net, inputs=(data,), types=("all",))
    own = 2 * 5 * 2 * 2
    assert [(row.index, row.name, row.params, row.macs, row.note) for row in rows] == [
        (0, "block.attention", 3 * 8 * 8 + 3 * 8, 3520 - 160, "without the layers inside"),
        (1, "block.fc", 18, 160, ""),
        (2, "", 4, own, "without the layers inside"),
        (None, "block.attention.out_proj", 72, 0, "did not run"),
    ]
    (block,) = list_layers(net, inputs=(data,), types=("Function", "Nothing"))[:1]
    assert (block.name, block.params, block.macs) == ("block", 288 + 18, 3520)
    totals = layer_totals(net, types=("MultiheadAttention",), inputs=(data,))
    assert (totals.params, totals.macs) == (288 + 18 + 4, 3520 + own)
    assert (totals.type_calls, totals.type_params, totals.type_macs, totals.did_not_run) == (1, 288, 3360, 0)


def test_a_block_that_only_computes_has_a_row_without_an_index() -> None:
    net = nn.Sequential(Function(lambda net, x: net.fc(x) @ x.mT, fc=nn.Linear(8, 8)), nn.Flatten())
    rows = list_layers(net, inputs=(torch.zeros(2, 5, 8),), types=("all",))
    assert [(row.index, row.name, row.call, row.macs) for row in rows] == [
        (0, "0.fc", 0, 2 * 5 * 64), (None, "0", 0, 2 * 5 * 5 * 8), (1, "1", 0, 0)
    ]  # fmt: skip
    with capture(net, layers=1, types=("all",)) as activations, torch.no_grad():
        net(torch.zeros(2, 5, 8))
    assert list(activations) == ["1"]


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
def test_a_parametrised_layer_counts_as_one_layer(norm: str) -> None:
    net = nn.Sequential(getattr(nn.utils.parametrizations, norm)(PaddedConv(3, 4, 3)))
    plain = nn.Sequential(PaddedConv(3, 4, 3))
    (row,) = list_layers(net, (5, 5))
    (judge,) = list_layers(plain, (5, 5))
    assert row.macs == judge.macs == (108 + 4) * 25
    assert row.params == sum(parameter.numel() for parameter in net.parameters())
    assert [(row.name, row.macs) for row in list_layers(net, (5, 5), ("all",))] == [("0.pad", 0), ("0", judge.macs)]


def test_input_shapes_by_position_and_keyword() -> None:
    summary = trace(attention(), (torch.zeros(2, 5, 8),))
    (call,) = [call for call in summary.calls if summary.layers[call.layer].name == "attention"]
    assert call.input_shape == {"0": (2, 5, 8), "1": (2, 5, 8), "value": (2, 5, 8)}
    keywords = Function(lambda net, x: net.conv(input=x), conv=nn.Conv2d(3, 4, 1))
    assert list_layers(keywords, (8, 9))[0].input_shape == (1, 3, 8, 9)


def test_a_pruned_layer_counts_what_the_mask_leaves() -> None:
    from torch.nn.utils import prune

    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    prune.random_unstructured(net[0], "weight", amount=0.5)
    (row,) = list_layers(net, (5, 5))
    assert row.macs == (54 + 4) * 9
    assert row.output_shape == (1, 4, 3, 3)
    assert len(net[0]._forward_pre_hooks) == 1


def test_a_failure_that_the_model_catches_misplaces_nothing() -> None:
    def tries(net: Any, x: Tensor) -> Tensor:
        try:
            return net.bad(x)
        except RuntimeError:
            return net.good(x)

    rows = list_layers(Function(tries, bad=nn.Conv2d(7, 1, 1), good=nn.Conv2d(3, 4, 1)), (8, 8))
    assert [(row.name, row.input_shape, row.note) for row in rows] == [
        ("good", (1, 3, 8, 8), ""), ("bad", None, "did not run")
    ]  # fmt: skip


@pytest.mark.parametrize("wants_values", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_before(wants_values: bool, fails: bool) -> None:
    def moody(net: Any, x: Tensor) -> Tensor:
        net.count += 1
        net.anchors = torch.zeros(3, device=x.device)
        net.history.append(x)
        y = net.drop(net.bn(net.conv(x))) + torch.rand(1).item()
        if wants_values:
            net.count += float(y.sum().item())
        if fails:
            raise RuntimeError("moody")
        return y

    net = Function(moody, conv=nn.Conv2d(3, 4, 1), bn=nn.BatchNorm2d(4).eval(), drop=nn.Dropout())
    net.register_buffer("count", torch.zeros(()))
    net.history, net.anchors = [], None
    net.conv.weight.requires_grad_(False)
    fired: list[str] = []
    net.conv.register_forward_hook(lambda *args: fired.append("forward"))
    net.register_forward_pre_hook(lambda *args: fired.append("pre"))
    before, buffers = ModelSnapshot(net), list(net.buffers())
    attributes = [{name: id(value) for name, value in vars(module).items()} for module in net.modules()]
    if fails:
        with pytest.raises(
            InputError,
            match=r"^Function: forward\(\) failed on 1x3x8x8: RuntimeError: moody, at .*test_summary\.py:\d+ in \w+; ",
        ):
            list_layers(net, (8, 8))
    else:
        assert trace(net, (torch.zeros(1, 3, 8, 8),)).real == wants_values
    assert before.changes() == [] and all(a is b for a, b in zip(net.buffers(), buffers, strict=True))
    assert [{name: id(value) for name, value in vars(module).items()} for module in net.modules()] == attributes
    assert (fired, net.history, net.anchors) == ([], [], None)
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
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.auxiliary(x) if net.training else net.main(x)

    net = Function(forward, auxiliary=nn.Conv2d(3, 4, 1), main=nn.Conv2d(3, 4, 1))
    assert [(row.name, row.note) for row in list_layers(net, (8, 8))] == [("main", ""), ("auxiliary", "did not run")]
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


def test_given_inputs_keywords_and_dictionaries() -> None:
    net = Function(lambda net, picture, scale=1.0: net.conv(picture) * scale, conv=nn.Conv2d(3, 4, 1))
    x = torch.zeros(2, 3, 4, 5)
    for inputs in ((x, 2.0), {"picture": x, "scale": 2.0}):
        assert list_layers(net, inputs=inputs)[0].output_shape == (2, 4, 4, 5)
    batches = Function(lambda net, batch: net.conv(batch["image"]), conv=nn.Conv2d(3, 4, 1))
    assert list_layers(batches, inputs=({"image": x},))[0].output_shape == (2, 4, 4, 5)


def test_the_first_convolution_says_how_many_channels_there_are() -> None:
    assert list_layers(nn.Sequential(nn.Conv2d(5, 4, 1)), (4, 5))[0].input_shape == (1, 5, 4, 5)
    (row,) = list_layers(nn.Sequential(nn.Conv3d(5, 4, 1)), (7, 4, 5), ("Conv3d",))
    assert row.output_shape == (1, 4, 7, 4, 5)
    with pytest.raises(InputError, match=r"forward\(\) failed on 1x3x4x5"):
        list_layers(nn.Sequential(nn.Conv2d(5, 4, 1), nn.Linear(9, 9)), (4, 5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_of_other_numbers(dtype: torch.dtype) -> None:
    assert list_layers(nn.Sequential(nn.Conv2d(3, 4, 3)).to(dtype), (5, 5))[0].output_shape == (1, 4, 3, 3)


def test_the_error_for_an_input_that_is_too_small_is_one_line() -> None:
    with pytest.raises(InputError) as caught:
        list_layers(build_skeleton("alexnet").model, (20, 20))
    assert str(caught.value).startswith(
        "AlexNet: layer 'features.5' (MaxPool2d) needs a larger input; forward() failed on 1x3x20x20: "
    )
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 1


def test_types_by_base_class_glob_and_class() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.ConvTranspose2d(4, 4, 1), nn.Flatten())
    assert [row.type for row in list_layers(net, (4, 4), ("Conv*",))] == ["Conv2d", "ConvTranspose2d"]
    assert [row.type for row in list_layers(net, (4, 4), (nn.ReLU, "_ConvNd"))] == ["Conv2d", "ReLU", "ConvTranspose2d"]
    assert len(list_layers(net, (4, 4), ("all",))) == 4
    with pytest.raises(LayerError) as caught:
        list_layers(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)), (4, 4), ("Conv3d",))
    assert "no layer of type Conv3d; the model has Conv2d (2), Sequential (1), ReLU (1)" in str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_scripted_and_lazy_models_are_refused_whole() -> None:
    with pytest.raises(ModelError, match="scripted"):
        list_layers(torch.jit.script(nn.Conv2d(3, 4, 1)), (4, 4))
    lazy = nn.Sequential(nn.LazyConv2d(4, 1))
    with pytest.raises(ModelError, match="lazy"):
        list_layers(lazy, (4, 4))
    assert isinstance(lazy[0], nn.LazyConv2d)


@pytest.mark.filterwarnings("ignore:torch")
def test_quantized_layers_hold_packed_parameters() -> None:
    quantized = torch.ao.nn.quantized
    net = nn.Sequential(
        quantized.Quantize(0.1, 0, torch.quint8),
        quantized.Conv2d(4, 6, 3, groups=2),  # 6x6: 6 * 2 * 3 * 3 + 6 parameters
        nn.Flatten(),
        quantized.Linear(6 * 6 * 6, 5),
        quantized.DeQuantize(),
        torch.ao.nn.quantized.dynamic.Linear(5, 2, bias_=False),
    ).eval()  # fmt: skip
    rows = list_layers(net, inputs=(torch.rand(2, 4, 8, 8),), types=("Conv2d", "Linear"))
    images, places = 2, 6 * 6
    assert [row.params for row in rows] == [6 * 18 + 6, 216 * 5 + 5, 5 * 2]
    convolution = images * places * 6 * (18 + 1)  # a value more for the bias, as in float layers
    assert [row.macs for row in rows] == [convolution, images * 216 * 5, images * 5 * 2]


def test_a_model_that_ends_the_program_is_one_line() -> None:
    def ends(x: Any) -> None:
        raise SystemExit(7)

    with pytest.raises(InputError, match=r"Function ends the program in its forward pass, by sys\.exit\(7\)"):
        trace(Function(ends), (torch.zeros(1, 3, 2, 2),))
