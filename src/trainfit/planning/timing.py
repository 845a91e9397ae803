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
from typing import Literal

from trainfit import codec
from trainfit.catalogue import GpuSpec
from trainfit.records import Precision, Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Work(Record):
    """The least that one kernel has to do."""

    kind: Literal["product", "attention", "slow", "copy"]
    flops: int
    skipped: int
    """Of the operations, those that the kernel leaves out because they are masked."""
    nbytes: int
    half: bool
    """Whether its products run on the half-precision matrix units."""
    aligned: bool
    """Whether every dimension suits the matrix units; a vocabulary of 50,257 does not."""
    backward: bool
    update: bool
    """Whether it belongs to the optimizer's update, which a step does once."""


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
    copy: float
    slow: float
    cached: float
    """How much faster memory traffic is when it stays within the GPU's cache."""
    cache_bytes: float
    kernel_seconds: float
    forward_launch_seconds: float
    backward_launch_seconds: float
    """What the CPU takes per operation."""


@cache
def calibration() -> Calibration:
    """What was fitted to the recorded steps."""
    text = resources.files("trainfit.planning").joinpath("calibration.json").read_text()
    return codec.decode(Calibration, json.loads(text)["calibration"], "calibration.json")


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


def seconds(
    done: Iterable[Done],
    gpu: GpuSpec,
    precision: Precision,
    *,
    tf32: bool = False,
    fitted: Calibration | None = None,
) -> Seconds | None:
    """The time of what was done, or None where the catalogue has no peak for the precision."""
    fitted = fitted or calibration()
    half = None if precision == "fp32" else gpu.peak_tflops(precision)
    full = gpu.tf32_tflops if tf32 and gpu.tf32_tflops else gpu.fp32_tflops
    if precision != "fp32" and half is None:
        return None
    total = Seconds()
    for item in done:
        work = item.work
        peak = 1e12 * (half if work.half and half else full)
        kernel = item.times * _kernel_seconds(work, peak, gpu.bandwidth_gbs * 1e9, fitted)
        launch = item.times * (
            fitted.backward_launch_seconds if work.backward else fitted.forward_launch_seconds
        )
        spent = Seconds(0, 0, kernel, launch) if work.update else Seconds(kernel, launch)
        total = total.plus(spent)
    return total


def _kernel_seconds(work: Work, peak: float, bandwidth: float, fitted: Calibration) -> float:
    flops = work.flops - work.skipped
    arithmetic = flops / (peak * _share_of_peak(work, flops, fitted)) if flops else 0.0
    share = fitted.slow if work.kind == "slow" else fitted.copy
    if work.nbytes < fitted.cache_bytes:
        share *= fitted.cached
    return max(arithmetic, work.nbytes / (bandwidth * share)) + fitted.kernel_seconds


def _share_of_peak(work: Work, flops: int, fitted: Calibration) -> float:
    if work.kind == "attention":
        return fitted.attention
    if not work.half:
        return fitted.product_full * flops / (flops + fitted.full_scale)
    share = fitted.product_half * flops / (flops + fitted.product_scale)
    return share if work.aligned else share * fitted.unaligned


def count_flops(done: Iterable[Done]) -> int:
    """The floating-point operations of matrix products and attention.

    Those of a step without checkpointing are the ones that it must do.
    """
    return sum(item.work.flops * item.times for item in done)


@cache
def recorded_time_error(compute_capability: str) -> float | None:
    """What nine in ten steps recorded on that architecture keep to, in percent; or None."""
    text = resources.files("trainfit.planning").joinpath("recorded.json").read_text()
    row = json.loads(text)["time"].get(compute_capability)
    return None if row is None else float(row["nine_in_ten_percent"])
