"""events.jsonl: what happened in a run, as rows that programs read."""

from __future__ import annotations

import json
import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from trainfit.core.records import Event
from trainfit.runs.reader import read_part, read_run
from trainfit.runs.run_folder import Journal, forget_after

OOM = Event(kind="oom", step=3, seconds=1.5, text="memory ran out")
LATE = Event(kind="skipped", step=9, seconds=4.0, text="loss nan")


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def write(run: Path) -> None:
    with closing(Journal(run)) as journal:
        journal.event(OOM, {"micro_batches": 8})
        journal.event(LATE, {})
        journal.row("train", {"step": 4, "loss": 1.0})
        journal.row("train", {"step": 8, "loss": 0.5})


def test_an_event_is_a_row_with_figures_and_a_line(tmp_path: Path):
    write(tmp_path)
    assert read_part(tmp_path).events == (OOM, LATE)
    assert rows(tmp_path)[0]["micro_batches"] == 8
    assert "oom at step 3: memory ran out" in (tmp_path / "train.log").read_text()


def test_a_resumed_run_keeps_the_events_of_its_checkpoint_alone(tmp_path: Path):
    write(tmp_path)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"kind": "oo')  # cut off by a kill
    forget_after(tmp_path, 4, (OOM,))
    assert rows(tmp_path) == [
        {"kind": "oom", "step": 3, "seconds": 1.5, "text": "memory ran out", "micro_batches": 8}
    ]
    assert read_part(tmp_path).train["step"].tolist() == [4.0]


def test_a_run_of_an_older_version_shows_the_events_of_its_result(tmp_path: Path):
    event = {"kind": "oom", "step": 3, "seconds": 1.5, "text": "memory ran out"}
    (tmp_path / "result.json").write_text(json.dumps({"status": "finished", "events": [event]}))
    (tmp_path / "train.log").write_text("2026-11-15 08:00:00 Device: cuda (RTX 4090)\n")
    run = read_run(tmp_path)
    assert run.parts[0].events == (OOM,)
    assert run.parts[0].setup is None
    assert run.problems == ()


def test_damaged_rows_are_left_out(tmp_path: Path):
    lines = ['{"kind": "setup", "setup": {"device": 3}}', "[1]", '{"kind": "oom"}', "x", "{}"]
    (tmp_path / "events.jsonl").write_text("\n".join(lines))
    part = read_part(tmp_path)
    assert (part.events, part.setup) == ((), None)


def test_lines_reach_the_logger_of_a_program_without_its_secrets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    assert logging.getLogger("trainfit").handlers == []
    with caplog.at_level(logging.INFO, logger="trainfit"):
        journal = Journal(tmp_path)
        journal.line("step 1 with https://me:secret@host/x")
        journal.close()
    assert caplog.record_tuples == [("trainfit", logging.INFO, "step 1 with https://***@host/x")]
