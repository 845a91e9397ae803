"""Trials in processes of their own: whatever happens to one is a record, and the next one runs."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tuning_toy as toy

from trainfit.core.errors import RunFailed
from trainfit.core.plan_records import MemoryEstimate, TaskSpec
from trainfit.tuning.children import Children
from trainfit.tuning.search import search
from trainfit.tuning.tuned_cache import Trial, TrialCandidate
from trainfit.tuning.tuner import conclude

QUICK = {"steps": 3, "warm_up": 1}


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    with Children(["tuning_toy"]) as made:
        yield made


def run(children: Children, candidate: TrialCandidate, limit: float = 60.0) -> Trial:
    return children.run(candidate, limit=limit, **QUICK)


@pytest.mark.soak
def test_a_child_stays_and_its_failures_do_not(children: Children) -> None:
    first = run(children, toy.candidate(sleep=0.01))
    assert first.status == "ok"
    began = time.monotonic()
    assert run(children, toy.candidate()).status == "ok"
    again = time.monotonic() - began

    crashed = run(children, toy.candidate({"optimizer": "adamw"}, how="crash"))
    assert (crashed.status, crashed.settings) == ("crashed", {"optimizer": "adamw"})
    assert "exit code 7" in crashed.note
    began = time.monotonic()
    assert run(children, toy.candidate()).status == "ok"  # in a new process
    assert time.monotonic() - began > again

    began = time.monotonic()
    hung = run(children, toy.candidate(how="hang"), limit=1.0)
    assert hung.status == "hung"
    assert "1 s" in hung.note
    assert time.monotonic() - began < 10
    assert run(children, toy.candidate(how="oom")).status == "oom"
    assert run(children, toy.candidate()).status == "ok"
    assert run(children, toy.candidate(), limit=0.0).status == "skipped"  # not its fault


@pytest.mark.soak
def test_a_trial_that_is_killed_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    folders = []

    def wait_for_it() -> None:
        while not folders:
            folders.extend(tmp_path.glob("trainfit-trial-*"))
            time.sleep(0.01)

    with Children(["tuning_toy"]) as own:
        assert run(own, toy.candidate()).status == "ok"
        watch = threading.Thread(target=wait_for_it, daemon=True)
        watch.start()
        assert run(own, toy.candidate(how="hang"), limit=2.0).status == "hung"
        watch.join(5.0)
    assert folders
    assert not list(tmp_path.glob("trainfit-trial-*"))


@pytest.mark.soak
def test_the_setting_that_sleeps_less_is_chosen(children: Children) -> None:
    """In the toy, adamw sleeps twice as long as adamw_fused; the rest of a step is nothing."""
    task = TaskSpec(factory="tuning_toy:trial", arguments={"sleep": 0.02})
    slow = TrialCandidate(settings={}, plan=toy.plan(optimizer="adamw"), task=task)
    fast = TrialCandidate(settings={"optimizer": "adamw_fused"}, plan=toy.plan(), task=task)
    broken = toy.candidate({"num_workers": 4}, how="error")
    found = search([slow, broken, fast], lambda _winner: (), children.run, seconds=60)
    result = conclude(slow.plan, found, 1.0)
    assert result.best.optimizer == "adamw_fused"
    assert result.gain == pytest.approx(2.0, rel=0.2)
    assert [trial.status for trial in found.trials[:3]] == ["ok", "failed", "ok"]
    assert result.ended == "finished"


def test_all_are_gone_in_the_end_with_their_workers() -> None:
    with Children(["tuning_toy"]) as made:
        run(made, toy.candidate(workers=1))
        [child] = made._children.values()
        pid = child._process.pid
        assert os.getpgid(pid) == pid  # Ctrl-C at the terminal is the parent's alone
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)


def test_a_way_of_compiling_has_its_child_and_not_too_many_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[list[str]] = []
    ended: list[object] = []

    class Fake:
        def __init__(self, modules: list[str]) -> None:
            started.append(modules)

        def wait_until_ready(self) -> None: ...

        def ask(self, _line: str, _limit: float) -> tuple[str, None]:
            return Trial(settings={}, status="ok").to_json(indent=None), None

        def end(self) -> None:
            ended.append(self)

    monkeypatch.setattr("trainfit.tuning.children._Child", Fake)
    with Children(["m"], at_most=2) as made:
        for changes in (
            {},
            {"optimizer": "adamw"},
            {"compile": True},
            {"compile": True, "compile_mode": "reduce-overhead"},
        ):
            run(made, toy.candidate(changes))
        assert len(started) == 3
        assert len(ended) == 1
        assert len(made._children) == 2
        run(made, with_memory(toy.candidate(), peak=22.0))  # two GiB are left: one may wait
        assert len(made._children) == 2
        run(made, with_memory(toy.candidate(), peak=23.9))
        assert list(made._children) == ["eager"]


def with_memory(candidate: TrialCandidate, peak: float) -> TrialCandidate:
    """Predicted to take so much of 24 GiB."""
    parts = dict.fromkeys(MemoryEstimate.__dataclass_fields__, 1.0)
    memory = MemoryEstimate(
        **parts | {"peak_reserved_gib": peak, "capacity_gib": 24.0, "fits": True}
    )
    return replace(candidate, plan=replace(candidate.plan, memory=memory))


def test_a_child_that_cannot_start_ends_the_search_with_a_line() -> None:
    with Children(["no_such_module_anywhere"]) as made, pytest.raises(RunFailed, match="exit code"):
        run(made, toy.candidate())


@pytest.mark.soak
def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import os, sys, tuning_toy as toy\n"
        "from trainfit.tuning.children import Children\n"
        "made = Children(['tuning_toy']); made.start(['eager'])\n"
        "[child] = made._children.values(); child.wait_until_ready()\n"
        "print(child._process.pid, flush=True); os._exit(0)\n"
    )
    path = os.pathsep.join([str(Path(toy.__file__).parent), *sys.path])
    told = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    pid = int(told.stdout)
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline and Path(f"/proc/{pid}").exists():
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()
