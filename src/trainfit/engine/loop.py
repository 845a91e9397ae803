"""The training loop from the first step, or a checkpoint, to the last.

After each step, in this order: log, evaluate, save, stop. So a checkpoint holds everything about
its step, and a resumed run continues exactly as the interrupted one would have.

Folds of a job share one model, optimizer, compiled code and captured steps. A fold begins with
exactly the state that it would have in a process of its own: its model is built from its seed, and
the weights are copied into the memory of the shared model, which compiled code and captured steps
know.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainfit.core.errors import BadInput, OutOfMemory, RunFailed
from trainfit.core.plan_records import RuntimeSettings
from trainfit.core.records import RunResult, TrainTask
from trainfit.data.batches import LoadedStep, StepLoader
from trainfit.engine import setup
from trainfit.engine.distributed import StopRequest, joined, stop_on_signals
from trainfit.engine.evaluation import evaluate
from trainfit.engine.loop_settings import LoopSettings
from trainfit.engine.memory_errors import give_back_memory, is_out_of_memory
from trainfit.engine.observers import Observer, TrainRow, plain_line
from trainfit.engine.optimizer import host_moments, is_adamw, set_rates
from trainfit.engine.recovery import (
    Buffers,
    CannotGoOn,
    MustRestart,
    NotFinite,
    Parts,
    take_sharded_step,
    take_step,
)
from trainfit.engine.relaunch import writing
from trainfit.engine.saved_state import frozen_checksum
from trainfit.engine.session import Session
from trainfit.engine.setup import describe
from trainfit.runs import timeline
from trainfit.runs.opening import RunSetup
from trainfit.runs.run_folder import Journal, Tracker
from trainfit.runtime import applied, eagerly


def train(
    task: TrainTask,
    settings: LoopSettings,
    run: Path,
    *,
    resume: bool = False,
    observers: Sequence[Observer] = (),
    trackers: Sequence[Tracker] = (),
    line: Callable[[TrainRow], str] = plain_line,
    ideal_seconds: Callable[[Sequence[int]], float] | None = None,
    opening: Callable[[Parts], RunSetup] = describe,
    make_optimizer: Callable[[nn.Module], Optimizer] | None = None,
    shared: Shared | None = None,
) -> RunResult:
    """Train `task` in the folder `run`; with `resume`, continue from its newest good checkpoint.

    The status is "stopped" where a signal asked for it; the run can be resumed. Failures raise
    RunFailed. Under torchrun every process calls this with the same arguments; the first rank
    alone has observers, trackers and files.

    `ideal_seconds` computes how long a step of sequences of these lengths would take at the peak of
    all devices, for the MFU. `line` makes the lines of train.log, and `opening` records the
    settings in effect. `make_optimizer` replaces the optimizer of the settings; the schedule scales
    the learning rate of each of its groups. Runs of the same model, such as the folds of a job,
    share its memory and code by `shared`, with the same result.
    """
    with ExitStack() as stack:
        world, device = stack.enter_context(
            joined(settings.device, shards=settings.sharding != "none")
        )
        stack.enter_context(writing(run, world))
        request = stack.enter_context(stop_on_signals())
        stack.enter_context(applied(RuntimeSettings(seed=settings.seed)))
        shared = shared or Shared()
        model = setup.build_model(task)
        parts = take_over(shared, task, settings, model)
        if parts is None:
            shared.frozen = frozen_checksum(model, task)
            shared.remember(model)
            parts = setup.build_parts(task, settings, model, world, device, make_optimizer)
        del model
        shared.parts, frozen = parts, shared.frozen
        stack.enter_context(closing(parts.loader))
        if world.size > 1:  # ranks start with the same weights, then draw different dropout
            stack.enter_context(applied(RuntimeSettings(seed=settings.seed + world.rank)))
        start = setup.place(parts, run, frozen, resume=resume)
        first = world.first
        session = Session(
            parts=parts,
            run=run,
            progress=start.progress,
            steps_per_epoch=_count_steps(task, settings),
            frozen=frozen,
            journal=stack.enter_context(closing(Journal(run if first else None, trackers))),
            observers=observers if first else (),
            line=line,
            ideal_seconds=ideal_seconds,
            saved_step=start.progress.step if start.resumed else None,
            shared=shared,
        )
        stack.callback(session.writer.close)
        session.open(opening(parts))
        for kind, text, figures in start.events:
            session.tell(kind, text, figures)
        return _train_to_end(session, request)


def epoch_steps(task: TrainTask, settings: LoopSettings, epoch: int) -> Sequence[Sequence[int]]:
    """Sequences of each step of an epoch, by index."""
    steps = task.steps(epoch)
    partial = len(steps) > 1 and len(steps[-1]) < len(steps[0])
    return steps[:-1] if settings.drop_last and partial else steps


def _count_steps(task: TrainTask, settings: LoopSettings) -> int:
    steps = len(epoch_steps(task, settings, 0))
    if not steps:
        raise BadInput("an epoch has no step", "give the task some sequences")
    return steps


@timeline.stage("steps")
def _train_to_end(session: Session, request: StopRequest) -> RunResult:
    """Train until the last step, early stopping, or a request to stop."""
    for observer in session.observers:
        observer.on_start(session.progress.step, session.total_steps)
    try:
        while not session.over:
            if _train_epoch(session, request):
                session.tell("stopped", f"by {request.name or 'another rank'}, after its step")
                break
        session.check_losses()
        if session.saved_step != session.progress.step and not session.ends_in_memory:
            session.save()
        session.writer.wait()
    except (RunFailed, OSError) as error:
        _fail(session, error)
        raise
    return session.finish("finished" if session.over else "stopped")


def _fail(session: Session, error: RunFailed | OSError) -> None:
    """Save for the next start where possible, and record the failure."""
    whole = isinstance(error, CannotGoOn) and not isinstance(error, NotFinite)
    with suppress(RunFailed, OSError):
        if isinstance(error, MustRestart):
            session.leave(error.change)
        if whole and session.saved_step != session.progress.step:
            session.save()
    with suppress(RunFailed, OSError):
        session.tell("failed", str(error))
        session.finish("failed")


def _train_epoch(session: Session, request: StopRequest) -> bool:
    """Train the rest of an epoch; returns True to stop now.

    When the cut changes, steps that were collated ahead are dropped and loaded again.
    """
    progress, parts = session.progress, session.parts
    steps = epoch_steps(parts.task, parts.settings, progress.epoch)
    if len(steps) != session.steps_per_epoch:
        raise BadInput(
            f"epoch {progress.epoch} has {len(steps)} steps, the first {session.steps_per_epoch}",
            "give every epoch the same number of steps",
        )
    while progress.step_in_epoch < len(steps):
        rung = session.use_replayed_rung()
        end = progress.step_in_epoch + session.total_steps - progress.step
        rest = steps[progress.step_in_epoch : end]
        with closing(parts.loader.steps(rest, parts.settings.cuts[rung])) as arriving:
            for loaded in arriving:
                if _take(session, loaded, request) or session.over:
                    return not session.over
                if session.use_replayed_rung() != rung:
                    break
    progress.epoch, progress.step_in_epoch = progress.epoch + 1, 0
    return False


def _take(session: Session, loaded: LoadedStep, request: StopRequest) -> bool:
    """Take one step, then log, evaluate and save if due; returns True after a request to stop."""
    progress, parts, settings = session.progress, session.parts, session.parts.settings
    weight = parts.task.weight(loaded.sequences)
    if not weight > 0:
        raise BadInput(
            f"the sequences of step {progress.step} weigh {weight}", "give them some weight"
        )
    if parts.indivisible is not None and len(loaded.batches) > 1:
        raise BadInput(
            f"step {progress.step} is {len(loaded.batches)} micro-batches: {parts.indivisible}",
            "give a first cut that holds every step in one micro-batch",
        )
    set_rates(parts.optimizer, session.rates)
    stop = request.name is not None
    first = settings.eager_first and progress.step == 0
    with session.profiled(loaded), eagerly(parts.model) if first else nullcontext():
        session.waits.begin(loaded.waited)
        if parts.sharded:
            taken = take_sharded_step(parts, loaded, weight, progress.rung, stop=stop)
        else:
            taken = take_step(
                parts,
                loaded,
                weight,
                progress.rung,
                stop=stop,
                captured=not first,
                tell=lambda text, figures: session.tell("oom", text, figures),
            )
    _after_step(session)
    session.took(loaded, taken)
    if first:
        session.read(wait=True)  # the compiler comes next, and would hold the first loss back
    if progress.step % settings.logging_steps == 0 or progress.step == session.total_steps:
        session.log()
    better = session.evaluation_is_due and _evaluate(session)
    if better:
        session.keep_best()
    if (better or session.save_is_due) and not session.ends_in_memory:
        session.save()
    return taken.stop


def _after_step(session: Session) -> None:
    """Call the task's own hook after an update, where it has one."""
    hook = getattr(session.parts.task, "after_step", None)
    if hook is None:
        return
    try:
        with torch.no_grad():
            hook(session.parts.model, session.progress.step + 1)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            "memory ran out in the task's after_step", "take a smaller batch or a smaller model"
        ) from error


def _evaluate(session: Session) -> bool:
    """Evaluate; returns True for the best result so far."""
    session.pause()
    session.check_weights()
    started = time.perf_counter()
    metrics, session.progress.eval_batch_size = evaluate(
        session.parts,
        session.progress.eval_batch_size,
        lambda text, figures: session.tell("oom", text, figures),
    )
    better = session.evaluated(metrics, time.perf_counter() - started)
    session.go_on()
    return better


# ── folds that share their parts ──────────────────────────────────────────────────────────────────


@dataclass
class Shared:
    """Parts of the last fold, for the next one; only a run on one device shares them."""

    parts: Parts | None = None
    profiled: bool = False
    """A step was profiled for the receipt; later folds run the same code."""
    frozen: Future[str | None] = field(default_factory=Future)
    """Checksum of the frozen weights."""
    best: Mapping[str, Tensor] | None = None
    """Trained weights of the fold's best evaluation, in host memory; None where they are not."""
    host: dict[str, Tensor] = field(default_factory=dict)
    """Pinned memory that checkpoints are copied to before they are written."""
    best_host: dict[str, Tensor] = field(default_factory=dict)
    """Pinned memory of `best`."""
    sources: dict[str, Tensor] = field(default_factory=dict)
    """Frozen weights as they were built, in the host's memory: the device has the same."""
    settle: Callable[[], None] = lambda: None
    """Waits until the frozen weights are no longer read, by an export beside."""

    def whole(self) -> Parts | None:
        """Return the parts of the last fold; sharded ones are freed: the whole model takes room."""
        if self.parts is not None and self.parts.sharded:
            self.parts = None
            give_back_memory()
        return self.parts

    def remember(self, model: nn.Module) -> None:
        """Remember the frozen weights of a model that is about to be moved to a device."""
        named = model.named_parameters()
        frozen = {name: p.detach() for name, p in named if not p.requires_grad}
        self.sources = {name: tensor for name, tensor in frozen.items() if tensor.is_cpu}


def take_over(
    shared: Shared, task: TrainTask, settings: LoopSettings, model: nn.Module
) -> Parts | None:
    """Give the shared parts the initial state of a new fold; None where they do not suit it."""
    before, shared.best = shared.parts, None
    if before is None or not _suits(before, settings, model):
        shared.parts, shared.profiled = None, False
        return None
    before.model.train()
    if _copy(model, before.model, shared):
        shared.frozen = frozen_checksum(before.model, task)
    if (host := host_moments(before.optimizer)) is not None:
        host.settle()
    for state in before.optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()
    if before.scale is not None:
        before.scale.reset()
    return replace(
        before,
        task=task,
        settings=settings,
        buffers=Buffers(before.model),
        loader=StepLoader(task, settings.loader, before.device),
    )


def _suits(before: Parts, settings: LoopSettings, model: nn.Module) -> bool:
    alone = before.whole and before.indivisible is None
    same = _of_parts(before.settings) == _of_parts(settings)
    return (
        alone
        and same
        and is_adamw(before.optimizer)
        and type(model) is type(before.model)
        and _tensors(model) == _tensors(before.model)
    )


def _of_parts(settings: LoopSettings) -> tuple[object, ...]:
    """Settings that are built into the parts; others may differ from fold to fold."""
    names = (
        *("device", "precision", "optimizer", "sharding"),
        *("compile", "compile_mode", "compile_scope", "cuda_graph"),
    )
    return *(getattr(settings, name) for name in names), type(settings.cuts[0])


def _tensors(model: nn.Module) -> list[tuple[object, ...]]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return [(name, t.shape, t.dtype, t.requires_grad) for name, t in named]


@torch.no_grad()
def _copy(new: nn.Module, old: nn.Module, shared: Shared) -> bool:
    """Copy all weights and buffers; returns True where a frozen weight changed.

    Frozen weights in the memory of the sources are there already.
    """
    sources, changed = shared.sources, False
    for (name, source), (_, target) in zip(
        [*new.named_parameters(), *new.named_buffers()],
        [*old.named_parameters(), *old.named_buffers()],
        strict=True,
    ):
        frozen = isinstance(target, nn.Parameter) and not target.requires_grad
        if frozen and name in sources and source.data_ptr() == sources[name].data_ptr():
            continue
        there = source.to(target.device, non_blocking=True)
        if frozen and torch.equal(there, target):
            continue
        if frozen and not changed:
            shared.settle()
            changed = True
        target.copy_(there)
    return changed
