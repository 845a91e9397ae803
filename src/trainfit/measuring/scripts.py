"""Run somebody's command as it is, and see what its training does."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from trainfit.errors import BadInput
from trainfit.measuring.observing import Observed

_INJECTED = Path(__file__).parent / "injected"


def run_observed(
    command: Sequence[str], output: IO[str] | int | None = None
) -> tuple[int, Observed | None]:
    """Its exit code, and what was seen; None where no Python of it made an optimizer step.

    `output` takes its standard output where that is not to be this process's own.
    """
    with tempfile.TemporaryDirectory(prefix="trainfit-observed-") as folder:
        path = os.pathsep.join(filter(None, [str(_INJECTED), os.environ.get("PYTHONPATH")]))
        given = {**os.environ, "PYTHONPATH": path, "TRAINFIT_OBSERVE": folder}
        try:
            child = subprocess.Popen(list(command), env=given, stdout=output)
        except OSError as error:
            what = f"cannot run {command[0]!r} ({error.strerror})"
            raise BadInput(what, "give a command after --, as in: python train.py") from None
        code = _wait(child)
        return code, _best(Path(folder))


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Its own way to end on Ctrl-C is waited for: the terminal has sent it the signal too."""
    while True:
        with suppress(KeyboardInterrupt):
            code = child.wait()
            return code if code >= 0 else 128 - code


def _best(folder: Path) -> Observed | None:
    """Of several processes, the one that was looked at, or else that made the most steps."""
    found = []
    for path in sorted(folder.glob("*.json")):
        with suppress(BadInput):
            found.append(Observed.load(path))
    return max(found, key=lambda seen: (seen.receipt is not None, seen.steps), default=None)
