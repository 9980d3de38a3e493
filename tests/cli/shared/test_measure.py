"""What the command line says of a run over many images: its notes, its errors, and how to resume it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hookscope.cli.shared.measure import MeasureOptions, measure
from hookscope.cli.shared.model import ModelOptions
from hookscope.errors import HookscopeError, LayerError
from hookscope.hooks import Selection
from hookscope.statistics import SavedStatistics

NETS = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(3, 4, 7, stride=3), nn.ReLU())
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(NETS)
    for number in range(3):
        Image.effect_noise((24, 20), 60 + 9 * number).convert("RGB").save(f"{number}.png")
    (tmp_path / "bad.png").write_text("not an image")


def measured(*paths: str, strict: bool = False, **more: Any) -> tuple[SavedStatistics, int]:
    job = MeasureOptions(ModelOptions("nets.py:net", preprocess="none"), paths, batch_size=1, strict=strict)
    return measure(job, paths, **more)


def test_lost_images_are_named_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    saved, lost = measured("0.png", "bad.png", "1.png", "missing.png")
    assert (saved.totals.images, lost) == (2, 2)
    *lines, skipped = capsys.readouterr().err.splitlines()
    assert [line.split("'")[1] for line in lines] == ["bad.png", "missing.png"]
    assert skipped == "Note: 2 of 4 images skipped"


@pytest.mark.parametrize(("paths", "strict"), [(["0.png", "bad.png", "missing.png"], True), (["bad.png"], False)])
def test_strict_or_a_single_image_stops_at_the_first(
    capsys: pytest.CaptureFixture[str], paths: list[str], strict: bool
) -> None:
    with pytest.raises(HookscopeError, match="bad\\.png"):
        measured(*paths, strict=strict)
    assert capsys.readouterr().err == ""


def test_what_is_allowed_must_be_a_layer_of_the_model() -> None:
    with pytest.raises(LayerError, match=r"no layer 'conv' in nets\.py:net"):
        measured("0.png", allow=Selection(["0", "conv"]))
    measured("0.png", allow=Selection(["1", "*", "0"]))


def test_an_interrupted_run_says_how_to_resume(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    passes = iter(range(2))
    forward = torch.nn.ReLU.forward

    def stop(self: torch.nn.ReLU, inputs: torch.Tensor) -> torch.Tensor:
        if next(passes, None) is None:
            raise KeyboardInterrupt
        return forward(self, inputs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.ReLU, "forward", stop)
        with pytest.raises(KeyboardInterrupt):
            measured("0.png", "1.png", "2.png", save="s.json")
    assert capsys.readouterr().err == "Note: s.json holds 2 of 3 images; add --resume to go on\n"
    saved, _ = measured("0.png", "1.png", "2.png", save="s.json", resume=True)
    assert capsys.readouterr().err == "Note: s.json holds 2 of 3 images\n"
    assert saved.totals.images == 3
