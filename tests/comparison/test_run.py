"""Comparing two sides, judged by NumPy on captured tensors."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from hookscope import HookscopeError, capture, compare
from hookscope.comparison import make_side
from hookscope.errors import ModelError
from hookscope.images import ImageWarning
from hookscope.interventions import Scale
from hookscope.jobs import LocalEngine
from hookscope.models import as_loaded, load_model
from hookscope.models.transforms import Transforms, imagenet_transforms
from tests.helpers import ignore, refused, settings


def net() -> nn.Sequential:
    """A convolution, BatchNorm and an in-place ReLU, and a classifier of six classes."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3)
    return nn.Sequential(*layers, nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 6)).eval()


def scaled(model: nn.Module, name: str, factor: float) -> nn.Module:
    """A copy with one parameter multiplied by ``factor``."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.get_parameter(name).mul_(factor)
    return twin


@pytest.fixture
def batch() -> Any:
    return torch.randn(6, 3, 9, 9, generator=torch.Generator().manual_seed(1))


def test_the_same_object_as_both_sides_is_the_same_to_the_bit(batch: Any) -> None:
    model = net()
    found = compare(model, model, batch)
    assert found.answer.kind == "same"
    assert [row.key for row in found.calls] == ["(input)", *map(str, range(8)), "(model)"]
    assert all(row.difference is not None and row.difference.is_same for row in found.calls)


def test_differences_are_those_of_captured_tensors(batch: Any) -> None:
    a = net()
    b = scaled(a, "3.weight", 1.1)
    with torch.no_grad(), capture(a, "all") as of_a, capture(b, "all") as of_b:
        a(batch), b(batch)
    rows = {row.key: row for row in compare(a, b, batch).calls}
    for key in of_a:
        one, two = of_a[key].double().numpy(), of_b[key].double().numpy()
        found = rows[key].difference
        assert found is not None
        assert found.values == one.size
        assert found.equal == np.count_nonzero(one == two)
        assert found.relative_l2 == pytest.approx(np.linalg.norm(two - one) / np.linalg.norm(one), rel=1e-6)
        expected = (one * two).sum() / np.linalg.norm(one) / np.linalg.norm(two)
        assert found.cosine == pytest.approx(expected, abs=1e-7)
        if found.largest is not None:
            at = found.largest.image, *found.largest.place
            assert abs(two - one)[at] == pytest.approx(abs(two - one).max(), rel=1e-6) == found.largest.value
            assert (found.largest.a, found.largest.b) == (one[at], two[at])


def test_the_changed_layer_is_the_only_one_that_differs_alone(batch: Any) -> None:
    found = compare(net(), scaled(net(), "3.weight", 1.1), batch)
    assert [row.key for row in found.calls if row.isolated_l2] == ["3"] == [found.answer.most]
    assert found.answer.first == "3"


def rows_of(found: Any) -> dict[str, Any]:
    return {row.key: row for row in found.calls}


def test_many_images_in_batches_give_the_numbers_of_all_at_once() -> None:
    a, b = net(), scaled(net(), "0.weight", 1.2)
    images = torch.randn(20, 3, 9, 9, generator=torch.Generator().manual_seed(2))
    found, whole = (compare(a, b, images, run=settings(size)) for size in (5, 20))
    for one, two in zip(found.calls, whole.calls, strict=True):
        assert one.difference is not None and two.difference is not None
        assert one.difference.values == two.difference.values
        assert one.difference.relative_l2 == pytest.approx(two.difference.relative_l2, rel=1e-6)
        assert one.difference.cosine == pytest.approx(two.difference.cosine, abs=1e-7)
    assert found.agreement == whole.agreement


def test_agreement_is_that_of_the_scores(batch: Any) -> None:
    a, b = net(), scaled(net(), "7.weight", -1.0)
    found = compare(a, b, batch, categories=list("uvwxyz")).agreement
    one, two = (side(batch).detach().numpy() for side in (a, b))
    best_a, best_b = one.argmax(1), two.argmax(1)
    five = [len({*x.argsort()[-5:]} & {*y.argsort()[-5:]}) / 5 for x, y in zip(one, two, strict=True)]
    assert found is not None
    assert (found.images, found.top1) == (6, pytest.approx((best_a == best_b).mean()))
    assert found.top5 == pytest.approx(np.mean(five))
    assert [(each.position, each.class_a, each.class_b) for each in found.changed] == [
        (at, "uvwxyz"[best_a[at]], "uvwxyz"[best_b[at]]) for at in range(6) if best_a[at] != best_b[at]
    ]
    exact = torch.from_numpy(two).double().softmax(1)
    assert [each.probability_b for each in found.changed] == [
        pytest.approx(float(exact[each.position].max()), rel=1e-6) for each in found.changed
    ]


def test_a_module_gets_the_preprocessing_of_the_other_side() -> None:
    model = net()
    known = load_model(model, preprocess="half", input_size=(20, 30))
    with pytest.warns(ImageWarning, match="it gets the steps of the other model"):
        found = compare(known, copy.deepcopy(model), Image.effect_noise((60, 50), 90))
    assert found.answer.kind == "same" and found.a.preprocess == found.b.preprocess


def test_nan_on_one_side_only_is_counted_and_the_first_difference(batch: Any) -> None:
    b = copy.deepcopy(net())
    b[3].bias.data[1] = torch.nan
    found = compare(net(), b, batch)
    difference = rows_of(found)["3"].difference
    assert (difference.nonfinite_a, difference.nonfinite_b) == (0, 6 * 25)
    assert difference.largest.value == np.inf and difference.largest.place[0] == 1
    assert (found.answer.kind, found.answer.first, found.answer.most) == ("nonfinite", "3", "3")
    assert [key for key, row in rows_of(found).items() if row.isolated_l2] == ["3"]
    assert found.agreement is not None and found.agreement.top1 == 0
    assert {each.class_b for each in found.agreement.changed} == {"not finite"}


def test_parameters_buffers_and_dead_channels_are_those_of_one_side(batch: Any) -> None:
    b = net()
    with torch.no_grad():
        b[1].bias[2], b[1].running_mean[:] = -100.0, b[1].running_mean + 1
    row = rows_of(compare(net(), b, batch))
    expected = 100 / np.linalg.norm(np.r_[net()[1].weight.detach(), net()[1].bias.detach()])
    assert row["1"].parameters == pytest.approx(expected, rel=1e-6)
    assert row["1"].buffers == pytest.approx(np.sqrt(8) / np.sqrt(8), rel=1e-6)
    assert (row["2"].dead_a, row["2"].dead_b) == (0.0, 1 / 8)
    assert row["0"].parameters == 0.0 and row["2"].parameters is None


@pytest.mark.parametrize("train", [False, True])
def test_both_models_are_as_before(batch: Any, train: bool) -> None:
    a, b = net().train(train), scaled(net(), "0.weight", 1.1).train(train)
    before = [{name: value.clone() for name, value in side.state_dict().items()} for side in (a, b)]
    given, state = batch.clone(), torch.get_rng_state()
    found = compare(a, b, batch)
    assert torch.equal(batch, given) and torch.equal(torch.get_rng_state(), state)
    for side, values in zip((a, b), before, strict=True):
        assert all(torch.equal(side.state_dict()[name], value) for name, value in values.items())
        assert side.training is train
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in side.modules())
    assert any("training mode" in note for note in found.notes) is train


def test_dropout_in_training_draws_the_same_on_both_sides() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)).train()
    assert compare(model, copy.deepcopy(model), torch.randn(6, 4)).answer.kind == "same"


def test_a_layer_with_calls_that_only_one_side_makes() -> None:
    class Calls(nn.Module):
        def __init__(self, times: int) -> None:
            super().__init__()
            self.times, self.layer = times, nn.Linear(3, 3)
            nn.init.eye_(self.layer.weight)

        def forward(self, x: Any) -> Any:
            for _ in range(self.times):
                x = self.layer(x)
            return x

    found = compare(Calls(2), Calls(3), torch.ones(1, 3))
    assert [row.key for row in found.calls] == ["(input)", "layer", "layer#1", "(model)"]
    assert [call.key for call in found.unpaired_b] == ["layer#2"]


def test_dictionaries_and_tuples_have_a_row_for_each_part() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            return {"logits": self.layer(x), "aux": (x, x + 1)}

    a = Parts()
    found = compare(a, scaled(a, "layer.weight", 2.0), torch.ones(2, 3))
    parts = [(row.part, row.difference.is_same) for row in found.calls if row.a.name == "(model)"]
    assert parts == [("logits", False), ("aux.0", True), ("aux.1", True)]


def test_tokens_have_the_noise_of_rounding_their_embedding() -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8)).eval()
    noise = {row.key: row.noise for row in compare(model, model, torch.randint(10, (2, 5))).calls}
    assert noise["(input)"] == 0
    assert all(5e-8 < noise[key] < 5e-7 for key in ("0", "1", "(model)"))


def test_images_that_one_side_cannot_use_are_left_out(tmp_path: Path) -> None:
    paths = []
    for at, name in enumerate(("a.png", "b.png", "c.png")):
        paths.append(str(tmp_path / name))
        Image.new("RGB", (9, 9), (80 * at, 0, 0)).save(paths[-1])
    Path(paths[1]).write_bytes(b"no image")
    skipped: list[tuple[int, str]] = []
    done: list[int] = []
    run = settings(skipped=lambda at, name, error: skipped.append((at, name)), progress=done.append)
    a, b = as_loaded(net()), as_loaded(net())
    b = replace(b, preprocess=replace(b.preprocess, transforms=Transforms()))  # as the picture is
    a = replace(a, preprocess=b.preprocess)
    half = replace(b, preprocess=replace(b.preprocess, transforms=imagenet_transforms(mean=(0.0,))))
    for other in (b, half):
        skipped.clear()
        done.clear()
        found = compare(a, other, paths, run=run)
        assert found.names == (paths[0], paths[2])
        assert skipped == [(1, paths[1])]
        assert sum(done) == 3
        assert [image["image"] for image in found.provenance["images"]] == ["a.png", "c.png"]
    assert found.answer.kind == "input"
    largest = {row.difference.largest.image for row in found.calls if row.difference and row.difference.largest}
    assert largest == {1}  # of the names, and so the third path


def test_maps_that_nobody_chose_are_of_the_first_image_that_both_sides_can_use(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{name}.png") for name in "abcd"]
    for at, path in enumerate(paths):
        Image.new("RGB", (9, 9), (60 * at, 0, 0)).save(path)
    Path(paths[0]).write_bytes(b"no image")
    a, b = net(), scaled(net(), "3.weight", 1.1)
    found = compare(a, b, paths[:2], images_b=paths[2:], keep=True, run=settings(skipped=ignore))
    [expected] = compare(a, b, paths[1:2], images_b=paths[3:], keep="name:3").maps
    [maps] = found.maps
    assert (found.names, maps.key, maps.image) == ((paths[1],), "3", 0)
    assert np.array_equal(maps.a, expected.a) and np.array_equal(maps.b, expected.b)


def test_pil_images_and_other_images_for_b() -> None:
    red, blue = (Image.new("RGB", (12, 12), name) for name in ("red", "blue"))
    found = compare(net(), net(), [red, red], images_b=[red, blue])
    assert found.calls[0].difference.largest.image == 1
    assert found.answer.kind == "input"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"images": []}, "there is no image"),
        ({"images": torch.zeros(0, 3, 9, 9)}, "not a batch"),
        ({"images": torch.zeros(2, 3, 9, 9), "images_b": torch.zeros(3, 3, 9, 9)}, "B has 3 images and A has 2"),
        ({"images": torch.zeros(2, 3, 9, 9), "run": settings(engine=LocalEngine())}, "leave the engine out"),
        ({"images": torch.zeros(2, 5, 9, 9)}, "takes 3 channels and got 5"),
        ({"images": torch.zeros(2, 3, 9, 9), "layers": "nothere"}, "no layer 'nothere'"),
    ],
)
def test_bad_input_is_an_error_of_one_line(arguments: dict[str, Any], text: str) -> None:
    with refused(HookscopeError, text, part="holds"):
        compare(net(), net(), **arguments)


@pytest.mark.parametrize("where", ["name:3", 1])
def test_a_changed_layer_differs_alone_too(batch: Any, where: Any) -> None:
    side = make_side(net(), changes={where: Scale(3.0)})
    found = compare(net(), side, batch)
    assert {row.key: row.isolated_l2 for row in found.calls if row.isolated_l2} == {"3": pytest.approx(2.0)}
    assert (found.answer.first, found.answer.most) == ("3", "3")


def test_a_block_runs_alone_only_if_its_layers_have_no_parameters(batch: Any) -> None:
    class NormAct(nn.BatchNorm2d):
        def __init__(self, channels: int) -> None:
            super().__init__(channels)
            self.act = nn.ReLU()

        def forward(self, x: Any) -> Any:
            return self.act(super().forward(x))

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.inner = nn.Parameter(torch.ones(1)), nn.Conv2d(8, 8, 1)

        def forward(self, x: Any) -> Any:
            return self.scale * self.inner(x)

    model = nn.Sequential(nn.Conv2d(3, 8, 1), NormAct(8), Scaled()).eval()
    rows = rows_of(compare(model, scaled(model, "1.weight", 1.5), batch))
    assert rows["1"].isolated_l2 > 0.1 and rows["1.act"].isolated_l2 == 0
    assert rows["2"].isolated_l2 is None and rows["2.inner"].isolated_l2 == 0


def test_kept_maps_are_those_of_the_channels_that_changed_most(batch: Any) -> None:
    a, b = net(), net()
    with torch.no_grad():
        b[3].bias += torch.tensor([0.0, 1.0, 0.5, 2.0])
    [maps] = compare(a, b, batch, keep="name:3").maps
    assert (maps.key, maps.image, maps.channels) == ("3", 0, (3, 1, 2, 0))
    assert maps.changes == pytest.approx(5 * np.array([2.0, 1.0, 0.5, 0.0]), abs=1e-5)
    assert maps.b - maps.a == pytest.approx(np.array([2.0, 1, 0.5, 0])[:, None, None] + np.zeros((4, 5, 5)), abs=1e-6)


def test_a_single_layer_is_the_model() -> None:
    layer = nn.Linear(3, 2).eval()
    found = compare(layer, scaled(layer, "weight", 1.5), torch.ones(4, 3))
    assert [row.key for row in found.calls] == ["(input)", "(model)"]
    assert (found.answer.kind, found.answer.first) == ("parameters", "(model)")


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
def test_scripted_models_are_refused(batch: Any) -> None:
    with pytest.raises(ModelError, match="scripted or traced"):
        compare(net(), torch.jit.trace(net(), batch), batch)
