from __future__ import annotations

import math
import tempfile
from pathlib import Path

import pytest
from hardware_fakes import GIB, tree
from hypothesis import given
from hypothesis import strategies as st

from trainfit.hardware.host import Limits, read_limits

V1_NO_LIMIT = "9223372036854771712\n"
V2 = "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "23 1 259:1 / / rw,relatime - ext4 /dev/root rw\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw shared:10 - cgroup cgroup rw,memory\n"
)


def v2(root: Path, group: str, files: dict[str, str], mounts: str = V2) -> Limits:
    """The limits of a process in `group`; files are relative to the mount point."""
    placed = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    proc = {"proc/self/cgroup": f"0::{group}\n", "proc/self/mountinfo": mounts}
    return read_limits(tree(root, {**proc, **placed}))


def v1(root: Path, group: str, files: dict[str, str], mounts: str = V1) -> Limits:
    placed = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    member = f"9:memory:{group}\n4:cpu,cpuacct:{group}\n1:name=systemd:{group}\n0::{group}\n"
    return read_limits(
        tree(root, {"proc/self/cgroup": member, "proc/self/mountinfo": mounts, **placed})
    )


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("400000 100000", 4), ("250000 100000", 3), ("50000 100000", 1), ("max 100000", None)],
)
def test_version_2_quota_is_rounded_up(tmp_path: Path, quota: str, cores: int | None) -> None:
    assert v2(tmp_path, "/", {"cpu.max": f"{quota}\n"}).cores == cores


@pytest.mark.parametrize(("quota", "cores"), [("150000", 2), ("-1", None), ("800000", 8)])
def test_version_1_quota(tmp_path: Path, quota: str, cores: int | None) -> None:
    folder = "cpu,cpuacct/docker/ab12"
    files = {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": "100000\n"}
    assert v1(tmp_path, "/docker/ab12", files).cores == cores


def test_the_smallest_limit_on_the_way_up_wins(tmp_path: Path) -> None:
    files = {
        "kubepods/cpu.max": "1600000 100000",
        "kubepods/memory.max": str(64 * GIB),
        "kubepods/memory.current": str(60 * GIB),
        "kubepods/pod7/cpu.max": "200000 100000",
        "kubepods/pod7/memory.max": str(16 * GIB),
        "kubepods/pod7/memory.current": str(2 * GIB),
        "kubepods/pod7/main/cpu.max": "max 100000",
        "kubepods/pod7/main/memory.max": "max",
    }
    limits = v2(tmp_path, "/kubepods/pod7/main", files)
    # 16 GiB is the limit, but the group above has only 4 GiB left for all of its pods.
    assert limits == Limits(cores=2, memory_bytes=16 * GIB, memory_left_bytes=4 * GIB)


def test_a_sibling_of_the_group_does_not_count(tmp_path: Path) -> None:
    files = {"a/cpu.max": "100000 100000", "b/cpu.max": "300000 100000"}
    assert v2(tmp_path, "/b", files).cores == 3


def test_reclaimable_file_cache_is_not_used_up(tmp_path: Path) -> None:
    files = {
        "memory.max": str(8 * GIB),
        "memory.current": str(7 * GIB),
        "memory.stat": f"anon {2 * GIB}\nfile {5 * GIB}\ninactive_file {5 * GIB}\n",
    }
    assert v2(tmp_path, "/", files).memory_left_bytes == 6 * GIB


def test_version_1_memory(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": V1_NO_LIMIT,
        "memory/job/memory.limit_in_bytes": f"{4 * GIB}\n",
        "memory/job/memory.usage_in_bytes": f"{3 * GIB}\n",
        "memory/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
    }
    limits = v1(tmp_path, "/job", files)
    assert limits == Limits(memory_bytes=4 * GIB, memory_left_bytes=2 * GIB)


def test_version_1_no_limit_is_no_limit(tmp_path: Path) -> None:
    files = {"memory/memory.limit_in_bytes": V1_NO_LIMIT, "memory/memory.usage_in_bytes": "5"}
    assert v1(tmp_path, "/", files) == Limits()


def test_docker_shows_only_its_own_part_of_the_tree(tmp_path: Path) -> None:
    mounts = V1.replace(" / /sys/fs", " /docker/ab12 /sys/fs")
    files = {
        "cpu,cpuacct/cpu.cfs_quota_us": "200000",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
        "memory/memory.limit_in_bytes": str(2 * GIB),
    }
    limits = v1(tmp_path, "/docker/ab12", files, mounts)
    assert (limits.cores, limits.memory_bytes) == (2, 2 * GIB)


def test_a_path_outside_the_mount_still_finds_the_mounts_own_limit(tmp_path: Path) -> None:
    mounts = V2.replace(" / /sys/fs", " /../../other /sys/fs")
    assert v2(tmp_path, "/user.slice", {"cpu.max": "300000 100000"}, mounts).cores == 3


def test_hybrid_machine_reads_version_1_where_the_controller_is(tmp_path: Path) -> None:
    mounts = V1 + V2.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified ")
    files = {
        "cpu,cpuacct/job/cpu.cfs_quota_us": "600000",
        "cpu,cpuacct/job/cpu.cfs_period_us": "100000",
        "unified/job/cgroup.procs": "1\n",
    }
    assert v1(tmp_path, "/job", files, mounts).cores == 6


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    assert read_limits(tmp_path) == Limits()


PERIODS = st.integers(1_000, 1_000_000)
QUOTAS = st.none() | st.integers(1_000, 64_000_000)


@given(st.lists(st.tuples(QUOTAS, PERIODS), min_size=1, max_size=4))
def test_cores_are_the_smallest_quota_rounded_up(levels: list[tuple[int | None, int]]) -> None:
    groups = ["group/" * depth for depth in range(1, len(levels) + 1)]
    files = {
        f"{group}cpu.max": f"{quota or 'max'} {period}"
        for group, (quota, period) in zip(groups, levels, strict=True)
    }
    with tempfile.TemporaryDirectory() as folder:
        cores = v2(Path(folder), f"/{groups[-1]}", files).cores
    allowed = [quota / period for quota, period in levels if quota is not None]
    if not allowed:
        assert cores is None
    else:
        assert cores is not None
        assert cores >= 1
        assert cores == 1 or cores - 1 < min(allowed) <= cores
        assert cores <= max(1, math.ceil(min(allowed)))


SIZES = st.integers(0, 1 << 45)


@given(limit=SIZES, used=SIZES, cache=SIZES)
def test_what_is_left_lies_between_nothing_and_the_limit(limit: int, used: int, cache: int) -> None:
    files = {
        "memory.max": str(limit),
        "memory.current": str(used),
        "memory.stat": f"inactive_file {cache}\n",
    }
    with tempfile.TemporaryDirectory() as folder:
        limits = v2(Path(folder), "/", files)
    assert limits.memory_bytes == limit
    assert limits.memory_left_bytes is not None
    assert 0 <= limits.memory_left_bytes <= limit
    if cache <= used <= limit:
        assert limit - used <= limits.memory_left_bytes == limit - (used - cache)
