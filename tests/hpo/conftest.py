"""What takes minutes runs in `make soak`; a collection after each trial is then quick."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _frozen_heap() -> Iterator[None]:
    gc.freeze()  # what is imported stays
    yield
    gc.unfreeze()
