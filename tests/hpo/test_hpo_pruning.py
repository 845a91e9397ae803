"""What trials report, and that each pruner ends a bad one and spares a good one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import optuna
import pytest

from trainfit.conf.search_space_files import HpoConfig, compose_study
from trainfit.hpo.objective import Reporter, make_pruner, note_on, steps_per_fold
from trainfit.hpo.trial_queue import quiet

FOLDS, STEPS = 5, 10


def config(pruner: str) -> HpoConfig:
    return replace(
        compose_study("nli", []).hpo,
        pruner=pruner,  # type: ignore[arg-type]
        pruner_startup=2,
        pruner_warmup=2,
        pruner_threshold=0.1,
    )


def play(study: optuna.Study, level: float, pruner: str, *, evaluations: int = STEPS) -> Any:
    """A trial whose folds all climb to `level`; returns how many folds and reports it had."""
    trial = study.ask()
    by_fold = pruner == "wilcoxon"
    steps = 1 if by_fold else STEPS
    reporter = Reporter(trial, "f1", greater=True, by_fold=by_fold, folds=FOLDS, steps=steps)
    done: list[float] = []
    try:
        for fold in range(FOLDS):
            value = level + 0.001 * fold
            reporter.begin(done)
            reporter.on_start(0, 100)
            for k in range(1, evaluations + 1):
                reporter.on_evaluation(100 * k // evaluations, {"f1": value * k / evaluations})
            reporter.ended(value)
            done.append(value)
    except optuna.TrialPruned as pruned:
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        return len(done), study.trials[trial.number].intermediate_values, str(pruned)
    study.tell(trial, sum(done) / FOLDS)
    return len(done), study.trials[trial.number].intermediate_values, ""


def new_study(pruner: str) -> optuna.Study:
    hpo = config(pruner)
    steps = steps_per_fold(hpo, STEPS)
    with quiet():
        pruner = make_pruner(hpo, FOLDS, steps)
    return optuna.create_study(
        direction="maximize",
        pruner=pruner,
        study_name="a name that hyperband hashes",
        sampler=optuna.samplers.RandomSampler(seed=0),
    )


def test_a_report_is_the_mean_of_the_folds_with_the_best_so_far_of_this_one():
    study = new_study("none")
    _, found, _ = play(study, 0.5, "none")
    assert sorted(found) == list(range(FOLDS * STEPS))
    assert found[0] == pytest.approx(0.05)
    assert found[STEPS - 1] == pytest.approx(0.5)
    assert found[STEPS + 4] == pytest.approx((0.5 + 0.501 * 0.5) / 2)
    assert found[2 * STEPS - 1] == pytest.approx((0.5 + 0.501) / 2)
    assert found[FOLDS * STEPS - 1] == pytest.approx(study.trials[0].value)


def test_more_or_fewer_evaluations_are_compared_where_as_much_was_seen():
    study = new_study("none")
    _, few, _ = play(study, 0.5, "none", evaluations=4)
    _, many, _ = play(study, 0.5, "none", evaluations=33)
    assert [step for step in few if step < STEPS] == [2, 4, 7, 9]
    assert [step for step in many if step < STEPS] == list(range(STEPS))
    assert all(abs(few[step] - many[step]) <= 0.05 for step in few)


def test_a_fold_that_stopped_early_still_reports_its_end():
    study = new_study("none")
    trial = study.ask()
    reporter = Reporter(trial, "f1", greater=True, by_fold=False, folds=FOLDS, steps=STEPS)
    reporter.begin([])
    reporter.on_start(0, 100)
    reporter.on_evaluation(10, {"f1": 0.4})
    reporter.on_evaluation(20, {"f1": 0.3})
    reporter.ended(0.4)
    assert study.trials[0].intermediate_values == {0: 0.4, 1: 0.4, 9: 0.4}


@pytest.mark.parametrize("greater", [True, False])
def test_the_best_so_far_is_in_the_direction_of_the_metric(greater: bool):
    study = new_study("none")
    reporter = Reporter(
        study.ask(), "loss", greater=greater, by_fold=False, folds=FOLDS, steps=STEPS
    )
    reporter.begin([])
    reporter.on_start(0, 100)
    for k, value in enumerate((0.5, 0.9, 0.2, float("nan")), 1):
        reporter.on_evaluation(10 * k, {"loss": value})
    found = list(study.trials[0].intermediate_values.values())
    assert found == ([0.5, 0.9, 0.9, 0.9] if greater else [0.5, 0.5, 0.2, 0.2])


@pytest.mark.parametrize("pruner", ["median", "hyperband", "wilcoxon"])
def test_a_bad_trial_is_given_up_and_a_good_one_is_not(pruner: str):
    study = new_study(pruner)
    for level in (0.7, 0.8, 0.75):
        play(study, level, pruner)
    bad = [play(study, 0.2, pruner) for _ in range(6)]
    assert any(why and folds < FOLDS for folds, _, why in bad)
    folds, _, why = play(study, 0.9, pruner)
    assert (folds, why) == (FOLDS, "")


def test_the_median_prunes_within_the_first_fold_and_wilcoxon_between_folds():
    study = new_study("median")
    for level in (0.7, 0.8):
        play(study, level, "median")
    folds, reports, why = play(study, 0.2, "median")
    assert folds == 0
    assert len(reports) == 3  # two to warm up, and the third decides
    assert why.startswith("by the pruner in fold 1")
    study = new_study("wilcoxon")
    play(study, 0.8, "wilcoxon")
    folds, reports, why = play(study, 0.2, "wilcoxon")
    assert folds == 3  # four folds are the least whose p-value is under 0.1
    assert sorted(reports) == [0, 1, 2, 3]


def test_nothing_prunes_where_nothing_should():
    study = new_study("none")
    assert [play(study, level, "none")[0] for level in (0.9, 0.1, 0.0)] == [FOLDS] * 3


def test_a_pruner_that_cannot_prune_is_told_of():
    assert note_on(config("wilcoxon"), 4) is None
    assert "never prunes with 3 folds" in str(note_on(config("wilcoxon"), 3))
    assert note_on(config("median"), 2) is None
