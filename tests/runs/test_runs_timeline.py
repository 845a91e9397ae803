"""The time line of a run: stages that add up to the wall time, whatever happens in them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfit.runs import timeline


class Clock:
    """Stands in for time.monotonic."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(timeline.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / timeline.FILE).read_text().splitlines()]


def test_nested_stages_subtract_and_all_add_up(clock: Clock, tmp_path: Path) -> None:
    with timeline.recording():
        clock.now += 2  # start
        with timeline.stage("plan"):
            clock.now += 3
        clock.now += 1  # other
        timeline.write_to(tmp_path)
        with timeline.stage("between folds", 1), timeline.stage("steps"):
            clock.now += 10
            timeline.mark(timeline.FIRST_UPDATE)
            timeline.took("compile", 4)
            with timeline.stage("evaluation"):
                clock.now += 5
    found = rows(tmp_path)
    assert timeline.seconds_by_stage(found) == {
        "start": 2, "plan": 3, "compile": 4, "steps": 6, "evaluation": 5, "other": 1,
    }  # fmt: skip
    assert sum(row["seconds"] for row in found) == clock.now - 100
    begins = {row["stage"]: (row["begin"], row["fold"]) for row in found}
    assert begins["plan"] == (2, None)
    assert begins["steps"] == (6, 1)
    assert begins["compile"] == (12, 1)
    assert begins[timeline.FIRST_UPDATE] == (16, 1)


tree = st.recursive(
    st.floats(0, 10), lambda inside: st.tuples(st.sampled_from("abc"), st.lists(inside, max_size=4))
)


@settings(max_examples=50, deadline=None)
@given(parts=st.lists(tree, max_size=5))
def test_any_nesting_adds_up(parts: list[Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("run")
    expected: dict[str, float] = {}
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch)

        def take(part: Any, name: str) -> None:
            if isinstance(part, float):
                clock.now += part
                expected[name] = expected.get(name, 0.0) + part
                return
            with timeline.stage(part[0]):
                for inner in part[1]:
                    take(inner, part[0])

        with timeline.recording():
            timeline.write_to(folder)
            for part in (("a", []), *parts):
                take(part, "other")
    found = timeline.seconds_by_stage(rows(folder))
    for name, seconds in expected.items():
        assert found.get(name, 0.0) == pytest.approx(seconds, abs=0.01)


def test_a_stage_that_raises_is_recorded(clock: Clock, tmp_path: Path) -> None:
    @timeline.stage("judge")
    def fails() -> None:
        clock.now += 7
        raise ValueError

    with pytest.raises(ValueError), timeline.recording():  # noqa: PT011, PT012
        timeline.write_to(tmp_path)
        fails()
    assert timeline.seconds_by_stage(rows(tmp_path)) == {"judge": 7}


def test_nothing_is_recorded_outside_of_a_recording(tmp_path: Path) -> None:
    timeline.write_to(tmp_path)
    timeline.took("compile", 1)
    timeline.mark("moment")
    with timeline.stage("plan"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_fails_no_run(tmp_path: Path) -> None:
    with timeline.recording():
        timeline.write_to(tmp_path / "gone")
        with timeline.stage("plan"):
            pass
    assert not (tmp_path / "gone").exists()


def test_another_thread_does_not_count(clock: Clock, tmp_path: Path) -> None:
    def work() -> None:
        with timeline.stage("checkpoint"):
            clock.now += 5

    with timeline.recording(), timeline.stage("steps"):
        timeline.write_to(tmp_path)
        thread = Thread(target=work)
        thread.start()
        thread.join()
    assert timeline.seconds_by_stage(rows(tmp_path)) == {"steps": 5}


def test_the_start_counts_from_the_process(tmp_path: Path) -> None:
    script = (
        "import time; time.sleep(0.3)\n"
        "from pathlib import Path\n"
        "from trainfit.runs import timeline\n"
        "with timeline.recording(from_process_start=True):\n"
        f"    timeline.write_to(Path({str(tmp_path)!r}))\n"
        "    with timeline.stage('plan'): pass\n"
    )
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", script], check=True)
    took = time.monotonic() - began
    [start, *_] = rows(tmp_path)
    assert (start["stage"], start["begin"]) == ("start", 0)
    assert 0.29 < start["seconds"] < took + 0.02
