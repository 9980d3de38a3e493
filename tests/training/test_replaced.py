"""A function that another stands in for is back afterwards, whoever else has replaced it."""

from __future__ import annotations

from types import SimpleNamespace

from hookscope.training.replaced import Replaced


def twice(original: object, value: int) -> int:
    return 2 * original(value)  # type: ignore[operator,no-any-return]


def add_one(value: int) -> int:
    return value + 1


def test_it_is_put_back() -> None:
    owner = SimpleNamespace(f=add_one)
    replaced = Replaced(owner, "f", twice)
    replaced.on()
    first = owner.f
    replaced.on()
    assert owner.f is first and owner.f(1) == 4 and owner.f.__name__ == "add_one"
    replaced.off()
    replaced.off()
    assert owner.f is add_one and first(1) == 2


def test_two_that_end_in_the_wrong_order() -> None:
    owner = SimpleNamespace(f=add_one)
    inner, outer = Replaced(owner, "f", twice), Replaced(owner, "f", twice)
    inner.on()
    outer.on()
    assert owner.f(1) == 8
    inner.off()
    assert owner.f(1) == 4  # what was put over it stays
    outer.off()
    assert owner.f(1) == 2
