"""The machine around the GPUs: processor, memory, shared memory, disk and the PCI bus."""

from __future__ import annotations

import math
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from trainfit.core.errors import BadInput
from trainfit.core.records import Cpu

_UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as the largest page-aligned number: no machine has an exbibyte."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The allowance of this process; None where no group sets one."""

    cores: int | None = None
    memory_bytes: int | None = None
    memory_left_bytes: int | None = None
    """What is left of the allowance: the file cache that the kernel would give back counts."""


def read_limits(root: Path = Path("/")) -> Limits:
    """The limits of this process, read from the /proc and /sys below `root`."""
    cores = [quota for group in _groups(root, "cpu") if (quota := _quota(group)) is not None]
    memory = [room for group in _groups(root, "memory") if (room := _memory(group)) is not None]
    return Limits(
        cores=max(1, math.ceil(min(cores))) if cores else None,
        memory_bytes=min((limit for limit, _ in memory), default=None),
        memory_left_bytes=min((left for _, left in memory), default=None),
    )


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the groups that this process is in, from its own up to the mount point."""
    memberships = list(_memberships(root))
    for mounted_for, mounted, point in _mounts(root):
        for member_of, path in memberships:
            both_version_2 = not mounted_for and not member_of
            if both_version_2 or controller in mounted_for & member_of:
                yield from _upwards(root / point.lstrip("/"), _below(path, mounted))


def _memberships(root: Path) -> Iterator[tuple[frozenset[str], str]]:
    """The controllers and the path of each hierarchy; version 2 names no controllers."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        yield frozenset(controllers.split(",")) - {""}, path


def _mounts(root: Path) -> Iterator[tuple[frozenset[str], str, str]]:
    """Each mounted hierarchy: its controllers (none for version 2), its root and its place."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        place, _, kind = line.partition(" - ")
        mounted, point = place.split()[3:5]
        filesystem, *_, options = kind.split() or [""]
        if filesystem == "cgroup2":
            yield frozenset(), mounted, point
        elif filesystem == "cgroup":
            yield frozenset(options.split(",")), mounted, point


def _below(path: str, mounted: str) -> PurePosixPath:
    """The group's path below the mount point, when the mount shows only a part of the tree."""
    try:
        return PurePosixPath(path).relative_to(mounted)
    except ValueError:  # the namespace hides where the process really is: only the top is readable
        return PurePosixPath()


def _upwards(top: Path, below: PurePosixPath) -> Iterator[Path]:
    """The folder of a group and those above it, ending with the mount point `top`."""
    for part in (below, *below.parents):
        yield top / part


def _quota(group: Path) -> float | None:
    """Cores that the group may keep busy, as a fraction."""
    words = _text(group / "cpu.max").split()
    if not words:
        words = [_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    numbers = [_number(word) for word in words]
    match numbers:
        case [int(quota), int(period)] if quota > 0 and period > 0:
            return quota / period
    return None


def _memory(group: Path) -> tuple[int, int] | None:
    """The memory limit of the group and what is left of it, in bytes."""
    for limit_file, usage_file, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _number(_text(group / limit_file))
        if limit is not None and limit < _UNLIMITED:
            used = _number(_text(group / usage_file)) or 0
            left = limit - used + _statistic(group / "memory.stat", cache)
            return limit, min(limit, max(0, left))
    return None


def _statistic(path: Path, name: str) -> int:
    """One line of memory.stat, or 0 where it is not counted."""
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return _number(value) or 0
    return 0


def _number(text: str) -> int | None:
    """A whole number, or None for what is not one: an absent file, or the word max."""
    word = text.strip()
    return int(word) if word.lstrip("-").isdecimal() else None


def _text(path: Path) -> str:
    """The file's text; empty where it is absent or closed to us, as most of these files may be."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""The x86 flags and the Arm feature of native bfloat16 products."""
_BELOW_BF16 = frozenset(
    {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
)
"""Values of oneDNN's ONEDNN_MAX_CPU_ISA that keep it from native bfloat16 products."""

Sysctl = Callable[[str], str | None]


def probe_cpu(
    cpuinfo: str, *, affinity: int, host_cores: int, quota: int | None, sysctl: Sysctl
) -> Cpu:
    """The processor, from the text of /proc/cpuinfo or, where there is none, from sysctl."""
    fields = _first_of_each(cpuinfo)
    name = fields.get("model name") or sysctl("machdep.cpu.brand_string")
    flags = f"{fields.get('flags', '')} {fields.get('features', '')}".split()
    bf16 = bool(_BF16_FLAGS.intersection(flags)) or sysctl("hw.optional.arm.FEAT_BF16") == "1"
    bf16 = bf16 and os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() not in _BELOW_BF16
    cores = min(affinity, quota or affinity)
    return Cpu(
        name=name or platform.processor() or platform.machine(),
        cores=cores,
        host_cores=max(host_cores, cores),
        native_bf16=bf16,
    )


def allowed_by_affinity() -> int:
    """The cores that the scheduler may put this process on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_cpuinfo(root: Path = Path("/")) -> str:
    """The text of /proc/cpuinfo; empty on a system that has none."""
    try:
        return (root / "proc/cpuinfo").read_text()
    except OSError:
        return ""


def sysctl(name: str) -> str | None:
    """A value that macOS keeps of its hardware; None on other systems."""
    if platform.system() != "Darwin" or (program := shutil.which("sysctl")) is None:
        return None
    try:
        answer = subprocess.run([program, "-n", name], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def _first_of_each(cpuinfo: str) -> dict[str, str]:
    """The first value of each key: the cores of a machine repeat it."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    return fields


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
