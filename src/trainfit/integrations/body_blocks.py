"""Repeated blocks of a body, compiled for any number of tokens, while a pass of it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from trainfit.runtime import compile_blocks, forget_if_full, repeated_blocks

_LOG = logging.getLogger("trainfit")


@dataclass(eq=False, repr=False)
class BodyBlocks:
    """Compiled calls of a body's blocks, which are its own calls again after each pass.

    So evaluation, copies and whatever looks at the model see nothing of them.
    """

    backend: str | Callable[..., Any] = "inductor"
    off: bool = False
    """True while blocks are to run as they are."""
    obstacle: str | None = None
    """Reason why nothing is compiled from here on."""
    _calls: dict[nn.Module, Any] = field(default_factory=dict)

    def __reduce__(self) -> Any:
        """Copy and pickle as an empty one: a copy has blocks of its own."""
        return BodyBlocks, (self.backend, self.off)

    @property
    def on(self) -> bool:
        return not self.off and self.obstacle is None

    @contextmanager
    def inside(self, body: nn.Module) -> Iterator[None]:
        """Run the blocks of a body compiled inside of a `with`."""
        if not self._calls:
            self._calls = self._compiled(body)
        for block, call in self._calls.items():
            block._compiled_call_impl = call
        try:
            yield
        finally:
            for block in self._calls:
                block._compiled_call_impl = None

    def _compiled(self, body: nn.Module) -> dict[nn.Module, Any]:
        """Prepare the calls; torch compiles at the first one."""
        blocks = repeated_blocks(body)
        if not blocks:
            self.stop("it has no repeated blocks")
            return {}
        forget_if_full()
        compile_blocks(body, dynamic=True, backend=self.backend, failed=self.stop)
        return {block: block._compiled_call_impl for block in blocks}

    def stop(self, why: str) -> None:
        """Compile nothing from here on; say why."""
        self.obstacle = why
        _LOG.warning("compile: blocks run as they are from here on: %s", why)
