"""Before the first step: the tokens, the plan, and the folder a run begins in or goes on in."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trainfit.conf import Composed, GptConfig
from trainfit.core import codec
from trainfit.core.errors import BadInput, reason
from trainfit.core.files import write_whole
from trainfit.core.plan_records import Plan
from trainfit.core.records import HardwareProfile
from trainfit.data.token_files import TOKENIZER, TokenFolder, open_tokens
from trainfit.data.token_preparation import Preparation, Progress, embedded_tokens
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
from trainfit.hardware.host import check_room
from trainfit.jobs import job_plan, tuned_plans
from trainfit.jobs.gpt_plan import stream_is_half
from trainfit.jobs.models.gpt_model import Gpt, GptShape, gpt_shape
from trainfit.jobs.pretraining import METRIC, count_blocks
from trainfit.packing import ladder
from trainfit.runs import run_folder
from trainfit.runs.opening import PretrainingSetup, RunSetup

_ROUND = 64
"""The vocabulary is filled up to a multiple of this: matrix units like round sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What a job brings: its configuration with the vocabulary settled, and its tokens."""

    composed: Composed
    data: TokenFolder

    @property
    def config(self) -> GptConfig:
        """The configuration of the job."""
        config = self.composed.config
        assert isinstance(config, GptConfig)
        return config


def prepare(
    composed: Composed, *, world: World | None = None, progress: Progress | None = None
) -> Prepared:
    """The tokens that are named, or else those of the standard library, made by the first rank."""
    config = composed.config
    assert isinstance(config, GptConfig)
    world = world or World()
    folder = config.data.data_dir or ""
    if world.first and not folder:
        how = Preparation(vocab_size=config.data.vocab_size, seed=config.seed)
        folder = str(embedded_tokens(how, progress))
    folder = first_says(world, folder)
    data = open_tokens(Path(folder), survey=world.first)
    size = _vocabulary(config, data)
    settled = replace(config, model=replace(config.model, vocab_size=size))
    prepared = Prepared(composed=replace(composed, config=settled), data=data)
    count_blocks(data.train, config.data.max_length, "training")
    return prepared


def _vocabulary(config: GptConfig, data: TokenFolder) -> int:
    """Rows of the embedding: one for each token at least."""
    asked, needed = config.model.vocab_size, data.header.vocab_size
    if asked == "auto":
        return -(-needed // _ROUND) * _ROUND
    if asked < needed:
        raise BadInput(
            f"model.vocab_size is {asked}, and the tokens of {data.folder} go up to {needed}",
            "leave it to auto, or give at least as many",
        )
    return asked


def tuned_job(prepared: Prepared, profile: HardwareProfile, ranks: int = 1) -> tuned_plans.Job:
    """What the planner and the tuner are asked: the job with the blocks that there are."""
    config, block = prepared.config, prepared.config.data.max_length
    blocks = count_blocks(prepared.data.train, block, "training")
    batch = job_plan.question(prepared.composed).workload.effective_batch_size * ranks
    # They are all alike: those of some steps tell the planner as much as millions.
    asked = job_plan.question(prepared.composed, [block] * min(blocks, 4 * batch))
    steps = config.training.max_steps
    epochs = config.training.num_epochs if steps is None else steps * batch / blocks
    asked = replace(asked, workload=replace(asked.workload, sequences=blocks, epochs=epochs))
    return tuned_plans.Job(composed=prepared.composed, question=asked, profile=profile, ranks=ranks)


def make_plan(
    prepared: Prepared,
    profile: HardwareProfile,
    ranks: int = 1,
    memory_gib: float | None = None,
) -> Plan:
    """The plan, as it was tuned before if it was.

    `memory_gib` bounds what it may take of a GPU: a study's workers share one, and what was tuned
    for all of it is not theirs.
    """
    job = tuned_job(prepared, profile, ranks)
    plan = job_plan.answer(job.composed, job.question, profile, memory_gib=memory_gib, ranks=ranks)
    if not plan.fits:
        advice = plan.advice[0] if plan.advice else "take a smaller model"
        raise BadInput("the job does not fit this machine", advice)
    return plan if memory_gib is not None else tuned_plans.with_tuned(job, plan)


def begin(
    prepared: Prepared, profile: HardwareProfile, world: World, resume: Path | None
) -> tuple[Plan, Path]:
    """The plan and the folder: the first rank decides, and the others do the same."""
    said = ""
    launch = find_launch(world)
    if world.first:
        resume = resume or launch.find_run(Path(prepared.config.runs_dir), _written(prepared))
        if resume is None:
            if prepared.config.tune == "force":
                tuned_plans.tune(tuned_job(prepared, profile, world.size))
            plan = make_plan(prepared, profile, world.size)
            folder = _new_folder(prepared, plan)
            profile.save(folder / "hardware.json")
            launch.note(folder)
        else:
            plan, folder = _old_plan(prepared, resume), resume
        said = json.dumps([plan.to_json(indent=None), str(folder)])
    text, name = json.loads(first_says(world, said))
    return Plan.from_json(text), Path(name)


def _new_folder(prepared: Prepared, plan: Plan) -> Path:
    data, config = prepared.data, _written(prepared)
    folder = run_folder.create(Path(prepared.config.runs_dir), "gpt", config=config, plan=plan)
    facts = {
        "checksum": data.checksum,
        "folder": str(data.folder),
        "header": codec.encode(data.header),
        "unigram_entropy": data.unigram_entropy,
    }
    write_whole(folder / "data.json", json.dumps(facts, indent=2) + "\n")
    if data.tokenizer is not None:
        shutil.copyfile(data.tokenizer, folder / TOKENIZER)
    return folder


def _written(prepared: Prepared) -> dict[str, Any]:
    """The configuration, as it is written down."""
    names = ("task", "hardware", "experiment", "config", "origins")
    return {name: codec.encode(getattr(prepared.composed, name)) for name in names}


def _old_plan(prepared: Prepared, run: Path) -> Plan:
    """The plan of a run to go on with, on the data that it was trained on."""
    try:
        before = codec.read_object(run / "data.json")["checksum"]
    except (OSError, ValueError, KeyError) as error:
        what = f"cannot read data.json in {run} ({reason(error)})"
        raise BadInput(what, "give a run's folder") from None
    if before != prepared.data.checksum:
        raise BadInput(f"the data is not what {run} was trained on", "start a new run with it")
    return Plan.load(run / "plan.json")


def shape_of(config: GptConfig) -> GptShape:
    """The model's sizes; the vocabulary is settled, and the block size is the sequence length."""
    sizes = job_plan.gpt_sizes(config.model)
    for not_a_size in ("loss_chunk", "half_stream"):
        sizes.pop(not_a_size, None)
    return gpt_shape(config.model.name, block_size=config.data.max_length, **sizes)


def build(config: GptConfig, plan: Plan) -> Gpt:
    """A new model with what the plan decided."""
    shape = shape_of(config)
    check_room(4 * shape.parameters, config.model.name)
    return Gpt(
        shape,
        checkpointing=plan.gradient_checkpointing,
        loss_chunk=plan.task.arguments.get("loss_chunk"),
        half_stream=stream_is_half(config.model.half_stream, plan.precision),
    )


def loop_settings(config: GptConfig, plan: Plan, *, device: str, ranks: int) -> LoopSettings:
    """The settings of a run."""
    training = config.training
    block = config.data.max_length
    return LoopSettings(
        epochs=training.num_epochs,
        max_steps=training.max_steps,
        seed=config.seed,
        device=device,
        precision=plan.precision,
        # All blocks are alike, so those of one step speak for all.
        cuts=ladder(
            np.full(plan.effective_batch_size, block),
            plan.effective_batch_size,
            min(plan.batch_size * block, max(block, plan.micro_batch_tokens)),
            padded=True,
            ranks=ranks,
            seed=config.seed,
            at_least=plan.gradient_accumulation_steps,
            at_most=plan.gradient_accumulation_steps,
        ),
        optimizer=OptimizerSettings(
            kind=plan.optimizer,
            learning_rate=training.learning_rate,
            weight_decay=training.weight_decay,
            betas=(training.beta1, training.beta2),
            max_grad_norm=training.max_grad_norm,
        ),
        schedule=ScheduleSettings(
            kind=training.scheduler,
            warmup_ratio=training.warmup_ratio,
            warmup_steps=training.warmup_steps,
            min_ratio=training.min_learning_rate_ratio,
        ),
        loader=LoaderSettings(
            num_workers=plan.num_workers,
            pin_memory=plan.pin_memory,
            persistent_workers=plan.persistent_workers,
            prefetch_factor=plan.prefetch_factor,
        ),
        compile=plan.compile,
        compile_mode=plan.compile_mode,
        compile_scope="model",  # a long run pays the minute back: the loss is fused too
        sharding=plan.sharding,
        eval_steps=training.eval_steps,
        eval_batch_size=plan.eval_batch_size,
        metric=METRIC,
        greater_is_better=False,
        early_stopping_patience=training.early_stopping_patience,
        logging_steps=training.logging_steps,
        checkpoint_steps=training.checkpoint_steps,
        keep_checkpoints=training.keep_checkpoints,
        nonfinite=training.nonfinite,
        profile_step=training.profile_step,
    )


def opening(parts: Parts, plan: Plan, data: TokenFolder) -> RunSetup:
    """Record the settings in effect, with the tokens and the batch."""
    return replace(
        describe(parts),
        tuned_samples_per_second=tuned_plans.tuned_rate(plan),
        pretraining=PretrainingSetup(
            train_tokens=data.header.train.tokens,
            held_out_tokens=data.header.validation.tokens,
            vocabulary=data.header.vocab_size,
            unigram_entropy=data.unigram_entropy,
            effective_batch_size=plan.effective_batch_size,
            step_tokens=plan.effective_batch_size * plan.workload.max_length,
            batch_size=plan.batch_size,
            loss_chunk=plan.task.arguments.get("loss_chunk"),
        ),
    )
