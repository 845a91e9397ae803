"""What a stretch of work called and launched, by torch's own profiler.

The profiler sees operators under autocast, in compiled graphs and in the backward pass alike, and
changes none of them. On a GPU it sees the kernels too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainfit.runtime.environment import quiet_profiler

_BACKWARD = "autograd::engine::evaluate_function"
_DETAILED = re.compile(r"mm\b|mm_|linear_pointwise|attention|attn|aten::copy_|triton_tem")
"""Whose inputs are of interest; to ask for those of every operator would take a second."""
_BYTES = re.compile(r'"bytes": (\d+)')


class Operator(NamedTuple):
    """A call of an operator, or a range that torch itself marks."""

    name: str
    dtypes: tuple[str, ...] = ()
    """Of its inputs, as C++ spells them; empty for what is no tensor."""
    shapes: tuple[tuple[int, ...], ...] = ()
    backward: bool = False
    """Whether it ran inside the backward pass."""
    within: str = ""
    """The marked range it is in: an optimizer's, or none."""
    seconds: float = 0.0


class Kernel(NamedTuple):
    """Launches of one kernel, or copies of one kind, on the GPU."""

    name: str
    launches: int
    seconds: float
    copied: int = 0
    """Bytes."""


@dataclass(slots=True)
class Trace:
    """Everything that was seen, filled in when the block ends."""

    operators: list[Operator] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)

    def calls(self, *names: str) -> int:
        """How often operators of these names were called."""
        return sum(op.name in names for op in self.operators)


class Profiling:
    """The profiler between its start and its end."""

    def __init__(self) -> None:
        """Start it; raises RuntimeError where another one is at work."""
        from torch._C import _autograd
        from torch.autograd.profiler import profile

        if _autograd._profiler_enabled():
            raise RuntimeError("another profiler is at work")
        cuda = cuda_in_use()
        options: dict[str, Any] = {"use_device": "cuda"} if cuda else {}
        profiler: Any = profile
        self._profile = profiler(use_kineto=cuda, record_shapes=True, **options)
        with ExitStack() as restore:
            quiet_profiler(restore)
            self._profile.__enter__()

    def end(self) -> Trace:
        """Wait for the device, stop, and say what was seen."""
        self._profile.__exit__(None, None, None)
        results = self._profile.kineto_results
        return read(results.events()) if results is not None else Trace()


@contextmanager
def traced() -> Iterator[Trace]:
    """See all that the block does; the trace is complete when it has ended without an error."""
    trace = Trace()
    profiling = Profiling()
    try:
        yield trace
    finally:
        seen = profiling.end()
        trace.operators, trace.kernels = seen.operators, seen.kernels


def cuda_in_use() -> bool:
    """Whether this process has started CUDA; it is not started to find out."""
    import torch

    cuda: Any = torch.cuda
    return bool(cuda.is_available() and cuda.is_initialized())


def read(events: Iterable[Any]) -> Trace:
    """A trace from the profiler's events."""
    on_cpu: list[Any] = []
    on_gpu: list[Any] = []
    for event in events:
        (on_cpu if event.device_type().name == "CPU" else on_gpu).append(event)
    return Trace(list(_operators(on_cpu)), _kernels(on_gpu))


def _operators(events: list[Any]) -> Iterator[Operator]:
    """The calls in their order, each with the ranges that it lies in, thread by thread."""
    backward_until: dict[int, int] = {}
    range_until: dict[int, tuple[int, str]] = {}
    for event in sorted(events, key=lambda e: (e.start_ns(), -e.end_ns())):
        name, thread, start = event.name(), event.start_thread_id(), event.start_ns()
        until, within = range_until.get(thread, (0, ""))
        detailed = _DETAILED.search(name) is not None
        yield Operator(
            name=name,
            dtypes=tuple(event.dtypes()) if detailed else (),
            shapes=tuple(tuple(s) for s in event.shapes()) if detailed else (),
            backward=start < backward_until.get(thread, 0),
            within=within if start < until else "",
            seconds=(event.end_ns() - start) / 1e9,
        )
        if name.startswith(_BACKWARD):
            backward_until[thread] = max(event.end_ns(), backward_until.get(thread, 0))
        elif name.startswith("Optimizer."):
            range_until[thread] = event.end_ns(), name


def _kernels(events: list[Any]) -> list[Kernel]:
    """The kernels by name, those that took longest first."""
    totals: dict[str, list[float]] = {}
    for event in events:
        total = totals.setdefault(event.name(), [0, 0.0, 0])
        total[0] += 1
        total[1] += (event.end_ns() - event.start_ns()) / 1e9
        total[2] += _copied(event)
    kernels = [Kernel(name, int(n), s, int(b)) for name, (n, s, b) in totals.items()]
    return sorted(kernels, key=lambda kernel: -kernel.seconds)


def _copied(event: Any) -> int:
    """Bytes of a copy; 0 for what is none, or where this torch does not tell."""
    if not event.name().startswith("Memcpy"):
        return 0
    told = getattr(event, "metadata_json", "")
    found = _BYTES.search(str(told() if callable(told) else told))
    return int(found[1]) if found else 0
