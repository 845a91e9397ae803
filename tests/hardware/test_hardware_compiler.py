from __future__ import annotations

import sysconfig
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from trainfit.hardware.host import find_compiler, has_headers, probe_compile, triton_version

INSTALLED = {"gcc": "/usr/bin/gcc", "clang": "/usr/bin/clang", "ccache": "/usr/bin/ccache"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, "/usr/bin/gcc"),
        ({"CC": "clang"}, "/usr/bin/clang"),
        ({"CC": "ccache gcc -m64"}, "/usr/bin/ccache"),
        ({"CXX": "clang"}, "/usr/bin/clang"),
        ({"CC": ""}, "/usr/bin/gcc"),
        ({"CC": "icc"}, None),  # torch.compile would run it and fail
        ({"CC": '"gcc'}, None),
    ],
)
def test_compiler(environment: dict[str, str], found: str | None) -> None:
    assert find_compiler(environment, INSTALLED.get) == found


def test_no_compiler() -> None:
    assert find_compiler({}, lambda name: None) is None


def test_headers(tmp_path: Path) -> None:
    assert not has_headers(tmp_path)
    (tmp_path / "Python.h").write_text("")
    assert has_headers(tmp_path)


def version_of(packages: dict[str, str], name: str) -> str:
    if name not in packages:
        raise PackageNotFoundError(name)
    return packages[name]


@pytest.mark.parametrize(
    ("packages", "providers", "version"),
    [
        ({"triton": "3.6.0"}, {}, "3.6.0"),
        ({"triton-rocm": "3.5.1"}, {"triton": ["triton-rocm"]}, "3.5.1"),
        ({}, {}, None),  # a folder of that name, and no package
    ],
)
def test_triton(
    packages: dict[str, str], providers: dict[str, list[str]], version: str | None
) -> None:
    found = triton_version(
        lambda name: object(), lambda name: version_of(packages, name), lambda: providers
    )
    assert found == version


def test_no_triton() -> None:
    assert triton_version(lambda name: None) is None


def test_this_machine() -> None:
    found = probe_compile()
    assert found.python_headers == (Path(sysconfig.get_path("include")) / "Python.h").exists()
    assert found.c_compiler is None or Path(found.c_compiler).is_file()
