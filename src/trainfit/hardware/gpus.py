"""Gpu records, each joined from the reports of torch, the driver and the catalogue."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainfit.core.errors import TrainfitWarning
from trainfit.core.records import Gpu, GpuState
from trainfit.hardware.catalogue import GpuSpec, lookup
from trainfit.hardware.host import GIB
from trainfit.hardware.nvml import Dtypes, NvmlGpu, native_dtypes, parse_capability
from trainfit.hardware.torch_probe import TorchDevice

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
