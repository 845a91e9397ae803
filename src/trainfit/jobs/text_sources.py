"""Files and columns of a text job, found before anything is read: splits of a folder, `auto`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from trainfit.conf import Composed, TextclassConfig
from trainfit.conf.schema import TextclassData
from trainfit.data.columns import AUTO, choose_columns, shown_name
from trainfit.data.hub_datasets import fetch_dataset, is_hub_name
from trainfit.data.row_files import column_names
from trainfit.data.split_files import find_splits

KEYS = {"text": "data.text_column", "label": "data.label_column"}


def settle_sources(composed: Composed) -> Composed:
    """Replace a folder of splits by its files, and `auto` by the names of the columns."""
    config = composed.config
    if not isinstance(config, TextclassConfig) or config.data.train is None:
        return composed
    data, notes = _settled(config.data, folds=config.cv.folds is not None)
    if data == config.data:
        return composed
    changed = [name for name in data.__slots__ if getattr(data, name) != getattr(config.data, name)]
    return replace(
        composed,
        config=replace(config, data=data),
        origins=composed.origins | {f"data.{name}": "found" for name in changed},
        notes=(*composed.notes, *notes),
    )


def find_columns(data: TextclassData) -> dict[str, str]:
    """Find the columns of texts and labels, by name or by the header of the training file."""
    wanted = {"text": data.text_column, "label": data.label_column}
    if AUTO not in wanted.values() or data.train is None:
        return wanted
    return choose_columns(column_names(Path(data.train)), wanted, data.train, KEYS)


def _settled(data: TextclassData, *, folds: bool) -> tuple[TextclassData, list[str]]:
    """Return the settled section, and notes on what was found."""
    assert data.train is not None
    notes: list[str] = []
    path = Path(data.train)
    if is_hub_name(data.train):
        path = fetch_dataset(data.train)
        notes.append(f"{data.train} is taken from the hub")
    splits = find_splits(path, data.split)
    found = replace(data, train=str(splits.pop("train")), split=None)
    files: dict[str, Any] = {}
    names = find_columns(found)
    if AUTO in (data.text_column, data.label_column):
        text, label = shown_name(names["text"]), shown_name(names["label"])
        notes.append(f"the texts are the column {text}, the labels {label}")
    found = replace(found, text_column=names["text"], label_column=names["label"])
    for split, path in splits.items():
        if getattr(data, split) is not None:
            continue
        if split == "validation" and folds:
            notes.append(f"{path.name} is left out: cv.folds takes the validation data")
        elif names["label"] not in column_names(path):
            notes.append(f"{path.name} is left out: it has no column {shown_name(names['label'])}")
        else:
            notes.append(f"data.{split} is {path.name} of the same folder")
            files[split] = str(path)
    return replace(found, **files), notes
