"""`trainfit run`: the trainers of a script that is not changed are made faster as they start.

`hook` is called inside of the script's process, when a library with a trainer is imported.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
import time
import weakref
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainfit.core.errors import BadInput
from trainfit.core.records import Record

if TYPE_CHECKING:
    from trainfit.integrations.body_graphs import Tally

_NAMES = "TRAINFIT_SPEED_UP_NAMES"
_DRY = "TRAINFIT_SPEED_UP_DRY"
_METHODS = {
    "transformers.trainer": ("Trainer", "train"),
    "accelerate.accelerator": ("Accelerator", "prepare"),
    "lightning.pytorch.trainer.trainer": ("Trainer", "fit"),
    "pytorch_lightning.trainer.trainer": ("Trainer", "fit"),
}
"""Class and method of each library that a training passes through, by its module."""
SPEEDUPS = {
    **{"unpadded": True, "graphs": True, "compile": True, "ahead": True, "nowait": True},
    **{"fused": True, "tf32": False},
}
"""Changes by name, and if they are made unasked; TF32 rounds differently."""
GRAPHS = "CUDA graphs"
COMPILED = "compiled blocks"
"""Changes in the words of the closing line."""
WITHOUT = "without padding"
NO_MODEL = "has no model of transformers in it"
_LATER = " (left out later)"
_ALONE = "faster (no Python began with trainfit; where the command sets PYTHONPATH, end it with "
_ALONE += ":$PYTHONPATH, and run no python -I, -E or -S)"


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedUp(Record):
    """Changes that were made to a training, and those that were not, with the reason."""

    done: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    packed: int = 0
    """Batches that went without padding."""
    own: int = 0
    """Batches that went the model's own way."""
    why: tuple[str, ...] = ()
    """Reasons for that, other than the turns in which the own way was timed."""
    real: int = 0
    """Tokens of the batches without padding."""
    padded: int = 0
    """The same with their padding."""
    replayed: int = 0
    """Batches that were replayed as CUDA graphs."""
    times: float | None = None
    """Speed of steps with all changes, as a multiple of the script's own; None: not measured."""
    error: float = 0.0
    """Standard error of `times`."""
    alone: float | None = None
    """Speed without padding and without graphs, where both were measured."""
    added: float | None = None
    """Speed with graphs, as a multiple of `alone`."""
    compiled: float | None = None
    """Speed with compiled blocks, as a multiple of that with graphs alone."""
    whole: float | None = None
    """Speed of the whole script, in which its start, turns and captures count, as a multiple."""

    def line(self) -> str:
        """Say all of it in one line."""
        said = ", ".join(self.done) or "nothing changed"
        if self.packed:
            share = 1 - self.real / self.padded
            said += f"; {share:.0%} of the tokens were padding and were not computed"
            said += f", in {self.packed} of {self.packed + self.own} batches"
        elif self.own:
            said += f"; all {self.own} batches went the model's own way"
        said += f" (with padding: {'; '.join(self.why)})" if self.why else ""
        if self.replayed:
            said += f"; {self.replayed} of them were replayed as CUDA graphs"
        return f"trainfit: {said}" + "".join(f"; not {one}" for one in self.left) + self._speed()

    def _speed(self) -> str:
        """Say how much faster it was."""
        if self.times is None:
            return ""
        said = ""
        if self.alone is not None and self.added is not None:
            said = f"; {self.alone:.2f} times by unpadding alone, {self.added:.2f} by graphs on top"
            said += _LATER if self.added < 1 else ""
        if self.compiled is not None:
            said += f", {self.compiled:.2f} by compiling on top"
            said += _LATER if self.compiled < 1 else ""
        said += "; no clear gain" if abs(self.times - 1) < self.error else ""
        said += f"; {self.times:.2f} times as fast as your script alone (±{self.error:.2f})"
        slower = ", so that all later steps had padding"
        said += slower if self.times < 1 else ", same losses"
        return said if self.whole is None else f"{said}; the whole script {self.whole:.2f} times"


def chosen(only: Collection[str] | None, without: Collection[str] = ()) -> list[str]:
    """Return the changes that are asked for; raise BadInput for an unknown one."""
    for name in (*(only or ()), *without):
        if name not in SPEEDUPS:
            raise BadInput(f"unknown speed-up {name!r}", f"choose {', '.join(SPEEDUPS)}")
    wanted = only or [name for name, unasked in SPEEDUPS.items() if unasked]
    names = [name for name in wanted if name not in without]
    if not names:
        raise BadInput("every speed-up is left out", "leave out fewer of them")
    return names


def run_sped_up(
    command: Sequence[str], names: Sequence[str], *, dry_run: bool
) -> tuple[int, SpeedUp | None]:
    """Run a command with the named changes; return its exit code and what was done.

    A dry run ends where the training would begin. None: no known trainer was seen.
    """
    from trainfit.measuring.observe import run_injected

    with tempfile.TemporaryDirectory(prefix="trainfit-run-") as folder:
        variables = {"TRAINFIT_SPEED_UP": folder, _NAMES: ",".join(names), _DRY: str(int(dry_run))}
        code = run_injected(command, variables)
        found = [] if Path(folder, "began").exists() else [SpeedUp(left=(_ALONE,))]
        for path in sorted(Path(folder).glob("*.json")):
            with suppress(BadInput):
                found.append(SpeedUp.load(path))
    return code, max(found, key=lambda one: (one.packed, len(one.done)), default=None)


def hook(module: Any, folder: Path) -> None:
    """Make trainings that begin in a class of `module` faster, and report them in `folder`."""
    place = _METHODS.get(module.__name__, ("", ""))
    kind = getattr(module, place[0], None)
    method = getattr(kind, place[1], None)
    if method is None:
        return
    direct = module.__name__ == "transformers.trainer"

    @wraps(method)
    def begun(self: Any, *args: Any, **kwargs: Any) -> Any:
        _loops.append(self)
        try:
            for one in [self] if direct else [*args, *kwargs.values()]:
                with suppress(Exception):  # an error of trainfit never ends the script
                    _take(one, folder, _loops[0])  # Trainer has an Accelerator of its own
            if os.environ.get(_DRY) == "1" and _reports:
                sys.exit(0)
            return method(self, *args, **kwargs)
        finally:
            _loops.pop()
            if not _loops and place[1] != "prepare":  # the memory is the script's again
                with suppress(Exception):
                    _free_graphs()
            _report(folder)  # processes of multiprocessing, and those that are killed, have no exit

    setattr(kind, place[1], begun)


class _Taken(NamedTuple):
    """A model that was made faster. Its memory is the script's to free, so it is not held."""

    model: weakref.ref[Any]
    found: SpeedUp
    tallies: list[Tally]


_reports: list[_Taken] = []
"""Models that were made faster in this process, and what was done."""
_seconds = 0.0
"""Time that making them faster took."""
_turns: Any = None
"""The `Turns` of the present training; it imports torch."""
_earlier: list[Any] = []
"""Those of models of other kinds."""
_loops: list[Any] = []
"""Loops that have begun, the outermost first."""


def _take(trainer: Any, folder: Path, loop: Any) -> None:
    """Make one trainer or model faster."""
    global _seconds
    began = time.perf_counter()  # imports of trainfit count
    from torch import nn

    from trainfit.integrations.speeding import apply_speedups, facts_in

    model = trainer if isinstance(trainer, nn.Module) else getattr(trainer, "model", None)
    if not isinstance(model, nn.Module):
        return
    for one in (there := facts_in(model)):
        one.watch_anew()  # this training may read other columns than one before
    _begin_turns(model, loop)
    known = {id(tally) for one in _reports for tally in one.tallies}
    wrapped = there and all(id(one.tally) in known for one in there)  # as by torch.compile
    if wrapped or any(one.model() is model for one in _reports):
        return
    names = [name for name in os.environ.get(_NAMES, "").split(",") if name]
    try:
        found = apply_speedups(trainer, names)
    except Exception as error:  # noqa: BLE001 the script goes on as it is
        found = SpeedUp(left=(f"faster ({type(error).__name__}: {error})",))
    if not _reports:
        atexit.register(_report, folder)
    _reports.append(_taken(model, found))
    _seconds += time.perf_counter() - began
    _begin_turns(model, loop)
    _report(folder)


def _taken(model: Any, found: SpeedUp) -> _Taken:
    from trainfit.integrations.speeding import facts_in

    facts = facts_in(model)
    graphs = [one.graphs.tally for one in facts if one.graphs is not None]
    return _Taken(weakref.ref(model), found, [one.tally for one in facts] + graphs)


def _begin_turns(model: Any, loop: Any) -> None:
    """Time the steps of a model; one of another kind than those before has turns of its own.

    Models that are handed over before a step, or inside of a training, train together.
    """
    global _turns
    from trainfit.integrations.speeding import facts_in
    from trainfit.integrations.turns import Turns

    if not (facts := facts_in(model)):
        return
    # No name of its class, which may be a wrapper's.
    kind = facts[0].family, sum(weight.numel() for weight in model.parameters())
    other = _turns is not None and _turns.steps and kind not in _turns.kinds
    if other and len(_loops) < 2:
        _turns.pause()
        _earlier.append(_turns)
        _turns = next((one for one in _earlier if kind in one.kinds), None)
    _turns = _turns or Turns()
    _turns.kinds.add(kind)
    held = weakref.ref(loop)  # it holds a model
    _turns.begin(facts, lambda: steps_left(held()))


def _free_graphs() -> None:
    """Free the graphs of a training that has ended; another one captures its own.

    Where most memory is free they are kept: some scripts train one model again and again.
    """
    import torch

    from trainfit.integrations.speeding import facts_in

    models = [model for one in _reports if (model := one.model()) is not None]
    graphs = [facts.graphs for model in models for facts in facts_in(model) if facts.graphs]
    free, total = torch.cuda.mem_get_info() if graphs else (1, 1)
    if free <= total / 2:
        for one in graphs:
            one.free()


def steps_left(loop: Any) -> int | None:
    """Return the optimizer steps that a trainer of transformers or Lightning has still to go."""
    try:
        if hasattr(loop, "estimated_stepping_batches"):
            return max(0, int(loop.estimated_stepping_batches) - int(loop.global_step))
        total = int(loop.state.max_steps)
        return max(0, total - int(loop.state.global_step)) if total > 0 else None
    except Exception:  # noqa: BLE001 loops without an end, and those that do not say
        return None


def _whole() -> float | None:
    """Estimate how many times as fast the script was so far, from the start of its process.

    With several models nothing is said: steps were timed with the first alone.
    """
    trained = [one for one in _reports if any(t.packed + t.own_way for t in one.tallies)]
    saved = _turns.saved() if _turns and len(trained) == 1 else None
    if saved is None:
        return None
    import psutil

    took = time.time() - psutil.Process().create_time()
    spent = _seconds + sum(tally.seconds for tally in trained[0].tallies)
    return float((took + saved - spent) / took)


def _report(folder: Path) -> None:
    """Write down what was done so far, with the batches of all models."""
    if not _reports:
        return
    tallies = [tally for one in _reports for tally in one.tallies]
    names = ("packed", "own_way", "replayed", "real", "padded")
    packed, own, replayed, real, padded = (sum(getattr(one, n) for one in tallies) for n in names)
    done = list(dict.fromkeys(name for one in _reports for name in one.found.done))
    left = list(dict.fromkeys(name for one in _reports for name in one.found.left))
    if packed:  # parts of the script's own beside a model, as a head that is prepared apart
        left = [one for one in left if NO_MODEL not in one]
    elif own:
        done = [one for one in done if not one.endswith(WITHOUT)]
    if GRAPHS in done and not replayed:
        none = "no size came twice" if packed else "no batch went without padding"
        eager = {reason for one in tallies for reason in one.reasons} or {none}
        done.remove(GRAPHS)
        left.append(f"{GRAPHS} ({'; '.join(sorted(eager))})")
    why = sorted({reason for one in tallies for reason in one.said})
    if own and not (packed or why):  # evaluations alone, or fewer batches than are watched
        why = ["no training step has shown yet if padded columns are read"]
    every = [one for one in (*_earlier, _turns) if one is not None]
    turns = max(every, key=lambda one: (one.gain is not None, one.steps.total()), default=None)
    compiled = turns.compiled if turns else None
    if COMPILED in done and turns and (compiled is None or compiled.times < 1):
        done.remove(COMPILED)
        if compiled is None:
            left.append(f"{COMPILED} ({turns.uncompiled})")
    times = {
        name: gain.times if turns and (gain := getattr(turns, name)) else None
        for name in ("alone", "added", "compiled")
    }
    gain = turns.gain if turns and done else None  # else all ways were the same
    with suppress(OSError):  # the folder goes with the command
        SpeedUp(
            done=tuple(done),
            left=tuple(left),
            why=tuple(why),
            packed=packed,
            own=own,
            real=real,
            padded=padded,
            replayed=replayed,
            times=gain.times if gain else None,
            whole=_whole(),
            error=gain.error if gain else 0.0,
            **times,
        ).save(folder / f"{os.getpid()}.json")
