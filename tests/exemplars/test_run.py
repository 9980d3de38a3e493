"""Runs over many images against a plain loop over `capture`; interrupted, resumed and refused runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import hookscope
from hookscope.errors import HookscopeError, InputError, LayerError, UsageError
from hookscope.exemplars import find_exemplars, load_exemplars, read_exemplars
from hookscope.exemplars.facts import LayerExemplars
from hookscope.exemplars.job import ExemplarsJob, _places, with_places
from hookscope.hooks import InputSize
from hookscope.images import read_picture
from hookscope.jobs import LocalEngine, Part
from hookscope.models import LoadedModel, WeightsMetadata, load_model
from tests.helpers import hooks_on, ignore, settings
from tests.nets import Function

NETS = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 5, stride=2), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(4, 3))
"""
COUNT = 24
PATHS = [f"{('a', 'b', 'c')[number % 3]}/{number:02}.png" for number in range(COUNT)]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(NETS)
    rng = np.random.default_rng(0)
    for path in PATHS:
        Path(path).parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (6, 5, 3), np.uint8)).resize((20, 24), Image.Resampling.NEAREST).save(path)
    (tmp_path / "bad.png").write_text("no picture")
    return tmp_path


def small(preprocess: str = "none", **options: Any) -> LoadedModel:
    return load_model("nets.py:net", preprocess=preprocess, **options)


def of(model: nn.Module) -> LoadedModel:
    """A model of the user that takes images of any size."""
    loaded = LoadedModel.of(model.eval(), "mine", "as given", WeightsMetadata())
    return replace(loaded, preprocess=small().preprocess)


def facts(layers: Sequence[LayerExemplars], digits: int = 5) -> list[Any]:
    """All that was found, values rounded."""
    return [
        (
            *(layer.call.key, layer.part, layer.images, layer.field),
            *(channel.channel, channel.classes, channel.nonfinite, channel.best_class),
            *(channel.counts.tolist(), channel.edges.tolist()),
            [
                [replace(each, value=round(each.value, digits)) for each in found]
                for found in (channel.most, channel.least)
            ],
        )
        for layer in layers
        for channel in layer.channels
    ]


def on_paper(net: LoadedModel, paths: Sequence[str]) -> dict[str, list[np.ndarray]]:
    """The outputs ``(C, ...)`` of every call for every image, by a pass of its own."""
    outputs: dict[str, list[np.ndarray]] = {}
    for path in paths:
        with hookscope.capture(net.model, "all") as activations, torch.no_grad():
            net.model(*net.inputs(net.prepare(read_picture(path))))
        for call in activations.calls:
            outputs.setdefault(call.key, []).append(activations[call.key][0].numpy().astype(np.float64))
    return outputs


MEASURED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "max": lambda maps: maps.max(1),
    "mean": lambda maps: maps.mean(1),
    "abs": lambda maps: np.abs(maps).max(1),
}


@pytest.mark.parametrize("measure", MEASURED)
def test_values_places_and_order_are_those_of_a_loop_over_capture(measure: str) -> None:
    net = small()
    outputs = on_paper(net, PATHS)
    found = find_exemplars(net, PATHS, "all", measure=measure, top=5, least=True, run=settings(7))
    assert [layer.call.key for layer in found] == list(outputs)
    for layer in found:
        maps = outputs[layer.call.key]
        values = np.stack([MEASURED[measure](each.reshape(len(each), -1)) for each in maps])
        for channel in layer.channels:
            for best, sign in ((channel.most, -1), (channel.least, 1)):
                column = values[:, channel.channel]
                order = sorted(range(COUNT), key=lambda at: (sign * round(column[at], 5), at))[:5]
                assert [each.value for each in best] == pytest.approx(column[order], abs=1e-5)
                assert [each.position for each in best] == order
                for each in best:
                    own = maps[each.position][channel.channel]
                    own = np.abs(own) if measure == "abs" else own
                    assert (each.place is None) == (own.ndim == 0)
                    if each.place is not None:
                        assert own[each.place] == pytest.approx(own.max(), abs=1e-5)
            assert channel.counts.sum() == COUNT
            assert np.array_equal(
                channel.counts, np.histogram(np.float32(values[:, channel.channel]), channel.edges)[0]
            )


@pytest.mark.parametrize(("batch_size", "workers"), [(1, 0), (5, 0), (24, 2)])
def test_batches_and_workers_do_not_matter(batch_size: int, workers: int) -> None:
    net = small()
    expected = find_exemplars(net, PATHS, "all", least=True, folders=["."])
    found = find_exemplars(net, PATHS, "all", least=True, folders=["."], run=settings(batch_size, workers))
    for one, other in zip(found, expected, strict=True):
        for mine, theirs in zip(one.channels, other.channels, strict=True):
            for best, same in ((mine.most, theirs.most), (mine.least, theirs.least)):
                assert [each.position for each in best] == [each.position for each in same]
                assert [each.place for each in best] == [each.place for each in same]
                assert [each.value for each in best] == pytest.approx([each.value for each in same], abs=1e-5)
            assert mine.selectivity == pytest.approx(theirs.selectivity, abs=1e-5)


class InParts:
    """An engine that gives parts of several batches, each from an `open` of its own, as workers do."""

    def run(self, job: Any, net: LoadedModel, paths: Sequence[str], first: int = 0) -> Iterator[Part[Any]]:
        for begin in range(first, len(paths), 10):
            parts = list(LocalEngine().run(job, net, paths[: begin + 10], begin))
            names = tuple(name for part in parts for name in part.names)
            yield Part(job.merge([part.value for part in parts]), parts[-1].done, names=names)


def test_parts_that_workers_merged_give_the_same() -> None:
    net = small()
    expected = find_exemplars(net, PATHS, "0,name:4", top=4, run=settings(5))
    assert facts(find_exemplars(net, PATHS, "0,name:4", top=4, run=settings(5, 0, InParts()))) == facts(expected)


def test_labels_give_classes_and_selectivity_and_files_have_none_unless_a_folder_was_named() -> None:
    net = small()
    [layer] = find_exemplars(net, ["."], "0", top=6, measure="abs", run=settings(skipped=ignore))
    outputs = np.stack([np.abs(maps).max((1, 2)) for maps in on_paper(net, PATHS)["0"]])
    means = np.stack([outputs[at::3].mean(0) for at in range(3)])
    for channel in layer.channels:
        labels = [each.label for each in channel.most]
        assert labels == [each.name.split("/")[-2] for each in channel.most]
        assert dict(channel.classes) == {label: labels.count(label) for label in set(labels)}
        mean = means[:, channel.channel]
        others = (mean.sum() - mean.max()) / 2
        assert channel.best_class == "abc"[mean.argmax()]
        assert channel.selectivity == pytest.approx((mean.max() - others) / (mean.max() + others), rel=1e-5)
    [layer] = find_exemplars(small(), PATHS, "0", channels=[2])
    assert (layer.channels[0].classes, layer.channels[0].selectivity) == ((), None)
    assert [channel.channel for channel in layer.channels] == [2]


def test_copies_of_the_best_image_count_once() -> None:
    net = small()
    best = find_exemplars(net, PATHS, "0", channels=[0], top=1)[0].channels[0].most[0]
    copies = []
    for quality in range(30):
        Image.open(best.name).save(f"copy{quality:02}.jpg", quality=90 + quality % 10, subsampling=0)
        copies.append(f"copy{quality:02}.jpg")
    [layer] = find_exemplars(net, [*PATHS, *copies, best.name], "0", channels=[0], top=9)
    names = [each.name for each in layer.channels[0].most]
    assert len({*names}) == 9
    assert sum(name in (*copies, best.name) for name in names) == 1


def test_nan_and_inf_never_win_and_are_counted() -> None:
    def broken(net: Any, x: torch.Tensor) -> torch.Tensor:
        maps = net.conv(x)
        first = x[:, 0, 0, 0] > x[:, 0, -1, -1]
        maps[first, 1, 2, 2] = float("nan")
        maps[~first, 2, 3, 3] = float("inf")
        return net.last(maps)

    net = of(Function(broken, conv=nn.Conv2d(3, 4, 3), last=nn.Identity()))
    [layer] = find_exemplars(net, PATHS, "last", top=30)
    nan, inf = layer.channels[1], layer.channels[2]
    assert nan.nonfinite + inf.nonfinite == COUNT
    assert 0 < nan.nonfinite < COUNT
    assert [len(channel.most) for channel in layer.channels] == [24, 24 - nan.nonfinite, 24 - inf.nonfinite, 24]
    assert all(np.isfinite(each.value) for channel in layer.channels for each in channel.most)


def test_a_layer_of_nan_has_no_exemplars_also_when_read_again() -> None:
    net = small()
    net.model[0].weight.data[:] = float("nan")
    found = find_exemplars(net, PATHS, "0", least=True, save="state.json")
    resumed = find_exemplars(net, PATHS, "0", least=True, save="state.json", resume=True)
    for [layer] in (found, resumed, read_exemplars("state.json")):
        assert [(each.most, each.least, each.nonfinite) for each in layer.channels] == [((), (), COUNT)] * 4


def test_tokens_have_places_of_their_grid_without_the_class_token() -> None:
    def tokens(net: Any, x: torch.Tensor) -> torch.Tensor:
        maps = nn.functional.adaptive_avg_pool2d(x, 6)
        with_class = torch.cat([100 + torch.zeros(len(x), 1, 3), maps.flatten(2).transpose(1, 2)], 1)
        return net.last(with_class)

    net = of(Function(tokens, last=nn.LayerNorm(3)))
    net = replace(net, preprocess=small("stretch", input_size=(24, 24)).preprocess)
    net.model.last = nn.Identity()
    [layer] = find_exemplars(net, PATHS, "last", top=1)
    for channel in layer.channels:
        [best] = channel.most
        image = net.prepare(read_picture(best.name))
        maps = nn.functional.adaptive_avg_pool2d(image, 6)[channel.channel]
        assert best.value < 50, "the class token is left out"
        assert best.place is not None
        assert best.value == pytest.approx(float(maps.max())) == pytest.approx(float(maps[best.place]))


def test_frames_of_a_clip_are_side_by_side() -> None:
    clip = torch.zeros(1, 2, 3, 4, 5)
    clip[0, 1, 2, 3, 4] = 1
    values, grid = with_places(clip, nn.Conv3d(1, 1, 1), InputSize(8, 10, 3))
    assert grid == (3, 4, 5)
    row, column = _places(values, np.array([0]), np.array([1]), grid, False)
    assert (row.tolist(), column.tolist()) == ([3], [2 * 5 + 4])


def test_several_calls_and_parts_have_exemplars_each() -> None:
    def twice(net: Any, x: torch.Tensor) -> Any:
        return net.pair(net.conv(net.conv(x)))

    pair = Function(lambda x: {"low": x[:, :1], "high": (x + 1, torch.ones(len(x), dtype=torch.int64))})
    net = of(Function(twice, conv=nn.Conv2d(3, 3, 1), pair=pair))
    found = find_exemplars(net, PATHS, "conv,pair", top=2)
    names = [(layer.call.key, layer.part, len(layer.channels)) for layer in found]
    assert names == [("conv", "", 3), ("conv#1", "", 3), ("pair", "low", 1), ("pair", "high.0", 3)]
    assert hooks_on(net.model) == 0


def test_rows_that_are_not_images_need_a_batch_size_of_one() -> None:
    def windows(net: Any, x: torch.Tensor) -> torch.Tensor:
        return net.last(x.unflatten(2, (2, -1)).transpose(1, 2).flatten(0, 1))

    net = of(Function(windows, last=nn.Conv2d(3, 2, 1)))
    with pytest.raises(InputError, match=r"last has 8 rows for 4 images; .*; use a batch size of 1"):
        find_exemplars(net, PATHS, "last", run=settings(4))
    found = find_exemplars(net, PATHS, "last", top=1, run=settings(1))
    assert found[0].images == COUNT
    assert found[0].channels[0].most[0].place is None


def test_the_pass_ends_after_the_last_wanted_call() -> None:
    passes = []
    net = of(nn.Sequential(nn.Conv2d(3, 2, 1), nn.ReLU(), Function(lambda x: passes.append(len(x)) or x)))
    find_exemplars(net, PATHS, "0", run=settings(8))
    assert passes == [8, 1], "the first pass, and the one that finds out what a unit sees"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"top": 0}, UsageError, "at least 1"),
        ({"measure": "sum"}, UsageError, "no measure 'sum'; there are max, mean, abs"),
        ({"channels": [1, 4]}, UsageError, "0 has no channel 4; it has 4 channels, from 0 to 3"),
        ({"channels": [-1]}, UsageError, r"bad channels \[-1\]; give numbers from 0"),
        ({"channels": []}, UsageError, r"bad channels \[\]"),
        ({"layers": "nope"}, LayerError, "no layer 'nope'"),
        ({"layers": "7"}, LayerError, "no index 7"),
        ({"images": ["bad.png"]}, HookscopeError, "bad.png"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        find_exemplars(small(), **{"images": PATHS, "layers": "0", **options})


def test_a_lost_image_is_named_and_left_out() -> None:
    lost: list[tuple[int, str]] = []
    found = find_exemplars(
        small(),
        [*PATHS[:2], "bad.png", *PATHS[2:4]],
        "0",
        run=settings(skipped=lambda at, name, error: lost.append((at, name))),
    )
    assert lost == [(2, "bad.png")]
    assert found[0].images == 4
    assert sorted(each.position for each in found[0].channels[0].most) == [0, 1, 3, 4]


@pytest.mark.parametrize("after", [1, 5])
def test_an_interrupted_run_goes_on_where_it_stopped(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    net, options = small(), {"least": True, "top": 3, "save": "state.json"}
    expected = find_exemplars(net, PATHS, "all", **options, run=settings(4))
    stored = read_exemplars("state.json")
    assert facts(stored, 12) == facts(expected, 12)
    Path("state.json").unlink()
    monkeypatch.setattr("hookscope.jobs.run._SAVE_EVERY", -1.0)
    monkeypatch.setattr("hookscope.jobs.run._SAVE_SHARE", 0.0)
    parts, done = [], []

    def stop(count: int) -> None:
        parts.append(count)
        if len(parts) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find_exemplars(net, PATHS, "all", **options, run=settings(4, progress=stop, interrupt=done.append))
    assert done == [4 * after]
    assert read_exemplars("state.json")[0].images == 4 * after
    counts: list[int] = []
    run = settings(4, start=done.append, progress=counts.append)
    found = find_exemplars(net, PATHS, "all", **options, resume=True, run=run)
    assert (done[-1], sum(counts)) == (4 * after, COUNT - 4 * after)
    assert facts(found, 12) == facts(expected, 12)
    assert facts(read_exemplars("state.json"), 12) == facts(expected, 12)


REFUSALS = {
    "measure": ({"measure": "mean"}, "measure max, not mean"),
    "top": ({"top": 4}, "top 3, not 4"),
    "least": ({"least": True}, "least False, not True"),
    "channels": ({"channels": [0]}, "channels all, not 0"),
    "layers": ({"layers": "4"}, "layers 0, not 4"),
    "folders": ({"folders": ["."]}, "folders"),
    "list": ({"images": [*PATHS[1:], PATHS[0]]}, "its first 24 are not of this run"),
    "shorter": ({"images": PATHS[:5]}, "its first 24 are not of this run"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_run_with_other_settings_is_not_resumed(case: str) -> None:
    find_exemplars(small(), PATHS, "0", top=3, save="state.json")
    before = Path("state.json").read_bytes()
    options, words = REFUSALS[case]
    with pytest.raises(InputError, match=words):
        find_exemplars(small(), **{"images": PATHS, "layers": "0", "top": 3, **options}, save="state.json", resume=True)
    assert Path("state.json").read_bytes() == before


def test_a_run_with_another_model_or_changed_images_is_not_resumed() -> None:
    find_exemplars(small(), PATHS, "0", save="state.json")
    with pytest.raises(InputError, match="other weights"):
        _other_weights()
    with pytest.raises(InputError, match="preprocess"):
        find_exemplars(small("stretch", input_size=(16, 16)), PATHS, "0", save="state.json", resume=True)
    [kept, *_] = find_exemplars(small(), PATHS, "0", save="state.json", resume=True)[0].channels[0].most
    Image.new("RGB", (20, 24)).save(kept.name)
    with pytest.raises(InputError, match=f"{kept.name} has changed"):
        find_exemplars(small(), PATHS, "0", save="state.json", resume=True)


def _other_weights() -> None:
    net = small()
    with torch.no_grad():
        net.model[0].bias[0] += 1
    find_exemplars(net, PATHS, "0", save="state.json", resume=True)


def test_a_damaged_file_and_one_of_another_kind_are_refused() -> None:
    find_exemplars(small(), PATHS[:3], "0", save="state.json")
    data = Path("state.json").read_bytes()
    Path("cut.json").write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match="is damaged"):
        read_exemplars("cut.json")
    with pytest.raises(InputError, match=r"no saved exemplars 'none\.json'"):
        read_exemplars("none.json")
    assert load_exemplars("state.json").source.top == 9


def test_what_is_kept_does_not_grow_with_the_number_of_images() -> None:
    net, job = small(), ExemplarsJob("0", None, None, 2, False, "max", (), 8, 0)
    engine, found, sizes = LocalEngine(), None, []
    for part in engine.run(job, net, PATHS * 24):
        found = part.value if found is None else job.merge([found, part.value])
        sizes.append(len(found.seen))
    assert found is not None
    assert found.images == COUNT * 24
    assert max(sizes) <= 2 * 4 * 2 + 512


def test_images_in_memory_give_what_their_files_give() -> None:
    files, net = find_exemplars(small(), PATHS, "0", top=3), small()
    pictures = [Image.open(path).convert("RGB") for path in PATHS]
    tensors = torch.stack([net.prepare(picture) for picture in pictures])
    labelled = [(tensor, Path(path).parent.name) for tensor, path in zip(tensors, PATHS, strict=True)]
    for images in (pictures, list(tensors), labelled):
        found = find_exemplars(net, images, "0", top=3)
        for mine, judge in zip(found[0].channels, files[0].channels, strict=True):
            assert [each.position for each in mine.most] == [each.position for each in judge.most]
            assert [each.value for each in mine.most] == pytest.approx([each.value for each in judge.most])
            assert [each.box for each in mine.most] == [each.box for each in judge.most]
        for each in (each for channel in found[0].channels for each in channel.most):
            np.testing.assert_array_equal(np.asarray(each.image), np.asarray(pictures[each.position]))
            assert each.label == (Path(PATHS[each.position]).parent.name if images is labelled else "")
    assert hookscope.draw_exemplars(found, net)
    with pytest.raises(UsageError, match="a saved run or an engine reads files"):
        find_exemplars(net, tensors, "0", save="state.json")
