"""Models and data sets on the hub, which is asked once, and for a few seconds only; uploads to it.

The libraries below would go on for half a minute where the hub is out of reach. The token of an
upload is that of `hf auth login` or HF_TOKEN. It goes from the library to the hub, and nowhere
else: no message of the library is shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Literal

from trainfit.core.errors import BadInput, RunFailed, brief
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
    """Word an error without the library's words, in which a token might be."""
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
