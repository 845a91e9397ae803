"""The receipt of a loop that is not trainfit's: `with trainfit.observe() as seen: train()`.

torch calls a hook after every optimizer step, whoever wrote the loop: transformers, Lightning,
Accelerate or nobody. Between two such calls lies a step, and one of them is looked at. Nothing of
the program is changed, and where there is no step to look at, nothing happens.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from trainfit.core.errors import BadInput
from trainfit.core.records import Receipt, Record, Scalar
from trainfit.measuring.profiled_step import Look, looking
from trainfit.measuring.receipt import make_receipt, visible_wishes
from trainfit.measuring.timing import GIB
from trainfit.measuring.trace import Evidence, cuda_in_use

WARM_UP = 5
"""Optimizer steps before the one that is looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed(Record):
    """What was seen of a program."""

    steps: int
    steps_per_second: float | None = None
    """After the warm-up, with whatever else the program did in between."""
    peak_memory_gib: float | None = None
    receipt: Receipt | None = None
    evidence: Evidence | None = None
    obstacle: str = ""
    """Why there is no receipt."""


class Observation:
    """A program under observation in this process."""

    def __init__(
        self, *, warm_up: int = WARM_UP, name: str = "", tell: Callable[[], None] = lambda: None
    ) -> None:
        """Look at the step after `warm_up` ones; `tell` is called when that is done."""
        self._warm_up, self._name, self._tell = warm_up, name, tell
        self.steps = 0
        self.evidence: Evidence | None = None
        self.wanted: dict[str, Scalar] = {}
        self._optimizer: weakref.ref[Any] | None = None
        self._look: Look | None = None
        self._ended = ExitStack()
        self._given: list[Any] = []
        self._loaders: list[Any] = []
        self._times: list[float] = []
        self._obstacle = ""

    @property
    def receipt(self) -> Receipt | None:
        """What was asked for, as far as that is visible, against what was seen."""
        if self.evidence is None:
            return None
        return make_receipt(self._name, self.evidence, self.wanted)

    def result(self) -> Observed:
        """All of it, as a record."""
        return Observed(
            steps=self.steps,
            steps_per_second=self._rate(),
            peak_memory_gib=_peak_memory(),
            receipt=self.receipt,
            evidence=self.evidence,
            obstacle="" if self.evidence is not None else self._why_not(),
        )

    def stepped(self, optimizer: Any, _args: Any = (), _kwargs: Any = None) -> None:
        """Torch's hook: an optimizer has made a step."""
        if self._optimizer is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is not optimizer:  # the first one counts the steps
            return
        self.steps += 1
        if self._look is not None:
            self._end_look(optimizer)
        elif self.steps == self._warm_up and os.environ.get("RANK", "0") == "0":
            self._begin_look()
        elif self.steps > self._warm_up + 1:
            self._times = [*self._times[:1], time.perf_counter()]

    def stop(self) -> None:
        """Leave the program alone."""
        self._ended.close()
        self._look = None

    def _begin_look(self) -> None:
        self._ended.enter_context(_watching_loaders(self._given, self._loaders))
        self._look = self._ended.enter_context(looking(self.steps, self._given))

    def _end_look(self, optimizer: Any) -> None:
        look, self._look = self._look, None
        self._ended.close()
        if look is None or look.evidence is None:
            self._obstacle = look.obstacle if look is not None else ""
            return
        trained = sum(p.grad is not None for g in optimizer.param_groups for p in g["params"])
        seen = look.evidence
        if trained:
            pieces = max(1, round(seen.gradients / trained))
            seen = replace(seen, batches=replace(seen.batches, micro_batches=pieces))
        self.evidence = seen
        self.wanted = visible_wishes(optimizer, self._loaders, seen)
        self._given.clear()
        self._loaders.clear()
        self._times = [time.perf_counter()]
        self._tell()

    def _rate(self) -> float | None:
        if len(self._times) < 2 or self._times[1] <= self._times[0]:
            return None
        return (self.steps - self._warm_up - 1) / (self._times[1] - self._times[0])

    def _why_not(self) -> str:
        if self._obstacle:
            return self._obstacle
        if not self.steps:
            return "no optimizer of torch made a step"
        return (
            f"it took {self.steps} optimizer steps, and the one after {self._warm_up} is looked at"
        )


@contextmanager
def observe(*, warm_up: int = WARM_UP) -> Iterator[Observation]:
    """See what is really active in the training that the block does.

    After the block, or as soon as `warm_up` optimizer steps and one more were made, `.receipt` of
    what is given has it; None where there were fewer.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    observation = Observation(warm_up=warm_up, name="observed")
    handle = register_optimizer_step_post_hook(observation.stepped)
    try:
        yield observation
    finally:
        handle.remove()
        observation.stop()


def observe_process(path: Path, optimizers: Any) -> None:
    """Observe this process to its end, and keep what was seen in `path`.

    `optimizers` is the module torch.optim.optimizer, which may be all of torch that is there yet.
    """
    import atexit

    observation = Observation(name=path.parent.name, tell=lambda: observation.result().save(path))

    def end() -> None:
        observation.stop()
        if observation.steps:
            observation.result().save(path)

    optimizers.register_optimizer_step_post_hook(observation.stepped)
    atexit.register(end)


@contextmanager
def _watching_loaders(given: list[Any], loaders: list[Any]) -> Iterator[None]:
    """Keep every batch that a DataLoader gives, as it gives it."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    kind: Any = _BaseDataLoaderIter
    original = kind.__next__

    def fetched(self: Any) -> Any:
        batch = original(self)
        given.append(batch)
        loaders.append(self)
        return batch

    kind.__next__ = fetched
    try:
        yield
    finally:
        kind.__next__ = original


def _peak_memory() -> float | None:
    if not cuda_in_use():
        return None
    import torch

    return torch.cuda.max_memory_allocated() / GIB


_INJECTED = Path(__file__).parent / "injected"


def run_observed(
    command: Sequence[str], output: IO[str] | int | None = None
) -> tuple[int, Observed | None]:
    """Its exit code, and what was seen; None where no Python of it made an optimizer step.

    `output` takes its standard output where that is not to be this process's own.
    """
    with tempfile.TemporaryDirectory(prefix="trainfit-observed-") as folder:
        path = os.pathsep.join(filter(None, [str(_INJECTED), os.environ.get("PYTHONPATH")]))
        given = {**os.environ, "PYTHONPATH": path, "TRAINFIT_OBSERVE": folder}
        try:
            child = subprocess.Popen(list(command), env=given, stdout=output)
        except OSError as error:
            what = f"cannot run {command[0]!r} ({error.strerror})"
            raise BadInput(what, "give a command after --, as in: python train.py") from None
        code = _wait(child)
        return code, _best(Path(folder))


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Its own way to end on Ctrl-C is waited for: the terminal has sent it the signal too."""
    while True:
        with suppress(KeyboardInterrupt):
            code = child.wait()
            return code if code >= 0 else 128 - code


def _best(folder: Path) -> Observed | None:
    """Of several processes, the one that was looked at, or else that made the most steps."""
    found = []
    for path in sorted(folder.glob("*.json")):
        with suppress(BadInput):
            found.append(Observed.load(path))
    return max(found, key=lambda seen: (seen.receipt is not None, seen.steps), default=None)
