"""GPUs as the NVIDIA driver describes them through NVML, and facts by compute capability.

Almost every query is "not supported" by some GPU, driver or container: that one figure is then
unknown. NVML counts as broken only when the library itself does not start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainfit.core.records import GpuState, PcieLink
from trainfit.hardware.host import GIB

Capability = tuple[int, int]

_EMBEDDED: frozenset[Capability] = frozenset({(5, 3), (6, 2), (7, 2), (8, 7), (10, 1)})
"""Jetson boards: machine code for other GPUs of the same major version does not run on them."""

_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Dtypes:
    """Dtypes that the matrix units of a GPU take."""

    bf16: bool = False
    tf32: bool = False
    fp16: bool = False
    fp8: bool = False


def parse_capability(text: str) -> Capability:
    """Parse a compute capability such as 8.6."""
    major, minor = text.split(".")
    return int(major), int(minor)


def native_dtypes(capability: Capability) -> Dtypes:
    """Return the native dtypes of an NVIDIA GPU.

    torch.cuda.is_bf16_supported() is not used: it is True for a T4, which emulates bfloat16.
    """
    return Dtypes(
        bf16=capability >= (8, 0),
        tf32=capability >= (8, 0),
        fp16=capability >= (7, 0),
        fp8=capability >= (8, 9),
    )


def has_kernels(capability: Capability, architectures: Sequence[str]) -> bool:
    """Tell if a torch built for `architectures` (torch.cuda.get_arch_list()) runs on the GPU.

    Machine code (sm_86) runs on the same major version from its minor version up; PTX
    (compute_90) is compiled for any newer GPU by the driver; an `a` ties either to one GPU.
    """
    return not architectures or any(_runs_on(capability, name) for name in architectures)


def _runs_on(capability: Capability, architecture: str) -> bool:
    parts = _ARCHITECTURE.fullmatch(architecture)
    if parts is None:
        return False
    kind, major, minor, suffix = parts.groups()
    built_for = int(major), int(minor)
    if suffix == "a" or (kind == "sm" and {capability, built_for} & _EMBEDDED):
        return capability == built_for
    same_major = capability[0] == built_for[0]
    return capability >= built_for and (same_major or (kind == "compute" and suffix == ""))


def cuda_wheel(capability: Capability | None, driver_cuda: str | None) -> str | None:
    """Choose the CUDA variant of torch's wheels for a GPU and its driver; None: too old a driver.

    cu126 is the last with kernels below 7.5 and runs on any driver of CUDA 12; GPUs after Hopper
    need a newer one.
    """
    driver = parse_capability(driver_cuda) if driver_cuda else (13, 0)
    if driver < (12, 0):
        return None
    if capability is not None and capability < (7, 5):
        return "cu126"
    if driver >= (13, 0):
        return "cu130"
    return "cu126" if capability is None or capability < (10, 0) else None


Sample = dict[str, float | None]
"""index, utilisation_percent, temperature_c, power_w, memory_used_gib; None: unknown."""

_THROTTLE_REASONS = {
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}
"""Bits of the driver's answer, without the first one, idle, which slows nothing down."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NvmlGpu:
    """A GPU, or a MIG slice of one, in its current state."""

    name: str
    uuid: str | None = None
    pci: str | None = None
    memory_gib: float | None = None
    capability: Capability | None = None
    state: GpuState = field(default_factory=GpuState)
    own_gib: float | None = None
    """Memory of this process; None when the driver does not list it."""
    processes: tuple[tuple[int, float | None], ...] = ()
    """Process and GiB of each that computes on the GPU."""
    mig_on: bool = False
    slices: tuple[NvmlGpu, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class NvmlReport:
    """Result of the NVML probe, or the error."""

    driver: str | None = None
    driver_cuda: str | None = None
    gpus: tuple[NvmlGpu, ...] = ()
    error: str | None = None
    installed: bool = True
    """False where the Python binding cannot be imported."""


def load_nvml() -> Any:
    """Import NVML's Python binding."""
    import pynvml

    return pynvml


def probe_nvml(load: Callable[[], Any], pid: int) -> NvmlReport:
    """Query NVML by the binding of `load`; the memory of process `pid` is kept apart."""
    try:
        nvml = load()
    except ImportError as error:
        return NvmlReport(error=str(error), installed=False)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return NvmlReport(error=str(error))
    try:
        return _read(nvml, pid)
    except nvml.NVMLError as error:
        return NvmlReport(error=str(error))
    finally:
        _ask(nvml, "nvmlShutdown")


def open_sampler(load: Callable[[], Any], uuids: Sequence[str]) -> Callable[[], list[Sample]]:
    """Return a function that samples these GPUs, in their order, cheaply enough for a loop.

    NVML stays open. A GPU whose UUID is unknown, or NVML that does not start, gives no sample.
    """
    try:
        nvml = load()
    except ImportError:
        return list
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return list
    known = [_ask(nvml, "nvmlDeviceGetHandleByUUID", uuid) for uuid in uuids]
    handles = [(index, handle) for index, handle in enumerate(known) if handle is not None]

    def sample() -> list[Sample]:
        return [{"index": index, **_sample(nvml, handle)} for index, handle in handles]

    return sample


def _sample(nvml: Any, handle: Any) -> Sample:
    utilisation = _ask(nvml, "nvmlDeviceGetUtilizationRates", handle)
    memory = _memory(nvml, handle)
    return {
        "utilisation_percent": utilisation and utilisation.gpu,
        "temperature_c": _ask(nvml, "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
        "power_w": _watts(_ask(nvml, "nvmlDeviceGetPowerUsage", handle)),
        "memory_used_gib": memory and memory.used / GIB,
    }


def pci_address(domain: int, bus: int, device: int) -> str:
    """Format a PCI address in the same way for torch and NVML."""
    return f"{domain:04x}:{bus:02x}:{device:02x}"


def _ask(nvml: Any, question: str, *arguments: Any) -> Any:
    """Query the driver; None where this driver, GPU or binding has no answer."""
    function = getattr(nvml, question, None)
    if function is None:
        return None
    mismatch = getattr(nvml, "NVMLLibraryMismatchError", nvml.NVMLError)
    try:
        return function(*arguments)
    except (nvml.NVMLError, mismatch):
        return None


def _read(nvml: Any, pid: int) -> NvmlReport:
    """Read every GPU; one that does not answer becomes an error of the report."""
    cuda = _ask(nvml, "nvmlSystemGetCudaDriverVersion_v2")
    gpus, lost = [], []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            gpus.append(_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index), pid))
        except nvml.NVMLError as error:
            lost.append(f"GPU {index}: {error}")
    return NvmlReport(
        driver=_ask(nvml, "nvmlSystemGetDriverVersion"),
        driver_cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        gpus=tuple(gpus),
        error="; ".join(lost) or None,
    )


def _gpu(nvml: Any, handle: Any, pid: int) -> NvmlGpu:
    """Read a whole GPU with its MIG slices; NVMLError when even its name is unknown."""
    memory = _memory(nvml, handle)
    mig_on = (_ask(nvml, "nvmlDeviceGetMigMode", handle) or (0,))[0] == 1
    pci = _ask(nvml, "nvmlDeviceGetPciInfo", handle)
    return NvmlGpu(
        name=nvml.nvmlDeviceGetName(handle),
        uuid=_ask(nvml, "nvmlDeviceGetUUID", handle),
        pci=pci and pci_address(pci.domain, pci.bus, pci.device),
        memory_gib=memory and memory.total / GIB,
        capability=_ask(nvml, "nvmlDeviceGetCudaComputeCapability", handle),
        state=_state(nvml, handle, memory),
        own_gib=_own_memory(nvml, handle, pid),
        processes=tuple(_processes(nvml, handle, "Compute")),
        mig_on=mig_on,
        slices=tuple(_slices(nvml, handle, pid)) if mig_on else (),
    )


def _slices(nvml: Any, parent: Any, pid: int) -> Iterator[NvmlGpu]:
    for index in range(_ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", parent) or 0):
        handle = _ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", parent, index)
        if handle is None:  # the numbers of slices have gaps
            continue
        memory = _memory(nvml, handle)
        yield NvmlGpu(
            name=_ask(nvml, "nvmlDeviceGetName", handle) or "",
            uuid=_ask(nvml, "nvmlDeviceGetUUID", handle),
            memory_gib=memory and memory.total / GIB,
            state=GpuState(memory_used_gib=memory and memory.used / GIB),
            own_gib=_own_memory(nvml, handle, pid),
        )


def _memory(nvml: Any, handle: Any) -> Any:
    """Query memory, by the version that does not count the driver's reserve as used."""
    version = getattr(nvml, "nvmlMemory_v2", None)
    answer = version and _ask(nvml, "nvmlDeviceGetMemoryInfo", handle, version)
    return answer or _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)


def _own_memory(nvml: Any, handle: Any, pid: int) -> float | None:
    """Query the memory of process `pid` on the GPU."""
    found = (
        gib
        for kind in ("Compute", "Graphics")
        for process, gib in _processes(nvml, handle, kind)
        if process == pid and gib is not None
    )
    return next(found, None)


def _processes(nvml: Any, handle: Any, kind: str) -> Iterator[tuple[int, float | None]]:
    for process in _ask(nvml, f"nvmlDeviceGet{kind}RunningProcesses", handle) or ():
        used = process.usedGpuMemory
        yield process.pid, None if used is None else used / GIB


def _state(nvml: Any, handle: Any, memory: Any) -> GpuState:
    def ask(question: str, *arguments: Any) -> Any:
        return _ask(nvml, f"nvmlDeviceGet{question}", handle, *arguments)

    limits = ask("PowerManagementLimitConstraints")
    utilisation = ask("UtilizationRates")
    ecc = ask("EccMode")
    bits = _first(ask, ("CurrentClocksEventReasons", "CurrentClocksThrottleReasons")) or 0
    return GpuState(
        memory_used_gib=memory and memory.used / GIB,
        power_limit_w=_watts(ask("EnforcedPowerLimit") or ask("PowerManagementLimit")),
        power_max_w=_watts(limits and limits[1]),
        power_w=_watts(ask("PowerUsage")),
        temperature_c=_first(ask, ("TemperatureV", "Temperature"), nvml.NVML_TEMPERATURE_GPU),
        clock_sm_mhz=ask("ClockInfo", nvml.NVML_CLOCK_SM),
        clock_sm_max_mhz=ask("MaxClockInfo", nvml.NVML_CLOCK_SM),
        clock_memory_mhz=ask("ClockInfo", nvml.NVML_CLOCK_MEM),
        throttle_reasons=tuple(name for bit, name in _THROTTLE_REASONS.items() if bits & bit),
        utilisation_percent=utilisation and utilisation.gpu,
        ecc=None if ecc is None else ecc[0] == 1,
        pcie=PcieLink(
            generation=ask("CurrPcieLinkGeneration"),
            width=ask("CurrPcieLinkWidth"),
            max_generation=ask("MaxPcieLinkGeneration"),
            max_width=ask("MaxPcieLinkWidth"),
        ),
    )


def _first(ask: Callable[..., Any], questions: tuple[str, ...], *arguments: Any) -> Any:
    """Return the first answer to queries with the same meaning, which newer drivers rename."""
    answers = (ask(question, *arguments) for question in questions)
    return next((answer for answer in answers if answer is not None), None)


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000
