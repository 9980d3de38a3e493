"""The block around passes and training loops: torchvision's layers, other nets and equal bits."""

import copy
import functools
import sys
import warnings
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hookscope.errors import LayerError, ModelError, SelectionError, UsageError
from hookscope.hooks.activations import capture
from hookscope.hooks.model_state import ModelSnapshot
from hookscope.interventions import (
    Clamp,
    DropBlock,
    DropBlock2d,
    Dropout,
    Freeze,
    LinearSchedule,
    Mean,
    Noise,
    Patch,
    Permute,
    Prune,
    Quantize,
    Scale,
    Steer,
    Zero,
    intervene,
)
from tests.helpers import refused, same_bits, same_values
from tests.nets import Function

X = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Convolutions with an in-place layer between and, where it is given, another before that."""

    def __init__(self, between: nn.Module | None = None, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.relu, self.b = nn.Conv2d(3, 6, 3), nn.ReLU(inplace=True), nn.Conv2d(6, 4, 3)
        self.fc, self.norm = nn.Linear(4, 3), nn.BatchNorm2d(6)
        self.between, self.reentrant = between, reentrant

    def first(self, x: Tensor) -> Tensor:
        x = self.norm(self.a(x))
        return self.relu(self.between(x) if self.between is not None else x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) if self.reentrant is None else checkpoint(self.first, x, use_reentrant=self.reentrant)
        return self.fc(self.b(x).mean((2, 3)))


def train(net: nn.Module, steps: int = 4, seed: int = 3) -> None:
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(X), torch.arange(4) % 3).backward()
        optimizer.step()


def test_training_with_dropblock_is_that_of_a_net_with_it_built_in() -> None:
    built_in = Net(torchvision.ops.DropBlock2d(p=0.3, block_size=3)).train()
    train(built_in)
    net, plain = Net().train(), Net().train()
    with intervene(net, {"norm": DropBlock2d(p=0.3, block_size=3)}) as block:
        train(net)
        inside = {key: value.clone() for key, value in net.state_dict().items()}
    train(plain)
    assert same_values(net, built_in.state_dict()) and not same_values(net, plain.state_dict())
    assert list(inside) == list(plain.state_dict()) and same_values(net, inside)
    assert (block.step, block.changed) == (4, {"norm": 4})


def test_silent_in_eval() -> None:
    net = Net().eval()
    judge, random = net(X), torch.get_rng_state()
    with intervene(net, {"norm": DropBlock2d(p=0.5, block_size=3), "fc": Dropout(0.5)}) as block:
        assert same_bits(net(X), judge) and torch.equal(torch.get_rng_state(), random)
        assert (block.step, block.changed) == (0, {})
        net.norm.train()  # by the layer itself, not by the net
        assert not torch.equal(net(X), judge) and block.changed == {"norm": 1}


def test_the_rate_goes_by_the_steps_and_goes_on_where_it_was_set() -> None:
    rates: list[int] = []
    net = Net().train()
    change = DropBlock(lambda step: rates.append(step) or 0.1, block_size=3)  # type: ignore[func-returns-value]
    with intervene(net, {"norm": change, "b": Dropout(LinearSchedule(0, 1, 10))}) as block:
        train(net, 3)
        net.eval()(X)
        net.train()(X)
        block.step = 100
        train(net, 2)
    assert rates == [0, 1, 2, 3, 100, 101] and block.step == 102
    with block:
        net.train()(X)
    assert rates[-1] == 102 and block.changed == {"norm": 1, "b": 1}


def test_a_step_ends_after_the_last_change_of_the_net_itself() -> None:
    steps: list[int] = []
    schedule = lambda step: steps.append(step) or 0.0  # noqa: E731
    net = Net().train()
    with intervene(net, [("re:^$", Dropout(schedule)), ("a", Dropout(schedule)), ("re:^$", Dropout(schedule))]):
        net(X)
        net(X)
    assert steps == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", [("norm", "output"), ("relu", "input")])
def test_checkpointing_computes_the_same_again(reentrant: bool, where: tuple[str, str]) -> None:
    gradients = []
    for net in (Net().train(), Net(reentrant=reentrant).train()):
        picture = X.clone().requires_grad_()
        torch.manual_seed(9)
        drop = DropBlock(LinearSchedule(0.0, 0.9, 3), block_size=3, on=where[1])
        with intervene(net, [(where[0], drop), ("a", lambda call, x: x * 1.5), ("1", Scale(2.0))]) as block:
            block.step = 1
            loss = net(picture).square().sum()
            backward = Thread(target=loss.backward)  # as on a GPU
            backward.start()
            backward.join()
            net(picture).square().sum().backward()
        assert block.step == 3 and block.changed == {where[0]: 2, "a": 2, "b": 2}
        gradients.append([picture.grad, *(parameter.grad for parameter in net.parameters())])
    plain, again = gradients
    assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in zip(plain, again, strict=True))
    assert bool(plain[0].any())


def test_a_copy_and_a_saved_model_of_inside_the_block_need_nothing_of_hookscope(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), nn.Conv2d(3, 2, 1)), torch.randn(1, 3, 4, 4)
    judge = net(x)
    changes = {"re:^0$": lambda call, tensor: tensor * 0, "re:^1$": Noise(on="input"), "2.weight": Scale(1.0)}
    with intervene(net, {"re:^$": Noise(on="input"), **changes}):
        torch.save(net, tmp_path / "net.pt")
        twin = copy.deepcopy(net)
        assert same_bits(twin(x), judge) and not torch.equal(net(x), judge)
    for name in [name for name in sys.modules if name.partition(".")[0] == "hookscope"]:
        monkeypatch.setitem(sys.modules, name, None)
    loaded = torch.load(tmp_path / "net.pt", weights_only=False)
    assert all(same_bits(model(x), judge) for model in (loaded, twin, net)) and same_values(loaded, net.state_dict())


def test_several_at_one_place_act_in_their_order_and_in_their_own_model() -> None:
    net = Net().eval()
    with torch.no_grad():
        out = net.b(net.first(X))
        for changes, judge in (
            ({"b": [Scale(2.0), lambda call, x: x + 1]}, out * 2 + 1),
            ({"b": [lambda call, x: x + 1, Scale(2.0)]}, (out + 1) * 2),
            ([("b", Scale(2.0)), ("a", Scale(1)), ("b", lambda call, x: x + 1)], out * 2 + 1),
            (iter([["b", Scale(2.0)], ["1", (lambda call, x: x + 1,)]]), out * 2 + 1),
        ):
            with intervene(net, changes):
                assert torch.equal(net(X), net.fc(judge.mean((2, 3))))
        with intervene(net, {"b": Scale(2.0)}), intervene(net, {"b": lambda call, x: x + 1}):
            assert torch.equal(net(X), net.fc((out * 2 + 1).mean((2, 3))))
        given = net.first(X)
        with intervene(net, [("b", lambda call, x: x + 1), ("b", Scale(3.0, on="input")), ("b.bias", Zero())]):
            judge = nn.functional.conv2d(given * 3, net.b.weight) + 1
            assert torch.allclose(net(X), net.fc(judge.mean((2, 3))), rtol=1e-5, atol=1e-6)
    net, other = Net().eval(), Net().eval()
    judge = net(X)
    with intervene(net, {"b": Zero()}), intervene(other, {"a": Zero()}) as block:
        assert not torch.equal(net(X), judge) and block.changed == {}
        assert other(X) is not None and block.changed == {"a": 1}


def test_a_block_may_be_entered_again_but_not_twice() -> None:
    net = Net().eval()
    state, block = ModelSnapshot(net), intervene(net, {"b": Zero()})
    for _ in range(2):
        with block:
            assert torch.equal(net(X), net.fc(torch.zeros(4, 4)))
            with pytest.raises(UsageError, match="this block of interventions is already entered"):
                block.__enter__()
    assert [change for change in state.changes() if "hooks" in change.what] == []


SLOW = ["densenet121", "vgg11", "vit_b_16", "mobilenet_v3_small", "googlenet"]
MODELS = ["resnet18", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@pytest.mark.filterwarnings("ignore:The default weight initialization of GoogleNet")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_neutral_interventions_change_no_bit(name: str, layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    options = {"init_weights": False} if name == "googlenet" else {}
    model = torchvision.models.get_model(name, weights=None, **options).eval().to(memory_format=layout)
    side = 224 if name == "vit_b_16" else 64
    picture = torch.randn(2, 3, side, side).contiguous(memory_format=layout)
    with torch.no_grad():
        judge = model(picture)
        everywhere = "re:."
        with capture(model, everywhere, inputs=True) as kept:
            assert same_bits(model(picture), judge)
        nothing = [Scale(1.0), Noise(0.0), Dropout(0.0), DropBlock(0.0), DropBlock(0.5), Dropout(0.5)]
        with (
            pytest.warns(RuntimeWarning, match="the layer was in eval mode"),
            intervene(model, {everywhere: nothing}) as block,
        ):
            assert same_bits(model(picture), judge) and block.changed == {}
        # containers hand on what their last layer put out, so that each activation is patched with itself, twice
        with intervene(model, {everywhere: Patch(kept)}) as block:
            assert same_bits(model(picture), judge) and len(block.changed) == len(kept)
        with intervene(model, {everywhere: [Patch(kept.inputs, on="input"), lambda call, tensor: tensor]}):
            assert same_bits(model(picture), judge)


def test_tokens_and_maps_with_their_channels_last() -> None:
    vit = torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=3).eval()
    swin = torchvision.models.SwinTransformer([4, 4], 16, [1, 1], [2, 2], [4, 4], num_classes=3).eval()
    places = [
        (vit, "encoder.layers.encoder_layer_0", torch.randn(2, 3, 32, 32), "1-16", (slice(None), slice(1, 17), [3])),
        (swin, "features.1", torch.randn(1, 3, 64, 64), "0-3x2", (slice(None), slice(0, 4), slice(2, 3), [3])),
    ]
    with torch.no_grad():
        for model, where, picture, positions, index in places:
            with capture(model, where) as before:
                model(picture)
            with intervene(model, {where: Zero(channels=3, positions=positions)}), capture(model, where) as after:
                model(picture)
            judge = before[where].clone()
            judge[index] = 0
            assert torch.equal(after[where], judge) and not torch.equal(before[where], judge)
        # inputs of the first layers have their channels first
        judge = picture.clone()
        judge[:, 1] = 0
        wanted = swin(judge)
        for where in ("features.0", "features.0.0", "features", "re:^$"):
            with intervene(swin, {where: Zero(channels=1, on="input")}):
                assert torch.equal(swin(picture), wanted)


def test_containers_are_changed_part_by_part() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8)
    plain = attention(x, x, x)
    with intervene(attention, {"re:^$": Scale(2.0, channels=1)}):
        out, weights = attention(x, x, x)
    judge = plain[0].clone()
    judge[..., 1] *= 2
    assert torch.equal(out, judge) and isinstance(weights, Tensor)
    with intervene(attention, {"re:^$": Zero(on="input")}):
        zeros = torch.zeros_like(x)
        assert torch.equal(attention(x, value=x, key=x)[0], attention(zeros, zeros, zeros)[0])


def test_integers_pass_unchanged_and_a_tensor_that_appears_twice_stays_one() -> None:
    net, calls = Function(lambda x: [x, x, torch.arange(3), x > 0, "word", None]), []
    plain = net(X)
    with intervene(net, {"re:^$": lambda call, x: calls.append(call.key) or x * 2}):
        found = net(X)
    assert calls == [""] and found[0] is found[1] and torch.equal(found[0], plain[0] * 2)
    assert torch.equal(found[2], plain[2]) and torch.equal(found[3], plain[3]) and found[4:] == ["word", None]
    embedding = nn.Sequential(nn.Embedding(5, 4))
    with intervene(embedding, {"0": Zero(on="input")}, types=["Embedding"]) as block:
        embedding(torch.arange(5))
    assert block.changed == {}


def test_a_function_may_keep_its_argument_and_its_result_or_write_into_it() -> None:
    net = Net().train()
    kept: list[Tensor] = []

    def mine(call: Any, tensor: Tensor) -> Tensor:
        kept.extend([tensor, tensor + 1])
        return kept[-1]

    with intervene(net, {"norm": [lambda call, tensor: kept.append(tensor), mine]}):
        net(X).sum().backward()
    assert torch.equal(kept[0], kept[1]) and torch.equal(kept[2], kept[1] + 1)
    assert bool((kept[0] < 0).any()) and bool((kept[2] < 0).any())  # the in-place ReLU wrote into neither
    net = Net().eval()

    def write(call: Any, tensor: Tensor) -> Tensor:
        tensor[:, 0] = 7
        return tensor

    def write_and_say_nothing(call: Any, tensor: Tensor) -> None:
        tensor.zero_()

    with intervene(net, {"relu": write}):  # whose own output its backward needs
        net(X).sum().backward()
    plain = net(X)
    with intervene(net, {"relu": write_and_say_nothing}) as block:
        assert same_bits(net(X), plain) and block.changed == {}


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("at", ["function", "pass", "block"])
def test_hooks_are_removed_after_any_exception(kind: type[BaseException], at: str) -> None:
    net = Net().eval()
    state = ModelSnapshot(net)

    def fail(*anything: Any) -> None:
        raise kind

    if at == "pass":
        net.fc.forward = fail  # type: ignore[method-assign]
    changes: dict[str, Any] = {
        "a": Scale(2.0),
        "norm": Scale(2.0, on="input"),
        "b": fail if at == "function" else Zero(),
    }
    with pytest.raises(kind), intervene(net, changes):
        fail(net(X))
    assert state.changes() == []


def test_an_entry_that_fails_half_way_leaves_nothing() -> None:
    net = Net()
    state = ModelSnapshot(net)
    for changes in ({"a": Zero(), "b.weight": Zero(), "nothing": Zero()}, {"a": Zero(), "b.weight": Zero(channels=9)}):
        block = intervene(net, changes)
        for _ in range(2):
            with pytest.raises(LayerError):
                block.__enter__()
        assert state.changes() == []


@pytest.mark.parametrize(
    ("where", "change", "error", "says"),
    [
        ("bb", Zero(), LayerError, "no layer or parameter 'bb'; nearest: b, b.bias; list layers with"),
        ("norm.wieght", Zero(), LayerError, "no layer or parameter 'norm.wieght'; nearest: norm.weight"),
        ("b.bais", lambda call, x: x, LayerError, "no layer or parameter 'b.bais'; nearest: b.bias"),
        ("-1", Zero(), SelectionError, "index -1 counts from the end, which is unknown while a pass runs; choose the"),
        ("0:-1", Zero(), SelectionError, "index 0:-1 counts from the end"),
        (7, Zero(), LayerError, "no index 7; there are 2 Conv2d calls: 0 to 1; indices are as in list_layers"),
        ("b#3", Zero(), LayerError, "no call 'b#3'; the layer ran once"),
        ("re:[", Zero(), SelectionError, "bad regular expression '['"),
        ("", Zero(), SelectionError, "empty layer selection"),
        ("b", Zero(channels="2-4"), LayerError, "no channel 4 at 'b'; there are 4: 0 to 3"),
        ("b", lambda call, x: x[:1], UsageError, "the intervention at 'b' returns shape 1x4x8x8; it got 4x4x8x8"),
        ("b", Zero, UsageError, "'Zero' is a class; give an instance, `Zero(...)`"),
        ("b", 3, UsageError, "an intervention cannot be an int; give Zero(), 'zero:channels=3', or a function"),
        ("b", [Zero(), None], UsageError, "an intervention cannot be a NoneType"),
        ("relu", Prune(), LayerError, "no parameter to prune at 'relu'; layers with such parameters: a, b, fc; list"),
        ("norm", Prune(), LayerError, "no parameter to prune at 'norm'; layers with such parameters: a, b, fc"),
        ("relu", Freeze(), LayerError, "no parameter to freeze at 'relu'; layers with such parameters: a, b, fc and 1"),
        ("rellu", Freeze(), LayerError, "no parameter to freeze at 'rellu'; nearest: relu"),
    ],
)
def test_an_impossible_change_is_refused(where: str, change: Any, error: type[Exception], says: str) -> None:
    net = Net().eval()
    state = ModelSnapshot(net)
    with refused(error, says, part="begins"), intervene(net, {where: change}):
        net(X)
    assert state.changes() == []


NO_PAIRS = r"^(an intervention cannot be|changes must be a mapping or pairs, not) an? "
NO_NAME = r"^a layer must be a name or an index, not an? (Linear|NoneType|float|tuple)"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        *((changes, NO_PAIRS) for changes in (Zero(), 5, [Zero()], [("b", Zero(), 1)], None)),
        *(({where: Zero()}, NO_NAME) for where in (nn.Linear(1, 1), None, 1.0, ("a", "b"))),
    ],
)
def test_changes_must_be_a_mapping_or_pairs_of_a_name_and_a_change(changes: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        intervene(Net(), changes)


def test_under_no_grad_inference_mode_and_autocast() -> None:
    net = Net().eval()
    every = {
        "a": [Noise(0.1), Quantize(8)],
        "norm": Clamp(-1, 1),
        "b": [Scale(2.0, channels=1), Permute(), Mean(over="positions")],
        "fc": [Steer(torch.ones(3)), Zero(channels=0), lambda call, x: x + 1],
        "b.weight": Scale(2.0),
    }
    outputs = []
    for mode in (torch.no_grad, torch.inference_mode):
        torch.manual_seed(0)
        with mode(), intervene(net, every):
            outputs.append(net(X).clone())
    torch.manual_seed(0)
    with intervene(net, every):
        outputs.append(net(X).detach())
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    drops = {"a": [DropBlock(0.1, 3, when="always"), Dropout(0.1, when="always")]}
    with torch.autocast("cpu", dtype=torch.bfloat16), intervene(net, every | drops):
        found = net(X)
    assert found.dtype == torch.bfloat16 and bool(found.isfinite().all()) and found[:, 0].tolist() == [1, 1, 1, 1]
    with torch.inference_mode(), capture(net, "b") as kept:
        judge = net(X)
    with intervene(net, {"b": Patch({key: kept[key] for key in kept})}):
        assert torch.equal(net(torch.zeros_like(X)), judge)


def test_models_in_which_hooks_do_not_fire_are_refused() -> None:
    with pytest.raises(ModelError, match=r"compiled by torch\.compile: hooks added now may never fire"):
        intervene(torch.compile(Net(), backend="eager"), {"*a": Zero()}).__enter__()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.jit is deprecated
        scripted = torch.jit.script(nn.Sequential(nn.Conv2d(3, 1, 1)))
    with pytest.raises(ModelError, match="scripted or traced"):
        intervene(scripted, {"0": Zero()}).__enter__()


def test_names_within_a_wrapper() -> None:
    wrapped = nn.DataParallel(Net().eval())
    with intervene(wrapped, {"module.b": Zero(), "module.fc.bias": Zero()}) as block:
        assert not bool(wrapped(X).any()) and block.changed == {"module.b": 1, "module.fc.bias": 1}
    with pytest.raises(LayerError, match=r"no layer or parameter 'fc\.bias'; nearest: module\.fc\.bias"):
        intervene(wrapped, {"fc.bias": Zero()}).__enter__()


@pytest.mark.parametrize(
    ("where", "calls"), [("conv", [0, 1, 2]), ("conv#1", [1]), ("1:", [1, 2]), ("conv#0,2", [0, 2])]
)
@pytest.mark.parametrize("on", ["output", "input"])
def test_only_the_chosen_calls_are_changed(where: str, calls: list[int], on: str) -> None:
    net, x = Function(lambda net, x: net.conv(net.conv(net.conv(x))), conv=nn.Conv2d(1, 1, 1)), torch.ones(1, 1, 1, 1)
    with torch.no_grad():
        judge = x
        for call in range(3):
            judge = judge * 3 if on == "input" and call in calls else judge
            judge = net.conv(judge)
            judge = judge * 3 if on == "output" and call in calls else judge
        with intervene(net, {where: Scale(3.0, on=on)}) as block:
            assert torch.equal(net(x), judge)
    assert set(block.changed) == {f"conv#{call}" if call else "conv" for call in calls}


def test_gradients_through_the_block_are_those_of_finite_differences() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(inplace=True), nn.Conv2d(3, 2, 2)).double()

    def run(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        changes: dict[Any, Callable[..., Any]] = {0: DropBlock(0.3, 3), 1: Noise(0.1, channels=0)}
        with intervene(net, changes):
            return net(x)

    assert torch.autograd.gradcheck(run, torch.randn(1, 2, 6, 6, dtype=torch.float64, requires_grad=True))


def skips() -> nn.Module:
    layers = {name: nn.Linear(2, 2) for name in ("a", "b", "only_in_training")}
    net = Function(lambda net, x: net.a(net.only_in_training(x) if net.training else x), **layers)
    net.alias = net.a
    return net


@pytest.mark.parametrize("where", ["b", "a,b", "only_in_training"])
@pytest.mark.parametrize("change", [Zero(), Zero(on="input"), lambda call, x: x])
def test_a_layer_that_complete_passes_skip_is_an_error_at_the_end_of_the_block(where: str, change: Any) -> None:
    net, x = skips().eval(), torch.ones(1, 2)
    state = ModelSnapshot(net)

    def run(error: Exception | None = None) -> None:
        with intervene(net, {where: change}):
            net(x)
            net(x)
            if error is not None:
                raise error

    with pytest.raises(LayerError, match=f"^'{where.rpartition(',')[2]}' did not run: nothing was changed"):
        run()
    assert state.changes() == []
    with pytest.raises(ValueError, match="of the block"):
        run(ValueError("of the block"))


@pytest.mark.filterwarnings("ignore:no pass of")  # compiled code of an earlier test
def test_a_layer_that_one_pass_reached_or_that_no_pass_could_is_no_error() -> None:
    net, x = skips().train(), torch.ones(1, 2)
    with intervene(net, {"only_in_training": Zero(), "alias": Zero(), "b*": Zero()}):
        net(x)
        net.eval()(x)
    with intervene(net, {"b": Zero()}), pytest.raises(RuntimeError):
        net(torch.ones(1, 3))
    with intervene(net, {"b": Zero()}) as block:
        net.a(x)
        assert torch.equal(net.b(x), torch.zeros(1, 2)) and block.changed == {"b": 1}
    with intervene(net, {"b": Zero()}):
        net.b(x)
        net(x)
    with intervene(net, {"b": Zero()}):
        pass
    silent = pytest.warns(RuntimeWarning, match=r"Dropout\(p=0.5\) at 'a' changed nothing: .*; call model.train\(\)")
    with silent, intervene(net, {"a": Dropout(0.5)}):
        net(x)
    with intervene(net, {"a": Dropout(0.5)}):  # which acted once
        net.train()(x)
        net.eval()(x)


def test_steps_are_counted_where_only_parameters_are_changed() -> None:
    net = Net().train()
    with intervene(net, {"a.weight": Noise(0.1)}) as block:
        train(net, 3)
        net.eval()(X)
    assert block.step == 3
    compiled = torch.compile(nn.Sequential(nn.Conv2d(3, 1, 1)), backend="eager")
    with intervene(compiled, {"*weight": Zero()}):
        assert not bool(compiled._orig_mod[0].weight.any())


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda tensor: tensor, "the function for 'b' takes (tensor); it is called with (call, tensor); write one"),
        (lambda call, tensor, more: tensor, "the function for 'b' takes (call, tensor, more); it is called with"),
        (lambda: None, "the function for 'b' takes (); it is called with (call, tensor)"),
    ],
)
def test_a_function_with_other_arguments_is_refused(function: Any, says: str) -> None:
    for where in ("b", "b.weight"):
        with refused(UsageError, says.replace("'b'", f"'{where}'"), part="begins"):
            intervene(Net(), {where: function})


def test_any_callable_that_takes_a_call_and_a_tensor_is_an_intervention() -> None:
    class Mine:
        def __call__(self, call: Any, tensor: Tensor, factor: float = 2.0) -> Tensor:
            return tensor * factor

    net = Net().eval()
    for function in (lambda *both: both[1] * 2, Mine(), functools.partial(Mine(), factor=2.0)):
        with intervene(net, {"b": function}) as block:
            net(X)
        assert block.changed == {"b": 1}


def test_an_index_that_is_the_name_of_a_layer() -> None:
    net = nn.Sequential(nn.Conv2d(3, 1, 1), nn.ReLU(), nn.Flatten())
    judge = "no index 2; there are 1 Conv2d calls: 0 to 0; the layer named 2 is name:2"
    with pytest.raises(LayerError) as caught, intervene(net, {"2": Zero()}):
        net(X)
    assert str(caught.value) == judge
    with intervene(net, {"name:2": Zero()}):
        assert not bool(net(X).any())
    with pytest.raises(LayerError, match=r"no index 7; .*; indices are as in list_layers"), intervene(net, {7: Zero()}):
        net(X)


def test_repr_names_the_interventions_and_their_schedules() -> None:
    block = intervene(
        Net(), {"a": DropBlock2d(LinearSchedule(0, 0.1, steps=100)), 1: [Zero(channels="0-2"), Scale(2.0)]}
    )
    assert repr(block) == (
        "intervene(Net, {'a': DropBlock2d(p=LinearSchedule(0, 0.1, steps=100)), '1': Zero(channels=0-2),"
        " '1': Scale(factor=2)})"
    )
    assert repr(intervene(Net(), {"a": same_bits})) == "intervene(Net, {'a': same_bits})"
    assert str(Dropout(len)) == "Dropout(p=len)"  # type: ignore[arg-type]


def test_words_of_the_command_line_are_interventions() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval(), torch.randn(1, 3, 6, 6)
    with intervene(net, {"0": Zero(channels=3)}):
        judge = net(x)
    with intervene(net, {"0": "zero:channels=3"}):
        assert same_bits(net(x), judge)
    with pytest.raises(UsageError, match="nought"):
        intervene(net, {"0": "nought"})
