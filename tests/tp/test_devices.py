"""The device, dtype and threads that a user asks for."""

import pytest
import torch
from triforce.tp.devices import set_threads
from triforce.tp.errors import UsageError


def test_threads_are_set_or_left_as_they_are():
    before = torch.get_num_threads()
    try:
        set_threads(before + 2)
        assert torch.get_num_threads() == before + 2
        set_threads(None)
        assert torch.get_num_threads() == before + 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("count", [0, -1])
def test_less_than_one_thread_is_refused(count):
    with pytest.raises(UsageError, match=f"threads is {count}; it must be 1 or more"):
        set_threads(count)
