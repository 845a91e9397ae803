"""A process that runs trials: one JSON line in, one JSON line out, until its parent is gone.

What libraries print must not end up among the answers, so these have a pipe of their own and
standard output goes where standard error does.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import TextIO

from trainfit.records import Record
from trainfit.tuning.records import Candidate

READY = "ready"
_LOOK_EVERY = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Request(Record):
    """A trial to run."""

    candidate: Candidate
    steps: int
    warm_up: int
    most_seconds: float | None = None


def main(modules: list[str]) -> None:
    """Import what the trials need, say so, and answer."""
    answers = _own_pipe()
    _end_with_parent(os.getppid())
    from trainfit.tuning.trial import run_trial

    for module in modules:
        importlib.import_module(module)
    _say(answers, READY)
    for line in sys.stdin:
        request = Request.from_json(line, "the search")
        trial = run_trial(
            request.candidate,
            steps=request.steps,
            warm_up=request.warm_up,
            most_seconds=request.most_seconds,
        )
        _say(answers, trial.to_json(indent=None))


def _own_pipe() -> TextIO:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def _say(answers: TextIO, line: str) -> None:
    answers.write(line + "\n")
    answers.flush()


def _end_with_parent(parent: int) -> None:
    """A parent that was killed cannot end its children, and a trial may hang."""

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_EVERY)
        os._exit(1)

    threading.Thread(target=look, name="parent", daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1:])
