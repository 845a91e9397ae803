"""Tiny models on one thread, and the long runs only when asked for."""

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()  # what is imported stays: to collect after a planted fault is then quick
    yield
    torch.set_num_threads(before)
