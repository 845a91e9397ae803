from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path

import psutil
import pytest
from hardware_fakes import GIB, tree
from hypothesis import given
from hypothesis import strategies as st

from trainfit.core.records import Cpu
from trainfit.hardware.host import (
    Limits,
    free_disk,
    memory_allowed,
    nvidia_on_pci,
    probe_cpu,
    probe_host,
    read_limits,
)

XEON = (
    "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) Platinum 8481C\n"
    "flags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16\n\n"
    "processor\t: 1\nmodel name\t: Intel(R) Xeon(R) Platinum 8481C\nflags\t\t: fpu\n"
)
SKYLAKE = "model name\t: Intel(R) Xeon(R) CPU @ 2.00GHz\nflags\t\t: fpu avx2 avx512f avx512bw\n"
GRAVITON3 = "processor\t: 0\nFeatures\t: fp asimd sve i8mm bf16\nCPU part\t: 0xd40\n"
GRAVITON2 = "processor\t: 0\nFeatures\t: fp asimd asimddp\nCPU part\t: 0xd0c\n"


def cpu(cpuinfo: str = "", sysctl: dict[str, str] | None = None, **given: int | None) -> Cpu:
    values: dict[str, int | None] = {"affinity": 8, "host_cores": 8, "quota": None, **given}
    return probe_cpu(
        cpuinfo,
        affinity=values["affinity"] or 0,
        host_cores=values["host_cores"] or 0,
        quota=values["quota"],
        sysctl=(sysctl or {}).get,
    )


@pytest.fixture(autouse=True)
def _no_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)


@pytest.mark.parametrize(
    ("cpuinfo", "bf16"), [(XEON, True), (SKYLAKE, False), (GRAVITON3, True), (GRAVITON2, False)]
)
def test_native_bf16_of_processors(cpuinfo: str, bf16: bool) -> None:
    assert cpu(cpuinfo).native_bf16 is bf16


@pytest.mark.parametrize(
    ("cap", "bf16"),
    [("AVX2", False), ("avx512_core", False), ("AVX512_CORE_BF16", True), ("DEFAULT", True)],
)
def test_onednn_capped_below_bf16_does_not_multiply_it_natively(
    cap: str, bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", cap)
    assert cpu(XEON).native_bf16 is bf16


def test_names() -> None:
    assert cpu(XEON).name == "Intel(R) Xeon(R) Platinum 8481C"
    assert cpu(GRAVITON3).name in {platform.processor(), platform.machine()}


def test_apple_chip() -> None:
    found = cpu("", {"machdep.cpu.brand_string": "Apple M3 Max", "hw.optional.arm.FEAT_BF16": "1"})
    assert (found.name, found.native_bf16) == ("Apple M3 Max", True)


@pytest.mark.parametrize(
    ("affinity", "quota", "cores"), [(8, None, 8), (8, 3, 3), (2, 3, 2), (64, 1, 1)]
)
def test_cores_are_what_affinity_and_quota_both_allow(
    affinity: int, quota: int | None, cores: int
) -> None:
    found = cpu(XEON, affinity=affinity, host_cores=64, quota=quota)
    assert (found.cores, found.host_cores) == (cores, 64)


SIZES = st.integers(0, 1 << 45)


@given(total=SIZES, available=SIZES, limit=st.none() | SIZES, left=st.none() | SIZES)
def test_memory_is_bounded_by_host_and_cgroup(
    total: int, available: int, limit: int | None, left: int | None
) -> None:
    allowed, free = memory_allowed(
        Limits(memory_bytes=limit, memory_left_bytes=left), total, available
    )
    assert allowed == min(n for n in (total, limit) if n is not None)
    assert free == min(n for n in (available, left) if n is not None)


def test_free_disk_of_a_folder_still_to_be_made(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free / GIB
    assert free_disk(tmp_path / "runs" / "first") == pytest.approx(free, rel=0.05)


def test_free_disk_of_a_relative_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    free = shutil.disk_usage(tmp_path).free / GIB
    assert free_disk(Path("no/such")) == pytest.approx(free, rel=0.05)


def test_nvidia_gpus_on_the_pci_bus(tmp_path: Path) -> None:
    bus = "sys/bus/pci/devices"
    tree(
        tmp_path,
        {
            f"{bus}/0000:65:00.0/vendor": "0x10de\n",
            f"{bus}/0000:65:00.0/class": "0x030200\n",
            f"{bus}/0000:66:00.0/vendor": "0x10de\n",
            f"{bus}/0000:66:00.0/class": "0x030000\n",
            f"{bus}/0000:66:00.1/vendor": "0x10de\n",  # its sound device
            f"{bus}/0000:66:00.1/class": "0x040300\n",
            f"{bus}/0000:00:02.0/vendor": "0x8086\n",
            f"{bus}/0000:00:02.0/class": "0x030000\n",
            f"{bus}/0000:00:03.0/vendor": "0x10de\n",  # its class cannot be read
        },
    )
    assert nvidia_on_pci(tmp_path) == 2


def test_an_empty_root_is_a_machine_without_proc(tmp_path: Path) -> None:
    host = probe_host(tmp_path, root=tmp_path)
    assert host.shm_gib is None
    assert host.nvidia_devices == 0
    assert host.cpu.name


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity on this system")
def test_this_machine_agrees_with_psutil() -> None:
    host, limits = probe_host(Path()), read_limits()
    affinity = len(os.sched_getaffinity(0))
    assert host.affinity == affinity == len(psutil.Process().cpu_affinity() or [])
    assert host.cpu.cores == min(affinity, limits.cores or affinity)
    assert host.cpu.host_cores == psutil.cpu_count()
    total = psutil.virtual_memory().total / GIB
    assert host.memory_gib <= total
    if limits.memory_bytes is None:
        assert host.memory_gib == total
    assert 0 < host.memory_available_gib <= host.memory_gib
    assert host.python == ".".join(str(part) for part in sys.version_info[:3])


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm on this system")
def test_shared_memory_of_this_machine() -> None:
    stat = os.statvfs("/dev/shm")
    assert probe_host(Path()).shm_gib == pytest.approx(stat.f_blocks * stat.f_frsize / GIB)
