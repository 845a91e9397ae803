"""Files and columns of a text job, found before anything is read: splits of a folder, `auto`."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

from trainfit.conf import Composed, TextFilesConfig
from trainfit.conf.schema import PairsData, TextFilesData, TokensData
from trainfit.data.columnar import is_stream
from trainfit.data.columns import AUTO, choose_columns, shown_name
from trainfit.data.hub_datasets import fetch_dataset, is_hub_name
from trainfit.data.row_files import Kinds, column_names, read_rows
from trainfit.data.split_files import find_splits
from trainfit.data.text_files import Columns, is_blank

_FIELDS = {"text": "text_column", "label": "label_column"}
_PAIR_FIELDS = {"text": "first_column", "second": "second_column", "label": "label_column"}
_TAG_FIELDS = {"tokens": "words_column", "tags": "label_column"}
"""Fields of a configuration that name the column of each role."""
_FIRST = 1000
"""Rows that tell if a split has labels."""


def settle_sources(composed: Composed) -> Composed:
    """Replace a folder of splits by its files, and `auto` by the names of the columns."""
    config: Any = composed.config
    if not isinstance(config, TextFilesConfig) or config.data.train is None:
        return composed
    data, notes = _settled(config.data, folds=config.cv.folds is not None)
    if data == config.data:
        return composed
    model = config.model
    if isinstance(data, TokensData) and (model.freeze_encoder is True or model.method == "frozen"):
        notes.append("the frozen encoder runs in every epoch: no output per word is kept")
    names = [field.name for field in fields(data)]
    changed = [name for name in names if getattr(data, name) != getattr(config.data, name)]
    settled: Any = replace(config, data=data)
    return replace(
        composed,
        config=settled,
        origins=composed.origins | {f"data.{name}": "found" for name in changed},
        notes=(*composed.notes, *notes),
    )


def columns_of(data: TextFilesData) -> Columns:
    """Columns of texts and labels, by name or by the header of the training file."""
    found = _find_columns(data)
    *texts, label = found.values()
    return Columns(
        text=texts[0],
        second=texts[1] if len(texts) > 1 else None,
        label=label,
        group=data.group_column,
        tagged=isinstance(data, TokensData),
    )


def _find_columns(data: TextFilesData) -> dict[str, str]:
    """Find the column of each role."""
    fields = _fields(data)
    wanted = {role: getattr(data, name) for role, name in fields.items()}
    if AUTO not in wanted.values() or data.train is None:
        return wanted
    keys = {role: f"data.{name}" for role, name in fields.items()}
    there = column_names(Path(data.train), _kinds(data))
    return choose_columns(there, wanted, data.train, keys)


def _fields(data: TextFilesData) -> dict[str, str]:
    if isinstance(data, TokensData):
        return _TAG_FIELDS
    return _PAIR_FIELDS if isinstance(data, PairsData) else _FIELDS


def _kinds(data: TextFilesData) -> Kinds:
    return Columns(tagged=isinstance(data, TokensData)).kinds


def _settled(data: TextFilesData, *, folds: bool) -> tuple[TextFilesData, list[str]]:
    """Return the settled section, and notes on what was found."""
    assert data.train is not None
    notes: list[str] = []
    path = Path(data.train)
    if is_hub_name(data.train):
        most = data.stream_above_gib
        path = fetch_dataset(data.train, None if most is None else most * 2**30)
    splits = find_splits(path, data.split, _kinds(data))
    if is_hub_name(data.train):
        how = "streamed" if is_stream(splits["train"]) else "taken"
        notes.append(f"{data.train} is {how} from the hub")
    found = replace(data, train=str(splits.pop("train")), split=None)
    files: dict[str, Any] = {}
    names = _find_columns(found)
    fields = _fields(data)
    if AUTO in (getattr(data, name) for name in fields.values()):
        *texts, label = map(shown_name, names.values())
        which = "column" if len(texts) == 1 else "columns"
        what, of = ("words", "tags") if "tags" in names else ("texts", "labels")
        notes.append(f"the {what} are the {which} {' and '.join(texts)}, the {of} {label}")
    chosen: dict[str, Any] = {name: names[role] for role, name in fields.items()}
    found = replace(found, **chosen)
    labels = names[list(fields)[-1]]
    for split, path in splits.items():
        if getattr(data, split) is not None:
            continue
        if split == "validation" and folds:
            notes.append(f"{path.name} is left out: cv.folds takes the validation data")
        elif not _has_labels(path, labels, _kinds(data)):
            where = shown_name(labels)
            notes.append(f"{path.name} is left out: it has no labels in the column {where}")
        else:
            notes.append(f"data.{split} is {path.name} of the same folder")
            files[split] = str(path)
    return replace(found, **files), notes


def _has_labels(path: Path, column: str, kinds: Kinds) -> bool:
    """Tell a labelled split from one whose labels are kept secret, as for a competition."""
    if column not in column_names(path, kinds):
        return False
    values = (row[column] for _, row in islice(read_rows(path, [column], kinds), _FIRST))
    each = (one for value in values for one in (value if isinstance(value, list) else [value]))
    return any(not is_blank(one) for one in each)
