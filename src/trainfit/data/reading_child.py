"""Reads tables, from files or the hub, and pickled weights, in a process that may die of it.

Run as a script: `python -P reading_child.py MEMORY`, with a request in JSON on its input:
{"format": "parquet" or "arrow", "files": [...], "columns": [...], "batch": rows},
{"format": "hub", "name", "subset", "split", "revision", "columns", "batch"} or
{"format": "weights", "files": [[source, target], ...]}. It answers with lines of JSON and ends with
{"end": true}. For tables: first {"columns": {name: type}, "twice": [name]}, then {"rows": [[value
of each column]]} for each batch. Weights are written as safetensors. {"damaged": true} means that a
file cannot be read, {"holds": size} that there is too much in a small one, {"global": name} that a
pickle asks for something that is not weights.

Damaged bytes may crash the library that reads them, or make it ask for any amount of memory. So
nothing of trainfit is imported here, and no message of a library is passed on: it may quote data.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROWS_PER_BYTE = 1000
"""Most rows per byte of a file above a million rows; more are a small file that never ends."""
_UNPACKED, _UNPACKED_PER_BYTE = 1 << 29, 100
"""Most bytes of texts and labels in a small file, and per byte of a larger one."""
_SMALL, _WRITTEN_OUT, _AT_ONCE = 32 << 20, 4 << 30, 64 << 20
"""Bytes of a small file; most that it may hold with every repeated value written out, and most of
them at a time."""
_ROOM = 4
"""Most bytes of tensors per byte of a pickled file: tied tensors are written twice."""
_GLOBAL = re.compile(r"GLOBAL ([\w.]{1,80})")


class _TooMuch(Exception):
    """A small file holds more than memory and time allow; says what."""


def main() -> None:
    """Answer one request."""
    _limit_memory(int(sys.argv[1]))
    request = json.loads(sys.stdin.readline())
    try:
        for answer in _weights(request) if request["format"] == "weights" else _tables(request):
            _say(answer)
    except _TooMuch as error:
        _say({"holds": str(error)})
        sys.exit(1)
    except Exception as error:  # noqa: BLE001 - whatever it is, the file is not what it should be
        found = _GLOBAL.search(str(error)) if request["format"] == "weights" else None
        _say({"global": found[1]} if found else {"damaged": True})
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


def _tables(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Columns of the first file, then the rows of all files."""
    if request["format"] == "hub":
        yield from _hub(request)
        return
    read = {"parquet": _parquet, "arrow": _arrow}[request["format"]]
    for number, name in enumerate(request["files"]):
        for answer in read(name, request["columns"], request["batch"]):
            if number == 0 or "rows" in answer:
                yield answer


def _parquet(name: str, columns: list[str], size: int) -> Iterator[dict[str, Any]]:
    from pyarrow import parquet

    # Not mapped: a file that shrinks under a mapping kills the process.
    with parquet.ParquetFile(name, memory_map=False, buffer_size=1 << 20) as file:
        yield _columns(file.schema_arrow)
        names = _class_names(file.schema_arrow)
        rows, stored = file.metadata.num_rows, Path(name).stat().st_size
        if not 0 <= rows <= max(1_000_000, _ROWS_PER_BYTE * stored):
            raise _TooMuch(f"{rows:,} rows")
        _check_size(_unpacked(file.metadata, columns), max(_UNPACKED, _UNPACKED_PER_BYTE * stored))
        if stored < _SMALL:
            size = min(size, _rows_at_once(name, file.metadata, columns))
        for batch in file.iter_batches(batch_size=size, columns=columns):
            yield _rows(batch, columns, names)


def _unpacked(metadata: Any, columns: list[str]) -> int:
    """Bytes of these columns before they were compressed, by the end of the file."""
    groups = (metadata.row_group(at) for at in range(metadata.num_row_groups))
    parts = (group.column(at) for group in groups for at in range(group.num_columns))
    wanted = (part for part in parts if part.path_in_schema.split(".")[0] in columns)
    return sum(part.total_uncompressed_size for part in wanted)


def _check_size(size: int, most: int) -> None:
    if size > most:
        raise _TooMuch(f"{size / 2**30:,.1f} GiB or more")


def _rows_at_once(name: str, metadata: Any, columns: list[str]) -> int:
    """Rows to read at a time, where a file may store a long value once and repeat it."""
    from pyarrow import parquet

    every, total = [metadata.schema.column(at).path for at in range(metadata.num_columns)], 1
    with parquet.ParquetFile(name, buffer_size=1 << 20, read_dictionary=every) as file:
        for batch in file.iter_batches(columns=columns):
            total += sum(map(_written_out, batch.columns))
            _check_size(total, _WRITTEN_OUT)
    return max(1, _AT_ONCE * int(metadata.num_rows) // total)


def _written_out(values: Any) -> int:
    """Bytes of these values, each counted as often as a dictionary is asked for it."""
    from pyarrow import compute, types

    while hasattr(values, "flatten") and not types.is_struct(values.type):  # lists
        values = values.flatten()
    if not types.is_dictionary(values.type):
        return 8 * len(values)
    lengths = compute.binary_length(values.dictionary).take(values.indices)
    return int(compute.sum(lengths).as_py() or 0)


def _arrow(name: str, columns: list[str], size: int) -> Iterator[dict[str, Any]]:
    import pyarrow

    with pyarrow.OSFile(name) as source, pyarrow.ipc.open_stream(source) as reader:
        yield _columns(reader.schema)
        names = _class_names(reader.schema)
        for batch in reader:
            chosen = batch.select(columns)
            for start in range(0, chosen.num_rows, size):
                yield _rows(chosen.slice(start, size), columns, names)


def _hub(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Columns and rows of a split on the hub, as they arrive: nothing is stored."""
    import datasets

    wanted = {key: request[key] for key in ("split", "revision")}
    rows = datasets.load_dataset(request["name"], request["subset"], streaming=True, **wanted)
    features = rows.features
    if features is None:  # a text file, whose first rows tell
        features = datasets.Features.from_arrow_schema(_first(rows).schema)
    yield _columns(features.arrow_schema)
    columns, names = request["columns"], _class_names(features.arrow_schema)
    for table in _tables_of(rows.select_columns(columns), request["batch"]):
        yield _rows(table, columns, names)


def _tables_of(rows: Any, size: int) -> Iterator[Any]:
    return iter(rows.with_format("arrow").iter(batch_size=size))


def _first(rows: Any) -> Any:
    return next(_tables_of(rows, 1))


def _columns(schema: Any) -> dict[str, Any]:
    counted = Counter(schema.names)
    return {
        "columns": {field.name: _kind(field.type) for field in schema},
        "twice": [name for name, count in counted.items() if count > 1],
    }


def _kind(kind: Any) -> str:
    """Type of a column, or "" where its values can be a text or a label."""
    from pyarrow import types

    if any(getattr(types, f"is_{size}list")(kind) for size in ("", "large_", "fixed_size_")):
        kind = kind.value_type
    if types.is_dictionary(kind):
        kind = kind.value_type
    plain = ("is_string", "is_large_string", "is_string_view", "is_integer", "is_floating")
    if any(getattr(types, name)(kind) for name in (*plain, "is_boolean", "is_null")):
        return ""
    return "nested" if types.is_nested(kind) else "of another type"


def _class_names(schema: Any) -> dict[str, list[str]]:
    """Names of the classes that a column numbers, where `datasets` wrote them into the file."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        found = {column: _names(feature) for column, feature in features.items()}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return {}
    return {column: names for column, names in found.items() if names}


def _names(feature: Any) -> list[str]:
    while "feature" in feature:  # of a list
        feature = feature["feature"]
    names = feature["names"] if feature["_type"] == "ClassLabel" else []
    return names if all(isinstance(name, str) for name in names) else []


def _rows(batch: Any, columns: list[str], names: dict[str, list[str]]) -> dict[str, Any]:
    batch.validate(full=True)
    values = [
        [_named(_plain(value), names.get(name)) for value in batch.column(name).to_pylist()]
        for name in columns
    ]
    return {"rows": list(zip(*values, strict=True))}


def _named(value: Any, names: list[str] | None) -> Any:
    """Name of a numbered class; None for -1, which stands for no label."""
    if isinstance(value, list):
        return [_named(one, names) for one in value]
    if names is None or not isinstance(value, int) or not -1 <= value < len(names):
        return value
    return names[value] if value >= 0 else None


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _weights(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for source, target in request["files"]:
        convert(Path(source), Path(target))
    yield from ()


def convert(source: Path, target: Path) -> None:
    """Write pickled weights as safetensors; weights_only=True builds tensors and calls nothing."""
    import torch
    from safetensors.torch import save_file

    mapped = zipfile.is_zipfile(source)
    state = torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    if not isinstance(state, dict) or not state:
        raise ValueError("no state dict")
    # A tensor of a few bytes may claim any shape by strides of 0.
    left = _ROOM * source.stat().st_size
    tensors, seen = {}, set()
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ValueError("no state dict")
        left -= tensor.numel() * tensor.element_size()
        if left < 0:
            raise ValueError("more than the file holds")
        storage = tensor.untyped_storage().data_ptr()
        plain = tensor.detach().contiguous()
        # Tensors that share memory are all written; a tied model ties them again.
        tensors[name] = plain.clone() if storage in seen else plain
        seen.add(storage)
    save_file(tensors, target, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
