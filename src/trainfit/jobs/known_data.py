"""Data of a job before it is read: files, splits and columns; counts and lengths for `plan`.

A file of texts is read and its words are counted, without a tokenizer and without torch; token
files have a header; a text to pretrain on has a size. Where nothing is named, lengths are assumed,
and the plan says so.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from trainfit.conf import Composed
from trainfit.conf.composition import as_word
from trainfit.conf.schema import GptConfig, PairsData, TextFilesConfig, TextFilesData, TokensData
from trainfit.core.errors import BadInput, brief
from trainfit.data.columnar import AUTO, choose_columns, flat, is_stream, shown_name
from trainfit.data.corpus import find_texts
from trainfit.data.hub import fetch_dataset, is_hub_name
from trainfit.data.labels import STAND_INS
from trainfit.data.row_files import KINDS, Kinds, column_names, read_rows
from trainfit.data.text_files import (
    SPLITS,
    Columns,
    find_marks,
    find_parts,
    infer_labels,
    is_blank,
    read_chunks,
)
from trainfit.data.token_files import read_header
from trainfit.jobs import plan_choices

_FIELDS = {"text": "text_column", "label": "label_column"}
_PAIR_FIELDS = {"text": "first_column", "second": "second_column", "label": "label_column"}
_TAG_FIELDS = {"tokens": "words_column", "tags": "label_column"}
"""Fields of a configuration that name the column of each role."""
_FIRST = 1000
"""Rows that tell if a split has labels."""
_SPLIT_COLUMNS = ("split", "set", "partition", "data_split")
"""Names of a column that says which split a row is of."""
_PART = re.compile(r"-\d{5}-of-(\d{5})$")
"""End of the name of a split's file in a dataset that was cloned from the hub."""


def settle_sources(composed: Composed) -> Composed:
    """Replace a folder of splits by its files, and columns left at `auto` by their names."""
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
    *texts, label = _find_columns(data).values()
    tagged = isinstance(data, TokensData)
    read = "+" in label and data.train is not None and not tagged
    marks = flat([label], column_names(Path(str(data.train))) if read else [label])
    return Columns(
        text=texts[0],
        second=texts[1] if len(texts) > 1 else None,
        label=label,
        marks=tuple(marks) if len(marks) > 1 else (),
        group=data.group_column,
        tagged=tagged,
        split=None if data.split_column == AUTO else data.split_column,
    )


def files_of(data: TextFilesData) -> Iterator[tuple[Path, Columns]]:
    """Each file of the data with its columns; only the training file may hold several splits."""
    columns = columns_of(data)
    for part in SPLITS:
        path = getattr(data, part)
        if path is not None:
            yield Path(path), columns.of_part(part, alone=path != data.train)


def _find_columns(data: TextFilesData) -> dict[str, str]:
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
    """Return the section with its files and columns filled in, and notes on them."""
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
    notes += _labels_beside(found)
    if not splits:
        found, told = _split_rows(found, folds=folds)
        notes += told
    for split, file in splits.items():
        if getattr(data, split) is not None:
            continue
        if split == "validation" and folds:
            notes.append(f"{file.name} is left out: cv.folds takes the validation data")
        elif not _has_labels(file, columns_of(found)):
            where = shown_name(labels)
            notes.append(f"{file.name} is left out: it has no labels in the column {where}")
        else:
            notes.append(f"data.{split} is {file.name} of the same folder")
            files[split] = str(file)
    found = replace(found, **files)
    if path.is_dir() and not (path / "state.json").is_file() and data.split is None:
        notes += _unused(path, found, splits.values())
    return found, notes


def _labels_beside(data: TextFilesData) -> list[str]:
    """Tell of columns of 0 and 1 beside that of the label."""
    marks = find_marks(Path(str(data.train)), columns_of(data))
    word = as_word("data.label_column", "+".join(marks))
    several = f"{len(marks) - 1} other columns hold 0 and 1 too: {word} takes all as labels"
    return [several] if marks else []


def _unused(folder: Path, data: TextFilesData, known: Iterable[Path]) -> list[str]:
    """Name the tables of a folder, such as validation_matched, that no split is taken from."""
    used = {data.train, data.validation, data.test, *map(str, known)}
    others = [one.name for one in _tables(folder, _kinds(data)) if str(one) not in used]
    some = ", ".join(others[:5]) + " …" * (len(others) > 5)
    return [f"not used: {some} (data.validation or data.test names one)"] if others else []


def _split_rows(data: TextFilesData, *, folds: bool) -> tuple[TextFilesData, list[str]]:
    """Take the splits that a column of the training file tells; returns a note on them."""
    assert data.train is not None
    path, column = Path(data.train), data.split_column
    columns = columns_of(replace(data, split_column=None))
    if column == AUTO:
        there = [] if is_stream(path) else column_names(path, columns.kinds)
        known = (name for name in there if name.strip().lower() in _SPLIT_COLUMNS)
        column = next((name for name in known if name not in columns.names), None)
    parts = Counter[str | None]() if column is None else find_parts(path, columns, column)
    other = parts.pop(None, 0)
    if "train" not in parts or (data.split_column == AUTO and other and len(parts) == 1):
        if data.split_column not in (AUTO, None):
            fix = "its values must be train, validation and test"
            raise BadInput(f"no row has train in the column {column}", fix)
        why = "its values are not train, validation and test"
        unused = [] if column is None else [f"the column {column} is not used: {why}"]
        return replace(data, split_column=None), unused
    used = [part for part in SPLITS if part in parts and not (folds and part == "validation")]
    files: dict[str, Any] = {part: data.train for part in used if getattr(data, part) is None}
    note = f"the column {column} says which rows are of {', '.join(used)}"
    note += f"; {other:,} have other values, and are left out" if other else ""
    left = parts["validation"] if folds else 0
    note += f"; cv.folds leaves out the {left:,} of validation" if left else ""
    return replace(data, split_column=column, **files), [note]


def _has_labels(path: Path, columns: Columns) -> bool:
    """Tell a labelled split from one whose labels are kept secret, as for a competition."""
    names = columns.labels
    if not set(names) <= set(column_names(path, columns.kinds)):
        return False
    rows = islice(read_rows(path, names, columns.kinds), _FIRST)
    values = (value for _, row in rows for value in row.values())
    each = (one for value in values for one in (value if isinstance(value, list) else [value]))
    return any(not is_blank(one) and str(one) not in STAND_INS for one in each)


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
    found = {split: list(_places(path, names, kinds)) for split, names in SPLITS.items()}
    for split, places in found.items():
        if len(places) > 1 and _PART.search(places[0].stem):
            fix = "join them: datasets.load_dataset(folder).save_to_disk(another), and give that"
            raise BadInput(f"{path} holds {split} in {len(places)} files", fix)
        if len(places) > 1:
            both = f"{places[0].name} and {places[1].name}"
            raise BadInput(f"{path} holds {both}", f"name one of them with data.{split}")
    if not found["train"]:
        if there := _listed(path):
            raise BadInput("the data has no split train", f"name one with data.split: {there}")
        name = "train.csv" if ".csv" in kinds else "train.conll"
        such = f"such as {tables[0]}, " if (tables := _tables(path, kinds)) else ""
        raise BadInput(
            f"{path} is no saved dataset and holds no {name}, train.jsonl or the like",
            f"give a file, {such}a folder with {name}, or one that datasets' save_to_disk wrote",
        )
    return {split: places[0] for split, places in found.items() if places}


def _single(path: Path, chosen: str | None) -> dict[str, Path]:
    if chosen is not None:
        what = f"data.split is {brief(chosen)}, but {path} has no splits"
        raise BadInput(what, "leave data.split out")
    return {"train": path}


def _listed(folder: Path) -> str:
    """Names of the saved splits of a folder."""
    return ", ".join(place.name for place in _tables(folder, {}))


def _tables(folder: Path, kinds: Kinds) -> list[Path]:
    """Files of these kinds and saved splits in a folder, or in the only one below that has any."""

    def there(place: Path) -> list[Path]:
        return [
            one
            for one in sorted(place.glob("[!.]*"))
            if (one.is_file() and one.suffix.lower() in kinds) or (one / "state.json").is_file()
        ]

    if tables := there(folder):
        return tables
    below = [found for one in sorted(folder.glob("[!.]*/")) if (found := there(one))]
    return below[0] if len(below) == 1 else []


def _places(folder: Path, names: tuple[str, ...], kinds: Kinds) -> Iterator[Path]:
    there = _tables(folder, kinds)
    for name in map(str.lower, names):
        for one in there:
            if name == _PART.sub("", one.stem if one.is_file() else one.name).lower():
                yield one


# ReDSM5 as published: words per post, and pairs of a post with nine criteria.
_POSTS, _CRITERIA, _MEAN_WORDS, _SPREAD, _TOKENS_PER_WORD = 1484, 9, 294.7, 0.9, 1.3
_GPT_TOKENS = 10_000_000
"""An epoch of pretraining where no data is named: about the standard library of Python."""
_SPECIAL = 2
"""Tokens around a text."""
_BLOCKS = 4096
"""Blocks of one length that stand for all of them."""
_NAMED_NOTHING = {
    "nli": "1,484 posts with 9 criteria each, as long as ReDSM5's",
    "textclass": "10,000 texts of about a third of data.max_length",
    "pairs": "10,000 pairs of about a third of data.max_length",
    "tokens": "10,000 sentences of about a third of data.max_length",
    "gpt": "10 million tokens, about as many as Python's standard library has",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownData:
    """Counts of the data that a job names."""

    lengths: tuple[int, ...]
    sequences: int
    about: str
    """The data in words."""
    assumed: tuple[str, ...] = ()


def known_data(composed: Composed) -> KnownData | None:
    """Look at the data that the configuration names; None where it names none."""
    config = composed.config
    if isinstance(config, GptConfig):
        return _tokens(composed)
    if isinstance(config, TextFilesConfig) and config.data.train is not None:
        return _texts(config, Path(config.data.train))
    return None


def assumption(composed: Composed) -> str:
    """Say which data is assumed, and why."""
    named = getattr(composed.config.data, "data_dir", None) is not None
    why = "the data is read by train alone" if named else "no data is named"
    return f"{_NAMED_NOTHING[composed.task]}: {why}"


def _tokens(composed: Composed) -> KnownData | None:
    config = composed.config
    assert isinstance(config, GptConfig)
    if config.data.data_dir is None:
        return None
    place, text = Path(config.data.data_dir), plan_choices.text_of(composed)
    assumed: tuple[str, ...] = ()
    if text is None:
        tokens = read_header(place).train.tokens
    else:
        size = sum(path.stat().st_size for path in find_texts(text))
        tokens = plan_choices.estimate_tokens(size, config.data.vocab_size)
        assumed = (f"{tokens:,} tokens, by the size of the text",)
    block = config.data.max_length
    blocks = max(1, (tokens - 1) // block)
    return KnownData(
        lengths=(block,) * min(blocks, _BLOCKS),
        sequences=blocks,
        about=f"{place.name}: {tokens:,} tokens to train on",
        assumed=assumed,
    )


def _texts(config: TextFilesConfig, path: Path) -> KnownData:
    """Count the words of the texts, and the classes; no text is kept."""
    data = config.data
    columns = columns_of(data)
    kind = infer_labels(path, columns, data.target)
    words: list[int] = []
    classes: set[str] = set()
    for chunk in read_chunks(path, columns, kind=kind):
        words += [len(" ".join(row).split()) for row in chunk.rows]
        for label in () if kind.target == "regression" else chunk.labels:
            classes |= {label} if isinstance(label, str) else set(label)  # type: ignore[arg-type]
    rows = len(words)
    shares = [
        share
        for share, other in ((data.test_share, data.test), (data.validation_share, data.validation))
        if other is None
    ]
    kept = max(1, round(rows * float(np.prod([1 - share for share in shares]))))
    tokens = np.round(np.array(words) * _TOKENS_PER_WORD).astype(np.int64) + _SPECIAL
    trained = np.random.default_rng(0).permutation(tokens)[:kept]
    count = f", {len(classes):,} classes" if classes else ""
    return KnownData(
        lengths=tuple(trained.tolist()),
        sequences=kept,
        about=f"{path.name}: {rows:,} rows{count}, {kept:,} of them to train on",
        assumed=(f"{_TOKENS_PER_WORD} tokens per word of {path.name}",),
    )


def assumed_lengths(task: str, longest: int) -> Any:
    """Lengths where the data is not here: ReDSM5's, short texts, or full blocks."""
    if task == "gpt":
        return np.full(max(1, _GPT_TOKENS // longest), longest)
    draws = np.random.default_rng(0)
    if task in ("textclass", "pairs", "tokens"):
        words = np.exp(np.log(0.35 * longest) + 0.6 * draws.standard_normal(10_000))
        return np.clip(np.round(words), 3, longest).astype(np.int64)
    middle = np.log(_MEAN_WORDS) - _SPREAD**2 / 2
    words = np.exp(middle + _SPREAD * draws.standard_normal(_POSTS))
    tokens = np.maximum(2, np.round(words * _TOKENS_PER_WORD)).astype(np.int64)
    criteria = draws.integers(12, 40, _CRITERIA)
    return np.minimum(tokens[:, None] + criteria, longest).ravel()
