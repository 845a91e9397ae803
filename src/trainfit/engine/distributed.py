"""Several processes, one step: who is who, and everything that they say to each other.

The model is not wrapped. DistributedDataParallel reduces gradients during the backward pass, and
a rank that runs out of memory there leaves the others waiting in a collective for ever. Here each
rank computes its share of the step alone, all vote on how it went, and only then are gradients
summed, once per step, in place: nothing is allocated after the vote, so nothing can fail between.
Votes are of CPU tensors over gloo, so that no rank waits for its GPU to hear them. A model that is
spread over the ranks (sharding.py) talks in every layer; all else is said here for it too.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from trainfit.core.errors import RunFailed, TrainfitError
from trainfit.engine.watchdog import Watch

_MEET = timedelta(minutes=30)
"""As long as torch itself waits: one rank may plan while the others come to the meeting."""


@dataclass(frozen=True, slots=True)
class World:
    """The place of this process among those that train together."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def first(self) -> bool:
        """Whether this is the one that writes files."""
        return self.rank == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the ranks agreed on: each is true when it is on one rank at least."""

    out_of_memory: bool = False
    failed: bool = False
    stop: bool = False
    used: tuple[bool, ...] = ()
    """For each trained parameter, whether it got a gradient."""


def find_world() -> World:
    """Who this process is, from the environment that torchrun sets."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return World()
    return World(
        rank=int(os.environ["RANK"]),
        size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
    )


@contextmanager
def joined(device: str) -> Iterator[tuple[World, torch.device]]:
    """Meet the other ranks, if there are any, for the length of a block, each on its device.

    A block inside another changes nothing: what trains several times, as cross-validation does,
    opens one around them all, since ranks that part one by one cannot meet again safely.
    """
    world = find_world()
    place = torch.device(device)
    if place.type == "cuda":
        own = place.index or 0 if world.size == 1 else world.local_rank
        place = torch.device("cuda", own)
        torch.cuda.set_device(place)
    if world.size == 1 or dist.is_initialized():
        yield world, place
        return
    backends = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
    dist.init_process_group(
        backends, store=_meeting_place(world), rank=world.rank, world_size=world.size
    )
    watch, well = Watch(), False
    try:
        address = first_says(world, watch.listen() if world.first else "")
        if not world.first:
            watch.connect(address)
        yield world, place
        gather(world, "")  # no rank leaves before all are done
        well = True
    finally:
        watch.close(well=well)
        dist.destroy_process_group()


def _meeting_place(world: World) -> Store:
    """Where ranks find each other's addresses.

    torchrun's own is the same after a restart, with the addresses of processes that are gone; a
    rank that comes early would try those. So each start has its own corner of it.
    """
    store, _, _ = next(iter(rendezvous("env://", world.rank, world.size)))
    store.set_timeout(_MEET)
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"trainfit/{start}", store)


def lost_rank(error: BaseException) -> RunFailed | None:
    """What `error` means where it comes of a rank that is gone; None: it is something else."""
    gone = isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error)
    )
    if not gone:
        return None
    return RunFailed("another rank has died", "see its message, and go on with --resume")


@contextmanager
def _talking() -> Iterator[None]:
    """A block in which ranks talk: one that is gone ends it in a line of ours."""
    try:
        yield
    except RuntimeError as error:
        raise lost_rank(error) or error from None


def vote(world: World, own: Verdict) -> Verdict:
    """What holds on any rank, after which all do the same."""
    if world.size == 1:
        return own
    flags = [own.out_of_memory, own.failed, own.stop, *own.used]
    agreed = torch.tensor(flags, dtype=torch.int32)
    with _talking():
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
    out_of_memory, failed, stop, *used = map(bool, agreed.tolist())
    if failed and not own.failed:
        raise RunFailed("another rank failed", "see its message")
    return Verdict(out_of_memory=out_of_memory, failed=failed, stop=stop, used=tuple(used))


def fill_gradients(world: World, parameters: Sequence[Tensor]) -> tuple[bool, ...]:
    """Which parameters got a gradient; for ranks to sum, the others get one of zeros.

    A rank with little to do may not have used all of the model. This allocates, so it is done
    before the vote, and what no rank used is dropped after it.
    """
    used = tuple(parameter.grad is not None for parameter in parameters)
    if world.size > 1:
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    return used


def sum_gradients(
    world: World, parameters: Sequence[Tensor], used: Sequence[bool], loss: Tensor
) -> None:
    """Sum the loss, and the gradients that are used on any rank, over all ranks, in place."""
    if world.size == 1:
        return
    tensors = [loss]
    for parameter, wanted in zip(parameters, used, strict=True):
        if wanted and parameter.grad is not None:
            tensors.append(parameter.grad)
        else:
            parameter.grad = None
    sum_over_ranks(world, tensors)


def sum_over_ranks(world: World, tensors: Sequence[Tensor]) -> None:
    """Sum each tensor over all ranks, in place."""
    if world.size == 1:
        return
    with _talking():
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()


def spread_weights(world: World, model: nn.Module) -> None:
    """Give every rank the first one's weights and buffers."""
    if world.size == 1:
        return
    with torch.no_grad(), _talking():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), 0)


@contextmanager
def first_writes(world: World) -> Iterator[bool]:
    """A block in which the first rank writes; the others wait for it, and fail if it does."""
    if not world.first:
        yield False
        if problem := first_says(world, ""):
            raise RunFailed("the first rank failed", problem)
        return
    try:
        yield True
    except TrainfitError as error:
        first_says(world, str(error))
        raise
    first_says(world, "")


def first_says(world: World, text: str) -> str:
    """The first rank's text, on every rank."""
    return gather(world, text)[0]


def gather(world: World, text: str) -> list[str]:
    """The text of every rank, on every rank."""
    if world.size == 1:
        return [text]
    data = torch.frombuffer(bytearray(text.encode() + b" "), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world.size)]
    with _talking():
        dist.all_gather(sizes, torch.tensor([data.numel()]))
        most = int(max(sizes))
        padded = torch.cat([data, torch.zeros(most - data.numel(), dtype=torch.uint8)])
        parts = [torch.zeros(most, dtype=torch.uint8) for _ in range(world.size)]
        dist.all_gather(parts, padded)
    return [
        part[: int(size) - 1].numpy().tobytes().decode()
        for part, size in zip(parts, sizes, strict=True)
    ]


_Gap = tuple[torch.cuda.Event, torch.cuda.Event, float]


class Waits:
    """Adds up the waits of a window of steps."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._last: torch.cuda.Event | None = None
        self._gaps: list[_Gap] = []

    def begin(self, waited: float) -> None:
        """A step begins, for whose data the loop has waited so long."""
        if not self._on_gpu:
            self._seconds += waited
        elif self._last is not None:
            self._gaps.append((self._last, _mark(), waited))

    def end(self) -> None:
        """The work of the step is under way."""
        if self._on_gpu:
            self._last = _mark()

    def take(self) -> float:
        """The seconds since the last call; everything must have been computed."""
        for end, begin, waited in self._gaps:
            idle = end.elapsed_time(begin) / 1e3
            self._seconds += min(waited, idle)
        seconds, self._seconds = self._seconds, 0.0
        self._last, self._gaps = None, []
        return seconds


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


@dataclass(slots=True)
class StopRequest:
    """The signal that asked, if one has."""

    name: str | None = None


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Note the signals instead of dying of them, for the length of a block.

    Only the main thread may do so; in another one the request stays empty.
    """
    request = StopRequest()

    def note(number: int, _frame: FrameType | None) -> None:
        if request.name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.name = signal.Signals(number).name

    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
