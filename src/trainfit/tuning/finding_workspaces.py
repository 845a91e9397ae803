"""The step of another probe, with cuBLAS's workspaces taken before it, as the GPU's steps have it.

The planner predicts a step as the first of its process. The probes on the GPU follow one another:
the workspaces are there already, and where they lie decides how much memory can be given back when
it becomes scarce.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainfit.engine.workspaces import take_workspaces
from trainfit.records import TaskSpec


def probe(factory: str, arguments: dict[str, Any]) -> tuple[Any, Callable[[Any], Any]]:
    """The model of `factory(**arguments)`, and what makes its step."""
    model, make_step = TaskSpec(factory=factory, arguments={}).function()(**arguments)

    def make(built: Any) -> Any:
        take_workspaces()
        return make_step(built)

    return model, make
