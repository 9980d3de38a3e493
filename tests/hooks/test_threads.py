"""The number of threads is as before on every way out."""

from __future__ import annotations

import pytest
import torch

from hookscope.hooks.threads import one_thread


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_one_inside_and_as_before_outside(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
            with one_thread():
                assert torch.get_num_threads() == 1
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == threads
        with pytest.raises(ValueError, match="as asked"), one_thread():
            raise ValueError("as asked")
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
