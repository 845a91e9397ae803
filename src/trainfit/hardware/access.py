"""Notes on GPUs that cannot be used because of the build, the driver, the environment or MIG."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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


_DRIVER_FIX = (
    "Install the NVIDIA driver until `nvidia-smi` lists the GPU; "
    "start a container with `docker run --gpus all`."
)


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
        text = f"torch cannot be imported ({seen.torch.error})."
        yield Note(code="no_torch", text=text, fix="Install it again: `pip install torch`.")
    elif seen.torch.devices:
        yield from _partly(seen, build)
    elif build.backend == "cuda":
        yield from _cuda_without_gpu(seen, build)
    elif build.backend == "rocm":
        yield _rocm_without_gpu(seen, build)
    else:
        yield _no_gpu_backend(seen, build)
    if build is not None and build.backend == "cuda" and seen.visible.problem:
        yield _malformed(seen.visible)


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
        text = f"torch could not read every GPU ({seen.torch.error})."
        yield Note(code="cuda_error", text=text, fix="Look at the GPU with `nvidia-smi -q`.")
    if build.backend == "cuda" and seen.nvml.error:
        yield _nvml_broken(seen.nvml, seen.nvml.error)
    if build.backend == "cuda" and seen.others:
        yield _hidden(seen) if seen.visible.value is not None else _unused(seen, build)


def _nvml_broken(nvml: NvmlReport, error: str) -> Note:
    fix = "Check that `nvidia-smi` works; after a driver update, restart the machine."
    if not nvml.installed:
        fix = "Install the binding: `pip install nvidia-ml-py`."
    what = "could not read every GPU" if nvml.gpus else "does not answer"
    text = f"NVML {what} ({error}), so power, clocks, links and used memory are not all known."
    return Note(code="nvml_broken", text=text, fix=fix)


def _hidden(seen: Access) -> Note:
    some = f"{len(seen.others)} of {len(seen.nvml.gpus)} GPUs"
    what = some if seen.torch.devices else "every GPU"
    names = f" ({names_of(seen.others)})" if seen.others else ""
    text = f"{VARIABLE}={seen.visible.value!r} hides {what}{names}."
    return Note(code="hidden_gpus", text=text, fix=f"To use every GPU: `unset {VARIABLE}`.")


def _malformed(visible: Visibility) -> Note:
    ignored = "every entry" if visible.hides_all else "it and what follows"
    text = f"{VARIABLE}={visible.value!r} is malformed: {visible.problem}; CUDA ignores {ignored}."
    fix = f"Give indices or UUIDs of `nvidia-smi -L`, such as `export {VARIABLE}=0`."
    return Note(code="visible_devices_malformed", text=text, fix=fix)


def _unused(seen: Access, build: TorchBuild) -> Note:
    text = (
        f"torch {build.version} has {len(seen.torch.devices)} of {len(seen.nvml.gpus)} GPUs; "
        f"the driver also lists {names_of(seen.others)}."
    )
    fix = "Look at its compute mode, MIG mode and errors with `nvidia-smi -q`."
    return Note(code="unused_gpus", text=text, fix=fix)


def _cuda_without_gpu(seen: Access, build: TorchBuild) -> Iterator[Note]:
    """Yield the note for a CUDA build without a device: the variable, MIG or the driver."""
    if seen.visible.hides_all:
        yield _hidden(seen)
    elif not seen.nvml.gpus:
        yield _no_driver(seen, build)
    elif all(gpu.mig_on and not gpu.slices for gpu in seen.nvml.gpus):
        text = f"MIG mode is on, but {names_of(seen.nvml.gpus)} has no slice, so nothing can run."
        fix = "For the whole GPU: `sudo nvidia-smi -mig 0`; for slices: `sudo nvidia-smi mig -cgi`."
        yield Note(code="mig", text=text, fix=fix)
    else:
        yield _cuda_error(seen, build)


def _no_driver(seen: Access, build: TorchBuild) -> Note:
    reasons = [reason for reason in (seen.nvml.error, seen.torch.error) if reason]
    why = f" ({'; '.join(reasons)})" if reasons else ""
    there = f", though {seen.on_pci} NVIDIA GPU(s) are on the PCI bus" if seen.on_pci else ""
    text = f"No NVIDIA driver works here{why}{there}, so torch {build.version} has no GPU."
    return Note(code="no_driver", text=text, fix=_DRIVER_FIX)


def _cuda_error(seen: Access, build: TorchBuild) -> Note:
    """Note for GPUs that the driver has but CUDA does not start on."""
    why = seen.torch.error or "it gives no reason"
    fix = "Run `nvidia-smi -q` for errors of the GPU, and restart the machine if it is lost."
    driver = seen.nvml.driver_cuda
    if driver and build.cuda and _major(driver) < _major(build.cuda):
        why = f"it needs CUDA {build.cuda}, and the driver {seen.nvml.driver} has CUDA {driver}"
        fix = _wheel_fix(seen, build)
    text = f"torch {build.version} cannot use {names_of(seen.nvml.gpus)}: {why.rstrip('.')}."
    return Note(code="cuda_error", text=text, fix=fix)


def _rocm_without_gpu(seen: Access, build: TorchBuild) -> Note:
    why = f" ({seen.torch.error})" if seen.torch.error else ""
    text = f"torch {build.version} is a ROCm build, but finds no AMD GPU{why}."
    fix = (
        "See whether `rocminfo` lists it, whether you are in the groups video and render, "
        "and whether HIP_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES hides it."
    )
    return Note(code="no_driver", text=text, fix=fix)


def _no_gpu_backend(seen: Access, build: TorchBuild) -> Note:
    """Note for a CPU or Apple build where no GPU is usable."""
    if seen.nvml.gpus:
        text = (
            f"torch {build.version} is a CPU build and cannot use {names_of(seen.nvml.gpus)} "
            f"(driver {seen.nvml.driver})."
        )
        return Note(code="cpu_torch", text=text, fix=_wheel_fix(seen, build))
    if seen.on_pci:
        return _no_driver(seen, build)
    text = "There is no GPU here: training runs on the CPU, far slower."
    fix = (
        "Try small models and few steps, or see what a GPU would do with `trainfit check --gpu t4`."
    )
    return Note(code="no_gpu", text=text, fix=fix)


def _wheel_fix(seen: Access, build: TorchBuild) -> str:
    """Word how to install a torch that fits the driver and the oldest GPU."""
    capabilities = [gpu.capability for gpu in seen.nvml.gpus if gpu.capability]
    wheel = cuda_wheel(min(capabilities, default=None), seen.nvml.driver_cuda)
    if wheel is None:
        return "Update the NVIDIA driver to 580 or newer, then install torch for CUDA 13."
    return f"Install the CUDA build: {install_command(build, wheel)}."


def _major(version: str) -> int:
    return parse_capability(version)[0]
