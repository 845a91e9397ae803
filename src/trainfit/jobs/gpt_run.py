"""`train gpt`: from token files to a model that writes, on one device or many.

RUN/config.json, plan.json, environment.json, data.json    what was asked, planned, and given
RUN/tokenizer.json                                         what turns tokens into text
RUN/checkpoints/, metrics.jsonl, train.log, result.json    the engine's
RUN/evidence.json, receipt.json                            what ran, against what was asked
RUN/export/, results.json                                  the model; what came of it all
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from trainfit.conf import Composed
from trainfit.core.plan_records import Plan
from trainfit.core.records import HardwareProfile, RunResult
from trainfit.engine import checkpoint, loop
from trainfit.engine.distributed import World, gather, joined
from trainfit.engine.observers import Observer
from trainfit.engine.relaunch import writing
from trainfit.hardware.catalogue import find
from trainfit.jobs import exports, gpt_flops, job_plan
from trainfit.jobs.encoder_run import Show
from trainfit.jobs.gpt_result import GptResult, iter_line, read_meter
from trainfit.jobs.gpt_setup import Prepared, begin, build, loop_settings, opening, shape_of
from trainfit.jobs.gpt_setup import make_plan as make_plan
from trainfit.jobs.gpt_setup import prepare as prepare
from trainfit.jobs.gpt_setup import tuned_job as tuned_job
from trainfit.jobs.placement import birthplace, on_device
from trainfit.jobs.pretraining import METRIC, GptTask
from trainfit.measuring.receipt import save_receipt
from trainfit.runtime import applied


def train(composed: Composed, show: Show | None = None, *, resume: Path | None = None) -> GptResult:
    """Train and export what the configuration asks for; `resume` goes on with a run."""
    profile = job_plan.machine(composed)
    show = show or Show()
    with joined(profile.device) as (world, place):
        if not world.first:
            show = Show()
        with show.busy("preparing the data"):
            prepared = prepare(composed, world=world)
        with show.busy("planning"):
            plan, run = begin(prepared, profile, world, resume)
        with writing(run, world):
            with applied(job_plan.runtime_settings(prepared.config, plan)):
                peaks = _Peaks.of(plan, profile, world, place)
                result = _train(prepared, plan, run, world, place, peaks, show, resume is not None)
                if result.status == "finished" and world.first:
                    with show.busy("writing the model"):
                        _export(prepared, plan, run)
            return _end(prepared, plan, result, peaks, world)


def compare(
    prepared: Prepared,
    plan: Plan,
    profile: HardwareProfile,
    run: Path,
    observers: Sequence[Observer],
) -> RunResult:
    """Train for the validation loss alone: no checkpoint, no export."""
    show = Show(watch=lambda _title: observers)
    with (
        joined(profile.device) as (world, place),
        applied(job_plan.runtime_settings(prepared.config, plan)),
    ):
        peaks = _Peaks.of(plan, profile, world, place)
        return _train(prepared, plan, run, world, place, peaks, show, resume=False, keep=0)


# ── training ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True, slots=True)
class _Peaks:
    """What the GPUs of the job can do, in TFLOP/s of the dtype in use; None where not known."""

    datasheet: float | None
    measured: float | None
    """Of as many GPUs as the one that was measured."""

    @classmethod
    def of(cls, plan: Plan, profile: HardwareProfile, world: World, place: torch.device) -> _Peaks:
        own = None
        if place.type == "cuda" and (place.index or 0) < len(profile.gpus):
            own = profile.gpus[place.index or 0].slug
        slugs = [slug or None for slug in gather(world, own or "")]
        dtype = gpt_flops.dtype_in_use(plan.precision, plan.runtime.tf32)
        found = gpt_flops.measured_peak(plan.measurements, dtype)
        datasheet = gpt_flops.peak_of(slugs, dtype)
        return cls(
            datasheet=datasheet,
            measured=None if found is None or datasheet is None else found * world.size,
        )


def _task(prepared: Prepared, plan: Plan, place: torch.device) -> GptTask:
    config = prepared.config
    batches = config.training.eval_iters
    return GptTask(
        on_device(birthplace(plan, place), partial(build, config, plan)),
        prepared.data.train,
        prepared.data.validation,
        block_size=config.data.max_length,
        effective_batch=plan.effective_batch_size,
        unigram_entropy=prepared.data.unigram_entropy,
        evaluated=None if batches is None else batches * plan.eval_batch_size,
        seed=config.seed,
    )


def _train(
    prepared: Prepared,
    plan: Plan,
    run: Path,
    world: World,
    place: torch.device,
    peaks: _Peaks,
    show: Show,
    resume: bool,
    keep: int | None = None,
) -> RunResult:
    config = prepared.config
    settings = loop_settings(config, plan, device=place.type, ranks=world.size)
    if keep is not None:
        settings = replace(settings, keep_checkpoints=keep, profile_step=False)
    result = loop.train(
        _task(prepared, plan, place),
        settings,
        run,
        resume=resume,
        observers=show.watch(""),
        trackers=show.track(run) if world.first else (),
        line=iter_line,
        ideal_seconds=gpt_flops.ideal_seconds(shape_of(config), peaks.datasheet),
        opening=lambda parts: opening(parts, plan, prepared.data),
    )
    if world.first:
        save_receipt(run, plan, max_grad_norm=config.training.max_grad_norm)
    return result


# ── after the last step ───────────────────────────────────────────────────────────────────────


def _export(prepared: Prepared, plan: Plan, run: Path) -> None:
    """The weights of the best evaluation, as transformers reads them."""
    model = build(prepared.config, plan)
    checkpoint.load_weights(run, model, best=True)
    exports.write_gpt(run / "export", model.eval(), prepared.data.tokenizer)


def _end(
    prepared: Prepared, plan: Plan, result: RunResult, peaks: _Peaks, world: World
) -> GptResult:
    run = Path(result.run)
    meter = read_meter(run)
    spec = None if plan.gpu is None else find(plan.gpu)
    standing: gpt_flops.Standing | None = None
    steps: tuple[str, ...] = ()
    if meter.mfu is not None and spec is not None:
        standing = gpt_flops.standing(meter.mfu, spec)
        now = gpt_flops.Circumstances(
            plan=plan,
            config=prepared.config,
            spec=spec,
            memory_share=(result.peak_memory_gib or 0.0) / spec.memory_gib,
            wait_share=meter.wait_share,
        )
        steps = tuple(gpt_flops.next_steps(now)) if standing == "poor" else ()
    of_measured = None
    if meter.mfu is not None and peaks.measured and peaks.datasheet:
        of_measured = meter.mfu * peaks.datasheet / peaks.measured
    ended = GptResult(
        run=result.run,
        status="finished" if result.status == "finished" else "stopped",
        steps=result.steps,
        train_loss=meter.train_loss,
        val_loss=result.metrics.get(METRIC),
        unigram_entropy=prepared.data.unigram_entropy,
        tokens_per_second=meter.tokens_per_second,
        gpu=plan.gpu,
        mfu=meter.mfu,
        mfu_of_measured=of_measured,
        standing=standing,
        next_steps=steps,
        peak_memory_gib=result.peak_memory_gib,
        seconds=result.seconds,
        spent=meter.spent,
        events=result.events,
    )
    if world.first and ended.status == "finished":
        ended.save(run / "results.json", parents=False)
    return ended
