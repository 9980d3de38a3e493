"""Selectivity against its formula."""

from __future__ import annotations

import numpy as np
import pytest

from hookscope.exemplars import histogram as selectivity
from hookscope.exemplars.histogram import ClassMeans


def of(values: list[list[float]], labels: list[str]) -> ClassMeans:
    means = ClassMeans(len(values[0]))
    means.update(np.array(values), labels)
    return means


def test_the_index_compares_the_best_class_with_the_mean_of_the_others() -> None:
    means = of([[6, 1], [2, 1], [1, 1], [3, 1]], ["cat", "cat", "dog", "owl"])
    # cat (6 + 2) / 2 = 4, dog 1, owl 3: (4 - 2) / (4 + 2)
    assert means.selectivity() == [("cat", pytest.approx(1 / 3)), ("cat", 0.0)]


def test_parts_merge_and_images_without_a_label_are_left_out() -> None:
    means = of([[6.0]], ["cat"])
    means.merge(of([[2.0], [100.0]], ["cat", ""]))
    means.merge(of([[1.0], [3.0]], ["dog", "owl"]))
    assert means.selectivity() == [("cat", pytest.approx(1 / 3))]
    assert ClassMeans.from_state(means.state_dict(), 1).selectivity() == means.selectivity()


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([[1.0], [2.0]], ["cat", "cat"]),
        ([[1.0], [2.0]], ["", ""]),
        ([[-1.0], [2.0]], ["cat", "dog"]),
        ([[np.nan], [2.0]], ["cat", "dog"]),
        ([[0.0], [0.0]], ["cat", "dog"]),
    ],
    ids=["one class", "no label", "negative mean", "NaN", "all zero"],
)
def test_there_is_no_index_without_two_classes_of_positive_means(values: list[list[float]], labels: list[str]) -> None:
    assert of(values, labels).selectivity() == [("", None)]


def test_too_many_labels_are_given_up_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selectivity, "MOST_LABELS", 2)
    many = of([[1.0], [2.0], [3.0]], ["a", "b", "c"])
    few = of([[1.0], [2.0]], ["a", "b"])
    few.merge(many)
    many.merge(of([[1.0]], ["a"]))
    assert few.selectivity() == many.selectivity() == [("", None)]
    assert ClassMeans.from_state(few.state_dict(), 1).too_many
