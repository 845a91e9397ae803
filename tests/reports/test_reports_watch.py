"""A run watched from outside, as it grows and when it has ended."""

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_runs import train_rows, write_end, write_rows, write_run
from rich.console import Console

from trainfit.cli.main import run as cli
from trainfit.core.plan_records import Plan
from trainfit.reports.live import Watcher, follow, frame
from trainfit.runs.reader import Tail

Make = Callable[..., Plan]


def drawn(standing: Any) -> str:
    console = Console(file=io.StringIO(), width=110)
    console.print(frame(standing))
    return console.file.getvalue()  # type: ignore[attr-defined]


def begin(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "metrics.jsonl", rows)


@pytest.fixture
def growing(tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_text('{"id": "x"}')
    begin(tmp_path, train_rows(400)[:100])
    return tmp_path


def test_a_frame_has_what_a_person_looks_for(tmp_path: Path, make_plan: Make):
    watcher = Watcher(write_run(tmp_path / "nli-1", make_plan(), finished=False))
    text = drawn(watcher.look())
    for part in ("step 600 of 600", "loss", "tokens/s", "MFU", "17.00 GiB", "61 °C", "96%", "93%"):
        assert part in text
    assert "oom at step 200: cut into 4" in text
    assert "validation at step 600: loss 0.1448, f1 0.8552" in text
    assert "running" in text


def test_the_time_left_is_that_of_the_steps_left(growing: Path):
    standing = Watcher(growing).look()
    last = train_rows(400)[99]
    assert standing.step == 100
    assert standing.eta_seconds == pytest.approx(300 * last["step_seconds"])


def test_only_whole_new_lines_are_read(growing: Path):
    watcher = Watcher(growing)
    assert watcher.look().step == 100
    text = json.dumps(train_rows(400)[100])
    with (growing / "metrics.jsonl").open("a") as file:
        file.write(text[:50])
    assert watcher.look().step == 100
    with (growing / "metrics.jsonl").open("a") as file:
        file.write(text[50:] + "\n")
    standing = watcher.look()
    assert standing.step == 101
    assert len(standing.losses) == 101


def test_a_log_that_was_cut_back_is_read_anew(growing: Path):
    watcher = Watcher(growing)
    watcher.look()
    begin(growing, train_rows(400)[:40])  # as a resume does: it forgets what it will do again
    standing = watcher.look()
    assert (standing.step, len(standing.losses)) == (40, 40)


def test_lines_for_people_are_no_events(growing: Path):
    (growing / "train.log").write_text("2026-11-15 08:00:00 oom at step 3: memory ran out\n")
    assert Watcher(growing).look().events == ()


def test_a_tail_of_nothing_is_empty(tmp_path: Path):
    assert Tail(tmp_path / "none").rows() == ([], False)


def test_it_follows_from_fold_to_fold(tmp_path: Path):
    (tmp_path / "data.json").write_text(json.dumps({"folds": [{}, {}, {}]}))
    begin(tmp_path / "fold-1", train_rows(40))
    past = time.time() - 100
    os.utime(tmp_path / "fold-1" / "metrics.jsonl", (past, past))
    watcher = Watcher(tmp_path)
    assert watcher.look().part == "fold 1 of 3"
    rows = train_rows(40, seed=1)
    begin(tmp_path / "fold-2", rows[:10])
    standing = watcher.look()
    assert (standing.part, standing.step) == ("fold 2 of 3", 10)
    assert standing.whole_eta_seconds == pytest.approx(70 * rows[9]["step_seconds"])


def test_a_silent_run_says_for_how_long(growing: Path, monkeypatch: pytest.MonkeyPatch):
    now = time.time()
    os.utime(growing / "metrics.jsonl", (now - 600, now - 600))
    monkeypatch.setattr(time, "time", lambda: now)
    standing = Watcher(growing).look()
    assert standing.status == "quiet"
    assert "no line for 10 min 0 s" in drawn(standing)
    assert "no line for 10 min 0 s" in drawn(replace(standing, run="a/long/path" * 20))


def test_it_ends_with_the_run(growing: Path, monkeypatch: pytest.MonkeyPatch):
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            write_end(growing, 400, (), {})

    monkeypatch.setattr(time, "sleep", sleep)
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    assert follow(Watcher(growing), console, 0.5).status == "finished"
    assert looks == [0.5] * 3


def test_the_command_draws_once_where_there_is_no_terminal(
    growing: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert cli(["watch", str(growing)]) == 0
    assert "step 100 of 400" in capsys.readouterr().out
    assert cli(["watch", str(growing), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 100
    monkeypatch.chdir(growing)
    assert cli(["watch"]) == 2
    assert "say which one" in capsys.readouterr().err
    (growing / "runs").mkdir()
    write_run(growing / "runs" / "newest", None, steps=60)
    assert cli(["watch", "--once"]) == 0
    assert "newest" in capsys.readouterr().out


def test_ctrl_c_leaves_the_watcher_alone(growing: Path):
    """In a real terminal of its own, ended as a person would."""
    pty = pytest.importorskip("pty")
    import signal

    parent, child = pty.openpty()
    words = [sys.executable, "-m", "trainfit", "watch", str(growing), "--every", "0.1"]
    process = subprocess.Popen(words, stdin=child, stdout=child, stderr=subprocess.PIPE)
    os.close(child)
    seen = b""
    while b"100 of 400" not in seen:
        seen += os.read(parent, 4096)
    process.send_signal(signal.SIGINT)
    with suppress(OSError):  # a terminal that nobody reads from would hold it up
        while os.read(parent, 4096):
            pass
    _, errors = process.communicate(timeout=90)
    assert (process.returncode, errors) == (0, b"")
    os.close(parent)
