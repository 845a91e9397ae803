"""Catalogue of GPUs: one row each in gpus.csv, with its source; nothing is guessed."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from trainfit.core.errors import BadInput, TrainfitWarning, did_you_mean

MEMORY_TOLERANCE = 0.07
"""Drivers, ECC and operating systems show up to this much less than the same card elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSpec:
    """Published facts of a GPU. Rates are dense, per dtype, with fp32 accumulation."""

    slug: str
    names: tuple[str, ...]
    """Exact device names, as torch and nvidia-smi print them."""
    short_names: tuple[str, ...]
    """Short forms that mean this row, such as a100 or 4090."""
    vendor: Literal["nvidia", "amd", "apple"]
    architecture: str
    compute_capability: str
    memory_gb: float
    """Advertised memory."""
    memory_gib: float
    """Memory visible to a program on Linux."""
    bandwidth_gbs: float
    sm_count: int
    fp32_tflops: float
    tf32_tflops: float | None
    fp16_tflops: float
    bf16_tflops: float | None
    fp8_tflops: float | None
    int8_tops: float | None
    native_bf16: bool
    native_tf32: bool
    native_fp16: bool
    native_fp8: bool
    tdp_w: float | None
    link: str
    mfu_good: tuple[int, int] | None
    """Percent of the dense peak that a small GPT should reach (the tuning guide's table)."""
    mfu_excellent: tuple[int, int] | None
    batch_advice: tuple[int, int] | None
    """Batch sizes that the tuning guide's table advises; presets have their own."""
    preset: str | None
    """The hardware preset written for this GPU, if there is one."""
    confidence: Literal["high", "medium", "low"]
    source: str
    notes: str

    def peak_tflops(self, precision: str) -> float | None:
        """Return the dense peak of matrix products in bf16, fp16, fp8, tf32 or fp32."""
        peak: float | None = getattr(self, f"{precision}_tflops")
        return peak


def _optional(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: read(text) if text else None


def _percents(text: str) -> tuple[int, int]:
    low, high = text.split("-")
    return int(low), int(high)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split("|")) if text else ()


_READERS: dict[str, Callable[[str], Any]] = {
    "names": _names,
    "short_names": _names,
    "sm_count": int,
    "mfu_good": _optional(_percents),
    "mfu_excellent": _optional(_percents),
    "batch_advice": _optional(_percents),
    "preset": _optional(str),
    **dict.fromkeys(("memory_gb", "memory_gib", "bandwidth_gbs"), float),
    **dict.fromkeys(("fp32_tflops", "fp16_tflops"), float),
    **dict.fromkeys(
        ("tf32_tflops", "bf16_tflops", "fp8_tflops", "int8_tops", "tdp_w"), _optional(float)
    ),
    **dict.fromkeys(
        ("native_bf16", "native_tf32", "native_fp16", "native_fp8"), {"yes": True, "no": False}.get
    ),
}


@cache
def gpus() -> tuple[GpuSpec, ...]:
    """Read every row of the catalogue."""
    table = resources.files("trainfit.hardware").joinpath("gpus.csv").read_text(encoding="utf-8")
    return tuple(
        GpuSpec(**{key: _READERS.get(key, str)(text) for key, text in row.items()})
        for row in csv.DictReader(table.splitlines())
    )


def lookup(name: str, memory_gib: float | None = None) -> GpuSpec | None:
    """Look up a device by its exact name, and by memory where several rows share the name.

    An unknown device is None, with a warning: the peak of a similar one would be wrong.
    """
    rows = [row for row in gpus() if name in row.names]
    if len(rows) == 1:
        return rows[0]
    if not rows:
        _warn(f"the GPU {name!r} is not in the catalogue: no peak and no MFU for it")
        return None
    sizes = ", ".join(f"{row.slug} ({row.memory_gib:g} GiB)" for row in rows)
    if memory_gib is None:
        _warn(f"the name {name!r} has several memory sizes: {sizes}; give memory_gib")
        return None
    closest = min(rows, key=lambda row: abs(row.memory_gib - memory_gib))
    if abs(closest.memory_gib - memory_gib) <= MEMORY_TOLERANCE * closest.memory_gib:
        return closest
    _warn(f"the GPU {name!r} with {memory_gib:g} GiB is not in the catalogue, which has {sizes}")
    return None


def find(word: str) -> GpuSpec:
    """Find the row for a slug, a short form or a full device name; BadInput if there is none."""
    folded = word.strip().lower().replace(" ", "-").replace("_", "-")
    by_word = {short: row for row in gpus() for short in row.short_names}
    by_word |= {row.slug: row for row in gpus()}
    if folded in by_word:
        return by_word[folded]
    named = [row for row in gpus() if word in row.names]
    if len(named) == 1:
        return named[0]
    near = did_you_mean(folded, by_word, "`trainfit check --gpu list` shows them all")
    raise BadInput(f"unknown GPU {word!r}", near)


def _warn(text: str) -> None:
    warnings.warn(text, TrainfitWarning, stacklevel=3)
