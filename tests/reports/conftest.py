"""Plans built by hand, and the page of a long run."""

from collections.abc import Callable
from pathlib import Path

import pytest
from report_runs import write_run

import plan_example
from trainfit.core.plan_records import Plan


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., Plan]:
    return plan_example.make_plan


@pytest.fixture(scope="session")
def long_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run of a hundred thousand logged steps."""
    from trainfit.reports.run_report import report, write

    root = tmp_path_factory.mktemp("long")
    folder = write_run(root / "nli-1", plan_example.PLAN, steps=100_000)
    return write(report(folder), root / "page.html")
