"""A classification job from its data to its scores: plan, train each fold, judge what was held out.

    RUN/config.json, plan.json, environment.json, data.json    what was asked, planned, and given
    RUN/checkpoints/, metrics.jsonl, train.log, result.json    the engine's
    RUN/evidence.json, receipt.json                            what ran, against what was asked
    RUN/predictions.csv, scores.json, export/                  on what was held out; the model
    RUN/results.json                                           of the whole job

Under cross-validation each fold has these in a folder of its own, RUN/fold-1 and so on. A fold is
done when its scores are written, so a job that was killed goes on where it was.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainfit.core.errors import BadInput
from trainfit.core.files import write_whole
from trainfit.core.plan_records import Plan, RuntimeSettings
from trainfit.core.records import HardwareProfile, RunResult
from trainfit.data.tokens import Tokens
from trainfit.engine import checkpoint, loop
from trainfit.engine.distributed import World, joined
from trainfit.engine.observers import Observer
from trainfit.engine.relaunch import writing
from trainfit.engine.saved_state import find_nonfinite
from trainfit.engine.settings import LoopSettings
from trainfit.jobs import exports, flops, job_plan, scores
from trainfit.jobs.classification import ClassifierTask, Probabilities
from trainfit.jobs.encoder_setup import Prepared, begin, loop_settings, model_decisions, opening
from trainfit.jobs.frozen import FrozenTask, SharedFeatures
from trainfit.jobs.models.classifier import EncoderClassifier
from trainfit.jobs.placement import birthplace, on_device
from trainfit.jobs.predict import pool_within, predict_within
from trainfit.jobs.scores import FoldScores, JobResult
from trainfit.measuring.receipt import save_receipt
from trainfit.runs.event_log import Journal, Tracker
from trainfit.runtime import applied


@dataclass(frozen=True, kw_only=True, slots=True)
class Show:
    """How a job is watched; nobody does by default."""

    watch: Callable[[str], Sequence[Observer]] = lambda _title: ()
    """Observers of a fold with that title."""
    track: Callable[[Path], Sequence[Tracker]] = lambda _run: ()
    """Trackers of a fold in that folder."""
    busy: Callable[[str], AbstractContextManager[Any]] = lambda _what: nullcontext()
    """A sign of life while something takes a while."""


def run(
    prepared: Prepared,
    profile: HardwareProfile,
    show: Show | None = None,
    *,
    resume: Path | None = None,
) -> JobResult:
    """Train and judge every fold, in a new folder or in the one of a run that was left."""
    show = show or Show()
    with joined(profile.device) as (world, place):
        with show.busy("planning"):
            plan, folder = begin(prepared, profile, world, resume)
        if not world.first:
            show = Show()
        with writing(folder, world), applied(job_plan.runtime_settings(prepared.config, plan)):
            job = _Job(prepared, plan, folder, world, place, show)
            done = [job.fold(number, resume is not None) for number in range(job.folds)]
            finished = [fold for fold in done if isinstance(fold, FoldScores)]
            return job.end(finished, stopped=len(finished) < job.folds)


@contextmanager
def comparing(
    prepared: Prepared,
    plan: Plan,
    profile: HardwareProfile,
    *,
    metric: str,
    greater_is_better: bool = True,
    features: SharedFeatures | None = None,
) -> Iterator[Callable[[int, Path, Sequence[Observer]], RunResult]]:
    """A function that trains a fold for its validation score: no checkpoint, no test, no export."""
    with (
        joined(profile.device) as (world, place),
        applied(job_plan.runtime_settings(prepared.config, plan)),
    ):
        changes = {
            "metric": metric,
            "greater_is_better": greater_is_better,
            "keep_checkpoints": 0,
            "profile_step": False,
        }

        def train(number: int, folder: Path, observers: Sequence[Observer]) -> RunResult:
            show = Show(watch=lambda _title: observers)
            job = _Job(prepared, plan, folder, world, place, show, changes, features)
            return job.train(number, folder, "", resume=False)

        yield train


def _build(prepared: Prepared, plan: Plan, device: torch.device) -> EncoderClassifier:
    """The model, with weights that are numbers: a damaged file would spoil every step."""
    asked, weights = prepared.config.model, prepared.chosen.weights
    build = partial(prepared.build, asked, weights=weights, **model_decisions(plan))
    if weights == "random":
        return on_device(birthplace(plan, device), build)()
    model: EncoderClassifier = build()
    if name := find_nonfinite(model):
        raise BadInput(
            f"the weight {name} of {asked.name} is not finite", "get another copy of the model"
        )
    return model


class _Job:
    """A job under way in this process."""

    def __init__(
        self,
        prepared: Prepared,
        plan: Plan,
        run: Path,
        world: World,
        device: torch.device,
        show: Show,
        changes: Mapping[str, Any] | None = None,
        features: SharedFeatures | None = None,
    ) -> None:
        """`changes` are fields of LoopSettings; `features` are shared with other jobs."""
        self._prepared, self._plan, self._run = prepared, plan, run
        self._world, self._device, self._show = world, device, show
        self._changes = dict(changes or {})
        self._features = features or SharedFeatures()
        self._stopped = False
        self.folds = len(prepared.datasets)

    def fold(self, number: int, resume: bool) -> FoldScores | None:
        """Train and judge a fold, unless it is done; None where someone asked to stop."""
        if self._stopped:
            return None
        folder, title = self._run, ""
        if self._prepared.cross_validated:
            folder, title = self._run / f"fold-{number + 1}", f"fold {number + 1} of {self.folds}"
        if (folder / "scores.json").is_file():
            return FoldScores.load(folder / "scores.json")
        result = self.train(number, folder, title, resume=resume and folder.is_dir())
        if result.status == "stopped":
            self._stopped = True
            return None
        return self._judge(number, folder, title, result)

    def train(self, number: int, folder: Path, title: str, *, resume: bool) -> RunResult:
        """Train a fold, from its beginning or from its newest checkpoint."""
        frozen = self._plan.workload.method == "frozen"  # most of its work is done beforehand
        result = loop.train(
            self._task(number),
            self._settings(number),
            folder,
            resume=resume,
            observers=self._show.watch(title),
            trackers=self._show.track(folder) if self._world.first else (),
            ideal_seconds=None if frozen else flops.ideal_seconds(self._plan),
            opening=lambda parts: opening(parts, self._plan),
        )
        if self._world.first:
            clip = self._prepared.config.training.max_grad_norm
            save_receipt(folder, self._plan, max_grad_norm=clip)
        return result

    def _settings(self, number: int) -> LoopSettings:
        lengths = self._prepared.datasets[number].train.lengths
        config = self._prepared.config
        settings = loop_settings(
            config,
            self._plan,
            lengths,
            device=self._device.type,
            ranks=self._world.size,
            seed=config.seed + number,
        )
        return replace(settings, **self._changes)

    def _task(self, number: int) -> ClassifierTask:
        prepared, dataset = self._prepared, self._prepared.datasets[number]
        config = prepared.config
        weights = dataset.metadata["class_weights"] if config.data.class_weights else None
        iterations = config.training.eval_iters
        validation = dataset.validation
        if iterations is not None:
            most = iterations * self._plan.eval_batch_size
            chosen = np.random.default_rng(config.seed).permutation(len(validation))[:most]
            validation = validation.subset(np.sort(chosen))
        options: dict[str, Any] = {
            "effective_batch": self._plan.effective_batch_size,
            "seed": config.seed + number,
            "class_weights": weights,
            "pad_id": prepared.chosen.pad_id,
        }
        build = partial(_build, prepared, self._plan, self._device)
        if self._plan.workload.method == "frozen":
            pool = partial(self._pool, number)
            return FrozenTask(build, dataset.train, validation, pool=pool, **options)
        return ClassifierTask(build, dataset.train, validation, **options)

    def _pool(self, number: int, model: EncoderClassifier, tokens: Tokens) -> Probabilities:
        asked, plan, chosen = self._prepared.config.model, self._plan, self._prepared.chosen
        random = self._settings(number).seed if chosen.weights == "random" else None
        how = (asked.pooling, asked.pool_tokens, plan.precision, plan.weights_dtype)

        def compute(missing: Tokens) -> Probabilities:
            return pool_within(
                model.to(self._device).eval(),
                missing,
                plan.eval_batch_size,
                pad_id=chosen.pad_id,
                precision=plan.precision,
            )

        with self._show.busy("running the frozen encoder, once"):
            return self._features.of(tokens, (asked.name, random, *how), compute)

    def _judge(self, number: int, folder: Path, title: str, result: RunResult) -> FoldScores:
        """Score the best weights on what was held out, and export them."""
        dataset = self._prepared.datasets[number]
        with applied(RuntimeSettings(seed=self._settings(number).seed)):
            # As the engine had it built: frozen weights are not saved.
            model = _build(self._prepared, self._plan, self._device)
        checkpoint.load_weights(folder, model, best=True)
        model.to(self._device).eval()
        found, size = predict_within(
            model,
            dataset.test,
            self._plan.eval_batch_size,
            pad_id=self._prepared.chosen.pad_id,
            precision=self._plan.precision,
        )
        judged = scores.judge(
            dataset, found, result, number + 1, criteria=dataset.metadata.get("criteria")
        )
        if self._world.first:
            with self._show.busy("writing the model"):
                exports.write_classifier(
                    folder / "export",
                    model,
                    self._prepared.chosen.tokenizer,
                    self._facts(size),
                )
            rows = scores.rows(self._prepared.ids[number], dataset, found, number + 1)
            write_whole(folder / "predictions.csv", scores.as_csv(rows), parents=False)
            judged.save(folder / "scores.json", parents=False)
            if self._prepared.cross_validated:
                self._note(title, judged)
                # The weights are in the export; five folds' optimizer states would fill a disk.
                shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return judged

    def _facts(self, eval_batch_size: int) -> dict[str, Any]:
        return {
            "task": self._prepared.composed.task,
            "classes": self._prepared.datasets[0].metadata["classes"],
            "max_length": self._prepared.config.data.max_length,
            "pad_id": self._prepared.chosen.pad_id,
            "eval_batch_size": eval_batch_size,
            **self._prepared.facts,
        }

    def _note(self, title: str, judged: FoldScores) -> None:
        """The fold's scores in the files of the whole job."""
        with closing(Journal(self._run)) as journal:
            journal.row("fold", {"step": judged.fold, **judged.overall.scalars()})
            journal.line(f"{title}: held-out f1 {judged.overall.f1:.4f}")

    def end(self, folds: Sequence[FoldScores], *, stopped: bool) -> JobResult:
        """The results of the whole job, written down once it is finished."""
        prepared = self._prepared
        baselines: Mapping[str, float] = {}
        if not stopped and self._world.first and prepared.config.baselines:
            with self._show.busy("scoring the baselines"):
                each = [prepared.baselines(number) for number in range(self.folds)]
            baselines = {name: float(np.mean([b[name] for b in each])) for name in each[0]}
        result = scores.summarise(
            self._run,
            prepared.composed.task,
            folds,
            dict(baselines),
            cross_validated=prepared.cross_validated,
            stopped=stopped,
        )
        if self._world.first and not stopped:
            if prepared.cross_validated:
                scores.join_predictions(self._run, self.folds)
            result.save(self._run / "results.json", parents=False)
        return result
