from collections.abc import Iterator

import pytest
import torch

from trainfit.integrations.host_batches import AROUND


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Losses are compared, and hundreds of tiny steps would wait for each other's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _changes_are_on() -> Iterator[None]:
    """Tests of turns may end in one without the changes."""
    AROUND.off = False
    yield
    AROUND.off = False
