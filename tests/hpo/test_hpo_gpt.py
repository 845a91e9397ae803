"""Pretraining is searched by its validation loss."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from optuna.trial import TrialState

from gpt_tiny import be_quick, gpt_words
from trainfit.hpo.objective import Objective
from trainfit.hpo.outcome import finish
from trainfit.hpo.studies import open_study, read_setting
from trainfit.hpo.workers import run_trial, work


@pytest.mark.soak
def test_a_study_of_a_gpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    be_quick(monkeypatch)
    words = [
        word
        for word in gpt_words(tmp_path)
        if not word.startswith(("training.learning_rate", "training.warmup_steps"))
    ]
    sweeps = [
        "training.learning_rate=tag(log,interval(1e-4,1e-1))",
        "training.warmup_steps=range(1,5)",
        "training.effective_batch_size=4,8",
    ]
    asked = read_setting("gpt", [*words, *sweeps, "hpo.trials=3", "hpo.least_steps=1"])
    objective = Objective(asked.composed, asked.hpo.metric)
    study = open_study(asked, lambda: objective)
    assert study.folds == 1
    assert work(study.queue(), partial(run_trial, study, objective)) == "done"
    trials = study.study.trials
    assert study.study.direction.name == "MINIMIZE"
    assert trials[0].params["training.learning_rate"] == 3e-4
    assert len({trial.params["training.learning_rate"] for trial in trials}) == 3
    best = finish(study, lambda: objective)
    assert best is not None
    complete = [trial.value for trial in trials if trial.state == TrialState.COMPLETE]
    assert best.value == min(complete)
    assert best.test["val_loss"] == pytest.approx(best.value)  # the same run, on the same tokens
    assert (Path(best.run) / "export").is_dir()


def test_values_that_exclude_each_other_reject_their_trial_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    be_quick(monkeypatch)
    words = [*gpt_words(tmp_path), "model.n_head=2,3", "hpo.trials=2", "hpo.least_steps=1"]
    asked = read_setting("gpt", [*words, "training.max_steps=1", "training.eval_steps=1"])
    objective = Objective(asked.composed, asked.hpo.metric)
    study = open_study(asked, lambda: objective)
    study.study.enqueue_trial({"model.n_head": 3})
    assert work(study.queue(), partial(run_trial, study, objective)) == "done"
    first, second = study.study.trials
    assert first.state == TrialState.COMPLETE
    assert second.state == TrialState.PRUNED
    assert (
        "rejected: gpt-tiny: n_embd 32 is not a multiple of n_head 3" in second.user_attrs["reason"]
    )
