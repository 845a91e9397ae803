"""Notes on GPUs that cannot be used because of the build, the driver, the environment or MIG."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trainfit.core.files import read_own_yaml
from trainfit.core.records import Note, TorchBuild
from trainfit.hardware.nvml import NvmlGpu, NvmlReport, cuda_wheel, parse_capability
from trainfit.hardware.torch_probe import TorchReport

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
