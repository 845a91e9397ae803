"""Models and data sets on the hub, which is asked once, and for a few seconds only.

The libraries below would go on for half a minute where the hub is out of reach.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Literal

from trainfit.runtime.environment import stay_offline

Kind = Literal["model", "dataset"]
_FILES = {"model": "config.json", "dataset": "README.md"}
PATIENCE = 4.0
"""Seconds for the first answer."""
_ID = re.compile(r"(?!.*(?:--|\.\.))(?:[a-z0-9][\w.-]*/)?[a-z0-9][\w.-]{0,94}", re.I | re.A)


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
