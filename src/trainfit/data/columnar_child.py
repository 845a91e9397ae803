"""Rows of a Parquet file or of Arrow streams, read in a process that may die of it.

Run as a script: `python -P columnar_child.py MEMORY BATCH`, with a request in JSON on its input:
{"format": "parquet" or "arrow", "files": [...], "columns": [...]}. It answers with lines of JSON:
first {"columns": {name: type}, "twice": [name]}, then {"rows": [[value of each column]]} for each
batch and {"end": true}, or {"damaged": true} where a file cannot be read. Damaged bytes may crash
the library that reads them, or make it ask for any amount of memory; so nothing of trainfit is
imported here and nothing of the library's own messages is passed on, as they may quote the data.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROWS_PER_BYTE = 1000
"""More than that, above a million, no one writes: a small file that would never end."""


def main() -> None:
    """Answer one request."""
    _limit_memory(int(sys.argv[1]))
    request = json.loads(sys.stdin.readline())
    read = {"parquet": _parquet, "arrow": _arrow}[request["format"]]
    try:
        for number, name in enumerate(request["files"]):
            for answer in read(name, request["columns"], int(sys.argv[2])):
                if number == 0 or "rows" in answer:
                    _say(answer)
    except Exception:  # noqa: BLE001 - whatever it is, the file is not what it should be
        _say({"damaged": True})
        sys.exit(1)
    _say({"end": True})


def _limit_memory(size: int) -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows, or a lower limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer, allow_nan=False) + "\n")
    sys.stdout.flush()


def _parquet(name: str, columns: list[str], size: int) -> Iterator[dict[str, Any]]:
    from pyarrow import parquet

    # Not mapped: a file that shrinks under a mapping kills the process.
    with parquet.ParquetFile(name, memory_map=False, buffer_size=1 << 20) as file:
        yield _columns(file.schema_arrow)
        rows = file.metadata.num_rows
        if not 0 <= rows <= max(1_000_000, _ROWS_PER_BYTE * Path(name).stat().st_size):
            raise ValueError("more rows than it can hold")
        for batch in file.iter_batches(batch_size=size, columns=columns):
            yield from _rows(batch, columns)


def _arrow(name: str, columns: list[str], size: int) -> Iterator[dict[str, Any]]:
    import pyarrow

    with pyarrow.OSFile(name) as source, pyarrow.ipc.open_stream(source) as reader:
        yield _columns(reader.schema)
        for batch in reader:
            chosen = batch.select(columns)
            for start in range(0, chosen.num_rows, size):
                yield from _rows(chosen.slice(start, size), columns)


def _columns(schema: Any) -> dict[str, Any]:
    counted = Counter(schema.names)
    return {
        "columns": {field.name: _kind(field.type) for field in schema},
        "twice": [name for name, count in counted.items() if count > 1],
    }


def _kind(kind: Any) -> str:
    """Type of a column, as far as it matters: "" where its values can be a text or a label."""
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    plain = ("is_string", "is_large_string", "is_string_view", "is_integer", "is_floating")
    if any(getattr(types, name)(kind) for name in (*plain, "is_boolean", "is_null")):
        return ""
    return "nested" if types.is_nested(kind) else "of another type"


def _rows(batch: Any, columns: list[str]) -> Iterator[dict[str, Any]]:
    batch.validate(full=True)
    values = [[_plain(value) for value in batch.column(name).to_pylist()] for name in columns]
    yield {"rows": list(zip(*values, strict=True))}


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    main()
