"""Writing a checkpoint while the run goes on.

Only one at a time: the next one, and the end of the run, wait for it. What went wrong is raised to
whoever waits.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import psutil
from torch import Tensor

from trainfit.engine.checkpoint import Contents

_ROOM = 1.5
"""Copies must leave this much more of the host's memory than they take."""


class Background:
    """A thread that does one thing."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Do `work` from now on, after what was begun before."""
        self.wait()

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised by wait
                self._error = error

        self._thread = Thread(target=run, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until it is done; raises what it raised."""
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def join(self) -> None:
        """Until it is done, however it ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def on_host(contents: Contents) -> Contents | None:
    """A copy in the host's memory, which the run does not change; None where there is no room."""
    tensors = [*contents.model.values(), *contents.optimizer.values(), *contents.task.values()]
    if sum(t.nbytes for t in tensors) * _ROOM > psutil.virtual_memory().available:
        return None

    def copied(tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", copy=True)

    return Contents(
        model={name: copied(tensor) for name, tensor in contents.model.items()},
        optimizer={name: copied(tensor) for name, tensor in contents.optimizer.items()},
        state=contents.state,
        task={name: copied(tensor) for name, tensor in contents.task.items()},
    )
