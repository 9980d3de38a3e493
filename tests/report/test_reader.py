"""Tests of reading the values of a page back."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

from hookscope import HookscopeError, capture, inspect, load_model, open_image, read_page
from hookscope.errors import PageError
from hookscope.report import draw_page
from tests.report.example import HOSTILE, example, inspection_of, layer_of

SAMPLES = ["samples/shapes/star.png", "samples/shapes/circle.png"]


def written(path, inspection, **options):
    file = path / "page.html"
    file.write_text(draw_page(inspection, **options), encoding="utf-8")
    return file


def test_values_are_those_of_the_layers_within_half_a_level(tmp_path):
    net = load_model("shapes")
    page = read_page(written(tmp_path, inspect(net, SAMPLES)))
    assert len(page) == 26
    for image, sample in enumerate(SAMPLES):
        with torch.no_grad(), capture(net.model, layers=list(page)) as kept:
            net.model(*net.inputs(net.prepare(open_image(sample))))
        for key, images in page.items():
            channels, values = images[image]
            exact = kept[key][0].double().numpy()
            half = (exact.max((1, 2)) - exact.min((1, 2))) / 192 / 2
            assert channels == list(range(len(exact)))
            assert (abs(values - exact).max((1, 2)) <= half * 1.001 + 1e-12).all()


def test_nan_inf_constant_and_huge_values_come_back(tmp_path):
    values = np.random.default_rng(0).normal(size=(6, 5, 4))
    values[0, 1, 2], values[0, 2, 2], values[0, 3, 3] = np.nan, np.inf, -np.inf
    values[1] = -7.25
    values[2] = np.nan
    values[3] *= 1e300
    values[4] *= 1e-300
    ((channels, read), nothing) = read_page(written(tmp_path, inspection_of(layer_of(values, None))))["layer"]
    assert nothing is None and channels == [0, 1, 2, 3, 4, 5]
    finite = np.isfinite(values)
    assert np.array_equal(read[~finite], values[~finite], equal_nan=True)
    assert (read[1] == -7.25).all()
    spread = np.where(finite, values, 0)
    half = (spread.max((1, 2)) / 384 - spread.min((1, 2)) / 384)[:, None, None]
    assert (abs(np.where(finite, read, 0) - spread) <= half * 1.001)[[0, 1, 3, 4, 5]].all()


def test_values_of_one_position_are_exact(tmp_path):
    values = np.array([0.1, np.nan, -np.inf, 1e30, 0.0], np.float32).reshape(5, 1, 1)
    [(channels, read)] = read_page(written(tmp_path, inspection_of(layer_of(values))))["layer"]
    assert channels == [0, 1, 2, 3, 4] and np.array_equal(read, values, equal_nan=True)


def test_images_may_have_maps_of_different_sizes(tmp_path):
    values = [np.random.default_rng(0).normal(size=(3, *size)) for size in ((4, 6), (5, 3))]
    images = read_page(written(tmp_path, inspection_of(layer_of(*values))))["layer"]
    assert [read.shape for _, read in images] == [(3, 4, 6), (3, 5, 3)]
    assert all(abs(read - exact).max() < 0.02 for (_, read), exact in zip(images, values, strict=True))


def test_a_layer_may_have_any_name(tmp_path):
    values = np.random.default_rng(0).normal(size=(2, 3, 3))
    page = read_page(written(tmp_path, inspection_of(layer_of(values, name=HOSTILE), layer_of(values, name="b"))))
    assert list(page) == [HOSTILE, "b"]


def test_only_the_kept_channels_come_back(tmp_path):
    values = np.random.default_rng(0).normal(size=(64, 32, 32))
    layer = layer_of(values, answer=np.arange(64))
    whole = len(draw_page(inspection_of(layer)))
    [(channels, read)] = read_page(written(tmp_path, inspection_of(layer), max_size=whole - 40_000))["layer"]
    assert channels == list(range(64 - len(channels), 64)) and 0 < len(channels) < 40
    assert abs(read - values[channels]).max() < 0.03


def changed(text, pattern, replacement):
    done = re.sub(pattern, replacement, text, count=1)
    assert done != text
    return done


DAMAGE = {
    "no page of inspect": lambda text: "<html><h1>A page</h1></html>",
    "it is not text": lambda text: "\xff",
    "is cut off": lambda text: text[: len(text) * 9 // 10],
    "cut off": lambda text: text.replace("</html>", ""),
    "is damaged": lambda text: text.replace("</main>", "</main><![" * 2),
    "was modified; a limit": lambda text: changed(text, r'"low":\[(-?\d)', r'"low":[9\1'),
    "was modified; a picture": lambda text: changed(text, r'(class="maps"[^>]*base64,[^"]{90})(?!A).', r"\1A"),
    "was modified; a layer less": lambda text: changed(text, r'(?s)<section class="layer".*?</section>', ""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_no_whole_page_of_ours_is_refused(tmp_path, damage):
    file = tmp_path / "page.html"
    file.write_bytes(DAMAGE[damage](draw_page(example())).encode("latin-1" if "text" in damage else "utf-8"))
    with pytest.raises(PageError, match=damage.partition(";")[0].replace("was", "were")) as raised:
        read_page(file)
    assert "\n" not in str(raised.value)


def test_a_page_whose_seal_was_renewed_is_read_with_care(tmp_path):
    """Whoever changes numbers and seal gets an error, or numbers, but nothing else."""
    from hookscope.report.layers import digest

    text = draw_page(inspection_of(layer_of(np.arange(8.0).reshape(2, 2, 2))))
    data = re.search(r'class="numbers">(.*?)</script>', text)[1]
    address = re.search(r'src="(data:image/png[^"]*)" width="\d+" height="\d+" loading="lazy" alt="Feature', text)[1]
    facts = json.loads(data)
    images = [{**facts["images"][0], **change} for change in ({"columns": 0}, {"low": [10**400] * 2}, {"low": [{}, 0]})]
    others = [json.dumps({**facts, "images": [image]}) for image in ({"low": [0]}, *images)]
    for other in ("[]", "{}", '{"key": 1}', *others, "1" * 5000, "[" * 100_000):
        forged = text.replace(data, other).replace(digest([data], [address]), digest([other], [address]))
        (tmp_path / "forged.html").write_text(forged, "utf-8")
        with pytest.raises(HookscopeError):
            read_page(tmp_path / "forged.html")


def test_a_picture_of_another_size_than_its_numbers_say_is_not_decoded(tmp_path, monkeypatch):
    from hookscope.report.layers import digest
    from hookscope.report.pictures import png_address

    text = draw_page(inspection_of(layer_of(np.arange(8.0).reshape(2, 2, 2))))
    data = re.search(r'class="numbers">(.*?)</script>', text)[1]
    address = re.search(r'src="(data:image/png[^"]*)" width="\d+" height="\d+" loading="lazy" alt="Feature', text)[1]
    large = png_address(Image.new("P", (3000, 3000)))
    forged = text.replace(address, large).replace(digest([data], [address]), digest([data], [large]))
    (tmp_path / "forged.html").write_text(forged, "utf-8")
    monkeypatch.setattr(Image.Image, "load", lambda image: pytest.fail("decoded"))
    with pytest.raises(PageError, match="a picture of 3000×3000 pixels"):
        read_page(tmp_path / "forged.html")


@pytest.mark.parametrize("name", ["/dev/zero", "page\0.html"])
def test_no_file_of_any_size_or_name_is_read_whole(name):
    with pytest.raises(PageError):
        read_page(name)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(PageError, match="No such file"):
        read_page(tmp_path / "no.html")
