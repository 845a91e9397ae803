"""Everything the checks of the machine look at, gathered once."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from trainfit.doctor.activity import GpuActivity, process_name, watch_gpus
from trainfit.hardware.compiler import probe_compile
from trainfit.hardware.cpu import sysctl
from trainfit.hardware.detection import assemble
from trainfit.hardware.host import GIB, probe_host
from trainfit.hardware.nvml import load_nvml, probe_nvml
from trainfit.hardware.torch_probe import load_torch, probe_torch
from trainfit.hardware.visible import VARIABLE
from trainfit.records import HardwareProfile

_PIECE = 4 << 20
_PIECES = 8
_DISK_SECONDS = 1.0
"""A disk so slow that not all is written by then has said enough."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskRates:
    """What the disk under the current folder does now, in MB/s."""

    write: float
    read: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The machine, and what around it decides whether training goes well."""

    profile: HardwareProfile
    on_pci: int = 0
    """NVIDIA GPUs on the PCI bus, with or without a driver."""
    device_nodes: tuple[str, ...] = ()
    """Such as /dev/nvidia0: somebody means this process to have a GPU."""
    activity: tuple[GpuActivity, ...] = ()
    nccl: str | None = None
    """The version that torch was built with; None: without."""
    interfaces: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    open_files: int | None = None
    """How many files a process may have open; None where there is no such limit."""
    shm_free_gib: float | None = None
    temporary_free_gib: float | None = None
    disk: DiskRates | None = None
    """None where nothing can be written."""


def gather(folder: Path | None = None) -> Facts:
    """The facts of this machine, for runs in `folder`; reads, and changes nothing."""
    folder = folder or Path()
    nvml = probe_nvml(load_nvml, os.getpid())  # before torch could start CUDA here
    host = probe_host(folder)
    activity = watch_gpus(load_nvml, os.getpid(), name_of=process_name)
    profile = assemble(
        host=host,
        torch=probe_torch(load_torch, sysctl),
        nvml=nvml,
        visible_devices=os.environ.get(VARIABLE),
        compile=probe_compile(),
    )
    return Facts(
        profile=profile,
        on_pci=host.nvidia_devices,
        device_nodes=device_nodes(),
        activity=activity,
        nccl=nccl_version(load_torch) if profile.torch else None,
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        environment=dict(os.environ),
        open_files=_open_files(),
        shm_free_gib=_free(Path("/dev/shm")),
        temporary_free_gib=_free(Path(tempfile.gettempdir())),
        disk=disk_rates(folder),
    )


def device_nodes(root: Path = Path("/")) -> tuple[str, ...]:
    """The files through which a process reaches NVIDIA GPUs."""
    return tuple(sorted(f"/dev/{path.name}" for path in (root / "dev").glob("nvidia[0-9]*")))


def nccl_version(load: Callable[[], Any]) -> str | None:
    """The NCCL that torch brings; None where it has none."""
    torch = load()
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_nccl_available():
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def disk_rates(folder: Path, piece: int = _PIECE) -> DiskRates | None:
    """Write a file in pieces and read it without the page cache; it is gone afterwards.

    The fastest piece counts: what is slow while a neighbour writes is not a slow disk.
    """
    data = os.urandom(piece)
    write: list[float] = []
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".trainfit-disk-", buffering=0) as file:
            started = time.perf_counter()
            while len(write) < _PIECES and time.perf_counter() - started < _DISK_SECONDS:
                write.append(_timed(lambda: _write_through(file, data)))
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            read = [_timed(lambda: file.read(piece)) for _ in write]
    except OSError:
        return None
    return DiskRates(write=piece / 1e6 / min(write), read=piece / 1e6 / min(read))


def _write_through(file: IO[bytes], data: bytes) -> None:
    file.write(data)
    os.fsync(file.fileno())


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return max(time.perf_counter() - started, 1e-9)


def _open_files() -> int | None:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def _free(folder: Path) -> float | None:
    try:
        return shutil.disk_usage(folder).free / GIB
    except OSError:
        return None
