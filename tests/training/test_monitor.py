"""Monitor against a plain recording loop written by hand, and the run it watches against the same one unwatched."""

import copy
import io
import math
import os
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hookscope
from hookscope.comparison import against_reference
from hookscope.errors import LayerError, ModelError, NonFiniteError, UsageError, WriteError
from hookscope.models import as_loaded
from hookscope.statistics import SavedStatistics, StatisticsCollector, load_statistics
from hookscope.training import Monitor
from hookscope.training.log.file import RunLog, read_runs
from tests.nets import Function, named
from tests.training.watched import LAYERS, ORDER, Row, Small, batches, by_key, close, keys, sgd, small, train


def hand_metrics(values: Tensor) -> Row:
    """The metrics of an activation, computed the plain and slow way."""
    values = values.double()
    return {
        "activation_mean": float(values.mean()),
        "activation_std": float(values.std(correction=0)),
        "zero_share": float((values == 0).double().mean()),
        "channels": values.shape[1],
        "dead_channels": sum(not bool(values[:, c].any()) for c in range(values.shape[1])),
        "non_finite": 0,
    }


def hand_step(net: Small, x: Tensor, y: Tensor) -> tuple[Tensor, dict[tuple[str, int], Tensor]]:
    """The forward pass written out, with a copy of the output of every call."""
    outputs: dict[tuple[str, int], Tensor] = {}

    def keep(name: str, call: int, value: Tensor) -> Tensor:
        outputs[name, call] = value.detach().clone()
        return value

    x = keep("conv", 0, F.conv2d(x, net.conv.weight, net.conv.bias))
    bn = net.bn
    x = keep("bn", 0, F.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias, True, 0.1, bn.eps))
    x = keep("relu", 0, F.relu(x))
    x = keep("drop", 0, F.dropout(x.flatten(1), 0.25, True))
    x = keep("fc1", 0, F.linear(x, net.fc1.weight, net.fc1.bias))
    x = keep("relu", 1, F.relu(x))
    x = keep("fc2", 0, F.linear(x, net.fc2.weight, net.fc2.bias))
    return F.cross_entropy(x, y), outputs


def test_every_metric_is_that_of_a_plain_recording_loop() -> None:
    watched, plain = small(), small()
    data = batches()
    of_watched, of_plain = (sgd(net, momentum=0.9) for net in (watched, plain))
    torch.manual_seed(3)
    with Monitor(watched, of_watched, every=2) as monitor:
        train(watched, of_watched, data)
    torch.manual_seed(3)
    for at, (x, y) in enumerate(data):
        running = plain.bn.running_mean.clone(), plain.bn.running_var.clone()
        loss, outputs = hand_step(plain, x, y)
        of_plain.zero_grad()
        loss.backward()
        before = {name: p.detach().clone() for name, p in plain.named_parameters()}
        gradients = {name: p.grad.clone() for name, p in plain.named_parameters()}
        of_plain.step()
        if at == 3:
            continue
        rows = by_key(monitor.rows, at)
        assert keys(sorted(rows.values(), key=lambda row: row["order"])) == ORDER
        assert {row["layer"]: row["index"] for row in rows.values() if row["index"] is not None} == {"conv": 0}
        for key, values in outputs.items():
            row = rows[key]
            for name, value in hand_metrics(values).items():
                assert close(row[name], value), (key, name, row[name], value)
            assert close(row["loss"], loss.item()) and row["learning_rate"] == 0.1
            assert (row["step"], row["model"], row["optimizer"]) == (at, 0, 0)
            assert row["type"] == type(plain.get_submodule(key[0])).__name__
            own = [name for name in before if name.rpartition(".")[0] == key[0]]
            if not own:
                assert row["gradient_norm"] is row["weight_norm"] is row["update_to_weight"] is row["frozen"] is None
                continue
            weight = f"{key[0]}.weight"
            update = dict(plain.named_parameters())[weight].detach() - before[weight]
            assert close(row["gradient_norm"], float(torch.cat([gradients[name].flatten() for name in own]).norm()))
            assert close(row["weight_norm"], float(before[weight].norm()))
            assert close(row["update_to_weight"], float(update.norm() / before[weight].norm()))
            assert (row["gradient_non_finite"], row["weight_non_finite"], row["frozen"]) == (0, 0, False)
        batch = outputs["conv", 0]
        mean, variance = batch.mean((0, 2, 3)), batch.var((0, 2, 3), correction=0)
        shift = ((mean - running[0]) / (running[1] + plain.bn.eps).sqrt()).square().mean().sqrt()
        ratio = ((variance + plain.bn.eps) / (running[1] + plain.bn.eps)).log().mean().exp()
        assert close(rows["bn", 0]["running_mean_shift"], float(shift))
        assert close(rows["bn", 0]["running_var_ratio"], float(ratio))
        assert rows["conv", 0]["running_mean_shift"] is None and rows["relu", 0]["dead_channels"] == 1
    assert (monitor.steps, monitor.sampled, monitor.trouble) == (4, 3, None)
    assert sorted({row["step"] for row in monitor.rows}) == [0, 1, 2]


def validate(net: nn.Module) -> None:
    with torch.no_grad():
        nn.CrossEntropyLoss()(net(torch.randn(2, 1, 6, 6)), torch.tensor([0, 1]))


def seeded_run(watching: Callable[[nn.Module, Any], Any], loop: Row) -> tuple[bytes, Tensor]:
    """All tensors and the random state after two epochs with shuffling, dropout and momentum.

    The model is copied and saved.
    """
    net = small()
    optimizer = sgd(net, momentum=0.9)

    def copies() -> None:
        assert pickle.loads(pickle.dumps(copy.deepcopy(net))).conv._forward_hooks == {}

    data = TensorDataset(*(torch.cat(part) for part in zip(*batches(), strict=True)))
    with watching(net, optimizer):
        for _ in range(2):
            train(net, optimizer, DataLoader(data, batch_size=4, shuffle=True), **loop, after_step=copies)
    stream = io.BytesIO()
    gradients = [p.grad for p in net.parameters()]
    torch.save([net.state_dict(), optimizer.state_dict()["state"], gradients], stream)
    return stream.getvalue(), torch.get_rng_state()


@pytest.mark.parametrize("model_is_given", [True, False])
@pytest.mark.parametrize(
    ("options", "loop"),
    [
        ({}, {}),
        ({"stop_on": "non-finite"}, {}),
        ({"to": "tensorboard:events", "histograms": 1}, {}),
        ({"log": "log"}, {}),
        ({}, {"before_step": lambda net: nn.utils.clip_grad_norm_(net.parameters(), 0.1)}),
        ({}, {"before_step": validate, "loss_of": nn.CrossEntropyLoss()}),
        ({}, {"scaled": True}),
        ({}, {"leaves_out": "zero_grad"}),
    ],
    ids=("plain", "stop", "tensorboard", "log", "clipped", "validated", "scaled", "left-out"),
)
def test_a_seeded_run_ends_with_the_same_bits(
    options: Any, loop: Row, model_is_given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bits, chance = seeded_run(lambda net, optimizer: nullcontext(), loop)
    watched_bits, watched_chance = seeded_run(
        lambda net, optimizer: Monitor(*((net, optimizer) if model_is_given else ()), every=1, **options), loop
    )
    assert watched_bits == bits and torch.equal(chance, watched_chance)


def test_hooks_are_gone_after_the_block_and_after_an_exception() -> None:
    tables = [modules._global_forward_hooks, modules._global_forward_pre_hooks]
    tables += [optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks]
    before, backward = [dict(table) for table in tables], torch.autograd._tensor_or_tensors_to_tuple
    for error in (None, ValueError("x"), KeyboardInterrupt(), SystemExit(3)):
        with suppress(BaseException), Monitor(every=1):
            assert all(tables) and torch.autograd._tensor_or_tensors_to_tuple is not backward
            if error is not None:
                raise error
        assert [dict(table) for table in tables] == before and torch.autograd._tensor_or_tensors_to_tuple is backward


@pytest.mark.parametrize("differs_in_eval", [True, False])
def test_module_hooks_are_on_for_a_step_that_is_sampled_and_for_a_validation(differs_in_eval: bool) -> None:
    net = small() if differs_in_eval else nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    in_steps, between = list[bool](), list[bool]()
    note: Row = {"before_step": lambda net: in_steps.append(bool(modules._global_forward_hooks))}
    note["after_step"] = lambda: between.append(bool(modules._global_forward_hooks))
    with Monitor(every=7):
        train(net, sgd(net), batches(8), **note)
    assert in_steps == [step in (0, 1, 2, 4, 7) for step in range(8)]
    assert between == [differs_in_eval or step in (1, 2, 4, 7) for step in range(1, 9)]


class TestKindsOfModels:
    def rows(self, net: nn.Module, call: Callable[[], Tensor], **options: Any) -> list[Row]:
        """The lines of two sampled steps."""
        with Monitor(every=1, **options) as monitor:
            loss = call()  # a lazy model has its parameters after its first pass
            optimizer = sgd(net, 0.01)
            for _ in range(2):
                loss.backward()
                optimizer.step()
                loss = call()
        assert monitor.trouble is None and monitor.steps == 2
        return monitor.rows

    def test_recurrent_and_attention(self) -> None:
        def forward(net: Any, x: Tensor) -> Row:
            x, state = net.lstm(x)
            return {"out": net.attention(x, x, x), "state": state}

        lstm, attention = nn.LSTM(3, 4, batch_first=True), nn.MultiheadAttention(4, 2, batch_first=True)
        net = Function(forward, lstm=lstm, attention=attention)
        norm = torch.cat([p.detach().flatten() for name, p in lstm.named_parameters() if "bias" not in name]).norm()
        rows = by_key(self.rows(net, lambda: net(torch.randn(2, 5, 3))["out"][0].sum()))
        assert close(rows["lstm", 0]["weight_norm"], float(norm))
        assert rows["attention", 0]["gradient_norm"] > 0 and rows["attention", 0]["channels"] == 4

    def test_lazy_layers(self) -> None:
        net = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.ReLU())
        rows = self.rows(net, lambda: net(torch.randn(4, 2)).sum())
        assert [row["type"] for row in rows if row["step"] == 1] == ["Linear", "BatchNorm1d", "ReLU"]

    @pytest.mark.filterwarnings("ignore:Complex modules")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
    def test_other_numbers(self, dtype: torch.dtype) -> None:
        net = nn.Linear(3, 2).to(dtype)
        row = self.rows(net, lambda: net(torch.ones(4, 3, dtype=dtype)).abs().sum(), stop_on="non-finite")[0]
        assert row["weight_norm"] > 0 and row["activation_std"] >= 0

    def test_autocast_and_empty_tensors(self) -> None:
        net = nn.Sequential(nn.Linear(3, 2), nn.ReLU())

        def call() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return net(torch.randn(4, 3)).sum() + net(torch.empty(0, 3)).sum()

        assert self.rows(net, call, stop_on="non-finite")[0]["activation_mean"] is not None
        empty = self.rows(net, lambda: net(torch.empty(0, 3)).sum())[0]
        assert empty["activation_mean"] is None and empty["zero_share"] is None

    def test_tied_and_parametrized_weights(self) -> None:
        normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        net = named(words=nn.Embedding(5, 3), normed=normed, out=nn.Linear(3, 5))
        net.out.weight = net.words.weight
        rows = by_key(self.rows(net, lambda: net(torch.tensor([[0, 1]])).square().sum()))
        assert list(rows) == [("words", 0), ("normed", 0), ("out", 0)]
        assert rows["words", 0]["weight_norm"] == rows["out", 0]["weight_norm"]
        assert rows["normed", 0]["weight_norm"] > 0

    def test_a_sparse_gradient(self) -> None:
        net = nn.Embedding(5, 2, sparse=True)
        rows = self.rows(net, lambda: net(torch.tensor([1, 1, 3])).sum(), stop_on="non-finite")
        assert close(rows[0]["gradient_norm"], math.sqrt(2 * 4 + 2 * 1))

    def test_names_without_the_words_of_wrappers(self) -> None:
        net = nn.DataParallel(small())
        rows = self.rows(net, lambda: net(torch.randn(4, 1, 6, 6)).sum())
        assert {row["layer"] for row in rows} == LAYERS


class TestChoice:
    @pytest.mark.parametrize(
        ("options", "layers"),
        [
            ({"layers": "fc*"}, ["fc1", "fc2"]),
            ({"layers": "relu#1"}, ["relu"]),
            ({"types": ("Linear",)}, ["fc1", "fc2"]),
            ({"types": ("Linear",), "layers": "-1"}, ["fc2"]),
            ({"layers": "0:2"}, ["conv"]),
            ({"layers": "0:2", "types": ("all",)}, ["conv", "bn"]),
            ({"layers": ["conv", "fc2"]}, ["conv", "fc2"]),
        ],
        ids=str,
    )
    def test_layers_and_types(self, options: Row, layers: list[str]) -> None:
        net = small()
        optimizer = sgd(net)
        with Monitor(net, optimizer, **options) as monitor:
            train(net, optimizer, batches(1))
        assert [row["layer"] for row in monitor.rows] == layers

    @pytest.mark.parametrize(
        ("options", "error", "match"),
        [
            ({"model": Small(), "layers": "fc3"}, LayerError, r"no layer 'fc3'.*nearest: fc"),
            ({"model": Small(), "types": ("Conv3d",)}, LayerError, "no layer of type Conv3d"),
            ({"model": Small(), "optimizer": sgd(nn.Linear(1, 1))}, LayerError, "no parameter of the model"),
            *(({"every": every}, UsageError, "every must be an integer") for every in (0, -1, 1.5, True)),
            *(({"histograms": each}, UsageError, "histograms must be an integer of at") for each in (-1, 1.5, True)),
            ({"stop_on": "nonfinite"}, UsageError, "nearest: non-finite"),
            ({"optimizer": 3}, UsageError, "optimizer must be .*, not int"),
            ({"model": "resnet18"}, UsageError, "is not a model; give an nn.Module"),
        ],
        ids=str,
    )
    def test_wrong_arguments_are_refused(self, options: Row, error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match), Monitor(**options):
            pytest.fail("the block was entered")

    @pytest.mark.filterwarnings("ignore:.*deprecated")
    def test_scripted_models_are_refused(self) -> None:
        with pytest.raises(ModelError, match="scripted"):
            Monitor(torch.jit.script(nn.ReLU()))

    def test_a_selection_that_matches_nothing_is_reported_once(self) -> None:
        net, notes = small(), []
        with Monitor(every=1, layers="fc3", on_trouble=notes.append) as monitor:
            train(net, sgd(net), batches())
        assert len(notes) == 1 and "no layer 'fc3' in Small" in notes[0] and monitor.steps == 4


class FailingDataset(Dataset[Tensor]):
    """Trains a model with NaN in the process that loads the data."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, at: int) -> Tensor:
        inner = nn.Linear(2, 2)
        inner(torch.full((1, 2), float("nan")))
        # by hand: after any torch.compile in the parent, a child that was forked off cannot call backward
        inner.weight.grad = torch.full((2, 2), float("nan"))
        sgd(inner).step()
        return torch.zeros(1, 6, 6)


class TestTrouble:
    def notes(self, log: Any = None, after_step: Callable[[], object] = lambda: None) -> list[str]:
        """What is reported of a run of four steps."""
        net, notes = small(), []
        with Monitor(every=1, log=log, on_trouble=notes.append) as monitor:
            train(net, sgd(net), batches(), after_step=after_step)
        assert monitor.trouble == (notes[0] if notes else None)
        return notes

    def test_a_failure_of_the_watcher_ends_the_watching_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hookscope.training.recorder.output_sums", lambda *args: 1 / 0)
        [note] = self.notes()
        assert "ZeroDivisionError" in note and "the training goes on" in note

    def test_it_is_a_warning_and_never_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hookscope.training.watcher.StepWeights", lambda *args, **kwargs: 1 / 0)
        net = small()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with Monitor(every=1):
                train(net, sgd(net), batches())
        assert len(caught) == 1
        with Monitor(every=1):  # here warnings are errors
            train(net, sgd(net), batches())

    def test_a_log_that_is_removed_ends_the_watching_only(self, tmp_path: Path) -> None:
        log = tmp_path / "run.ndjson"
        [note] = self.notes(log, lambda: log.unlink(missing_ok=True))
        assert "it was removed" in note

    @pytest.mark.parametrize(("method", "notes"), [("write", 1), ("close", 0)])
    def test_whatever_the_log_raises_stays_within(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, notes: int
    ) -> None:
        def refuse(*args: object) -> None:
            raise OSError("no more")

        assert len(self.notes(tmp_path / "log", lambda: monkeypatch.setattr(RunLog, method, refuse))) == notes

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
    def test_a_full_disk(self) -> None:
        with pytest.raises(WriteError, match="No space left"), Monitor(log="/dev/full"):
            pytest.fail("the block was entered")

    def test_a_forked_child_writes_nothing(self, tmp_path: Path) -> None:
        log, net = tmp_path / "run.ndjson", small()
        with Monitor(every=1, log=log, stop_on="non-finite") as monitor:
            for x in DataLoader(FailingDataset(), num_workers=1, batch_size=3):
                train(net, sgd(net), [(x, torch.tensor([0, 1, 2]))])
        (run,) = read_runs(log)
        assert monitor.steps == 1 and len(run.rows) == 7 and run.notes == [] and run.end is not None


def test_the_log_has_its_header_lines_and_end(tmp_path: Path) -> None:
    net, log = small(), tmp_path / "run.ndjson"
    for error in (None, SystemExit(5)):
        with suppress(SystemExit), Monitor(every=2, log=log, command=["a.py"], rank=1, world_size=2) as monitor:
            train(net, sgd(net), batches())
            if error is not None:
                raise error
        assert monitor.rows == []
    first, second = read_runs(log)
    header = {"command": ["a.py"], "layers": ["all"], "every": 2, "rank": 1, "pid": os.getpid(), "histograms": 0}
    assert header == {name: first.header[name] for name in header}
    assert len(first.rows) == len(second.rows) == 21 and not any("histograms" in row for row in first.rows)
    ends = [{name: run.end[name] for name in ("step", "sampled", "reason", "status")} for run in (first, second)]
    assert ends[0] == {"step": 3, "sampled": 3, "reason": "done", "status": None}
    assert ends[1] == ends[0] | {"reason": "exit", "status": 5}


class TestModes:
    def test_modes_of_the_script_see_what_they_see_unwatched(self) -> None:
        from torch.overrides import TorchFunctionMode
        from torch.utils._python_dispatch import TorchDispatchMode

        seen: list[str] = []

        def see(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

        def run(mode: Any, watching: Any) -> list[str]:
            net = small()
            seen.clear()
            with watching, mode():
                train(net, sgd(net), batches(3), scaled=True)
            return list(seen)

        for base, method in ((TorchFunctionMode, "__torch_function__"), (TorchDispatchMode, "__torch_dispatch__")):
            mode = type("Mode", (base,), {method: see})
            plain = run(mode, nullcontext())
            assert run(mode, Monitor(every=1)) == plain and len(plain) > 20
            assert run(mode, Monitor(every=1, stop_on="non-finite")) == plain

    def test_a_pass_of_fake_tensors_is_no_pass(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        net = small()
        with Monitor(every=1) as monitor:
            with FakeTensorMode(allow_non_fake_inputs=True):
                net(torch.ones(2, 1, 6, 6))
            train(net, sgd(net), batches(1))
        assert monitor.trouble is None and keys(monitor.rows) == ORDER

    @pytest.mark.parametrize("name", ["settrace", "setprofile"])
    def test_a_script_that_traces_its_calls_gets_one_note(self, name: str) -> None:
        import sys

        net, notes = small(), []
        before = getattr(sys, name.replace("set", "get"))()
        with Monitor(every=1, on_trouble=notes.append):
            getattr(sys, name)(lambda frame, event, argument: None)
            try:
                train(net, sgd(net), batches(3))
            finally:
                getattr(sys, name)(before)
        assert len(notes) == 1 and f"sys.{name}" in notes[0]

    def test_models_copied_and_pickled_in_a_sampled_step_have_no_hooks(self) -> None:
        net, copies = small(), []
        with Monitor(every=1, stop_on="non-finite"):
            handle = net.fc1.register_forward_hook(
                lambda module, args, output: copies.extend((copy.deepcopy(net), pickle.loads(pickle.dumps(net.conv))))
            )
            hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in net.modules()]
            with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
                pickle.dumps(net)  # because of the lambda of the script's own
            train(net, sgd(net), batches(1))
            handle.remove()
            pickle.loads(pickle.dumps(net))
        assert len(copies) == 2 and sum(hooks) == 1
        assert not any(module._forward_hooks for module in copies[1].modules())


def test_a_run_leaves_a_reference_behind_and_the_model_as_it_is(tmp_path: Path) -> None:
    def loop(watched: bool) -> tuple[nn.Module, Any]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        context = Monitor(model, optimizer, every=2, reference=tmp_path / "healthy.json") if watched else nullcontext()
        with context as monitor:
            for at in range(8):
                optimizer.zero_grad()
                batch = torch.randn(24, 3, 6, 6, generator=torch.Generator().manual_seed(at))
                model(batch).square().mean().backward()
                optimizer.step()
                batch.zero_()  # the reference has copies
        return model, monitor

    model, monitor = loop(watched=True)
    alone, _ = loop(watched=False)
    assert all(torch.equal(a, b) for a, b in zip(alone.state_dict().values(), model.state_dict().values(), strict=True))
    assert model.training
    reference = load_statistics(tmp_path / "healthy.json")
    assert reference.totals.images == 72 == monitor.reference.totals.images  # steps 2, 4 and 6: 64 at least
    x = torch.cat([torch.randn(24, 3, 6, 6, generator=torch.Generator().manual_seed(at)) for at in (2, 4, 6)])
    expected = model.eval()[0](x).mean((2, 3)).mean(0)
    assert torch.allclose(torch.from_numpy(reference.totals.ranges["0"].mean[0]).float(), expected, atol=1e-5)
    with StatisticsCollector(model, ranges=True) as collector, torch.no_grad():
        model(torch.randn(16, 3, 6, 6))
    assert against_reference(SavedStatistics.of(as_loaded(model), collector.totals), reference).finding is None


def test_the_reference_is_of_the_model_that_learns_also_when_the_script_exits(tmp_path: Path) -> None:
    def train() -> None:  # the model is gone after it
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
        frozen = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Flatten()).requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            batch = torch.randn(8, 3, 6, 6)
            (model(batch).square().mean() + frozen(batch).mean()).backward()
            optimizer.step()
        raise SystemExit(0)

    with pytest.raises(SystemExit), Monitor(reference=tmp_path / "a.json"):
        train()
    ranges = load_statistics(tmp_path / "a.json").totals.ranges
    assert ranges["0"].channels == 4 and ranges["0"].images == 24


def test_a_model_with_keywords_only_leaves_a_reference(tmp_path: Path) -> None:
    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 4, 3)

        def forward(self, *, labels: torch.Tensor, picture: torch.Tensor) -> dict[str, torch.Tensor]:
            scores = self.layer(picture).mean((2, 3))
            return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}

    torch.manual_seed(4)
    model = Keyed()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(reference=tmp_path / "a.json") as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            model(picture=torch.randn(8, 3, 6, 6), labels=torch.arange(8) % 4)["loss"].backward()
            optimizer.step()
    ranges = monitor.reference.totals.ranges
    assert list(ranges) == ["(input)", "layer", "(model)", "(model) answers"]
    assert ranges["(input)"].shape == (1, 3, 6, 6) and ranges["(model)"].channels == 4 == ranges["layer"].channels


def test_a_run_without_a_step_and_a_model_without_values_are_not_judged() -> None:
    with Monitor(small()) as monitor:
        pass
    words = "nothing was measured: no step of an optimizer was sampled"
    assert repr(hookscope.diagnose(monitor)) == repr(monitor.findings) == words and words in monitor._repr_html_()
    with pytest.raises(ModelError, match="Small is on the meta device"), Monitor(small().to("meta")):
        pass
    net, said = small().to("meta"), list[str]()
    with Monitor(on_trouble=said.append):
        train(net, sgd(net), [(x.to("meta"), y.to("meta")) for x, y in batches(2)])
    assert "goes on: the model is on the meta device" in said[0]


def test_a_run_that_fails_or_samples_nothing_writes_no_reference(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError), Monitor(model, reference=tmp_path / "a.json"):
        model(torch.ones(1, 3))
    with Monitor(model, reference=tmp_path / "a.json", on_trouble=(said := []).append):
        pass
    assert "no pass of a model that learns was sampled" in said[0] and not (tmp_path / "a.json").exists()


@pytest.mark.parametrize("rate", [0.1, 1e30])  # of the second the loss is NaN
def test_a_run_without_a_log_is_judged_like_one_that_was_read(tmp_path: Path, rate: float) -> None:
    found, ends, texts = [], [], []
    for log in (None, tmp_path / "run.ndjson"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))
        nn.init.constant_(net[1].bias, -50.0 if rate < 1 else 0.0)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(net.parameters(), rate)
        stops = None if rate < 1 else "non-finite"
        with suppress(NonFiniteError), Monitor(net, optimizer, every=1, log=log, stop_on=stops) as monitor:
            for _ in range(12):
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(torch.randn(16, 3, 2, 2)), torch.arange(16) % 2).backward()
                optimizer.step()
        watched: Any = monitor if log is None else read_runs(log)[0]
        run = monitor.run
        assert log is None or run == watched
        found.append([(finding.finding, finding.layer) for finding in hookscope.diagnose(watched)])
        ends.append(([note["note"] for note in run.notes], run.end["reason"], len(hookscope.plot(watched).axes)))
        texts.append(repr(monitor))
    assert found[0] == found[1] and ends[0] == ends[1]
    if rate < 1:
        assert found[0] == [("dead-layer", "2")] and ends[0][:2] == ([], "done")
        assert set(texts) == {"Monitor(Sequential: 12 of 12 steps sampled; see .findings)"}
    else:
        assert ("non-finite", "3") in found[0] and ends[0][:2] == (["non-finite"], "stopped")
