"""Put the probes together: detect() asks this machine, as_if() imagines a GPU of the catalogue."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trainfit.catalogue import GpuSpec
from trainfit.hardware.access import Access, access_notes
from trainfit.hardware.compiler import probe_compile
from trainfit.hardware.cpu import sysctl
from trainfit.hardware.gpus import catalogue_gpu, gpu_record, join, known_spec, not_joined
from trainfit.hardware.host import Host, probe_host
from trainfit.hardware.notes import gpu_notes, host_notes
from trainfit.hardware.nvml import NvmlReport, load_nvml, probe_nvml
from trainfit.hardware.torch_probe import TorchReport, load_torch, probe_torch
from trainfit.hardware.trial import bf16_fault, bf16_note
from trainfit.hardware.visible import VARIABLE, resolve
from trainfit.records import CompileSupport, Cpu, Gpu, HardwareProfile, Note

ASSUMED_CORES = 8
"""Usable cores beside a GPU that is not here: what clouds rent with one."""
_ASSUMED = Cpu(name="assumed", cores=ASSUMED_CORES, host_cores=ASSUMED_CORES, assumed=True)


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
    """The catalogue's GPU as if it were here; torch is not asked.

    The cores beside it are this machine's where such a GPU is in it, and else assumed.
    """
    host = probe_host(Path())
    gpu = catalogue_gpu(spec)
    here = host.nvidia_devices > 0 and _has(spec, probe_nvml(load_nvml, os.getpid()))
    notes = (*gpu_notes([gpu], None), *host_notes(host)) if here else _assumed_notes(gpu)
    profile = replace(_machine(host, probe_compile()), gpus=(gpu,), notes=notes, simulated=True)
    return profile if here else replace(profile, cpu=_ASSUMED)


def _has(spec: GpuSpec, nvml: NvmlReport) -> bool:
    found = [known_spec(g.name, g.memory_gib) for g in nvml.gpus if g.memory_gib is not None]
    return any(one is not None and one.slug == spec.slug for one in found)


def _assumed_notes(gpu: Gpu) -> tuple[Note, ...]:
    text = f"{gpu.name} is not in this machine: {ASSUMED_CORES} usable cores beside it are assumed."
    fix = "Run `trainfit check` on the machine that has it: its own cores count there."
    return (*gpu_notes([gpu], None), Note(code="assumed_cores", text=text, fix=fix))


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
