"""Names of the changes that make a training faster, and the record of those that were made."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from trainfit.core.errors import BadInput
from trainfit.core.records import Record

SPEEDUPS = ("unpadded", "fused", "tf32")
"""Changes by name; TF32 rounds differently, so it is made only where it is asked for."""
_BY_DEFAULT = ("unpadded", "fused")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedUp(Record):
    """Changes that were made to a training, and those that were not, with the reason."""

    done: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    packed: int = 0
    """Batches that went without padding."""
    own: int = 0
    """Batches that went the model's own way."""
    real: int = 0
    """Tokens of the batches without padding."""
    padded: int = 0
    """The same with their padding."""
    times: float | None = None
    """Speed of steps without padding, as a multiple of those with it; None: not measured."""
    error: float = 0.0
    """Standard error of `times`."""

    def line(self) -> str:
        """Say all of it in one line."""
        said = ", ".join(self.done) or "nothing changed"
        if self.packed:
            share = 1 - self.real / self.padded
            said += f"; {share:.0%} of the tokens were padding and were not computed"
            said += f", in {self.packed} of {self.packed + self.own} batches"
        elif self.own:
            said += f"; but all {self.own} batches went the model's own way"
        if self.times is not None:
            slower = self.times + self.error < 1
            said += f"; {self.times:.2f} times as fast as with padding (±{self.error:.2f})"
            said += ", so that all later steps had it" if slower else ""
        return f"trainfit: {said}" + "".join(f"; not {one}" for one in self.left)


def chosen(only: Collection[str] | None, without: Collection[str] = ()) -> list[str]:
    """Return the changes that are asked for; raise BadInput for an unknown one."""
    for name in (*(only or ()), *without):
        if name not in SPEEDUPS:
            raise BadInput(f"unknown speed-up {name!r}", f"choose {', '.join(SPEEDUPS)}")
    wanted = only or _BY_DEFAULT
    return [name for name in wanted if name not in without]
