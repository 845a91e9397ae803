"""How long a step takes on a GPU that need not be here: a roofline over the step's operations.

Each operation takes as long as its arithmetic or its memory traffic, whichever is longer, at
efficiencies that were fitted to steps recorded on a GPU (calibration.json). A step takes as long
as its kernels, or as the CPU needs to launch them. On other GPUs the same shares of their dense
peak and bandwidth are assumed; how wrong that is was not measured, so no error is given there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from trainfit.core import codec
from trainfit.core.plan_records import Precision
from trainfit.core.records import Measurements, Record
from trainfit.hardware.catalogue import GpuSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Work(Record):
    """The least that one kernel has to do."""

    kind: Literal["product", "attention", "own_attention", "slow", "copy", "call"]
    """A call is no kernel: compiled code is entered, which takes the CPU a while."""
    flops: int
    skipped: int
    """Of the operations, those that the kernel leaves out because they are masked."""
    again: int = 0
    """Of the operations, those that were done before: a backward pass makes its scores anew."""
    nbytes: int
    half: bool
    """Whether its products run on the half-precision matrix units."""
    aligned: bool
    """Whether every dimension suits the matrix units; a vocabulary of 50,257 does not."""
    backward: bool
    update: bool
    """Whether it belongs to the optimizer's update, which a step does once."""
    compiled: bool = False
    """Whether compiled code launches it, which takes the CPU much less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Done(Record):
    """How often a step does some work."""

    work: Work
    times: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration(Record):
    """Shares of the peak and of the bandwidth that kernels reach, and what a launch costs."""

    product_half: float
    product_full: float
    """Of large matrix products, in half precision and in fp32 or TF32."""
    product_scale: float
    """Floating-point operations at which a half-precision product reaches half of that share."""
    full_scale: float
    """The same in fp32."""
    unaligned: float
    """What is left of a half-precision product's share when a dimension is no multiple of 8."""
    attention: float
    own_attention: float
    """Of trainfit's own kernels, which add a DeBERTa's positions or cap the scores."""
    copy: float
    slow: float
    cached: float
    """How much faster memory traffic is when it stays within the GPU's cache."""
    cache_bytes: float
    kernel_seconds: float
    forward_launch_seconds: float
    backward_launch_seconds: float
    """What the CPU takes per operation."""
    compiled_launch_seconds: float
    """The same in compiled code."""
    compiled_call_seconds: float
    """What the CPU takes to enter compiled code: its guards are checked, its inputs sorted."""


@cache
def calibration() -> Calibration:
    """What was fitted to the recorded steps."""
    return codec.decode(Calibration, _file("calibration.json")["calibration"], "calibration.json")


def _reference() -> dict[str, float]:
    """What `check --measure` found where the steps were recorded, as shares of the datasheet."""
    found: dict[str, float] = _file("calibration.json")["reference"]
    return found


@cache
def _file(name: str) -> dict[str, Any]:
    text = resources.files("trainfit.planning.estimator").joinpath(name).read_text()
    read: dict[str, Any] = json.loads(text)
    return read


@dataclass(frozen=True, slots=True)
class Seconds:
    """Time on the GPU and time to launch it, of what a micro-batch does and of the update."""

    kernels: float = 0.0
    launches: float = 0.0
    update_kernels: float = 0.0
    update_launches: float = 0.0

    def plus(self, other: Seconds, share: float = 1.0) -> Seconds:
        """The sum, with only a share of the other."""
        return Seconds(
            self.kernels + share * other.kernels,
            self.launches + share * other.launches,
            self.update_kernels + share * other.update_kernels,
            self.update_launches + share * other.update_launches,
        )

    def step(self, computed: float = 1.0, started: float = 1.0) -> float:
        """The time of a step that computes and starts so many times what was counted.

        Kernels and launches overlap: the longer one decides, blurred where they are alike.
        """
        kernels = computed * self.kernels + self.update_kernels
        launches = started * self.launches + self.update_launches
        return float((kernels**6 + launches**6) ** (1 / 6))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """How fast a GPU and its host are, beside the ones that the calibration was fitted on."""

    half: float | None
    full: float
    """Peaks of matrix products in half precision and in fp32 or TF32, in operations per second."""
    bandwidth: float
    """Bytes per second."""
    forward_launch: float = 1.0
    backward_launch: float = 1.0
    """How much longer a launch takes here."""


def rates(
    gpu: GpuSpec, precision: Precision, tf32: bool = False, measured: Measurements | None = None
) -> Rates | None:
    """The datasheet's rates, corrected by what was measured; None without a peak.

    The fitted shares are of the datasheet's peaks, as that GPU reached them. A machine that
    reaches a smaller or larger share of its own is slower or faster by as much.
    """
    half = None if precision == "fp32" else gpu.peak_tflops(precision)
    if precision != "fp32" and half is None:
        return None
    quick = tf32 and gpu.tf32_tflops is not None
    full = gpu.tf32_tflops if quick and gpu.tf32_tflops else gpu.fp32_tflops
    found = {item.name: item for item in measured.items} if measured is not None else {}

    def share(name: str) -> float:
        item, known = found.get(name), _reference().get(name)
        if item is None or known is None:
            return 1.0
        return item.value / (item.datasheet or 1.0) / known

    half_name = f"matmul_{precision}_sustained"
    full_name = "matmul_tf32_sustained" if quick else "matmul_fp32_sustained"
    return Rates(
        half=None if half is None else half * 1e12 * share(half_name),
        full=full * 1e12 * share(full_name),
        bandwidth=gpu.bandwidth_gbs * 1e9 * share("copy"),
        forward_launch=share("launch_forward"),
        backward_launch=share("launch_backward"),
    )


def seconds(done: Iterable[Done], rates: Rates, fitted: Calibration | None = None) -> Seconds:
    """The time of what was done."""
    fitted = fitted or calibration()
    total = Seconds()
    for item in done:
        work = item.work
        peak = rates.half if work.half and rates.half is not None else rates.full
        kernel = item.times * _kernel_seconds(work, peak, rates.bandwidth, fitted)
        launch = item.times * _launch_seconds(work, rates, fitted)
        spent = Seconds(0, 0, kernel, launch) if work.update else Seconds(kernel, launch)
        total = total.plus(spent)
    return total


def _launch_seconds(work: Work, rates: Rates, fitted: Calibration) -> float:
    if work.kind == "call":
        return fitted.compiled_call_seconds * rates.forward_launch
    if work.compiled:
        return fitted.compiled_launch_seconds * rates.forward_launch
    if work.backward:
        return fitted.backward_launch_seconds * rates.backward_launch
    return fitted.forward_launch_seconds * rates.forward_launch


def _kernel_seconds(work: Work, peak: float, bandwidth: float, fitted: Calibration) -> float:
    if work.kind == "call":
        return 0.0
    flops = work.flops - work.skipped
    arithmetic = flops / (peak * _share_of_peak(work, flops, fitted)) if flops else 0.0
    share = fitted.slow if work.kind == "slow" else fitted.copy
    if work.nbytes < fitted.cache_bytes:
        share *= fitted.cached
    return max(arithmetic, work.nbytes / (bandwidth * share)) + fitted.kernel_seconds


def _share_of_peak(work: Work, flops: int, fitted: Calibration) -> float:
    if work.kind == "attention":
        return fitted.attention
    if work.kind == "own_attention":
        return fitted.own_attention
    if not work.half:
        return fitted.product_full * flops / (flops + fitted.full_scale)
    share = fitted.product_half * flops / (flops + fitted.product_scale)
    return share if work.aligned else share * fitted.unaligned


def count_flops(done: Iterable[Done]) -> int:
    """The floating-point operations of matrix products and attention, each counted once.

    Those of a step without checkpointing are the ones that it must do.
    """
    return sum((item.work.flops - item.work.again) * item.times for item in done)


def recorded_time_error(compute_capability: str, family: str) -> float | None:
    """Error that nine in ten recorded steps of a family keep to, in percent; None: no record."""
    row = recorded("time", compute_capability, family)
    return None if row is None else float(row["nine_in_ten_percent"])


def recorded(what: str, compute_capability: str, family: str) -> dict[str, Any] | None:
    """Errors recorded on such a GPU, or None where that or the family of models was not."""
    found = _file("recorded.json")
    row: dict[str, Any] | None = found[what].get(compute_capability)
    return row if family in found["families"] else None
