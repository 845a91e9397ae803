"""The machine around the GPUs: processor, memory, disk, the PCI bus, and compilers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from trainfit.core.errors import BadInput
from trainfit.core.records import CompileSupport, Cpu

_UNLIMITED = 1 << 60
"""Limits from here on mean none: cgroup version 1 writes the largest page-aligned number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of this process by its cgroups; None where no group sets one."""

    cores: int | None = None
    memory_bytes: int | None = None
    memory_left_bytes: int | None = None
    """Unused part of the memory limit, with the file cache that the kernel would free."""


def read_limits(root: Path = Path("/")) -> Limits:
    """Read the limits of this process from /proc and /sys below `root`."""
    cores = [quota for group in _groups(root, "cpu") if (quota := _quota(group)) is not None]
    memory = [room for group in _groups(root, "memory") if (room := _memory(group)) is not None]
    return Limits(
        cores=max(1, math.ceil(min(cores))) if cores else None,
        memory_bytes=min((limit for limit, _ in memory), default=None),
        memory_left_bytes=min((left for _, left in memory), default=None),
    )


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's groups, from its own up to the mount point."""
    memberships = list(_memberships(root))
    for mounted_for, mounted, point in _mounts(root):
        for member_of, path in memberships:
            both_version_2 = not mounted_for and not member_of
            if both_version_2 or controller in mounted_for & member_of:
                below = _below(path, mounted)
                yield from (root / point.lstrip("/") / part for part in (below, *below.parents))


def _memberships(root: Path) -> Iterator[tuple[frozenset[str], str]]:
    """Yield the controllers and the path of each hierarchy; version 2 has no controllers."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        yield frozenset(controllers.split(",")) - {""}, path


def _mounts(root: Path) -> Iterator[tuple[frozenset[str], str, str]]:
    """Yield each mounted hierarchy: controllers (none for version 2), root and mount point."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        place, _, kind = line.partition(" - ")
        mounted, point = place.split()[3:5]
        filesystem, *_, options = kind.split() or [""]
        if filesystem == "cgroup2":
            yield frozenset(), mounted, point
        elif filesystem == "cgroup":
            yield frozenset(options.split(",")), mounted, point


def _below(path: str, mounted: str) -> PurePosixPath:
    """Return the group's path below the mount point, which may show a part of the tree only."""
    try:
        return PurePosixPath(path).relative_to(mounted)
    except ValueError:  # hidden by a namespace: only the top is readable
        return PurePosixPath()


def _quota(group: Path) -> float | None:
    """Read the CPU quota of the group, in cores."""
    words = _text(group / "cpu.max").split()
    if not words:
        words = [_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    numbers = [_number(word) for word in words]
    match numbers:
        case [int(quota), int(period)] if quota > 0 and period > 0:
            return quota / period
    return None


def _memory(group: Path) -> tuple[int, int] | None:
    """Read the memory limit of the group and its unused part, in bytes."""
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
    """Read one line of memory.stat, or 0 where it is missing."""
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return _number(value) or 0
    return 0


def _number(text: str) -> int | None:
    """Read a whole number; None for anything else, as an absent file or the word max."""
    word = text.strip()
    return int(word) if word.lstrip("-").isdecimal() else None


def _text(path: Path) -> str:
    """Read a file; empty where it is absent or unreadable, as many of these are."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""CPU flags (x86) and feature (Arm) for native bfloat16 products."""
_BELOW_BF16 = frozenset(
    {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
)
"""Values of oneDNN's ONEDNN_MAX_CPU_ISA that keep it from native bfloat16 products."""

Sysctl = Callable[[str], str | None]


def probe_cpu(
    cpuinfo: str, *, affinity: int, host_cores: int, quota: int | None, sysctl: Sysctl
) -> Cpu:
    """Describe the processor by the text of /proc/cpuinfo, or by sysctl where it is empty."""
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
    """Count the cores that the scheduler may use for this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def sysctl(name: str) -> str | None:
    """Read a value of the hardware on macOS; None on other systems."""
    if platform.system() != "Darwin" or (program := shutil.which("sysctl")) is None:
        return None
    try:
        answer = subprocess.run([program, "-n", name], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def _first_of_each(cpuinfo: str) -> dict[str, str]:
    """Return the first value of each key, which every core repeats."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    return fields


GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """Resources of the machine without GPUs, as far as this process may use them."""

    cpu: Cpu
    affinity: int
    """Cores that affinity alone allows; fewer in `cpu` mean a cgroup's quota."""
    memory_gib: float
    memory_available_gib: float
    shm_gib: float | None
    disk_free_gib: float
    nvidia_devices: int
    """NVIDIA display and compute devices on the PCI bus, with or without a driver."""
    platform: str
    python: str


def probe_host(folder: Path, root: Path = Path("/")) -> Host:
    """Probe the machine by the files below `root` and psutil; `folder` selects the disk."""
    import psutil

    limits = read_limits(root)
    affinity = allowed_by_affinity()
    system = psutil.virtual_memory()
    total, available = memory_allowed(limits, system.total, system.available)
    return Host(
        cpu=probe_cpu(
            _text(root / "proc/cpuinfo"),
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
    """Return the memory that this process may use and its free part, by the host's figures."""
    limit = total if limits.memory_bytes is None else limits.memory_bytes
    left = available if limits.memory_left_bytes is None else limits.memory_left_bytes
    return min(total, limit), min(available, left)


def memory_here() -> int:
    """Bytes of memory that this process may use."""
    return _memory_now()[0]


def load() -> float:
    """Processes that ran or waited for a core in the last minute; inf where no system tells."""
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return math.inf


def memory_left() -> int:
    """Bytes of memory that this process may still take."""
    return _memory_now()[1]


def _memory_now() -> tuple[int, int]:
    import psutil

    system = psutil.virtual_memory()
    return memory_allowed(read_limits(), system.total, system.available)


def check_room(needed: int, what: str) -> None:
    """Raise BadInput if `needed` bytes are more than this machine's memory."""
    total = memory_here()
    if needed > total:
        raise BadInput(
            f"the weights of {what} take {needed / GIB:,.1f} GiB of the {total / GIB:.1f} GiB here",
            "choose a smaller model",
        )


def shared_memory(root: Path = Path("/")) -> float | None:
    """Size of /dev/shm, through which data-loader workers pass batches; None without one."""
    try:
        return shutil.disk_usage(root / "dev/shm").total / GIB
    except OSError:
        return None


def free_disk(folder: Path) -> float:
    """Free disk space of `folder`, or of its nearest existing parent."""
    try:
        return shutil.disk_usage(folder).free / GIB
    except OSError:
        parent = folder.absolute().parent
        if parent == folder:
            raise
        return free_disk(parent)


def nvidia_on_pci(root: Path = Path("/")) -> int:
    """Count the NVIDIA GPUs on the PCI bus, with or without a driver."""
    found = 0
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = (
                (device / name).read_text(encoding="utf-8") for name in ("vendor", "class")
            )
        except OSError:  # the device went away, or a sandbox shows the name alone
            continue
        found += vendor.strip() == "0x10de" and kind.startswith("0x03")
    return found


# ── tools of torch.compile ───────────────────────────────────────────────────────────────────────


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
