"""CUDA_VISIBLE_DEVICES as CUDA reads it: from the left up to the first entry that is wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

VARIABLE = "CUDA_VISIBLE_DEVICES"

_INDEX = re.compile(r"\+?([0-9]+)")  # CUDA stops at the first other character: 1gpu is 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Visibility:
    """Which GPUs the variable leaves visible."""

    value: str | None
    """The variable as it is set, or None."""
    chosen: tuple[int | str, ...] | None
    """The indices or UUIDs that count, in order; None is every GPU."""
    problem: str | None = None
    """What makes CUDA ignore an entry and those after it, or all of them."""

    @property
    def hides_all(self) -> bool:
        """Whether no GPU is left."""
        return self.chosen == ()


class _Malformed(Exception):
    """An entry that ends the list."""


def resolve(value: str | None, uuids: Sequence[Sequence[str]] | None = None) -> Visibility:
    """Read the variable's `value` against the GPUs that the driver has.

    `uuids` holds for each GPU its own UUID and those of its MIG slices; None means that nobody
    knows them, and then every well-formed entry counts.
    """
    if value is None:
        return Visibility(value=None, chosen=None)
    chosen: list[int | str] = []
    entries = [entry.strip() for entry in value.split(",")]
    for position, entry in enumerate(entries):
        if _ends_list(entry, last=position == len(entries) - 1):
            break
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


def _ends_list(entry: str, last: bool) -> bool:
    """Whether the entry is a deliberate end: a negative number, nothing, or NoDevFiles."""
    return entry.startswith("-") or entry == "NoDevFiles" or (entry == "" and last)


def _kind(device: int | str) -> str:
    """GPUs by index, GPUs by UUID or slices by UUID: CUDA takes one kind at a time."""
    return "index" if isinstance(device, int) else device[:3]


def _read(entry: str, uuids: Sequence[Sequence[str]] | None) -> int | str:
    """The index that an entry gives, or the full UUID that its beginning stands for."""
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
