"""Libraries that only a part of trainfit needs: is one there, and the line where it is not."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
import warnings
from functools import cache, partial
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainfit.core.errors import BadInput, TrainfitWarning

PIP_NAMES = {
    "alembic": "'trainfit[hpo]'",
    "bitsandbytes": "'trainfit[quantization]'",
    "datasets": "'trainfit[data]'",
    "hydra": "hydra-core",
    "lightning": "'trainfit[lightning]'",
    "omegaconf": "hydra-core",
    "onnx": "'trainfit[onnx]'",
    "onnxruntime": "'trainfit[onnx]'",
    "onnxscript": "'trainfit[onnx]'",
    "optuna": "'trainfit[hpo]'",
    "peft": "peft",
    "psycopg": "'trainfit[postgres]'",
    "pyarrow": "pyarrow",
    "scipy": "scipy",
    "sentencepiece": "sentencepiece",
    "sklearn": "scikit-learn",
    "sqlalchemy": "'trainfit[hpo]'",
}
"""Name for pip install by the name to import."""

HPO = ("optuna", "sqlalchemy")
"""Libraries of the extra `hpo`."""

ONNX = ("onnx", "onnxscript", "onnxruntime")
"""Libraries of the extra `onnx`."""

NEWEST_TESTED = {"torch": "2.13", "transformers": "5.22"}
"""Newest minor version of each library that docs/compat.md lists; a newer one gets a warning."""


_DEFERRED = (
    ("transformers.loss.loss_utils", "scipy.optimize", "linear_sum_assignment"),
    ("transformers.generation.candidate_generator", "sklearn.metrics", "roc_curve"),
)
"""Modules of transformers, and the library that they import for one function."""
_UNUSED = ("scipy", "sklearn", "bitsandbytes")


def has(module: str) -> bool:
    """Tell if a library is installed; it is not imported."""
    return find_spec(module) is not None


def need(what: str, *modules: str) -> None:
    """Raise BadInput with the pip command where `what` needs a library that is not installed."""
    for module in modules:
        if not has(module):
            raise missing(what, module)


def search_path() -> str:
    """PYTHONPATH of a child, so that it finds the same modules as this process.

    Children get -P, or they would look in the current folder first: it may be anyone's, and hold
    a torch.py.
    """
    return os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)


def safe_flags() -> tuple[str, ...]:
    """Flags of a child that gets no PYTHONPATH: -P, unless this process looks here itself."""
    return () if {"", str(Path.cwd())} & set(sys.path) else ("-P",)


def end_with_parent() -> None:
    """End this process, a child, within a second of its parent."""
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=look, name="parent", daemon=True).start()


@cache
def version_of(name: str) -> str | None:
    """Version of an installed distribution; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def missing(what: str, module: str) -> BadInput:
    """Word the error for a library that is not installed."""
    return BadInput(f"{what} needs {module}", f"pip install {PIP_NAMES.get(module, module)}")


def import_generation() -> None:
    """Import transformers' code for losses and generation, which all of its models do.

    It imports scipy and scikit-learn, half of the time, for a function of object detection and one
    of assisted generation: here the first call does.
    """
    for name, library, function in _DEFERRED:
        utils: Any = import_module("transformers.utils")
        check = f"is_{library.partition('.')[0]}_available"
        available = getattr(utils, check, None)
        if name in sys.modules or library in sys.modules or available is None or not available():
            continue
        before = set(sys.modules)

        def unavailable() -> bool:
            return False

        setattr(utils, check, unavailable)
        try:
            import_module(name)
        finally:
            setattr(utils, check, available)
        for module in map(sys.modules.get, set(sys.modules) - before):
            if getattr(module, check, None) is unavailable:
                setattr(module, check, available)
                setattr(module, function, partial(_call, library, function))


def _call(library: str, function: str, *args: Any, **options: Any) -> Any:
    return getattr(import_module(library), function)(*args, **options)


def hide_unused() -> None:
    """Hide libraries that transformers and peft import where they are installed, and do not use.

    For processes that run no code but trainfit's. bitsandbytes names a CUDA device while it is
    imported.
    """
    for name in _UNUSED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def unhide() -> None:
    """Show hidden libraries again: a step of the user's own may need them."""
    for name in _UNUSED:
        if sys.modules.get(name, sys) is None:
            del sys.modules[name]


def import_peft() -> Any:
    """Import peft, after bitsandbytes, which peft would import with a request to the hub."""
    if has("bitsandbytes"):
        import_bitsandbytes()
    return import_module("peft")


def import_bitsandbytes() -> Any:
    """Import bitsandbytes; on a CPU it would fetch a kernel from the hub, and warn without one."""
    before = sys.modules.get("kernels", ...)
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    sys.modules["kernels"] = None  # type: ignore[assignment]
    logger.setLevel(logging.ERROR)
    try:
        return import_module("bitsandbytes")
    finally:
        logger.setLevel(level)
        del sys.modules["kernels"]
        if before is not ...:
            sys.modules["kernels"] = before


@cache
def warn_of_newer() -> None:
    """Warn, once in a process, of libraries that are newer than any that was tested."""
    for name, tested in NEWEST_TESTED.items():
        if (found := version_of(name)) is not None and _minor(found) > _minor(tested):
            warnings.warn(
                f"{name} {found} is newer than any that trainfit was tested with ({tested}); "
                f"if something is odd, pip install '{name}=={tested}.*'",
                TrainfitWarning,
                stacklevel=3,
            )


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
