"""Files and columns of a text job, found before anything is read: splits of a folder, `auto`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

from trainfit.conf import Composed, TextFilesConfig
from trainfit.conf.schema import PairsData, TextFilesData, TokensData
from trainfit.core.errors import BadInput, brief
from trainfit.data.columnar import is_stream
from trainfit.data.columns import AUTO, choose_columns, shown_name
from trainfit.data.hub_datasets import fetch_dataset, is_hub_name
from trainfit.data.row_files import KINDS, Kinds, column_names, read_rows
from trainfit.data.text_files import Columns, is_blank

_FIELDS = {"text": "text_column", "label": "label_column"}
_PAIR_FIELDS = {"text": "first_column", "second": "second_column", "label": "label_column"}
_TAG_FIELDS = {"tokens": "words_column", "tags": "label_column"}
"""Fields of a configuration that name the column of each role."""
_FIRST = 1000
"""Rows that tell if a split has labels."""
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}
"""Names of each split without their ending."""


def settle_sources(composed: Composed) -> Composed:
    """Replace a folder of splits by its files, and `auto` by the names of the columns."""
    config: Any = composed.config
    if not isinstance(config, TextFilesConfig) or config.data.train is None:
        return composed
    data, notes = _settled(config.data, folds=config.cv.folds is not None)
    if data == config.data:
        return composed
    if isinstance(data, TokensData) and config.model.freeze_encoder is True:
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


def find_splits(path: Path, chosen: str | None = None, kinds: Kinds = KINDS) -> dict[str, Path]:
    """Find the file of each split in a folder; any other path is the training data itself.

    The `chosen` split alone is the training data, whatever its name. `kinds` are the kinds of
    files by their ending.
    """
    try:
        if not path.is_dir() or (path / "state.json").is_file():
            return _single(path, chosen)
    except OSError:  # whoever reads it says why
        return _single(path, chosen)
    if chosen is not None:
        places = list(_places(path, (chosen,), kinds))
        if not places or Path(chosen).name != chosen:
            raise BadInput(f"no split {brief(chosen)}", f"name one of {_listed(path)}")
        return {"train": places[0]}
    found = {split: list(_places(path, names, kinds)) for split, names in _SPLITS.items()}
    for split, places in found.items():
        if len(places) > 1:
            both = f"{places[0].name} and {places[1].name}"
            raise BadInput(f"{path} holds {both}", f"name one of them with data.{split}")
    if not found["train"]:
        if there := _listed(path):
            raise BadInput("the data has no split train", f"name one with data.split: {there}")
        name = "train.csv" if ".csv" in kinds else "train.conll"
        raise BadInput(
            f"{path} is no saved dataset and holds no {name}, train.jsonl or the like",
            f"give a file, a folder with {name}, or one that datasets' save_to_disk wrote",
        )
    return {split: places[0] for split, places in found.items() if places}


def _single(path: Path, chosen: str | None) -> dict[str, Path]:
    if chosen is not None:
        what = f"data.split is {brief(chosen)}, but {path} has no splits"
        raise BadInput(what, "leave data.split out")
    return {"train": path}


def _listed(folder: Path) -> str:
    """Names of the saved splits of a folder."""
    return ", ".join(sorted(place.parent.name for place in folder.glob("*/state.json")))


def _places(folder: Path, names: tuple[str, ...], kinds: Kinds) -> Iterator[Path]:
    for name in names:
        if (folder / name / "state.json").is_file():
            yield folder / name
        yield from (path for end in kinds if (path := folder / f"{name}{end}").is_file())
