"""Fakes of saved tensors that wait on the host: their memory is free, and copies take time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from trainfit.kernels.saved_on_host import HostCopy, SavedOnHost
from trainfit.planning.estimator.recorder import Recorder
from trainfit.planning.estimator.step_time import Work


class FakeSavedOnHost(SavedOnHost):
    """The same order of copies as on a GPU, without any."""

    def takes(self, tensor: Tensor) -> bool:
        """True for a fake tensor, which stands for one on a GPU."""
        return isinstance(tensor, FakeTensor)

    def copy_out(self, storage: torch.UntypedStorage, device: torch.device) -> tuple[Any, Any]:  # noqa: ARG002
        """Count the copy; host memory is not that of the GPU."""
        _note(storage.nbytes())
        return None, None

    def copy_back(self, copy: HostCopy) -> tuple[Tensor, Any]:
        """Count the copy, and take memory for it."""
        _note(copy.nbytes)
        return torch.empty(copy.nbytes, dtype=torch.uint8), None

    def wait(self, event: Any) -> None:
        """Do nothing: nothing is on its way."""


def saved_on_host(device: str) -> type[SavedOnHost]:
    """Place of activations that wait on the host; on the CPU, where fakes are, it is a fake too."""
    return FakeSavedOnHost if device == "cpu" else SavedOnHost


def _note(nbytes: int) -> None:
    backward = torch._C._current_graph_task_id() != -1
    work = Work(
        kind="transfer",
        flops=0,
        skipped=0,
        nbytes=nbytes,
        half=False,
        aligned=True,
        backward=backward,
        update=False,
    )
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, Recorder):
            mode.note(work)
