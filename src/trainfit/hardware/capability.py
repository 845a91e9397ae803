"""What an NVIDIA compute capability means: the native dtypes, the kernels that run, the wheels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

Capability = tuple[int, int]

_EMBEDDED: frozenset[Capability] = frozenset({(5, 3), (6, 2), (7, 2), (8, 7), (10, 1)})
"""Jetson and its kin: the binary promise within a major version leaves them out."""

_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Dtypes:
    """The dtypes that the matrix units of a GPU take."""

    bf16: bool = False
    tf32: bool = False
    fp16: bool = False
    fp8: bool = False


def parse_capability(text: str) -> Capability:
    """The two numbers of a compute capability such as 8.6."""
    major, minor = text.split(".")
    return int(major), int(minor)


def native_dtypes(capability: Capability) -> Dtypes:
    """The native dtypes of an NVIDIA GPU.

    torch.cuda.is_bf16_supported() is not asked: it says True for a T4, which emulates bfloat16.
    """
    return Dtypes(
        bf16=capability >= (8, 0),
        tf32=capability >= (8, 0),
        fp16=capability >= (7, 0),
        fp8=capability >= (8, 9),
    )


def has_kernels(capability: Capability, architectures: Sequence[str]) -> bool:
    """Whether a torch built for `architectures` (torch.cuda.get_arch_list()) runs on the GPU.

    Machine code (sm_86) runs on the same major version from its minor version up; PTX
    (compute_90) is compiled for any newer GPU by the driver; an `a` ties either to one GPU.
    """
    return not architectures or any(_runs_on(capability, name) for name in architectures)


def _runs_on(capability: Capability, architecture: str) -> bool:
    parts = _ARCHITECTURE.fullmatch(architecture)
    if parts is None:
        return False
    kind, major, minor, suffix = parts.groups()
    built_for = int(major), int(minor)
    if suffix == "a" or (kind == "sm" and {capability, built_for} & _EMBEDDED):
        return capability == built_for
    same_major = capability[0] == built_for[0]
    return capability >= built_for and (same_major or (kind == "compute" and suffix == ""))


def cuda_wheel(capability: Capability | None, driver_cuda: str | None) -> str | None:
    """The CUDA variant of torch's wheels for a GPU and its driver, or None for too old a driver.

    cu126 is the last with kernels below 7.5 and runs on any driver of CUDA 12; what came after
    Hopper needs a newer one.
    """
    driver = parse_capability(driver_cuda) if driver_cuda else (13, 0)
    if driver < (12, 0):
        return None
    if capability is not None and capability < (7, 5):
        return "cu126"
    if driver >= (13, 0):
        return "cu130"
    return "cu126" if capability is None or capability < (10, 0) else None
