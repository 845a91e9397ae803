"""A made-up task in which each optimization saves a known sleep, and a machine to climb it on."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from tuning_toy import plan as toy_plan

from trainfit.core.plan_records import Plan, Reason, RuntimeSettings, TaskSpec, Workload
from trainfit.core.records import CompileSupport, HardwareProfile
from trainfit.engine.loop_settings import LoopSettings, OptimizerSettings
from trainfit.hardware import as_if
from trainfit.hardware.catalogue import find
from trainfit.packing import ladder
from trainfit.tuning.trial import Setup

BATCH, STEPS = 4, 10
LENGTHS = [3 + (7 * at) % 13 for at in range(BATCH * STEPS)]
LONGEST = max(LENGTHS)
FAST = 0.004
COSTS = {"tf32": 0.016, "precision": 0.012, "optimizer": 0.008}
"""Seconds that a step takes longer without it."""


class SleepyTask:
    def __init__(self, sleep: float, crash: bool) -> None:
        self._sleep, self._crash = sleep, crash

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def lengths(self) -> Sequence[int]:
        return LENGTHS

    def steps(self, _epoch: int) -> Sequence[Sequence[int]]:
        return [list(range(at, at + BATCH)) for at in range(0, len(LENGTHS), BATCH)]

    def weight(self, sequences: Sequence[int]) -> float:
        return float(len(sequences))

    def collate(
        self, sequences: Sequence[int], rows: int, width: int, slots: int | None
    ) -> Mapping[str, Tensor]:
        assert slots is None
        assert width >= max(LENGTHS[at] for at in sequences)
        return {"x": torch.ones(rows, 1), "share": torch.tensor(len(sequences) / BATCH)}

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        if self._crash:
            os._exit(7)
        time.sleep(self._sleep * float(batch["share"]))
        return model(batch["x"]).square().sum()

    def evaluate(self, _model: nn.Module, _batch_size: int) -> dict[str, float]:
        raise AssertionError("a trial does not evaluate")


def seconds(plan: Plan) -> float:
    """Of a step by this plan: the reference that the ladder knows nothing of."""
    slow = {
        "tf32": not plan.runtime.tf32,
        "precision": plan.precision == "fp32",
        "optimizer": plan.optimizer == "adamw",
    }
    return FAST + sum(cost for name, cost in COSTS.items() if slow[name])


def trial(plan: Plan, *, crash_in: str = "") -> Setup:
    """The factory. It computes in fp32 whatever the plan says: only the sleep differs."""
    settings = LoopSettings(
        cuts=ladder(LENGTHS, BATCH, BATCH * LONGEST, padded=True),
        optimizer=OptimizerSettings(learning_rate=1e-3),
    )
    crash = bool(crash_in) and plan.precision == crash_in
    return Setup(SleepyTask(seconds(plan), crash), settings, RuntimeSettings(num_threads=1))


SPEC = TaskSpec(factory="ladder_toy:trial", arguments={})


def machine(*, compiler: bool = False) -> HardwareProfile:
    found = as_if(find("a100"))
    none = CompileSupport(c_compiler=None, python_headers=True, triton="3")
    return replace(found, compile=replace(none, c_compiler="gcc") if compiler else none)


def plan(**changes: Any) -> Plan:
    """The best, on a GPU: half precision, TF32 and the fused AdamW, padded."""
    values: dict[str, Any] = {
        "task": SPEC,
        "workload": Workload(
            lengths=tuple(LENGTHS),
            sequences=1000 * BATCH,
            max_length=LONGEST,
            effective_batch_size=BATCH,
            epochs=2.0,
        ),
        "gpu": "a100",
        "precision": "bf16",
        "runtime": RuntimeSettings(tf32=True),
        "batch_size": BATCH,
        "micro_batch_tokens": BATCH * LONGEST,
        "effective_batch_size": BATCH,
        "reasons": (Reason(setting="packed", value=False, why="nobody packs a toy"),),
    }
    return toy_plan(**(values | changes))
