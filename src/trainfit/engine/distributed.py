"""Distributed training: process groups, votes between ranks, and a watchdog over them.

Each rank computes its share of a step, and all ranks vote on the result before anything is
applied: a rank that runs out of memory leaves nobody waiting (parallel.py). Votes use CPU tensors
over gloo, so that no rank waits for its GPU. A model sharded by FSDP communicates in every layer,
and uses this module for everything else.
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from trainfit.core.errors import RunFailed, TrainfitError, TrainfitWarning

_MEET = timedelta(minutes=30)
"""Longest wait for other ranks to start; torch's own default. One rank may plan meanwhile."""
_ROUND, _POLL = "trainfit/round", 0.05
_REPORTING = 10.0
"""Seconds from SIGTERM to the end of a rank, in which it can report why it fails."""


@dataclass(frozen=True, slots=True)
class World:
    """Rank of this process and the number of ranks."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    """Ranks of this machine."""

    @property
    def machines(self) -> int:
        """Number of machines; 1 where they have different numbers of ranks."""
        return 1 if self.size % self.local_size else self.size // self.local_size

    @property
    def first(self) -> bool:
        """True on the rank that writes files."""
        return self.rank == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Result of a vote: a flag is true where it is true on any rank."""

    out_of_memory: bool = False
    failed: bool = False
    stop: bool = False
    used: tuple[bool, ...] = ()
    """One flag per trained parameter: it got a gradient."""


def find_world() -> World:
    """Read this process's rank from the environment that torchrun sets."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return World()
    size = int(os.environ["WORLD_SIZE"])
    return World(
        rank=int(os.environ["RANK"]),
        size=size,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", size)),
    )


def current_world() -> World:
    """Return the ranks that have joined; this process alone outside of `joined`."""
    return find_world() if dist.is_initialized() else World()


@contextmanager
def joined(device: str, *, shards: bool = False) -> Iterator[tuple[World, torch.device]]:
    """Join the process group for a block; yields the rank and its device.

    A single rank has a group only where it `shards` its model. A nested block changes nothing.
    Code that trains several times, such as cross-validation, opens one block around all runs,
    since ranks that leave one by one cannot join again safely.
    """
    world = find_world()
    place = torch.device(device)
    if place.type == "cuda":
        own = world.local_rank if torch.cuda.device_count() > 1 else 0  # srun may show one alone
        place = torch.device("cuda", place.index or 0 if world.size == 1 else own)
        torch.cuda.set_device(place)
    if (world.size == 1 and not shards) or dist.is_initialized():
        yield world, place
        return
    backends = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
    with reporting(world):
        with communicating():
            dist.init_process_group(
                backends, store=_meeting_place(world), rank=world.rank, world_size=world.size
            )
        watch, well = Watchdog(), False
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
    """Store in which ranks find each other's addresses, under a prefix of this round alone.

    torchrun keeps its store over a restart, with addresses of dead processes, and a machine that
    comes back counts its restarts from 0 again. So the first rank publishes a word per round, each
    rank answers with a word of its own, and a round counts for those that the first rank has heard.
    """
    if world.size == 1:
        return HashStore()
    store, _, _ = next(iter(rendezvous("env://", world.rank, world.size)))
    store.set_timeout(_MEET)
    own = secrets.token_hex(8)
    if world.first:
        store.set(_ROUND, own)
        heard = [store.get(f"{own}/{rank}").decode() for rank in range(1, world.size)]
        store.set(f"{own}/heard", " ".join(heard))
        return PrefixStore(f"trainfit/{own}", store)
    deadline = time.monotonic() + _MEET.total_seconds()
    while time.monotonic() < deadline:
        word = store.get(_ROUND).decode()
        store.set(f"{word}/{world.rank}", own)
        if store.check([f"{word}/heard"]) and own in store.get(f"{word}/heard").decode().split():
            return PrefixStore(f"trainfit/{word}", store)
        time.sleep(_POLL)  # a round of before, or the first rank still waits for others
    raise RunFailed("the first rank did not answer", "start all ranks again")


def lost_rank(error: BaseException) -> RunFailed | None:
    """Convert an error that a dead rank caused to RunFailed; None for other errors."""
    gone = isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error)
    )
    if "Duplicate GPU" in str(error):  # as NCCL says it
        return RunFailed("two ranks are on one GPU", "start one rank for each GPU")
    told = RunFailed("another rank has died", "see its message, and continue with --resume")
    return told if gone else None


@contextmanager
def communicating() -> Iterator[None]:
    """Convert errors of a block that communicates: a dead rank becomes RunFailed."""
    try:
        yield
    except RuntimeError as error:
        raise lost_rank(error) or error from None


def vote(world: World, own: Verdict) -> Verdict:
    """Combine the flags of all ranks, so that all do the same next."""
    if world.size == 1:
        return own
    flags = [own.out_of_memory, own.failed, own.stop, *own.used]
    agreed = torch.tensor(flags, dtype=torch.int32)
    with communicating():
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
    out_of_memory, failed, stop, *used = map(bool, agreed.tolist())
    if failed and not own.failed:
        raise RunFailed("another rank failed", "see its message")
    return Verdict(out_of_memory=out_of_memory, failed=failed, stop=stop, used=tuple(used))


@contextmanager
def first_writes(world: World) -> Iterator[bool]:
    """Run a block in which only the first rank writes; the others wait, and fail if it fails."""
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
    """Send the first rank's text to every rank."""
    return gather(world, text)[0]


def gather(world: World, text: str) -> list[str]:
    """Collect the texts of all ranks on every rank."""
    if world.size == 1:
        return [text]
    data = torch.frombuffer(bytearray(text.encode() + b" "), dtype=torch.uint8)
    return [part[:-1].numpy().tobytes().decode() for part in gather_rows(world, data)]


def gather_rows(world: World, rows: Tensor) -> list[Tensor]:
    """Collect the rows of all ranks on every rank, in CPU tensors; their numbers may differ."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world.size)]
    with communicating():
        dist.all_gather(sizes, torch.tensor([len(rows)]))
        padded = rows.new_zeros(int(max(sizes)), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.zeros_like(padded) for _ in range(world.size)]
        dist.all_gather(parts, padded)
    return [part[: int(size)] for part, size in zip(parts, sizes, strict=True)]


@dataclass(slots=True)
class StopRequest:
    """Name of the signal that asked the run to stop, if any did."""

    name: str | None = None


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Record SIGTERM and SIGINT during a block of the main thread; they no longer end it."""
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


@contextmanager
def reporting(world: World) -> Iterator[None]:
    """Have SIGTERM end one of several ranks a little later, in a block and for good if it fails.

    torchrun sends it to every other rank as soon as one has died, mostly before they have said why
    they end too.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        timer = threading.Timer(_REPORTING, os._exit, [128 + number])
        timer.daemon = True
        timer.start()

    if world.size == 1 or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    yield
    signal.signal(signal.SIGTERM, before)


# ── the watchdog ──────────────────────────────────────────────────────────────────────────────────


_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""A machine counts as lost after half a minute of silence."""
_GRACE = 5.0
"""Seconds in which a rank can still report its own error."""
_CONNECT = 10.0
_BYE = b"."
_WORD = 16


class Watchdog:
    """Connections of this rank, and a thread that waits for one to close.

    gloo reports a dead process, but NCCL's kernels wait on. So every rank keeps an idle connection
    to the first one. It closes when the process at the other end does, and the kernel's keepalives
    close it when the machine is lost. Keepalives are answered without Python, so a rank that is
    busy for minutes does not count as dead.
    """

    def __init__(self) -> None:
        self._over = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._wait, name="watch over ranks", daemon=True)
        self._listener: socket.socket | None = None
        self._word = b""

    def listen(self) -> str:
        """Accept connections, on the first rank; returns its address."""
        family, host = _own_address()
        self._word = secrets.token_hex(_WORD // 2).encode()
        self._listener = socket.create_server(("", 0), family=family)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread.start()
        return f"{host} {self._listener.getsockname()[1]} {self._word.decode()}"

    def connect(self, address: str) -> None:
        """Connect to the first rank, on the other ranks."""
        host, port, word = address.split()
        problem: OSError | None = None
        for name in (host, os.environ.get("MASTER_ADDR", host)):
            try:
                connection = socket.create_connection((name, int(port)), timeout=_CONNECT)
                connection.sendall(word.encode())
            except OSError as error:
                problem = error
                continue
            self._keep(connection)
            self._thread.start()
            return
        text = f"cannot watch over the first rank at {host} ({problem}): if its machine is lost"
        warnings.warn(f"{text}, this rank waits for half an hour", TrainfitWarning, stacklevel=2)

    def close(self, *, well: bool) -> None:
        """Close the connections; unless `well`, the others then count this rank as dead."""
        self._over.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        for key in list(self._selector.get_map().values()):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            with suppress(OSError), closing(connection):
                if well and connection is not self._listener:
                    connection.sendall(_BYE)
        self._selector.close()

    def _keep(self, connection: socket.socket) -> None:
        connection.settimeout(_CONNECT)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._selector.register(connection, selectors.EVENT_READ)

    def _wait(self) -> None:
        while not self._over.is_set():
            for key, _ in self._selector.select(timeout=0.2):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is self._listener:
                    self._accept(self._listener)
                elif self._heard(connection) == _BYE:
                    self._selector.unregister(connection)
                    connection.close()
                elif not self._over.wait(_GRACE):
                    _end_now()

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.settimeout(_CONNECT)
        if self._heard(connection, _WORD) == self._word:
            self._keep(connection)
        else:  # not a rank of this run
            connection.close()

    def _heard(self, connection: socket.socket, size: int = 1) -> bytes:
        try:
            return connection.recv(size, socket.MSG_WAITALL)
        except OSError:
            return b""


def _own_address() -> tuple[socket.AddressFamily, str]:
    """Address by which other machines reach this one."""
    master = os.environ.get("MASTER_ADDR", "localhost")
    family, _, _, _, place = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # sends nothing, only chooses the interface
        return family, str(probe.getsockname()[0])


def _end_now() -> None:
    """End the process at once: the main thread may wait for the dead rank forever."""
    print(
        "trainfit: another rank has died; see its message, and continue with --resume",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)
