"""Cached records: sealed with a checksum, and thrown away with a warning when damaged.

    {"sha256": "…", "content": {…}}    the checksum of the content as compact JSON

A cache only saves time: a failure to read or write it ends no command.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from trainfit.core import codec
from trainfit.core.errors import RunFailed, TrainfitError, TrainfitWarning, reason
from trainfit.core.files import write_whole
from trainfit.core.libraries import version_of

T = TypeVar("T")
_LIBRARIES = ("trainfit", "torch", "transformers", "peft", "triton", "liger-kernel", "bitsandbytes")
_READ = (".py", ".json", ".csv")
_PAGES = ("cli", "reports", "doctor", "integrations", "hpo", "conf")
"""Packages that do not affect a step's memory or speed."""


def libraries() -> dict[str, str | None]:
    """Versions of the libraries that a cached answer depends on; None for those not installed."""
    return {name: version_of(name) for name in _LIBRARIES}


@cache
def sources() -> str:
    """Digest of the package's own files that a cached answer depends on."""
    digest, home = hashlib.sha256(), Path(__file__).parent.parent
    for path in sorted(home.rglob("*")):
        if path.suffix in _READ and path.relative_to(home).parts[0] not in _PAGES:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def read(kind: type[T], path: Path) -> T | None:
    """Read a cached record; None where there is none, or a damaged one."""
    try:
        sealed = codec.read_object(path)
        if sealed.get("sha256") != _checksum(sealed.get("content")):
            raise ValueError("it does not match its checksum")
        return codec.decode(kind, sealed["content"], str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TrainfitError) as error:
        throw_away(path, reason(error))
        return None


def write(path: Path, record: object) -> bool:
    """Write a record; False, with a warning, where the cache cannot be written."""
    content = codec.encode(record)
    sealed = {"sha256": _checksum(content), "content": content}
    try:
        write_whole(path, json.dumps(sealed, allow_nan=False) + "\n")
    except OSError as error:
        _warn_unwritten(path.parent, reason(error))
        return False
    return True


@contextmanager
def building(folder: Path) -> Iterator[Path]:
    """Yield a new folder that becomes `folder` when all of it is written, or is removed."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".building-"))
        try:
            yield made
            discard(folder)
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was quicker
                    raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        fix = "free some space, or set TRAINFIT_CACHE to a folder of yours"
        raise RunFailed(f"cannot write {folder} ({reason(error)})", fix) from error


def throw_away(path: Path, why: str) -> None:
    """Remove a damaged file or folder of a cache, with a warning."""
    discard(path)
    text = f"{path} is damaged and was thrown away ({why})"
    warnings.warn(text, TrainfitWarning, stacklevel=3)


@cache  # one warning for all records of a folder
def _warn_unwritten(folder: Path, why: str) -> None:
    text = f"results are not kept in {folder} ({why}); set TRAINFIT_CACHE to a folder of yours"
    warnings.warn(text, TrainfitWarning, stacklevel=3)


def discard(path: Path) -> None:
    """Remove a file or folder, as far as possible."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _checksum(content: Any) -> str:
    text = json.dumps(content, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
