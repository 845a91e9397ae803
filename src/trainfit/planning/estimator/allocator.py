"""torch's CUDA caching allocator in plain Python: what a log of allocations would reserve.

Peak reserved memory and the moment of running out of it are decided by how the allocator cuts and
caches memory, not only by how much is live. With default settings and one stream:

- A request is rounded up to 512 bytes. Up to 1 MiB it is served by the small pool, above by the
  large one.
- The smallest free block of the pool that is large enough is taken, and among equals the one at
  the lowest address.
- A block is cut where the rest is worth keeping: always in the small pool, more than 1 MiB in the
  large one. A freed block joins its free neighbours in the segment.
- Where no block serves, the device is asked for a segment: 2 MiB for a small request, 20 MiB for
  one under 10 MiB, else the request rounded up to 2 MiB.
- Where that would exceed the capacity, every segment without a live block goes back to the device
  and the request is tried once more. Failing that, it is out of memory.

Every block of the recorded runs of torch 2.11 on a GPU (tests/planning/allocator_traces) comes out
at the address it had there, once it is known where the driver put the segments. Here each segment
lies above the older ones, the order that torch has since adopted in place of the driver's. That
moves the peaks of the recorded runs by less than 0.3% where nothing caps them; close to a cap,
random sizes (not the training loop) run out at another event, or not at all.

Not modelled: several streams, private pools (CUDA graphs), and the settings max_split_size_mb,
roundup_power2_divisions and garbage_collection_threshold, which are off by default.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from trainfit.core.errors import BadInput

ROUND = 512
SMALL_REQUEST = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
OWN_SEGMENT = 10 << 20
"""A request from this size on gets a segment of its own size."""
SEGMENT_ROUND = 2 << 20
ENDLESS = LARGE_SEGMENT << 30
"""More than any device has, in whole pages. torch reserves 9/8 of the device as addresses."""

Event = tuple[int, int]
"""(name, bytes) allocates under a name of the caller's choice; (name, -1) frees it."""
Block = tuple[int, int]
"""Address and size."""


class OutOfMemory(NamedTuple):
    """The request that did not fit, and its index in the log."""

    event: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """What torch.cuda.memory_stats() would say after the log, in bytes."""

    peak_allocated: int
    peak_reserved: int
    allocated: int
    reserved: int
    num_segments: int
    """Segments held at the end; torch does not count expandable ones."""
    device_requests: tuple[int, ...]
    """Sizes of the segments (where expandable: of the parts backed) in the order of asking."""
    retries: int
    """How often the cache was given back to make room, which stalls the device."""
    oom: OutOfMemory | None
    """Where memory ran out; the rest of the log was not replayed."""

    @property
    def fits(self) -> bool:
        """Whether the whole log was served."""
        return self.oom is None


def replay(
    events: Iterable[Event],
    capacity: int | None = None,
    *,
    expandable: bool = False,
    addresses: Iterable[int] = (),
) -> Replay:
    """Run a log of allocations and frees through the allocator, to its end or out of memory.

    `capacity` bounds what is reserved, as torch.cuda.set_per_process_memory_fraction does, and
    `expandable` is PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True. `addresses` says where the
    device put each segment, in order, where that is known. As in torch, a log that fits may not
    fit a somewhat larger capacity: a cache that is given back early can leave fewer pieces.
    """
    allocator = CachingAllocator(capacity, expandable, addresses)
    live: dict[int, Block] = {}
    oom = None
    for index, (name, nbytes) in enumerate(events):
        if (name in live) != (nbytes < 0):
            found = "frees {}, which is not" if nbytes < 0 else "allocates {}, which is already"
            raise BadInput(
                f"event {index} {found.format(name)} allocated",
                "log every allocation once, and its free after it",
            )
        if nbytes < 0:
            allocator.free(live.pop(name))
            continue
        block = allocator.malloc(nbytes)
        if block is None:
            oom = OutOfMemory(index, nbytes)
            break
        live[name] = block
    return Replay(
        peak_allocated=allocator.peak_allocated,
        peak_reserved=allocator.peak_reserved,
        allocated=allocator.allocated,
        reserved=allocator.reserved,
        num_segments=len(allocator.small.segments) + len(allocator.large.segments),
        device_requests=tuple(allocator.device_requests),
        retries=allocator.retries,
        oom=oom,
    )


class CachingAllocator:
    """The allocator of one device and stream, for a caller that decides as it goes."""

    def __init__(
        self, capacity: int | None = None, expandable: bool = False, addresses: Iterable[int] = ()
    ) -> None:
        """Start with nothing reserved; the arguments are those of `replay`."""
        self.capacity = ENDLESS if capacity is None else capacity
        given = iter(addresses)
        self.small = _Pool(0, ROUND, given)
        self.large = _Pool(ENDLESS, SMALL_REQUEST + ROUND, given)
        if expandable:
            self.small, self.large = _Range(0, SMALL_SEGMENT), _Range(ENDLESS, LARGE_SEGMENT)
        self.allocated = self.peak_allocated = 0
        self.reserved = self.peak_reserved = 0
        self.retries = 0
        self.device_requests: list[int] = []

    def malloc(self, nbytes: int) -> Block | None:
        """A block for `nbytes`, or None when it does not fit into the capacity."""
        if nbytes == 0:
            return 0, 0
        size = _up(nbytes, ROUND)
        pool = self.small if size <= SMALL_REQUEST else self.large
        block = pool.take(size) or self._take_new(pool, size)
        if block is None:
            return None
        start, found = block
        if found - size >= pool.least_rest:
            pool.insert(start + size, found - size)
            found = size
        self.allocated += found
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return start, found

    def free(self, block: Block) -> None:
        """Take back a block that `malloc` gave."""
        start, size = block
        if size == 0:
            return
        self.allocated -= size
        # A live block's size tells its pool: only small requests give blocks up to 1 MiB.
        pool = self.small if size <= SMALL_REQUEST else self.large
        pool.free(start, size)

    def release_cache(self) -> None:
        """Give back to the device what no live block needs, as torch.cuda.empty_cache does."""
        self.reserved -= self.large.release() + self.small.release()

    def _take_new(self, pool: _Pool, size: int) -> Block | None:
        """A block of new memory, after giving the cache back where that is needed."""
        # torch checks an expandable segment by this size too, so that the last page which is
        # backed may go beyond the capacity.
        needed = segment_size(size)
        if self.reserved + needed > self.capacity:
            self.retries += 1
            self.release_cache()
            if self.reserved + needed > self.capacity:
                return None
        requests = pool.grow(size)
        self.device_requests += requests
        self.reserved += sum(requests)
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return pool.take(size)


def segment_size(size: int) -> int:
    """The size of the segment that is made for a block of `size`."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else _up(size, SEGMENT_ROUND)


def _up(value: int, unit: int) -> int:
    """The least multiple of `unit` that is not under `value`."""
    return -(-value // unit) * unit


class _Pool:
    """The free blocks of a pool, and the segments that they were cut from."""

    def __init__(self, origin: int, least_rest: int, addresses: Iterator[int]) -> None:
        self.top = origin
        self.least_rest = least_rest
        """A block is cut where at least this much of it is left over."""
        self.addresses = addresses
        self.segments: dict[int, int] = {}
        self.by_size: list[tuple[int, int]] = []
        """(size, start) of every free block, in order."""
        self.size_at: dict[int, int] = {}
        """The same by start."""
        self.start_to: dict[int, int] = {}
        """The start of every free block by its end."""

    def take(self, size: int) -> Block | None:
        """The best free block for `size`, no longer free."""
        index = bisect_left(self.by_size, (size, 0))
        return self.pop(index) if index < len(self.by_size) else None

    def pop(self, index: int) -> Block:
        """Remove the free block at `index` of the order by size."""
        size, start = self.by_size.pop(index)
        del self.size_at[start]
        del self.start_to[start + size]
        return start, size

    def insert(self, start: int, size: int) -> None:
        """Add a free block that has no free neighbour."""
        insort(self.by_size, (size, start))
        self.size_at[start] = size
        self.start_to[start + size] = start

    def free(self, start: int, size: int) -> None:
        """Add a free block, joined with its free neighbours in the segment."""
        end = start + size
        before = self.start_to.get(start)
        if before is not None and start not in self.segments:
            self.pop(bisect_left(self.by_size, (start - before, before)))
            start = before
        after = self.size_at.get(end)
        if after is not None and end not in self.segments:
            self.pop(bisect_left(self.by_size, (after, end)))
            end += after
        self.insert(start, end - start)

    def grow(self, size: int) -> tuple[int, ...]:
        """Get a segment in which `size` bytes fit, and say what was asked of the device."""
        start, length = next(self.addresses, self.top), segment_size(size)
        self.segments[start] = length
        self.insert(start, length)
        self.top = max(self.top, start + length)
        return (length,)

    def release(self) -> int:
        """Give the segments without a live block back, and say how many bytes that was."""
        whole = [block for block in self.by_size if self.segments.get(block[1]) == block[0]]
        for size, start in whole:
            self.pop(bisect_left(self.by_size, (size, start)))
            del self.segments[start]
        return sum(size for size, _ in whole)


class _Range(_Pool):
    """A pool of expandable segments: one endless range of addresses, backed page by page."""

    def __init__(self, origin: int, page: int) -> None:
        super().__init__(origin, ROUND, iter(()))
        self.page = page
        self.gaps = {origin: ENDLESS}
        """Start and size of what is not backed."""

    def take(self, size: int) -> Block | None:
        """The best free block, counting what it could grow to: the last one is kept for last."""
        index = bisect_left(self.by_size, (size, 0))
        if index == len(self.by_size):
            return None
        while index + 1 < len(self.by_size) and self.reach(index + 1) < self.reach(index):
            index += 1
        return self.pop(index)

    def reach(self, index: int) -> int:
        """How large the free block at `index` of the order by size can become."""
        size, start = self.by_size[index]
        return size + self.gaps.get(start + size, 0)

    def grow(self, size: int) -> tuple[int, ...]:
        """Back the lowest addresses where `size` bytes fit, and say what was asked for."""
        starts = (self.start_to.get(gap, gap) for gap in sorted(self.gaps))
        start = next(start for start in starts if self.has_room(start, size))
        parts = []
        while (free := self.size_at.get(start, 0)) < size:
            gap = start + free
            length = self.gaps.pop(gap)
            part = min(_up(size - free, self.page), length)
            if part < length:
                self.gaps[gap + part] = length - part
            self.free(gap, part)
            parts.append(part)
        return tuple(parts)

    def has_room(self, start: int, size: int) -> bool:
        """Whether the `size` bytes from `start` on are all free or not backed."""
        end = start
        while end < start + size:
            step = self.size_at.get(end) or self.gaps.get(end)
            if step is None:
                return False
            end += step
        return True

    def release(self) -> int:
        """Give the pages without a live block back, and say how many bytes that was."""
        total = 0
        for size, start in self.by_size.copy():
            end = start + size
            first, last = _up(start, self.page), end // self.page * self.page
            if first < last:
                self.pop(bisect_left(self.by_size, (size, start)))
                for rest, rest_end in ((start, first), (last, end)):
                    if rest < rest_end:
                        self.insert(rest, rest_end - rest)
                self.open_gap(first, last)
                total += last - first
        return total

    def open_gap(self, start: int, end: int) -> None:
        """Note that nothing backs these addresses, in one gap with those beside it."""
        gap_to = {gap + length: gap for gap, length in self.gaps.items()}
        start = gap_to.get(start, start)
        end += self.gaps.pop(end, 0)
        self.gaps[start] = end - start
