"""Tiny models on one thread; a stand-in for the GPU's kernel, which the tests themselves write."""

from collections.abc import Iterator

import pytest
import torch
from kernels_reference import install_reference


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def reference_kernel() -> Iterator[None]:
    """The variable-length operation on the CPU, one sequence after the other."""
    library = install_reference()
    yield
    library._destroy()


@pytest.fixture
def new_enough() -> Iterator[None]:
    """Skip GPUs without the kernels; compiled code does not outlive a test."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs compute capability 8.0")
    yield
    torch.compiler.reset()
