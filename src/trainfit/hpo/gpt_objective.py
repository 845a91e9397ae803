"""Pretraining as a study sees it: one run a trial, by the loss on the validation tokens.

There is no test besides: the final model's score is its own loss there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainfit.conf import Composed
from trainfit.core.plan_records import Plan
from trainfit.core.records import RunResult
from trainfit.engine.observers import Observer
from trainfit.hpo.objective import room_on
from trainfit.jobs import gpt_run as job
from trainfit.jobs import job_plan
from trainfit.jobs.encoder_run import Show
from trainfit.jobs.gpt_setup import Prepared
from trainfit.jobs.pretraining import METRIC, count_blocks


class GptObjective:
    """A pretraining job."""

    metrics: tuple[str, ...] = (METRIC,)
    folds = 1

    def __init__(
        self, composed: Composed, _metric: str, *, share: float = 1.0, show: Show | None = None
    ) -> None:
        """`composed` is the configuration that the trials vary; `show` is for the final model."""
        self._base, self._share, self._show = composed, share, show
        self._profile = job_plan.machine(composed)

    @property
    def sequences(self) -> int:
        """Blocks to train on."""
        prepared = self._prepare(self._base)
        return count_blocks(prepared.data.train, prepared.config.data.max_length, "training")

    def plan(self, composed: Composed) -> Plan:
        """Worked out once for settings that take the same memory, and kept on disk."""
        room = room_on(self._profile, self._share)
        return job.make_plan(self._prepare(composed), self._profile, memory_gib=room)

    def train(
        self,
        composed: Composed,
        plan: Plan,
        _fold: int,
        folder: Path,
        observers: Sequence[Observer],
    ) -> RunResult:
        """Train for the validation loss."""
        return job.compare(self._prepare(composed), plan, self._profile, folder, observers)

    def final(self, composed: Composed) -> tuple[str, dict[str, float]]:
        """The model to keep, and its loss on the validation tokens."""
        result = job.train(composed, self._show)
        if result.status == "stopped" or result.val_loss is None:
            return result.run, {}
        return result.run, {METRIC: result.val_loss}

    def _prepare(self, composed: Composed) -> Prepared:
        """The tokens are mapped from files: to prepare them again costs next to nothing."""
        return job.prepare(composed)
