"""Trials side by side on a real GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainfit.cli.main import run
from trainfit.hpo.studies import find_study
from trainfit.hpo.trial_queue import FINISHED

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(240)]
WORDS = [
    *("nli", "model.name=bert-base", "model.weights=random", "model.method=full"),
    *("data.scale=small", "training.num_epochs=1", "training.effective_batch_size=8"),
    *("training.learning_rate=tag(log,interval(1e-5,1e-4))", "training.weight_decay=0.01"),
    *("training.warmup_ratio=0.1", "training.scheduler=linear", "model.pooling=first"),
    *("model.head_dropout=0.1", "model.feed_forward_dropout=0.1", "device.deterministic=true"),
    *("hpo.trials=3", "hpo.sampler_startup=99", "hpo.pruner=none", "hpo.study=mine", "cv.folds=2"),
]


def test_trials_side_by_side_give_the_bits_of_one_after_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    values, results = [], []
    for workers in ("1", "auto"):
        runs = tmp_path / workers
        words = [*WORDS, f"runs_dir={runs}", "--workers", workers, "--json"]
        assert run(["hpo", *words]) == 0
        results.append(json.loads(capsys.readouterr().out))
        trials = find_study("mine", f"sqlite:///{runs / 'hpo.db'}").study.trials
        values.append({json.dumps(t.params): t.value for t in trials if t.state in FINISHED})
    assert results[0]["side_by_side"] is None
    assert results[1]["side_by_side"]["planned"] > 1
    assert len(values[0]) == 3
    assert values[0] == values[1]
    assert results[1]["trials"] == {"complete": 3} or results[1]["side_by_side"]["kept"] == 1
