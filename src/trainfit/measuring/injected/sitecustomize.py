"""Run by Python when it starts under `trainfit verify -- COMMAND`, before the program's first line.

It waits for torch's optimizers to be imported and observes them. The folder of this file leaves
the path again, and a sitecustomize that it has hidden is run. Only the standard library is used.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

_FOLDER = os.environ.get("TRAINFIT_OBSERVE", "")
_OPTIMIZERS = "torch.optim.optimizer"


class _Waiting:
    """Import hook that observes torch's optimizers once they are imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _OPTIMIZERS:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        loader: Any = spec and spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                _observe(module)

            loader.exec_module = exec_module
        return spec


def _observe(module: Any) -> None:
    try:
        from trainfit.measuring.observe import observe_process
    except ImportError:  # another Python than trainfit's: the program runs as it is
        return
    observe_process(Path(_FOLDER) / f"{os.getpid()}.json", module)


def _run_hidden() -> None:
    """Run the sitecustomize that this file hides."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != here]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if _FOLDER:
    sys.meta_path.insert(0, _Waiting())
_run_hidden()
