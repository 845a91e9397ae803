"""Splits of a folder: those of a saved DatasetDict, or train.csv, dev.csv and test.csv."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainfit.core.errors import BadInput, brief
from trainfit.data.row_files import KINDS, Kinds

_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}
"""Names of each split without their ending."""


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
    found = {split: list(_places(path, names, kinds)) for split, names in _NAMES.items()}
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
