"""Names of the changes that make a training faster, and the record of those that were made."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from trainfit.core.errors import BadInput
from trainfit.core.records import Record

SPEEDUPS = {
    **{"unpadded": True, "graphs": True, "compile": True, "ahead": True, "nowait": True},
    **{"fused": True, "tf32": False},
}
"""Changes by name, and if they are made unasked; TF32 rounds differently."""


@dataclass
class Switch:
    """Turns changes off while a script's own steps are timed."""

    off: bool = False


AROUND = Switch()
"""Switch of all changes around the models: batches ahead, copies and checks without a wait."""


@dataclass(slots=True)
class Tally:
    """Counts of a model's batches, which outlive the model."""

    packed: int = 0
    """Batches that went without padding; `own_way` ones went the model's own way."""
    own_way: int = 0
    real: int = 0
    """Tokens of the packed batches; `padded` with their padding."""
    padded: int = 0
    replayed: int = 0
    """Batches that were replayed as CUDA graphs."""
    aside: int = 0
    """Batches of evaluations: those that had no gradient."""
    reasons: set[str] = field(default_factory=set)
    """Reasons for passes that were not replayed."""
    said: set[str] = field(default_factory=set)
    """Reasons for batches that kept their padding."""
    seconds: float = 0.0
    """Time that captures and compiling took."""


GRAPHS = "CUDA graphs"
COMPILED = "compiled blocks"
"""Changes in the words of the closing line."""
WITHOUT = "without padding"
NO_MODEL = "has no model of transformers in it"
_LATER = " (left out later)"


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
