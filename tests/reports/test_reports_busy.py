"""Stages that take a while say so in a pipe, with the time so far."""

from __future__ import annotations

import time

import pytest

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
