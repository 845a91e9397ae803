"""The machine around the GPUs: processor, memory, shared memory, disk and the PCI bus."""

from __future__ import annotations

import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from trainfit.errors import BadInput
from trainfit.hardware.cgroup import Limits, read_limits
from trainfit.hardware.cpu import allowed_by_affinity, probe_cpu, read_cpuinfo, sysctl
from trainfit.records import Cpu

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """What this process may use of the machine, apart from its GPUs."""

    cpu: Cpu
    affinity: int
    """Cores that affinity alone would allow: fewer in `cpu` means that a cgroup sets a quota."""
    memory_gib: float
    memory_available_gib: float
    shm_gib: float | None
    disk_free_gib: float
    nvidia_devices: int
    """NVIDIA display and compute devices on the PCI bus, with or without a driver."""
    platform: str
    python: str


def probe_host(folder: Path, root: Path = Path("/")) -> Host:
    """The machine, from the files below `root` and psutil; `folder` is on the disk meant."""
    import psutil

    limits = read_limits(root)
    affinity = allowed_by_affinity()
    system = psutil.virtual_memory()
    total, available = memory_allowed(limits, system.total, system.available)
    return Host(
        cpu=probe_cpu(
            read_cpuinfo(root),
            affinity=affinity,
            host_cores=psutil.cpu_count() or affinity,
            quota=limits.cores,
            sysctl=sysctl,
        ),
        affinity=affinity,
        memory_gib=total / GIB,
        memory_available_gib=available / GIB,
        shm_gib=shared_memory(root),
        disk_free_gib=free_disk(folder),
        nvidia_devices=nvidia_on_pci(root),
        platform=platform.platform(),
        python=platform.python_version(),
    )


def memory_allowed(limits: Limits, total: int, available: int) -> tuple[int, int]:
    """The memory this process may use and what of it is free, given the host's own figures."""
    limit = total if limits.memory_bytes is None else limits.memory_bytes
    left = available if limits.memory_left_bytes is None else limits.memory_left_bytes
    return min(total, limit), min(available, left)


def check_room(needed: int, what: str) -> None:
    """Raise BadInput where `needed` bytes are more than this machine has, before they are asked."""
    import psutil

    system = psutil.virtual_memory()
    total, _ = memory_allowed(read_limits(), system.total, system.available)
    if needed > total:
        raise BadInput(
            f"the weights of {what} take {needed / GIB:,.1f} GiB of the {total / GIB:.1f} GiB here",
            "choose a smaller model",
        )


def shared_memory(root: Path = Path("/")) -> float | None:
    """The size of /dev/shm, which data-loader workers pass batches through; None without one."""
    try:
        return shutil.disk_usage(root / "dev/shm").total / GIB
    except OSError:
        return None


def free_disk(folder: Path) -> float:
    """The free disk where `folder` is, or where it would be made."""
    try:
        return shutil.disk_usage(folder).free / GIB
    except OSError:
        parent = folder.absolute().parent
        if parent == folder:
            raise
        return free_disk(parent)


def nvidia_on_pci(root: Path = Path("/")) -> int:
    """How many NVIDIA GPUs the kernel sees on the PCI bus, whether or not a driver runs them."""
    found = 0
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = ((device / name).read_text() for name in ("vendor", "class"))
        except OSError:  # the device went away, or a sandbox shows the name alone
            continue
        found += vendor.strip() == "0x10de" and kind.startswith("0x03")
    return found
