"""Checks of the machine: GPUs, driver, torch, compiler, memory, disk, limits, environment.

Each function looks for the fault of signs.yaml that has its name; its docstring stands in
docs/troubleshooting.md. A fault without a function is one that hardware detection notes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from statistics import mean

from trainfit.doctor.finding import (
    BUSY,
    IDLE,
    Check,
    Finding,
    MachineFacts,
    Seen,
    checks,
    tables,
    worst_first,
)
from trainfit.hardware.detection import MEMORY_IN_USE
from trainfit.hardware.nvml import parse_capability

FEW_FILES = 1024
FULL_SHM_GIB = 0.25
LITTLE_MEMORY_GIB = 2.0
FULL_DISK_GIB = 5.0
"""GiB of a checkpoint of a small model with its optimizer; a billion weights take 12 GB."""
FULL_TEMPORARY_GIB = 0.5
SLOW_READ_MBS, SLOW_WRITE_MBS = 50.0, 20.0
"""MB/s of a slow network mount; any disk of the last ten years is faster."""
_ENTRY = re.compile(r"\s*[a-z0-9_]+\s*:\s*(\[[^\]]*\]|[^,\[\]]+)\s*")
_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_SMALLEST_SPLIT = 20
"""MiB that torch takes at the least."""


def _noted(code: str, facts: MachineFacts, more: tuple[str, ...] = ()) -> Iterator[Seen]:
    """Notes of detection, whose first step is the command for this very machine."""
    for note in facts.profile.notes:
        if note.code == code:
            yield Seen(evidence=note.text, fix=((note.fix,) if note.fix else ()) + more)


def no_driver(facts: MachineFacts) -> Iterator[Seen]:
    """A GPU on the PCI bus or a device file, without a working driver."""
    there = facts.on_pci > 0 or bool(facts.device_nodes)
    notes = [note for note in facts.profile.notes if note.code == "no_driver"]
    for note in notes:
        yield Seen(
            evidence=note.text,
            severity=None if there else "info",
            title=None if there else "There is no GPU here",
        )
    if facts.device_nodes and not (notes or facts.profile.driver or facts.profile.gpus):
        yield Seen(evidence=f"{', '.join(facts.device_nodes)} exist, but no driver answers.")


def no_gpu(facts: MachineFacts) -> Iterator[Seen]:
    """Neither a GPU nor a sign of one."""
    if not facts.device_nodes:
        yield from _noted("no_gpu", facts, _fix("no_gpu")[:1])


def hidden_gpus(facts: MachineFacts) -> Iterator[Seen]:
    """GPUs that the variable hides: some is a choice, all is likely a mistake."""
    for seen in _noted("hidden_gpus", facts):
        some = bool(facts.profile.gpus)
        yield Seen(evidence=seen.evidence, fix=seen.fix, severity="info" if some else None)


def driver_behind(facts: MachineFacts) -> Iterator[Seen]:
    """The CUDA version of the driver against that of torch, within one major version."""
    build, driver = facts.profile.torch, facts.profile.driver_cuda
    if facts.profile.gpus and build and build.cuda and driver:
        needed, has = parse_capability(build.cuda), parse_capability(driver)
        if has[0] == needed[0] and has < needed:
            versions = f"CUDA {driver}, torch {build.version} {build.cuda}"
            yield Seen(evidence=f"The driver has {versions}.")


def nccl_missing(facts: MachineFacts) -> Iterator[Seen]:
    """Several NVIDIA GPUs, and a torch without NCCL."""
    nvidia = [gpu for gpu in facts.profile.gpus if gpu.vendor == "nvidia"]
    if len(nvidia) > 1 and facts.nccl is None:
        yield Seen(evidence=f"{len(nvidia)} GPUs, and torch was built without NCCL.")


def nccl_interface(facts: MachineFacts) -> Iterator[Seen]:
    """The interfaces of this machine; the variable takes prefixes of names, =NAME and ^NAME."""
    value = facts.environment.get("NCCL_SOCKET_IFNAME", "")
    if not value or value.startswith("^"):
        return
    exact, names = value.startswith("="), value.lstrip("=").split(",")
    known = facts.interfaces
    if not any(one == name if exact else one.startswith(name) for one in known for name in names):
        there = ", ".join(known) or "none"
        yield Seen(evidence=f"NCCL_SOCKET_IFNAME={value}, and there are {there}.")


def tf32_forbidden(facts: MachineFacts) -> Iterator[Seen]:
    """NVIDIA_TF32_OVERRIDE=0, which overrides torch's switch, on GPUs that have TF32."""
    forbidden = facts.environment.get("NVIDIA_TF32_OVERRIDE") == "0"
    if forbidden and any(gpu.tf32 for gpu in facts.profile.gpus):
        yield Seen(evidence="NVIDIA_TF32_OVERRIDE=0 on a GPU that has TF32.")


def memory_held(facts: MachineFacts) -> Iterator[Seen]:
    """GPU memory of other processes, by process where the driver tells."""
    named = False
    for gpu in facts.activity:
        if gpu.processes and gpu.used_gib > MEMORY_IN_USE * gpu.memory_gib:
            named = True
            holders = ", ".join(
                f"PID {process.pid} ({process.name or 'not of this container'})"
                + ("" if process.memory_gib is None else f" {process.memory_gib:.1f} GiB")
                for process in gpu.processes
            )
            pids = ",".join(str(process.pid) for process in gpu.processes)
            yield Seen(
                evidence=f"GPU {gpu.index} ({gpu.name}): {gpu.used_gib:.1f} of "
                f"{gpu.memory_gib:.1f} GiB used, by {holders}.",
                fix=tuple(step.replace("-p PID", f"-p {pids}") for step in _fix("memory_held")),
            )
    for note in facts.profile.notes:
        if note.code == "memory_in_use" and not named:
            yield Seen(evidence=note.text)


def gpu_underused(facts: MachineFacts) -> Iterator[Seen]:
    """Utilisation of the GPUs in use, sampled for a second."""
    for gpu in facts.activity:
        if gpu.utilisation and (share := mean(gpu.utilisation)) < BUSY:
            yield Seen(
                evidence=f"GPU {gpu.index} ({gpu.name}) was busy {share:.0f}% of a second.",
                severity="warning" if share < IDLE else "info",
            )


def gpu_memory_unused(facts: MachineFacts) -> Iterator[Seen]:
    """GPUs in use with less than 80% of their memory taken."""
    for gpu in facts.activity:
        share = 100 * gpu.used_gib / gpu.memory_gib if gpu.memory_gib else 100.0
        if any(gpu.utilisation) and share < BUSY:
            yield Seen(
                evidence=f"GPU {gpu.index} ({gpu.name}) uses {gpu.used_gib:.1f} of "
                f"{gpu.memory_gib:.1f} GiB ({share:.0f}%).",
                severity="warning" if mean(gpu.utilisation) < BUSY else "info",
            )


def allocator(facts: MachineFacts) -> Iterator[Seen]:
    """Settings that torch would refuse, that contradict each other, or that fragment memory."""
    values = {name: facts.environment[name] for name in _NAMES if facts.environment.get(name)}
    if len(set(values.values())) > 1:
        both = " and ".join(f"{name}={value}" for name, value in values.items())
        yield Seen(
            evidence=f"{both} contradict each other, and the older name wins.",
            fix=(f"`unset {_NAMES[0]}`",),
        )
    for name, value in values.items():
        if problem := _allocator_problem(value):
            yield Seen(evidence=f"{name}={value}: {problem}.")


def _allocator_problem(value: str) -> str:
    entries = re.split(r",(?![^\[]*\])", value)
    if not all(_ENTRY.fullmatch(entry) for entry in entries):
        return "not a list of name:value, so torch stops with an error"
    settings = {name.strip(): text.strip() for name, text in (e.split(":", 1) for e in entries)}
    split = settings.get("max_split_size_mb", "")
    if split.isdigit() and int(split) <= _SMALLEST_SPLIT:
        return f"max_split_size_mb must be over {_SMALLEST_SPLIT}, so torch stops with an error"
    if settings.get("expandable_segments") == "False":
        return "expandable segments are off, which lets memory fragment"
    if settings.get("backend") == "cudaMallocAsync" and "expandable_segments" in settings:
        return "cudaMallocAsync ignores expandable_segments"
    return ""


def compile_support(facts: MachineFacts) -> Iterator[Seen]:
    """A C compiler, Python's headers and, for a GPU, Triton."""
    gpu = any(gpu.vendor in ("nvidia", "amd") for gpu in facts.profile.gpus)
    if missing := facts.profile.compile.missing(gpu=gpu):
        yield Seen(evidence=f"Missing: {', '.join(missing)}.")


def shm_full(facts: MachineFacts) -> Iterator[Seen]:
    """Free space in /dev/shm; a small /dev/shm is another finding."""
    free, size = facts.shm_free_gib, facts.profile.shm_gib
    if free is not None and size is not None and free < min(FULL_SHM_GIB, size / 4):
        yield Seen(evidence=f"{free:.2f} GiB of {size:.2f} GiB are free.")


def file_limit(facts: MachineFacts) -> Iterator[Seen]:
    """The soft limit of open files of this process."""
    if facts.open_files is not None and facts.open_files < FEW_FILES:
        yield Seen(evidence=f"This process may open {facts.open_files} files.")


def disk_space(facts: MachineFacts) -> Iterator[Seen]:
    """Free space in this folder and for temporary files."""
    free, temporary = facts.profile.disk_free_gib, facts.temporary_free_gib
    if free < FULL_DISK_GIB:
        evidence = f"{free:.1f} GiB are free in this folder."
        yield Seen(evidence=evidence, severity="error" if free < FULL_DISK_GIB / 10 else None)
    elif temporary is not None and temporary < FULL_TEMPORARY_GIB:
        yield Seen(
            evidence=f"{temporary:.2f} GiB are free for temporary files, where compiled code goes.",
            fix=("`export TMPDIR=/path/with/space`",),
        )


def disk_unwritable(facts: MachineFacts) -> Iterator[Seen]:
    """A temporary file that could not be written here."""
    if facts.disk is None:
        yield Seen(evidence="A temporary file could not be written here.")


def disk_slow(facts: MachineFacts) -> Iterator[Seen]:
    """The fastest piece of 32 MiB, written and read back without the page cache."""
    rates = facts.disk
    if rates is not None and (rates.read < SLOW_READ_MBS or rates.write < SLOW_WRITE_MBS):
        yield Seen(evidence=f"It wrote {rates.write:.0f} MB/s and read {rates.read:.0f} MB/s.")


def few_cores(facts: MachineFacts) -> Iterator[Seen]:
    """Fewer than three usable cores per GPU."""
    gpus = [gpu for gpu in facts.profile.gpus if gpu.vendor != "apple"]
    cores = facts.profile.cpu.cores
    if gpus and cores < 3 * len(gpus):
        yield Seen(evidence=f"{cores} usable cores for {len(gpus)} GPU(s).")


def threads(facts: MachineFacts) -> Iterator[Seen]:
    """The number of threads that the environment sets for every process."""
    value, cores = facts.environment.get("OMP_NUM_THREADS", ""), facts.profile.cpu.cores
    if value.isdigit() and int(value) > cores:
        yield Seen(evidence=f"OMP_NUM_THREADS={value} with {cores} usable cores.")


def host_memory(facts: MachineFacts) -> Iterator[Seen]:
    """Available memory within the limit of the cgroup."""
    free, size = facts.profile.memory_available_gib, facts.profile.memory_gib
    if free < min(LITTLE_MEMORY_GIB, size / 4):
        yield Seen(evidence=f"{free:.1f} GiB of {size:.1f} GiB are available.")


def slow_variables(facts: MachineFacts) -> Iterator[Seen]:
    """Switches for debugging that make every run slow."""
    for name, (slow, effect) in tables()["slow_variables"].items():
        if (value := facts.environment.get(name)) == slow:
            yield Seen(evidence=f"{name}={value}: {effect}.", fix=(f"`unset {name}`",))


def _fix(id: str) -> tuple[str, ...]:
    return next(check.fault.fix for check in CHECKS if check.fault.id == id)


CHECKS: tuple[Check[MachineFacts], ...] = checks(
    "machine", globals(), otherwise=lambda fault, facts: _noted(fault.id, facts, fault.fix)
)


def examine(facts: MachineFacts) -> tuple[Finding, ...]:
    """Find the faults of the machine, worst first."""
    return worst_first(finding for check in CHECKS for finding in check(facts))
