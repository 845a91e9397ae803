"""Model FLOPs utilisation: the work of a step against the peak of the GPUs, and what it means.

A token costs 6·N + 12·L·H·Q·T floating-point operations, forward and backward, with N the weights
without the position embeddings, L layers, H heads of size Q, and T tokens of context. The peak is
the dense one of the dtype in use, by the GPU's exact name: one that the catalogue does not know has
no MFU, and nor has a run in which any of the GPUs is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from trainfit.conf import GptConfig
from trainfit.core.plan_records import Plan, Precision
from trainfit.core.records import Measurement
from trainfit.hardware.catalogue import GpuSpec, find
from trainfit.jobs.models.gpt_model import GptShape

Standing = Literal["poor", "good", "excellent"]
_GENERAL_GOOD, _GENERAL_EXCELLENT = (15, 25), (30, 100)
"""The tuning guide's targets for setups that its table has no row for."""
_FULL = 0.80
"""The share of the memory from which on the guide leaves the batch as it is."""
_AIM = 0.85
_LONG = 1024
_WAITING = 0.05


def parameters(shape: GptShape) -> int:
    """The weights, without the position embeddings: what the operations are counted by."""
    block = 12 * shape.n_embd**2 + 2 * shape.n_embd
    return shape.vocab_size * shape.n_embd + shape.n_layer * block + shape.n_embd


def flops_per_token(shape: GptShape) -> float:
    """The operations that a token needs, forward and backward."""
    head = shape.n_embd // shape.n_head
    attention = 12 * shape.n_layer * shape.n_head * head * shape.block_size
    return 6.0 * parameters(shape) + attention


def dtype_in_use(precision: Precision, tf32: bool | None) -> str:
    """Of the matrix products: TF32 is what fp32 ones run in where it is on."""
    return "tf32" if precision == "fp32" and tf32 else precision


def peak_of(slugs: Sequence[str | None], dtype: str) -> float | None:
    """The dense peak of these GPUs together in TFLOP/s; None where one is not known."""
    peaks = [None if slug is None else find(slug).peak_tflops(dtype) for slug in slugs]
    known = [peak for peak in peaks if peak]
    return sum(known) if peaks and len(known) == len(peaks) else None


def measured_peak(items: Sequence[Measurement], dtype: str) -> float | None:
    """What `check --measure` found for such products on this GPU, in TFLOP/s."""
    found = {item.name: item.value for item in items}
    return found.get(f"matmul_{dtype}")


def ideal_seconds(shape: GptShape, peak: float | None) -> Callable[[Sequence[int]], float] | None:
    """For the engine's meter: the time of a step at the `peak` of all its GPUs."""
    if peak is None:
        return None
    per_token = flops_per_token(shape) / (peak * 1e12)
    return lambda lengths: per_token * sum(lengths)


# ── what it means ─────────────────────────────────────────────────────────────────────────────


def targets(spec: GpuSpec) -> tuple[tuple[int, int], tuple[int, int]]:
    """Good and excellent MFU on this GPU, in percent."""
    return spec.mfu_good or _GENERAL_GOOD, spec.mfu_excellent or _GENERAL_EXCELLENT


def standing(mfu: float, spec: GpuSpec) -> Standing:
    """Where a run stands by the tuning guide's table."""
    good, excellent = targets(spec)
    if 100 * mfu >= excellent[0]:
        return "excellent"
    return "good" if 100 * mfu >= good[0] else "poor"


@dataclass(frozen=True, kw_only=True, slots=True)
class Circumstances:
    """What the next step depends on."""

    plan: Plan
    config: GptConfig
    spec: GpuSpec
    memory_share: float
    """Of the GPU's memory that was in use at the most."""
    wait_share: float
    """Of the time that went by waiting for data."""


def next_steps(now: Circumstances) -> list[str]:
    """The tuning guide's steps that are not taken yet, in its order, each as an override."""
    found = [*_batch(now), *_length(now), *_switches(now)]
    if now.wait_share > _WAITING:
        found.append(f"training.num_workers={min(8, max(2, 2 * now.plan.num_workers))}")
    return found


def _batch(now: Circumstances) -> list[str]:
    if now.memory_share >= _FULL:
        return []
    batch = now.plan.batch_size
    larger = max(batch + 1, int(batch * _AIM / max(now.memory_share, 0.01)))
    # One step at a time: what memory was in use is not all of the batch's making.
    return [f"training.batch_size={min(larger, 2 * batch)}"]


def _length(now: Circumstances) -> list[str]:
    length = now.config.data.max_length
    if length >= _LONG or now.memory_share >= _FULL:
        return []
    return [f"data.max_length={_LONG if now.spec.memory_gb >= 16 else 512}"]


def _switches(now: Circumstances) -> list[str]:
    plan, found = now.plan, []
    if plan.precision == "fp32":
        found.append("device.mixed_precision=auto")
    if not plan.compile:
        found.append("optimization.compile=true")
    if now.spec.native_tf32 and not plan.runtime.tf32:
        found.append("device.tf32=true")
    return found
