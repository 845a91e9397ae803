"""Models and data sets on the hub, which is asked once, and for a few seconds only; uploads to it.

The libraries below would go on for half a minute where the hub is out of reach. The token of an
upload is that of `hf auth login` or HF_TOKEN. It goes from the library to the hub, and nowhere
else: no message of the library is shown.

Arrow files of a data set are linked from a folder of the cache, a split each; nothing is copied. Of
a large one, the folder says only what it is and of which revision: its rows are read from the hub.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from logging import ERROR
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Literal, NamedTuple

from trainfit.core import caches, codec
from trainfit.core.errors import BadInput, RunFailed, brief, refusing
from trainfit.core.files import cache_folder
from trainfit.core.libraries import need
from trainfit.data.columnar import STREAM
from trainfit.hardware.host import memory_here
from trainfit.runtime.environment import stay_offline

Kind = Literal["model", "dataset"]
_FILES = {"model": "config.json", "dataset": "README.md"}
PATIENCE = 4.0
"""Seconds for the first answer."""
_ID = re.compile(r"(?!.*(?:--|\.\.))(?:[a-z0-9][\w.-]*/)?[a-z0-9][\w.-]{0,94}", re.I | re.A)
_LOG_IN = "run `hf auth login` with a token that may write, or set HF_TOKEN"


def may_be_on_hub(name: str) -> bool:
    """Tell names that the hub could know, with an owner or without, from paths and mistakes."""
    return bool(_ID.fullmatch(name)) and name[-1] not in ".-"


def hub_file(place: str, name: str) -> Path | None:
    """Find a file of a model on the hub, or in its cache; None where it does not exist.

    OSError says why neither has the model.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import RemoteEntryNotFoundError

    if not reach(place):
        found = try_to_load_from_cache(place, name)
        return Path(found) if isinstance(found, str) else None
    try:
        return Path(hf_hub_download(place, name))
    except RemoteEntryNotFoundError:
        return None


def reach(place: str, kind: Kind = "model") -> bool:
    """Ask the hub for a model or data set, once; False: its files are in the cache alone.

    OSError says why it is in neither.
    """
    obstacle = _obstacle(place, kind)
    if obstacle is None:
        return True
    if not _is_cached(place, kind):
        raise OSError(obstacle)
    stay_offline()
    return False


def _is_cached(place: str, kind: Kind) -> bool:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=place, repo_type=kind)
    return (Path(constants.HF_HUB_CACHE) / folder / "snapshots").is_dir()


@cache
def _obstacle(place: str, kind: Kind) -> str | None:
    """Ask the hub for a file that there should be; return why it gives none, or None."""
    from huggingface_hub import constants, errors, get_hf_file_metadata, hf_hub_url

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    url = hf_hub_url(place, _FILES[kind], repo_type=kind)
    error = failure(partial(get_hf_file_metadata, url, timeout=PATIENCE))
    if error is None or isinstance(error, errors.RemoteEntryNotFoundError):
        return None
    if isinstance(error, errors.GatedRepoError):
        return "its licence has to be accepted on its page there, and `hf auth login` run here"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"it has no such {kind}, or a private one (`hf auth login` opens yours)"
    if isinstance(error, errors.HfHubHTTPError):
        return f"{constants.ENDPOINT} answers with status {error.response.status_code}"
    return f"{constants.ENDPOINT} does not answer"


def failure(call: Callable[[], Any]) -> Exception | None:
    """Wait for a call for a while; return what it raised, or None.

    It runs in a thread of its own, since looking up the address of a host has no limit of time.
    """
    answer: SimpleQueue[Exception | None] = SimpleQueue()

    def run() -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  whatever it is, it is told
            answer.put(error)
        else:
            answer.put(None)

    Thread(target=run, daemon=True).start()
    try:
        return answer.get(timeout=PATIENCE)
    except Empty:
        return TimeoutError()


# ── uploads ───────────────────────────────────────────────────────────────────────────────────


def check_push(name: str) -> None:
    """Raise BadInput where nothing could be pushed to the model `name` of the hub."""
    if "/" not in name or not may_be_on_hub(name):
        raise BadInput(f"--push-to-hub {brief(name)!r} is no name of a model", "give OWNER/NAME")
    from huggingface_hub import HfApi, constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise BadInput(f"--push-to-hub {name} with HF_HUB_OFFLINE", "leave one of them out")
    token = get_token()
    if token is None:
        raise BadInput(f"--push-to-hub {name} needs a token, and there is none", _LOG_IN)
    answers: list[dict[str, Any]] = []
    error = failure(lambda: answers.append(HfApi().whoami(token)))
    if error is not None:
        refused = _status(error) in (401, 403)
        fix = _LOG_IN if refused else "try again later, or leave --push-to-hub out"
        raise BadInput(f"--push-to-hub {name}: {_why(error)}", fix)
    _check_rights(name, answers[0])


def _check_rights(name: str, account: dict[str, Any]) -> None:
    """Raise BadInput for a name of someone else, or a token that may only read."""
    owners = [account.get("name"), *(one.get("name") for one in account.get("orgs") or ())]
    if name.partition("/")[0] not in owners:
        known = " or ".join(f"{one}/NAME" for one in owners if one)
        raise BadInput(f"--push-to-hub {name} is not among your names on the hub", f"give {known}")
    token = (account.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "read":
        raise BadInput(f"--push-to-hub {name}: the token may only read", _LOG_IN)


def push_files(folder: Path, files: Sequence[str], name: str) -> str:
    """Upload files of a folder to a model of the hub, a new one being private; return its address.

    RunFailed says why the hub did not take them.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        with _no_bars():
            address = api.create_repo(name, private=True, exist_ok=True)
            api.upload_folder(
                repo_id=name,
                folder_path=folder,
                allow_patterns=list(files),
                commit_message="Model trained by trainfit",
            )
    except Exception as error:
        what = f"cannot push {folder} to {name}: {_why(error)}"
        raise RunFailed(what, "push it again") from error
    return str(address)


def _status(error: Exception) -> int | None:
    """Status that the hub answered with; None where it did not answer."""
    status: int | None = getattr(getattr(error, "response", None), "status_code", None)
    return status


def _why(error: Exception) -> str:
    """Describe an error without the library's text, which may hold the access token."""
    from huggingface_hub import constants

    status = _status(error)
    if status == 401:
        return f"{constants.ENDPOINT} refuses the token"
    if status == 403:
        return f"{constants.ENDPOINT} does not allow it to this token"
    if status is not None:
        return f"{constants.ENDPOINT} answers with status {status}"
    return f"{constants.ENDPOINT} does not answer ({type(error).__name__})"


@contextmanager
def _no_bars() -> Iterator[None]:
    """Switch off the library's progress bars, which would interrupt trainfit's lines."""
    from huggingface_hub import utils

    bars: Any = utils
    before = bars.are_progress_bars_disabled()
    bars.disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            bars.enable_progress_bars()


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
    if _is_whole(streamed):
        known = codec.read_object(next(streamed.glob(f"*/{STREAM}")))
        if int(known["size"]) > most:
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
            (made / split / STREAM).write_text(json.dumps(known), encoding="utf-8")
            (made / split / "state.json").write_text(
                json.dumps({"_data_files": []}), encoding="utf-8"
            )


def _is_whole(folder: Path) -> bool:
    """Tell if the folder is there, and all that it links to."""
    files = list(folder.glob("*/*"))
    return bool(files) and all(file.exists() for file in files)


def _load(name: str) -> Mapping[str, Any]:
    """Load every split with the `datasets` library."""
    import datasets

    path, _, subset = name.partition(":")
    with refusing(partial(_refusal, name)), _quieter():
        loaded: Mapping[str, Any] = datasets.load_dataset(path, subset or None)
    return loaded


def _refusal(name: str, why: str) -> BadInput:
    """Return the error for a dataset that the library does not load."""
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
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
