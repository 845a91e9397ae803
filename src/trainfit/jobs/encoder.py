"""NLI and text classification: an encoder with a head, trained in a split or in folds.

    RUN/predictions.csv, scores.json, export/    on what was held out; the model
    RUN/results.json                             of the whole job

Under cross-validation each fold has these in a folder of its own, RUN/fold-1 and so on. A fold is
done when its scores are written, so a job that was killed continues where it was.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainfit.conf import GptConfig
from trainfit.core.files import write_whole
from trainfit.core.plan_records import Plan
from trainfit.core.records import HardwareProfile, RunResult
from trainfit.data.tokens import Dataset, IntArray, Tokens
from trainfit.engine.loop_settings import LoopSettings
from trainfit.jobs import classification, exports, job_plan, scores, tuned_plans
from trainfit.jobs.baselines import in_background
from trainfit.jobs.classification import ClassifierTask
from trainfit.jobs.configuration import Chosen, made_up
from trainfit.jobs.frozen import FrozenTask, SharedFeatures
from trainfit.jobs.job_times import load_of, most_evaluated
from trainfit.jobs.model_card import fold_card
from trainfit.jobs.models.backbone import check_length
from trainfit.jobs.models.building import birthplace, on_device
from trainfit.jobs.models.classifier import EncoderClassifier, build_classifier, try_building
from trainfit.jobs.models.classifier_settings import (
    ClassifierSettings,
    check_vocabulary,
    settings_from,
)
from trainfit.jobs.models.sources import kept_in_memory
from trainfit.jobs.predict import pool_within, predict_within
from trainfit.jobs.run import Prepared, Run
from trainfit.jobs.scores import FoldScores, JobResult
from trainfit.jobs.side_folds import side_folds
from trainfit.jobs.targets import OneClass, Outputs, target_of
from trainfit.jobs.text_baselines import Arrays
from trainfit.runs import timeline
from trainfit.runs.opening import DataSetup
from trainfit.runs.run_folder import Journal

if TYPE_CHECKING:
    from trainfit.jobs.configuration import EncoderConfig

_DROPOUTS = ("head_dropout", "attention_dropout", "feed_forward_dropout", "lora_dropout")
_SOME = 0.1
"""Dropout that stands for any other in a plan: memory and time are the same for all above 0."""
_ROOM = 2.0
"""Memory that a frozen encoder takes on its way through the data, as a multiple of its weights."""


@dataclass(frozen=True, kw_only=True)
class PreparedEncoder(Prepared):
    """A classification job: its data in folds, its model and its baselines."""

    chosen: Chosen
    datasets: tuple[Dataset, ...]
    """One, or one for each fold; `test` is what its score is taken on, and nothing else."""
    ids: tuple[Sequence[str], ...]
    """Identifiers of what is in each `test`."""
    baselines: Callable[[], Arrays]
    """Data of the baselines that the models must beat."""
    use: dict[str, Any] = field(default_factory=dict)
    """Facts that are needed to use the exported model."""
    features: SharedFeatures = field(default_factory=SharedFeatures)
    """Outputs of a frozen encoder, computed once for all folds and trials."""

    @property
    def config(self) -> EncoderConfig:
        config = self.composed.config
        assert not isinstance(config, GptConfig)
        return config

    @property
    def cross_validated(self) -> bool:
        return self.config.cv.folds is not None

    @property
    def metrics(self) -> tuple[str, ...]:
        return self.target(0).metrics

    def target(self, fold: int) -> OneClass:
        """Return what a fold's model learns: a class, labels or a number."""
        return target_of(self.datasets[fold].metadata)

    @property
    def folds(self) -> int:
        return len(self.datasets)

    @property
    def sequences(self) -> int:
        return len(self.datasets[0].train)

    def typical(self) -> PreparedEncoder:
        """Return the job with one dropout for all: trials that differ in it share a plan."""
        config: Any = self.config
        some = {name: _SOME for name in _DROPOUTS if getattr(config.model, name)}
        config = replace(config, model=replace(config.model, **some))
        return replace(self, composed=replace(self.composed, config=config))

    def tuned_job(self, profile: HardwareProfile, ranks: int = 1) -> tuned_plans.JobQuestion:
        """Return the question of the planner and the tuner, about the data's real lengths."""
        first, *others = (lengths.tolist() for lengths in self._lengths)
        question = job_plan.question(self.composed, first, folds=others)
        _check_model(self, try_building(ClassifierSettings(**question.arguments)))
        held_out = [(one.validation.lengths.sum(), one.test.lengths.sum()) for one in self.datasets]
        return tuned_plans.JobQuestion(
            composed=self.composed,
            question=question,
            profile=profile,
            ranks=ranks,
            load=load_of(self.config, question, *np.mean(held_out, axis=0)),
        )

    def facts(self) -> dict[str, Any]:
        """Describe the data for data.json without a text."""
        return {
            "checksum": scores.checksum(self.datasets),
            "folds": [dataset.metadata for dataset in self.datasets],
        }

    def counts(self, fold: int) -> DataSetup:
        """Count the rows of each part, and those of each class to train on."""
        data, by_class = self.datasets[fold], dict[str, int]()
        labels, names = data.train.truth, data.metadata["classes"]
        if data.train.tags is not None:
            labels = labels[:, 1]
        if labels.dtype.kind != "f":
            rows = labels.sum(0) if labels.ndim == 2 else np.bincount(labels, minlength=len(names))
            by_class = dict(zip(map(str, names), map(int, rows), strict=True))
        return DataSetup(
            train=len(data.train),
            validation=len(data.validation),
            test=len(data.test),
            classes=by_class,
            fold=fold + 1,
            folds=self.folds,
            synthetic=made_up(self.composed),
        )

    def task(self, fold: int, plan: Plan, device: torch.device) -> ClassifierTask:
        dataset, config = self.datasets[fold], self.config
        weights = dataset.metadata.get("class_weights") if config.data.class_weights else None
        most = most_evaluated(config.training)
        validation = dataset.validation
        if most is not None:
            chosen = np.random.default_rng(config.seed).permutation(len(validation))[:most]
            validation = validation.subset(np.sort(chosen))
        options: dict[str, Any] = {
            "effective_batch": plan.effective_batch_size,
            "seed": config.seed + fold,
            "target": self.target(fold),
            "class_weights": weights,
            "pad_id": self.chosen.pad_id,
            "longest": max(int(lengths.max()) for lengths in self._lengths),
        }
        build = partial(_build, self, plan, device)
        if plan.workload.method == "frozen" and dataset.train.tags is None:
            pool = partial(self._pool, fold, plan, device)
            return FrozenTask(build, dataset.train, validation, pool=pool, **options)
        return ClassifierTask(build, dataset.train, validation, **options)

    def _pool(
        self, fold: int, plan: Plan, device: torch.device, model: EncoderClassifier, tokens: Tokens
    ) -> Outputs:
        """Run the frozen encoder over tokens, once."""
        asked, chosen = self.config.model, self.chosen
        random = self.config.seed + fold if chosen.weights == "random" else None
        how = asked.pooling, asked.pool_tokens, plan.precision, plan.weights_dtype

        def compute(missing: Tokens) -> Outputs:
            return pool_within(
                model.to(device).eval(),
                missing,
                plan.eval_batch_size,
                pad_id=chosen.pad_id,
                precision=plan.precision,
            )

        return self.features.of(tokens, (asked.name, random, *how, plan.quantization), compute)

    def settings(self, fold: int, plan: Plan, device: torch.device, ranks: int) -> LoopSettings:
        target = self.target(fold)
        made = classification.encoder_settings(
            self.config, plan, self._lengths, device=device.type, ranks=ranks, target=target
        )
        return replace(made, seed=self.config.seed + fold)

    @property
    def _lengths(self) -> list[IntArray]:
        return [dataset.train.lengths for dataset in self.datasets]

    def extras(self, run: Run) -> dict[str, Any]:
        """Return the first lines of the log and the FLOP count."""
        ideal = None
        if run.plan.workload.method != "frozen":  # most of its work is done beforehand
            ideal = classification.ideal_seconds(self.config.model, run.plan)
        return {
            "ideal_seconds": ideal,
            "opening": lambda parts: classification.opening(parts, run.plan),
        }

    def judge(self, run: Run, resume: bool) -> JobResult:
        """Train and judge every fold, and summarise them."""
        finished, beaten = list[FoldScores](), dict[str, float]()
        wanted = run.world.first and self.config.baselines
        with (
            kept_in_memory(borrowed=run.device.type == "cuda"),
            in_background(self.baselines, cores=run.idle_cores if wanted else 0) as baselines,
            side_folds(run, len(self.datasets)) as beside,
        ):
            beside.consider(0.0, range(len(self.datasets)))
            for number in range(len(self.datasets)):
                began = time.monotonic()
                with timeline.stage("between folds", number + 1 if self.cross_validated else None):
                    found = beside.wait(number)
                    again = resume or found != "ours"
                    scored = None if found == "stopped" else self.fold(run, number, resume=again)
                    if scored is not None and found == "done":
                        self._tell(run, scored)
                if scored is None:
                    run.settle()
                    return self._end(run, finished, beaten)
                finished.append(scored)
                beside.consider(time.monotonic() - began, range(number + 1, len(self.datasets)))
            run.settle()
            if wanted:
                with run.show.busy("scoring the baselines"), timeline.stage("baselines"):
                    beaten = baselines()
        return self._end(run, finished, beaten)

    def fold(self, run: Run, number: int, *, resume: bool) -> FoldScores | None:
        """Train and judge a fold, unless it is done; None where someone asked to stop."""
        folder, title = run.folder, ""
        if self.cross_validated:
            folder = run.folder / f"fold-{number + 1}"
            title = self._title(number + 1)
        if (folder / "scores.json").is_file():
            return FoldScores.load(folder / "scores.json")
        result = run.train(number, folder, title, resume=resume and folder.is_dir())
        if result.status == "stopped":
            return None
        return self._judge(run, number, folder, result)

    @timeline.stage("judge")
    def _judge(self, run: Run, number: int, folder: Path, result: RunResult) -> FoldScores:
        """Score the best weights on the held-out test set, and export them."""
        dataset, plan = self.datasets[number], run.plan
        build = partial(_build, self, plan, run.device)
        model = run.best_model(build, folder, number, trained=EncoderClassifier)
        target = self.target(number)
        predict = partial(
            predict_within,
            model,
            pad_id=self.chosen.pad_id,
            precision=plan.precision,
            target=target,
        )
        found, size = predict(dataset.test, plan.eval_batch_size)
        thresholds: tuple[float, ...] = ()
        if dataset.test.labels.ndim == 2:
            thresholds = target.thresholds(
                dataset.validation.labels, predict(dataset.validation, size)[0]
            )
        judged = scores.judge(dataset, found, result, number + 1, thresholds)
        if run.world.first:
            run.later(partial(self._write, run, folder, model, judged, found, size))
            if _crowds(model, run):
                run.settle()
        return judged

    def _write(
        self,
        run: Run,
        folder: Path,
        model: EncoderClassifier,
        judged: FoldScores,
        found: Outputs,
        eval_batch_size: int,
        weights: Mapping[str, torch.Tensor] | None,
    ) -> None:
        """Write the model, the predictions and, last, the scores: then the fold is done."""
        dataset, facts = self.datasets[judged.fold - 1], self._export_facts(judged, eval_batch_size)
        exports.write_classifier(
            folder / "export",
            model,
            self.chosen.tokenizer,
            facts,
            weights=weights,
            base=self._base(run, folder),
            card=fold_card(
                self.composed, self.chosen, dataset, model, judged, facts, run.plan, run.profile
            ),
        )
        rows = scores.rows(self.ids[judged.fold - 1], dataset, found, judged.fold)
        write_whole(folder / "predictions.csv", scores.as_csv(rows), parents=False)
        judged.save(folder / "scores.json", parents=False)
        if self.cross_validated:
            if not run.beside:
                self._tell(run, judged)
            # The weights are in the export; five folds' optimizer states would fill a disk.
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)

    def _tell(self, run: Run, judged: FoldScores) -> None:
        metric = self.target(judged.fold - 1).metric
        value = getattr(judged.overall, metric)
        with closing(Journal(run.folder)) as journal:
            journal.row("fold", {"step": judged.fold, **judged.overall.scalars()})
            journal.line(f"{self._title(judged.fold)}: held-out {metric} {value:.4f}")

    def _title(self, fold: int) -> str:
        return f"fold {fold} of {len(self.datasets)}"

    def _base(self, run: Run, folder: Path) -> Path | None:
        """Export of another fold with the same frozen weights, where there is one."""
        if self.chosen.weights == "random" or not self.cross_validated:
            return None
        others = (run.folder / f"fold-{n + 1}" for n in range(len(self.datasets)))
        written = (fold for fold in others if (fold / "scores.json").is_file())
        return next((fold / "export" for fold in written if fold != folder), None)

    def _export_facts(self, judged: FoldScores, eval_batch_size: int) -> dict[str, Any]:
        thresholds = {"thresholds": list(judged.thresholds)} if judged.thresholds else {}
        return {
            "task": self.composed.task,
            **self.target(judged.fold - 1).facts(),
            **thresholds,
            "classes": self.datasets[0].metadata["classes"],
            "max_length": self.config.data.max_length,
            "pad_id": self.chosen.pad_id,
            "eval_batch_size": eval_batch_size,
            **self.use,
        }

    def _end(self, run: Run, folds: list[FoldScores], baselines: dict[str, float]) -> JobResult:
        """Summarise the job; it was stopped where folds are missing."""
        stopped = len(folds) < len(self.datasets)
        result = scores.summarise(
            run.folder,
            self.composed.task,
            folds,
            baselines,
            cross_validated=self.cross_validated,
            stopped=stopped,
            problem_type=self.target(0).problem_type,
        )
        if run.world.first and not stopped and self.cross_validated:
            scores.join_predictions(run.folder, len(self.datasets))
        return result


def _crowds(model: EncoderClassifier, run: Run) -> bool:
    """Tell if a model that is not in training leaves a GPU no room for that of the next fold."""
    parts = run.shared.parts
    if run.device.type != "cuda" or (parts is not None and parts.model is model):
        return False
    free, _ = torch.cuda.mem_get_info(run.device)
    free += torch.cuda.memory_reserved(run.device) - torch.cuda.memory_allocated(run.device)
    return free < _ROOM * sum(weight.nbytes for weight in model.parameters())


def _check_model(prepared: PreparedEncoder, model: EncoderClassifier) -> None:
    """Raise BadInput for tokens or lengths beyond the model's tables: a GPU would only stop."""
    sets = prepared.datasets
    parts = [part for data in sets for part in (data.train, data.validation, data.test)]
    check_vocabulary(prepared.config.model.name, parts)
    check_length(model.traits, max(int(part.lengths.max(initial=0)) for part in parts))


def _build(prepared: PreparedEncoder, plan: Plan, device: torch.device) -> EncoderClassifier:
    """Build the model; weights are drawn, or quantized, on the device that it trains on."""
    asked, weights = prepared.config.model, prepared.chosen.weights
    classes = len(prepared.datasets[0].metadata["classes"])
    decided = classification.model_decisions(plan, asked)
    settings = settings_from(asked, classes=classes, weights=weights, **decided)
    if weights == "random" or plan.quantization != "none":
        return on_device(birthplace(plan, device), partial(build_classifier, settings))()
    return build_classifier(settings)
