"""What the control groups of this process allow, which in a container is less than the host has.

A process is in one group per hierarchy, and every group above it may set a limit of its own, so
each is read from the process's group up to the mount point and the smallest wins. Version 2 has
one hierarchy for everything, version 1 one per controller, and a hybrid machine has both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

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
