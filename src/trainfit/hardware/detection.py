"""Put the probes together: detect() asks this machine, as_if() a catalogue GPU on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trainfit.catalogue import GpuSpec
from trainfit.hardware.access import Access, access_notes
from trainfit.hardware.compiler import probe_compile
from trainfit.hardware.cpu import sysctl
from trainfit.hardware.gpus import catalogue_gpu, gpu_record, join, not_joined
from trainfit.hardware.host import Host, probe_host
from trainfit.hardware.notes import gpu_notes, host_notes
from trainfit.hardware.nvml import NvmlReport, load_nvml, probe_nvml
from trainfit.hardware.torch_probe import TorchReport, load_torch, probe_torch
from trainfit.hardware.trial import bf16_fault, bf16_note
from trainfit.hardware.visible import VARIABLE, resolve
from trainfit.records import CompileSupport, HardwareProfile


def detect(folder: Path | None = None) -> HardwareProfile:
    """What this machine has and what of it this process may use; `folder` is on the disk meant.

    Reading a GPU's properties starts CUDA in this process, but nothing is allocated. Whatever is
    broken or out of reach is a note of the profile; detection itself goes on.
    """
    # NVML first: it sees the memory in use before this process could add to it.
    nvml = probe_nvml(load_nvml, os.getpid())
    profile = assemble(
        host=probe_host(folder or Path()),
        torch=probe_torch(load_torch, sysctl),
        nvml=nvml,
        visible_devices=os.environ.get(VARIABLE),
        compile=probe_compile(),
    )
    return _tried(profile, bf16_fault) if profile.torch and not profile.gpus else profile


def as_if(spec: GpuSpec) -> HardwareProfile:
    """The catalogue's GPU as if it were in this machine; torch is not asked."""
    host = probe_host(Path())
    gpu = catalogue_gpu(spec)
    notes = (*gpu_notes([gpu], None), *host_notes(host))
    return replace(_machine(host, probe_compile()), gpus=(gpu,), notes=notes, simulated=True)


def assemble(
    *,
    host: Host,
    torch: TorchReport,
    nvml: NvmlReport,
    visible_devices: str | None,
    compile: CompileSupport,
) -> HardwareProfile:
    """The profile that the probes' reports add up to."""
    joined = join(torch.devices, nvml.gpus)
    others = not_joined(joined, nvml.gpus)
    uuids = [[gpu.uuid or "", *(part.uuid or "" for part in gpu.slices)] for gpu in nvml.gpus]
    access = Access(
        torch=torch,
        nvml=nvml,
        visible=resolve(visible_devices, uuids or None),
        others=others,
        on_pci=host.nvidia_devices,
    )
    gpus = tuple(gpu_record(pair, host.memory_gib) for pair in joined)
    return replace(
        _machine(host, compile),
        gpus=gpus,
        other_gpus=tuple(gpu.name for gpu in others),
        torch=torch.build,
        driver=nvml.driver,
        driver_cuda=nvml.driver_cuda,
        notes=(
            *access_notes(access),
            *gpu_notes(gpus, torch.build, torch.architectures),
            *host_notes(host),
        ),
    )


def _tried(profile: HardwareProfile, trial: Callable[[], str | None]) -> HardwareProfile:
    """The profile of a CPU machine once its bfloat16 has been tried, if it claims to have it."""
    fault = trial() if profile.cpu.native_bf16 else None
    if fault is None:
        return profile
    cpu = replace(profile.cpu, native_bf16=False)
    return replace(profile, cpu=cpu, notes=(*profile.notes, bf16_note(fault)))


def _machine(host: Host, compile: CompileSupport) -> HardwareProfile:
    """The profile of the machine before any GPU is known."""
    return HardwareProfile(
        gpus=(),
        cpu=host.cpu,
        memory_gib=host.memory_gib,
        memory_available_gib=host.memory_available_gib,
        shm_gib=host.shm_gib,
        disk_free_gib=host.disk_free_gib,
        torch=None,
        driver=None,
        driver_cuda=None,
        compile=compile,
        platform=host.platform,
        python=host.python,
    )
