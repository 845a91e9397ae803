"""Hardware profiles: detect() probes this machine, as_if() simulates a GPU of the catalogue."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

from trainfit.core import caches
from trainfit.core.files import cache_folder, write_whole
from trainfit.core.records import CompileSupport, Cpu, Gpu, HardwareProfile, Note, TorchBuild
from trainfit.hardware.access import (
    VARIABLE,
    Access,
    TorchReport,
    access_notes,
    install_command,
    load_torch,
    note,
    probe_torch,
    resolve,
)
from trainfit.hardware.catalogue import (
    GpuSpec,
    catalogue_gpu,
    find,
    gpu_record,
    join,
    known_spec,
    not_joined,
)
from trainfit.hardware.host import Host, probe_compile, probe_host, sysctl
from trainfit.hardware.nvml import (
    NvmlReport,
    cuda_wheel,
    has_kernels,
    load_nvml,
    parse_capability,
    probe_nvml,
)

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
        limit = "the quota of its cgroup" if quota else "its CPU affinity"
        fix = "Start the container with a larger `--cpus`." if quota else "Widen it with `taskset`."
        yield note("cpu_limited", cpu=cpu, limit=limit, fix=fix)
    if host.shm_gib is not None and host.shm_gib < SMALL_SHM_GIB:
        yield note("small_shm", host=host)


def _mixed(gpus: Sequence[Gpu]) -> Note:
    # The newer generation first: a 3090 has a little more memory than a 4090.
    best = max(gpus, key=lambda gpu: (gpu.fp8, gpu.native_bf16, gpu.memory_gib))
    nvidia = best.vendor == "nvidia"
    alike = [gpu for gpu in gpus if gpu.name == best.name]
    chosen = ",".join((nvidia and gpu.uuid) or str(gpu.index) for gpu in alike)
    names = ", ".join(f"{gpu.index}: {gpu.name} with {gpu.memory_gib:.1f} GiB" for gpu in gpus)
    variable = VARIABLE if nvidia else "HIP_VISIBLE_DEVICES"
    return note("mixed_gpus", names=names, variable=variable, chosen=chosen)


def _kind_notes(gpu: Gpu, build: TorchBuild | None, architectures: Sequence[str]) -> Iterator[Note]:
    if gpu.mig or gpu.slug is None:
        yield note("mig" if gpu.mig else "unknown_gpu", gpu=gpu)
    if gpu.vendor == "nvidia" and not gpu.native_bf16:
        fp16 = "Use fp16 with loss scaling: device.mixed_precision=fp16."
        fix = fp16 if gpu.fp16 else "Train in fp32: device.mixed_precision=off."
        yield note("emulated_bf16", gpu=gpu, fix=fix)
    if gpu.vendor == "nvidia" and build is not None:
        capability = parse_capability(gpu.compute_capability)
        if not has_kernels(capability, architectures):
            command = install_command(build, cuda_wheel(capability, None) or "cu130")
            known = " ".join(architectures)
            facts = {"build": build, "gpu": gpu, "architectures": known, "command": command}
            yield note("unsupported_architecture", **facts)


def _state_notes(gpu: Gpu) -> Iterator[Note]:
    state, link = gpu.state, gpu.state.pcie
    # A lower generation is normal for an idle link; fewer lanes are not.
    if link.width and link.max_width and link.width < link.max_width:
        yield note("pcie_narrow", gpu=gpu, link=link)
    if reasons := [name for name in _SLOWED if name in state.throttle_reasons]:
        figures = ((state.clock_sm_mhz, "MHz"), (state.temperature_c, "°C"))
        seen = [f"{value} {unit}" for value, unit in figures if value is not None]
        power = " and its power supply" if _POWER_BRAKE in reasons else ""
        yield note("throttled", gpu=gpu, seen=", ".join(reasons + seen), power=power)
    others = state.memory_used_by_others_gib
    if others is not None and others > MEMORY_IN_USE * gpu.memory_gib:
        yield note("memory_in_use", gpu=gpu)


_PRODUCT = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
_SECONDS = 60
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_INSTRUCTIONS = ("_CPU_CAPABILITY", "_MAX_CPU_ISA")
"""Ends of the names of variables that choose a processor's instructions."""


@cache
def bf16_fault(
    command: tuple[str, ...] = (sys.executable, "-P", "-c", _PRODUCT), seconds: float = _SECONDS
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


def tried_before() -> Path | None:
    """File that says that a child went through it since this machine was started, if it can say.

    It is of this Python, its libraries and the variables that choose a processor's instructions.
    """
    try:
        started = _BOOT.read_text(encoding="utf-8")
    except OSError:  # no Linux
        return None
    chosen = {name: value for name, value in os.environ.items() if name.endswith(_INSTRUCTIONS)}
    about = json.dumps([started, sys.executable, caches.libraries(), chosen], sort_keys=True)
    return cache_folder() / "bf16" / hashlib.sha256(about.encode()).hexdigest()[:32]


AHEAD: list[subprocess.Popen[str]] = []
"""A child that was started ahead of its work, and does `try_bf16` first."""


def try_bf16() -> None:
    """Try a bfloat16 product in this process, a child that may die of it."""
    import torch

    square = torch.ones(64, 64, dtype=torch.bfloat16)
    square @ square
    if (before := tried_before()) is not None:
        with suppress(OSError):
            write_whole(before, "")


def _fault_here(before: Path | None) -> str | None:
    """Return `bf16_fault`, or None where the file `before` says so, or will in a moment."""
    ends = time.monotonic() + _SECONDS
    while before is not None and not before.is_file() and time.monotonic() < ends:
        if not AHEAD or AHEAD[0].poll() is not None:
            break
        time.sleep(0.01)
    if before is not None and before.is_file():
        return None
    fault = bf16_fault()
    if fault is None and before is not None:
        with suppress(OSError):
            write_whole(before, "")
    return fault


ASSUMED_CORES = 8
"""Usable cores assumed beside a GPU that is not here, as in rented machines with one."""
_ASSUMED = Cpu(name="assumed", cores=ASSUMED_CORES, host_cores=ASSUMED_CORES, assumed=True)


def detect(folder: Path | None = None) -> HardwareProfile:
    """Detect this machine, as far as this process may use it; `folder` selects the disk.

    Reading a GPU's properties starts CUDA in this process, but nothing is allocated. Anything
    broken or out of reach becomes a note of the profile.
    """
    before = tried_before()
    with ThreadPoolExecutor(1) as pool:

        def try_early(host: Host) -> None:
            if host.cpu.native_bf16 and not host.nvidia_devices:
                pool.submit(_fault_here, before)  # its child imports torch while this process does

        profile, _ = probe_machine(folder or Path(), try_early)
    if profile.torch is None or profile.gpus:
        return profile
    return _tried(profile, lambda: _fault_here(before))


def probe_machine(
    folder: Path, tell: Callable[[Host], None] = lambda _host: None
) -> tuple[HardwareProfile, Host]:
    """Return the profile of this machine by all probes, and the report on its host.

    `tell` gets the host before torch is imported.
    """
    # NVML first: it sees the memory in use before this process could add to it.
    nvml = probe_nvml(load_nvml, os.getpid())
    host = probe_host(folder)
    tell(host)
    profile = assemble(
        host=host,
        torch=probe_torch(load_torch, sysctl),
        nvml=nvml,
        visible_devices=os.environ.get(VARIABLE),
        compile=probe_compile(),
    )
    return profile, host


def as_if(spec: GpuSpec | str) -> HardwareProfile:
    """Simulate a GPU of the catalogue, or one that is named, without torch.

    The cores are this machine's if it has such a GPU, and assumed otherwise.
    """
    spec = find(spec) if isinstance(spec, str) else spec
    host, gpu = probe_host(Path()), catalogue_gpu(spec)
    here = host.nvidia_devices > 0 and _has(spec, probe_nvml(load_nvml, os.getpid()))
    assumed = (note("assumed_cores", gpu=gpu, cores=ASSUMED_CORES),)
    notes = (*gpu_notes([gpu], None), *(host_notes(host) if here else assumed))
    profile = replace(_machine(host, probe_compile()), gpus=(gpu,), notes=notes, simulated=True)
    return profile if here else replace(profile, cpu=_ASSUMED)


def _has(spec: GpuSpec, nvml: NvmlReport) -> bool:
    found = [known_spec(g.name, g.memory_gib) for g in nvml.gpus if g.memory_gib is not None]
    return any(one is not None and one.slug == spec.slug for one in found)


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
    return replace(profile, cpu=cpu, notes=(*profile.notes, note("cpu_bf16_dies", fault=fault)))


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
