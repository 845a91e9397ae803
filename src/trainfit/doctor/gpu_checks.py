"""Checks of the GPUs and what torch brings for them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from statistics import mean

from trainfit.doctor.advice import BUSY, COMPILE, FEWER_PAUSES, IDLE, LOADER, PRECISION, RAISE_BATCH
from trainfit.doctor.facts import Facts, GpuActivity
from trainfit.doctor.finding import Check, Fault, Seen, check
from trainfit.hardware.detection import MEMORY_IN_USE
from trainfit.hardware.nvml import parse_capability


@check(
    Fault(
        id="driver_behind",
        severity="info",
        title="The driver's CUDA is older than torch's",
        why="Within one major version it works, but code that is compiled on the spot may be "
        "refused as “compiled with an unsupported toolchain”.",
        mend=("Update the NVIDIA driver when you can; CUDA 12.1 or newer is a good minimum.",),
    )
)
def driver_behind(facts: Facts) -> Iterator[Seen]:
    """Driver against CUDA build, where both still work together."""
    build, driver = facts.profile.torch, facts.profile.driver_cuda
    if facts.profile.gpus and build and build.cuda and driver:
        needed, has = parse_capability(build.cuda), parse_capability(driver)
        if has[0] == needed[0] and has < needed:
            yield Seen(
                evidence=f"The driver has CUDA {driver}, torch {build.version} {build.cuda}."
            )


@check(
    Fault(
        id="nccl_missing",
        severity="error",
        title="torch has no NCCL",
        why="Several GPUs train together only through it; gloo would go through the CPU.",
        mend=(
            "Install torch's CUDA build for Linux: `pip install torch`.",
            "Until then train on one GPU: `export CUDA_VISIBLE_DEVICES=0`.",
        ),
    )
)
def nccl_missing(facts: Facts) -> Iterator[Seen]:
    """Several NVIDIA GPUs, and a torch without their library."""
    nvidia = [gpu for gpu in facts.profile.gpus if gpu.vendor == "nvidia"]
    if len(nvidia) > 1 and facts.nccl is None:
        yield Seen(evidence=f"{len(nvidia)} GPUs, and torch was built without NCCL.")


@check(
    Fault(
        id="nccl_interface",
        severity="error",
        title="NCCL_SOCKET_IFNAME names no interface of this machine",
        why="Ranks cannot find each other: NCCL ends with an unhandled system error.",
        mend=("`unset NCCL_SOCKET_IFNAME`, or name one that `ip -brief link` lists.",),
    )
)
def nccl_interface(facts: Facts) -> Iterator[Seen]:
    """The variable takes beginnings of names, =NAME for a whole one and ^NAME for not this one."""
    value = facts.environment.get("NCCL_SOCKET_IFNAME", "")
    if not value or value.startswith("^"):
        return
    exact, names = value.startswith("="), value.lstrip("=").split(",")
    known = facts.interfaces
    if not any(one == name if exact else one.startswith(name) for one in known for name in names):
        yield Seen(
            evidence=f"NCCL_SOCKET_IFNAME={value}, and there are {', '.join(known) or 'none'}."
        )


@check(
    Fault(
        id="tf32_forbidden",
        severity="warning",
        title="TF32 is forbidden by the environment",
        why="fp32 matrix products stay off the matrix units, whatever device.tf32 says.",
        mend=("`unset NVIDIA_TF32_OVERRIDE`", "device.tf32=true (or auto)"),
    )
)
def tf32_forbidden(facts: Facts) -> Iterator[Seen]:
    """The variable beats torch's own switch, on GPUs that have TF32."""
    if facts.environment.get("NVIDIA_TF32_OVERRIDE") == "0" and any(
        gpu.tf32 for gpu in facts.profile.gpus
    ):
        yield Seen(evidence="NVIDIA_TF32_OVERRIDE=0 on a GPU that has TF32.")


@check(
    Fault(
        id="memory_held",
        severity="warning",
        title="Other processes hold GPU memory",
        why="A run that was planned for the whole GPU runs out of memory. Nothing is ended by "
        "trainfit: whose processes these are is for you to judge.",
        mend=(
            "`ps -o pid,user,etime,cmd -p PID` says what a process is; end it yourself if it is a "
            "left-over of yours (close other notebooks, too).",
            "Choose another GPU: `export CUDA_VISIBLE_DEVICES=1`.",
            "Plan for what is left: `trainfit plan nli --memory GIB`.",
        ),
    )
)
def memory_held(facts: Facts) -> Iterator[Seen]:
    """By process number where the driver tells, else in all."""
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
                mend=tuple(step.replace("-p PID", f"-p {pids}") for step in memory_held.fault.mend),
            )
    for note in facts.profile.notes:
        if note.code == "memory_in_use" and not named:
            yield Seen(evidence=note.text)


@check(
    Fault(
        id="gpu_underused",
        severity="warning",
        title="A GPU that works is idle much of the time",
        why="Training keeps a GPU 80 to 95% busy; less means that steps are too small or that it "
        "waits for data.",
        mend=(
            RAISE_BATCH,
            LOADER,
            PRECISION,
            COMPILE,
            FEWER_PAUSES,
            "`trainfit check --measure` shows whether the disk is what is slow.",
        ),
    )
)
def gpu_underused(facts: Facts) -> Iterator[Seen]:
    """Sampled for a second, on GPUs that somebody works on."""
    for gpu in facts.activity:
        if gpu.utilisation and (share := mean(gpu.utilisation)) < BUSY:
            yield Seen(
                evidence=f"GPU {gpu.index} ({gpu.name}) was busy {share:.0f}% of a second.",
                severity="warning" if share < IDLE else "info",
            )


@check(
    Fault(
        id="gpu_memory_unused",
        severity="warning",
        title="A GPU that works has memory to spare",
        why="A larger batch would use it, and the GPU better. Where the GPU is busy all the same, "
        "this is only worth knowing.",
        mend=(
            RAISE_BATCH,
            "model.use_gradient_checkpointing=false, where it is on: it saves memory that is free.",
        ),
    )
)
def gpu_memory_unused(facts: Facts) -> Iterator[Seen]:
    """Under 80% of the memory in use while somebody works."""
    for gpu in facts.activity:
        share = 100 * gpu.used_gib / gpu.memory_gib if gpu.memory_gib else 100.0
        if gpu.utilisation and share < BUSY and _works(gpu):
            yield Seen(
                evidence=f"GPU {gpu.index} ({gpu.name}) uses {gpu.used_gib:.1f} of "
                f"{gpu.memory_gib:.1f} GiB ({share:.0f}%).",
                severity="warning" if mean(gpu.utilisation) < BUSY else "info",
            )


def _works(gpu: GpuActivity) -> bool:
    """Whether someone computes, and does not only hold memory."""
    return any(gpu.utilisation)


_ENTRY = re.compile(r"\s*[a-z0-9_]+\s*:\s*(\[[^\]]*\]|[^,\[\]]+)\s*")
_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_SMALLEST_SPLIT = 20
"""MiB; torch refuses less."""


@check(
    Fault(
        id="allocator",
        severity="warning",
        title="The allocator's settings do harm",
        why="They are read once, when CUDA starts: a mistake ends the run or lets memory fragment.",
        mend=("`export PYTORCH_ALLOC_CONF=expandable_segments:True` before Python starts.",),
    )
)
def allocator(facts: Facts) -> Iterator[Seen]:
    """Settings that torch would refuse, that contradict each other, or that fragment memory."""
    values = {name: facts.environment[name] for name in _NAMES if facts.environment.get(name)}
    if len(set(values.values())) > 1:
        both = " and ".join(f"{name}={value}" for name, value in values.items())
        yield Seen(
            evidence=f"{both} contradict each other, and the older name wins.",
            mend=(f"`unset {_NAMES[0]}`",),
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


CHECKS: tuple[Check[Facts], ...] = (
    driver_behind,
    nccl_missing,
    nccl_interface,
    tf32_forbidden,
    memory_held,
    gpu_underused,
    gpu_memory_unused,
    allocator,
)
