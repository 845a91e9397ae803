"""Faults of signs.yaml, checks that find them, and the facts of a machine that they look at."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, Generic, Literal, TypeVar

from trainfit.core.files import read_own_yaml
from trainfit.core.records import HardwareProfile, Record
from trainfit.hardware.access import load_torch
from trainfit.hardware.detection import probe_machine
from trainfit.hardware.host import GIB
from trainfit.hardware.nvml import load_nvml, probe_nvml

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
"""Worst first. An info is worth knowing, and nothing is wrong."""
BUSY = 80
"""Percent of the time that a GPU should work, and of its memory that training should use."""
IDLE = 70
"""Percent of the time below which the guides call for a change."""
GUIDE_MFU = 15.0
"""Percent: the tuning guide calls an MFU good from here on in most setups."""

F = TypeVar("F")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding(Record):
    """A fault that was found: title, evidence, reason and steps."""

    id: str
    severity: Severity
    title: str
    evidence: str
    why: str
    mend: str
    """The steps in the order to try them, numbered where there are several."""

    def __repr__(self) -> str:
        """Title and steps for a terminal."""
        return f"{self.severity}: {self.title}\n{self.mend}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Evidence of a fault; a field that is None takes the value of the fault in signs.yaml."""

    evidence: str
    severity: Severity | None = None
    title: str | None = None
    fix: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Title, reason and steps of a fault, whether or not it was found."""

    id: str
    severity: Severity
    title: str
    why: str
    fix: tuple[str, ...]

    def finding(self, seen: Seen) -> Finding:
        """Combine the fault with the evidence."""
        return Finding(
            id=self.id,
            severity=seen.severity or self.severity,
            title=seen.title or self.title,
            evidence=seen.evidence,
            why=self.why,
            mend=numbered(self.fix if seen.fix is None else seen.fix),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Check(Generic[F]):
    """A fault, and the pure function over facts that finds it."""

    fault: Fault
    look: Callable[[F], Iterable[Seen]]

    def __call__(self, facts: F) -> Iterator[Finding]:
        """Yield a finding for each piece of evidence in the facts."""
        return (self.fault.finding(seen) for seen in self.look(facts))


@cache
def tables() -> Mapping[str, Any]:
    """The contents of signs.yaml."""
    found: Mapping[str, Any] = read_own_yaml(Path(__file__).with_name("signs.yaml"))
    return found


def fault(row: Mapping[str, Any]) -> Fault:
    """The fault of a row of signs.yaml."""
    names = ("id", "severity", "title", "why")
    return Fault(fix=tuple(_flat(row["fix"])), **{name: row[name] for name in names})


def steps(name: str) -> tuple[str, ...]:
    """A shared step, or shared list of steps, of signs.yaml."""
    return tuple(_flat([tables()["shared"][name]]))


def _flat(steps: Iterable[Any]) -> Iterator[str]:
    for step in steps:
        if isinstance(step, str):
            yield step
        else:
            yield from _flat(step)


def checks(
    section: str,
    looks: Mapping[str, Any],
    otherwise: Callable[[Fault, F], Iterable[Seen]] | None = None,
) -> tuple[Check[F], ...]:
    """One check for each fault of a section: the function of its name, or else `otherwise`."""
    made = []
    for one in map(fault, tables()[section]):
        look = looks.get(one.id)
        if look is None:
            assert otherwise is not None, f"no function looks for {one.id}"
            look = lambda facts, one=one: otherwise(one, facts)  # noqa: E731  it has no docstring
        made.append(Check(fault=one, look=look))
    return tuple(made)


def numbered(steps: Sequence[str]) -> str:
    """The steps as one text."""
    if len(steps) == 1:
        return steps[0]
    return "\n".join(f"{number}. {step}" for number, step in enumerate(steps, 1))


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort by severity, worst first; findings of one severity keep their order."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def is_healthy(findings: Iterable[Finding]) -> bool:
    """True where nothing is wrong."""
    return all(finding.severity == "info" for finding in findings)


SAMPLES = 8
SECONDS = 1.0
"""Seconds that a GPU is watched: a single look between two steps says nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuProcess:
    """A process that has a context on a GPU."""

    pid: int
    name: str | None
    """None for a process outside this container."""
    memory_gib: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuActivity:
    """A GPU by its number in nvidia-smi, with the work of other processes on it."""

    index: int
    name: str
    memory_gib: float
    used_gib: float
    processes: tuple[GpuProcess, ...] = ()
    utilisation: tuple[int, ...] = ()
    """Percent, sampled for a second; empty where no process is on the GPU."""


def watch_gpus(
    load: Callable[[], Any],
    pid: int,
    *,
    name_of: Callable[[int], str | None],
    sleep: Callable[[float], object] = time.sleep,
) -> tuple[GpuActivity, ...]:
    """Watch other processes on each GPU; empty where NVML or a GPU does not answer."""
    report = probe_nvml(load, pid)
    if report.error:
        return ()
    working = [
        tuple(
            GpuProcess(pid=process, name=name_of(process), memory_gib=gib)
            for process, gib in gpu.processes
            if process != pid
        )
        for gpu in report.gpus
    ]
    shares: list[list[int]] = [[] for _ in report.gpus]
    for _ in range(SAMPLES if any(working) else 0):
        sleep(SECONDS / SAMPLES)
        for taken, gpu in zip(shares, probe_nvml(load, pid).gpus, strict=False):
            if (share := gpu.state.utilisation_percent) is not None:
                taken.append(share)
    return tuple(
        GpuActivity(
            index=index,
            name=gpu.name,
            memory_gib=gpu.memory_gib or 0.0,
            used_gib=gpu.state.memory_used_gib or 0.0,
            processes=processes,
            utilisation=tuple(taken) if processes else (),
        )
        for index, (gpu, processes, taken) in enumerate(
            zip(report.gpus, working, shares, strict=True)
        )
    )


def process_name(pid: int) -> str | None:
    """The name of a process of this machine."""
    import psutil

    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return None


_PIECE = 4 << 20
_PIECES = 8
_DISK_SECONDS = 1.0
"""Seconds after which the test of a slow disk ends, whatever was written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskRates:
    """Speed of the disk under the current folder, in MB/s."""

    write: float
    read: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineFacts:
    """The machine and its surroundings, as far as they decide how training goes."""

    profile: HardwareProfile
    on_pci: int = 0
    """NVIDIA GPUs on the PCI bus, with or without a driver."""
    device_nodes: tuple[str, ...] = ()
    """Device files such as /dev/nvidia0: this process is meant to have a GPU."""
    activity: tuple[GpuActivity, ...] = ()
    nccl: str | None = None
    """Version that torch was built with; None without NCCL."""
    interfaces: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    open_files: int | None = None
    """Number of files a process may have open; None where there is no limit."""
    shm_free_gib: float | None = None
    temporary_free_gib: float | None = None
    disk: DiskRates | None = None
    """None where this folder cannot be written to."""


def gather(folder: Path | None = None) -> MachineFacts:
    """Gather the facts of this machine, for runs in `folder`; changes nothing."""
    folder = folder or Path()
    profile, host = probe_machine(folder)
    return MachineFacts(
        profile=profile,
        on_pci=host.nvidia_devices,
        device_nodes=device_nodes(),
        activity=watch_gpus(load_nvml, os.getpid(), name_of=process_name),
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
    """Time a file that is written in pieces, read back without the page cache, and removed.

    The fastest piece counts: a disk that another process uses is not a slow disk.
    """
    data = os.urandom(piece)
    write: list[float] = []
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".trainfit-disk-", buffering=0) as file:
            started = time.perf_counter()
            while len(write) < _PIECES and time.perf_counter() - started < _DISK_SECONDS:
                write.append(_timed(partial(_write_through, file, data)))
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
