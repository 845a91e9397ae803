"""Jobs under torchrun itself: the numbers of one process, through the death of a rank."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from job_tiny import be_quick, nli_words
from trainfit.cli.main import run

JOB = Path(__file__).with_name("engine_job.py")
ALIKE = (
    "training.num_epochs=1",
    "training.effective_batch_size=16",
    "training.logging_steps=1",
    "training.checkpoint_steps=4",
    "training.eval_steps=50",
    "model.head_dropout=0.0",
    "model.attention_dropout=0.0",
    "model.feed_forward_dropout=0.0",
)
LIMIT = 60


def torchrun(*options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options]


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        said, _ = process.communicate(timeout=2 * LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, said


def only_run(root: Path) -> Path:
    (found,) = [path for path in root.iterdir() if path.is_dir()]
    return found


def numbers(root: Path, kind: str = "train") -> list[list[float]]:
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in (only_run(root) / "metrics.jsonl").read_text().splitlines()
    ]
    return [[row["step"], row["loss"]] for row in rows if row["kind"] == kind]


def job(tmp: Path, where: str, *more: str) -> list[str]:
    words = [word for word in nli_words(tmp, *ALIKE, *more) if not word.startswith("runs_dir")]
    return ["train", "nli", *words, f"runs_dir={tmp / where}"]


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The job on one rank, here."""
    be_quick(monkeypatch)
    assert run(job(tmp_path, "one")) == 0
    return tmp_path


@pytest.mark.soak
def test_a_job_on_two_ranks_goes_on_after_one_is_killed_and_ends_as_on_one(one: Path) -> None:
    command = torchrun("--standalone", "--max-restarts", "1", str(JOB), "--kill", "9")
    code, said = ended(start(command + job(one, "two")))
    assert code == 0, said
    assert "from step-00000008" in (only_run(one / "two") / "train.log").read_text()
    expected, found = numbers(one / "one"), numbers(one / "two")
    assert len(found) == len(expected) > 12
    for mine, theirs in zip(expected, found, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    scores = [json.loads((only_run(one / n) / "results.json").read_text()) for n in ("one", "two")]
    assert scores[0]["metrics"]["f1"] == pytest.approx(scores[1]["metrics"]["f1"], abs=0.02)


@pytest.mark.soak
def test_without_restarts_a_killed_rank_ends_the_job_in_time(tmp_path: Path) -> None:
    began = time.perf_counter()
    command = torchrun("--standalone", str(JOB), "--kill", "3")
    code, said = ended(start(command + job(tmp_path, "two")))
    assert code == 1
    assert time.perf_counter() - began < LIMIT
    assert "trainfit: another rank has died" in said


@pytest.mark.soak
def test_two_machines_meet_by_rendezvous(one: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    options = [*options, "--rdzv-id", "7"]
    command = torchrun(*options, str(JOB)) + job(one, "four")
    command[command.index("--nproc-per-node") + 1] = "1"
    machines = [start(command) for _ in range(2)]
    for machine in machines:
        code, said = ended(machine)
        assert code == 0, said
    for mine, theirs in zip(numbers(one / "one"), numbers(one / "four"), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
