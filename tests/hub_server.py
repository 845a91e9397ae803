"""A model hub on this machine: the folders below a root, under the hub's addresses."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Hub(BaseHTTPRequestHandler):
    root: Path
    asked: list[str]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        self.asked.append(f"{self.command} {self.path}")
        plain = self.path.partition("?")[0].lstrip("/").removeprefix("api/models/")
        name, _, file = plain.replace("/tree/", "/resolve/").partition("/resolve/")
        known, path = (self.root / name).is_dir(), self.root / name / file.partition("/")[2]
        if not (known and path.is_file()):
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound" if known else "RepoNotFound")
            self.send_header("Content-Length", "0")
            if known:
                self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            return
        content = path.read_bytes()
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)


@contextmanager
def served(kind: type[BaseHTTPRequestHandler], **attributes: Any) -> Iterator[str]:
    """The address of a server whose handlers have these attributes."""
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (kind,), attributes)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@contextmanager
def hub(root: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of a hub with the models below `root`, and what it was asked for."""
    asked: list[str] = []
    with served(_Hub, root=root, asked=asked) as url:
        yield url, asked


@contextmanager
def silent() -> Iterator[str]:
    """An address that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def closed() -> str:
    """An address that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return f"http://127.0.0.1:{port}"


def environment(endpoint: str, home: Path, **more: str) -> dict[str, str]:
    """The variables of a process that asks the hub at `endpoint`, with a cache of its own."""
    ours = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "OMP_NUM_THREADS": "1"}
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSF"))
    }
    return kept | ours | {"TRAINFIT_CACHE": str(home / "trainfit")} | more
