"""What docs/howto/exemplars.md says of the channels of `shapes`, on the thousand pictures that it names."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

import hookscope
from tests.helpers import settings

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_most_channels_of_a_late_layer_belong_to_one_or_two_shapes(tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "samples/shapes/draw.py"))["write"](tmp_path, 11, range(1000), by_class=True)
    rows = re.findall(
        r"^\| `(\S+)` \| (\d+)×\d+ \| (\d+) \| (\d+) \| (\d+) \| (\S+) \|$",
        (ROOT / "docs/howto/exemplars.md").read_text(),
        re.MULTILINE,
    )
    net = hookscope.load_model("shapes")
    found = hookscope.find_exemplars(net, [str(tmp_path)], layers=[row[0] for row in rows], run=settings(32))
    for layer, (name, field, channels, two, one, median) in zip(found, rows, strict=True):
        shapes = [len(channel.classes) for channel in layer.channels]
        assert (layer.call.name, layer.field.size[0], len(shapes)) == (name, int(field), int(channels))
        assert all(len(channel.most) == 9 for channel in layer.channels)
        counts = sum(each <= 2 for each in shapes), sum(each == 1 for each in shapes)
        assert counts == pytest.approx((int(two), int(one)), abs=3)  # values that are nearly equal may change places
        selectivity = [channel.selectivity for channel in layer.channels if channel.selectivity is not None]
        assert np.median(selectivity) == pytest.approx(float(median), abs=0.01)
        if name == "features.10":
            assert 2 * counts[0] >= len(shapes)
