"""A name that was read from a file is imported only where it is trainfit's own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tuning_toy import plan

import trainfit
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


def test_no_child_looks_for_modules_in_the_current_folder():
    """`python -c` and `python -m` do, before anywhere else: a data folder may hold a torch.py."""
    package = Path(trainfit.__file__).parent
    started = [
        " ".join(found.split())
        for file in package.rglob("*.py")
        for found in re.findall(r"sys\.executable,\s*[^\n]*", file.read_text("utf-8"))
        if "caches.libraries" not in found  # the name of a cache
    ]
    assert len(started) >= 6
    assert [one for one in started if '"-P"' not in one and "*safe_flags()" not in one] == []


@pytest.mark.soak
def test_a_folder_of_someone_runs_nothing(tmp_path: Path):
    """With -P the command is what the script `trainfit` is: it does not look there itself."""
    for name in ("torch", "json", "statistics", "transformers", "numpy"):
        told = f"from pathlib import Path; Path({str(tmp_path / 'ran')!r}).touch()"
        (tmp_path / f"{name}.py").write_text(f"{told}; raise SystemExit(9)")
    words = ["experiment=gpt_embedded", f"runs_dir={tmp_path / 'runs'}", "training.max_steps=2"]
    path = os.pathsep.join(entry for entry in sys.path if entry not in ("", str(Path.cwd())))
    for command in (["plan", "gpt", "--gpu", "t4", words[0]], ["train", "gpt", *words]):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "trainfit", *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "TRAINFIT_CACHE": str(tmp_path / "cache")},
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()
