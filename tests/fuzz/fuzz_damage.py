"""Ways to damage a file that was whole."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz_values import JSON_VALUES


def damage(path: Path, how: str, chosen: random.Random) -> None:
    DAMAGES[how](path, chosen)


def _truncate(path: Path, chosen: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: chosen.choice([0, 1, len(data) // 2, max(0, len(data) - 1)])])


def _flip(path: Path, chosen: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(chosen.choice([1, 1, 8, 200]) if data else 0):
        data[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)
    path.write_bytes(bytes(data))


def _head(path: Path, chosen: random.Random) -> None:
    """Change the first bytes, where formats keep their sizes."""
    data = bytearray(path.read_bytes())
    for at in range(min(len(data), chosen.choice([4, 8, 64]))):
        data[at] = chosen.choice([0, 255, chosen.randrange(256)])
    path.write_bytes(bytes(data))


def _tail(path: Path, chosen: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for at in range(1, 1 + min(len(data), chosen.choice([4, 8, 64, 400]))):
        data[-at] = chosen.choice([0, 255, chosen.randrange(256)])
    path.write_bytes(bytes(data))


def _insert(path: Path, chosen: random.Random) -> None:
    data = path.read_bytes()
    at = chosen.randrange(len(data) + 1)
    path.write_bytes(data[:at] + chosen.randbytes(chosen.choice([1, 16, 1000])) + data[at:])


def _zero(path: Path, chosen: random.Random) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _delete(path: Path, chosen: random.Random) -> None:
    path.unlink()


def _delete_folder(path: Path, chosen: random.Random) -> None:
    shutil.rmtree(path.parent)


def _folder(path: Path, chosen: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _fifo(path: Path, chosen: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _loop(path: Path, chosen: random.Random) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _endless(path: Path, chosen: random.Random) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _json(path: Path, chosen: random.Random) -> None:
    """Change one value of a JSON file, or of a line of one; other files get their bytes flipped."""
    lines = path.read_bytes().split(b"\n") if path.suffix == ".jsonl" else [path.read_bytes()]
    at = chosen.randrange(len(lines))
    try:
        data = json.loads(lines[at])
    except ValueError:
        _flip(path, chosen)
        return
    lines[at] = json.dumps(change(data, chosen)).encode()
    path.write_bytes(b"\n".join(lines))


def change(data: Any, chosen: random.Random) -> Any:
    """Put something else in the place of one value, at any depth."""
    if isinstance(data, dict) and data and chosen.random() < 0.9:
        key = chosen.choice(sorted(data))
        if chosen.random() < 0.15:
            return {k: v for k, v in data.items() if k != key}
        return data | {key: change(data[key], chosen)}
    if isinstance(data, list) and data and chosen.random() < 0.8:
        at = chosen.randrange(len(data))
        return [*data[:at], change(data[at], chosen), *data[at + 1 :]]
    return chosen.choice(JSON_VALUES)


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "truncate": _truncate,
    "flip": _flip,
    "head": _head,
    "tail": _tail,
    "insert": _insert,
    "zero": _zero,
    "delete": _delete,
    "delete_folder": _delete_folder,
    "folder": _folder,
    "fifo": _fifo,
    "loop": _loop,
    "endless": _endless,
    "json": _json,
}
