"""Receipts of loops that are not trainfit's: `with trainfit.observe() as seen: train()`.

torch calls a hook after every optimizer step, whoever wrote the loop: transformers, Lightning,
Accelerate or the user. One step between two such calls is profiled. The program is not changed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from trainfit.core.errors import BadInput
from trainfit.core.records import Receipt, Record, Scalar
from trainfit.measuring.evidence import look_at
from trainfit.measuring.profiled_step import Look, profiled
from trainfit.measuring.receipt import make_receipt, visible_framework, visible_requests
from trainfit.measuring.timing import cuda_peaks
from trainfit.measuring.trace import UPDATE, Evidence
from trainfit.runs import run_folder

WARM_UP = 5
"""Optimizer steps before the profiled one."""
_COUNTED = 50
"""Batches whose padding is counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed(Record):
    """Evidence and figures of a program that was watched while it trained."""

    steps: int
    steps_per_second: float | None = None
    """Rate after the warm-up, including all else that the program did."""
    peak_memory_gib: float | None = None
    memory_share: float | None = None
    """Peak memory as a share of the GPU's."""
    padding_share: float | None = None
    """Share of padding in the batches after the profiled step."""
    framework: str = "torch"
    """transformers, lightning, accelerate, or torch alone."""
    receipt: Receipt | None = None
    evidence: Evidence | None = None
    obstacle: str = ""
    """Reason that there is no receipt."""


class Observation:
    """Observer of the program in this process.

    The optimizer that makes the most steps is the one to profile: a short warm-up with another
    one is profiled first and then replaced.
    """

    def __init__(
        self, *, warm_up: int = WARM_UP, name: str = "", tell: Callable[[], None] = lambda: None
    ) -> None:
        """Look at the step after `warm_up` ones; `tell` is called when that is done."""
        self._warm_up, self._name, self._tell = warm_up, name, tell
        self.steps = 0
        self.evidence: Evidence | None = None
        self.wanted: dict[str, Scalar] = {}
        self._framework = "torch"
        self._counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._looked_at: weakref.ref[Any] | None = None
        self._looked_steps = 0
        self._look: Look | None = None
        self._ended = ExitStack()
        self._marked = ExitStack()
        self._passes = Passes()
        self._given: list[Any] = []
        self._tokens = TokenCounts()
        self._loaders: list[Any] = []
        self._times: list[float] = []
        self._timed = 0
        self._obstacle = ""

    @property
    def receipt(self) -> Receipt | None:
        """Requested settings, as far as they are visible, against what was seen."""
        if self.evidence is None:
            return None
        return make_receipt(self._name, self.evidence, self.wanted)

    def result(self) -> Observed:
        """Everything observed, as a record."""
        return Observed(
            steps=self.steps,
            steps_per_second=self._rate(),
            peak_memory_gib=cuda_peaks()[0],
            memory_share=_memory_share(cuda_peaks()[0]),
            padding_share=self._tokens.padding_share,
            framework=self._framework,
            receipt=self.receipt,
            evidence=self.evidence,
            obstacle="" if self.evidence is not None else self._why_not(),
        )

    def listen(self, optimizers: Any) -> list[Any]:
        """Register the hooks with torch.optim.optimizer; return their handles."""
        return [
            optimizers.register_optimizer_step_pre_hook(self.stepping),
            optimizers.register_optimizer_step_post_hook(self.stepped),
        ]

    def stepping(self, optimizer: Any, _args: Any = (), _kwargs: Any = None) -> None:
        """Mark the step for the profiler, which stops before torch's own mark ends."""
        if self._look is not None:
            from torch.profiler import record_function

            self._marked.enter_context(record_function(f"{UPDATE}{type(optimizer).__name__}.step"))

    def stepped(self, optimizer: Any, _args: Any = (), _kwargs: Any = None) -> None:
        """Count a step that an optimizer has made, and look at one."""
        self._marked.close()
        count = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        self.steps = max(self.steps, count)
        chosen = self._looked_at is not None and self._looked_at() is optimizer
        if self._look is not None:
            self._passes.end_step(optimizer)
            if chosen:
                self._looked_steps = count
                self._end_look(optimizer)
        elif chosen:
            self._looked_steps = count
            if self._times:
                self._times.append(time.perf_counter())
                del self._times[1:-1]
                self._timed += 1
        elif count > max(self._warm_up - 1, self._looked_steps) and run_folder.is_first_rank():
            self._begin_look(optimizer, count)

    def stop(self) -> None:
        """Remove everything that observes the program."""
        self._marked.close()
        self._ended.close()
        self._look = None

    def _begin_look(self, optimizer: Any, count: int) -> None:
        self._looked_at, self._looked_steps = weakref.ref(optimizer), count
        self._ended.enter_context(_watching_loaders(self._given, self._loaders, self._passes))
        self._ended.enter_context(self._passes.counted(list(self._counts)))
        self._look = self._ended.enter_context(profiled(count, self._given, optimizer=optimizer))

    def _end_look(self, optimizer: Any) -> None:
        look, self._look = self._look, None
        self._ended.close()
        if look is None or look.evidence is None:
            self._obstacle = look.obstacle if look is not None else ""
            return
        seen = look.evidence
        if (passes := self._passes.least) is not None:
            seen = replace(seen, batches=replace(seen.batches, micro_batches=passes))
        self.evidence = seen
        self.wanted = visible_requests(optimizer, self._loaders, seen)
        self._framework = visible_framework()
        self._given.clear()
        self._loaders.clear()
        self._ended.enter_context(_watching_loaders(self._tokens, None, self._passes))
        self._times, self._timed = [time.perf_counter()], 0
        self._tell()

    def _rate(self) -> float | None:
        if len(self._times) < 2 or self._times[1] <= self._times[0]:
            return None
        return self._timed / (self._times[1] - self._times[0])

    def _why_not(self) -> str:
        if self._obstacle:
            return self._obstacle
        if not self.steps:
            return "no optimizer of torch made a step"
        taken = f"it took {self.steps} optimizer steps"
        return f"{taken}, and the one after {self._warm_up} is profiled"


class Passes:
    """Backward passes behind each optimizer step: more than one is gradient accumulation.

    Gradients of two optimizers do not add up: a GAN's discriminator also gets gradients from the
    generator's loss, which are cleared before its own step.
    """

    def __init__(self) -> None:
        self._passes: dict[int, int] = {}
        self._last: dict[int, tuple[Any, int]] = {}
        self.count = 0  # gradients so far
        self.least: int | None = None
        """Fewest passes of a step: a GAN's real and fake halves are two for one optimizer alone."""

    @contextmanager
    def counted(self, optimizers: Sequence[Any]) -> Iterator[None]:
        """Count the passes of these optimizers' weights meanwhile."""
        self._passes.clear()
        self.least = None
        handles = [
            weight.register_post_accumulate_grad_hook(self._accumulated)
            for optimizer in optimizers
            for weight in _weights(optimizer)
            if weight.requires_grad and weight.is_leaf
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._last.clear()

    def _accumulated(self, weight: Any) -> None:
        """Count a pass; it is the first one where the gradient is new or was written to."""
        self.count += 1
        gradient, key = weight.grad, id(weight)
        if gradient is None:
            return
        before, version = self._last.get(key, (None, 0))
        added = before is gradient and gradient._version == version + 1
        self._passes[key] = self._passes.get(key, 0) + 1 if added else 1
        self._last[key] = gradient, gradient._version

    def end_step(self, optimizer: Any) -> None:
        """Note how many backward passes came before an optimizer's update of its weights."""
        found = [self._passes.pop(id(w), 0) for w in _weights(optimizer) if w.grad is not None]
        if passes := max(found, default=0):
            self.least = passes if self.least is None else min(self.least, passes)


def _memory_share(peak_gib: float | None) -> float | None:
    if peak_gib is None:
        return None
    import torch

    return peak_gib * 2**30 / float(torch.cuda.get_device_properties().total_memory)


def _weights(optimizer: Any) -> list[Any]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


@contextmanager
def observe(*, warm_up: int = WARM_UP) -> Iterator[Observation]:
    """Find out which optimizations are really active in the training inside the block.

    The observation has a `.receipt` after `warm_up` optimizer steps and one more, before that None.
    """
    from torch.optim import optimizer as optimizers

    observation = Observation(warm_up=warm_up, name="observed")
    handles = observation.listen(optimizers)
    try:
        yield observation
    finally:
        for handle in handles:
            handle.remove()
        observation.stop()


def observe_process(path: Path, optimizers: Any) -> None:
    """Observe this process to its end, and save the observations in `path`.

    `optimizers` is the module torch.optim.optimizer; the rest of torch may not be imported yet.
    """
    import atexit

    observation = Observation(name=path.parent.name, tell=lambda: observation.result().save(path))

    def end() -> None:
        observation.stop()
        if observation.steps:
            observation.result().save(path)

    observation.listen(optimizers)
    atexit.register(end)


class TokenCounts:
    """Counts the tokens of batches, with and without padding, as they come from a loader."""

    def __init__(self) -> None:
        self._left, self._tokens, self._capacity = _COUNTED, 0, 0

    def append(self, batch: Any) -> None:
        """Count a batch; those after the first fifty, or on a GPU, are not looked at."""
        if not self._left or not isinstance(batch, Mapping):
            return
        self._left -= 1
        mask = batch.get("attention_mask")
        if getattr(mask, "is_cuda", True) is False:
            seen = look_at(batch)
            self._tokens += seen.tokens or 0
            self._capacity += seen.capacity or 0

    @property
    def padding_share(self) -> float | None:
        """Share of padding in all of them; None where none told."""
        return 1 - self._tokens / self._capacity if self._capacity else None


@contextmanager
def _watching_loaders(given: Any, loaders: Any, passes: Passes) -> Iterator[None]:
    """Collect the batches of loaders, and the loaders, but for those of an evaluation."""
    from torch import is_grad_enabled
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    kind: Any = _BaseDataLoaderIter
    original = kind.__next__
    begun: dict[Any, tuple[int, int]] = {}

    def fetched(self: Any) -> Any:
        try:
            batch = original(self)
        except StopIteration:
            place, passed = begun.get(self, (0, -1))
            if passed == passes.count:  # an evaluation: no backward pass
                del given[place:], loaders[place:]
            raise
        if is_grad_enabled():
            if loaders is not None:
                begun.setdefault(self, (len(given), passes.count))
                loaders.append(self)
            given.append(batch)
        return batch

    kind.__next__ = fetched
    try:
        yield
    finally:
        kind.__next__ = original


_INJECTED = Path(__file__).parent / "injected"


def run_observed(
    command: Sequence[str], output: IO[str] | int | None = None
) -> tuple[int, Observed | None]:
    """Run a command; return its exit code and the observations, None without optimizer steps.

    `output` replaces this process's standard output.
    """
    with tempfile.TemporaryDirectory(prefix="trainfit-observed-") as folder:
        code = run_injected(command, {"TRAINFIT_OBSERVE": folder}, output)
        return code, _best(Path(folder))


def run_injected(
    command: Sequence[str], variables: Mapping[str, str], output: IO[str] | int | None = None
) -> int:
    """Run a command whose Python starts with `injected`, which reads `variables`."""
    path = os.pathsep.join(filter(None, [str(_INJECTED), os.environ.get("PYTHONPATH")]))
    given = {**os.environ, "PYTHONPATH": path, **variables}
    try:
        child = subprocess.Popen(list(command), env=given, stdout=output)
    except OSError as error:
        what = f"cannot run {command[0]!r} ({error.strerror})"
        raise BadInput(what, "give a command after --, as in: python train.py") from None
    return _wait(child)


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Wait for the command, also on Ctrl-C: the terminal has sent it the signal too."""
    with _passing_on(child):
        while True:
            with suppress(KeyboardInterrupt):
                code = child.wait()
                return code if code >= 0 else 128 - code


@contextmanager
def _passing_on(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass on signals that only this process gets, as from `timeout`, a container or Slurm."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores them for both
                before[number] = signal.signal(number, lambda sent, _: child.send_signal(sent))
    try:
        yield
    finally:
        for sent, handler in before.items():
            signal.signal(sent, handler or signal.SIG_DFL)


def _best(folder: Path) -> Observed | None:
    """Choose the process that has a receipt, or else made the most steps."""
    found = []
    for path in sorted(folder.glob("*.json")):
        with suppress(BadInput):
            found.append(Observed.load(path))
    return max(found, key=lambda seen: (seen.receipt is not None, seen.steps), default=None)
