"""The replay against recordings of the real allocator, closed formulas and invariants."""

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.core.errors import BadInput
from trainfit.planning.estimator.allocator import CachingAllocator, Event, replay

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
FOLDER = Path(__file__).parent / "allocator_traces"
TRACES = (
    "transformer",
    "fuzz",
    "lengths",
    "lengths_capped",
    "fuzz_capped",
)
"""Recorded by benchmarks/record_allocator.py, with torch 2.11 on an H200."""


@cache
def recorded(name: str) -> dict[str, Any]:
    return json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))


def log_of(trace: dict[str, Any]) -> list[Event]:
    """The events as replay takes them; a request that ran out of memory is the last one."""
    log = []
    for kind, first, *rest in trace["events"]:
        if kind == "alloc":
            log.append((first, rest[0]))
        elif kind == "free":
            log.append((first, -1))
        elif kind == "oom":
            log.append((-1, first))
    return log


def segments_of(trace: dict[str, Any]) -> list[tuple[int, int]]:
    """Address and size of each segment, in the order they were made."""
    return [(row[1] * 512, row[2]) for row in trace["events"] if row[0] == "segment"]


def segments_held(allocator: CachingAllocator) -> int:
    return len(allocator.small.segments) + len(allocator.large.segments)


def totals(allocator: CachingAllocator) -> tuple[Any, ...]:
    reserved = allocator.reserved, allocator.peak_reserved, allocator.device_requests
    return allocator.allocated, allocator.peak_allocated, *reserved, allocator.oom


# ── against the real allocator ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", TRACES)
def test_the_totals_of_a_recorded_run_are_exact(name):
    trace = recorded(name)
    log, segments = log_of(trace), segments_of(trace)
    addresses = [address for address, _ in segments]
    result = replay(log, trace["capacity"], addresses)
    assert result.peak_allocated == trace["peak_allocated"]
    assert result.peak_reserved == trace["peak_reserved"]
    assert segments_held(result) == trace["segments"]
    assert result.retries == trace["retries"]
    assert result.device_requests == [size for _, size in segments]
    assert result.fits == (trace["ooms"] == 0)
    assert result.fits or result.oom == (len(log) - 1, log[-1][1])


@pytest.mark.parametrize("name", TRACES)
def test_every_block_of_a_recorded_run_lies_where_it_lay(name):
    trace = recorded(name)
    addresses = [address for address, _ in segments_of(trace)]
    allocator = CachingAllocator(trace["capacity"], addresses)
    live, reserved, shifts = {}, 0, set()
    for kind, first, *rest in trace["events"]:
        if kind == "free":
            allocator.free(live.pop(first))
        elif kind.startswith("segment"):
            reserved += rest[0] if kind == "segment" else -rest[0]
        elif kind == "alloc":
            live[first] = allocator.malloc(rest[0])
            assert allocator.reserved == reserved
            shifts.add(rest[1] * 512 - live[first][0])
    assert shifts == {0}


def test_the_recordings_reach_every_rule():
    for name in ("lengths_capped", "fuzz_capped"):
        assert recorded(name)["retries"] > 1
        assert recorded(name)["ooms"] == 1
    sizes = {size for name in TRACES for _, size in segments_of(recorded(name))}
    assert {2 * MIB, 20 * MIB} < sizes
    assert max(sizes) > 256 * MIB


@pytest.mark.parametrize("name", ["transformer", "lengths", "fuzz"])
def test_without_the_drivers_addresses_the_peaks_hardly_move(name):
    trace = recorded(name)
    result = replay(log_of(trace))
    assert result.peak_allocated == pytest.approx(trace["peak_allocated"], rel=0.003)
    assert result.peak_reserved == pytest.approx(trace["peak_reserved"], rel=0.003)


# ── closed formulas ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("nbytes", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # a rest of 1 MiB is not worth cutting off
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
        (3 * GIB + 1, 3 * GIB + 512, 3 * GIB + 2 * MIB),
    ],
)
def test_a_single_allocation(nbytes, block, segment):
    result = replay([(0, nbytes)])
    assert (result.peak_allocated, result.peak_reserved) == (block, segment)
    assert (result.allocated, segments_held(result)) == (block, 1)
    assert replay([(0, nbytes)], segment).fits
    assert replay([(0, nbytes)], segment - 1).oom == (0, nbytes)


def test_a_full_device_gives_its_cache_back_and_goes_on():
    log = [(0, 60 * MIB), (0, -1), (1, 80 * MIB)]
    result = replay(log, 100 * MIB)
    assert result.fits
    assert (result.retries, segments_held(result), result.reserved) == (1, 1, 80 * MIB)
    assert result.peak_reserved == 80 * MIB


def test_a_segment_with_a_live_block_is_not_given_back():
    log = [(0, 60 * MIB), (0, -1), (1, 2 * MIB), (2, 80 * MIB)]
    assert replay(log, 140 * MIB).fits
    assert replay(log, 138 * MIB).oom == (3, 80 * MIB)


def test_more_capacity_can_fit_less():
    """A cache given back early may leave fewer pieces: a search must not assume an order."""
    mib = [(0, 24), (1, 4), (0, -1), (1, -1), (2, 30), (3, 12), (4, 30)]
    log = [(name, size * MIB if size > 0 else size) for name, size in mib]
    assert replay(log, 72 * MIB).fits
    assert not replay(log, 76 * MIB).fits


def test_an_empty_tensor_takes_nothing():
    result = replay([(0, 0), (0, -1), (1, 0)])
    assert (result.peak_allocated, result.peak_reserved) == (0, 0)


@pytest.mark.parametrize("log", [[(0, 8), (0, 8)], [(0, -1)], [(0, 8), (0, -1), (0, -1)]])
def test_a_log_that_contradicts_itself_is_refused(log):
    with pytest.raises(BadInput, match=f"event {len(log) - 1} .* allocated"):
        replay(log)


# ── invariants ────────────────────────────────────────────────────────────────────────────────

SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, 2 * MIB),
    st.integers(MIB, 64 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 2 * MIB, 10 * MIB, 20 * MIB]),
)


@st.composite
def logs(draw: st.DrawFn) -> list[Event]:
    log: list[Event] = []
    live: list[int] = []
    for index in range(draw(st.integers(1, 60))):
        if live and draw(st.integers(0, 4)) < 2:
            log.append((live.pop(draw(st.integers(0, len(live) - 1))), -1))
        else:
            log.append((index, draw(SIZES)))
            live.append(index)
    return log


CAPACITIES = st.one_of(st.none(), st.integers(0, 256).map(lambda mib: mib * MIB))


def run(allocator: CachingAllocator, log: list[Event]) -> dict[int, tuple[int, int]]:
    """Do what fits of a log, check the books after every event, and return the live blocks."""
    live: dict[int, tuple[int, int]] = {}
    for name, nbytes in log:
        if nbytes < 0:
            if name in live:
                allocator.free(live.pop(name))
        elif (block := allocator.malloc(nbytes)) is not None:
            assert nbytes <= block[1] <= nbytes + MIB + 511
            live[name] = block
        check(allocator, live)
    return live


def check(allocator: CachingAllocator, live: dict[int, tuple[int, int]]) -> None:
    free = [
        (start, size) for pool in (allocator.small, allocator.large) for size, start in pool.by_size
    ]
    blocks = sorted([*live.values(), *free])
    ends = [start + size for start, size in blocks]
    assert all(end <= start for end, (start, _) in zip(ends, blocks[1:], strict=False))
    assert allocator.allocated == sum(size for _, size in live.values())
    assert allocator.reserved == sum(size for _, size in blocks)
    assert allocator.allocated <= allocator.peak_allocated <= allocator.peak_reserved
    assert allocator.allocated <= allocator.reserved <= allocator.peak_reserved


@given(logs(), CAPACITIES)
def test_blocks_never_overlap_and_the_books_balance(log, capacity):
    allocator = CachingAllocator(capacity)
    run(allocator, log)
    assert capacity is None or allocator.peak_reserved <= capacity


@given(logs(), CAPACITIES, st.randoms())
def test_frees_in_any_order_leave_whole_segments(log, capacity, random):
    allocator = CachingAllocator(capacity)
    blocks = list(run(allocator, log).values())
    random.shuffle(blocks)
    for block in blocks:
        allocator.free(block)
    assert allocator.allocated == 0
    for pool in (allocator.small, allocator.large):
        assert {start: size for size, start in pool.by_size} == pool.segments
    allocator.release_cache()
    assert allocator.reserved == 0


@given(logs())
def test_a_capacity_that_is_not_reached_changes_nothing(log):
    free = replay(log)
    assert free.retries == 0
    assert totals(replay(log, free.peak_reserved)) == totals(free)


@given(logs())
def test_less_than_the_live_bytes_never_fits(log):
    sizes, peak = {}, 0
    for name, nbytes in log:
        sizes[name] = max(nbytes, 0)
        peak = max(peak, sum(sizes.values()))
    assert not replay(log, peak - 1).fits
