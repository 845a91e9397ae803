"""A run that torchrun starts again: how it is found, and what it is to do otherwise.

When a process dies, torchrun (--max-restarts) ends the others and starts the same command anew.
That must go on with the run, not begin another. So a run's folder says in launch.json which
torchrun agents started it and which process began it: another process of one of these agents is a
restart. otherwise.json is what a process that died left for the next one to do differently.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from trainfit import codec
from trainfit.engine import run_folder
from trainfit.engine.distributed import World, gather
from trainfit.errors import BadInput
from trainfit.files import read_text
from trainfit.records import Record

_LAUNCH = "launch.json"
_OTHERWISE = "otherwise.json"
_CLOCK = 60.0
"""Seconds by which two readings of when a process started may differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Process(Record):
    """A process of some machine, told from others that get its number."""

    host: str
    pid: int
    started: float

    def same(self, other: Process) -> bool:
        """Whether it is that process."""
        near = abs(self.started - other.started) < _CLOCK
        return near and (self.host, self.pid) == (other.host, other.pid)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch(Record):
    """Who started the ranks that are here now."""

    first: Process
    """The process of the first rank."""
    agents: tuple[Process, ...]
    """The torchrun processes of all machines; none without torchrun."""

    def note(self, run: Path) -> None:
        """Write it down in the folder of a run."""
        if self.agents:
            self.save(run / _LAUNCH, parents=False)

    def is_restart(self, run: Path) -> bool:
        """Whether another process of the same torchrun began this run."""
        try:
            before = Launch.load(run / _LAUNCH)
        except BadInput:
            return False
        ours = any(agent.same(other) for agent in self.agents for other in before.agents)
        return ours and not self.first.same(before.first)

    def find_run(self, root: Path, config: Any) -> Path | None:
        """The newest run under `root` with this configuration that is to be gone on with."""
        wanted = run_folder.written_config(config)
        found = [
            path.parent
            for path in root.glob(f"*/{_LAUNCH}")
            if self.is_restart(path.parent) and _text(path.parent / "config.json") == wanted
        ]
        return max(found, key=lambda run: (run / _LAUNCH).stat().st_mtime_ns, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Otherwise(Record):
    """What to do differently, where memory ran out and could not be recovered from in place."""

    rung: int = 0
    """Of the ladder of cuts: this one, or a finer one."""
    eval_batch_size: int | None = None
    """At most."""

    def leave(self, run: Path) -> None:
        """Have the run do so when it goes on."""
        self.save(run / _OTHERWISE, parents=False)


def _text(path: Path) -> str | None:
    try:
        return read_text(path)
    except (OSError, ValueError):
        return None


def find_launch(world: World) -> Launch:
    """Who started these ranks; all of them ask together."""
    own = [this_process()]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        own.append(_process(os.getppid()))
    said = [
        codec.loads(tuple[Process, ...], text)
        for text in gather(world, codec.dumps(own, indent=None))
    ]
    agents: list[Process] = []
    for _, *above in said:
        agents += [agent for agent in above if not any(agent.same(other) for other in agents)]
    return Launch(first=said[0][0], agents=tuple(agents))


def restarts_left() -> int:
    """How often torchrun would start this process again."""
    names = ("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT")
    most, done = (int(os.environ.get(name, "0")) for name in names)
    return most - done


def left_over(run: Path) -> Otherwise:
    """What an earlier process left to do differently."""
    path = run / _OTHERWISE
    return Otherwise.load(path) if path.is_file() else Otherwise()


def this_process() -> Process:
    """The one that asks."""
    return _process(os.getpid())


def _process(pid: int) -> Process:
    return Process(host=platform.node(), pid=pid, started=psutil.Process(pid).create_time())
