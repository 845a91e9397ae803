"""GPUs and build as torch describes them, and the tools of torch.compile."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trainfit.core.errors import reason
from trainfit.core.records import CompileSupport, TorchBuild
from trainfit.hardware.host import Sysctl
from trainfit.hardware.nvml import pci_address


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchDevice:
    """A device that torch can use."""

    index: int
    name: str
    vendor: Literal["nvidia", "amd", "apple"]
    capability: str
    memory_bytes: int | None
    """None where the GPU shares the host's memory and no bound is known."""
    sm_count: int | None = None
    uuid: str | None = None
    pci: str | None = None
    has_context: bool | None = None
    """True if this process already has a context there; None when torch cannot tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchReport:
    """Build and devices of torch, and the errors met."""

    build: TorchBuild | None = None
    devices: tuple[TorchDevice, ...] = ()
    architectures: tuple[str, ...] = ()
    """Architectures that a CUDA build has kernels for, such as sm_90; empty: unknown."""
    error: str | None = None


def load_torch() -> Any:
    import torch

    return torch


def probe_torch(load: Callable[[], Any], sysctl: Sysctl) -> TorchReport:
    """Probe the torch that `load` imports; `sysctl` names the chip of an Apple machine."""
    try:
        torch = load()
    except (ImportError, OSError, RuntimeError) as error:
        return TorchReport(error=reason(error))
    report = TorchReport(build=_build(torch))
    match report.build:
        case TorchBuild(backend="cuda"):
            return _cuda_report(torch, report, "nvidia")
        case TorchBuild(backend="rocm"):
            return _cuda_report(torch, report, "amd")
        case TorchBuild(backend="mps"):
            return replace(report, devices=tuple(_apple(torch, sysctl)))
    return report


def _build(torch: Any) -> TorchBuild:
    backend: Literal["cpu", "cuda", "rocm", "mps"] = "cpu"
    if torch.version.hip:
        backend = "rocm"
    elif torch.version.cuda:
        backend = "cuda"
    elif torch.backends.mps.is_built():
        backend = "mps"
    return TorchBuild(
        version=str(torch.__version__),
        backend=backend,
        cuda=torch.version.cuda if backend == "cuda" else None,
        cudnn=_cudnn(torch) if backend == "cuda" else None,
        hip=torch.version.hip or None,
    )


def _cudnn(torch: Any) -> str | None:
    """Format the version: 91002 is 9.10.2, and 8902 was 8.9.2."""
    try:
        number = torch.backends.cudnn.version()
    except RuntimeError:  # cuDNN and torch do not match
        return None
    if number is None:
        return None
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _cuda_report(torch: Any, report: TorchReport, vendor: Literal["nvidia", "amd"]) -> TorchReport:
    """Probe the devices of torch.cuda, which on a ROCm build are AMD's."""
    errors: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        # torch warns of a broken driver and returns no device: the warning is the only reason.
        warnings.simplefilter("always")
        devices = tuple(_cuda_devices(torch, vendor, errors))
    if not devices and not errors:
        errors += [reason(Warning(warning.message)) for warning in caught[:1]]
    return replace(
        report,
        devices=devices,
        architectures=tuple(torch.cuda.get_arch_list()) if vendor == "nvidia" else (),
        error="; ".join(errors) or None,
    )


def _cuda_devices(
    torch: Any, vendor: Literal["nvidia", "amd"], errors: list[str]
) -> Iterator[TorchDevice]:
    """Yield each device that answers; failures of the others go to `errors`."""
    # torch has its own error for failures while CUDA starts.
    deferred = getattr(torch.cuda, "DeferredCudaCallError", RuntimeError)
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    except (RuntimeError, AssertionError, deferred) as error:
        errors.append(reason(error))
        return
    for index in range(count):
        try:
            yield _cuda_device(torch, index, vendor)
        except (RuntimeError, AssertionError, deferred) as error:
            errors.append(f"GPU {index}: {reason(error)}")


def _cuda_device(torch: Any, index: int, vendor: Literal["nvidia", "amd"]) -> TorchDevice:
    has_context = _has_context(torch, index)  # asked before anything else can make one
    found = torch.cuda.get_device_properties(index)
    uuid = getattr(found, "uuid", None)
    return TorchDevice(
        index=index,
        name=found.name,
        vendor=vendor,
        capability=(
            f"{found.major}.{found.minor}"
            if vendor == "nvidia"
            else found.gcnArchName.split(":")[0]
        ),
        memory_bytes=found.total_memory,
        sm_count=found.multi_processor_count,
        uuid=None if uuid is None else str(uuid),
        pci=_pci(found),
        has_context=has_context,
    )


def _pci(found: Any) -> str | None:
    """PCI address, which torch has since 2.8."""
    if not hasattr(found, "pci_bus_id"):
        return None
    return pci_address(found.pci_domain_id, found.pci_bus_id, found.pci_device_id)


def _has_context(torch: Any, index: int) -> bool | None:
    """Tell if this process has a context on the GPU; torch has no public function for it."""
    ask = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    try:
        return None if ask is None else bool(ask(index))
    except RuntimeError:
        return None


def _apple(torch: Any, sysctl: Sysctl) -> Iterator[TorchDevice]:
    if not torch.backends.mps.is_available():
        return
    bound = getattr(torch.mps, "recommended_max_memory", None)
    yield TorchDevice(
        index=0,
        name=sysctl("machdep.cpu.brand_string") or "Apple GPU",
        vendor="apple",
        capability="mps",
        memory_bytes=bound() if bound else None,
    )


_COMPILERS = ("cc", "gcc", "g++", "clang", "cl")


def probe_compile() -> CompileSupport:
    """Probe the tools that torch.compile needs."""
    return CompileSupport(
        c_compiler=find_compiler(os.environ, shutil.which),
        python_headers=has_headers(Path(sysconfig.get_path("include"))),
        triton=triton_version(),
    )


def find_compiler(environment: Mapping[str, str], which: Callable[[str], str | None]) -> str | None:
    """Find the C compiler that a build would use.

    CC and CXX decide where they are set, even if they name a missing one: the compilation would
    then fail, whatever other compilers exist.
    """
    for variable in ("CC", "CXX"):
        if words := _words(environment.get(variable, "")):
            return which(words[0])
    return next((path for name in _COMPILERS if (path := which(name))), None)


def has_headers(include: Path) -> bool:
    """Tell if Python.h, which compiled code includes, is in the folder."""
    return (include / "Python.h").is_file()


def triton_version(
    find: Callable[[str], object | None] = importlib.util.find_spec,
    version: Callable[[str], str] = importlib.metadata.version,
    providers: Callable[[], Mapping[str, Sequence[str]]] = (
        importlib.metadata.packages_distributions
    ),
) -> str | None:
    """Read Triton's version without importing it; None where it is not installed."""
    if find("triton") is None:
        return None
    try:
        return version("triton")
    except importlib.metadata.PackageNotFoundError:  # other names on ROCm and Windows
        packages = providers().get("triton", ())
        return version(packages[0]) if packages else None


def _words(command: str) -> list[str]:
    """Split a command as a shell would; with an unbalanced quote it is one word."""
    try:
        return shlex.split(command)
    except ValueError:
        return [command]
