"""One trace and the state of the process, put together as evidence."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from trainfit.measuring.evidence.attention import attention_of, is_forward_attention
from trainfit.measuring.evidence.compiler import compiler_of
from trainfit.measuring.evidence.process import batches, switches
from trainfit.measuring.evidence.products import products_of, work_of
from trainfit.measuring.evidence.seen import Evidence
from trainfit.measuring.evidence.trace import Trace, cuda_in_use

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
"""What no formula of a gradient calls: inside the backward pass, it is computed again."""
_SINGLE = ("aten::addcdiv_", "aten::addcdiv")
_GRADIENT = 2.3
"""Products of the backward pass over those of the forward pass: two, and some of small parts."""
_SHOWN = 12
_LIGER = re.compile(r"_(rms_norm|geglu_tanh|swiglu)_(forward|backward)_kernel")


def gather(
    trace: Trace,
    *,
    step: int,
    given: Iterable[Any] = (),
    seconds: float = 0.0,
    sequences: int | None = None,
) -> Evidence:
    """The evidence of the step that `trace` saw and that took so long, with these batches."""
    import torch

    cuda = cuda_in_use()
    seen = batches(given, trace, seconds)
    return Evidence(
        step=step,
        device="cuda" if cuda else "cpu",
        device_name=torch.cuda.get_device_name() if cuda else "",
        torch=torch.__version__,
        products=products_of(trace),
        attention=attention_of(trace),
        compiler=compiler_of(trace),
        batches=seen if sequences is None else replace(seen, sequences=sequences),
        switches=switches(),
        updates=_updates(trace),
        recomputed=_recomputed(trace),
        zeroed=_zeroed(trace),
        clipped=_clipped(trace),
        gradients=trace.calls("torch::autograd::AccumulateGrad"),
        convolutions=trace.calls("aten::convolution", "aten::_convolution"),
        liger=sum(k.launches for k in trace.kernels if _LIGER.search(k.name)),
        kernels={kernel.name: kernel.seconds * 1e3 for kernel in trace.kernels[:_SHOWN]},
    )


def _updates(trace: Trace) -> dict[str, int]:
    """How the weights were updated, by the operators that did it."""
    names = [op.name for op in trace.operators]
    counts = {
        "fused": sum(name.startswith("aten::_fused_") and "adam" in name for name in names)
        + sum(name.startswith("aten::_fused_sgd") for name in names),
        "foreach": sum(name.startswith("aten::_foreach_addcdiv") for name in names),
        "single": sum(name in _SINGLE for name in names),
    }
    if counts["foreach"]:  # on the CPU it is made of single ones
        counts["single"] = 0
    return {kind: count for kind, count in counts.items() if count}


def _recomputed(trace: Trace) -> int:
    """Operators of the forward pass inside the backward pass.

    In a graph that holds both, the products tell: a gradient takes two for each, not three.
    """
    named = sum(
        op.backward and (op.name in _FORWARD_ONLY or is_forward_attention(op.name))
        for op in trace.operators
    )
    back = [op for op in trace.operators if op.backward and work_of(op)]
    forward = sum(work_of(op) for op in trace.operators if not op.backward)
    if not named and forward and sum(map(work_of, back)) > _GRADIENT * forward:
        return len(back)
    return named


def _zeroed(trace: Trace) -> bool | None:
    ranges = ("Optimizer.zero_grad",)
    if not any(op.name.startswith(ranges) for op in trace.operators):
        return None
    inside = [op.name for op in trace.operators if op.within.startswith(ranges)]
    return any(name in ("aten::zero_", "aten::_foreach_zero_") for name in inside)


def _clipped(trace: Trace) -> bool:
    """A norm, a factor that is at most one, and a product of all gradients with it."""
    norm = trace.calls("aten::_foreach_norm", "aten::linalg_vector_norm")
    factor = trace.calls("aten::clamp", "aten::minimum", "aten::clamp_max")
    return bool(norm and factor and trace.calls("aten::_foreach_mul_", "aten::mul_"))
