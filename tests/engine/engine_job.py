"""`trainfit …` with a quick plan, as torchrun starts it: python engine_job.py [--kill N] WORDS.

With `--kill`, the second rank is killed in its N-th step the first time that it is started, and
the first one takes its time to leave: torchrun has asked it to end before it says why it does.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
LATE = 2.0
"""Seconds; torchrun looks after its ranks ten times in one."""


def main() -> int:
    from job_tiny import be_quick
    from trainfit.cli.main import run
    from trainfit.engine import loop
    from trainfit.engine.distributed import Watchdog

    words = sys.argv[1:]
    patch = pytest.MonkeyPatch()
    be_quick(patch)
    take, taken, close = loop.take_step, iter(range(10_000)), Watchdog.close

    def killed(*args: Any, **kwargs: Any) -> Any:
        if next(taken) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return take(*args, **kwargs)

    def close_late(watch: Watchdog, *, well: bool) -> None:
        time.sleep(0 if well else LATE)
        close(watch, well=well)

    if words[0] == "--kill":
        at, words = int(words[1]), words[2:]
        patch.setattr(Watchdog, "close", close_late)
        if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            patch.setattr(loop, "take_step", killed)
    return run(words)


if __name__ == "__main__":
    sys.exit(main())
