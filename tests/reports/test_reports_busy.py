"""Stages that take a while say so in a pipe, with the time so far."""

from __future__ import annotations

import sys
import time
from contextlib import suppress

import pytest

from trainfit.cli.main import run
from trainfit.reports import terminal
from trainfit.reports.terminal import busy


def test_a_long_stage_shows_its_time_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "_QUIET", 0.05)
    with busy("thinking"):
        time.sleep(0.6)
    first, *others = capsys.readouterr().err.splitlines()
    assert first == "trainfit: thinking"
    assert others[:2] == ["trainfit: thinking: 0 s so far"] * 2  # after 0.05 and 0.15 s
    assert len(others) == 3  # and after 0.35 s; the next one would come after 0.75 s


def test_a_short_stage_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with busy("thinking"):
        pass
    assert capsys.readouterr().err == "trainfit: thinking\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["report", "nowhere"], "trainfit: reading the run"),
        (["doctor", "--json"], "trainfit: looking at the machine"),
    ],
)
def test_a_command_that_takes_a_while_says_so_first(
    words: list[str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(terminal, "busy", busy)  # tests have a silent one
    monkeypatch.setattr("trainfit.doctor.gather", lambda: sys.exit())
    with suppress(SystemExit):
        run(words)
    assert capsys.readouterr().err.splitlines()[0] == line


def test_a_name_in_brackets_is_no_style(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal
    with busy("reading runs/a[/]"):
        time.sleep(0.15)  # drawn ten times a second
    assert "reading runs/a[/]" in capsys.readouterr().err
