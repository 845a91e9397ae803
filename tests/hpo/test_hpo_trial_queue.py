"""Trials are handed out once and finished once, whoever dies on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import optuna
import pytest
from hpo_toy import chains, finished, run_toy, running, slowly, toy_queue, value_of
from optuna.trial import TrialState

from trainfit.hpo.trial_queue import WORKER, Claim, Outcome, TrialQueue, is_gone, quiet, this_worker
from trainfit.hpo.workers import work

TOY = Path(__file__).parent / "hpo_toy.py"
ELSEWHERE = {"machine": "another machine", "pid": 1, "born": 0.0}


@pytest.fixture(params=["sqlite:///{}/hpo.db", "journal:{}/hpo.journal"], ids=["sqlite", "journal"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(request.param).format(tmp_path)


def params(queue: TrialQueue) -> list[dict[str, Any]]:
    return [trial.params for trial in finished(queue)]


def claim(queue: TrialQueue) -> Claim:
    taken = queue.claim()
    assert isinstance(taken, Claim)
    return taken


def test_a_study_ends_with_as_many_trials_as_were_asked_for(url: str):
    queue = toy_queue(url, trials=5)
    assert work(queue, run_toy) == "done"
    assert [t.value for t in finished(queue)] == [value_of(p) for p in params(queue)]
    assert len(finished(queue)) == 5
    assert work(queue, run_toy) == "done"
    assert len(queue.study.trials) == 5
    assert work(toy_queue(url, trials=7), run_toy) == "done"
    assert len(queue.study.trials) == 7


def test_the_same_seed_gives_the_same_trials_and_another_one_others(url: str):
    seeds = {"first": 3, "again": 3, "other": 4}
    first, again, other = (toy_queue(url, name, seed=seed) for name, seed in seeds.items())
    for queue in (first, again, other):
        work(queue, run_toy)
    assert params(first) == params(again)
    assert params(first) != params(other)
    assert len({p["x"] for p in params(first)}) == 8


def test_a_study_that_was_stopped_goes_on_as_if_it_had_not_been(url: str):
    whole = toy_queue(url, "whole", trials=8, sampler_startup=3)
    work(whole, run_toy)
    work(toy_queue(url, "parts", trials=4, sampler_startup=3), run_toy)
    dead = claim(toy_queue(url, "parts", trials=8, sampler_startup=3))
    dead.trial.set_user_attr(WORKER, {**this_worker(), "born": 0.0})  # its process is gone
    rest = toy_queue(url, "parts", trials=8, sampler_startup=3)
    work(rest, run_toy)
    assert params(rest) == params(whole)


def test_a_dead_worker_leaves_its_trial_with_its_parameters(url: str):
    queue = toy_queue(url)
    dead = claim(queue)
    dead.trial.set_user_attr(WORKER, {**this_worker(), "born": 0.0})
    again = claim(queue)
    assert again.params == dead.params
    assert again.trial.number != dead.trial.number
    states = [trial.state for trial in queue.study.trials]
    assert states == [TrialState.FAIL, TrialState.RUNNING]


@pytest.mark.soak
def test_a_worker_elsewhere_is_given_up_when_its_heartbeat_stops(url: str):
    queue = toy_queue(url, trials=1, heartbeat=1, grace=3)
    dead = claim(queue)
    dead.trial.set_user_attr(WORKER, ELSEWHERE)
    assert queue.claim() == "wait"
    start = time.monotonic()
    while (taken := queue.claim()) == "wait":
        queue.beat(dead.trial) if time.monotonic() - start < 4 else time.sleep(0.2)
    assert isinstance(taken, Claim)
    assert taken.params == dead.params
    assert time.monotonic() - start > 4  # alive while it beat


def test_a_process_that_died_while_it_claimed_is_recognised(url: str):
    queue = toy_queue(url, trials=2)
    with queue.database.locked("toy"), quiet():
        queue.study.ask()  # and dies before it says who it is
    work(queue, run_toy)
    assert [len(chain) for chain in chains(queue)] == [2, 1]
    assert len(finished(queue)) == 2


def test_a_death_between_failing_a_trial_and_queueing_it_again_loses_nothing(url: str):
    queue = toy_queue(url, trials=2)
    lost = claim(queue)
    queue.database.storage.set_trial_state_values(lost.trial._trial_id, TrialState.FAIL)
    work(queue, run_toy)
    assert lost.params in params(queue)
    assert len(finished(queue)) == 2


def test_what_is_told_too_late_does_not_count(url: str):
    queue = toy_queue(url, trials=1)
    slow = claim(queue)
    slow.trial.set_user_attr(WORKER, {**this_worker(), "born": 0.0})
    other = claim(queue)
    assert queue.tell(other.trial, Outcome(kind="complete", value=1.0))
    assert not queue.tell(slow.trial, Outcome(kind="complete", value=2.0))
    assert [trial.value for trial in finished(queue)] == [1.0]
    assert queue.claim() == "done"


def test_a_trial_that_kills_its_workers_is_given_up_and_another_takes_its_place(url: str):
    queue = toy_queue(url, trials=2, retries=2)
    first = claim(queue)
    tries = 0
    taken = first
    while taken.params == first.params:
        tries += 1
        taken.trial.set_user_attr(WORKER, {**this_worker(), "born": 0.0})
        taken = claim(queue)
    assert tries == 3
    assert queue.tell(taken.trial, run_toy(taken))
    work(queue, run_toy)
    assert len(finished(queue)) == 2


def test_stopping_often_is_no_death(url: str):
    queue = toy_queue(url, trials=1, retries=1)
    first = claim(queue)
    taken = first
    for _ in range(5):
        assert queue.tell(taken.trial, Outcome(kind="stopped"))
        taken = claim(queue)
        assert taken.params == first.params
    assert queue.tell(taken.trial, run_toy(taken))
    assert len(finished(queue)) == 1


def test_folds_that_were_done_are_not_done_again(url: str):
    queue = toy_queue(url, trials=1)
    taken = claim(queue)
    for fold, value in enumerate((0.5, 0.7)):
        taken.trial.report(value, fold)
    taken.trial.set_user_attr("folds", [0.5])
    assert queue.tell(taken.trial, Outcome(kind="stopped"))
    again = claim(queue)
    assert again.trial.user_attrs["folds"] == [0.5]
    assert queue.study.trials[again.trial.number].intermediate_values == {0: 0.5}


def test_no_trial_begins_after_the_hours_are_over(url: str):
    queue = toy_queue(url, hours=0.0)
    assert queue.claim() == "done"
    assert not queue.study.trials


def test_an_error_ends_the_worker_and_the_trial_comes_back(url: str):
    queue = toy_queue(url, trials=2)

    def broken(_claim: Claim) -> Outcome:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        work(queue, broken)
    assert queue.study.trials[0].user_attrs["reason"] == "OSError: disk full"
    work(queue, run_toy)
    assert params(queue)[0] == queue.study.trials[0].params


def test_what_breaks_after_a_signal_is_no_failure(url: str):
    """Ctrl-C reaches the planner's processes as well, and a plan that dies of it is no error."""
    queue = toy_queue(url, trials=2, retries=0)

    def broken(_claim: Claim) -> Outcome:
        os.kill(os.getpid(), signal.SIGINT)
        raise OSError("the estimator died")

    assert work(queue, broken) == "stopped"
    assert work(queue, run_toy) == "done"
    assert params(queue)[0] == queue.study.trials[0].params


def test_a_signal_ends_a_worker_after_its_trial_was_handed_back(url: str):
    queue = toy_queue(url, trials=3)

    def asked(taken: Claim) -> Outcome:
        os.kill(os.getpid(), signal.SIGTERM)
        return Outcome(kind="stopped")

    assert work(queue, asked) == "stopped"
    assert not running(queue)
    assert work(queue, run_toy) == "done"
    assert len(finished(queue)) == 3


@pytest.mark.soak
def test_a_trial_beats_while_it_runs(url: str):
    queue = toy_queue(url, trials=1, heartbeat=1, grace=3)
    seen = []

    def run(taken: Claim) -> Outcome:
        taken.trial.set_user_attr(WORKER, ELSEWHERE)
        until = time.monotonic() + 5
        while time.monotonic() < until:
            seen.append(queue.claim())
            time.sleep(0.3)
        return run_toy(taken)

    assert work(queue, run) == "done"
    assert set(seen) == {"wait"}


def test_workers_in_threads_take_no_trial_twice(url: str):
    queues = [toy_queue(url, trials=12) for _ in range(4)]
    threads = [threading.Thread(target=work, args=(queue, slowly(0.01))) for queue in queues]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(queues[0].study.trials) == len(finished(queues[0])) == 12


def test_whether_a_process_lives(tmp_path: Path):
    assert not is_gone(this_worker())
    assert not is_gone(ELSEWHERE)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    worker = {**this_worker(), "pid": child.pid}
    import psutil

    worker["born"] = psutil.Process(child.pid).create_time()
    assert not is_gone(worker)
    child.kill()
    time.sleep(0.2)
    assert is_gone(worker)  # a zombie too
    child.wait()
    assert is_gone(worker)


def killed_in_a_trial(worker: subprocess.Popen[bytes], queue: TrialQueue) -> bool:
    """Hold a worker that has a trial, and kill it if it has one still; else let it go on."""

    def is_busy() -> bool:
        return worker.pid in {(t.user_attrs.get(WORKER) or {}).get("pid") for t in running(queue)}

    if not is_busy():
        return False
    worker.send_signal(signal.SIGSTOP)
    busy = is_busy()
    worker.send_signal(signal.SIGKILL if busy else signal.SIGCONT)
    return busy


def crowd(url: str, *, workers: int, trials: int, kills: int, seconds: float = 0.15) -> TrialQueue:
    """Workers as processes, of which some are killed in the middle."""
    queue = toy_queue(url, trials=trials)
    words = [url, "toy", str(trials), str(seconds)]
    paths = os.pathsep.join([str(TOY.parent), *sys.path])
    crowd = [
        subprocess.Popen(
            [sys.executable, str(TOY), *words], env={**os.environ, "PYTHONPATH": paths}
        )
        for _ in range(workers)
    ]
    try:
        left = crowd[:kills]
        until = time.monotonic() + 90
        while left and time.monotonic() < until:
            if len(finished(queue)) >= 3 and killed_in_a_trial(left[0], queue):
                left.pop(0)
            time.sleep(0.02)
        assert not left, "the workers to kill got no trial"
        assert [worker.wait(300) for worker in crowd[kills:]] == [0] * (workers - kills)
    finally:
        for worker in crowd:
            with suppress(ProcessLookupError):
                worker.kill()
            worker.wait()
    return queue


def check_crowd(queue: TrialQueue, trials: int, kills: int) -> None:
    found = chains(queue)
    assert len(finished(queue)) == trials
    assert len(found) == trials
    for chain in found:  # none lost, none finished twice, and a retry is the same trial
        ended = [trial.state in (TrialState.COMPLETE, TrialState.PRUNED) for trial in chain]
        assert sum(ended) == 1
        assert all(trial.params == chain[0].params for trial in chain)
    assert len(queue.study.trials) - trials == sum(len(chain) - 1 for chain in found)
    assert len(queue.study.trials) - trials == kills
    assert optuna.load_study(study_name="toy", storage=queue.database.storage).best_value == max(
        trial.value for trial in finished(queue)
    )


@pytest.mark.soak
def test_workers_killed_on_sqlite_lose_nothing(url: str):
    check_crowd(crowd(url, workers=2, trials=12, kills=1), 12, 1)


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_thousand_trials_in_a_journal_with_sixteen_workers_of_which_eight_are_killed(
    tmp_path: Path,
):
    queue = crowd(f"{tmp_path}/soak.journal", workers=16, trials=1000, kills=8, seconds=0.05)
    check_crowd(queue, 1000, 8)


def test_a_line_that_a_killed_worker_left_half_written_is_no_harm(tmp_path: Path):
    path = tmp_path / "torn.journal"
    queue = toy_queue(str(path), trials=3)
    queue.tell(claim(queue).trial, Outcome(kind="complete", value=0.5))
    with path.open("ab") as file:
        file.write(b'{"op_code":6,"worker_id":"torn')
    for other in (toy_queue(str(path), trials=3), queue):
        assert len(finished(other)) == 1
    work(queue, run_toy)
    assert len(finished(toy_queue(f"journal://{path}", trials=3))) == 3


def test_trials_of_killed_workers_do_not_count_as_running(url: str):
    from trainfit.hpo.trial_queue import left_by_the_dead

    queue = toy_queue(url, trials=3)
    dead, alive, silent = claim(queue), claim(queue), claim(queue)
    dead.trial.set_user_attr(WORKER, {**this_worker(), "born": 0.0})
    silent.trial.set_user_attr(WORKER, ELSEWHERE)
    found = left_by_the_dead(queue.study, queue.database)
    assert [trial.number for trial in found] == [dead.trial.number]
    if url.startswith("journal"):
        beat = Path(f"{url.removeprefix('journal:')}.beats") / str(silent.trial._trial_id)
        os.utime(beat, (time.time() - 61, time.time() - 61))
        found = left_by_the_dead(queue.study, queue.database)
        assert [t.number for t in found] == [dead.trial.number, silent.trial.number]
    assert queue.tell(alive.trial, run_toy(alive))


def test_who_comes_at_the_same_time_finds_the_tables(tmp_path: Path):
    """Each makes Optuna's tables in a database that has none, or takes the other's."""
    begin = tmp_path / "begin"
    code = (
        "import sys, time; from pathlib import Path;"
        "from trainfit.hpo.storage import open_database;"
        "print('ready', flush=True)\n"
        "for turn in range(2):\n"
        f"    while not Path(f'{begin}{{turn}}').exists(): pass\n"
        f"    open_database(f'sqlite:///{tmp_path}/{{turn}}.db')\n"
        "    print('open', flush=True)\n"
    )
    them = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        assert all(one.stdout and one.stdout.readline() == "ready\n" for one in them)
        for turn in range(2):
            Path(f"{begin}{turn}").touch()
            for one in them:
                assert one.stdout
                assert one.stdout.readline() == "open\n", one.communicate()[1][-600:]
        assert [one.wait(30) for one in them] == [0, 0]
    finally:
        for one in them:
            one.kill()
