"""Watchdog: ranks notice when another one dies, also while their GPUs wait for it.

gloo reports a dead process, but NCCL's kernels wait on. So every rank keeps an idle connection to
the first one. It closes when the process at the other end does, and the kernel's keepalives close
it when the machine is lost. Keepalives are answered without Python, so a rank that is busy for
minutes does not count as dead.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import sys
import threading
import warnings
from contextlib import closing, suppress

from trainfit.core.errors import TrainfitWarning

_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""A machine counts as lost after half a minute of silence."""
_GRACE = 5.0
"""Seconds in which a rank can still report its own error."""
_CONNECT = 10.0
_BYE = b"."
_WORD = 16


class Watchdog:
    """Connections of this rank, and a thread that waits for one to close."""

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
