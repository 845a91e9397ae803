"""How a run begins: the parts are built, and a run that was left is put back where it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from trainfit.data.loading import StepLoader
from trainfit.engine import checkpoint, journal, random_state
from trainfit.engine.distributed import World, first_says, spread_weights
from trainfit.engine.memory_errors import is_out_of_memory
from trainfit.engine.named_tensors import load_model, load_optimizer
from trainfit.engine.optimizer import build_optimizer, keep_trained_in_float32
from trainfit.engine.precision import loss_scale
from trainfit.engine.progress import Progress
from trainfit.engine.random_state import RandomState
from trainfit.engine.recovery import Buffers, Parts
from trainfit.engine.settings import LoopSettings
from trainfit.errors import BadInput, RunFailed, TrainfitWarning
from trainfit.records import TrainTask
from trainfit.runtime import compile_blocks

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins in this process, and what is to be told about it."""

    progress: Progress
    resumed: bool
    """From a checkpoint."""
    events: tuple[tuple[str, str], ...] = ()


def build_model(task: TrainTask) -> nn.Module:
    """The task's model on the CPU, ready to train."""
    model = task.build_model()
    keep_trained_in_float32(model)
    return model.train()


def build_parts(
    task: TrainTask, settings: LoopSettings, model: nn.Module, world: World, device: torch.device
) -> Parts:
    """All that a step needs, on the device."""
    _fits(lambda: model.to(device), "the model")
    spread_weights(world, model)
    optimizer = _fits(lambda: build_optimizer(model, settings.optimizer), "the optimizer's state")
    if settings.compile:
        compile_blocks(model, settings.compile_mode)
    return Parts(
        task=task,
        settings=settings,
        model=model,
        buffers=Buffers(model),
        optimizer=optimizer,
        scale=loss_scale(settings.precision, device),
        loader=StepLoader(task, settings.loader, device, rank=world.rank, ranks=world.size),
        world=world,
        device=device,
    )


def _fits(build: Callable[[], T], what: str) -> T:
    try:
        return build()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise RunFailed(
            f"{what} alone does not fit the memory",
            "take a smaller model, train fewer weights (model.method=lora), or a larger device",
        ) from error


def place(parts: Parts, run: Path, frozen: str | None, *, resume: bool) -> Start:
    """Where the run begins: at its newest good checkpoint, or at the first step."""
    folder, events = _find_checkpoint(run, parts.world, resume)
    if folder is not None:
        progress, more = _restore(parts, folder, frozen)
        events = (*events, ("resumed", f"from {folder.name}"), *more)
    else:
        progress = Progress(eval_batch_size=parts.settings.eval_batch_size)
        if resume:
            events = (*events, ("resumed", "from the beginning: there is no checkpoint yet"))
    if parts.world.first:
        run.mkdir(parents=True, exist_ok=True)
        journal.forget_after(run, progress.step)
    return Start(progress, folder is not None, events)


def _find_checkpoint(
    run: Path, world: World, resume: bool
) -> tuple[Path | None, tuple[tuple[str, str], ...]]:
    """The first rank looks; every rank takes the same one."""
    found: Path | None = None
    faults: tuple[str, ...] = ()
    if world.first:
        if not resume and checkpoint.listed(run):
            raise BadInput(f"{run} holds a run already", "go on with --resume, or start a new one")
        checkpoint.clear_unfinished(run)
        found, faults = checkpoint.latest_good(run)
        for text in faults:
            warnings.warn(text, TrainfitWarning, stacklevel=2)
    name = first_says(world, "" if found is None else str(found))
    return Path(name) if name else None, tuple(("damaged", text) for text in faults)


def _restore(
    parts: Parts, folder: Path, frozen: str | None
) -> tuple[Progress, tuple[tuple[str, str], ...]]:
    """Put everything back as it was when the checkpoint was written."""
    contents = checkpoint.read(folder)
    state = contents.state
    if state["frozen"] != frozen:
        raise BadInput(
            f"the weights that are not trained are not those {folder} was trained with",
            "use the model of the run",
        )
    load_model(parts.model, contents.model)
    load_optimizer(parts.model, parts.optimizer, contents.optimizer)
    if parts.scale is not None and state["scale"] is not None:
        factor, quiet = (torch.tensor(value, device=parts.device) for value in state["scale"])
        parts.scale.factor, parts.scale.quiet_steps = factor, quiet
    progress = Progress.from_data(state["progress"], str(folder))
    progress.use_rung(min(progress.rung, len(parts.settings.cuts) - 1))
    states = state["random"]
    if len(states) != parts.world.size:
        text = f"saved by {len(states)} ranks, now there are {parts.world.size}: dropout differs"
        return progress, (("ranks", text),)
    own = RandomState.from_json(states[parts.world.rank], str(folder))
    random_state.put_back(own, parts.device)
    return progress, ()
