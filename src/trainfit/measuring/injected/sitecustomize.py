"""Run by Python when it starts under `trainfit verify` or `trainfit run`, before the program.

It waits for modules of other libraries to be imported: torch's optimizers are observed, and
trainers are made faster. The folder of this file leaves the path again, and a sitecustomize that it
has hidden is run. Only the standard library is used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

_OBSERVE = os.environ.get("TRAINFIT_OBSERVE", "")
_SPEED_UP = os.environ.get("TRAINFIT_SPEED_UP", "")
_OPTIMIZERS = "torch.optim.optimizer"
_TRAINERS = (
    "transformers.trainer",
    "accelerate.accelerator",
    "lightning.pytorch.trainer.trainer",
    "pytorch_lightning.trainer.trainer",
)


class _Waiting:
    """Import hook that calls a function with each awaited module once it is imported."""

    def __init__(self, awaited: dict[str, Callable[[Any], None]]) -> None:
        self.awaited = awaited

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self.awaited:
            return None
        call = self.awaited.pop(name)
        if not self.awaited:
            sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        loader: Any = spec and spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                call(module)

            loader.exec_module = exec_module
        return spec


def _observe(module: Any) -> None:
    try:
        from trainfit.measuring.observe import observe_process
    except ImportError:  # another Python than trainfit's: the program runs as it is
        return
    observe_process(Path(_OBSERVE) / f"{os.getpid()}.json", module)


def _speed_up(module: Any) -> None:
    try:
        from trainfit.integrations.script_hooks import hook
    except ImportError:
        return
    hook(module, Path(_SPEED_UP))


def _run_hidden() -> None:
    """Run the sitecustomize that this file hides."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != here]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


_awaited: dict[str, Callable[[Any], None]] = {}
if _OBSERVE:
    _awaited[_OPTIMIZERS] = _observe
if _SPEED_UP:
    _awaited |= dict.fromkeys(_TRAINERS, _speed_up)
    with suppress(OSError):
        Path(_SPEED_UP, "began").touch()
if _awaited:
    sys.meta_path.insert(0, _Waiting(_awaited))
_run_hidden()
