"""Time of a step on a GPU that need not be here: a roofline over the step's operations.

Each operation takes the longer of its arithmetic and its memory traffic, at efficiencies fitted to
steps recorded on a GPU (calibration.json). A step takes the longer of its kernels and their
launches. On other GPUs the same shares of their dense peak and bandwidth are assumed; that error
was not measured, so none is given.
"""

from __future__ import annotations

import json
import re
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
    """Least work of one kernel: operations and bytes."""

    kind: Literal[
        "product", "attention", "own_attention", "slow", "copy", "call", "link", "transfer"
    ]
    """A call is no kernel but the entry into compiled code, which takes CPU time. A link's work is
    a copy from the host that an update waits for, a transfer one beside the kernels."""
    flops: int = 0
    skipped: int = 0
    """Floating-point operations that the kernel leaves out because they are masked."""
    again: int = 0
    """Floating-point operations done before: a backward pass computes its scores again."""
    nbytes: int
    half: bool
    """True if its products run on the half-precision matrix units."""
    aligned: bool = True
    """True if every dimension suits the matrix units; a vocabulary of 50,257 does not."""
    backward: bool
    update: bool = False
    """True in the optimizer's update, which a step does once."""
    compiled: bool = False
    """True if compiled code launches it, which takes the CPU less time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Done(Record):
    """Work, and how many times a step does it."""

    work: Work
    times: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration(Record):
    """Shares of the peak and of the bandwidth that kernels reach, and what a launch costs."""

    product_half: float
    product_full: float
    """Shares of large matrix products, in half precision and in fp32 or TF32."""
    product_scale: float
    """Floating-point operations at which a half-precision product reaches half of that share."""
    full_scale: float
    """Operations at which a product in fp32 reaches half of its share."""
    unaligned: float
    """Factor on that share when a dimension is no multiple of 8."""
    attention: float
    own_attention: float
    """Share of trainfit's own kernels, which add a DeBERTa's positions or cap the scores."""
    copy: float
    slow: float
    cached: float
    """Speed-up of memory traffic that stays within the GPU's cache."""
    cache_bytes: float
    kernel_seconds: float
    forward_launch_seconds: float
    backward_launch_seconds: float
    """CPU time per operation."""
    compiled_launch_seconds: float
    """CPU time per operation in compiled code."""
    compiled_call_seconds: float
    """CPU time to enter compiled code: guards are checked, inputs sorted."""


@cache
def calibration() -> Calibration:
    """Calibration fitted to the recorded steps."""
    return codec.decode(Calibration, _file("calibration.json")["calibration"], "calibration.json")


def reference() -> dict[str, float]:
    """Measurements of the machine that recorded the steps, as shares of the datasheet."""
    found: dict[str, float] = _file("calibration.json")["reference"]
    return found


@cache
def _file(name: str) -> dict[str, Any]:
    text = resources.files("trainfit.planning.estimator").joinpath(name).read_text(encoding="utf-8")
    read: dict[str, Any] = json.loads(text)
    return read


REPLAY_SECONDS = 0.0003
"""CPU time between two replays of a captured step."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """Time of kernels and of their launches, for a micro-batch and for the update."""

    kernels: float = 0.0
    launches: float = 0.0
    update_kernels: float = 0.0
    update_launches: float = 0.0
    transfers: float = 0.0
    """Copies between GPU and host, which run beside the kernels."""

    def plus(self, other: Seconds, share: float = 1.0) -> Seconds:
        """Add a share of the other."""
        return Seconds(
            self.kernels + share * other.kernels,
            self.launches + share * other.launches,
            self.update_kernels + share * other.update_kernels,
            self.update_launches + share * other.update_launches,
            self.transfers + share * other.transfers,
        )

    def step(self, computed: float = 1.0, started: float = 1.0, *, captured: bool = False) -> float:
        """Time of a step with `computed` times the work and `started` times the launches.

        Kernels and launches overlap: the longer one decides, smoothly where they are alike. A
        captured step is launched at once.
        """
        kernels = computed * self.kernels + self.update_kernels
        if captured:
            return kernels + REPLAY_SECONDS
        launches = started * self.launches + self.update_launches
        return max(smooth_maximum(kernels, launches), computed * self.transfers)


def smooth_maximum(kernels: float, launches: float) -> float:
    """Time of kernels and launches that overlap."""
    return float((kernels**6 + launches**6) ** (1 / 6))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Rates of a GPU, and of its host relative to the one of the calibration."""

    half: float | None
    full: float
    """Peaks of matrix products in half precision and in fp32 or TF32, in operations per second."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    forward_launch: float = 1.0
    backward_launch: float = 1.0
    """Time of a launch relative to the calibration's host."""
    link: float = 24e9
    """Bytes per second between GPU and host, in one direction."""


_PCIE_LANE = 0.75e9
"""Bytes per second that a lane of PCIe 3.0 carries in large copies, three quarters of its raw rate;
each generation doubles it."""


def host_link(gpu: GpuSpec | None) -> tuple[float, str]:
    """Bytes per second between the host and a GPU, and the link's name.

    Where the catalogue does not say, as for GPUs with NVLink, x16 of their time's PCIe is assumed.
    """
    found = None if gpu is None else re.search(r"PCIe (\d)\.0 x(\d+)", gpu.link)
    major = "8" if gpu is None else gpu.compute_capability.partition(".")[0]
    usual = {"7": 3, "8": 4}.get(major, 5)
    generation, lanes = (usual, 16) if found is None else (int(found[1]), int(found[2]))
    rate = _PCIE_LANE * 2 ** (generation - 3) * lanes
    assumed = "assumed, " if found is None else ""
    return rate, f"PCIe {generation}.0 x{lanes} ({assumed}{rate / 1e9:.0f} GB/s)"


def rates(
    gpu: GpuSpec, precision: Precision, tf32: bool = False, measured: Measurements | None = None
) -> Rates | None:
    """Rates of the datasheet, corrected by measurements; None without a peak.

    A machine that reaches a smaller share of its datasheet than the calibration's did is slower by
    as much.
    """
    half = None if precision == "fp32" else gpu.peak_tflops(precision)
    if precision != "fp32" and half is None:
        return None
    quick = tf32 and gpu.tf32_tflops is not None
    full = gpu.tf32_tflops if quick and gpu.tf32_tflops else gpu.fp32_tflops
    found = {item.name: item for item in measured.items} if measured is not None else {}

    def share(name: str) -> float:
        item, known = found.get(name), reference().get(name)
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
        link=host_link(gpu)[0],
    )


def seconds(done: Iterable[Done], rates: Rates, fitted: Calibration | None = None) -> Seconds:
    """Add up the time of operations."""
    fitted = fitted or calibration()
    total = Seconds()
    for item in done:
        work = item.work
        if work.kind == "transfer":
            spent = Seconds(transfers=item.times * work.nbytes / rates.link)
            total = total.plus(spent)
            continue
        peak = rates.half if work.half and rates.half is not None else rates.full
        kernel = item.times * _kernel_seconds(work, peak, rates, fitted)
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


def _kernel_seconds(work: Work, peak: float, rates: Rates, fitted: Calibration) -> float:
    if work.kind == "call":
        return 0.0
    if work.kind == "link":
        return work.nbytes / rates.link
    flops = work.flops - work.skipped
    arithmetic = flops / (peak * _share_of_peak(work, flops, fitted)) if flops else 0.0
    share = fitted.slow if work.kind == "slow" else fitted.copy
    if work.nbytes < fitted.cache_bytes:
        share *= fitted.cached
    return max(arithmetic, work.nbytes / (rates.bandwidth * share)) + fitted.kernel_seconds


def _share_of_peak(work: Work, flops: int, fitted: Calibration) -> float:
    if work.kind == "attention":
        return fitted.attention
    if work.kind == "own_attention":
        return fitted.own_attention
    if not work.half:
        return fitted.product_full * flops / (flops + fitted.full_scale)
    share = fitted.product_half * flops / (flops + fitted.product_scale)
    return share if work.aligned else share * fitted.unaligned


def total_flops(done: Iterable[Done]) -> int:
    """Count the floating-point operations of products and attention, without repeated ones."""
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
