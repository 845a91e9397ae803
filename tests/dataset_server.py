"""A hub on this machine with data sets: the folders below a root, under the hub's addresses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from hub_server import COMMIT, served


class _Datasets(BaseHTTPRequestHandler):
    root: Path
    asked: list[str]

    def do_HEAD(self) -> None:
        self._answer(b"")

    do_GET = do_HEAD

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, body: bytes) -> None:
        self.asked.append(f"{self.command} {self.path}")
        path = unquote(urlsplit(self.path).path)
        parts = path.removeprefix("/api").split("/")
        if (
            len(parts) < 4
            or parts[1] != "datasets"
            or not (self.root / parts[2] / parts[3]).is_dir()
        ):
            self._fail("RepoNotFound")
            return
        folder, what, rest = self.root / parts[2] / parts[3], parts[4:5], "/".join(parts[6:])
        if not path.startswith("/api"):
            self._file(folder / rest)
        elif what == ["paths-info"]:
            asked = body.decode()
            wanted = json.loads(asked)["paths"] if asked[:1] == "{" else parse_qs(asked)["paths"]
            there = [folder / one for one in wanted if one and (folder / one).exists()]
            self._json([self._entry(folder, one) for one in there])
        elif what == ["tree"] and (folder / rest).is_dir():
            deep = "recursive=true" in self.path.lower()
            found = (folder / rest).rglob("*") if deep else (folder / rest).iterdir()
            self._json([self._entry(folder, one) for one in sorted(found)])
        elif what in ([], ["revision"]):
            files = [one for one in folder.rglob("*") if one.is_file()]
            names = [
                {"rfilename": one.relative_to(folder).as_posix(), "size": one.stat().st_size}
                for one in files
            ]
            self._json({"id": "/".join(parts[2:4]), "sha": COMMIT, "siblings": names})
        else:
            self._fail("EntryNotFound")

    def _entry(self, folder: Path, path: Path) -> dict[str, Any]:
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": COMMIT, "size": 0}
        return {"type": "file", "path": name, "oid": _hash(path), "size": path.stat().st_size}

    def _file(self, path: Path) -> None:
        if not path.is_file():
            self._fail("EntryNotFound")
            return
        content, status = path.read_bytes(), 200
        headers = {"ETag": f'"{_hash(path)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if ranged := self.headers["Range"]:
            first, _, last = ranged.removeprefix("bytes=").partition("-")
            end = min(int(last or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{end}/{len(content)}"
            content, status = content[int(first) : end + 1], 206
        self._send(status, content, headers)

    def _json(self, answer: Any) -> None:
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _fail(self, code: str) -> None:
        self._send(404, b"", {"X-Error-Code": code, "X-Repo-Commit": COMMIT})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _hash(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def dataset_hub(root: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of a hub with the data sets below `root`, and what it was asked for."""
    asked: list[str] = []
    with served(_Datasets, root=root, asked=asked) as url:
        yield url, asked
