"""A job of the user's own (`trainfit.Job`) prepared, planned, trained and used.

Collation, the dealing of steps, their cuts, the planner's step and its question are derived from
the job's `data`, `model` and `loss`.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainfit.conf import Composed
from trainfit.core import codec
from trainfit.core.errors import BadInput, TrainfitWarning, user_line
from trainfit.core.files import prints_aside, text_facts, write_whole
from trainfit.core.plan_records import Plan, Workload
from trainfit.core.records import Event, HardwareProfile, Record
from trainfit.engine.loop_settings import LoopSettings, loop_settings
from trainfit.engine.setup import describe, why_indivisible
from trainfit.engine.step import autocast
from trainfit.jobs import exports, job_plan, registry, tuned_plans
from trainfit.jobs import run as jobs_run
from trainfit.jobs.models.building import birthplace, on_device
from trainfit.jobs.own_steps import (
    COUNT,
    BatchShape,
    check_number,
    check_optimizer,
    find_shape,
    summed,
)
from trainfit.jobs.registry import Job, is_greater_better
from trainfit.jobs.run import Prepared, Run
from trainfit.packing import deal_steps, ladder
from trainfit.planning.estimator.meta_device import on_meta, pretrained_by_config
from trainfit.planning.question import Pin, Question
from trainfit.planning.savers import saver_settings
from trainfit.runs import timeline
from trainfit.runs.opening import AttentionPath, DataSetup

_SAMPLES = 64
"""Samples of the training data whose bytes make its checksum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnResult(Record):
    """How a job of the user's own ended."""

    task: str
    run: str
    status: Literal["finished", "stopped"]
    steps: int
    seconds: float
    metrics: dict[str, float]
    """Metrics on the test data, or on the validation data where there is none."""
    metric: str
    peak_memory_gib: float | None
    events: tuple[Event, ...] = ()

    def __repr__(self) -> str:
        """Metrics for a terminal."""
        return text_facts(f"{self.task} {self.status}: {self.run}", self.metrics)


@dataclass(frozen=True, kw_only=True)
class PreparedJob(Prepared):
    """A job of the user's own with its data."""

    job: Job
    train: Any
    validation: Any
    test: Any

    @property
    def sequences(self) -> int:
        return len(self.train)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The job's metric, and the loss that evaluations give by default."""
        return tuple(dict.fromkeys((self.job.metric, "loss")))

    def configured(self, composed: Composed) -> PreparedJob:
        kind = type(self.job)
        job = kind(registry.own_config(kind, composed.config))
        return replace(self, composed=composed, job=job)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Length of each training sample; 1 for all where the dataset has no `lengths`."""
        found = getattr(self.train, "lengths", None)
        if found is None:
            return np.ones(len(self.train), dtype=np.int64)
        sizes = np.asarray(found() if callable(found) else found, dtype=np.int64)
        if sizes.shape != (len(self.train),) or sizes.min() < 1:
            raise BadInput(
                f"the training data has {len(self.train)} samples and {sizes.size} lengths",
                "give one length of at least 1 for each sample",
            )
        return sizes

    @cached_property
    def shape(self) -> BatchShape:
        """Shape of the job's batches."""
        return find_shape(self.job.collate, self.train, self.lengths.tolist())

    @cached_property
    def built(self) -> nn.Module:
        """Model without memory; an empty one where it cannot be built so."""
        with suppress(Exception), pretrained_by_config(), on_meta():
            return type(self.job)(self.job.config).model().train()
        return nn.Module()

    @cached_property
    def indivisible(self) -> str | None:
        """Reason why a step is never cut; None where it may be, or no model is built on meta."""
        return why_indivisible(self.job, self.built)

    # ── the planner's side ────────────────────────────────────────────────────────────────────

    @prints_aside()
    def question(self) -> Question:
        """Build the planner's question from the job."""
        config, job = self.config, self.job
        pins = job_plan.configured_pins(self.composed)
        pins.setdefault("gradient_checkpointing", Pin(value="none", origin="the job"))
        if config.optimization.compile == "auto":
            pins["compile"] = Pin(value=False, origin="the job")
        if self.indivisible:
            pins.setdefault("gradient_accumulation_steps", Pin(value=1, origin=self.indivisible))
        chosen = bool(self.own_optimizer)
        if chosen:
            origin = "the job has its own, and this is not used"
            pins["optimizer"] = Pin(value="adamw_fused", origin=origin)
        elif any(weight.is_complex() for weight in self.built.parameters()):
            origin = "fused kernels take no complex weights"
            pins.setdefault("optimizer", Pin(value="adamw", origin=origin))
        epochs = config.training.num_epochs
        batch = job_plan.effective_batch(self.composed)
        if config.training.max_steps is not None:
            epochs = config.training.max_steps * batch / len(self.train)
        return Question(
            task=self.composed.task,
            factory="trainfit.jobs.own_steps:own_step",
            arguments={
                "job": self.composed.task,
                "config": codec.encode(config),
                "batch": codec.encode(self.shape),
                "source": registry.source_digest(type(job)),
                "name": type(job).__name__,
            },
            layers=1,
            workload=Workload(
                lengths=tuple(self.lengths.tolist()),
                sequences=len(self.train),
                max_length=int(self.lengths.max()),
                effective_batch_size=batch,
                epochs=float(epochs),
            ),
            default_batch=batch,
            unpackable="the job collates its own batches",
            attention_known=False,
            causal=bool((self.lengths == self.lengths[0]).all()),
            pins=pins,
            indivisible=self.indivisible,
            savers=tuple(
                name
                for name in saver_settings(adapters=False)
                if not (chosen and "optimizer" in name)
            ),
        )

    def tuned_job(self, profile: HardwareProfile, ranks: int = 1) -> tuned_plans.JobQuestion:
        return tuned_plans.JobQuestion(
            composed=self.composed, question=self.question(), profile=profile, ranks=ranks
        )

    # ── the loop's side ───────────────────────────────────────────────────────────────────────

    def facts(self) -> dict[str, Any]:
        """Describe the data without any of it: counts and a checksum."""
        return {
            "checksum": self._checksum(),
            "samples": {"train": len(self.train), "validation": len(self.validation)},
        }

    def _checksum(self) -> str:
        digest = hashlib.sha256(self.lengths.tobytes())
        places = np.linspace(0, len(self.train) - 1, min(_SAMPLES, len(self.train))).astype(int)
        for at in dict.fromkeys(places.tolist()):
            leaves = self.shape.flatten(self.job.collate([self.train[at]]), 1)
            for name, leaf in leaves.items():
                if name != COUNT:
                    digest.update(leaf.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def counts(self, _fold: int) -> DataSetup:
        """Count the samples of each part."""
        test = 0 if self.test is self.validation else len(self.test)
        return DataSetup(train=len(self.train), validation=len(self.validation), test=test)

    def task(self, _fold: int, plan: Plan, device: torch.device) -> OwnTask:
        build = on_device(birthplace(plan, device), self.job.model)
        return OwnTask(self, build, plan.effective_batch_size)

    def settings(self, _fold: int, plan: Plan, device: torch.device, ranks: int) -> LoopSettings:
        most = int(self.lengths.max())
        cuts = ladder(
            self.lengths,
            plan.effective_batch_size,
            min(plan.batch_size * most, max(most, plan.micro_batch_tokens)),
            padded=True,
            ranks=ranks,
            seed=self.config.seed,
            at_least=plan.gradient_accumulation_steps,
            at_most=plan.gradient_accumulation_steps,
        )
        if self.indivisible:
            cuts = cuts[:1]
        return loop_settings(
            self.config,
            plan,
            cuts,
            device=device.type,
            metric=self.job.metric,
            greater_is_better=is_greater_better(type(self.job)),
            compile_scope="model",
        )

    def extras(self, run: Run) -> dict[str, Any]:
        """Return the first lines of the log, and the job's own optimizer where it has one."""
        del run
        alike = bool((self.lengths == self.lengths[0]).all())
        one = int(self.lengths.max()) == 1
        path = AttentionPath(kind="job")
        opening = {"opening": lambda it: replace(describe(it, path), alike=alike, samples=one)}
        return opening | self.own_optimizer

    @property
    def own_optimizer(self) -> dict[str, Any]:
        """The loop's argument for the job's own optimizer; empty where it has none."""
        own = type(self.job).optimizer is not Job.optimizer
        return {"make_optimizer": self._optimizer} if own else {}

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return check_optimizer(self.job.optimizer(model), self.job)

    def judge(self, run: Run, resume: bool) -> OwnResult:
        """Train, score the best weights on the test data and export them."""
        result = run.train(0, run.folder, "", resume=resume)
        metrics = result.metrics
        if result.status == "finished":
            model = run.best_model(self.job.model, run.folder)
            size = run.plan.effective_batch_size
            task = OwnTask(self, self.job.model, size, held_out=self.test)
            with torch.no_grad(), autocast(run.device.type, run.plan.precision):
                metrics = task.evaluate(model, run.plan.eval_batch_size)
            if odd := [name for name, value in metrics.items() if not math.isfinite(value)]:
                text = f"evaluate gives {metrics[odd[0]]} for {odd[0]}, which says nothing"
                warnings.warn(text, TrainfitWarning, stacklevel=2)
            if run.world.first:
                with run.show.busy("writing the model"), timeline.stage("export"):
                    self._export(model, run.folder / "export")
        return OwnResult(
            task=self.composed.task,
            run=result.run,
            status="finished" if result.status == "finished" else "stopped",
            steps=result.steps,
            seconds=result.seconds,
            metrics=metrics,
            metric=self.job.metric,
            peak_memory_gib=result.peak_memory_gib,
            events=result.events,
        )

    def _export(self, model: nn.Module, folder: Path) -> None:
        from safetensors.torch import save_model

        facts = {"job": self.composed.task, "config": codec.encode(self.config)}
        with exports.written_whole(folder) as unfinished:
            save_model(model, str(unfinished / "model.safetensors"))
            write_whole(unfinished / "job.json", codec.dumps(facts) + "\n")
            self.job.export(model, unfinished)


class OwnTask:
    """The loop's task, derived from a job."""

    memory_fix = "take smaller samples, checkpoint activations in the model or take a smaller one"
    changes_frozen = True
    """after_step, or the model itself, may keep averages in weights without gradients."""

    def __init__(
        self,
        prepared: PreparedJob,
        build: Callable[[], nn.Module],
        effective_batch: int,
        held_out: Any = None,
    ) -> None:
        """`held_out` is the data that `evaluate` scores; None: the validation data."""
        self._prepared, self._build, self._batch = prepared, build, effective_batch
        self._job, self._shape = prepared.job, prepared.shape
        self._held_out = prepared.validation if held_out is None else held_out
        self.indivisible = prepared.job.indivisible

    def build_model(self) -> nn.Module:
        """Return a new model."""
        return self._build()

    def lengths(self) -> Sequence[int]:
        """Return the length of each training sample."""
        lengths: Sequence[int] = self._prepared.lengths.tolist()
        return lengths

    def steps(self, epoch: int) -> list[list[int]]:
        """Deal the samples of an epoch into steps."""
        seed = self._prepared.config.seed
        dealt = deal_steps(self._prepared.lengths, self._batch, seed=seed, epoch=epoch)
        return [step.tolist() for step in dealt]

    def weight(self, sequences: Sequence[int]) -> float:
        """Count the samples of a step."""
        return 1.0 if self.indivisible else float(len(sequences))

    def collate(
        self, sequences: Sequence[int], _rows: int, _width: int, _slots: int | None
    ) -> dict[str, Tensor]:
        """Collate samples; a micro-batch without any gets a stand-in that counts nothing."""
        items = [self._prepared.train[at] for at in sequences] or [self._prepared.train[0]]
        return self._shape.flatten(self._job.collate(items), len(sequences))

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Sum the job's losses."""
        losses = self._job.loss(model, self._shape.restore(batch))
        return summed(losses, batch[COUNT], self.indivisible)

    def after_step(self, model: nn.Module, step: int) -> None:
        """Call the job's own after_step."""
        self._job.after_step(model, step)

    def evaluate(self, model: nn.Module, batch_size: int) -> dict[str, float]:
        """Return the job's figures."""
        found: Any = self._job.evaluate(model, self._batches(model, batch_size))
        if not isinstance(found, Mapping):
            raise BadInput(
                f"evaluate gives a {type(found).__name__}", "return a dict of names and numbers"
            )
        if self._job.metric not in found:
            raise BadInput(
                f"evaluate gives {', '.join(found) or 'nothing'}",
                f"give {self._job.metric} too, which is the metric",
            )
        return {name: check_number(name, value) for name, value in found.items()}

    def _batches(self, model: nn.Module, batch_size: int) -> Iterator[Any]:
        device = next(model.parameters()).device
        for start in range(0, len(self._held_out), batch_size):
            stop = min(start + batch_size, len(self._held_out))
            batch = self._job.collate([self._held_out[at] for at in range(start, stop)])
            leaves = self._shape.flatten(batch, stop - start)
            yield self._shape.restore({name: leaf.to(device) for name, leaf in leaves.items()})


train = prints_aside()(jobs_run.train)


@prints_aside()
def prepare(composed: Composed, *, nested: bool = True) -> PreparedJob:
    """Make the job and read its data."""
    del nested  # there are no folds
    kind = registry.load(composed.task)
    job = kind(registry.own_config(kind, composed.config))
    train, validation, test = (job.data(split) for split in ("train", "validation", "test"))
    test = validation if test is None else test
    for name, data in (("train", train), ("validation", validation), ("test", test)):
        if data is None or (hasattr(data, "__len__") and not len(data)):
            raise BadInput(f"data({name!r}) gives no samples", "give at least one")
        try:
            len(data), data[0]
        except (TypeError, KeyError, NotImplementedError) as error:
            if user_line(error):  # its own __getitem__ fails
                raise
            what = f"data({name!r}) gives a {type(data).__name__}, which has no len() or no [0]"
            raise BadInput(what, "give a list or a dataset with len() and [index]") from None
    return PreparedJob(composed=composed, job=job, train=train, validation=validation, test=test)
