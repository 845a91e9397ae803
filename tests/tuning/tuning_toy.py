"""Candidates that train in milliseconds, and others that crash, hang or run out of memory."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainfit.core.plan_records import MemoryEstimate, Plan, RuntimeSettings, TaskSpec, Workload
from trainfit.core.records import Scalar
from trainfit.engine.loop_settings import LoaderSettings, LoopSettings, OptimizerSettings
from trainfit.packing import ladder
from trainfit.tuning.trial import Setup
from trainfit.tuning.tuned_cache import TrialCandidate

BATCH, LENGTH, STEPS = 4, 8, 12
MEMORY = MemoryEstimate(
    weights_gib=1.0,
    gradients_gib=1.0,
    optimizer_gib=2.0,
    activations_gib=8.0,
    workspace_gib=0.1,
    peak_allocated_gib=12.0,
    peak_reserved_gib=13.0,
    capacity_gib=24.0,
    fits=True,
    error_percent=3.0,
)


class ToyTask:
    """A matrix on sequences of eight numbers. A step takes as long as it is told to."""

    def __init__(self, sleep: float, how: str) -> None:
        self._sleep, self._how = sleep, how

    def build_model(self) -> nn.Module:
        return nn.Linear(LENGTH, 1)

    def lengths(self) -> Sequence[int]:
        return [LENGTH] * BATCH * STEPS

    def steps(self, _epoch: int) -> Sequence[Sequence[int]]:
        return [list(range(at, at + BATCH)) for at in range(0, BATCH * STEPS, BATCH)]

    def weight(self, sequences: Sequence[int]) -> float:
        return float(len(sequences))

    def collate(
        self, sequences: Sequence[int], rows: int, width: int, _slots: int | None
    ) -> Mapping[str, Tensor]:
        if self._how == "slow loader":
            time.sleep(self._sleep)
        return {"x": torch.ones(rows, width)}

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        if self._how == "crash":
            os._exit(7)
        if self._how == "hang":
            time.sleep(3600)
        if self._how == "oom":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        if self._how == "error":
            raise ValueError("this cannot work")
        if self._how != "slow loader":
            time.sleep(self._sleep)
        return model(batch["x"]).square().sum()

    def evaluate(self, _model: nn.Module, _batch_size: int) -> dict[str, float]:
        raise AssertionError("a trial does not evaluate")


def trial(plan: Plan, *, sleep: float = 0.0, how: str = "", workers: int = 0) -> Setup:
    """The factory: what is slow or broken is in the arguments, or follows from the plan."""
    if plan.optimizer == "adamw":
        sleep *= 2
    settings = LoopSettings(
        cuts=ladder([LENGTH] * BATCH * STEPS, BATCH, BATCH * LENGTH, padded=True)[:1],
        optimizer=OptimizerSettings(kind=plan.optimizer, learning_rate=1e-3),
        loader=LoaderSettings(num_workers=workers, prefetch_factor=2 if workers else None),
    )
    return Setup(ToyTask(sleep, how), settings, RuntimeSettings(num_threads=1))


def plan(**changes: Any) -> Plan:
    """A complete plan of nothing in particular."""
    values: dict[str, Any] = {
        "fits": True,
        "task": TaskSpec(factory="tuning_toy:trial", arguments={}),
        "workload": Workload(
            lengths=(LENGTH,) * 48,
            sequences=48,
            max_length=LENGTH,
            effective_batch_size=BATCH,
            epochs=2.0,
        ),
        "gpu": None,
        "precision": "fp32",
        "runtime": RuntimeSettings(),
        "packed": False,
        "attention": "sdpa",
        "batch_size": BATCH,
        "micro_batch_tokens": BATCH * LENGTH,
        "gradient_accumulation_steps": 1,
        "effective_batch_size": BATCH,
        "cuts": (1,),
        "gradient_checkpointing": "none",
        "compile": False,
        "compile_mode": "default",
        "optimizer": "adamw_fused",
        "num_workers": 0,
        "pin_memory": False,
        "persistent_workers": False,
        "prefetch_factor": None,
        "eval_batch_size": 8,
        "memory": None,
        "time": None,
    }
    return Plan(**(values | changes))


def candidate(settings: dict[str, Scalar] | None = None, **arguments: Any) -> TrialCandidate:
    """To run by the toy's factory; what of `settings` is in a plan goes into it."""
    settings = settings or {}
    known = {name: value for name, value in settings.items() if name in Plan.__dataclass_fields__}
    task = TaskSpec(factory="tuning_toy:trial", arguments=arguments)
    return TrialCandidate(settings=settings, plan=plan(**known), task=task)
