"""Start of a run: builds its parts, and restores an interrupted run from its checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from trainfit.core import codec
from trainfit.core.errors import BadInput, OutOfMemory, TrainfitWarning
from trainfit.core.records import Record, TrainTask
from trainfit.data.batches import StepLoader
from trainfit.engine import checkpoint, parallel, saved_state
from trainfit.engine.captured import CapturedSteps
from trainfit.engine.distributed import World, first_says, first_writes
from trainfit.engine.loop_settings import LoopSettings
from trainfit.engine.memory_errors import is_out_of_memory
from trainfit.engine.observers import Progress
from trainfit.engine.optimizer import (
    Combined,
    adopt,
    build_optimizer,
    host_moments,
    is_adamw,
    keep_rates_on_device,
    keep_trained_in_float32,
    take_workspaces,
    trained_parameters,
)
from trainfit.engine.parallel import GradientBuckets, shard, spread_weights
from trainfit.engine.recovery import Buffers, Parts, copies
from trainfit.engine.relaunch import Launch, RestartChanges, find_launch, read_changes
from trainfit.engine.step import loss_scale
from trainfit.kernels.quantized import count_weights
from trainfit.packing import PackedCut, PaddedCut
from trainfit.runs import run_folder, timeline
from trainfit.runs.opening import AttentionPath, RunSetup
from trainfit.runtime import compile_blocks, compile_model
from trainfit.runtime.switches import attention_order

T = TypeVar("T")

Notice = tuple[str, str, Mapping[str, int]]
"""Kind, text and figures of an event before the first step."""


@dataclass(frozen=True, slots=True)
class Start:
    """Progress at the start of this process, and events to record."""

    progress: Progress
    resumed: bool
    """True where it was restored from a checkpoint."""
    events: tuple[Notice, ...] = ()


@timeline.stage("build")
def build_model(task: TrainTask) -> nn.Module:
    """Build the task's model in training mode."""
    model = _fits(task.build_model, "the model")
    keep_trained_in_float32(model)
    return model.train()


def why_indivisible(task: object, model: nn.Module) -> str | None:
    """Reason why a step of this task must not be cut into micro-batches; None where it may be."""
    if getattr(task, "indivisible", False):
        return "the task is indivisible"
    kind = nn.modules.batchnorm._BatchNorm
    norms = (m for m in model.modules() if isinstance(m, kind))
    if any(norm.training or not norm.track_running_stats for norm in norms):
        return "the model has BatchNorm, whose statistics are of the whole batch"
    return None


def _undivided(settings: LoopSettings, why: str, world: World) -> LoopSettings:
    """Settings whose only cut is a single micro-batch, or BadInput where there is none."""
    pieces = settings.cuts[0].micro_batches
    if world.size > 1:
        what = f"a step would be divided over {world.size} ranks, but {why}"
        raise BadInput(what, "train on one device, or use GroupNorm or LayerNorm for BatchNorm")
    if pieces > 1:
        what = f"a step would be cut into {pieces} micro-batches, but {why}"
        raise BadInput(what, "plan it with one micro-batch, or take a smaller batch")
    return replace(settings, cuts=settings.cuts[:1])


@timeline.stage("build")
def build_parts(
    task: TrainTask,
    settings: LoopSettings,
    model: nn.Module,
    world: World,
    device: torch.device,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
) -> Parts:
    """Build everything that a step needs, on the device."""
    indivisible = why_indivisible(task, model)
    if indivisible is not None:
        if not getattr(task, "indivisible", False):
            text = f"steps are not cut into micro-batches: {indivisible}"
            warnings.warn(text, TrainfitWarning, stacklevel=2)
        settings = _undivided(settings, indivisible, world)
    if device.type == "cuda":
        with device:
            _fits(take_workspaces, "cuBLAS's workspace")
    sharded = settings.sharding != "none"
    reduce = torch.bfloat16 if settings.reduce_dtype == "bf16" else None
    if sharded:
        spread_weights(world, model)  # on the CPU: the model may be too large for a GPU
        machines = copies(settings, world)
        _fits(lambda: shard(model, device, machines, reduce), "this rank's share of the model")
    else:
        _fits(lambda: model.to(device), "the model")
        spread_weights(world, model)

    _check_offloaded(settings, sharded, own=make_optimizer is not None)

    def build() -> torch.optim.Optimizer:
        if make_optimizer is None:
            return build_optimizer(model, settings.optimizer)
        return adopt(model, make_optimizer(model))

    optimizer = _fits(build, "the optimizer's state")
    if sharded:
        _check_sharded(optimizer)
    saved_state.task_state(task)  # raises where it holds what a checkpoint cannot keep
    if sharded and saved_state.has_state(task):
        raise BadInput("the task has a state_dict, which FSDP does not save", "do not shard")
    if settings.compile:
        whole = settings.compile_scope == "model" and not sharded
        padded = isinstance(settings.cuts[0], PaddedCut)
        of_any_size = True if padded and len(set(task.lengths())) > 1 else None
        compile_ = compile_model if whole else compile_blocks
        compile_(
            model, settings.compile_mode, dynamic=of_any_size, budget=settings.activation_budget
        )
    return Parts(
        task=task,
        settings=settings,
        model=model,
        buffers=Buffers(model),
        optimizer=optimizer,
        scale=loss_scale(settings.precision, device),
        loader=StepLoader(
            task, settings.loader, device, rank=world.rank, ranks=world.size, in_step=sharded
        ),
        world=world,
        device=device,
        sharded=sharded,
        gradients=None
        if world.size == 1 or sharded
        else GradientBuckets(trained_parameters(optimizer), reduce),
        rates=tuple(float(group["lr"]) for group in optimizer.param_groups),
        indivisible=indivisible,
        captured=_captured_steps(task, settings, optimizer, world, device),
    )


def _check_offloaded(settings: LoopSettings, sharded: bool, *, own: bool) -> None:
    """Raise BadInput where the moments are asked to be in the host's memory, and cannot be."""
    if settings.optimizer.offload and (sharded or own):
        why = "with FSDP" if sharded else "of an optimizer of the job's own"
        what = f"moments {why} cannot be kept in the host's memory"
        raise BadInput(what, "set optimization.offload_optimizer=false")


def _check_sharded(optimizer: torch.optim.Optimizer) -> None:
    """Raise BadInput for an optimizer whose state is not sharded like its weights."""
    kind = type(optimizer).__name__
    if not is_adamw(optimizer):
        raise BadInput(f"FSDP trains with AdamW, not {kind}", "use adamw_fused, or do not shard")
    if optimizer.param_groups[0].get("moments") == "8bit":
        what = "FSDP does not shard 8-bit moments"
        raise BadInput(what, "use adamw_bf16 or adamw_fused, or do not shard")


def _captured_steps(
    task: TrainTask,
    settings: LoopSettings,
    optimizer: torch.optim.Optimizer,
    world: World,
    device: torch.device,
) -> CapturedSteps:
    """Prepare to capture whole steps, unless something in them may wait for the device."""
    alone = world.size == 1 and settings.sharding == "none"
    asked = device.type == "cuda" and alone and settings.cuda_graph
    fused = is_adamw(optimizer) and optimizer.param_groups[0]["fused"]
    fused = fused and host_moments(optimizer) is None
    if not (asked and fused and getattr(task, "capturable", False)) or settings.graphs:
        return CapturedSteps()
    keep_rates_on_device(optimizer)
    return CapturedSteps(device, obstacle=None)


def _fits(build: Callable[[], T], what: str) -> T:
    try:
        return build()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"{what} alone does not fit the memory",
            "take a smaller model, train fewer weights (model.method=lora), or a larger device",
        ) from error


@timeline.stage("build")
def place(parts: Parts, run: Path, frozen: Future[str | None], *, resume: bool) -> Start:
    """Restore the newest good checkpoint, or start at the first step."""
    launch = find_launch(parts.world)
    with first_writes(parts.world) as looks:
        found = _look(run, launch, resume) if looks else _Found()
    found = _Found.from_json(first_says(parts.world, found.to_json(indent=None)))
    events: list[Notice] = [("damaged", text, {}) for text in found.faults]
    if found.folder is not None:
        folder = Path(found.folder)
        progress, more = _restore(parts, folder, frozen)
        events += [("resumed", f"from {folder.name}", {}), *more]
    else:
        progress = Progress(eval_batch_size=parts.settings.eval_batch_size)
        if found.resume:
            events.append(("resumed", "from the beginning: there is no checkpoint yet", {}))
    events += _apply_changes(progress, found.changes, parts.settings)
    if parts.world.first:
        run_folder.forget_after(run, progress.step, progress.events)
        launch.note(run)
    return Start(progress, found.folder is not None, tuple(events))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found(Record):
    """Findings of the first rank in the run's folder, sent to the others."""

    resume: bool = False
    folder: str | None = None
    faults: tuple[str, ...] = ()
    changes: RestartChanges = field(default_factory=RestartChanges)


def _look(run: Path, launch: Launch, resume: bool) -> _Found:
    """Find the newest good checkpoint; refuse a run's folder without `resume` or a restart."""
    resume = resume or launch.is_restart(run)
    if not resume and checkpoint.listed(run):
        raise BadInput(f"{run} holds a run already", "continue with --resume, or start a new one")
    run.mkdir(parents=True, exist_ok=True)
    checkpoint.clear_unfinished(run)
    folder, faults = checkpoint.latest_good(run)
    for text in faults:
        warnings.warn(text, TrainfitWarning, stacklevel=2)
    return _Found(
        resume=resume,
        folder=None if folder is None else str(folder),
        faults=faults,
        changes=read_changes(run),
    )


def _apply_changes(
    progress: Progress, change: RestartChanges, settings: LoopSettings
) -> list[Notice]:
    """Apply the changes that an earlier process left; each that has an effect is an event."""
    events: list[Notice] = []
    rung = min(max(progress.rung, change.rung), len(settings.cuts) - 1)
    if rung != progress.rung:
        progress.use_rung(rung)
        pieces = settings.cuts[rung].micro_batches
        text = f"memory ran out: steps are cut into {pieces} from here"
        events.append(("oom", text, {"micro_batches": pieces}))
    size = min(progress.eval_batch_size, change.eval_batch_size or progress.eval_batch_size)
    if size != progress.eval_batch_size:
        progress.eval_batch_size = size
        text = f"memory ran out: evaluations of {size} sequences from here"
        events.append(("oom", text, {"eval_batch_size": size}))
    return events


def _restore(
    parts: Parts, folder: Path, frozen: Future[str | None]
) -> tuple[Progress, tuple[Notice, ...]]:
    """Restore model, optimizer, progress and random state from a checkpoint."""
    state = checkpoint.read_state(folder)
    if state["frozen"] != frozen.result():
        raise BadInput(
            f"the weights that are not trained are not those {folder} was trained with",
            "use the model of the run",
        )
    if parts.sharded:
        weights = parts.saved_weights()
        state_of = saved_state.optimizer_tensors(parts.model, parts.optimizer)
        parallel.read_into(folder, weights | state_of)
    else:
        contents = checkpoint.read(folder)
        saved_state.load_model(parts.model, contents.model)
        saved_state.load_optimizer(
            parts.model, parts.optimizer, contents.optimizer, state.get("optimizer")
        )
        saved_state.load_task_state(parts.task, contents.task, state.get("task"), parts.device)
    if parts.scale is not None and state["scale"] is not None:
        parts.scale.factor.fill_(state["scale"][0])
        parts.scale.quiet_steps.fill_(state["scale"][1])
    progress = codec.decode(Progress, state["progress"], str(folder))
    progress.use_rung(min(progress.rung, len(parts.settings.cuts) - 1))
    states = state["random"]
    if len(states) != parts.world.size:
        text = f"saved by {len(states)} ranks, now there are {parts.world.size}: dropout differs"
        return progress, (("ranks", text, {}),)
    own = saved_state.RandomState.from_json(states[parts.world.rank], str(folder))
    saved_state.put_back(own, parts.device)
    return progress, ()


_FLASH_FROM = (8, 0)
"""Lowest compute capability with torch's flash kernel, which needs half precision."""


def describe(parts: Parts, attention: AttentionPath | None = None) -> RunSetup:
    """Record the settings in effect now, as torch and the loader report them.

    A job that knows its attention better than torch's switches do passes `attention`.
    """
    settings, groups, loader = parts.settings, parts.optimizer.param_groups, parts.loader.workers()
    cut, gpu = settings.cuts[0], parts.device.type == "cuda"
    return RunSetup(
        device=parts.device.type,
        device_name=torch.cuda.get_device_name(parts.device) if gpu else None,
        compute_capability=torch.cuda.get_device_capability(parts.device) if gpu else None,
        threads=torch.get_num_threads(),
        ranks=parts.world.size,
        sharded=parts.sharded,
        tf32=_tf32() if gpu else (),
        precision=settings.precision,
        loss_scaling=parts.scale is not None,
        attention=attention or _sdpa(parts),
        optimizer=_name_of(parts.optimizer),
        fused=all(group.get("fused") for group in groups),
        learning_rate=parts.rates[0],
        weight_decay=float(groups[0].get("weight_decay", 0.0)),
        trained_weights=sum(p.numel() for group in groups for p in group["params"]),
        weights=count_weights(parts.model),
        data_on_gpu=parts.loader.on_device,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        prefetch_factor=loader.prefetch_factor,
        step_sequences=len(parts.task.steps(0)[0]),
        micro_batches=cut.micro_batches,
        micro_batch_tokens=cut.tokens,
        packed=isinstance(cut, PackedCut),
        indivisible=parts.indivisible,
        compiled=any(module._compiled_call_impl is not None for module in parts.model.modules()),
    )


def _name_of(optimizer: torch.optim.Optimizer) -> str:
    """Name of an optimizer, with the dtype and place of moments that are not the usual ones."""
    if isinstance(optimizer, Combined):
        return " and ".join(dict.fromkeys(map(_name_of, optimizer.optimizers)))
    moments = optimizer.param_groups[0].get("moments")
    notes = [f"{moments} moments"] if moments else []
    notes += ["moments on the host"] if host_moments(optimizer) is not None else []
    name = "AdamW" if moments else type(optimizer).__name__
    return f"{name} ({', '.join(notes)})" if notes else name


def _tf32() -> tuple[str, ...]:
    backends: Any = torch.backends
    switches = {"matmul": backends.cuda.matmul, "cuDNN": backends.cudnn.conv}
    return tuple(name for name, switch in switches.items() if switch.fp32_precision == "tf32")


def _sdpa(parts: Parts) -> AttentionPath:
    """SDPA with the kernels that torch's switches, the GPU and the precision allow."""
    if parts.device.type != "cuda":
        return AttentionPath(kind="sdpa")
    capability = torch.cuda.get_device_capability(parts.device)
    flash = capability >= _FLASH_FROM and parts.settings.precision != "fp32"
    kernels = {"efficient", "math"} | ({"flash"} if flash else set())
    return AttentionPath(kind="sdpa", kernels=tuple(k for k in attention_order() if k in kernels))
