"""What detection already notes about a machine, as findings: the note is evidence and mend.

A note knows the command that fits this machine; the steps here are what else there is to try.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from trainfit.doctor.facts import Facts
from trainfit.doctor.finding import Check, Fault, Seen, check

_NOTED = (
    Fault(
        id="no_torch",
        severity="error",
        title="torch cannot be imported",
        why="Nothing can be trained without it.",
        mend=(),
    ),
    Fault(
        id="cpu_torch",
        severity="error",
        title="The torch build cannot use the GPU that is here",
        why="Training runs on the CPU, 50 to 100 times slower, and nothing says so.",
        mend=("`trainfit check` shows whether torch then has the GPU.",),
    ),
    Fault(
        id="cuda_error",
        severity="error",
        title="CUDA does not start on the GPU, or the driver is older than torch's CUDA",
        why="A torch built for a newer CUDA than the driver's has no GPU at all.",
        mend=(
            "Compare `nvidia-smi` (CUDA Version) with "
            '`python -c "import torch; print(torch.version.cuda)"`: '
            "the first must not be the older one.",
            "Update the driver: 525 or newer for CUDA 12, 580 or newer for CUDA 13.",
        ),
    ),
    Fault(
        id="unsupported_architecture",
        severity="error",
        title="torch has no kernels for this GPU",
        why="The first operation ends in “no kernel image is available”.",
        mend=(),
    ),
    Fault(
        id="nvml_broken",
        severity="warning",
        title="The driver's library does not answer",
        why="Memory of others, throttling and links cannot be seen; a mismatch of driver and "
        "library after an update also keeps new processes from the GPU.",
        mend=("After a driver update restart the machine, or reload the kernel module.",),
    ),
    Fault(
        id="visible_devices_malformed",
        severity="warning",
        title="CUDA_VISIBLE_DEVICES is malformed",
        why="CUDA reads it from the left and silently stops at the first wrong entry.",
        mend=(),
    ),
    Fault(
        id="unused_gpus",
        severity="warning",
        title="The driver has GPUs that torch does not have",
        why="A run on several GPUs would get fewer than there are.",
        mend=(),
    ),
    Fault(
        id="mixed_gpus",
        severity="info",
        title="The GPUs differ",
        why="Ranks wait for each other, so the slowest GPU sets the pace.",
        mend=(),
    ),
    Fault(
        id="mig",
        severity="info",
        title="The GPU is divided into MIG slices",
        why="A slice has a part of the memory and the speed, and no published peak.",
        mend=(),
    ),
    Fault(
        id="unknown_gpu",
        severity="info",
        title="The catalogue does not know this GPU",
        why="Without its peak there is no MFU, and presets go by memory alone.",
        mend=(),
    ),
    Fault(
        id="emulated_bf16",
        severity="info",
        title="bfloat16 is emulated on this GPU",
        why="torch says that it is supported, and then it is several times slower than fp16; a run "
        "that asks for it here gets `run_bf16_emulated`.",
        mend=("device.mixed_precision=auto chooses fp16 with loss scaling there.",),
    ),
    Fault(
        id="cpu_limited",
        severity="info",
        title="A container or scheduler allows fewer cores than the host has",
        why="Loaders and threads that go by the host's cores fight for the few allowed.",
        mend=("training.num_workers=auto goes by the cores that are allowed.",),
    ),
    Fault(
        id="small_shm",
        severity="warning",
        title="/dev/shm is small",
        why="Loader workers pass every batch through it, and die of a bus error when it is full.",
        mend=(),
    ),
    Fault(
        id="pcie_narrow",
        severity="warning",
        title="The GPU is linked with fewer PCIe lanes than it has",
        why="Every copy between host and GPU, and between GPUs, is slower in proportion.",
        mend=("training.pin_memory=true makes what is left of the link count.",),
    ),
    Fault(
        id="throttled",
        severity="warning",
        title="The GPU slows itself down",
        why="Heat or power holds its clocks back, and throughput with them.",
        mend=(
            "`nvidia-smi -q -d CLOCK,POWER` shows clocks and power caps; "
            "`sudo nvidia-smi -pl WATTS` sets a cap.",
        ),
    ),
)


def _noted(code: str, more: tuple[str, ...], facts: Facts) -> Iterator[Seen]:
    for note in facts.profile.notes:
        if note.code == code:
            fix = (note.fix,) if note.fix else ()
            yield Seen(evidence=note.text, mend=fix + more)


@check(
    Fault(
        id="no_driver",
        severity="error",
        title="There is a GPU, and no driver that works",
        why="torch cannot use a GPU whose driver is missing, broken or not passed to the "
        "container. Without any GPU this is only worth knowing.",
        mend=(
            "Install the NVIDIA driver until `nvidia-smi` lists the GPU.",
            "In a container: `docker run --gpus all`, with NVIDIA's container toolkit on the host.",
            "“ProcessGroupNCCL is only supported with GPUs, no GPUs found!” goes with it.",
        ),
    )
)
def no_driver(facts: Facts) -> Iterator[Seen]:
    """A GPU on the bus or a device node, but nothing that drives it."""
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


@check(
    Fault(
        id="no_gpu",
        severity="info",
        title="There is no GPU here",
        why="Training on a CPU is 50 to 100 times slower: fine for a test, not for more.",
        mend=(
            "`trainfit plan nli --gpu t4` says what a GPU would do.",
            "Try things out with hardware=cpu.",
        ),
    )
)
def no_gpu(facts: Facts) -> Iterator[Seen]:
    """Neither a GPU nor a sign of one."""
    if not facts.device_nodes:
        yield from _noted("no_gpu", no_gpu.fault.mend[:1], facts)


@check(
    Fault(
        id="hidden_gpus",
        severity="warning",
        title="CUDA_VISIBLE_DEVICES hides GPUs",
        why="A process sees only what the variable lists; hiding every GPU means the CPU.",
        mend=("`unset CUDA_VISIBLE_DEVICES`, or list the GPUs to use.",),
    )
)
def hidden_gpus(facts: Facts) -> Iterator[Seen]:
    """Some GPUs hidden is a choice; all of them is more likely a mistake."""
    for seen in _noted("hidden_gpus", (), facts):
        some = bool(facts.profile.gpus)
        yield Seen(evidence=seen.evidence, mend=seen.mend, severity="info" if some else None)


CHECKS: tuple[Check[Facts], ...] = (
    no_driver,
    no_gpu,
    hidden_gpus,
    *(Check(fault=fault, look=partial(_noted, fault.id, fault.mend)) for fault in _NOTED),
)
