"""Catalogue of GPUs, one row each in gpus.csv with its source, and the GPUs of this machine."""

from __future__ import annotations

import csv
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, Literal

from trainfit.core.errors import BadInput, TrainfitWarning, did_you_mean
from trainfit.core.records import Gpu, GpuState
from trainfit.hardware.access import TorchDevice
from trainfit.hardware.host import GIB
from trainfit.hardware.nvml import Dtypes, NvmlGpu, native_dtypes, parse_capability

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


_BRANDS = re.compile(r"nvidia|geforce|tesla|amd|instinct|radeon|[gr]tx|[\W_]")


def find(word: str) -> GpuSpec:
    """Find the row for a slug, a short form or a full device name; BadInput if there is none.

    Case, spaces, dashes, the brand and the right memory make no difference.
    """
    if not isinstance(word, str):
        raise BadInput(f"the GPU is {word!r}", "give its name, such as t4")
    if found := _by_core().get(_core(word)):
        return found
    count, _, one = word.lower().partition("x")
    if count.strip().isdigit() and (found := _by_core().get(_core(one))):
        fix = f"give one, and their number beside it: `trainfit plan --gpu {found.slug} --gpus"
        raise BadInput(f"{word!r} is several GPUs", f"{fix} {count.strip()}`")
    words = [short for row in gpus() for short in (row.slug, *row.short_names)]
    plain = re.sub(r"[\s_]+", "-", word.strip().lower())
    near = did_you_mean(plain, words, "`trainfit check --gpu list` shows them all")
    raise BadInput(f"unknown GPU {word!r}", near)


def _core(name: str) -> str:
    """Reduce a name to what tells GPUs apart: no brand, no family, no separators."""
    return _BRANDS.sub("", name.lower())


@cache
def _by_core() -> dict[str, GpuSpec]:
    """Index the rows by device names that only one has, then by short forms and slugs."""
    shared = Counter(name for row in gpus() for name in row.names)
    short = [(word, row) for row in gpus() for word in (row.slug, *row.short_names)]
    return (
        {_core(f"{word} {row.memory_gb:g}GB"): row for word, row in short}
        | {_core(name): row for row in gpus() for name in row.names if shared[name] == 1}
        | {_core(word): row for word, row in short}
    )


def _warn(text: str) -> None:
    warnings.warn(text, TrainfitWarning, stacklevel=3)


# ── GPUs of this machine ─────────────────────────────────────────────────────────────────────────


_SLICE_NAME = re.compile(r" MIG (\S+)$")


@dataclass(frozen=True, slots=True)
class Joined:
    """A device of torch with its GPU in the driver, and the MIG slice if it is one."""

    device: TorchDevice
    gpu: NvmlGpu | None = None
    slice: NvmlGpu | None = None

    @property
    def mig(self) -> str | None:
        """Profile of a MIG slice, such as 1g.5gb."""
        for name in (self.device.name, self.slice.name if self.slice else ""):
            if found := _SLICE_NAME.search(name):
                return found.group(1)
        return None


def join(devices: Sequence[TorchDevice], known: Sequence[NvmlGpu]) -> tuple[Joined, ...]:
    """Match torch's devices to the driver's by UUID, else PCI address, else position.

    CUDA numbers GPUs fastest first and after CUDA_VISIBLE_DEVICES, NVML by PCI address, so
    positions count only where both lists have the same names.
    """
    alike = [device.name for device in devices] == [gpu.name for gpu in known]
    return tuple(
        _by_uuid(device, known)
        or _by_pci(device, known)
        or Joined(device, known[position] if alike and device.vendor == "nvidia" else None)
        for position, device in enumerate(devices)
    )


def not_joined(joined: Sequence[Joined], known: Sequence[NvmlGpu]) -> tuple[NvmlGpu, ...]:
    """Return the driver's GPUs that torch does not have."""
    used = [id(pair.gpu) for pair in joined]
    left = [gpu for gpu in known if id(gpu) not in used]
    for pair in joined:
        if pair.gpu is None:  # not matched: assume the first of the same name
            same = [gpu for gpu in left if gpu.name == pair.device.name]
            left = [gpu for gpu in left if not same or gpu is not same[0]]
    return tuple(left)


def gpu_record(pair: Joined, shared_memory_gib: float) -> Gpu:
    """Build the record of a device; one without own memory has `shared_memory_gib`."""
    device, mig = pair.device, pair.mig
    memory = shared_memory_gib if device.memory_bytes is None else device.memory_bytes / GIB
    spec = None if mig else known_spec(device.name, memory)
    dtypes = _dtypes(device, spec)
    return Gpu(
        index=device.index,
        name=device.name,
        vendor=device.vendor,
        slug=spec.slug if spec else None,
        memory_gib=memory,
        compute_capability=device.capability,
        native_bf16=dtypes.bf16,
        tf32=dtypes.tf32,
        fp16=dtypes.fp16,
        fp8=dtypes.fp8,
        sm_count=device.sm_count,
        uuid=_uuid(pair),
        mig=mig,
        state=_state(pair),
    )


def catalogue_gpu(spec: GpuSpec) -> Gpu:
    """Build the record of a GPU of the catalogue."""
    return Gpu(
        index=0,
        name=spec.names[0] if spec.names else spec.slug,
        vendor=spec.vendor,
        slug=spec.slug,
        memory_gib=spec.memory_gib,
        compute_capability=spec.compute_capability,
        native_bf16=spec.native_bf16,
        tf32=spec.native_tf32,
        fp16=spec.native_fp16,
        fp8=spec.native_fp8,
        sm_count=spec.sm_count,
    )


def known_spec(name: str, memory_gib: float) -> GpuSpec | None:
    """Look up a GPU without a warning: an unknown one becomes a note of the profile."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainfitWarning)
        return lookup(name, memory_gib)


def _dtypes(device: TorchDevice, spec: GpuSpec | None) -> Dtypes:
    if device.vendor == "nvidia":
        return native_dtypes(parse_capability(device.capability))
    if spec is None:
        return Dtypes()
    return Dtypes(
        bf16=spec.native_bf16, tf32=spec.native_tf32, fp16=spec.native_fp16, fp8=spec.native_fp8
    )


def _state(pair: Joined) -> GpuState:
    """Current state by the driver; a slice has its own memory, the rest is the whole GPU's."""
    if pair.gpu is None:
        return GpuState()
    part = (pair.slice or NvmlGpu(name="")) if pair.mig else pair.gpu
    used = part.state.memory_used_gib
    return replace(
        pair.gpu.state,
        memory_used_gib=used,
        memory_used_by_others_gib=used_by_others(used, part.own_gib, pair.device.has_context),
    )


def used_by_others(
    used_gib: float | None, own_gib: float | None, has_context: bool | None
) -> float | None:
    """Return the used memory that is not this process's; None where it is unknown.

    A process without a context on the GPU holds none of it. In a container, the driver's list has
    the host's process numbers or is empty, so this process's own share may be unknown.
    """
    if used_gib is None or has_context is False:
        return used_gib
    return None if own_gib is None else max(0.0, used_gib - own_gib)


def _uuid(pair: Joined) -> str | None:
    """Return the UUID as the vendor's tools print it, ready for a command."""
    known = (pair.slice if pair.mig else pair.gpu) or NvmlGpu(name="")
    own = pair.device.uuid
    if known.uuid or own is None or pair.mig:
        return known.uuid
    return f"GPU-{_bare(own)}" if pair.device.vendor == "nvidia" else own


def _bare(uuid: str | None) -> str | None:
    """Strip the GPU- or MIG- that NVML writes before a UUID and torch does not."""
    return uuid and uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _by_uuid(device: TorchDevice, known: Sequence[NvmlGpu]) -> Joined | None:
    wanted = _bare(device.uuid)
    if wanted is None:
        return None
    for gpu in known:
        if _bare(gpu.uuid) == wanted:
            return Joined(device, gpu, _slice_by_name(device, gpu))
        for part in gpu.slices:
            if _bare(part.uuid) == wanted:
                return Joined(device, gpu, part)
    return None


def _by_pci(device: TorchDevice, known: Sequence[NvmlGpu]) -> Joined | None:
    for gpu in known:
        if device.pci is not None and gpu.pci == device.pci:
            return Joined(device, gpu, _slice_by_name(device, gpu))
    return None


def _slice_by_name(device: TorchDevice, gpu: NvmlGpu) -> NvmlGpu | None:
    """Find the slice by name where torch gave its parent's identity and the name is unique."""
    fitting = [part for part in gpu.slices if part.name == device.name]
    return fitting[0] if len(fitting) == 1 else None
