"""ROAD's filling of removed pixels, judged by the authors' code in grad-cam."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pytorch_grad_cam.metrics.road import NoisyLinearImputer
from torch import Tensor

from hookscope.faithfulness.imputation import imputed

SIZE = (25, 38)
pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__")  # the authors' code gives tensors to NumPy


def blocks(share: float) -> Tensor:
    cells = torch.nn.functional.interpolate(torch.rand(1, 1, 5, 7), SIZE, mode="bilinear")
    return cells > cells.flatten().quantile(share)


@pytest.mark.parametrize(
    "known",
    [
        lambda: blocks(0.2),
        lambda: blocks(0.9),
        lambda: torch.rand(1, 1, *SIZE) > 0.5,
        lambda: torch.arange(SIZE[0] * SIZE[1]).reshape(1, 1, *SIZE) == 444,
        lambda: torch.arange(SIZE[0] * SIZE[1]).reshape(1, 1, *SIZE) % SIZE[1] > 1,
        lambda: torch.ones(1, 1, *SIZE, dtype=torch.bool),
    ],
)
def test_it_is_the_authors_within_half_of_the_noise(known: Callable[[], Tensor]) -> None:
    torch.manual_seed(0)
    picture, mask = torch.randn(1, 3, *SIZE), known()
    found = imputed(picture, mask, noise=0.0)[0]
    if bool(mask.all()):
        assert torch.equal(found, picture[0])
        return
    expected = NoisyLinearImputer(noise=0)(picture[0], mask[0, 0].float())
    assert (found - expected).abs().max() < 0.005


def test_masks_of_one_batch_do_not_affect_each_other() -> None:
    torch.manual_seed(0)
    pictures, known = torch.randn(3, 2, *SIZE), torch.cat([blocks(share) for share in (0.1, 0.5, 0.9)])
    together = imputed(pictures, known, noise=0.0)
    for at in range(3):
        alone = imputed(pictures[at : at + 1], known[at : at + 1], noise=0.0)
        assert (together[at] - alone[0]).abs().max() < 0.01


def test_the_noise_is_in_removed_pixels_only_and_has_its_size() -> None:
    torch.manual_seed(0)
    picture, known = torch.zeros(1, 3, 64, 64), torch.rand(1, 1, 64, 64) > 0.5
    found = imputed(picture, known)
    assert not found[known.expand_as(found)].any()
    assert 0.009 < float(found[~known.expand_as(found)].std()) < 0.011


def test_without_any_pixel_the_mean_colour_is_left() -> None:
    picture = torch.arange(24.0).reshape(1, 2, 3, 4)
    found = imputed(picture, torch.zeros(1, 1, 3, 4, dtype=torch.bool), noise=0.0)
    assert torch.allclose(found[0].mean((1, 2)), torch.tensor([5.5, 17.5]))
    assert torch.allclose(found[0], found[0, :, :1, :1].expand(2, 3, 4))
