"""A trial is a run like any other: its parameters reach it, and its memory troubles end with it."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from optuna.trial import TrialState
from torch import nn

from job_tiny import be_quick, nli_words, quick_plan, words, write_texts
from trainfit.conf.search_space_files import compose_study
from trainfit.core.errors import BadInput, RunFailed
from trainfit.core.plan_records import Plan
from trainfit.engine import loop, recovery
from trainfit.hpo import outcome as ending
from trainfit.hpo.objective import Objective
from trainfit.hpo.outcome import status_of
from trainfit.hpo.studies import OpenStudy, StudySettings, find_study, open_study, read_setting
from trainfit.hpo.workers import run_trial, work
from trainfit.jobs import frozen, nli
from trainfit.jobs.models.classifier import EncoderClassifier
from trainfit.planning import planner

SMALL = (
    "hpo.trials=4",
    "hpo.heartbeat=1",
    "hpo.least_steps=2",
    "cv.folds=2",
    "training.learning_rate=tag(log,interval(1e-4,1e-2))",
)
PREPARED: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    be_quick(monkeypatch)
    prepare = nli.prepare

    def once(composed: Any, *, nested: bool = True) -> Any:
        values = composed.values().items()
        about = [v for k, v in values if k.startswith(("data", "cv", "seed", "model.name"))]
        key = repr([nested, about])
        PREPARED[key] = PREPARED.get(key) or prepare(composed, nested=nested)
        return replace(PREPARED[key], composed=composed)

    monkeypatch.setattr(nli, "prepare", once)


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data and the model of all tests here."""
    HOME.append(tmp_path_factory.mktemp("home"))
    return HOME[-1]


HOME: list[Path] = []


def setting(tmp: Path, *more: str) -> StudySettings:
    """`max_steps` is small unless a test is about the steps."""
    given = {word.partition("=")[0] for word in more} | {"training.learning_rate", "runs_dir"}
    base = [*nli_words(HOME[-1]), "training.max_steps=3"]
    base = [word for word in base if word.partition("=")[0] not in given]
    return read_setting("nli", [*base, *SMALL, f"runs_dir={tmp / 'runs'}", *more])


def opened(tmp: Path, *more: str) -> tuple[OpenStudy, Objective]:
    asked = setting(tmp, *more)
    objective = Objective(asked.composed, asked.hpo.metric)
    return open_study(asked, lambda: objective), objective


def search(tmp: Path, *more: str) -> OpenStudy:
    study, objective = opened(tmp, *more)
    assert work(study.queue(), partial(run_trial, study, objective)) == "done"
    return study


# ── every parameter of the default space reaches the run ──────────────────────────────────────


class Seen:
    """What the steps of a run really had."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rates: list[float] = []
        self.sizes: list[int] = []
        self.model: Any = None
        self.decays: set[float] = set()
        take = loop.take_step

        def watched(parts: Any, loaded: Any, *args: Any, **more: Any) -> Any:
            self.rates.append(parts.optimizer.param_groups[0]["lr"])
            self.decays |= {group["weight_decay"] for group in parts.optimizer.param_groups}
            self.sizes.append(len(loaded.sequences))
            self.model = parts.model
            return take(parts, loaded, *args, **more)

        patch.setattr(loop, "take_step", watched)


def seen(tmp: Path, patch: pytest.MonkeyPatch, params: dict[str, Any], *more: str) -> Seen:
    asked = setting(tmp, "training.max_steps=20", *more)
    objective = Objective(asked.composed, "f1")
    composed = asked.compose(params)
    found = Seen(patch)
    number = len(list(tmp.glob("out-*")))
    objective.train(composed, objective.plan(composed), 0, tmp / f"out-{number}", ())
    return found


def after_warmup(rates: list[float], ratio: float) -> list[float]:
    return rates[math.ceil(len(rates) * ratio) :]


def check_rate(found: Seen, value: Any) -> None:
    assert max(found.rates) == pytest.approx(value, rel=0.1)
    assert max(found.rates) <= value


def check_decay(found: Seen, value: Any) -> None:
    assert max(found.decays) == value


def check_warmup(found: Seen, value: Any) -> None:
    steps = math.ceil(len(found.rates) * value)
    climbing = np.diff(found.rates) > 0
    assert climbing[:steps].all()
    assert not climbing[steps:].any()


def check_scheduler(found: Seen, value: Any) -> None:
    falling = after_warmup(found.rates, 0.1)
    steps = np.diff(falling)
    if value == "linear":
        assert steps == pytest.approx(np.full(len(steps), steps[0]))
    elif value == "cosine":
        ideal = [math.cos(math.pi * k / len(falling)) / 2 + 0.5 for k in range(len(falling))]
        assert np.array(falling) / falling[0] == pytest.approx(ideal)
    else:
        assert (steps > 0).any()


def check_batch(found: Seen, value: Any) -> None:
    others = [size for size in found.sizes if size != value]
    assert found.sizes[0] == value
    assert set(others) <= {207 % value}  # the end of an epoch of 207 pairs
    assert len(others) <= len(found.sizes) / 4


def check_pooling(found: Seen, value: Any) -> None:
    names = {"max": "MaxPooler", "attention_kv": "KeyValueProbePooler"}
    assert isinstance(found.model, EncoderClassifier)
    kind = type(found.model.pooler).__name__
    assert kind == names.get(value, "MeanPooler")
    if kind == "MeanPooler":
        assert found.model.pooler.which == value


def check_head_dropout(found: Seen, value: Any) -> None:
    assert found.model.dropout.p == value


def check_dropout(found: Seen, value: Any) -> None:
    inside = {m.p for m in found.model.encoder.modules() if isinstance(m, nn.Dropout)}
    assert (0.1 if value is None else value) in inside
    assert not inside - {0.1, 0.0 if value is None else value, value}


def check_rank(found: Seen, value: Any) -> None:
    shapes = {p.shape[0] for n, p in found.model.named_parameters() if "lora_A" in n}
    assert shapes == {value}


CHECKS: dict[str, Callable[[Seen, Any], None]] = {
    "training.learning_rate": check_rate,
    "training.weight_decay": check_decay,
    "training.warmup_ratio": check_warmup,
    "training.scheduler": check_scheduler,
    "training.effective_batch_size": check_batch,
    "model.pooling": check_pooling,
    "model.head_dropout": check_head_dropout,
    "model.feed_forward_dropout": check_dropout,
    "model.lora_rank": check_rank,
}


def sampled(rate: float, decay: float, shape: str, pool: str, *dropouts: Any) -> dict[str, Any]:
    return {
        "training.learning_rate": rate,
        "training.weight_decay": decay,
        "training.scheduler": shape,
        "model.pooling": pool,
        "model.head_dropout": dropouts[0],
        "model.feed_forward_dropout": dropouts[1],
    }


def adapted(warm_up: float, batch: int, rank: int) -> dict[str, Any]:
    return {
        "training.warmup_ratio": warm_up,
        "training.effective_batch_size": batch,
        "model.lora_rank": rank,
    }


SAMPLED = [
    sampled(2e-4, 0.003, "linear", "max", 0.07, None),
    adapted(0.05, 32, 4),
    sampled(5e-3, 0.07, "cosine", "last", 0.3, 0.0),
    sampled(1e-3, 0.01, "cosine_with_restarts", "attention_kv", 0.2, 0.05),
    adapted(0.15, 64, 8),
]
DAILY = 3


@pytest.mark.parametrize(
    "values",
    [*SAMPLED[:DAILY], *(pytest.param(each, marks=pytest.mark.soak) for each in SAMPLED[DAILY:])],
)
def test_sampled_values_reach_the_run(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    more = ("model.method=lora", "training.batch_size=8") if "model.lora_rank" in values else ()
    found = seen(tmp_path, monkeypatch, values, *more)
    for key, value in values.items():
        CHECKS[key](found, value)


def test_the_values_above_are_of_the_whole_default_space():
    for task in ("nli", "textclass"):
        assert set(CHECKS) == set(compose_study(task, []).hpo.space)
    for key in CHECKS:
        assert len({values[key] for values in SAMPLED if key in values}) >= 2


# ── a study of real trials ────────────────────────────────────────────────────────────────────


def test_a_study_of_folds_ends_with_the_mean_of_its_folds(tmp_path: Path):
    study = search(tmp_path)
    trials = study.study.trials
    assert len(trials) == 4
    defaults = trials[0]
    assert defaults.user_attrs["defaults"]
    assert defaults.params["training.learning_rate"] == 2e-5
    assert defaults.params["training.effective_batch_size"] == 16
    for trial in trials:
        assert trial.value == pytest.approx(np.mean(trial.user_attrs["folds"]))
        assert len(trial.user_attrs["folds"]) == 2
        batch = trial.params["training.effective_batch_size"]
        assert trial.user_attrs["plan"]["effective_batch_size"] == batch
        for fold, value in enumerate(trial.user_attrs["folds"], 1):
            folder = study.setting.folder / "trials" / f"{trial.number:04d}" / f"fold-{fold}"
            best = json.loads((folder / "result.json").read_text())["metrics"]["f1"]
            assert best == value
            assert not (folder / "checkpoints").exists()


def test_folds_share_no_post_and_none_has_the_test(tmp_path: Path):
    asked = setting(tmp_path, "cv.folds=3")
    prepared = nli.prepare(asked.composed, nested=False)
    held = set(prepared.datasets[0].test.groups.tolist())
    seen: list[int] = []
    for data in prepared.datasets:
        train, validation = (set(p.groups.tolist()) for p in (data.train, data.validation))
        assert not train & validation
        assert not (train | validation) & held
        seen += sorted(validation)
    assert len(seen) == len(set(seen))
    single = nli.prepare(setting(tmp_path, "cv.folds=null").composed)
    assert set(single.datasets[0].test.groups.tolist()) == held


def test_the_test_is_looked_at_once_and_for_the_best_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    looked = []
    final = Objective.final

    def counted(self: Any, composed: Any) -> Any:
        looked.append(composed.values()["training.learning_rate"])
        return final(self, composed)

    monkeypatch.setattr(Objective, "final", counted)
    study, objective = opened(tmp_path, "hpo.trials=3")
    work(study.queue(), partial(run_trial, study, objective))
    assert looked == []
    best = ending.finish(study, lambda: objective)
    assert best is not None
    again = ending.finish(find_study(study.setting.name, study.setting.storage), lambda: objective)
    assert again == best
    assert looked == [best.params["training.learning_rate"]]
    assert best.value == max(trial.value for trial in study.study.trials)
    written = json.loads((Path(best.run) / "results.json").read_text())
    assert best.test["f1"] == written["metrics"]["f1"]
    assert ending.summarise(study, best, 1.0).trials == {"complete": 3}
    figures = json.loads((study.setting.folder / "figures.json").read_text())
    assert [point["value"] for point in figures["history"]] == [t.value for t in study.study.trials]
    assert len(figures["parallel"]) == 3
    assert best.params["training.scheduler"] in (study.setting.folder / "best.yaml").read_text()
    other = ending.finish(study, lambda: objective, ["training.num_epochs=1"])
    assert other is not None
    assert len(looked) == 2
    command = (study.setting.folder / "best.yaml").read_text().splitlines()[2]
    assert command.endswith(" training.num_epochs=1")


@pytest.mark.parametrize("tries", [1, 9999])
def test_a_third_of_the_trials_out_of_memory_and_the_study_ends(
    tries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Once: the engine recovers. Always: the trial ends, and what it held is given back."""
    accumulate = recovery.accumulate
    number, left = 0, 0
    models: list[Any] = []

    def full(model: nn.Module, *args: Any, **more: Any) -> Any:
        nonlocal left
        models.append(weakref.ref(model))
        if number % 3 == 1 and left:
            left -= 1
            raise torch.OutOfMemoryError("planted")
        return accumulate(model, *args, **more)

    monkeypatch.setattr(recovery, "accumulate", full)
    study, objective = opened(tmp_path, "hpo.trials=3", "hpo.pruner=none")

    def run(claim: Any) -> Any:
        nonlocal number, left
        number, left = claim.trial.number, tries
        assert not [ref for ref in models if ref() is not None], "a model of another trial is held"
        models.clear()
        return run_trial(study, objective, claim)

    assert work(study.queue(), run) == "done"
    states = [trial.state for trial in study.study.trials]
    if tries == 1:
        assert states == [TrialState.COMPLETE] * 3
    else:
        assert states == [TrialState.COMPLETE, TrialState.PRUNED, TrialState.COMPLETE]
        assert "memory ran out" in study.study.trials[1].user_attrs["reason"]
    gc.collect()


def test_what_does_not_fit_is_rejected_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def small(question: Any, *args: Any, **more: Any) -> Plan:
        plan = quick_plan(question, *args, **more)
        fits = plan.effective_batch_size < 64
        return replace(plan, fits=fits, advice=() if fits else ("take a smaller batch",))

    monkeypatch.setattr(planner, "plan", small)
    study = search(tmp_path, "training.effective_batch_size=16,64", "hpo.trials=6")
    trials = study.study.trials
    rejected = [t for t in trials if t.params["training.effective_batch_size"] == 64]
    assert rejected
    for trial in rejected:
        assert trial.state == TrialState.PRUNED
        assert trial.user_attrs["reason"].startswith("rejected: ")
        assert "take a smaller batch" in trial.user_attrs["reason"]
        assert not (study.setting.folder / "trials" / f"{trial.number:04d}").exists()
    assert len(trials) == 6


def test_a_trial_that_diverges_ends_alone(tmp_path: Path):
    study, objective = opened(tmp_path, "hpo.trials=2", "training.nonfinite=stop")
    train = objective.train

    def diverging(composed: Any, *args: Any) -> Any:
        if composed.values()["training.learning_rate"] != 2e-5:
            raise recovery.CannotGoOn("step 3 is not finite", "lower the learning rate")
        return train(composed, *args)

    objective.train = diverging  # type: ignore[method-assign]
    assert work(study.queue(), partial(run_trial, study, objective)) == "done"
    assert study.study.trials[1].user_attrs["reason"].startswith("diverged: step 3")

    def full_disk(*_args: Any) -> Any:
        raise RunFailed("no space", "make some")

    objective.train = full_disk  # type: ignore[method-assign]
    more, _ = opened(tmp_path, "hpo.trials=3", "training.nonfinite=stop")
    with pytest.raises(RunFailed, match="no space"):
        work(more.queue(), partial(run_trial, more, objective))


def test_a_signal_in_a_trial_hands_it_back_and_its_folds_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    study, objective = opened(tmp_path, "hpo.trials=2")
    whole = search(tmp_path / "whole", "hpo.trials=2")
    trained = []
    train = objective.train

    def watched(composed: Any, plan: Any, fold: int, *args: Any) -> Any:
        trained.append(fold)
        if len(trained) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return train(composed, plan, fold, *args)

    objective.train = watched  # type: ignore[method-assign]

    def run(claim: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            step = loop.take_step

            def asked(*args: Any, **more: Any) -> Any:
                return step(*args, **{**more, "stop": len(trained) == 2})

            patch.setattr(loop, "take_step", asked)
            return run_trial(study, objective, claim)

    assert work(study.queue(), run) == "stopped"
    assert trained == [0, 1]
    again, objective = opened(tmp_path, "hpo.trials=2")
    assert work(again.queue(), partial(run_trial, again, objective)) == "done"
    ended = [t for t in again.study.trials if t.state == TrialState.COMPLETE]
    assert [t.value for t in ended] == [t.value for t in whole.study.trials]
    assert ended[0].user_attrs["folds"] == whole.study.trials[0].user_attrs["folds"]


# ── what is shared, and what is refused ───────────────────────────────────────────────────────


def test_data_is_prepared_once_for_trials_that_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = []
    prepare = nli.prepare

    def counted(*args: Any, **more: Any) -> Any:
        made.append(1)
        return prepare(*args, **more)

    monkeypatch.setattr(nli, "prepare", counted)
    search(tmp_path, "hpo.trials=3")
    assert len(made) == 1
    asked = setting(tmp_path, "data.negative_ratio=1,2")
    objective = Objective(asked.composed, "f1")
    made.clear()
    for ratio in (1, 2, 1, 2):
        composed = asked.compose({"data.negative_ratio": ratio})
        objective.plan(composed)
    assert len(made) == 2


def test_a_frozen_encoder_runs_once_for_all_trials_and_folds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rows = []
    pool = EncoderClassifier.pool

    def counted(self: Any, input_ids: Any, **more: Any) -> Any:
        lengths = more["attention_mask"].sum(-1)
        rows.append(int((lengths > 1).sum()))  # an empty row sees its first token
        return pool(self, input_ids, **more)

    monkeypatch.setattr(EncoderClassifier, "pool", counted)
    # Pretrained weights are the same for every fold; random ones follow the fold's seed.
    monkeypatch.setattr(frozen.SharedFeatures, "of", _without_seed(frozen.SharedFeatures.of))
    words = ("model.freeze_encoder=true", "model.pooling=mean", "hpo.trials=3")
    study, objective = opened(tmp_path, *words)
    work(study.queue(), partial(run_trial, study, objective))
    data = objective._prepare(study.setting.composed).datasets
    sequences = {int(s) for one in data for p in (one.train, one.validation) for s in p.starts}
    assert sum(rows) == len(sequences)


def _without_seed(of: Any) -> Any:
    def shared(self: Any, tokens: Any, encoder: Any, compute: Any) -> Any:
        return of(self, tokens, (encoder[0], None, *encoder[2:]), compute)

    return shared


def test_trials_that_differ_in_dropout_share_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked_for = []

    def noted(question: Any, *args: Any, **more: Any) -> Plan:
        asked_for.append(question)
        return quick_plan(question, *args, **more)

    monkeypatch.setattr(planner, "plan", noted)
    asked = setting(tmp_path)
    objective = Objective(asked.composed, "f1")
    for dropout in (0.05, 0.21, 0.3):
        objective.plan(asked.compose({"model.head_dropout": dropout}))
    objective.plan(asked.compose({"model.head_dropout": 0.0}))
    assert asked_for[0] == asked_for[1] == asked_for[2] != asked_for[3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model.pooling=mean,max",), "another search space, in model.pooling"),
        (("training.num_epochs=3",), "made with training.num_epochs=2.0, not 3"),
        (("cv.folds=3",), "made with cv.folds=2, not 3"),
        (("hpo.metric=accuracy",), 'hpo.metric="f1", not "accuracy"'),
        (("hpo.pruner=wilcoxon",), "hpo.pruner=wilcoxon compares 1"),
    ],
)
def test_a_study_of_something_else_is_refused(words: tuple[str, ...], message: str, tmp_path: Path):
    opened(tmp_path, "hpo.study=mine")
    with pytest.raises(BadInput, match=message):
        opened(tmp_path, "hpo.study=mine", *words)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite:////nowhere/at/all/hpo.db", "cannot be written"),
        ("postgresql://me:secret@127.0.0.1:9/db", r"//\*\*\*@127.0.0.1:9/db cannot be reached"),
        ("mysql://me@there/db", "is on mysql"),
        ("sqlite://", "in memory"),
        ("nonsense", "is no URL"),
    ],
)
def test_a_storage_that_cannot_be_used_is_named_without_its_password(
    url: str, message: str, tmp_path: Path
):
    with pytest.raises(BadInput, match=message) as caught:
        opened(tmp_path, f"hpo.storage='{url}'")
    assert "secret" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_metric_that_nobody_computes_is_refused(tmp_path: Path):
    with pytest.raises(BadInput, match=r"hpo\.metric is 'f2'.*did you mean f1"):
        opened(tmp_path, "hpo.metric=f2")


def test_the_loss_is_minimised(tmp_path: Path):
    study = search(tmp_path, "hpo.metric=loss", "hpo.trials=3", "hpo.pruner=hyperband")
    found = status_of(study)
    assert found.direction == "minimize"
    assert found.best is not None
    complete = [t.value for t in study.study.trials if t.state == TrialState.COMPLETE]
    assert found.best.value == min(complete)


def test_text_classification_is_searched_too(tmp_path: Path):
    data = write_texts(tmp_path / "texts.csv", 120)
    asked = read_setting(
        "textclass",
        [
            *words(tmp_path, f"data.train={data}", "data.max_length=32", "training.max_steps=20"),
            *SMALL[:-1],
            "hpo.trials=2",
        ],
    )
    objective = Objective(asked.composed, "f1")
    study = open_study(asked, lambda: objective)
    assert work(study.queue(), partial(run_trial, study, objective)) == "done"
    best = ending.finish(study, lambda: objective)
    assert best is not None
    assert best.test["f1"] > 0
