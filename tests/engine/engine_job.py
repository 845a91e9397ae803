"""`trainfit …` with a quick plan, as torchrun starts it: python engine_job.py [--kill N] WORDS.

With `--kill`, the second rank is killed in its N-th step the first time that it is started.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))


def main() -> int:
    from job_tiny import be_quick
    from trainfit.cli.main import run
    from trainfit.engine import loop

    words = sys.argv[1:]
    patch = pytest.MonkeyPatch()
    be_quick(patch)
    take, taken = loop.take_step, iter(range(10_000))

    def killed(*args: Any, **kwargs: Any) -> Any:
        if next(taken) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return take(*args, **kwargs)

    if words[0] == "--kill":
        at, words = int(words[1]), words[2:]
        if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            patch.setattr(loop, "take_step", killed)
    return run(words)


if __name__ == "__main__":
    sys.exit(main())
