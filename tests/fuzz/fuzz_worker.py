"""A warm process that runs cases: torch is imported once, and a case takes milliseconds.

It reads one line of JSON per case on standard input and answers with the exit code. A case that
crashes or hangs takes the process with it, and the parent starts another.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import resource
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

MEMORY = 10 * 2**30
"""Bytes of addresses: an allocation without bounds ends here and not on the whole machine."""
LARGEST_FILE = 2**30


def main() -> None:
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    cases, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    _warm_up()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in cases:
        case = json.loads(line)
        answer = _warm_planner() if "warm" in case else _run(case)
        print(json.dumps(answer), file=answers, flush=True)


def _warm_up() -> None:
    """Import what commands need, and look at the hardware once."""
    import torch
    import transformers  # noqa: F401

    import trainfit.hardware as hardware

    torch.set_num_threads(1)
    hardware.detect = functools.cache(hardware.detect)  # type: ignore[assignment]
    hardware.detect()


def _warm_planner() -> dict[str, Any]:
    """Have the planner's processes import torch before a case is timed."""
    from trainfit.core.errors import RunFailed
    from trainfit.core.plan_records import TaskSpec
    from trainfit.planning.estimator.estimate import Request, ask

    task = TaskSpec(factory="trainfit.jobs.probes:gpt_step", arguments={"name": "nowhere"})
    for child in (0, 0, 1, 1):  # one that a case left without memory dies, and is started anew
        with contextlib.suppress(RunFailed):
            ask([Request(task=task, targets=())], child)
    return {"code": 0}


def _run(case: dict[str, Any]) -> dict[str, Any]:
    import fuzz_templates

    environment = dict(os.environ)
    os.environ.update(case["env"])
    restore = [os.dup(fd) for fd in (1, 2)]
    for fd, name in ((1, "stdout"), (2, "stderr")):
        opened = os.open(case[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(opened, fd)
        os.close(opened)
    streams = [io.TextIOWrapper(os.fdopen(os.dup(fd), "wb"), "utf-8", "replace") for fd in (1, 2)]
    before = sys.stdout, sys.stderr, sys.argv
    sys.stdout, sys.stderr = streams[0], streams[1]
    try:
        with warnings.catch_warnings():
            if "template" in case:
                fuzz_templates.make(case["template"], Path(case["folder"]))
                return {"code": 0}
            os.chdir(case["folder"])
            sys.argv = ["trainfit", *case["argv"]]
            return {"code": fuzz_templates.command(case["argv"], real_plan=case["real_plan"])}
    except BaseException as error:  # noqa: BLE001 - the parent judges it
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    finally:
        sys.stdout, sys.stderr, sys.argv = before
        for stream in streams:
            stream.close()
        for fd, saved in zip((1, 2), restore, strict=True):
            os.dup2(saved, fd)
            os.close(saved)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir("/")


if __name__ == "__main__":
    main()
