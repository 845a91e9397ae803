"""A name that was read from a file is imported only where it is trainfit's own."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tuning_toy import plan

from trainfit.core import codec
from trainfit.core.errors import BadInput
from trainfit.core.plan_records import OWN_FACTORIES, Plan, TaskSpec
from trainfit.jobs import job_plan, tuned_plans
from trainfit.jobs.tuned_plans import find_batch_size, job_of
from trainfit.planning.estimator import child
from trainfit.planning.estimator.estimate import Request
from trainfit.tuning.rungs import NAIVE_FACTORY


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that leaves a mark when it is imported."""
    marker = tmp_path / "ran"
    (tmp_path / "trapdoor.py").write_text(
        f"open({str(marker)!r}, 'w').close()\ndef build(**_): raise SystemExit\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield marker
    sys.modules.pop("trapdoor", None)


def loaded(folder: Path, factory: str, **arguments: Any) -> Plan:
    """A plan as it comes from a run folder of somebody else."""
    task = TaskSpec(factory=factory, arguments=arguments)
    replace(plan(), task=task).save(folder / "plan.json")
    return Plan.load(folder / "plan.json")


@pytest.mark.parametrize("factory", ["trapdoor:build", "os:system", NAIVE_FACTORY, "a"])
def test_a_plan_from_a_file_imports_nothing_of_its_own(factory: str, tmp_path: Path, trap: Path):
    task = loaded(tmp_path, factory).task
    for use in (
        task.function,
        lambda: find_batch_size(task),
        lambda: job_of(Plan.load(tmp_path / "plan.json")),
    ):
        with pytest.raises(BadInput, match="was read from a file, and is not imported"):
            use()
    assert not trap.exists()


def test_a_file_cannot_say_that_it_is_none(tmp_path: Path, trap: Path):
    loaded(tmp_path, "trapdoor:build")
    text = (tmp_path / "plan.json").read_text()
    assert '"from_file": false' in text
    assert Plan.load(tmp_path / "plan.json").task.from_file


def test_the_estimator_is_told_where_the_name_came_from(tmp_path: Path, trap: Path):
    request = Request(task=loaded(tmp_path, "trapdoor:build").task, targets=())
    sent = codec.loads(Request, codec.dumps(request, indent=None))
    assert "was read from a file" in str(child.answer(sent))
    assert not trap.exists()


def test_what_a_user_names_is_imported(trap: Path):
    assert TaskSpec(factory="trapdoor:build", arguments={}).function().__name__ == "build"
    assert trap.exists()


def test_every_factory_of_a_written_plan_is_allowed():
    assert {*job_plan._FACTORIES.values(), *tuned_plans.FACTORIES.values()} == set(OWN_FACTORIES)
    for factory in OWN_FACTORIES:
        assert callable(TaskSpec(factory=factory, arguments={}, from_file=True).function())
