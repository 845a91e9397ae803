"""GPUs and build as torch describes them, and notes on GPUs that it cannot use."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from trainfit.core.errors import reason
from trainfit.core.files import read_own_yaml
from trainfit.core.records import Note, TorchBuild
from trainfit.hardware.host import Sysctl
from trainfit.hardware.nvml import NvmlGpu, NvmlReport, cuda_wheel, parse_capability, pci_address


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
    uuid, pci = getattr(found, "uuid", None), None
    if hasattr(found, "pci_bus_id"):  # since torch 2.8
        pci = pci_address(found.pci_domain_id, found.pci_bus_id, found.pci_device_id)
    nvidia = vendor == "nvidia"
    return TorchDevice(
        index=index,
        name=found.name,
        vendor=vendor,
        capability=f"{found.major}.{found.minor}" if nvidia else found.gcnArchName.split(":")[0],
        memory_bytes=found.total_memory,
        sm_count=found.multi_processor_count,
        uuid=None if uuid is None else str(uuid),
        pci=pci,
        has_context=has_context,
    )


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


VARIABLE = "CUDA_VISIBLE_DEVICES"

_INDEX = re.compile(r"\+?([0-9]+)")  # as CUDA reads it: 1gpu is 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Visibility:
    """GPUs that CUDA_VISIBLE_DEVICES leaves visible."""

    value: str | None
    """Value of the variable, or None where it is not set."""
    chosen: tuple[int | str, ...] | None
    """Indices or UUIDs that count, in order; None: every GPU."""
    problem: str | None = None
    """Fault that makes CUDA ignore an entry and those after it, or all of them."""

    @property
    def hides_all(self) -> bool:
        """True if no GPU is left."""
        return self.chosen == ()


class _Malformed(Exception):
    """An entry that ends the list."""


def resolve(value: str | None, uuids: Sequence[Sequence[str]] | None = None) -> Visibility:
    """Match the variable's `value` with the GPUs that the driver has.

    `uuids` holds for each GPU its own UUID and those of its MIG slices; None: they are unknown,
    and every well-formed entry counts.
    """
    if value is None:
        return Visibility(value=None, chosen=None)
    chosen: list[int | str] = []
    entries = [entry.strip() for entry in value.split(",")]
    for position, entry in enumerate(entries):
        last = position == len(entries) - 1
        if entry.startswith("-") or entry == "NoDevFiles" or (entry == "" and last):
            break  # these end the list
        try:
            device = _read(entry, uuids)
            if chosen and _kind(device) != _kind(chosen[0]):
                raise _Malformed(f"{entry!r} is not of the first entry's kind")
        except _Malformed as error:
            return Visibility(value=value, chosen=tuple(chosen), problem=str(error))
        if device in chosen:
            return Visibility(value=value, chosen=(), problem=f"{entry!r} is there twice")
        chosen.append(device)
    return Visibility(value=value, chosen=tuple(chosen))


def _kind(device: int | str) -> str:
    """Kind of an entry; CUDA takes only one kind in a list."""
    return "index" if isinstance(device, int) else device[:3]


def _read(entry: str, uuids: Sequence[Sequence[str]] | None) -> int | str:
    """Read an entry: an index, or the full UUID for the beginning of one."""
    if entry.startswith(("GPU-", "MIG-")):
        return _by_uuid(entry, uuids)
    number = _INDEX.match(entry)
    if number is None:
        raise _Malformed(f"{entry!r} is neither an index nor a UUID")
    index = int(number.group(1))
    if uuids is not None and index >= len(uuids):
        raise _Malformed(f"there is no GPU {index} among {len(uuids)}")
    return index


def _by_uuid(entry: str, uuids: Sequence[Sequence[str]] | None) -> str:
    if uuids is None or entry.startswith("MIG-GPU-"):  # the older form of a slice's name
        return entry
    fitting = [uuid for ids in uuids for uuid in ids if uuid.startswith(entry)]
    if len(fitting) != 1:
        raise _Malformed(f"{entry!r} begins {len(fitting) or 'no'} UUIDs")
    return fitting[0]


@cache
def _notes() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = read_own_yaml(Path(__file__).with_name("notes.yaml"))
    return found


def note(name: str, **facts: Any) -> Note:
    """Make a note of notes.yaml with these facts in its words."""
    row = _notes()[name]
    text, fix = (row[part].format(**facts) for part in ("text", "fix"))
    return Note(code=row.get("code", name), text=text, fix=fix)


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """Reports of the probes on the path from torch to the GPUs."""

    torch: TorchReport
    nvml: NvmlReport
    visible: Visibility
    others: tuple[NvmlGpu, ...]
    """GPUs that the driver lists and torch does not."""
    on_pci: int


def access_notes(seen: Access) -> Iterator[Note]:
    """Yield a note on each obstacle between torch and a GPU."""
    build = seen.torch.build
    if build is None:
        yield note("no_torch", seen=seen)
    elif seen.torch.devices:
        yield from _partly(seen, build)
    elif build.backend == "cuda":
        yield _cuda_without_gpu(seen, build)
    elif build.backend == "rocm":
        why = f" ({seen.torch.error})" if seen.torch.error else ""
        yield note("no_amd_gpu", build=build, why=why)
    elif seen.nvml.gpus:
        fix = _wheel_fix(seen, build)
        yield note("cpu_torch", build=build, names=names_of(seen.nvml.gpus), seen=seen, fix=fix)
    else:
        yield _no_driver(seen, build) if seen.on_pci else note("no_gpu")
    if build is not None and build.backend == "cuda" and seen.visible.problem:
        ignored = "every entry" if seen.visible.hides_all else "it and what follows"
        yield note("visible_devices_malformed", visible=seen.visible, ignored=ignored)


def names_of(gpus: Sequence[NvmlGpu]) -> str:
    """Join the names of GPUs for a sentence."""
    return ", ".join(gpu.name for gpu in gpus)


def install_command(build: TorchBuild, wheel: str) -> str:
    """Return the command that installs the same torch for another CUDA."""
    version = build.version.split("+")[0]
    index = f"https://download.pytorch.org/whl/{wheel}"
    return f"`pip install torch=={version}+{wheel} --index-url {index}`"


def _partly(seen: Access, build: TorchBuild) -> Iterator[Note]:
    """Yield notes for a torch that has some GPU but cannot reach everything."""
    if seen.torch.error:
        yield note("unread_gpus", seen=seen)
    if build.backend == "cuda" and seen.nvml.error:
        what = "could not read every GPU" if seen.nvml.gpus else "does not answer"
        yield note("nvml_broken" if seen.nvml.installed else "nvml_missing", seen=seen, what=what)
    if build.backend == "cuda" and seen.others and seen.visible.value is not None:
        yield _hidden(seen)
    elif build.backend == "cuda" and seen.others:
        counts = {"used": len(seen.torch.devices), "there": len(seen.nvml.gpus)}
        yield note("unused_gpus", build=build, names=names_of(seen.others), **counts)


def _hidden(seen: Access) -> Note:
    some = f"{len(seen.others)} of {len(seen.nvml.gpus)} GPUs"
    names = f" ({names_of(seen.others)})" if seen.others else ""
    what = some if seen.torch.devices else "every GPU"
    return note("hidden_gpus", seen=seen, what=what, names=names)


def _cuda_without_gpu(seen: Access, build: TorchBuild) -> Note:
    """Note for a CUDA build without a device: the variable, MIG or the driver."""
    if seen.visible.hides_all:
        return _hidden(seen)
    if not seen.nvml.gpus:
        return _no_driver(seen, build)
    names = names_of(seen.nvml.gpus)
    if all(gpu.mig_on and not gpu.slices for gpu in seen.nvml.gpus):
        return note("mig_without_slice", names=names)
    why = seen.torch.error or "it gives no reason"
    fix = "Run `nvidia-smi -q` for errors of the GPU, and restart the machine if it is lost."
    driver = seen.nvml.driver_cuda
    if driver and build.cuda and parse_capability(driver)[0] < parse_capability(build.cuda)[0]:
        why = f"it needs CUDA {build.cuda}, and the driver {seen.nvml.driver} has CUDA {driver}"
        fix = _wheel_fix(seen, build)
    return note("cuda_error", build=build, names=names, why=why.rstrip("."), fix=fix)


def _no_driver(seen: Access, build: TorchBuild) -> Note:
    reasons = [reason for reason in (seen.nvml.error, seen.torch.error) if reason]
    why = f" ({'; '.join(reasons)})" if reasons else ""
    there = f", though {seen.on_pci} NVIDIA GPU(s) are on the PCI bus" if seen.on_pci else ""
    return note("no_driver", why=why, there=there, build=build)


def _wheel_fix(seen: Access, build: TorchBuild) -> str:
    """Word how to install a torch that fits the driver and the oldest GPU."""
    capabilities = [gpu.capability for gpu in seen.nvml.gpus if gpu.capability]
    wheel = cuda_wheel(min(capabilities, default=None), seen.nvml.driver_cuda)
    if wheel is None:
        return "Update the NVIDIA driver to 580 or newer, then install torch for CUDA 13."
    return f"Install the CUDA build: {install_command(build, wheel)}."
