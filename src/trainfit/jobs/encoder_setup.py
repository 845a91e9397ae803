"""What a job brings, its plan, and the folder it begins in or goes on in."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainfit.conf import Composed, GptConfig, NliConfig, TextclassConfig
from trainfit.core import codec
from trainfit.core.errors import BadInput, reason
from trainfit.core.files import write_whole
from trainfit.core.plan_records import Plan
from trainfit.core.records import HardwareProfile
from trainfit.data.tokens import Dataset
from trainfit.engine.distributed import World, first_says
from trainfit.engine.recovery import Parts
from trainfit.engine.relaunch import find_launch
from trainfit.engine.settings import (
    LoaderSettings,
    LoopSettings,
    OptimizerSettings,
    ScheduleSettings,
)
from trainfit.engine.setup import describe
from trainfit.jobs import job_plan, scores, tuned_plans
from trainfit.jobs.configuration import Chosen
from trainfit.jobs.frozen import Head
from trainfit.jobs.models.backbone import Traits, packed_obstacle
from trainfit.jobs.models.classifier import EncoderClassifier
from trainfit.packing import PackedCut, ladder
from trainfit.runs import run_folder
from trainfit.runs.opening import AttentionKind, AttentionPath, RunSetup

if TYPE_CHECKING:
    from trainfit.jobs.configuration import EncoderConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What a job brings: its data in folds, its model, and what it is compared with."""

    composed: Composed
    chosen: Chosen
    datasets: tuple[Dataset, ...]
    """One, or one for each fold; `test` is what its score is taken on, and nothing else."""
    ids: tuple[Sequence[str], ...]
    """Of what is in each `test`."""
    build: Callable[..., EncoderClassifier]
    """The model of the configuration, with what the plan decided."""
    baselines: Callable[[int], dict[str, float]]
    """The F1 of what the model of a fold must beat."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else is needed to use the exported model."""

    @property
    def config(self) -> EncoderConfig:
        """The configuration of the job."""
        config = self.composed.config
        assert not isinstance(config, GptConfig)
        return config

    @property
    def cross_validated(self) -> bool:
        """Whether there are folds."""
        return self.config.cv.folds is not None


def tuned_job(prepared: Prepared, profile: HardwareProfile, ranks: int = 1) -> tuned_plans.Job:
    """What the planner and the tuner are asked: the job with its real lengths."""
    _check_vocabulary(prepared)
    lengths = prepared.datasets[0].train.lengths.tolist()
    question = job_plan.question(prepared.composed, lengths)
    return tuned_plans.Job(
        composed=prepared.composed, question=question, profile=profile, ranks=ranks
    )


def _check_vocabulary(prepared: Prepared) -> None:
    """Raise BadInput for a token that the model has no embedding for: a GPU would only stop."""
    name = prepared.config.model.name
    rows = job_plan.model_facts(name).vocabulary
    parts = [
        part for data in prepared.datasets for part in (data.train, data.validation, data.test)
    ]
    arrays = {id(part.ids): part.ids for part in parts}  # most parts share one
    largest = max(int(ids.max()) for ids in arrays.values())
    if rows and largest >= rows:
        raise BadInput(
            f"the tokenizer makes token {largest}, and {name} has embeddings for {rows} only",
            "give a folder whose tokenizer goes with its weights",
        )


def make_plan(prepared: Prepared, profile: HardwareProfile, ranks: int = 1) -> Plan:
    """The plan for the job's real lengths, as it was tuned before if it was."""
    job = tuned_job(prepared, profile, ranks)
    plan = job_plan.answer(job.composed, job.question, profile, ranks=ranks)
    if not plan.fits:
        advice = plan.advice[0] if plan.advice else "take a smaller model"
        raise BadInput("the job does not fit this machine", advice)
    return tuned_plans.with_tuned(job, plan)


def begin(
    prepared: Prepared, profile: HardwareProfile, world: World, resume: Path | None
) -> tuple[Plan, Path]:
    """The plan and the folder: the first rank decides, and the others do the same."""
    said = ""
    launch = find_launch(world)
    config = _written_config(prepared.composed)
    if world.first and resume is None:
        resume = launch.find_run(Path(prepared.config.runs_dir), config)
    if world.first and resume is None:
        if prepared.config.tune == "force":
            tuned_plans.tune(tuned_job(prepared, profile, world.size))
        plan = make_plan(prepared, profile, world.size)
        task = prepared.composed.task
        folder = run_folder.create(Path(prepared.config.runs_dir), task, config=config, plan=plan)
        profile.save(folder / "hardware.json")
        write_whole(folder / "data.json", json.dumps(_data(prepared), indent=2) + "\n")
        launch.note(folder)
        said = json.dumps([plan.to_json(indent=None), str(folder)])
    elif world.first and resume is not None:
        _check_same_data(resume, prepared)
        plan = Plan.load(resume / "plan.json")
        said = json.dumps([plan.to_json(indent=None), str(resume)])
    text, name = json.loads(first_says(world, said))
    return Plan.from_json(text), Path(name)


def _written_config(composed: Composed) -> dict[str, Any]:
    names = ("task", "hardware", "experiment", "config", "origins")
    return {name: codec.encode(getattr(composed, name)) for name in names}


def _data(prepared: Prepared) -> dict[str, Any]:
    """What was trained on, without a text: counts, and a checksum."""
    return {
        "checksum": scores.checksum(prepared.datasets),
        "folds": [dataset.metadata for dataset in prepared.datasets],
    }


def _check_same_data(run: Path, prepared: Prepared) -> None:
    try:
        before = codec.read_object(run / "data.json")["checksum"]
    except (OSError, ValueError, KeyError) as error:
        what = f"cannot read data.json in {run} ({reason(error)})"
        raise BadInput(what, "give a run's folder") from None
    if before != scores.checksum(prepared.datasets):
        raise BadInput(f"the data is not what {run} was trained on", "start a new run with it")


METRIC = "f1"
"""Of the positive class, on the validation part: what the best checkpoint is chosen by."""
_SLACK = 1.02
"""The plan's budget was fitted to one fold's lengths, and another fold's differ by so much."""


def model_decisions(plan: Plan) -> dict[str, Any]:
    """The fields of ClassifierSettings that the plan decides."""
    decided: dict[str, Any] = {
        "method": plan.workload.method,
        "checkpointing": plan.gradient_checkpointing,
        "dtype": plan.weights_dtype,
        "liger": plan.liger,
    }
    if plan.packed:  # variable-length kernels have none
        decided["attention_dropout"] = 0.0
    else:  # nor does an evaluation take them
        decided["attention"] = "masked"
    return decided


def loop_settings(
    config: NliConfig | TextclassConfig,
    plan: Plan,
    lengths: NDArray[np.int64],
    *,
    device: str,
    ranks: int,
    seed: int,
) -> LoopSettings:
    """The settings of one fold, whose training sequences have these lengths."""
    training = config.training
    return LoopSettings(
        epochs=training.num_epochs,
        max_steps=training.max_steps,
        drop_last=training.drop_last,
        seed=seed,
        device=device,
        precision=plan.precision,
        cuts=ladder(
            lengths,
            plan.effective_batch_size,
            _cap(config, plan, int(lengths.max())),
            padded=not plan.packed,
            ranks=ranks,
            seed=seed,
            at_least=plan.gradient_accumulation_steps,
            at_most=plan.gradient_accumulation_steps,
        ),
        optimizer=OptimizerSettings(
            kind=plan.optimizer,
            learning_rate=training.learning_rate,
            weight_decay=training.weight_decay,
            max_grad_norm=training.max_grad_norm,
        ),
        schedule=ScheduleSettings(
            kind=training.scheduler,
            warmup_ratio=training.warmup_ratio,
            warmup_steps=training.warmup_steps,
        ),
        loader=LoaderSettings(
            num_workers=plan.num_workers,
            pin_memory=plan.pin_memory,
            persistent_workers=plan.persistent_workers,
            prefetch_factor=plan.prefetch_factor,
        ),
        compile=plan.compile,
        compile_mode=plan.compile_mode,
        sharding=plan.sharding,
        eval_steps=training.eval_steps,
        eval_batch_size=plan.eval_batch_size,
        metric=METRIC,
        early_stopping_patience=training.early_stopping_patience,
        logging_steps=training.logging_steps,
        checkpoint_steps=training.checkpoint_steps,
        keep_checkpoints=training.keep_checkpoints,
        nonfinite=training.nonfinite,
        profile_step=training.profile_step,
    )


def opening(parts: Parts, plan: Plan) -> RunSetup:
    """Record the settings in effect, with the attention that the model will really take."""
    return replace(
        describe(parts, _attention(parts)),
        method=plan.workload.method,
        tuned_samples_per_second=tuned_plans.tuned_rate(plan),
    )


def _attention(parts: Parts) -> AttentionPath | None:
    model = parts.model
    if isinstance(model, Head):
        return AttentionPath(kind="frozen")
    if not isinstance(model, EncoderClassifier):
        return None
    if not isinstance(parts.settings.cuts[0], PackedCut):
        return _on_padded_rows(model.traits)
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    precision = halves.get(parts.settings.precision)
    return _on_packed_rows(model.traits, packed_obstacle(model.encoder, model.traits, precision))


def _on_padded_rows(traits: Traits) -> AttentionPath | None:
    """Attention that does not go through SDPA; None where it does."""
    if traits.own_attention:
        return AttentionPath(kind="own")
    return None if traits.softcap is None else AttentionPath(kind="products")


def _on_packed_rows(traits: Traits, obstacle: str | None) -> AttentionPath:
    """The kernel that attends within packed rows, or the reason for a mask."""
    kind: AttentionKind = "varlen" if traits.softcap is None else "softcap"
    if traits.own_attention:
        kind = "disentangled"
    if obstacle is not None:
        kind = "mask"
    return AttentionPath(kind=kind, dropout=traits.attention_dropout, obstacle=obstacle or "")


def _cap(config: NliConfig | TextclassConfig, plan: Plan, longest: int) -> int:
    """The most tokens of a micro-batch: what was planned, and never over what was asked for.

    Where both batch_size and gradient_accumulation_steps are set, another fold keeps to both.
    """
    asked = plan.batch_size * config.data.max_length
    by_hand = (config.training.batch_size, config.optimization.gradient_accumulation_steps)
    if "auto" not in by_hand:
        return max(longest, asked)
    return max(longest, min(asked, math.ceil(plan.micro_batch_tokens * _SLACK)))
