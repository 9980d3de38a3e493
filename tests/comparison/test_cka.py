"""Linear CKA: against the published number, the formula of the paper, and layers that have no CKA."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.comparison.cka import CkaSums, PairCka, gram


def cka_of(*batches: tuple[Tensor, Tensor]) -> float | None:
    cka = PairCka()
    for a, b in batches:
        cka.add(a, b)
    return cka.value


def related(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Outputs of two layers for ``n`` images that have something in common."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(n, 3, 4, 5, generator=generator)
    return a, a.flatten(1)[:, :7] ** 2 + torch.randn(n, 7, generator=generator)


def hsic_1(k: NDArray[np.float64], m: NDArray[np.float64]) -> float:
    """Equation 3 of arXiv:2010.15327."""
    n, one = len(k), np.ones(len(k))
    k, m = k - np.diag(np.diag(k)), m - np.diag(np.diag(m))
    trace = (
        np.trace(k @ m) + (one @ k @ one) * (one @ m @ one) / ((n - 1) * (n - 2)) - 2 / (n - 2) * (one @ k @ m @ one)
    )
    return float(trace / (n * (n - 3)))


def by_formula(batches: list[tuple[Tensor, Tensor]]) -> float:
    flat = [[side.double().flatten(1).numpy() for side in batch] for batch in batches]
    grams = [(a @ a.T, b @ b.T) for a, b in flat]
    ab, aa, bb = (np.mean([hsic_1(g[i], g[j]) for g in grams]) for i, j in ((0, 1), (0, 0), (1, 1)))
    return float(ab / np.sqrt(aa) / np.sqrt(bb))


def test_it_is_the_number_that_the_authors_of_cka_published() -> None:
    # google-research/representation_similarity/Demo.ipynb, "Linear CKA from Examples (Debiased)"
    random = np.random.RandomState(1337)
    a = random.randn(100, 10)
    b = random.randn(100, 10) + a
    assert cka_of((torch.from_numpy(a), torch.from_numpy(b))) == pytest.approx(0.51346, abs=5e-6)


@pytest.mark.parametrize("sizes", [(4,), (5,), (40,), (16, 16, 16)])
def test_it_is_the_mean_of_the_unbiased_estimates_of_the_batches(sizes: tuple[int, ...]) -> None:
    batches = [related(n, seed) for seed, n in enumerate(sizes)]
    assert cka_of(*batches) == pytest.approx(by_formula(batches), abs=1e-9)


def test_a_batch_of_fewer_than_four_images_does_not_count() -> None:
    assert cka_of(related(3)) is None
    assert cka_of(related(16), related(3, 1)) == cka_of(related(16))


def test_it_sees_no_scale_and_no_offset() -> None:
    a, b = (side.double() for side in related(16))
    assert cka_of((a, a * -3 + 1e6)) == pytest.approx(1, abs=1e-9)
    assert cka_of((a + 1e6, b * 1e-30)) == pytest.approx(cka_of((a, b)), abs=1e-9)


def test_it_is_the_same_in_slices_of_features(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = related(6)
    whole = cka_of((a, b))
    monkeypatch.setattr("hookscope.comparison.cka._SLICE", 30)
    assert cka_of((a, b)) == pytest.approx(whole, abs=1e-12)


@pytest.mark.parametrize(
    "without",
    [
        torch.full((5, 2, 3), 0.1),
        torch.cat([torch.full((4, 6), 0.1), torch.full((1, 6), 0.7)]),  # one image alone differs
        torch.cat([torch.full((1, 6), 0.1), torch.full((4, 6), 0.7)]),
        torch.full((5, 2), torch.nan),
        torch.tensor([0.0, 1, 2, 3, torch.inf]),
        torch.zeros(5, 0),
    ],
    ids=["constant", "but the last", "but the first", "nan", "inf", "empty"],
)
def test_a_layer_without_two_different_images_has_none(without: Tensor) -> None:
    a, _ = related(5)
    assert cka_of((a, without)) is None
    assert cka_of((without, a)) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.int32])
def test_every_type_of_numbers_has_a_gram(dtype: torch.dtype) -> None:
    values = torch.arange(12.0).reshape(4, 3) % 5
    centred = values - values.mean(0)
    assert torch.allclose(gram(values.to(dtype)), (centred @ centred.T).double())


def test_the_matrix_has_the_value_of_each_pair() -> None:
    batches = [related(8, seed) for seed in range(2)]
    sums = CkaSums(2, 3)
    for a, b in batches:
        sums.add([gram(a), gram(b)], [gram(a), gram(b), None])
    pair = cka_of(*batches)
    assert sums.matrix[:, :2] == pytest.approx(np.array([[1, pair], [pair, 1]]))
    assert np.isnan(sums.matrix[:, 2]).all()
