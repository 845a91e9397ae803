"""Parquet files and saved datasets, read in a child process that a damaged file may crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal

from trainfit.core import codec
from trainfit.core.errors import BadInput, reason
from trainfit.core.files import check_regular

Rows = Iterator[tuple[int, dict[str, Any]]]
CHILD = Path(__file__).with_name("reading_child.py")
_BATCH = 1024
_PATIENCE = 120.0
"""Seconds to wait for one batch of rows."""
_LEAST, _MOST = 2 << 30, 16 << 30
"""Bounds in bytes of the child's address space, which is half of the machine's memory."""


def read_parquet(path: Path, names: list[str]) -> Rows:
    """Read the rows of a Parquet file."""
    check_regular(path)
    yield from _read(path, "parquet", [path], names, "Parquet file")


def read_saved_dataset(path: Path, names: list[str]) -> Rows:
    """Read the rows of a folder that datasets' save_to_disk wrote."""
    files = _listed(check_saved_dataset(path))
    yield from _read(path, "arrow", files, names, "saved dataset")


def check_saved_dataset(path: Path) -> Path:
    """Return the folder; raise BadInput where it is no saved dataset of one split."""
    if (path / "dataset_dict.json").is_file():
        raise BadInput(f"{path} holds several splits", "give the folder of one, such as its train")
    if not (path / "state.json").is_file():
        raise BadInput(
            f"no state.json in {path}", "give a folder that datasets' save_to_disk wrote"
        )
    return path


def _listed(path: Path) -> list[Path]:
    """List the Arrow files that state.json names, all within its folder."""
    fix = "save the dataset again"
    try:
        state = codec.read_object(path / "state.json")
        names = [entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"cannot read state.json in {path} ({reason(error)})", fix) from None
    if not names or state.get("_indices_data_files"):
        raise BadInput(f"state.json in {path} does not list the rows in order", fix)
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise BadInput(f"state.json in {path} lists a file outside of the folder", fix)
    return [check_regular(path / name, fix) for name in names]


def _read(
    path: Path,
    form: Literal["parquet", "arrow"],
    files: Sequence[Path],
    names: list[str],
    kind: str,
) -> Rows:
    names_of_files = [str(file.absolute()) for file in files]
    request = {"format": form, "files": names_of_files, "columns": names, "batch": _BATCH}
    child = _start(request)
    assert child.stdout is not None
    damaged = BadInput(f"{path} is damaged, or not a {kind}", "save it again")
    number = 0
    try:
        header = _answer(child, child.stdout)
        if header is None or "columns" not in header:
            raise damaged
        _check_columns(path, header, names)
        while True:
            answer = _answer(child, child.stdout)
            if answer is None or "damaged" in answer:
                raise damaged
            if "end" in answer:
                return
            for values in answer["rows"]:
                number += 1
                yield number, dict(zip(names, values, strict=True))
    finally:
        child.kill()
        child.communicate()


def _start(request: dict[str, Any]) -> subprocess.Popen[str]:
    # -P: beside the script lie modules with the names of libraries.
    command = [sys.executable, "-P", str(CHILD), str(_memory())]
    # The system's allocator reserves no more address space than it uses.
    surroundings = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "2"}
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
        env=surroundings,
    )
    assert child.stdin is not None
    with suppress(BrokenPipeError):  # the child died at once; the missing answer tells
        child.stdin.write(json.dumps(request) + "\n")
        child.stdin.flush()
    return child


def _memory() -> int:
    try:
        half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):  # Windows
        half = _LEAST
    return min(max(half, _LEAST), _MOST)


def _answer(child: subprocess.Popen[str], lines: IO[str]) -> dict[str, Any] | None:
    """Read the next line of the child; None where it died or took too long."""
    timer = threading.Timer(_PATIENCE, child.kill)
    timer.daemon = True
    timer.start()
    try:
        line = lines.readline()
    finally:
        timer.cancel()
    if not line.endswith("\n"):
        return None
    answer: dict[str, Any] = json.loads(line)
    return answer


def _check_columns(path: Path, header: dict[str, Any], names: list[str]) -> None:
    there: dict[str, str] = header["columns"]
    for name in names:
        if name not in there:
            raise BadInput(
                f"{path} has no column {name}", f"name one of its columns: {', '.join(there)}"
            )
        if name in header["twice"]:
            raise BadInput(f"{path} has the column {name} twice", "rename one of them")
        if there[name]:
            raise BadInput(
                f"{path}: column {name} is {there[name]}",
                "use text, whole numbers or true and false",
            )
