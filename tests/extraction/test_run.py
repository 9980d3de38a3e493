"""Features of files and of tensors: rows, order, scores, and a model that stays as it was."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchvision.models.feature_extraction import create_feature_extractor

from hookscope import capture, extract
from hookscope.errors import HookscopeError, ImageError, InputError, LayerError, TargetError, UsageError
from hookscope.extraction import Extraction, ExtractionJob, FeatureBatch
from hookscope.hooks import ModelSnapshot
from hookscope.jobs import LocalEngine
from hookscope.models import LoadedModel, as_loaded
from tests.helpers import hooks_on, ignore, same_bits, seeded, settings
from tests.nets import Fails, Function, Twice, chain, named

IMAGES = torch.randn(7, 1, 4, 4, generator=torch.Generator().manual_seed(0))


def engine_parts(extraction: Extraction, first: int = 0) -> Iterator[Any]:
    """The parts from a position on."""
    engine = extraction.run.engine or LocalEngine()
    return engine.run(extraction.job, extraction.net, extraction.paths or (), first)


def joined(extraction: Extraction, key: str) -> Tensor:
    return torch.cat([batch.features[key] for batch in extraction])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of small images, and one in none; the second file of ``b`` is no image."""
    for number, name in enumerate(["a/0.png", "a/1.png", "b/0.png", "b/1.png", "b/2.png", "top.png"]):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64), (40 * number, 255 - 40 * number, 128)).save(path)
    (tmp_path / "photos" / "b" / "1.png").write_bytes(b"no image")
    return tmp_path / "photos"


def test_files_become_rows_in_order_and_a_bad_file_shifts_none(shapes: LoadedModel, folder: Path) -> None:
    with pytest.raises(HookscopeError, match=r"1\.png"):  # by default
        list(extract(shapes, sorted(folder.rglob("*.png")), "features.10"))
    lost: list[Any] = []
    batches = list(
        extract(shapes, folder, "features.10", pool="mean", run=settings(2, skipped=lambda *image: lost.append(image)))
    )
    rows = [
        (position, Path(name).relative_to(folder).as_posix(), label, sha256)
        for batch in batches
        for position, name, label, sha256 in zip(batch.positions, batch.names, batch.labels, batch.sha256, strict=True)
    ]
    names = ["a/0.png", "a/1.png", "b/0.png", "b/2.png", "top.png"]
    digests = [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names]
    assert rows == list(zip([0, 1, 2, 4, 5], names, ["a", "a", "b", "b", ""], digests, strict=True))
    [(position, name, error)] = lost
    assert (position, Path(name).name) == (3, "1.png") and "1.png" in str(error)
    prepared = torch.stack([shapes.prepare(Image.open(folder / name)) for name in names])
    with torch.no_grad():
        expected = shapes.model.features[:11](prepared).mean((2, 3))
    torch.testing.assert_close(torch.cat([batch.features["features.10"] for batch in batches]), expected)


@pytest.mark.parametrize("layers", ["all", "-1", "0:2", ["name:1", "name:3"]])
def test_batches_of_one_image_equal_capture_bit_for_bit(layers: Any) -> None:
    net = seeded(chain)
    for batch, image in zip(extract(net, IMAGES, layers, run=settings(1)), IMAGES, strict=True):
        with capture(net, layers) as activations, torch.no_grad():
            net(image[None])
        assert list(batch.features) == list(activations)
        assert all(same_bits(batch.features[key], activations[key]) for key in activations)


def test_values_equal_those_of_torchvisions_feature_extractor() -> None:
    net = seeded(lambda: torchvision.models.resnet18(weights=None, num_classes=3))
    images = torch.randn(3, 3, 32, 32)
    judge = create_feature_extractor(net, ["layer2", "avgpool"])
    with torch.no_grad():
        expected = judge(images)
    [batch] = extract(net, images, ["layer2", "avgpool"])
    assert all(same_bits(batch.features[key], expected[key]) for key in ("layer2", "avgpool"))


def test_each_call_of_a_layer_is_a_column() -> None:
    net = Twice()
    for batch in extract(net, IMAGES, "layer", run=settings(3)):
        images = IMAGES[list(batch.positions)]
        assert list(batch.features) == ["layer", "layer#1"]
        torch.testing.assert_close(batch.features["layer#1"], 9 * images)
    assert joined(extract(net, IMAGES, "layer#1"), "layer#1").shape == IMAGES.shape


def test_the_parts_of_an_output_are_columns() -> None:
    net = Function(lambda net, x: net.two(x)["out"], two=Function(lambda x: {"out": x * 2, "aux": (x, x.mean((2, 3)))}))
    [batch] = extract(net, IMAGES, "two,(model)", pool="flatten")
    assert {key: tuple(rows.shape) for key, rows in batch.features.items()} == {
        "two out": (7, 16),
        "two aux.0": (7, 16),
        "two aux.1": (7, 1),
        "(model)": (7, 16),
    }


def test_the_records_of_a_detector_are_the_rows_of_their_images() -> None:
    records = Function(lambda x: [{"boxes": image[0, :2], "scores": image[0, 0, :1]} for image in x])
    [batch] = extract(records, IMAGES, "(model)", pool="mean")
    torch.testing.assert_close(batch.features["(model) boxes"], IMAGES[:, 0, :2].mean(1))
    assert batch.features["(model) scores"].shape == (7,)


def test_logits_and_probabilities_are_columns(shapes: LoadedModel) -> None:
    images = torch.randn(3, 3, 64, 64)
    [batch] = extract(shapes, images, targets=["star", 7, 0], logits=True)
    with torch.no_grad():
        logits = shapes.model(images).numpy().astype(np.float64)
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert list(batch.features) == ["logits", "probability star", f"probability {shapes.categories[0]}"]
    np.testing.assert_allclose(batch.features["logits"], logits, rtol=1e-6)
    np.testing.assert_allclose(batch.features["probability star"], shares[:, 7], rtol=1e-5)


def test_passes_stop_after_the_last_wanted_layer_once_the_calls_are_known() -> None:
    net = named(first=nn.ReLU(), last=Fails(at=99))
    assert sum(batch.count for batch in extract(net, IMAGES, "first", run=settings(2))) == 7
    assert net.last.passes == 1
    list(extract(net, IMAGES, "last", run=settings(2)))
    assert net.last.passes == 5


@pytest.mark.parametrize("training", [False, True])
def test_the_model_is_as_before_between_batches_and_after_a_break(training: bool) -> None:
    net = seeded(lambda: named(norm=nn.BatchNorm2d(1), drop=nn.Dropout(0.5), relu=nn.ReLU())).train(training)
    snapshot = ModelSnapshot(net)
    batches = iter(extract(net, IMAGES, "drop", run=settings(2)))
    first = next(batches)
    assert torch.is_grad_enabled() and not hooks_on(net) and not snapshot.changes()
    torch.testing.assert_close(first.features["drop"], IMAGES[:2] / (1 + 1e-5) ** 0.5)
    net.eval()(IMAGES)
    net.train(training)
    next(batches)
    batches.close()
    assert not hooks_on(net) and not snapshot.changes()


def test_an_exception_leaves_no_hook() -> None:
    net = named(relu=nn.ReLU(), fails=Fails(at=2)).train()
    with pytest.raises(InputError, match="as planned"):
        list(extract(net, IMAGES, "relu,fails", run=settings(2)))
    assert not hooks_on(net) and net.fails.training and torch.is_grad_enabled()


def test_values_too_large_for_float16_are_noted_with_their_number() -> None:
    notes: list[Any] = []
    net = Function(lambda x: x.flatten(1) * torch.tensor([1.0, 1e6] * 8))
    extraction = extract(
        net, torch.ones(5, 1, 4, 4), "(model)", dtype="float16", run=settings(2, note=lambda *note: notes.append(note))
    )
    rows = joined(extraction, "(model)")
    assert rows.dtype == torch.float16 and rows.isinf().sum() == 40
    assert notes == [("(model)", "40 finite values are too large for float16 and became Inf")]


def test_a_mean_is_calculated_in_the_wider_data_type() -> None:
    images = torch.rand(2, 1, 64, 64)
    net = named(low=Function(lambda x: x.half()))
    [batch] = extract(net, images, "low", pool="mean", dtype=torch.float64)
    assert torch.equal(batch.features["low"], images.half().double().mean((2, 3)))


class Items(Dataset):
    """Images with labels, as data sets give them."""

    def __init__(self, labels: Any = None) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return len(IMAGES)

    def __getitem__(self, at: int) -> Any:
        return IMAGES[at] if self.labels is None else (IMAGES[at], self.labels[at])


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(IMAGES)


SOURCES = {
    "tensor": lambda: IMAGES,
    "list": lambda: list(IMAGES),
    "generator": lambda: (image for image in IMAGES),
    "data set": Items,
    "iterable data set": Stream,
    "data loader": lambda: DataLoader(Items(), batch_size=2),
    "workers": Items,
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("first", [0, 3])
def test_tensors_from_anywhere_give_the_same_rows_from_any_position(source: str, first: int) -> None:
    net = seeded(chain)
    with torch.no_grad():
        expected = net(IMAGES)[first:]
    state = torch.get_rng_state()
    extraction = extract(net, SOURCES[source](), "-1", run=settings(3, 2 * (source == "workers")))
    parts = list(engine_parts(extraction, first))
    torch.testing.assert_close(torch.cat([part.value.features["4"] for part in parts]), expected)
    assert [name for part in parts for name in part.names] == [str(at) for at in range(first, 7)]
    assert parts[-1].done == 7
    assert torch.equal(state, torch.get_rng_state()) or source == "data loader"  # which draws a seed itself


def batch_sizes(extraction: Extraction, first: int = 0) -> list[tuple[int, float, str]]:
    """Position, images in the same pass, and label of each row and lost image from position ``first`` on."""
    rows = list[tuple[int, float, str]]()
    for part in engine_parts(extraction, first):
        if part.value is not None:
            rows += zip(part.positions, part.value.features["size"].flatten().tolist(), part.value.labels, strict=True)
            value = part.value
            assert (value.positions, value.names, value.sha256) == (part.positions, part.names, part.sha256)
        rows += [(each.position, 0.0, "lost") for each in part.skipped]
    return sorted(rows)


def test_a_path_that_does_not_exist_is_refused_before_the_run(shapes: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=f"no image '{tmp_path}/nowhere'"):
        extract(shapes, tmp_path / "nowhere", layers=0)


def test_a_run_that_goes_on_has_the_same_batches_from_where_a_part_ends(shapes: LoadedModel, tmp_path: Path) -> None:
    """Also where images of several sizes make several passes of one batch, and images are lost."""
    net = named(size=Function(lambda x: x.new_full((len(x), 1), len(x))))
    widths = [4, 4, 6, 6, 6, 4, 4, 4, 4, 4, 6]
    images = [(torch.ones(3, 4, width), f"label {at}") for at, width in enumerate(widths)]
    files = [tmp_path / f"{at}.png" for at in range(len(widths))]
    for width, file in zip(widths, files, strict=True):
        Image.new("RGB", (width, 4)).save(file)
    for at in (2, 8, 10):
        files[at].write_text("no image")
    loaded = replace(shapes, model=net, preprocess=as_loaded(net).preprocess)
    runs = [
        extract(net, images, "size", run=settings(4)),
        extract(net, DataLoader(images[5:10], batch_size=3), "size", run=settings(2)),
        extract(loaded, files, "size", run=settings(4, skipped=ignore)),
    ]
    for run in runs:
        whole = batch_sizes(run)
        assert len(whole) == run.count and len({size for _, size, _ in whole}) > 1
        for first in [part.done for part in engine_parts(run)]:
            assert batch_sizes(run, first) == whole[first:]


@pytest.mark.parametrize(
    ("labels", "texts"),
    [
        (["cat", "dog", "", "a", "b", "c", "d"], ["cat", "dog", "", "a", "b", "c", "d"]),
        (list(range(7)), list("0123456")),
        (torch.arange(7), list("0123456")),
        (np.arange(7), list("0123456")),
        ([{"boxes": torch.ones(1)}] * 7, [""] * 7),
    ],
)
def test_the_label_of_a_pair_is_the_label_of_its_row(labels: Any, texts: list[str]) -> None:
    for images in (Items(labels), zip(IMAGES, labels, strict=True), DataLoader(Items(labels), batch_size=4)):
        assert [label for batch in extract(chain(), images, 0) for label in batch.labels] == texts


def test_images_of_several_sizes_can_only_be_pooled() -> None:
    images = [torch.ones(1, 4, 4), torch.ones(1, 4, 4), torch.ones(1, 4, 6)]
    assert joined(extract(chain(), images, 0, pool="mean"), "0").shape == (3, 1)
    with pytest.raises(LayerError, match="0 has rows of different shapes; it has 1x4x6 for 2 after 1x4x4; pool it"):
        list(extract(chain(), images, 0))


def test_the_job_is_picklable_and_its_values_merge(shapes: LoadedModel) -> None:
    job = pickle.loads(pickle.dumps(ExtractionJob("features.10", None, "mean", "", 2, 0)))
    assert job == ExtractionJob("features.10", None, "mean", "", 2, 0)
    whole, [*parts] = [list(extract(chain(), IMAGES, 0, run=settings(size))) for size in (7, 3)]
    merged = job.merge([pickle.loads(pickle.dumps(part)) for part in parts])
    assert isinstance(merged, FeatureBatch) and merged.positions == whole[0].positions
    torch.testing.assert_close(merged.features["0"], whole[0].features["0"])


NOT_ASKED = {
    "no layer is chosen": {"layers": None},
    "no pool 'avg'; there are none": {"pool": "avg"},
    "no dtype 'int8'; there are float16": {"dtype": "int8"},
    "no column for target 'top:1'": {"targets": ["top:1"]},
    "there is no image": {"images": []},
    "an engine reads files, not images in memory": {"run": settings(engine=LocalEngine())},
}


@pytest.mark.parametrize("words", NOT_ASKED)
def test_wrong_arguments_are_refused_before_any_pass(words: str) -> None:
    with pytest.raises(UsageError, match=words):
        extract(**{"net": chain(), "images": IMAGES, "layers": 0, **NOT_ASKED[words]})


@pytest.mark.parametrize(
    ("layers", "error", "words"),
    [
        ("nope", LayerError, "no layer 'nope'"),
        ("idle", LayerError, "idle did not run"),
        ("number", LayerError, "number returned no tensor"),
        ("folded", LayerError, "folded has no row for each image; its output is 14x8 for 7 images"),
    ],
)
def test_layers_without_features_are_refused(layers: str, error: type[Exception], words: str) -> None:
    net = Function(
        lambda net, x: (net.number(x), net.folded(x)),
        idle=nn.ReLU(),
        number=Function(lambda x: 1),
        folded=Function(lambda x: x.reshape(14, 8)),
    )
    with pytest.raises(error, match=words):
        list(extract(net, IMAGES, layers))


def test_names_and_items_that_are_something_else_are_refused(shapes: LoadedModel) -> None:
    with pytest.raises(TargetError, match="no class 'ufo'"):
        extract(shapes, IMAGES, targets=["ufo"])
    with pytest.raises(UsageError, match="two columns are called 'logits'"):
        list(extract(named(flat=nn.Flatten(), logits=nn.Linear(16, 2)), IMAGES, "logits", logits=True))
    with pytest.raises(UsageError, match=r"expected an image, got int; give images of Pillow or tensors"):
        list(extract(chain(), [3], 0))


def test_the_source_says_what_features_are_made_from(shapes: LoadedModel, folder: Path) -> None:
    source = extract(shapes, folder, ["features.10", "-1"], ["Conv2d"], pool="max", dtype="float16").source
    about = source.model, source.layers, source.pool, source.dtype
    assert about == ("shapes", "features.10,-1 of Conv2d", "max", "float16")
    assert source.preprocess.startswith("resize 128") and len(source.fingerprint) == 64
    assert extract(chain(), IMAGES, 0).source.preprocess == "none: tensors were given"
