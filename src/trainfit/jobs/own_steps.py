"""A job of the user's own in other processes: the planner's step, the tuner's run, predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainfit.conf import SCHEMAS, Composed
from trainfit.core import codec
from trainfit.core.errors import BadInput
from trainfit.core.plan_records import Plan, Precision
from trainfit.engine.loop_settings import OptimizerSettings
from trainfit.engine.optimizer import build_optimizer
from trainfit.engine.step import loss_scale, plain_step
from trainfit.jobs import exports, job_plan, registry
from trainfit.jobs.batch_shape import BatchShape
from trainfit.jobs.job import Job
from trainfit.jobs.own import prepare
from trainfit.jobs.own_checks import check_loss, check_model, check_optimizer
from trainfit.planning.estimator.fake_cuda import saved_on_host
from trainfit.runtime import compile_model


def own_step(
    *,
    job: str,
    config: dict[str, Any],
    batch: dict[str, Any],
    rows: int,
    width: int,
    precision: Precision,
    micro_batches: int = 1,
    optimizer: Any = "adamw_fused",
    offload_optimizer: bool = False,
    device: str = "cpu",
    compile: bool = False,
    offload_activations: bool = False,
    activation_budget: float = 1.0,
    **_planned: Any,
) -> tuple[nn.Module, Callable[[nn.Module], Callable[[], object]]]:
    """Build a job's model and its optimizer step for the planner."""
    made = _job_of(job, config)
    shape = codec.decode(BatchShape, batch)

    def loss(model: nn.Module, leaves: Mapping[str, Any]) -> Tensor:
        losses = check_loss(made.loss(model, shape.restore(leaves)), made.indivisible)
        return losses.float().sum()

    def make_step(model: nn.Module) -> Callable[[], object]:
        own: Any = made.optimizer(model)
        if own is not None:
            check_optimizer(own, made)
        else:
            settings = OptimizerSettings(
                kind=optimizer, learning_rate=1e-5, offload=offload_optimizer
            )
            own = build_optimizer(model, settings)
        if compile and device != "cpu":
            compile_model(model, budget=activation_budget)
        batches = [shape.make(rows, width)] * micro_batches
        scale = loss_scale(precision, device)
        return lambda: plain_step(
            model,
            own,
            loss,
            batches,
            float(rows),
            device_type=device,
            precision=precision,
            max_grad_norm=1.0,
            scale=scale,
            saved=saved_on_host(device) if offload_activations else None,
        )

    return check_model(made), make_step


def _job_of(name: str, config: dict[str, Any]) -> Job:
    kind = registry.load(name)
    asked = codec.decode(SCHEMAS[name], config, "the configuration")
    return kind(registry.own_config(kind, asked))


def own_trial(
    plan: Plan, *, task: str, config: dict[str, Any], device: str = "cpu", **_more: Any
) -> Any:
    """Build the run of a plan on the job's own data, for the tuner."""
    from trainfit.jobs.trials import one_rank
    from trainfit.tuning.trial import Setup

    plan = one_rank(plan)
    registry.load(task)
    asked = codec.decode(SCHEMAS[task], config, "the configuration")
    composed = Composed(
        task=task, hardware="auto", experiment=None, config=asked, origins={}, notes=()
    )
    prepared = prepare(composed)
    place = torch.device(device)
    settings = replace(prepared.settings(0, plan, place, 1), metric=None)
    runtime = job_plan.runtime_settings(asked, plan)
    return Setup(prepared.task(0, plan, place), settings, runtime, more=prepared.own_optimizer)


# ── use ───────────────────────────────────────────────────────────────────────────────────────


def predict(task: str, run: Path, items: Sequence[Any]) -> list[Any]:
    """Return the job's answer for each item, with the exported model of a run."""
    from safetensors.torch import load_model

    folder = run / "export"
    if not (folder / "model.safetensors").is_file():
        raise BadInput(f"{run} has no exported model", "give a finished run of the job")
    exports.check_export(folder)
    facts = codec.read_object(folder / "job.json")
    made = _job_of(task, facts["config"])
    model = made.model()
    load_model(model, str(folder / "model.safetensors"))
    model.eval()
    with torch.no_grad():
        return [_plain(made.predict(model, item)) for item in items]


def _plain(value: Any) -> Any:
    """Turn tensors and arrays of an answer into lists and numbers, or raise BadInput."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    what = f"predict gives a {type(value).__name__}"
    raise BadInput(what, "give numbers, texts or tensors, in lists and dicts")
