"""A worker: claims trials and runs them until the study is done, or it is asked to stop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Literal

from trainfit.engine.signals import StopRequest, stop_on_signals
from trainfit.hpo.desk import Claim, Desk, Outcome
from trainfit.hpo.workers import beating
from trainfit.redaction import redact

_POLL = 1.0
"""Seconds between two looks for a trial that a dead worker left."""

Run = Callable[[Claim], Outcome]
Tell = Callable[[int, dict[str, Any], Outcome], None]
"""Told of each trial that ended: its number, its parameters, and how."""


def work(
    desk: Desk, run: Run, *, parent: int | None = None, tell: Tell | None = None
) -> Literal["done", "stopped"]:
    """Run trials until none is left; `parent` is the process without which there is no point."""
    with stop_on_signals() as request:
        while request.name is None:
            claim = desk.claim()
            if claim == "done":
                return "done"
            if claim == "wait":
                _wait(request, parent)
            elif _work_on(desk, claim, run, request, parent, tell) == "stopped":
                return "stopped"
    return "stopped"


def _wait(request: StopRequest, parent: int | None) -> None:
    if parent is not None and os.getppid() != parent:
        request.name = "SIGTERM"
    else:
        time.sleep(_POLL)


def _is_asked(request: StopRequest) -> bool:
    """Whether a signal has come, which it does behind the back of whoever reads the code."""
    return request.name is not None


def _work_on(
    desk: Desk,
    claim: Claim,
    run: Run,
    request: StopRequest,
    parent: int | None,
    tell: Tell | None,
) -> str:
    if _is_asked(request):  # while the trial was being claimed
        desk.tell(claim.trial, Outcome(kind="stopped"))
        return "stopped"
    try:
        with beating(lambda: desk.beat(claim.trial), desk.hpo.heartbeat, parent):
            outcome = run(claim)
    except KeyboardInterrupt:
        desk.tell(claim.trial, Outcome(kind="stopped"))
        return "stopped"
    except Exception as error:
        if _is_asked(request):  # a Ctrl-C reaches helper processes too, which die of it
            desk.tell(claim.trial, Outcome(kind="stopped"))
            return "stopped"
        reason = f"{type(error).__name__}: {(redact(str(error)).splitlines() or [''])[0]}"
        desk.tell(claim.trial, Outcome(kind="failed", reason=reason))
        raise
    if not desk.tell(claim.trial, outcome):
        outcome = Outcome(kind="lost", reason="another worker has it")
    if tell is not None:
        tell(claim.trial.number, claim.params, outcome)
    return outcome.kind
