"""Apply settings to this process, and take them back in the reverse order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from trainfit.records import Applied, Change, Plan, RuntimeSettings
from trainfit.runtime import environment, switches
from trainfit.runtime.tf32 import tf32

# A switch sets its value, leaves in the stack what puts the old one back, and tells what it reads
# now. The order matters: the allocator is settled before anything could start CUDA, and the choice
# of cuDNN's kernels by time gives way to determinism.
_SWITCHES: dict[str, Callable[[Any, ExitStack], Change]] = {
    "expandable_segments": environment.expandable_segments,
    "deterministic": switches.deterministic,
    "cudnn_benchmark": switches.cudnn_benchmark,
    "tf32": tf32,
    "num_threads": switches.num_threads,
    "attention": switches.attention,
    "seed": switches.seed,
    "empty_cache": switches.empty_cache,
}

# The records are plain data, so what restores the old state is kept here, the latest last. It
# belongs to the process, as the state does.
_in_force: list[tuple[Applied, ExitStack]] = []


def apply(settings: RuntimeSettings | Plan) -> Applied:
    """Set every switch that `settings` names, or none of them when one cannot be set.

    Read `Applied.changes` for what each switch reads now: a switch that could not be moved says
    why in its note. Pass the result to `undo` to put everything back.
    """
    wanted = settings.runtime if isinstance(settings, Plan) else settings
    with ExitStack() as restore:
        asked = {name: getattr(wanted, name) for name in _SWITCHES}
        asked["empty_cache"] = asked["empty_cache"] or None  # not to empty it asks for nothing
        done = Applied(
            changes=tuple(
                _SWITCHES[name](value, restore)
                for name, value in asked.items()
                if value is not None
            )
        )
        _in_force.append((done, restore.pop_all()))
    return done


def undo(done: Applied) -> None:
    """Put back all that `done` changed, and before it whatever was applied since.

    What was undone already, or was applied by another process, is left alone.
    """
    if not any(done is entry for entry, _ in _in_force):
        return
    latest = None
    while latest is not done:
        latest, restore = _in_force.pop()
        restore.close()


@contextmanager
def applied(settings: RuntimeSettings | Plan) -> Iterator[Applied]:
    """Apply `settings` for the length of a block, however the block ends."""
    done = apply(settings)
    try:
        yield done
    finally:
        undo(done)
