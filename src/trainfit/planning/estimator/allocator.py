"""torch's CUDA caching allocator in plain Python, to find what a log of allocations reserves.

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

Not modelled: several streams, private pools (CUDA graphs), and settings that are off by default:
expandable_segments, max_split_size_mb, roundup_power2_divisions, garbage_collection_threshold.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from trainfit.core.errors import BadInput

ROUND = 512
SMALL_REQUEST = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
OWN_SEGMENT = 10 << 20
"""A request from this size on gets a segment of its own size."""
SEGMENT_ROUND = 2 << 20
ENDLESS = LARGE_SEGMENT << 30
"""More than any device has."""

Event = tuple[int, int]
"""(name, bytes) allocates under a name of the caller's choice; (name, -1) frees it."""
Block = tuple[int, int]
"""Address and size."""


def replay(
    events: Iterable[Event], capacity: int | None = None, addresses: Iterable[int] = ()
) -> CachingAllocator:
    """Run a log of allocations and frees through an allocator, to its end or out of memory.

    `capacity` bounds the reserved bytes, as torch.cuda.set_per_process_memory_fraction does.
    `addresses` says where the device put each segment, where that is known. As in torch, a log that
    fits may not fit a somewhat larger capacity: a cache given back early can leave fewer pieces.
    """
    allocator = CachingAllocator(capacity, addresses)
    live: dict[int, Block] = {}
    for index, (name, nbytes) in enumerate(events):
        if (name in live) != (nbytes < 0):
            found = "frees {}, which is not" if nbytes < 0 else "allocates {}, which is already"
            fix = "log every allocation once, and its free after it"
            raise BadInput(f"event {index} {found.format(name)} allocated", fix)
        if nbytes < 0:
            allocator.free(live.pop(name))
            continue
        block = allocator.malloc(nbytes)
        if block is None:
            allocator.oom = index, nbytes
            break
        live[name] = block
    return allocator


class CachingAllocator:
    """Allocator of one device and stream, with the counts of torch.cuda.memory_stats()."""

    def __init__(self, capacity: int | None = None, addresses: Iterable[int] = ()) -> None:
        """Start with nothing reserved; the arguments are those of `replay`."""
        self.capacity = ENDLESS if capacity is None else capacity
        given = iter(addresses)
        self.small = _Pool(0, ROUND, given)
        self.large = _Pool(ENDLESS, SMALL_REQUEST + ROUND, given)
        self.allocated = self.peak_allocated = 0
        self.reserved = self.peak_reserved = 0
        self.retries = 0
        """Number of times that the cache was given back to make room, which stalls the device."""
        self.device_requests: list[int] = []
        """Sizes of the segments, in the order of asking."""
        self.oom: tuple[int, int] | None = None
        """Event and bytes of the request at which `replay` ran out of memory."""

    @property
    def fits(self) -> bool:
        """True if the whole log was served."""
        return self.oom is None

    def malloc(self, nbytes: int) -> Block | None:
        """Return a block for `nbytes`, or None when it does not fit into the capacity."""
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
        """Free a block that `malloc` returned."""
        start, size = block
        if size == 0:
            return
        self.allocated -= size
        # A live block's size tells its pool: only small requests give blocks up to 1 MiB.
        pool = self.small if size <= SMALL_REQUEST else self.large
        pool.free(start, size)

    def release_cache(self) -> None:
        """Return free segments to the device, as torch.cuda.empty_cache does."""
        self.reserved -= self.large.release() + self.small.release()

    def _take_new(self, pool: _Pool, size: int) -> Block | None:
        """Return a block of a new segment, after giving the cache back where that is needed."""
        needed = segment_size(size)
        if self.reserved + needed > self.capacity:
            self.retries += 1
            self.release_cache()
            if self.reserved + needed > self.capacity:
                return None
        pool.grow(needed)
        self.device_requests.append(needed)
        self.reserved += needed
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return pool.take(size)


def segment_size(size: int) -> int:
    """Size of the segment that a block of `size` gets."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else _up(size, SEGMENT_ROUND)


def _up(value: int, unit: int) -> int:
    """Round up to a multiple of `unit`."""
    return -(-value // unit) * unit


class _Pool:
    """Free blocks of a pool, and the segments that they were cut from."""

    def __init__(self, origin: int, least_rest: int, addresses: Iterator[int]) -> None:
        self.top = origin
        self.least_rest = least_rest
        """A block is cut where at least this much of it is left over."""
        self.addresses = addresses
        self.segments: dict[int, int] = {}
        self.by_size: list[tuple[int, int]] = []
        """(size, start) of every free block, in order."""
        self.size_at: dict[int, int] = {}
        """Size of every free block by its start."""
        self.start_to: dict[int, int] = {}
        """The start of every free block by its end."""

    def take(self, size: int) -> Block | None:
        """Remove and return the smallest free block of at least `size`, or None."""
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

    def grow(self, length: int) -> None:
        """Add a segment of `length` bytes."""
        start = next(self.addresses, self.top)
        self.segments[start] = length
        self.insert(start, length)
        self.top = max(self.top, start + length)

    def release(self) -> int:
        """Give the segments without a live block back, and say how many bytes that was."""
        whole = [block for block in self.by_size if self.segments.get(block[1]) == block[0]]
        for size, start in whole:
            self.pop(bisect_left(self.by_size, (size, start)))
            del self.segments[start]
        return sum(size for size, _ in whole)
