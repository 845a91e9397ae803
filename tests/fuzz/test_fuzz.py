"""Some cases of the fuzzer, and what it says of commands that misbehave."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from fuzz_case import KINDS, Case, deal, make_case
from fuzz_running import Fuzzer, Worker, judge

FINE: dict[str, Any] = {"code": 0}
REFUSED: dict[str, Any] = {"code": 2}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("cases", "seed"), [(32, 1), pytest.param(600, 2, marks=pytest.mark.soak)])
def test_hostile_cases_are_done_or_refused_in_a_line(cases: int, seed: int, tmp_path: Path):
    fuzzer = Fuzzer(tmp_path, seed, limit=60, plan=False)
    names = [name for name in deal(cases, list(KINDS)) if _made_soon(make_case(seed, *name), cases)]
    outcomes = list(fuzzer.run_all(names, workers=1))
    assert len(outcomes) == len(names)
    wrong = [
        (o.fault, f"make fuzz SEED={seed} CASE={o.name}", o.shown) for o in outcomes if o.fault
    ]
    assert not wrong


def _made_soon(case: Case, cases: int) -> bool:
    """Leave out of a small sample the cases whose templates take longer than themselves."""
    return cases > 100 or case.template in (None, "textclass", "gpt")


def test_a_case_is_the_same_each_time():
    for kind in KINDS:
        assert make_case(3, kind, 5) == make_case(3, kind, 5)


@pytest.mark.parametrize(
    ("answer", "out", "err", "expect", "fault"),
    [
        (FINE, "done", "", "any", None),
        (FINE, "done", "", "ok", None),
        (REFUSED, "", "trainfit: seed is nan; use a number\n", "refused", None),
        (FINE, "done", "", "refused", "wrongly accepted"),
        (REFUSED, "", "trainfit: no\n", "ok", "wrongly refused"),
        (REFUSED, "", "", "any", "refused without a clear line"),
        (REFUSED, "", "trainfit: no\nWarning: x\n", "any", "refused without a clear line"),
        ({"code": 1}, "", "trainfit: internal error, KeyError: 'a'\n", "any", "internal error"),
        ({"code": 1}, "", "Traceback (most recent call last):\n", "any", "traceback"),
        ({"code": 3}, "", "", "any", "exit code 3"),
        ({"hang": True}, "", "", "any", "hang"),
        ({"signal": 11}, "", "", "any", "died of signal 11"),
        (REFUSED, "", "trainfit: " + "x" * 3000, "any", "a long line"),
        (FINE, "x" * (1 << 21), "", "any", "too much output"),
    ],
)
def test_every_way_to_misbehave_is_seen(
    answer: dict[str, Any], out: str, err: str, expect: Any, fault: str | None
):
    assert judge(Case(["x"], expect=expect), answer, out, err) == fault


def test_a_process_that_hangs_or_dies_is_reported_and_replaced(tmp_path: Path):
    """The `sleep` and `kill` stand for a command that does the same."""

    class Fake(Worker):
        script = tmp_path / "worker.py"

    Fake.script.write_text(
        "import json, os, sys, time\n"
        "print(json.dumps({'ready': True}), flush=True)\n"
        "for line in sys.stdin:\n"
        "    what = json.loads(line)['what']\n"
        "    if what == 'sleep': time.sleep(60)\n"
        "    if what == 'kill': os.abort()\n"
        "    print(json.dumps({'code': 0}), flush=True)\n"
    )
    worker = Fake()
    began = time.monotonic()
    assert worker.ask({"what": "sleep"}, 0.3) == {"hang": True}
    assert worker.ask({"what": "kill"}, 20) == {"signal": 6}
    assert worker.ask({"what": "nothing"}, 20) == {"code": 0}
    worker.end()
    assert time.monotonic() - began < 30
