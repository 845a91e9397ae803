"""Memory that runs out where a test wants it to: at the n-th operation of chosen phases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainfit.engine import recovery


class Faults(TorchDispatchMode):
    """Counts operations while it is entered, and fails those whose number is in `at`."""

    def __init__(self, at: Iterable[int] = ()) -> None:
        super().__init__()
        self.at = frozenset(at)
        self.count = 0
        self.raised = 0
        self.phases: dict[str, set[int]] = {}
        self.phase = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "profiler":  # a mark in a trace, which takes no memory
            return func(*args, **(kwargs or {}))
        self.count += 1
        self.phases.setdefault(self.phase, set()).add(self.count)
        if self.count in self.at:
            self.raised += 1
            raise torch.OutOfMemoryError(f"planted at {func}")
        return func(*args, **(kwargs or {}))


def plant(patch: pytest.MonkeyPatch, task: Any, faults: Faults) -> Faults:
    """Let the steps and evaluations of `task` run into `faults`."""

    def within(phase: str, work: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with faults:
                faults.phase = phase
                return work(*args, **kwargs)

        return call

    patch.setattr(recovery, "accumulate", within("step", recovery.accumulate))
    patch.setattr(recovery, "finish", within("update", recovery.finish))
    patch.setattr(task, "evaluate", within("evaluation", task.evaluate))
    return faults
