"""Data sets of the hub by name, loaded by `datasets` and read from its files like any other.

Its Arrow files are linked from a folder of the cache, a split each; nothing is copied. Of a large
one, the folder says only what it is and of which revision: its rows are read from the hub.
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
from logging import ERROR
from pathlib import Path
from typing import Any, NamedTuple

from trainfit.core import caches, codec
from trainfit.core.errors import BadInput, brief, refusing
from trainfit.core.files import cache_folder
from trainfit.core.libraries import need
from trainfit.data.columnar import STREAM
from trainfit.data.hub import reach
from trainfit.hardware.host import memory_here

_NAME = re.compile(r"(?!.*\.[A-Za-z]{2,7}$)[\w-][\w.-]*(/[\w-][\w.-]*)?(:[\w.-]+)?", re.ASCII)
_FIX = "check the path or the name; a subset is named as OWNER/NAME:SUBSET"


def is_hub_name(word: str) -> bool:
    """Tell a name such as imdb or owner/name:subset from a path; there must be no such path."""
    return len(word) < 200 and bool(_NAME.fullmatch(word)) and not os.path.lexists(word)


def fetch_dataset(name: str, stream_above: float | None = None) -> Path:
    """Return a folder with a saved dataset per split; it is loaded once.

    One of more bytes than `stream_above`, or than memory, is not loaded but streamed.
    """
    key = hashlib.sha256(name.encode()).hexdigest()[:32]
    folder, streamed = (cache_folder() / "hub" / each for each in (key, f"{key}-stream"))
    most = memory_here() if stream_above is None else stream_above
    if _is_whole(folder):
        return folder
    if _is_whole(streamed) and _streamed_size(streamed) > most:
        return streamed
    need(f"the dataset {name} of the hub", "datasets")
    try:
        reached = reach(name.partition(":")[0], "dataset")
    except OSError as error:
        what = f"there is no file or folder {name}, and the hub gives no such dataset: {error}"
        raise BadInput(what, _FIX) from None
    remote = _look_up(name) if reached else None
    if remote is not None and remote.size > most:
        _point(streamed, name, remote)
        return streamed
    _link(folder, name, _load(name))
    return folder


class _Remote(NamedTuple):
    """A dataset as the hub describes it."""

    revision: str
    size: int
    """Bytes: those that its card tells, else those of its files."""
    splits: list[str]


def _look_up(name: str) -> _Remote:
    """Ask the hub for the size of a dataset or a subset; nothing is downloaded but its card."""
    import datasets
    from huggingface_hub import HfApi

    path, _, subset = name.partition(":")
    with refusing(partial(_refusal, name)), _quieter():
        builder = datasets.load_dataset_builder(path, subset or None)
        about = HfApi().dataset_info(path, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in about.siblings or ()}
        files: Mapping[str, Sequence[str]] = builder.config.data_files or {}
        # Such as hf://datasets/owner/name@revision/data/train.parquet
        names = [url.partition("@")[2].partition("/")[2] for urls in files.values() for url in urls]
        size = builder.info.dataset_size or sum(sizes.get(one, 0) for one in names)
    return _Remote(str(about.sha), size, [str(split) for split in files])


def _point(folder: Path, name: str, remote: _Remote) -> None:
    """Write a folder that stands for a dataset which stays on the hub."""
    path, _, subset = name.partition(":")
    about = {"name": path, "subset": subset or None, "revision": remote.revision}
    with caches.building(folder) as made:
        for split in remote.splits:
            _check_split(split, name)
            (made / split).mkdir()
            known = about | {"split": split, "size": remote.size}
            (made / split / STREAM).write_text(json.dumps(known))
            (made / split / "state.json").write_text(json.dumps({"_data_files": []}))


def _streamed_size(folder: Path) -> int:
    """Bytes of a streamed dataset, as they were when it was looked up."""
    return int(codec.read_object(next(folder.glob(f"*/{STREAM}")))["size"])


def _is_whole(folder: Path) -> bool:
    """Tell if the folder is there, and all that it links to."""
    files = list(folder.glob("*/*"))
    return bool(files) and all(file.exists() for file in files)


def _load(name: str) -> Mapping[str, Any]:
    """Load every split by the library."""
    import datasets

    path, _, subset = name.partition(":")
    with refusing(partial(_refusal, name)), _quieter():
        loaded: Mapping[str, Any] = datasets.load_dataset(path, subset or None)
    return loaded


def _refusal(name: str, why: str) -> BadInput:
    """Word why the library does not load a dataset."""
    if "scripts are no longer supported" in why:
        what = f"{name} on the hub is a loading script, and no code of the hub is run"
        return BadInput(what, "take a dataset with files such as Parquet or CSV")
    return BadInput(f"cannot load {name} from the hub ({brief(why)})", _FIX)


@contextmanager
def _quieter() -> Iterator[None]:
    """Silence the libraries' remarks, and keep progress bars for people."""
    import datasets
    from huggingface_hub.utils import logging

    before, level = datasets.are_progress_bars_disabled(), logging.get_verbosity()
    logging.set_verbosity(ERROR)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if not before:
            datasets.enable_progress_bars()


def _link(folder: Path, name: str, splits: Mapping[str, Any]) -> None:
    """Write the folder whole or not at all."""
    with caches.building(folder) as made:
        for split, rows in splits.items():
            files = [Path(entry["filename"]) for entry in rows.cache_files]
            _check_split(split, name, bool(files))
            _link_split(made / split, files)


def _check_split(split: str, name: str, found: bool = True) -> None:
    if not found or not re.fullmatch(r"[\w.-]+", split):
        raise BadInput(f"cannot use the split {brief(split)} of {name}", _FIX)


def _link_split(folder: Path, files: Sequence[Path]) -> None:
    """Write a folder of the form that save_to_disk gives a split."""
    folder.mkdir()
    names = [f"data-{number:05d}.arrow" for number in range(len(files))]
    for name, file in zip(names, files, strict=True):
        (folder / name).symlink_to(file.absolute())
    state = {"_data_files": [{"filename": name} for name in names]}
    (folder / "state.json").write_text(json.dumps(state))
