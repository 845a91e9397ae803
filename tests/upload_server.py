"""A hub on this machine that takes models, by the addresses that huggingface_hub writes to."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from hub_server import served

TOKEN = "hf_aSecretThatNobodyMaySee"
ACCOUNT = {"type": "user", "name": "me", "orgs": [{"name": "ours"}]}


@dataclass
class Taken:
    """Requests and files that a hub has taken."""

    role: str = "write"
    """What its token may do."""
    refusing: bool = False
    """Answers commits with 403."""
    asked: list[str] = field(default_factory=list)
    created: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each file of the commits, by its path."""
    large: dict[str, bytes] = field(default_factory=dict)
    """Content of large files by their SHA-256."""


class _Uploads(BaseHTTPRequestHandler):
    taken: Taken

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    do_PUT = do_POST

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, body: bytes) -> None:
        self.taken.asked.append(f"{self.command} {self.path}")
        stored = self.path.startswith("/stored/")  # a signed address, without a token
        if not stored and self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._send(401, {"error": "Invalid credentials"})
        else:
            self._send(*self._handle(body))

    def _handle(self, body: bytes) -> tuple[int, Any]:
        taken, path = self.taken, self.path.partition("?")[0]
        if path == "/api/whoami-v2":
            return 200, ACCOUNT | {"auth": {"accessToken": {"role": taken.role}}}
        if path == "/api/repos/create":
            taken.created.append(json.loads(body))
            return 200, {"url": f"{self._here()}/me/films", "id": "me/films"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/models/me/films/preupload/main":
            return 200, {"files": [self._mode(one["path"]) for one in json.loads(body)["files"]]}
        if path == "/me/films.git/info/lfs/objects/batch":
            wanted = json.loads(body)["objects"]
            return 200, {"transfer": "basic", "objects": [self._place(one) for one in wanted]}
        if path.startswith("/stored/"):
            taken.large[path.removeprefix("/stored/")] = body
            return 200, {}
        if path == "/api/models/me/films/commit/main":
            return (403, {}) if taken.refusing else self._commit(body)
        return 404, {}

    def _here(self) -> str:
        return f"http://{self.headers['Host']}"

    def _mode(self, path: str) -> dict[str, Any]:
        mode = "lfs" if path.endswith((".safetensors", ".onnx")) else "regular"
        return {"path": path, "uploadMode": mode, "shouldIgnore": False}

    def _place(self, wanted: dict[str, Any]) -> dict[str, Any]:
        return wanted | {"actions": {"upload": {"href": f"{self._here()}/stored/{wanted['oid']}"}}}

    def _commit(self, body: bytes) -> tuple[int, Any]:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                content = base64.b64decode(value["content"])
                self.taken.files[value["path"]] = hashlib.sha256(content).hexdigest()
            elif line["key"] == "lfsFile":
                content = self.taken.large[value["oid"]]
                self.taken.files[value["path"]] = hashlib.sha256(content).hexdigest()
        url = f"{self._here()}/me/films/commit/{'0' * 40}"
        return 200, {"commitUrl": url, "commitOid": "0" * 40, "hookOutput": ""}

    def _send(self, status: int, answer: Any) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def upload_hub() -> Iterator[tuple[str, Taken]]:
    """The address of a hub of the user `me`, and what it has taken."""
    taken = Taken()
    with served(_Uploads, taken=taken) as url:
        yield url, taken
