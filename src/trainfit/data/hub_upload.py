"""Uploads to the hub: a check before the work, and the files after it.

The token is that of `hf auth login` or HF_TOKEN. It goes from the library to the hub, and nowhere
else: no message of the library is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainfit.core.errors import BadInput, RunFailed, brief
from trainfit.data.hub import failure, may_be_on_hub

_LOG_IN = "run `hf auth login` with a token that may write, or set HF_TOKEN"


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
