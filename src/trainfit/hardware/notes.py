"""What a person should know about the GPUs and the machine: one sentence each, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainfit.hardware.access import install_command
from trainfit.hardware.capability import cuda_wheel, has_kernels, parse_capability
from trainfit.hardware.host import Host
from trainfit.records import Gpu, Note, TorchBuild

SMALL_SHM_GIB = 1.0
"""Docker gives 64 MiB, and one worker's batches already fill that."""

MEMORY_IN_USE = 0.05
"""The share of a GPU that a desktop or another context may hold without being worth a note."""

_POWER_BRAKE = "hw_power_brake_slowdown"
_SLOWED = ("hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", _POWER_BRAKE)
"""The reasons that something is wrong for; a power cap or set clocks are somebody's choice."""


def gpu_notes(
    gpus: Sequence[Gpu], build: TorchBuild | None, architectures: Sequence[str] = ()
) -> Iterator[Note]:
    """Notes on the kinds of GPU here, then on the state of each."""
    if len({(gpu.name, gpu.mig) for gpu in gpus}) > 1:
        yield _mixed(gpus)
    first_of_kind = {gpu.name: gpu for gpu in reversed(gpus)}
    for gpu in sorted(first_of_kind.values(), key=lambda gpu: gpu.index):
        yield from _kind_notes(gpu, build, architectures)
    for gpu in gpus:
        yield from _state_notes(gpu)


def host_notes(host: Host) -> Iterator[Note]:
    """Notes on what a container or a scheduler keeps from this process."""
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
            fix="Add a row with its source to catalogue/gpus.csv.",
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
    """A link narrower than it could be. An idle link also lowers its generation: no note."""
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
