"""Hardware profiles: detect() probes this machine, as_if() simulates a GPU of the catalogue."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from trainfit.core.records import CompileSupport, Cpu, Gpu, HardwareProfile, Note, TorchBuild
from trainfit.hardware.access import VARIABLE, Access, access_notes, install_command, resolve
from trainfit.hardware.catalogue import GpuSpec
from trainfit.hardware.gpus import catalogue_gpu, gpu_record, join, known_spec, not_joined
from trainfit.hardware.host import Host, probe_host, sysctl
from trainfit.hardware.nvml import (
    NvmlReport,
    cuda_wheel,
    has_kernels,
    load_nvml,
    parse_capability,
    probe_nvml,
)
from trainfit.hardware.torch_probe import TorchReport, load_torch, probe_compile, probe_torch

SMALL_SHM_GIB = 1.0
"""Least size of /dev/shm without a note; Docker's 64 MiB is less than one worker needs."""

MEMORY_IN_USE = 0.05
"""Share of a GPU's memory that others may use without a note, such as a desktop."""

_POWER_BRAKE = "hw_power_brake_slowdown"
_SLOWED = ("hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", _POWER_BRAKE)
"""Throttle reasons that mean a fault; a power cap or fixed clocks are chosen."""


def gpu_notes(
    gpus: Sequence[Gpu], build: TorchBuild | None, architectures: Sequence[str] = ()
) -> Iterator[Note]:
    """Yield notes on the kinds of GPU, then on the state of each."""
    if len({(gpu.name, gpu.mig) for gpu in gpus}) > 1:
        yield _mixed(gpus)
    first_of_kind = {gpu.name: gpu for gpu in reversed(gpus)}
    for gpu in sorted(first_of_kind.values(), key=lambda gpu: gpu.index):
        yield from _kind_notes(gpu, build, architectures)
    for gpu in gpus:
        yield from _state_notes(gpu)


def host_notes(host: Host) -> Iterator[Note]:
    """Yield notes on limits by a container or a scheduler."""
    cpu = host.cpu
    if cpu.cores < cpu.host_cores:
        quota = cpu.cores < host.affinity
        text = (
            f"The host has {cpu.host_cores} cores, but this process may use {cpu.cores} "
            f"({'the quota of its cgroup' if quota else 'its CPU affinity'})."
        )
        fix = "Start the container with a larger `--cpus`." if quota else "Widen it with `taskset`."
        yield Note(code="cpu_limited", text=text, fix=fix)
    if host.shm_gib is not None and host.shm_gib < SMALL_SHM_GIB:
        text = (
            f"/dev/shm has {host.shm_gib:.2f} GiB, and data-loader workers pass every batch "
            "through it."
        )
        fix = "Start the container with `--shm-size=8g`, or set training.num_workers=0."
        yield Note(code="small_shm", text=text, fix=fix)


def _mixed(gpus: Sequence[Gpu]) -> Note:
    # The newer generation first: a 3090 has a little more memory than a 4090.
    best = max(gpus, key=lambda gpu: (gpu.fp8, gpu.native_bf16, gpu.memory_gib))
    nvidia = best.vendor == "nvidia"
    alike = [gpu for gpu in gpus if gpu.name == best.name]
    chosen = ",".join((nvidia and gpu.uuid) or str(gpu.index) for gpu in alike)
    names = ", ".join(f"{gpu.index}: {gpu.name} with {gpu.memory_gib:.1f} GiB" for gpu in gpus)
    return Note(
        code="mixed_gpus",
        text=f"The GPUs differ ({names}): a run on all of them goes at the pace of the slowest.",
        fix=f"To use one kind: `export {'CUDA' if nvidia else 'HIP'}_VISIBLE_DEVICES={chosen}`.",
    )


def _kind_notes(gpu: Gpu, build: TorchBuild | None, architectures: Sequence[str]) -> Iterator[Note]:
    if gpu.mig:
        yield Note(
            code="mig",
            text=f"{gpu.name} is a MIG slice ({gpu.mig}, {gpu.memory_gib:.1f} GiB): "
            "it has a share of the GPU, and no published peak to compare with.",
            fix="For the whole GPU: `sudo nvidia-smi -mig 0`.",
        )
    elif gpu.slug is None:
        yield Note(
            code="unknown_gpu",
            text=f"The catalogue does not know {gpu.name} with {gpu.memory_gib:.1f} GiB, "
            "so there is no peak and no MFU for it.",
            fix="Add a row with its source to hardware/gpus.csv.",
        )
    if gpu.vendor == "nvidia" and not gpu.native_bf16:
        yield _emulated(gpu)
    if gpu.vendor == "nvidia" and build is not None:
        yield from _kernels(gpu, build, architectures)


def _emulated(gpu: Gpu) -> Note:
    fix = "Use fp16 with loss scaling: device.mixed_precision=fp16."
    return Note(
        code="emulated_bf16",
        text=f"{gpu.name} has compute capability {gpu.compute_capability}: torch claims that "
        "bfloat16 works there, but it is emulated and slow.",
        fix=fix if gpu.fp16 else "Train in fp32: device.mixed_precision=off.",
    )


def _kernels(gpu: Gpu, build: TorchBuild, architectures: Sequence[str]) -> Iterator[Note]:
    capability = parse_capability(gpu.compute_capability)
    if not has_kernels(capability, architectures):
        wheel = cuda_wheel(capability, None) or "cu130"
        yield Note(
            code="unsupported_architecture",
            text=f"torch {build.version} has no kernels for {gpu.name} (compute capability "
            f"{gpu.compute_capability}), only for {' '.join(architectures)}.",
            fix=f"Install another build: {install_command(build, wheel)}.",
        )


def _state_notes(gpu: Gpu) -> Iterator[Note]:
    yield from _pcie(gpu)
    yield from _throttled(gpu)
    others = gpu.state.memory_used_by_others_gib
    if others is not None and others > MEMORY_IN_USE * gpu.memory_gib:
        yield Note(
            code="memory_in_use",
            text=f"Others use {others:.1f} of {gpu.memory_gib:.1f} GiB on GPU {gpu.index} "
            f"({gpu.name}).",
            fix="`nvidia-smi` lists the processes: end them, or choose another GPU with "
            "CUDA_VISIBLE_DEVICES.",
        )


def _pcie(gpu: Gpu) -> Iterator[Note]:
    """Note a link with fewer lanes than possible; an idle link's lower generation is normal."""
    link = gpu.state.pcie
    if link.width and link.max_width and link.width < link.max_width:
        yield Note(
            code="pcie_narrow",
            text=f"GPU {gpu.index} ({gpu.name}) is linked with {link.width} of "
            f"{link.max_width} PCIe lanes, so copies to it are that much slower.",
            fix="Seat the card again, or move it to a slot with all lanes.",
        )


def _throttled(gpu: Gpu) -> Iterator[Note]:
    state = gpu.state
    reasons = [name for name in _SLOWED if name in state.throttle_reasons]
    if not reasons:
        return
    seen = [
        f"{value} {unit}"
        for value, unit in ((state.clock_sm_mhz, "MHz"), (state.temperature_c, "°C"))
        if value is not None
    ]
    yield Note(
        code="throttled",
        text=f"GPU {gpu.index} ({gpu.name}) is slowed down now: {', '.join(reasons + seen)}.",
        fix="See `nvidia-smi -q -d PERFORMANCE,TEMPERATURE`: check its cooling"
        + (" and its power supply." if _POWER_BRAKE in reasons else "."),
    )


_PRODUCT = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
_SECONDS = 60


@cache
def bf16_fault(
    command: tuple[str, ...] = (sys.executable, "-c", _PRODUCT), seconds: float = _SECONDS
) -> str | None:
    """Try a bfloat16 product in a child: the signal that killed it, such as SIGILL, or None.

    Some virtual machines show AMX in the processor's flags and do not let it run. A child that
    does not answer counts as a fault too. It is tried once in a process.
    """
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return "a timeout"
    except OSError:
        return None
    return signal.Signals(-done.returncode).name if done.returncode < 0 else None


def bf16_note(fault: str) -> Note:
    """Note on a processor whose bfloat16 products crash."""
    return Note(
        code="cpu_bf16_dies",
        text=f"The processor says that it multiplies bfloat16, but a product died of {fault} here.",
        fix="Stay in fp32 (device.mixed_precision=off), or `export "
        "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16` to do without AMX.",
    )


ASSUMED_CORES = 8
"""Usable cores assumed beside a GPU that is not here, as in rented machines with one."""
_ASSUMED = Cpu(name="assumed", cores=ASSUMED_CORES, host_cores=ASSUMED_CORES, assumed=True)


def detect(folder: Path | None = None) -> HardwareProfile:
    """Detect this machine, as far as this process may use it; `folder` selects the disk.

    Reading a GPU's properties starts CUDA in this process, but nothing is allocated. Anything
    broken or out of reach becomes a note of the profile.
    """
    profile, _ = probe_machine(folder or Path())
    return _tried(profile, bf16_fault) if profile.torch and not profile.gpus else profile


def probe_machine(folder: Path) -> tuple[HardwareProfile, Host]:
    """Return the profile of this machine by all probes, and the report on its host."""
    # NVML first: it sees the memory in use before this process could add to it.
    nvml = probe_nvml(load_nvml, os.getpid())
    host = probe_host(folder)
    profile = assemble(
        host=host,
        torch=probe_torch(load_torch, sysctl),
        nvml=nvml,
        visible_devices=os.environ.get(VARIABLE),
        compile=probe_compile(),
    )
    return profile, host


def as_if(spec: GpuSpec) -> HardwareProfile:
    """Simulate a GPU of the catalogue, without torch.

    The cores are this machine's if it has such a GPU, and assumed otherwise.
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
    """Combine the probes' reports into a profile."""
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
    """Try the bfloat16 of a CPU machine that claims it, and correct the profile."""
    fault = trial() if profile.cpu.native_bf16 else None
    if fault is None:
        return profile
    cpu = replace(profile.cpu, native_bf16=False)
    return replace(profile, cpu=cpu, notes=(*profile.notes, bf16_note(fault)))


def _machine(host: Host, compile: CompileSupport) -> HardwareProfile:
    """Build the profile of the host without GPUs."""
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
