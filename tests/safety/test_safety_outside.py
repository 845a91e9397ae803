"""Other people's programs are told no secret: trackers, and pages about a command of theirs."""

from __future__ import annotations

import json
import re
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.text import Text

from trainfit.cli.main import run
from trainfit.conf import compose
from trainfit.core.records import Receipt
from trainfit.engine import observers
from trainfit.jobs import model_card
from trainfit.measuring import observe
from trainfit.measuring.observe import Observed
from trainfit.reports import terminal
from trainfit.runs.run_folder import Journal

HIDDEN = "hiddenword"
URL = f"https://me:{HIDDEN}@example.org/data"


class Wandb:
    """Takes what wandb takes at the start of a run: the config, and the command line."""

    def init(self, **given: Any) -> Any:
        self.told = repr((given, sys.argv))
        return SimpleNamespace(log=lambda *_, **__: None)


def test_a_tracker_gets_neither_values_nor_a_command_with_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]
    typed = ["trainfit", "train", f"data.data_dir={URL}", "--password", HIDDEN]
    monkeypatch.setattr(sys, "argv", typed)
    composed = compose("nli", [f"data.data_dir='{URL}'"])
    [_] = observers.open_trackers("wandb", tmp_path, composed)
    assert HIDDEN not in wandb.told
    assert "https://***@example.org/data" in wandb.told
    assert sys.argv is typed


@pytest.mark.parametrize("form", ["--json", "--markdown", ""])
def test_a_receipt_names_the_command_without_its_secrets(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    seen = Observed(steps=3, receipt=Receipt(run="", items=()))
    monkeypatch.setattr(observe, "run_observed", lambda *_: (0, seen))
    words = ["python", "train.py", "--password", HIDDEN, f"--db={URL}", f"API_KEY={HIDDEN}"]
    own = ["verify", *([form] if form else []), "--", *words]
    assert run(own) == 0
    said = capsys.readouterr()
    assert "train.py --password *** --db=https://***@example.org/data API_KEY=***" in " ".join(
        said.out.split()
    )
    assert HIDDEN not in said.out + said.err


def test_the_report_of_an_older_run_leaves_out_what_the_run_wrote_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    files = {
        "environment.json": {"command": ["trainfit", f"hpo.storage={URL}", "--token", HIDDEN]},
        "config.json": {"task": "nli", "config": {"data": {"data_dir": URL}}, "origins": {}},
        "run.json": {"id": "0"},
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "train.log").write_text("")
    (tmp_path / "metrics.jsonl").write_text("")
    for form in ("json", "markdown", "html"):
        assert run(["report", str(tmp_path), "--format", form]) == 0
    said = capsys.readouterr()
    pages = said.out + (tmp_path / "report.html").read_text()
    assert "https://***@example.org/data" in pages
    assert HIDDEN not in pages + said.err


NAME = "\x1b[2J\x1b]0;x\u202epos"
"""A class that a terminal would obey."""
SHOWN = r"\x1b[2J\x1b]0;x\u202epos"


@pytest.mark.parametrize("colors", ["", "1"])
def test_names_of_data_are_plain_text_to_a_terminal(
    colors: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FORCE_COLOR", colors)
    console = terminal.console()
    assert console.is_terminal is bool(colors)
    console.print(Text(NAME), soft_wrap=True)
    rows = [{"class": NAME, NAME: 0.5}, {"class": "[red]neg[/]", NAME: 0.5}]
    console.print(terminal.answers_table(rows))
    said = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert SHOWN in said
    assert said.count(r"\x1b[2J") == 3
    assert "[red]neg[/]" in said  # no style of rich's
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", said)


def test_logs_and_cards_hold_nothing_that_a_terminal_obeys(tmp_path: Path):
    with closing(Journal(tmp_path)) as journal:
        journal.line(f"Classes to train on: {NAME}")
    assert SHOWN in (tmp_path / "train.log").read_text()
    card = model_card._table([NAME, "a|b"], [["<script>", "1"]])
    assert card.splitlines()[0] == rf"| {SHOWN} | a\|b |"
    assert card.splitlines()[2] == r"| \<script> | 1 |"
