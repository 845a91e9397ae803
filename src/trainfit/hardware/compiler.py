"""What torch.compile needs: a C compiler, Python's headers and, for GPUs, Triton."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainfit.records import CompileSupport

_COMPILERS = ("cc", "gcc", "g++", "clang", "cl")


def probe_compile() -> CompileSupport:
    """What this machine and this Python have of it."""
    return CompileSupport(
        c_compiler=find_compiler(os.environ, shutil.which),
        python_headers=has_headers(Path(sysconfig.get_path("include"))),
        triton=triton_version(),
    )


def find_compiler(environment: Mapping[str, str], which: Callable[[str], str | None]) -> str | None:
    """The path of the C compiler that a build would take.

    CC and CXX decide where they are set, even when what they name is not there: the compilation
    would then fail, however many other compilers there are.
    """
    for variable in ("CC", "CXX"):
        if words := _words(environment.get(variable, "")):
            return which(words[0])
    return next((path for name in _COMPILERS if (path := which(name))), None)


def has_headers(include: Path) -> bool:
    """Whether Python.h, which compiled code includes, is in the folder."""
    return (include / "Python.h").is_file()


def triton_version(
    find: Callable[[str], object | None] = importlib.util.find_spec,
    version: Callable[[str], str] = importlib.metadata.version,
    providers: Callable[[], Mapping[str, Sequence[str]]] = (
        importlib.metadata.packages_distributions
    ),
) -> str | None:
    """Triton's version without importing it; None where it is not installed."""
    if find("triton") is None:
        return None
    try:
        return version("triton")
    except importlib.metadata.PackageNotFoundError:  # ROCm and Windows name the package otherwise
        packages = providers().get("triton", ())
        return version(packages[0]) if packages else None


def _words(command: str) -> list[str]:
    """A command split as a shell would; an unbalanced quote makes it one word."""
    try:
        return shlex.split(command)
    except ValueError:
        return [command]
