from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hookscope.hooks.threads import one_thread


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_one_thread_inside_the_block_and_the_same_number_as_before_after_it(threads: int) -> None:
    with one_thread(), one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == threads
    with pytest.raises(ValueError, match="on purpose"), one_thread():
        raise ValueError("on purpose")
    assert torch.get_num_threads() == threads
