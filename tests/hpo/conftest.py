"""What takes minutes runs in `make soak`; a collection after each trial is then quick."""

import gc
import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _frozen_heap() -> Iterator[None]:
    gc.freeze()  # what is imported stays
    yield
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get("TRAINFIT_SOAK"):
        for item in items:
            if item.get_closest_marker("soak"):
                item.add_marker(pytest.mark.skip(reason="set TRAINFIT_SOAK=1, or make soak"))
