"""Run cases in warm processes, and say of each what it did wrong."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fuzz_kinds  # noqa: F401 - registers the kinds
from fuzz_case import Case, lay_out, make_case

LIMIT = 20.0
"""Seconds after which a case hangs."""
_PLANNING = 4
"""Times as long for the real planner, which traces models in processes that it starts first."""
MOST_OUTPUT = 1 << 20
LONGEST_LINE = 2000
_STARTING = 120.0


@dataclass(frozen=True)
class Outcome:
    name: str
    """kind/number"""
    argv: list[str]
    fault: str | None
    """None: it behaved."""
    seconds: float
    shown: str
    """The end of what it printed to standard error."""
    code: int | None


class Worker:
    """One warm process, started again after a crash or a hang."""

    script = Path(__file__).with_name("fuzz_worker.py")

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._planner = False

    def start(self, planner: bool) -> None:
        """Be ready for a case, and for one that asks the planner with its processes running."""
        self._started()
        if planner and not self._planner:
            answer = self.ask({"warm": "planner"}, _STARTING)
            if answer != {"code": 0}:
                raise RuntimeError(f"the planner does not start: {answer}")
            self._planner = True

    def ask(self, question: dict[str, Any], limit: float) -> dict[str, Any]:
        """The answer; {"signal": …} for a process that died, {"hang": True} for one that did not
        answer in time."""
        process = self._started()
        assert process.stdin is not None
        process.stdin.write(json.dumps(question).encode() + b"\n")
        process.stdin.flush()
        return self._answer(limit)

    def end(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process, self._rest, self._planner = None, b"", False

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
            self._process = subprocess.Popen(
                [sys.executable, str(self.script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
            assert self._answer(_STARTING) == {"ready": True}
        return self._process

    def _answer(self, limit: float) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        end = time.monotonic() + limit
        while b"\n" not in self._rest:
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                self.end()
                return {"hang": True}
            piece = os.read(process.stdout.fileno(), 1 << 16)
            if not piece:
                code = process.wait()
                self.end()
                return {"signal": -code}
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Fuzzer:
    """Runs cases by name, each in a folder of its own under `work`."""

    def __init__(
        self,
        work: Path,
        seed: int,
        limit: float = LIMIT,
        *,
        confirm: bool = True,
        plan: bool = True,
    ) -> None:
        """`plan` False: the quick planner answers everything, for a sample in seconds."""
        self._work, self._seed, self._limit = work, seed, limit
        self._confirm, self._plan = confirm, plan
        self._templates = work / "templates"
        self._lock = threading.Lock()

    def run_all(self, names: Sequence[tuple[str, int]], workers: int = 2) -> Iterator[Outcome]:
        """Outcomes in the order in which cases end; a failure was confirmed in a new process."""
        todo, done = iter(names), []
        lock, news = threading.Lock(), threading.Condition()

        def take() -> tuple[str, int] | None:
            with lock:
                return next(todo, None)

        def work() -> None:
            worker = Worker()
            try:
                while (name := take()) is not None:
                    outcome = self.run(name, worker)
                    if outcome.fault is not None and self._confirm:
                        worker.end()
                        outcome = self.run(name, worker)
                    with news:
                        done.append(outcome)
                        news.notify()
            finally:
                worker.end()

        threads = [threading.Thread(target=work, daemon=True) for _ in range(workers)]
        for thread in threads:
            thread.start()
        for _ in names:
            with news:
                while not done:
                    news.wait(1.0)
                    if not done and not any(thread.is_alive() for thread in threads):
                        raise RuntimeError("the workers ended early")
                outcome = done.pop(0)
            yield outcome

    def run(self, name: tuple[str, int], worker: Worker) -> Outcome:
        case = make_case(self._seed, *name)
        self._prepare(case, worker)
        folder = self._work / f"{name[0]}-{name[1]}"
        _remove(folder)
        lay_out(case, folder, self._templates)
        real_plan = case.real_plan and self._plan
        out, err = folder.with_suffix(".out"), folder.with_suffix(".err")
        question = {
            "folder": str(folder),
            "argv": [word.replace("{here}", str(folder)) for word in case.argv],
            "env": {"HOME": str(folder), "TRAINFIT_CACHE": str(folder / "cache"), **case.env},
            "stdout": str(out),
            "stderr": str(err),
            "real_plan": real_plan,
        }
        worker.start(real_plan)
        began = time.monotonic()
        answer = worker.ask(question, self._limit * (_PLANNING if real_plan else 1))
        seconds = time.monotonic() - began
        said = _text(err)
        fault = judge(case, answer, _text(out), said)
        if fault is None:
            for path in (folder, out, err):
                _remove(path)
        code = answer.get("code")
        return Outcome(f"{name[0]}/{name[1]}", case.argv, fault, seconds, said[-600:], code)

    def _prepare(self, case: Case, worker: Worker) -> None:
        if case.template is None:
            return
        with self._lock:
            folder = self._templates / case.template
            if not folder.is_dir():
                making = folder.with_name(f"{case.template}.making")
                _remove(making)
                log = str(folder.with_name(f"{case.template}.log"))
                folder.parent.mkdir(parents=True, exist_ok=True)
                question = {"template": case.template, "folder": str(making)}
                answer = worker.ask(question | {"stdout": log, "stderr": log, "env": {}}, 300)
                if answer.get("code") != 0:
                    raise RuntimeError(f"no template {case.template}: {answer}; see {log}")
                making.rename(folder)


def judge(case: Case, answer: dict[str, Any], out: str, err: str) -> str | None:
    """What is wrong with the way a command ended, or None."""
    checks: list[tuple[Callable[[], bool], str]] = [
        (lambda: "hang" in answer, "hang"),
        (lambda: "signal" in answer, f"died of signal {answer.get('signal')}"),
        (lambda: "error" in answer, f"raised {answer.get('error')}"),
        (lambda: "internal error" in err, "internal error"),
        (lambda: "Traceback (most recent call last)" in out + err, "traceback"),
        (lambda: answer["code"] not in (0, 1, 2), f"exit code {answer.get('code')}"),
        (lambda: len(out) + len(err) > MOST_OUTPUT, "too much output"),
        (lambda: any(len(line) > LONGEST_LINE for line in err.splitlines()), "a long line"),
        (lambda: answer["code"] == 2 and not _is_refusal(err), "refused without a clear line"),
        (lambda: case.expect == "refused" and answer["code"] != 2, "wrongly accepted"),
        (lambda: case.expect == "ok" and answer["code"] == 2, "wrongly refused"),
    ]
    return next((fault for is_wrong, fault in checks if is_wrong()), None)


def _is_refusal(err: str) -> bool:
    lines = [line for line in err.split("\n") if line.strip()]
    return bool(lines) and all(line.startswith("trainfit: ") for line in lines)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(4 * MOST_OUTPUT).decode("utf-8", "replace")
    except OSError:
        return ""


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
