"""What results show of themselves in a notebook and at a prompt."""

import base64
import io
import pickle
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import hookscope
from hookscope.comparison.facts import PAIRS
from hookscope.display import Picture, Rows, RowTuple, Shown, engineering, text_lines, text_width
from hookscope.drawing import colours, map_png
from hookscope.errors import HookscopeError, LayerError
from hookscope.findings import Finding
from hookscope.images import ImageWarning
from hookscope.models import LoadedModel
from hookscope.tracing import LAYER_CALLS

STAR = Path(__file__).parents[1] / "samples" / "shapes" / "star.png"
HOSTILE = "</td><script>alert('1')</script>\u202e\"&amp;\x1b]0;x"


class Cells(HTMLParser):
    """The texts of the cells of each row, the pictures, and the names of all tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.pictures: list[bytes] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "img":
            source = dict(attrs)["src"] or ""
            assert source.startswith("data:image/png;base64,")
            self.pictures.append(base64.b64decode(source.partition(",")[2]))

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.strip()


class Thing(Shown):
    def __init__(self, **cells: Any) -> None:
        self.cells = cells

    def _cells(self) -> dict[str, Any]:
        return self.cells


@pytest.fixture(scope="module")
def net() -> LoadedModel:
    return hookscope.load_model("shapes")


@pytest.fixture(scope="module")
def x(net: LoadedModel) -> torch.Tensor:
    return net.prepare(hookscope.open_image(STAR))[None]


def _activations(net: LoadedModel, x: torch.Tensor) -> Any:
    with hookscope.capture(net.model) as activations, torch.no_grad():
        net.model(x)
    return activations


def _statistics(net: LoadedModel, x: torch.Tensor) -> Any:
    with hookscope.StatisticsCollector(net.model) as collector, torch.no_grad():
        net.model(x)
    return collector.totals


def _effect(net: LoadedModel, x: torch.Tensor) -> Any:
    return hookscope.intervention_effect(net.model, (x,), {"features.7": hookscope.interventions.Zero()})


RESULTS: dict[str, Callable[[LoadedModel, torch.Tensor], Any]] = {
    "load_model": lambda net, x: net,
    "list_layers": lambda net, x: hookscope.list_layers(net.model, (128, 128)),
    "capture": _activations,
    "class_activation_maps": lambda net, x: hookscope.class_activation_maps(net.model, x, target="top:3"),
    "one map": lambda net, x: hookscope.class_activation_maps(net.model, x)[0],
    "saliency_maps": lambda net, x: hookscope.saliency_maps(net.model, x),
    "ablate_each": lambda net, x: hookscope.ablate_each(net.model, x, "features.12.squeeze", keep=11),
    "intervention_effect": _effect,
    "statistics": lambda net, x: _statistics(net, x).statistics(),
    "RunningStatistics": _statistics,
    "extract": lambda net, x: hookscope.extract(net, STAR, "features.12.*", pool="mean"),
    "find_exemplars": lambda net, x: hookscope.find_exemplars(net, STAR, "features.12.squeeze"),
    "one layer of exemplars": lambda net, x: hookscope.find_exemplars(net, STAR, "features.12.squeeze")[0],
    "find_models": lambda net, x: hookscope.find_models(),
    "predict": lambda net, x: hookscope.predict(net, STAR),
    "preprocess": lambda net, x: net.preprocess,
    "diagnose": lambda net, x: hookscope.diagnose(_statistics(net, x)),
    "parameter_statistics": lambda net, x: hookscope.parameter_statistics(net.model),
    "layer_gradients": lambda net, x: hookscope.layer_gradients(net.model, x),
    "inspect": lambda net, x: hookscope.inspect(net, [STAR]),
    "trace_events": lambda net, x: hookscope.trace_events(net.model, (x,)),
    "find_non_finite": lambda net, x: hookscope.find_non_finite(net.model, x * float("nan")),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_shows_itself_small(net: LoadedModel, x: torch.Tensor, name: str) -> None:
    result = RESULTS[name](net, x)
    html, lines = result._repr_html_(), repr(result).splitlines()
    shown = Cells(html)
    assert shown.tags <= {"table", "thead", "tbody", "caption", "tr", "th", "td", "img", "p"} and len(shown.rows) > 1
    assert len(html) < 100_000 and "color" not in html
    assert len(lines) <= 10 and max(map(len, lines)) <= 240 and "tensor(" not in repr(result)
    for png in shown.pictures:
        Image.open(io.BytesIO(png)).load()
    drawn = ("class_activation_maps", "one map", "saliency_maps", "ablate_each", "inspect")
    assert bool(shown.pictures) == (name in drawn)


def test_a_table_has_the_numbers_of_the_layers(net: LoadedModel) -> None:
    rows = hookscope.list_layers(net.model, (128, 128))
    header, first, *others = Cells(rows._repr_html_()).rows  # type: ignore[attr-defined]
    assert header == [column.name for column in LAYER_CALLS if column.name not in ("call", "order")]
    assert first[:-1] == ["0", "features.0", "Conv2d", "1x3x128x128", "1x64x63x63", "1792", "7,112,448", "3x3", "2x2"]
    assert len(others) == 11 and repr(rows).splitlines()[-1] == f"and {len(rows) - 6} more rows; .records() has all"
    narrow = repr(rows).splitlines()[0].split()
    assert narrow == ["index", "name", "type", "output_shape", "params", "macs", "note"]


def test_the_least_needed_columns_of_a_table_that_is_too_wide_are_left_out(net: LoadedModel) -> None:
    rows = hookscope.compare(net.model, hookscope.load_model("shapes", "none").model, torch.rand(4, 3, 128, 128)).calls
    header = repr(Rows(rows)).splitlines()[0].split()
    needs = {column.name: column.need for column in PAIRS}
    left_out = {name for name in Cells(Rows(rows)._repr_html_()).rows[0] if name not in header}
    assert "cka" in header and left_out and max(map(needs.__getitem__, left_out)) <= min(map(needs.__getitem__, header))


def test_activations_show_the_range_that_torch_finds(net: LoadedModel, x: torch.Tensor) -> None:
    activations = _activations(net, x)
    values = activations["features.0"]
    row = repr(activations).splitlines()[2].split()
    assert row[4:] == [f"{float(value):.4g}" for value in (values.min(), values.mean(), values.max())]


def test_rows_are_a_list(net: LoadedModel) -> None:
    rows = hookscope.list_layers(net.model, (128, 128))
    plain = list(rows)
    assert isinstance(rows, list) and rows == plain and plain == rows
    assert rows[1:3] == plain[1:3] and isinstance(rows[1:3], Rows) and rows[0] is plain[0]
    assert pickle.loads(pickle.dumps(rows)) == plain
    assert isinstance(RowTuple(plain)[1:3], RowTuple) and RowTuple(plain)[0] is plain[0]
    assert (repr(Rows()), Rows()._repr_html_()) == ("[]", "<p>[]</p>")


def test_hostile_names_are_text() -> None:
    thing = Thing(**{HOSTILE: HOSTILE, "picture": Picture(lambda: b"", HOSTILE)})
    for html in (
        thing._repr_html_(),
        Rows([thing, thing])._repr_html_(),
        Finding("a", HOSTILE, "b", "c")._repr_html_(),
    ):
        assert "script" not in Cells(html).tags and not re.search("[\u202e\x1b]", html)
        assert any(
            "</td><script>alert('1')</script>\\u202e\"&amp;\\x1b]0;x" in text for r in Cells(html).rows for text in r
        )
    assert repr(thing).isprintable() and all(line.isprintable() for line in repr(Rows([thing])).splitlines())


def test_a_model_with_a_hostile_layer_shows_it_as_text() -> None:
    net = nn.Sequential()
    net.add_module("<img src=x onerror=alert(1)>", nn.Conv2d(3, 2, 1))
    rows = hookscope.list_layers(net, (4, 4))
    assert "img" not in Cells(rows._repr_html_()).tags  # type: ignore[attr-defined]


def test_long_tables_fit_a_screen() -> None:
    rows = Rows(Thing(name="x" * 300, number=n, words="y" * 100, more="z" * 100) for n in range(1000))
    lines = repr(rows).splitlines()
    assert len(lines) == 8 and lines[-1] == "and 994 more rows; .records() has all" and max(map(len, lines)) <= 120
    assert lines[0].split() == ["name", "number"]  # the last columns do not fit


def test_random_weights_are_said() -> None:
    net = hookscope.load_model("shapes", "none")
    assert "weights=random (seed 0)" in repr(net) and "random (seed 0)" in net._repr_html_()
    inspection = hookscope.inspect(net, [STAR], "features.0")
    for text in (repr(inspection), inspection._repr_html_()):
        assert "the weights are random: this network knows nothing" in text


def test_an_inspection_says_the_answer_and_the_places(net: LoadedModel) -> None:
    others = [STAR.with_name(name) for name in ("ring.png", "star.png", "cross.png")]
    inspection = hookscope.inspect(net, [STAR.with_name("circle.png"), *others])
    rows = Cells(inspection._repr_html_()).rows
    [seen] = [cell for name, cell in (row for row in rows if len(row) == 2) if name == "image 2"]
    best = inspection.images[2].predictions[0]
    assert seen.startswith(f"{STAR.name}: star {best.probability:.1%}") and ["more images", "1"] in rows
    assert [row[-1] for row in rows if len(row) > 2][1:] == [place.reason for place in inspection.places]
    assert "array(" not in repr((inspection, inspection.layers[0], inspection.images[0]))


def test_figures_and_lists_of_images_show_themselves(net: LoadedModel) -> None:
    figure: Any = hookscope.plot(hookscope.parameter_statistics(net))
    width, height = (int(side * figure.dpi) for side in figure.get_size_inches())
    assert Image.open(io.BytesIO(figure._repr_png_())).size == (width, height)
    assert repr(figure).startswith("figure of ") and "0x" not in repr(figure)
    pages: Any = hookscope.draw_exemplars(hookscope.find_exemplars(net, STAR, [0, 1], channels=[0]), net)
    assert isinstance(pages, list) and len(pages) == 2 and " at 0x" not in repr(pages)
    shown = Cells(pages._repr_html_()).pictures
    assert [Image.open(io.BytesIO(png)).size for png in shown] == [page.size for page in pages]


@pytest.mark.parametrize("side", [1, 7, 112, 300])
def test_the_picture_of_a_map_has_its_levels(side: int) -> None:
    values = np.linspace(0, 2, side * side, dtype=np.float32).reshape(side, side)
    image = Image.open(io.BytesIO(map_png(values)))
    zoom, step = max(1, 224 // side), -(-side // 224)
    levels = np.rint(values / max(values.max(), 1e-9) * (colours.LEVELS - 1))[step // 2 :: step, step // 2 :: step]
    assert max(image.size) <= 224 and np.array_equal(np.asarray(image)[::zoom, ::zoom], levels)


def test_the_picture_of_a_map_marks_nan() -> None:
    pixels = np.asarray(Image.open(io.BytesIO(map_png(np.array([[np.nan, 0, np.inf, 1]], np.float32)))))
    assert [*pixels[0, ::56]] == [colours.NAN, 0, colours.LEVELS - 1, colours.LEVELS - 1]


def test_large_numbers_are_rounded() -> None:
    rounded = {0: "0", 9_999: "9,999", 10_000: "10.0 k", 3_664_000_000: "3.7 G", 999_999: "1.0 M", -12_345: "-12.3 k"}
    assert {number: engineering(number) for number in rounded} == rounded


def test_the_next_step_is_a_method_of_the_result(net: LoadedModel, x: torch.Tensor) -> None:
    with hookscope.StatisticsCollector(net) as collector, torch.no_grad():
        net(x)
    assert [(row.key, row.mean) for row in collector.table()] == [
        (row.key, row.mean) for row in collector.totals.statistics()
    ]
    assert collector.findings() == hookscope.diagnose(collector) == hookscope.diagnose(collector.totals)
    star, ring = STAR, STAR.with_name("ring.png")
    features = hookscope.extract(net, [star, ring], ["features.0", "features.3"], pool="mean")
    for at, file in enumerate((star, ring)):
        kept = net.model.features[0](net.prepare(hookscope.open_image(file))[None])  # type: ignore[index, operator]
        means = kept.mean((2, 3)).detach().numpy()
        assert np.allclose(features.array("features.0")[at], means[0], atol=1e-5)
    assert features.array(1).shape == (2, 128)
    with pytest.raises(LayerError, match=r"several columns.*features.0, features.3"):
        features.array()
    with pytest.raises(LayerError, match=r"no column 'conv1'; there are features.0, features.3"):
        features.array("conv1")
    assert hookscope.extract(net, [star, hookscope.open_image(ring)], "features.0").array().shape == (2, 64, 63, 63)
    with hookscope.capture(net, "features.3.*") as activations:
        net(x)
    drawn = hookscope.draw_sheet(activations["features.3.squeeze"], STAR, net, title="features.3.squeeze")
    assert activations.sheet("features.3.squeeze", STAR, net) == activations.sheet(1, STAR, net) == drawn


def test_predict_takes_a_folder_images_and_tensors(net: LoadedModel) -> None:
    rows = hookscope.predict(net, STAR.parent, "top:1")
    assert [Path(row.image).stem.partition("-")[0] for row in rows] == [row.label for row in rows] and len(rows) == 12
    x = net.prepare(hookscope.open_image(STAR))
    logits = net(x[None]).detach()[0].double()
    for given in (STAR, Image.open(STAR), x, x[None], [x]):
        best = hookscope.predict(net, given, ["star", 0])
        assert [row.index for row in best] == [7, 0]
        assert np.allclose([row.score for row in best], logits[[7, 0]], atol=1e-4)
        assert np.allclose([row.probability for row in best], logits.softmax(0)[[7, 0]], atol=1e-5)


def test_rows_in_a_result_show_themselves_as_a_table_and_stay_a_tuple(net: LoadedModel, x: torch.Tensor) -> None:
    report = hookscope.layer_gradients(net, x)
    with hookscope.capture(net) as activations:
        net(x)
    events = hookscope.trace_events(net, x).events
    for rows in (report.layers, report.parameters, hookscope.plan(net).calls, activations.calls, events):
        assert isinstance(rows, tuple) and len(rows) > 6 and rows == tuple(rows) == pickle.loads(pickle.dumps(rows))
        assert len(repr(rows).splitlines()) == 8 and f"and {len(rows) - 6} more rows" in repr(rows)
        assert len(Cells(rows._repr_html_()).rows) == 13 and max(map(len, repr(rows).splitlines())) <= 120  # type: ignore[attr-defined]
    assert repr(events).splitlines()[1].split()[:3] == ["0", "pre-hook", "features.0"]
    norm = report.parameters[0].gradient.norm
    assert f"{norm:.4g}" in report.parameters._repr_html_() and f"{norm:.4g}" in repr(report.parameters)
    assert "GradientSize" not in report.parameters._repr_html_()


def test_of_a_long_sentence_the_first_words_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    sentence, name = "a finding says why the layer " * 5 + "is dead", "layer" * 30
    rows = Rows([Thing(text=sentence), Thing(text=name)])
    for columns, width in (("80", 120), ("140", 140), ("200", 152)):
        monkeypatch.setenv("COLUMNS", columns)
        said, named = repr(rows).splitlines()[1:]
        assert sentence.startswith(said.removesuffix(" …")) and width - 10 < len(said) <= width
        assert named == name if width > 150 else (len(named) == width and "…" in named)
    finding = Finding("dead", "conv", sentence, sentence)
    assert f"\n  evidence={sentence},\n  meaning={sentence})" in repr(finding)


def test_columns_stand_below_each_other_beside_wide_characters() -> None:
    rows = [{"said": "图" * 45, "more": "x" * 40, "next": 1}, {"said": "x", "more": "y", "next": 2}]
    lines = list(text_lines(rows))
    assert len({text_width(line) for line in lines}) == 1


def test_the_place_and_the_box_of_an_exemplar_do_not_look_like_shapes(net: LoadedModel) -> None:
    most = hookscope.find_exemplars(net, STAR, "features.12.squeeze")[0].channels[0].most
    row = most.records()[0]  # type: ignore[attr-defined]
    assert eval(row["place"]) == most[0].place and eval(row["box"]) == most[0].box


def test_an_image_that_is_given_twice_is_inspected_once(net: LoadedModel) -> None:
    star = hookscope.open_image(STAR)
    with pytest.warns(ImageWarning, match="^image 1: left out: an earlier image has the same content$"):
        assert len(hookscope.inspect(net, [star, star.copy()]).images) == 1


def test_the_records_of_rows_have_the_fields_of_csv_and_exact_values(net: LoadedModel, x: torch.Tensor) -> None:
    with hookscope.StatisticsCollector(net) as stats:
        net(x)
    records = stats.table().records()
    assert [record["mean"] for record in records] == [layer.mean for layer in stats.table()]
    assert list(records[0])[:5] == ["index", "name", "type", "call", "order"] and "p50" in records[0]
    [cam] = hookscope.class_activation_maps(net, x)
    [record] = Rows([cam]).records()
    assert record["score"] == cam.prediction.score and not any(isinstance(v, Picture) for v in record.values())


def test_what_a_table_shows_of_a_result_is_an_attribute_of_it(net: LoadedModel, x: torch.Tensor) -> None:
    plan, [cam], report = (
        hookscope.plan(net),
        hookscope.class_activation_maps(net, x),
        hookscope.layer_gradients(net, x),
    )
    assert (plan.macs, plan.peak) == (sum(call.macs for call in plan.calls), plan.memory.peak)
    assert (cam.score, cam.layer) == (cam.prediction.score, cam.call.key)
    assert report.layers[0].grad_output_norm == report.layers[0].grad_output.norm
    assert pickle.loads(pickle.dumps(cam)).score == cam.score
    for result in (plan, cam, report.layers[0]):
        with pytest.raises(AttributeError, match=f"^'{type(result).__name__}' object has no attribute 'nothing'"):
            _ = result.nothing


def test_checks_are_a_table_of_their_results(net: LoadedModel) -> None:
    checks = hookscope.verify(net, STAR, "features.0")
    assert [line.split()[0] for line in repr(checks).splitlines()] == ["name", *(check.name for check in checks)]


def on_meta() -> nn.Module:
    return nn.Conv2d(3, 4, 3, device="meta")


STRANGE: list[tuple[str, Callable[[LoadedModel, torch.Tensor], Any]]] = [
    ("expected the path of a file, got None", lambda net, x: hookscope.read_runs(None)),  # type: ignore[arg-type]
    ("expected the path of a file, got Tensor", lambda net, x: hookscope.read_sheet(x)),  # type: ignore[arg-type]
    ("expected the path of a file, got list", lambda net, x: hookscope.read_exemplars([STAR])),  # type: ignore[arg-type]
    ("expected the path of a file, got int", lambda net, x: hookscope.write_page(
        hookscope.parameter_statistics(net), 3)),  # type: ignore[arg-type]
    ("top must be an integer of at least 1, not '3'", lambda net, x: hookscope.find_exemplars(
        net, [STAR], 0, top="3")),  # type: ignore[arg-type]
    ("top must be an integer of at least 1, not None", lambda net, x: hookscope.find_exemplars(
        net, [STAR], 0, top=None)),  # type: ignore[arg-type]
    ("most must be an integer of at least 1, not 1.5", lambda net, x: hookscope.landmark_layers(net, x, most=1.5)),  # type: ignore[arg-type]
    ("depth must be an integer of at least 0, not '1'", lambda net, x: hookscope.layer_tree(net, depth="1")),  # type: ignore[arg-type]
    ("workers must be an integer of at least 0, not None", lambda net, x: hookscope.RunSettings(workers=None)),  # type: ignore[arg-type]
    ("batch size must be an integer of at least 1, not True", lambda net, x: hookscope.plan(net, True)),
    ("expected an engine, got text", lambda net, x: hookscope.RunSettings(engine="ray")),  # type: ignore[arg-type]
    ("bad channels 'x'", lambda net, x: hookscope.synthesize_images(net, 0, "x")),  # type: ignore[arg-type]
    ("bad channels [1.5]", lambda net, x: hookscope.draw_sheet(x, channels=[1.5])),  # type: ignore[list-item]
    ("limit 'a' is not a number above 0", lambda net, x: hookscope.ClipGradientNorm("a")),  # type: ignore[arg-type]
    ("a region is a mask (H, W), not one number", lambda net, x: hookscope.RegionTarget("left")),
    ("is on the meta device: it has shapes and no values", lambda net, x: hookscope.extract(on_meta(), STAR, 0)),
    ("is on the meta device: it has shapes and no values", lambda net, x: hookscope.verify(on_meta(), x)),
    ("is on the meta device: it has shapes and no values", lambda net, x: hookscope.compare(on_meta(), net, STAR)),
    ("on the meta device has a shape and no values", lambda net, x: hookscope.draw_sheet(x.to("meta"))),
    ("on the meta device has a shape and no values", lambda net, x: hookscope.draw_kernels(on_meta())),
    ("no method '3'", lambda net, x: hookscope.cam_faithfulness(net, x, methods=3)),  # type: ignore[arg-type]
    ("StatisticsCollector take tensors", hookscope.inspect),
    ("page of LayerExemplars: missing a required argument: 'net'", lambda net, x: hookscope.write_page(
        hookscope.find_exemplars(net, [STAR], "features.0", channels=3, top=1), "page.html")),
]  # fmt: skip


@pytest.mark.parametrize(("text", "call"), STRANGE, ids=[text[:40] for text, _ in STRANGE])
def test_a_wrong_argument_is_one_line_that_names_it(
    net: LoadedModel, x: torch.Tensor, text: str, call: Callable[[LoadedModel, torch.Tensor], Any]
) -> None:
    with pytest.raises(HookscopeError) as raised:
        call(net, x)
    assert text in str(raised.value) and "\n" not in str(raised.value)
    assert not list(Path().glob("page.html"))


def test_numpy_numbers_count_as_numbers(net: LoadedModel, x: torch.Tensor) -> None:
    found = hookscope.find_exemplars(net, [STAR], "features.0", channels=np.int64(3), top=np.int64(1))  # type: ignore[arg-type]
    assert [unit.channel for unit in found[0].channels] == [3]
    loaded = hookscope.load_model("shapes", input_size=(64,))
    assert loaded.preprocess.default_size == (64, 64) or loaded.preprocess.input_shape == (3, 64, 64)
