"""One run for every job: plan, begin or resume a folder, train, judge.

    RUN/config.json, plan.json, environment.json, data.json    what was asked, planned, and given
    RUN/hardware.json                                          the machine
    RUN/timeline.jsonl, times.json                             where the time went, and was to go
    RUN/checkpoints/, metrics.jsonl, train.log, result.json    the engine's
    RUN/evidence.json, receipt.json                            what ran, against what was asked
    RUN/export/, results.json                                  the model; how the job ended

Under cross-validation each fold has the engine's files in a folder of its own: RUN/fold-1, …
"""

from __future__ import annotations

import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from trainfit.conf import Composed
from trainfit.core import caches, codec
from trainfit.core.errors import BadInput, brief, reason
from trainfit.core.files import write_whole
from trainfit.core.plan_records import Plan, RuntimeSettings
from trainfit.core.records import HardwareProfile, RunResult, TrainTask
from trainfit.engine import checkpoint, loop
from trainfit.engine.distributed import World, first_says, gather, joined
from trainfit.engine.loop import Shared
from trainfit.engine.loop_settings import LoopSettings
from trainfit.engine.observers import Observer
from trainfit.engine.relaunch import find_launch, writing
from trainfit.engine.saved_state import load_model
from trainfit.jobs import job_plan, job_times, tuned_plans
from trainfit.jobs.registry import is_own, job_module, load, source_digest
from trainfit.measuring.receipt import save_receipt
from trainfit.planning.cpu_choice import dismiss, dismissed
from trainfit.runs import run_folder, timeline
from trainfit.runs.opening import DataSetup, RunSetup
from trainfit.runs.run_folder import Tracker
from trainfit.runtime import applied, start_gpu

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@dataclass(frozen=True, kw_only=True, slots=True)
class Show:
    """Functions that show a job's progress; by default nothing is shown."""

    watch: Callable[[str], Sequence[Observer]] = lambda _title: ()
    """Observers of a fold with that title."""
    track: Callable[[Path], Sequence[Tracker]] = lambda _run: ()
    """Trackers of a fold in that folder."""
    busy: Callable[[str], AbstractContextManager[Any]] = lambda _what: nullcontext()
    """A sign of life while something takes a while."""
    note: Callable[[str], None] = lambda _text: None
    """A line to read before the training begins."""
    prepare: Callable[[], None] = lambda: None
    """Imports of what follows the training, in the background of it."""


@dataclass(frozen=True, kw_only=True)
class Prepared(ABC):
    """A job with its data, ready to be planned and trained: the protocol of all jobs."""

    composed: Composed

    @property
    def config(self) -> Any:
        """The composed configuration."""
        return self.composed.config

    @property
    def folds(self) -> int:
        """Number of folds; 1 without cross-validation."""
        return 1

    @property
    @abstractmethod
    def sequences(self) -> int:
        """Number of training sequences of the first fold."""

    @property
    @abstractmethod
    def metrics(self) -> tuple[str, ...]:
        """Metrics that an evaluation gives."""

    def configured(self, composed: Composed) -> Self:
        """Return the job on the same data with another configuration."""
        return replace(self, composed=composed)

    def typical(self) -> Self:
        """Return the job with settings that change neither memory nor time at usual values."""
        return self

    @abstractmethod
    def tuned_job(self, profile: HardwareProfile, ranks: int = 1) -> tuned_plans.JobQuestion:
        """Return the planner's question with the machine that it is about."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Describe the data for data.json, without any of it: counts and a `checksum`."""

    def counts(self, fold: int) -> DataSetup | None:
        """Count the rows of a fold for the first lines; None where the job says it otherwise."""
        del fold
        return None

    def files(self) -> Mapping[str, Path]:
        """Name files to copy into the run folder."""
        return {}

    @abstractmethod
    def task(self, fold: int, plan: Plan, device: torch.device) -> TrainTask:
        """Return the model, data and loss for the loop."""

    @abstractmethod
    def settings(self, fold: int, plan: Plan, device: torch.device, ranks: int) -> LoopSettings:
        """Return the settings of the loop."""

    @abstractmethod
    def extras(self, run: Run) -> dict[str, Any]:
        """Return further arguments of the loop: lines of the log, the FLOP count, an optimizer."""

    @abstractmethod
    def judge(self, run: Run, resume: bool) -> Any:
        """Train by `run.train`, score, export, and return the job's result record."""


@dataclass(kw_only=True)
class Run:
    """A running job in this process."""

    prepared: Prepared
    plan: Plan
    folder: Path
    profile: HardwareProfile
    world: World
    device: torch.device
    show: Show
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of LoopSettings that a comparison changes."""
    shared: Shared = field(default_factory=Shared)
    """Model, optimizer and code that all folds train with."""
    beside: bool = False
    """Another process leads the run: this one trains some of its folds."""
    export_pool: ThreadPoolExecutor
    _written: list[Future[None]] = field(default_factory=list)

    @property
    def idle_cores(self) -> int:
        """Cores that training leaves idle; on a CPU, further folds may still take some of them."""
        cores = self.profile.cpu.cores
        threads = 1 if self.device.type == "cuda" else self.plan.runtime.num_threads or cores
        return cores - self.world.size * (threads + self.plan.num_workers)

    @cached_property
    def _extras(self) -> dict[str, Any]:
        return self.prepared.extras(self)  # counting the FLOPs builds a model

    def settings(self, fold: int) -> LoopSettings:
        ranks = self.world.size
        return replace(self.prepared.settings(fold, self.plan, self.device, ranks), **self.changes)

    def train(self, fold: int, folder: Path, title: str, *, resume: bool) -> RunResult:
        """Train a fold from its beginning or from its newest checkpoint, and write its receipt."""
        extras = dict(self._extras)
        opening = extras.pop("opening")
        if self.device.type == "cuda" and not self.plan.compile:  # the compiler is busy with Python
            self.export_pool.submit(self.show.prepare)
        result = loop.train(
            self.prepared.task(fold, self.plan, self.device),
            self.settings(fold),
            folder,
            resume=resume,
            shared=self.shared,
            observers=self.show.watch(title),
            trackers=self.show.track(folder) if self.world.first else (),
            opening=lambda parts: self._named(opening(parts), fold),
            **extras,
        )
        if self.world.first:
            clip = self.prepared.config.training.max_grad_norm or None
            own = "make_optimizer" in extras
            with timeline.stage("receipt"):
                save_receipt(folder, self.plan, max_grad_norm=clip, own_optimizer=own)
        return result

    def _named(self, setup: RunSetup, fold: int) -> RunSetup:
        """Add the names of model and method, the tuned speed, and the counts of the data."""
        model = getattr(self.prepared.config, "model", None)
        return replace(
            setup,
            model=self.prepared.composed.task.rpartition(":")[2] if model is None else model.name,
            method=None if model is None else self.plan.workload.method,
            tuned_samples_per_second=tuned_plans.tuned_rate(self.plan),
            data=self.prepared.counts(fold),
        )

    @timeline.stage("judge")
    def best_model(
        self,
        build: Callable[[], ModuleT],
        folder: Path,
        fold: int = 0,
        *,
        trained: type[ModuleT] | None = None,
    ) -> ModuleT:
        """Return the model with the weights of its best evaluation, from memory or the checkpoint.

        `build` makes it as the engine did, unless the model in training is of the class `trained`.
        """
        parts, best = self.shared.whole(), self.shared.best
        if parts and trained and isinstance(parts.model, trained):
            model = parts.model  # the device may have no room for another
        else:
            # With the engine's seed: weights that are not trained are not saved. It is moved before
            # it is written to, since the next folds are built from the same memory of the host.
            with applied(RuntimeSettings(seed=self.settings(fold).seed)):
                model = build().to(self.device)
        if best is None:
            checkpoint.load_weights(folder, model, best=True)
        else:
            load_model(model, best)
        return model.eval()

    def later(self, work: Callable[[Mapping[str, Tensor] | None], None]) -> None:
        """End a fold by `work`, on a GPU beside the next fold.

        It gets the best weights, and must not read those of the model in training. Without best
        weights in memory it gets None, and the model is still as it was judged.
        """
        best = self.shared.best
        if best is None or self.device.type != "cuda":
            with self.show.busy("writing the model"), timeline.stage("export"):
                work(best)
        else:
            self.shared.best_host = {}  # the next fold takes other memory
            self.shared.settle = self.settle
            self._written.append(self.export_pool.submit(work, best))
            self.export_pool.submit(self.show.prepare)

    def settle(self) -> None:
        """Wait until everything is written, and raise the first error."""
        if self._written:
            with self.show.busy("writing the model"), timeline.stage("export"):
                while self._written:
                    self._written.pop(0).result()


@timeline.recording()
def train(composed: Composed, show: Show | None = None, *, resume: Path | None = None) -> Any:
    """Train, score and export a job, in a new folder or in that of a run to resume.

    Returns the job's result record.
    """
    show = show or Show()
    with show.busy("looking at the hardware"):
        profile = job_plan.machine(composed)
    with joined(profile.device) as (world, device), dismissed():
        show = show if world.first else Show()
        if device.type == "cuda":
            start_gpu(device, compilers=composed.config.optimization.compile is not False)
        if profile.gpu is None:
            job_plan.plan_ahead(composed, trains=True)
        with show.busy("preparing the data"), timeline.stage("data"):
            prepared: Prepared = job_module(composed.task).prepare(composed)
        with show.busy("planning"), timeline.stage("plan"):
            plan, folder = begin(prepared, profile, world, resume)
        if prepared.folds == 1:  # else it may train some of them
            dismiss()
        if world.first:
            timeline.write_to(folder)
        if resume is None:
            question = prepared.tuned_job(profile, plan.ranks).question
            for text in job_times.notes(prepared.composed, plan, question):
                show.note(text)
        with (
            writing(folder, world),
            opened(prepared, plan, profile, folder, show=show) as run,
            timeline.stage("end"),
        ):
            result = prepared.judge(run, resume is not None)
            if world.first and result.status == "finished":
                result.save(folder / "results.json", parents=False)
                job_times.learn(folder)
            return result


@contextmanager
def opened(
    prepared: Prepared, plan: Plan, profile: HardwareProfile, folder: Path, **others: Any
) -> Iterator[Run]:
    """Open a run that is planned: ranks join, unless they have, and torch's switches are set."""
    with (
        joined(profile.device) as (world, device),
        applied(job_plan.runtime_settings(prepared.config, plan)),
        ThreadPoolExecutor(1, "export") as pool,  # no write goes on once the folder is free
    ):
        yield Run(
            prepared=prepared,
            plan=plan,
            folder=folder,
            profile=profile,
            world=world,
            device=device,
            export_pool=pool,
            **others,
        )


# ── the plan and the folder ───────────────────────────────────────────────────────────────────


def begin(
    prepared: Prepared, profile: HardwareProfile, world: World, resume: Path | None
) -> tuple[Plan, Path]:
    """Return the plan and the run folder: the first rank decides, and the others do the same."""
    check_ranks_agree(world, prepared)
    said, launch, config = "", find_launch(world), prepared.composed.written()
    root = Path(prepared.config.runs_dir)
    if world.first:
        resume = resume or launch.find_run(root, config)
        if resume is None:
            if prepared.config.tune == "force":
                tuned_plans.tune(prepared.tuned_job(profile, world.size))
            plan = tuned_plans.make_plan(prepared, profile, world.size, machines=world.machines)
            name = prepared.composed.task.rpartition(":")[2]
            folder = run_folder.create(root, name, config=config, plan=plan)
            write_whole(folder / "data.json", json.dumps(prepared.facts(), indent=2) + "\n")
            for target, source in prepared.files().items():
                shutil.copyfile(source, folder / target)
            profile.save(folder / "hardware.json")
            launch.note(folder)
        else:
            run_folder.identity(resume)  # a damaged one would end the run at its first checkpoint
            check_same_data(resume, prepared)
            plan, folder = Plan.load(resume / "plan.json"), resume
        said = json.dumps([plan.to_json(indent=None), str(folder)])
    text, name = json.loads(first_says(world, said))
    return Plan.from_json(text), Path(name)


# ── agreement of ranks, and of a run with its data: others would train a mixture, or wait ─────

_DIGESTS = "the data", "the code"  # compared by digests, which tell a reader nothing


def check_ranks_agree(world: World, prepared: Any) -> None:
    """Raise BadInput on every rank where their prepared jobs differ."""
    if world.size == 1:
        return
    task: str = prepared.composed.task
    values = {key: _value(value) for key, value in prepared.composed.values().items()}
    code = source_digest(load(task)) if is_own(task) else ""
    digests = prepared.facts()["checksum"], [caches.sources(), code, caches.libraries()]
    own = values | {"task": task} | dict(zip(_DIGESTS, digests, strict=True))
    said = gather(world, json.dumps(own, sort_keys=True))
    if problem := difference([json.loads(text) for text in said]):
        raise BadInput(problem, "start the same command, data and version on every machine")


def difference(said: Sequence[Mapping[str, Any]]) -> str | None:
    """Name the first thing in which a rank differs from the first one; None where all agree."""
    for rank, other in enumerate(said):
        for name in sorted({*said[0], *other}):
            if (first := said[0].get(name)) == (here := other.get(name)):
                continue
            if name in _DIGESTS:
                return f"{name} of rank {rank} is not that of rank 0"
            shown = (brief(json.dumps(value)) for value in (first, here))
            return "ranks differ in {}: {} on rank 0, {} on rank {}".format(name, *shown, rank)
    return None


def _value(value: Any) -> Any:
    """Value of a key; a path that exists may differ between machines, since data has a checksum."""
    if isinstance(value, str) and os.sep in value and Path(value).exists():
        return "a path"
    return codec.encode(value)


def check_same_data(run: Path, prepared: Any) -> None:
    """Raise BadInput for other data than a run was started with."""
    try:
        before = codec.read_object(run / "data.json")["checksum"]
    except (OSError, ValueError, KeyError) as error:
        what = f"cannot read data.json in {run} ({reason(error)})"
        raise BadInput(what, "give a run's folder") from None
    if before != prepared.facts()["checksum"]:
        raise BadInput(f"the data is not what {run} was trained on", "start a new run with it")
