"""Operators and kernels of a block by torch's profiler, and the records of evidence.

The profiler sees operators under autocast, in compiled graphs and in the backward pass, and on a
GPU the kernels too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainfit.core.records import Record, Scalar
from trainfit.runtime.environment import quiet_profiler

_BACKWARD = "autograd::engine::evaluate_function"
_DETAILED = re.compile(
    r"mm\b|mm_|linear_pointwise|attention|attn|aten::copy_|triton_tem|aten::convolution"
    r"|quantized_linear"
)
"""Operators whose inputs are read; reading those of every operator would take a second."""
_ATTENTION = re.compile(r"attention|attn")
UPDATE = "Optimizer.step#"
"""Start of the range that torch marks around an optimizer's step, before the optimizer's name."""
_BYTES = re.compile(r'"bytes": (\d+)')
HOST = "the host"
"""Place of moments that a GPU's optimizer keeps in the host's memory."""


def optimizer_of(mark: str) -> str:
    """Class name in the mark of an optimizer's step, or an empty string for another mark."""
    return mark[len(UPDATE) :].partition(".")[0] if mark.startswith(UPDATE) else ""


class Operator(NamedTuple):
    """A call of an operator, or a range that torch itself marks."""

    name: str
    dtypes: tuple[str, ...] = ()
    """C++ names of its inputs' dtypes; empty for an input that is no tensor."""
    shapes: tuple[tuple[int, ...], ...] = ()
    values: tuple[Any, ...] = ()
    """Inputs that are no tensors, each in its place, of attention alone."""
    backward: bool = False
    """True inside the backward pass."""
    within: str = ""
    """Innermost range of an optimizer around it, without the loss of a closure."""
    seconds: float = 0.0
    own_seconds: float = 0.0
    """Time of its kernels on a GPU, else its time without that of operators that it called."""

    @property
    def updating(self) -> str:
        """Class name of the optimizer that ran it to update weights, or an empty string."""
        return optimizer_of(self.within)


class Kernel(NamedTuple):
    """Launches of one kernel, or copies of one kind, on the GPU."""

    name: str
    launches: int
    seconds: float
    copied: int = 0
    """Bytes of the copies."""


@dataclass(slots=True)
class Trace:
    """Operators and kernels, filled in when the block ends."""

    operators: list[Operator] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)

    def calls(self, *names: str) -> int:
        """Count the calls of operators of these names."""
        return sum(op.name in names for op in self.operators)


class Profiling:
    """A profiler that runs, until `end`."""

    def __init__(self) -> None:
        """Start it; raises RuntimeError if another profiler runs."""
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
        """Wait for the device, stop, and return the trace."""
        self._profile.__exit__(None, None, None)
        results = self._profile.kineto_results
        return read(results.events()) if results is not None else Trace()


def cuda_in_use() -> bool:
    """True if this process has started CUDA; asking does not start it."""
    import torch

    cuda: Any = torch.cuda
    return bool(cuda.is_available() and cuda.is_initialized())


def read(events: Iterable[Any]) -> Trace:
    """Read a trace from the profiler's events."""
    on_cpu: list[Any] = []
    on_gpu: list[Any] = []
    for event in events:
        (on_cpu if event.device_type().name == "CPU" else on_gpu).append(event)
    on_cpu.sort(key=lambda e: (e.start_ns(), -e.end_ns()))
    return Trace(_operators(on_cpu, _own_seconds(on_cpu, on_gpu)), _kernels(on_gpu))


def _own_seconds(on_cpu: list[Any], on_gpu: list[Any]) -> list[float]:
    """`Operator.own_seconds` of each event on the CPU."""
    if not on_gpu:
        return _without_called(on_cpu)
    linked: dict[int, float] = {}
    for event in on_gpu:
        key = event.linked_correlation_id()
        linked[key] = linked.get(key, 0.0) + (event.end_ns() - event.start_ns()) / 1e9
    # Calls of the driver have identities of their own, and say what they are linked to.
    return [
        0.0 if event.linked_correlation_id() else linked.pop(event.correlation_id(), 0.0)
        for event in on_cpu
    ]


def _without_called(events: list[Any]) -> list[float]:
    """Time of each event without that of the events inside of it, in their order."""
    own: list[float] = []
    around: dict[int, list[tuple[int, int]]] = {}
    for at, event in enumerate(events):
        start, end = event.start_ns(), event.end_ns()
        stack = around.setdefault(event.start_thread_id(), [])
        while stack and stack[-1][0] <= start:
            stack.pop()
        if stack:
            own[stack[-1][1]] -= (end - start) / 1e9
        own.append((end - start) / 1e9)
        stack.append((end, at))
    return own


def _operators(events: list[Any], own_seconds: list[float]) -> list[Operator]:
    """Calls in their order, each with the ranges of its thread around it."""
    backward_until: dict[int, int] = {}
    ranges: dict[int, list[tuple[int, str]]] = {}
    found: list[tuple[Operator, int, int]] = []
    for event, own in zip(events, own_seconds, strict=True):
        name, thread, start = event.name(), event.start_thread_id(), event.start_ns()
        around = ranges.setdefault(thread, [])
        while around and around[-1][0] <= start:
            around.pop()
        until, within = around[-1] if around else (0, "")
        detailed = _DETAILED.search(name) is not None
        operator = Operator(
            name=name,
            dtypes=tuple(event.dtypes()) if detailed else (),
            shapes=tuple(tuple(s) for s in event.shapes()) if detailed else (),
            values=tuple(event.concrete_inputs()) if _ATTENTION.search(name) else (),
            backward=start < backward_until.get(thread, 0),
            within=within,
            seconds=(event.end_ns() - start) / 1e9,
            own_seconds=own,
        )
        found.append((operator, start, until))
        if name.startswith(_BACKWARD):
            backward_until[thread] = max(event.end_ns(), backward_until.get(thread, 0))
        elif name.startswith("Optimizer."):
            around.append((event.end_ns(), name))
    return _without_closures(found)


def _without_closures(found: list[tuple[Operator, int, int]]) -> list[Operator]:
    """Take the operators before a backward pass out of the optimizer's step that it lies in.

    Lightning, for one, computes the loss inside `optimizer.step(closure)`.
    """
    operators = []
    backward = sys.maxsize
    for operator, start, until in reversed(found):
        if operator.backward:
            backward = start
        if operator.updating and backward < until:
            operator = operator._replace(within="")
        operators.append(operator)
    return operators[::-1]


def _kernels(events: list[Any]) -> list[Kernel]:
    """Kernels by name, the longest first."""
    totals: dict[str, list[float]] = {}
    for event in events:
        total = totals.setdefault(event.name(), [0, 0.0, 0])
        total[0] += 1
        total[1] += (event.end_ns() - event.start_ns()) / 1e9
        total[2] += _copied(event)
    kernels = [Kernel(name, int(n), s, int(b)) for name, (n, s, b) in totals.items()]
    return sorted(kernels, key=lambda kernel: -kernel.seconds)


def _copied(event: Any) -> int:
    """Bytes of a copy; 0 for another event, or where torch does not tell."""
    if not event.name().startswith("Memcpy"):
        return 0
    told = getattr(event, "metadata_json", "")
    found = _BYTES.search(str(told() if callable(told) else told))
    return int(found[1]) if found else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductsSeen(Record):
    """Matrix products of the step."""

    shares: dict[str, float] = field(default_factory=dict)
    """Shares of their operations by dtype: bf16, fp16, fp32, …"""
    casts: int = 0
    """Copies to or from half precision, as autocast makes them."""
    kernels: tuple[str, ...] = ()
    """Names of the longest ones on the GPU."""
    tf32_kernels: int = 0
    exact_kernels: int = 0
    """Kernels whose name says that they multiply fp32 exactly."""

    @property
    def dtype(self) -> str | None:
        """Dtype of most operations."""
        return max(self.shares, key=lambda name: self.shares[name]) if self.shares else None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSeen(Record):
    """Attention kernels of the step."""

    calls: dict[str, int] = field(default_factory=dict)
    """Forward calls by kernel: flash, efficient, cudnn, math, cpu, flex; on packed rows varlen,
    varlen_efficient, and two of trainfit's own, disentangled and softcapped."""
    masked: bool = False
    """True if scaled_dot_product_attention was given a mask."""
    dtype: str | None = None
    head: int | None = None
    """The size of a head."""
    softmaxes: int = 0
    """Calls of softmax, as in attention without a kernel of its own."""
    gathers: int = 0
    """Calls of gather, by which a DeBERTa's scores take their positions."""
    dropout: float | None = None
    """Dropout that the kernels were given; None where there were none, or they do not tell."""

    @property
    def kernel(self) -> str | None:
        """Kernel that was called most."""
        return max(self.calls, key=lambda name: self.calls[name]) if self.calls else None


@dataclass(frozen=True, kw_only=True, slots=True)
class CompilerSeen(Record):
    """Work of torch.compile, and the compiled code that ran."""

    regions: int = 0
    """Compiled pieces that ran in the step."""
    resumed: int = 0
    """Number of those that go on after a graph break."""
    graphs: int = 0
    breaks: tuple[str, ...] = ()
    """Reasons of graph breaks, in one line each."""
    recompiles: int = 0
    failures: tuple[str, ...] = ()
    """Errors of the compiler."""
    attempts: int = 0
    """Frames that the compiler tried."""
    graph_launches: int = 0
    """CUDA graphs that were launched in the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchesSeen(Record):
    """Batches of the loader for the step."""

    tensors: int = 0
    """Tensors on the host."""
    pinned: int = 0
    on_gpu: int = 0
    """Tensors that were on the GPU already."""
    tokens: int | None = None
    """Tokens without padding; None where the batch does not say."""
    capacity: int | None = None
    """Tokens with padding."""
    packed: bool | None = None
    """Sequences lie end to end in rows; None where the batch does not say."""
    sequences: int | None = None
    micro_batches: int | None = None
    workers: int = 0
    """Loader processes that were alive."""
    waited_share: float | None = None
    """Share of the step's time spent waiting for the loader."""
    pinned_bytes: int = 0
    pageable_bytes: int = 0
    """Bytes copied to the GPU from either kind of memory."""

    @property
    def padding_share(self) -> float | None:
        """Share of padding among the tokens that the model computed."""
        if self.tokens is None or not self.capacity:
            return None
        return 1.0 - self.tokens / self.capacity


@dataclass(frozen=True, kw_only=True, slots=True)
class SwitchesSeen(Record):
    """Torch's switches at the time of the step."""

    tf32: bool | None = None
    flash: bool | None = None
    """True if scaled_dot_product_attention may take its flash kernel."""
    cudnn_benchmark: bool = False
    deterministic: bool = False
    allocator: dict[str, Scalar] = field(default_factory=dict)
    threads: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedSeen(Record):
    """Products with weights in 4 or 8 bits."""

    products: dict[str, int] = field(default_factory=dict)
    """Number of products by format: nf4 or int8."""
    nbytes: int = 0
    """Bytes of the codes of all products; a weight counts in each of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence(Record):
    """Evidence of one step."""

    step: int
    device: str
    """cpu or cuda."""
    device_name: str = ""
    torch: str = ""
    products: ProductsSeen = ProductsSeen()
    quantized: QuantizedSeen = QuantizedSeen()
    attention: AttentionSeen = AttentionSeen()
    compiler: CompilerSeen = CompilerSeen()
    batches: BatchesSeen = BatchesSeen()
    switches: SwitchesSeen = SwitchesSeen()
    updates: dict[str, int] = field(default_factory=dict)
    """Calls that updated weights, by kind: fused, foreach, single, compiled, own (kernels)."""
    optimizers: dict[str, str] = field(default_factory=dict)
    """Kind of update by optimizer; of two alike, the slower kind."""
    moments: dict[str, int] = field(default_factory=dict)
    """Bytes of the optimizer's state by dtype and place: `bfloat16 on cuda`, or on `HOST`."""
    fetched: int = 0
    """Copies of moments from the host's memory."""
    recomputed: int = 0
    """Operators of the forward pass that ran inside the backward pass."""
    zeroed: bool | None = None
    """True if gradients were filled with zeros, False if freed, None if not cleared."""
    clipped: bool = False
    """True if the gradients were multiplied by a factor bounded by their norm."""
    gradients: int = 0
    """Gradients that the backward passes added to a weight's."""
    convolutions: int = 0
    liger: int = 0
    """Launches of Liger's kernels."""
    gathered: int = 0
    """Parts of a sharded model that FSDP2 made whole in the forward pass."""
    offloaded_bytes: int = 0
    """Bytes copied from the GPU to pinned host memory."""
    kernels: dict[str, float] = field(default_factory=dict)
    """Milliseconds of the longest kernels."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of the step's work by its kind, as `step_parts` has them."""
    launches: dict[str, int] = field(default_factory=dict)
    """Operators with work of their own, by the same kinds."""
    step_seconds: float = 0.0
    """Time of the profiled step, which the profiler makes longer."""
    seconds: float = 0.0
    """Time that the profiling took."""
