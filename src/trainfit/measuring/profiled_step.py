"""Profile of one step of a run: gathered as evidence, and its time by kind of work."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from trainfit.measuring.evidence import (
    attention_of,
    batches,
    compiler_of,
    is_forward_attention,
    products_of,
    quantized_of,
    switches,
    work_of,
)
from trainfit.measuring.timing import synchronize
from trainfit.measuring.trace import (
    HOST,
    Evidence,
    Operator,
    Profiling,
    Trace,
    cuda_in_use,
    optimizer_of,
)

WARM_UP = 10
"""Steps before the profiled one, in which kernels are chosen and shapes compiled."""
_LATE = 4 * WARM_UP
"""Steps after which any whole one is profiled."""

_UNREADABLE = (RuntimeError, AttributeError, LookupError, TypeError, ValueError, OSError)


class Look:
    """Evidence of a profiled step, or the reason that there is none."""

    def __init__(self) -> None:
        self.evidence: Evidence | None = None
        self.obstacle = ""


def is_due(taken: int, total: int, sequences: int, most: int, usual: bool = True) -> bool:
    """True if the step after `taken` of `total` is past the warm-up and a whole one.

    `sequences` are those of the step, `most` the most of any step so far. One that does not run as
    most do, such as the first of its shape, is only taken where no other came for long.
    """
    late = taken >= min(_LATE, total - 1)
    return taken >= min(WARM_UP, total // 2) and sequences >= most and (usual or late)


@contextmanager
def profiled(
    step: int,
    given: Sequence[Any],
    sequences: int | None = None,
    *,
    optimizer: Any = None,
    begins: Callable[[], None] = lambda: None,
    ends: Callable[[], None] = lambda: None,
) -> Iterator[Look]:
    """Profile the block, a step with the batches `given`.

    `begins` and `ends` are called right before and after its work, so that starting the profiler
    and reading its events are not timed. Without a profiler the block runs all the same.
    """
    look = Look()
    began = time.perf_counter()
    try:
        profiling = Profiling()
    except RuntimeError as error:
        look.obstacle = str(error)
        yield look
        return
    begins()
    started = time.perf_counter()
    try:
        yield look
    except BaseException:
        profiling.end()
        raise
    synchronize()
    worked = time.perf_counter() - started
    ends()
    try:
        trace = profiling.end()
        seen = gather(trace, step=step, given=given, seconds=worked, sequences=sequences)
        spent = time.perf_counter() - began - worked
        look.evidence = replace(seen, seconds=spent, moments=moments_of(optimizer))
    except _UNREADABLE as error:  # a torch with other events must not end a run
        look.obstacle = f"{type(error).__name__}: {error}"


_FORWARD_ONLY = {
    "aten::linear",
    "aten::embedding",
    "aten::layer_norm",
    "aten::rms_norm",
    "aten::gelu",
    "aten::silu",
    "aten::dropout",
    "aten::scaled_dot_product_attention",
    "CompiledFunction",
}
"""Operators that no gradient uses: in the backward pass they are recomputation."""
_GRADIENT = 2.3
"""Most products of a backward pass, relative to the forward pass: two, and some small ones."""
_SHOWN = 12
_LIGER = re.compile(r"_(rms_norm|geglu_tanh|swiglu)_(forward|backward)_kernel")
_GATHERED = "FSDP::pre_forward"


def gather(
    trace: Trace,
    *,
    step: int,
    given: Iterable[Any] = (),
    seconds: float = 0.0,
    sequences: int | None = None,
) -> Evidence:
    """Gather the evidence of a traced step that took `seconds`, with the batches `given`."""
    import torch

    cuda = cuda_in_use()
    seen = batches(given, trace, seconds)
    updates = _updates(trace)
    calls: Counter[str] = Counter()
    for _, kind, count in updates:
        calls[kind] += count
    parts, launches = seconds_by_part(trace)
    return Evidence(
        step=step,
        device="cuda" if cuda else "cpu",
        device_name=torch.cuda.get_device_name() if cuda else "",
        torch=torch.__version__,
        products=products_of(trace),
        quantized=quantized_of(trace),
        attention=attention_of(trace),
        compiler=compiler_of(trace),
        batches=seen if sequences is None else replace(seen, sequences=sequences),
        switches=switches(),
        updates=dict(calls),
        optimizers={name: kind for name, kind, _ in updates},
        fetched=trace.calls("trainfit::host_fetch_"),
        recomputed=_recomputed(trace),
        zeroed=_zeroed(trace),
        clipped=_clipped(trace),
        gradients=trace.calls("torch::autograd::AccumulateGrad"),
        convolutions=trace.calls("aten::convolution", "aten::_convolution"),
        liger=sum(k.launches for k in trace.kernels if _LIGER.search(k.name)),
        gathered=sum(op.name.startswith(_GATHERED) for op in trace.operators),
        offloaded_bytes=_offloaded(trace),
        kernels={kernel.name: kernel.seconds * 1e3 for kernel in trace.kernels[:_SHOWN]},
        parts=parts,
        launches=launches,
        step_seconds=seconds,
    )


_OUT = "Memcpy DtoH (Device -> Pinned"
_AS_BYTES = ("unsigned char", "unsigned char")


def _offloaded(trace: Trace) -> int:
    """Bytes copied to pinned memory.

    Before 2.12 torch does not say the size of a copy: then by the copies of bytes, out and back.
    """
    copies = [kernel for kernel in trace.kernels if kernel.name.startswith(_OUT)]
    told = sum(kernel.copied for kernel in copies)
    if told or not copies:
        return told
    found = (op for op in trace.operators if op.name == "aten::copy_")
    return sum(math.prod(op.shapes[0]) for op in found if tuple(op.dtypes[:2]) == _AS_BYTES) // 2


_KINDS = {"fused": "aten::_fused_", "foreach": "aten::_foreach_", "compiled": "Torch-Compiled"}
"""How an optimizer updates, by its operators; the first that is found decides."""


def _updates(trace: Trace) -> list[tuple[str, str, int]]:
    """Optimizer, kind of update and number of calls, the fastest kind first."""
    calls: dict[str, list[list[str]]] = {}
    for op in trace.operators:
        if name := optimizer_of(op.name):
            calls.setdefault(name, []).append([])
        elif op.updating:
            calls.setdefault(op.updating, [[]])[-1].append(op.name)
    found = [
        (name, *_kind_of_update(operators))
        for name, steps in calls.items()
        for operators in steps
        if operators
    ]
    order = [*_KINDS, "own", "single"]
    return sorted(found, key=lambda update: order.index(update[1])) or _unmarked_updates(trace)


_UNMARKED = (
    ("AdamW", "fused", "aten::_fused_adamw_"),
    ("SmallAdamW", "own", "trainfit::adamw_"),
    ("AdamW", "single", "aten::addcdiv"),
)


def _unmarked_updates(trace: Trace) -> list[tuple[str, str, int]]:
    """Updates of trainfit's loop, which runs AdamW's operators without calling its step."""
    for name, kind, start in _UNMARKED:
        if count := sum(op.name.startswith(start) for op in trace.operators):
            return [(name, kind, count)]
    return []


def moments_of(optimizer: Any) -> dict[str, int]:
    """Bytes of an optimizer's state by dtype and place; counts of steps are left out."""
    import torch

    total: Counter[str] = Counter()
    for part in getattr(optimizer, "optimizers", (optimizer,)):
        for state in getattr(part, "state", {}).values():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    host = cuda_in_use() and value.device.type == "cpu"
                    place = HOST if host else value.device.type
                    total[f"{str(value.dtype).removeprefix('torch.')} on {place}"] += value.nbytes
    return dict(total)


def _kind_of_update(names: list[str]) -> tuple[str, int]:
    for kind, start in _KINDS.items():
        if count := sum(name.startswith(start) for name in names):
            return kind, count
    foreign = sum("::" in name and not name.startswith("aten::") for name in names)
    in_place = sum(name.startswith("aten::") and name.endswith("_") for name in names)
    return ("own", foreign) if foreign else ("single", in_place)


def _recomputed(trace: Trace) -> int:
    """Count operators of the forward pass inside the backward pass.

    In a compiled graph of both, the products tell: a gradient takes two for each, not three.
    """
    named = sum(
        op.backward and (op.name in _FORWARD_ONLY or is_forward_attention(op.name))
        for op in trace.operators
    )
    back = [op for op in trace.operators if op.backward and work_of(op)]
    forward = sum(work_of(op) for op in trace.operators if not (op.backward or op.updating))
    if not named and forward and sum(map(work_of, back)) > _GRADIENT * forward:
        return len(back)
    return named


def _zeroed(trace: Trace) -> bool | None:
    ranges = ("Optimizer.zero_grad",)
    if not any(op.name.startswith(ranges) for op in trace.operators):
        return None
    inside = [op.name for op in trace.operators if op.within.startswith(ranges)]
    return any(name in ("aten::zero_", "aten::_foreach_zero_") for name in inside)


_WITHOUT_NORM = ("", "Adam", "AdamW", "NAdam", "RAdam", "SGD", "RMSprop", "Adagrad")
"""Optimizers whose update takes no norm; the first is none."""


def _clipped(trace: Trace) -> bool:
    """True if a norm, a factor of at most one, and a product with all gradients were computed."""
    # Lightning clips inside of the optimizer's step, where Muon takes a norm of its own.
    names = {op.name for op in trace.operators if op.updating in _WITHOUT_NORM}
    parts = (
        {"aten::_foreach_norm", "aten::linalg_vector_norm"},
        {"aten::clamp", "aten::minimum", "aten::clamp_max"},
        {"aten::_foreach_mul_", "aten::mul_"},
    )
    return all(names & part for part in parts)


# ── the step by its kind of work ────────────────────────────────────────────────────────────────

PRODUCTS, HALF_PRODUCTS, ATTENTION = "products", "half_products", "attention"
UPDATE, LOADING, OTHER = "update", "loading", "other"

_ATTENTION = re.compile(r"attention|attn|softmax|aten::bmm$|aten::baddbmm$")
"""Attention without a kernel of its own is batched products around a softmax."""
_PRODUCT = re.compile(r"mm$|_addmm_activation|convolution|linear_pointwise|triton_tem")
_HALF = {"c10::BFloat16", "c10::Half"}
_LOADING = re.compile(r"enumerate\(DataLoader\)")


def seconds_by_part(trace: Trace) -> tuple[dict[str, float], dict[str, int]]:
    """Seconds of the step's work, and its operators that have some, by their kind.

    On a GPU the time is that of kernels; those of no operator are the rest.
    """
    seconds: dict[str, float] = {}
    launches: dict[str, int] = {}
    for operator in trace.operators:
        if operator.own_seconds > 0:
            kind = _kind(operator)
            seconds[kind] = seconds.get(kind, 0.0) + operator.own_seconds
            launches[kind] = launches.get(kind, 0) + 1
    unknown = sum(kernel.seconds for kernel in trace.kernels) - sum(seconds.values())
    if trace.kernels and unknown > 0:
        seconds[OTHER] = seconds.get(OTHER, 0.0) + unknown
    return seconds, launches


def _kind(operator: Operator) -> str:
    if operator.updating:
        return UPDATE
    if _LOADING.match(operator.name):
        return LOADING
    if _ATTENTION.search(operator.name):
        return ATTENTION
    if _PRODUCT.search(operator.name):
        return HALF_PRODUCTS if _HALF & set(operator.dtypes) else PRODUCTS
    return OTHER
