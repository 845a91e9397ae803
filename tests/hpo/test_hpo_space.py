"""The search space: what a command may write, and how it is fitted to the job."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import trainfit.conf
from job_tiny import write_texts
from trainfit.conf import SCHEMAS, keys, options
from trainfit.conf.search_space_files import Dimension, compose_study
from trainfit.core.errors import BadInput
from trainfit.hpo.objective import applies, as_words, defaults, fit_space, suggest
from trainfit.hpo.studies import read_setting

CONF = Path(trainfit.conf.__file__).parent
BATCH = "training.effective_batch_size"


@pytest.mark.parametrize("task", SCHEMAS)
def test_every_shipped_study_composes_and_searches_keys_that_exist(task: str):
    for name in options(task, "hpo"):
        found = compose_study(task, [f"hpo={name}"])
        assert set(found.hpo.space) <= set(keys(task))
        assert set(found.hpo.config) <= set(keys(task))
        assert found.hpo.trials > 0


def test_the_default_space_is_the_status_reports():
    space = compose_study("nli", []).hpo.space
    rate = space["training.learning_rate"]
    assert (rate.kind, rate.low, rate.high) == ("log", 5e-6, 3e-5)
    decay = space["training.weight_decay"]
    assert (decay.kind, decay.low, decay.high) == ("log", 0.001, 0.1)
    warmup = space["training.warmup_ratio"]
    assert (warmup.kind, warmup.low, warmup.high) == ("uniform", 0.05, 0.15)
    assert set(space["training.scheduler"].choices) == {"linear", "cosine", "cosine_with_restarts"}
    assert space[BATCH].choices == (32, 64, 128, 256, 512)
    assert {"model.pooling", "model.head_dropout", "model.lora_rank"} <= set(space)
    hpo = compose_study("nli", []).hpo
    assert (hpo.pruner, hpo.pruner_startup, hpo.pruner_warmup) == ("median", 5, 3)


def test_yaml_files_say_what_hydra_makes_of_them():
    raw = yaml.safe_load((CONF / "nli/hpo/embedded.yaml").read_text())
    assert compose_study("nli", ["hpo=embedded"]).hpo.trials == raw["trials"] == 12


def test_a_sweep_changes_the_space_and_a_value_leaves_it():
    words = [
        "learning_rate=tag(log,interval(1e-6,1e-4))",
        "model.pooling=mean,max",
        "model.lora_rank=range(4,33)",
        "training.scheduler=cosine",
        "training.num_epochs=interval(1,3)",
    ]
    found = compose_study("nli", words)
    space = found.hpo.space
    rate = space["training.learning_rate"]
    assert (rate.kind, rate.low, rate.high) == ("log", 1e-6, 1e-4)
    assert space["model.pooling"].choices == ("mean", "max")
    assert (space["model.lora_rank"].low, space["model.lora_rank"].high) == (4, 32)
    assert space["training.num_epochs"].kind == "uniform"
    assert "training.scheduler" not in space
    assert "training.scheduler=cosine" in found.job
    assert any("training.scheduler" in note for note in found.notes)
    assert "training.weight_decay" in space


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "training.learning_rat=interval(1,2)",
            "unknown parameter training.learning_rat.*learning_rate",
        ),
        (
            "hpo.space={model.poolin:{kind:categorical,choices:[max]}}",
            "unknown parameter model.poolin",
        ),
        (
            "training.learning_rate=interval(2,1)",
            "range of training.learning_rate is empty: 2 to 1",
        ),
        ("training.learning_rate=interval(1,1)", "is empty"),
        ("training.weight_decay=tag(log,interval(0,1))", "no logarithm"),
        ("hpo.space={model.pooling:{kind:categorical}}", "no choices"),
        ("hpo.space={model.pooling:{kind:int}}", "no low and high"),
        ("training.learning_rate=interval(nan,1)", "is not finite: nan to 1"),
        ("training.learning_rate=interval(0,inf)", "is not finite: 0 to inf"),
        ("training.learning_rate=interval(-1,1)", "learning_rate is searched at -1"),
        ("training.learning_rate=1e-4,many", 'learning_rate is searched at "many"'),
        ("training.effective_batch_size=interval(1,8)", "searched at 1.0; use a whole number"),
        ("training.effective_batch_size=range(0,8)", "searched at 0; use a whole number"),
        ("training.effective_batch_size=range(1,9,2)", "cannot search"),
        ("model.pooling=mean,nowhere", 'pooling is searched at "nowhere"'),
        ("hpo.space={training.learning_rate:{kind:int,low:0.1,high:0.9}}", "of whole numbers"),
        ("hpo.space={}", "the search space is empty"),
        ("hpo.config={training.learning_rate:nan}", "learning_rate is"),
        ("hpo.trails=3", "unknown key hpo.trails; did you mean hpo.trials"),
        ("hpo.trials=0", "trials is 0"),
        ("hpo.pruner=medium", "median"),
        ("hpo=small", "unknown hpo=small"),
        ("training.learning_rat=1", "unknown key training.learning_rat"),
    ],
)
def test_a_mistake_is_named(word: str, message: str):
    with pytest.raises(BadInput, match=message):
        read_setting("nli", [word])


VALUES = {
    "training.learning_rate": 1e-4,
    BATCH: 16,
    "model.pooling": "mean",
    "model.method": "full",
    "model.lora_rank": 16,
}


def test_the_configured_values_are_in_the_space_and_large_batches_are_not():
    space = {
        "training.learning_rate": Dimension(kind="log", low=5e-6, high=3e-5),
        BATCH: Dimension(kind="categorical", choices=(32, 64, 128, 256, 512)),
        "model.pooling": Dimension(kind="categorical", choices=("max", "mean")),
        "model.lora_rank": Dimension(
            kind="categorical", choices=(4,), when={"model.method": ("lora", "dora")}
        ),
    }
    fitted, notes = fit_space(space, VALUES, sequences=1900, least_steps=10)
    assert (fitted["training.learning_rate"].low, fitted["training.learning_rate"].high) == (
        5e-6,
        1e-4,
    )
    assert fitted[BATCH].choices == (16, 32, 64, 128)
    assert fitted["model.pooling"] == space["model.pooling"]
    assert fitted["model.lora_rank"].choices == (4,)  # not searched here: nothing to include
    assert any("256, 512 left out" in note for note in notes)
    assert any("learning_rate" in note for note in notes)
    assert defaults(fitted, VALUES) == {
        "training.learning_rate": 1e-4,
        BATCH: 16,
        "model.pooling": "mean",
    }
    tiny, _ = fit_space({BATCH: space[BATCH]}, {BATCH: 32}, sequences=50, least_steps=10)
    assert tiny[BATCH].choices == (32,)


@pytest.mark.parametrize(
    ("one", "value"),
    [
        (Dimension(kind="uniform", low=0.0, high=1.0), None),
        (Dimension(kind="int", low=1, high=3), "auto"),
        (Dimension(kind="log", low=1e-3, high=1.0), 0),
    ],
)
def test_a_default_that_is_no_number_cannot_be_trial_0(one: Dimension, value: object):
    with pytest.raises(BadInput, match=r"training\.warmup_ratio is searched"):
        fit_space(
            {"training.warmup_ratio": one},
            {"training.warmup_ratio": value},
            sequences=9,
            least_steps=1,
        )


def test_a_condition_may_be_about_a_searched_key():
    space = {
        "rank": Dimension(kind="int", low=1, high=9, when={"method": ("lora",)}),
        "method": Dimension(kind="categorical", choices=("lora", "full")),
    }
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    seen = [suggest(study.ask(), space, {"method": "full"}) for _ in range(20)]
    assert {found["method"] for found in seen} == {"lora", "full"}
    assert all(("rank" in found) == (found["method"] == "lora") for found in seen)
    assert applies(space["rank"], {"method": "lora"})
    assert not applies(Dimension(kind="int", when={"flag": (True,)}), {"flag": 1})


numbers = st.floats(1e-9, 10)


@settings(max_examples=15)
@given(st.sampled_from(["log", "uniform"]), numbers, numbers, st.integers(0, 2**31))
def test_what_is_sampled_is_in_its_range_and_survives_a_command_line(
    kind: str, one: float, other: float, seed: int
):
    low, high = sorted((one, other))
    if low == high:
        return
    space = {"training.learning_rate": Dimension(kind=kind, low=low, high=high)}  # type: ignore[arg-type]
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    value = suggest(study.ask(), space, {})["training.learning_rate"]
    assert low <= value <= high
    [word] = as_words({"training.learning_rate": value})
    setting = read_setting("textclass", [word])
    assert setting.composed.values()["training.learning_rate"] == value


@pytest.mark.parametrize(
    ("words", "low", "high"),
    [
        ((), 5e-6, 1e-4),
        (("model.method=dora",), 5e-5, 1e-3),
        (("model.freeze_encoder=true",), 2.5e-4, 5e-3),
        (("model.method=lora", "learning_rate=tag(log,interval(1e-6,1e-4))"), 1e-6, 1e-4),
    ],
)
def test_the_rates_that_are_searched_follow_the_model(
    tmp_path: Path, words: tuple[str, ...], low: float, high: float
):
    train = f"data.train={write_texts(tmp_path / 'texts.csv', 60)}"
    setting = read_setting("textclass", [train, "model.name=bert-base", *words])
    rates = setting.hpo.space["training.learning_rate"]
    assert (rates.kind, rates.low, rates.high) == ("log", pytest.approx(low), pytest.approx(high))


def test_the_same_command_finds_its_study_again_and_another_does_not():
    name = read_setting("nli", ["training.num_epochs=2"]).name
    assert read_setting("nli", ["training.num_epochs=2", "hpo.trials=99"]).name == name
    assert read_setting("nli", ["training.num_epochs=2", "device.num_threads=2"]).name == name
    assert read_setting("nli", ["training.num_epochs=3"]).name != name
    assert read_setting("nli", ["training.num_epochs=2", "model.pooling=mean,last"]).name != name
    assert read_setting("nli", ["hpo.study=mine"]).name == "mine"


def test_a_password_is_not_written_into_the_study():
    setting = read_setting("nli", ["hpo.storage=postgresql://me:secret@there/db", "hpo.trials=3"])
    assert setting.words == ("hpo.trials=3",)
    assert "secret" not in setting.name
