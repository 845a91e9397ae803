"""Data sets of the hub by name, loaded by `datasets` and read from its files like any other.

Its Arrow files are linked from a folder of the cache, a split each; nothing is copied.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from trainfit.core import caches
from trainfit.core.errors import BadInput, brief, refusing
from trainfit.core.files import cache_folder
from trainfit.core.libraries import need
from trainfit.data.hub import reach

_NAME = re.compile(r"(?!.*\.[A-Za-z]{2,7}$)[\w-][\w.-]*(/[\w-][\w.-]*)?(:[\w.-]+)?", re.ASCII)
_FIX = "check the path or the name; a subset is named as OWNER/NAME:SUBSET"


def is_hub_name(word: str) -> bool:
    """Tell a name such as imdb or owner/name:subset from a path; there must be no such path."""
    return len(word) < 200 and bool(_NAME.fullmatch(word)) and not os.path.lexists(word)


def fetch_dataset(name: str) -> Path:
    """Return a folder with a saved dataset per split; it is loaded once."""
    folder = cache_folder() / "hub" / hashlib.sha256(name.encode()).hexdigest()[:32]
    if not _is_whole(folder):
        need(f"the dataset {name} of the hub", "datasets")
        try:
            reach(name.partition(":")[0], "dataset")
        except OSError as error:
            what = f"there is no file or folder {name}, and the hub gives no such dataset: {error}"
            raise BadInput(what, _FIX) from None
        _link(folder, name, _load(name))
    return folder


def _is_whole(folder: Path) -> bool:
    """Tell if the folder is there, and all that it links to."""
    files = list(folder.glob("*/*"))
    return bool(files) and all(file.exists() for file in files)


def _load(name: str) -> Mapping[str, Any]:
    """Load every split by the library."""
    import datasets

    path, _, subset = name.partition(":")
    with refusing(partial(_refusal, name)), _bars_on_terminals():
        loaded: Mapping[str, Any] = datasets.load_dataset(path, subset or None)
    return loaded


def _refusal(name: str, why: str) -> BadInput:
    """Word why the library does not load a dataset."""
    if "scripts are no longer supported" in why:
        what = f"{name} on the hub is a loading script, and no code of the hub is run"
        return BadInput(what, "take a dataset with files such as Parquet or CSV")
    return BadInput(f"cannot load {name} from the hub ({brief(why)})", _FIX)


@contextmanager
def _bars_on_terminals() -> Iterator[None]:
    """Leave the library's progress bars to people, who see what is downloaded."""
    import datasets

    before = datasets.are_progress_bars_disabled()
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            datasets.enable_progress_bars()


def _link(folder: Path, name: str, splits: Mapping[str, Any]) -> None:
    """Write the folder whole or not at all."""
    with caches.building(folder) as made:
        for split, rows in splits.items():
            files = [Path(entry["filename"]) for entry in rows.cache_files]
            if not re.fullmatch(r"[\w.-]+", split) or not files:
                raise BadInput(f"cannot use the split {brief(split)} of {name}", _FIX)
            _link_split(made / split, files)


def _link_split(folder: Path, files: Sequence[Path]) -> None:
    """Write a folder of the form that save_to_disk gives a split."""
    folder.mkdir()
    names = [f"data-{number:05d}.arrow" for number in range(len(files))]
    for name, file in zip(names, files, strict=True):
        (folder / name).symlink_to(file.absolute())
    state = {"_data_files": [{"filename": name} for name in names]}
    (folder / "state.json").write_text(json.dumps(state))
