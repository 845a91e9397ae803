"""Settings of a study from a command; open or make it, and refuse trials of another one."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optuna
from optuna import Study

from trainfit.conf import Composed
from trainfit.conf.composition import parse_word, schema_defaults
from trainfit.conf.search_space_files import Dimension, HpoConfig, compose_study
from trainfit.core import codec
from trainfit.core.errors import BadInput, did_you_mean
from trainfit.core.files import write_whole
from trainfit.core.settings import SETTINGS
from trainfit.hpo.objective import (
    BATCH,
    RATE,
    Objective,
    Space,
    applies,
    as_words,
    check_metric,
    defaults,
    fit_space,
    is_greater_better,
    make_pruner,
    note_on,
    steps_per_fold,
)
from trainfit.hpo.storage import Database, open_database, open_existing
from trainfit.hpo.trial_queue import TrialQueue, quiet

STORAGE = "TRAINFIT_HPO_STORAGE"
"""Environment variable with the URL of the database, which keeps a password out of `ps`."""
_MACHINE = (
    "runs_dir",
    "tracking",
    "baselines",
    "device.",
    "optimization.",
    "training.logging_steps",
    "training.checkpoint_steps",
    "training.keep_checkpoints",
    *(row.key for row in SETTINGS if row.key and not row.learns),
)
"""Keys that may differ between workers of one study: they change how a step is computed."""
_OUTSIDE = ("training.", "model.pooling", "model.head_dropout")
"""Keys outside the blocks of a model: compiled code is the same whatever they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudySettings:
    """A study as a command describes it."""

    task: str
    words: tuple[str, ...]
    """Words of the command, without the storage, whose URL may hold a password."""
    job_words: tuple[str, ...]
    hpo: HpoConfig
    composed: Composed
    """Configuration of trial 0, which the other trials vary."""
    notes: tuple[str, ...]

    @property
    def values(self) -> dict[str, Any]:
        """Configured values by key, with the effective batch as a number."""
        from trainfit.jobs import job_plan

        batch = job_plan.effective_batch(self.composed)
        return self.composed.values() | {BATCH: batch}

    @property
    def identity(self) -> dict[str, Any]:
        """Values that must be equal for the trials of two commands to be comparable."""
        new = schema_defaults(type(self.composed.config))  # a key that came later renames no study
        values = {
            key: value
            for key, value in self.values.items()
            if not key.startswith(_MACHINE) and (key not in new or new[key] != value)
        }
        return values | {"hpo.metric": self.hpo.metric, "hpo.space": codec.encode(self.hpo.space)}

    @property
    def alike(self) -> int:
        """Number of trials that share compiled code, on average over the space."""
        values, trials = self.values, self.hpo.trials
        kinds = [
            len(one.choices) or trials
            for key, one in self.hpo.space.items()
            if applies(one, values) and (key == BATCH or not key.startswith(_OUTSIDE))
        ]
        return max(1, trials // math.prod(kinds))

    @property
    def name(self) -> str:
        """Name of the study: the one given, or a hash of its settings."""
        if self.hpo.study is not None:
            return self.hpo.study
        text = json.dumps(codec.encode(self.identity), sort_keys=True)
        return f"{self.task.rpartition(':')[2]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    @property
    def storage(self) -> str:
        """URL of the database."""
        return self.hpo.storage or default_storage(Path(self.values["runs_dir"]))

    @property
    def folder(self) -> Path:
        """Folder of the study's files."""
        return Path(self.values["runs_dir"]) / f"hpo-{self.name}"

    def compose(self, params: Mapping[str, Any]) -> Composed:
        """Compose the configuration of a trial, as `trainfit train` does."""
        return configure(self.task, [*self.job_words, *as_words(params)])


def default_storage(runs: Path) -> str:
    """Database of the environment variable, or a file in the folder of the runs."""
    return os.environ.get(STORAGE) or f"sqlite:///{runs.absolute() / 'hpo.db'}"


def read_setting(task: str, words: Sequence[str]) -> StudySettings:
    """Read the words of a command, or raise one error with every mistake in them."""
    from trainfit.jobs.configuration import metric_of

    asked = compose_study(task, words)
    composed = configure(task, asked.job)
    if composed.origins.get("model.name") == f"experiment {task}_embedded":
        asked = compose_study(task, words, "embedded")
        composed = configure(task, asked.job)
    hpo = asked.hpo
    rates, shipped = (one.hpo.space.get(RATE) for one in (asked, compose_study(task, ())))
    if rates and rates == shipped and composed.origins.get(RATE) == "the model":
        usual = composed.values()[RATE]  # of adapters, of a head alone or of a small encoder
        rates = replace(rates, low=usual / 4, high=usual * 5)
        hpo = replace(hpo, space=hpo.space | {RATE: rates})
    if hpo.metric == "auto":
        hpo = replace(hpo, metric=metric_of(composed))
    typed = tuple(word for word in words if parse_word(word).key_or_group != "hpo.storage")
    return StudySettings(
        task=task,
        words=typed,
        job_words=asked.job,
        hpo=hpo,
        composed=composed,
        notes=(*composed.notes, *asked.notes),
    )


def configure(task: str, words: Sequence[str]) -> Composed:
    """Compose a job's configuration, as `trainfit train` does."""
    from trainfit.jobs import configuration

    return configuration.configure(task, words)


ABOUT = "trainfit"
"""Name of the study's attribute that describes its job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenStudy:
    """A study that is open in this process."""

    setting: StudySettings
    database: Database
    study: Study
    space: Space
    folds: int
    steps: int
    """Number of values that a fold reports."""
    notes: tuple[str, ...]

    @property
    def configured(self) -> dict[str, Any]:
        """Parameters of trial 0: what is wrong with them is wrong with every trial."""
        return defaults(self.space, self.setting.values)

    def queue(self) -> TrialQueue:
        """Return the queue of the study's trials."""
        return TrialQueue(
            study=self.study,
            database=self.database,
            hpo=self.setting.hpo,
            seed=self.setting.composed.config.seed,
            space=self.space,
            values=self.setting.values,
            steps_per_fold=self.steps,
        )


def open_study(setting: StudySettings, objective: Callable[[], Objective]) -> OpenStudy:
    """Open the study of that name, or make it with the configured values as trial 0."""
    opened = _opened(setting, objective)
    about = opened.study.user_attrs[ABOUT]
    shown = {"study": setting.name, "storage": opened.database.shown, **about}
    write_whole(setting.folder / "study.json", json.dumps(shown, indent=2) + "\n")
    return opened


def _opened(setting: StudySettings, objective: Callable[[], Objective]) -> OpenStudy:
    hpo, name = setting.hpo, setting.name
    if hpo.storage is None:
        Path(setting.values["runs_dir"]).mkdir(parents=True, exist_ok=True)
    database = open_database(setting.storage, heartbeat=hpo.heartbeat, grace=hpo.grace)
    with database.locked(name), quiet():
        about = _about(database, name)
        if about is None:
            about = _make(database, setting, objective())
    _check_same(setting, about)
    folds, steps = about["folds"], about["steps"]
    with quiet():
        pruner = make_pruner(hpo, folds, steps)
    study = optuna.load_study(study_name=name, storage=database.storage, pruner=pruner)
    note = note_on(hpo, folds)
    return OpenStudy(
        setting=setting,
        database=database,
        study=study,
        space=codec.decode(dict[str, Dimension], about["space"]),
        folds=folds,
        steps=steps,
        notes=(*setting.notes, *about["notes"], *([note] if note else [])),
    )


def find_study(name: str, url: str) -> OpenStudy:
    """Open an existing study by its name."""
    database = open_existing(url)
    about = _about(database, name)
    if about is None:
        names = [summary.study_name for summary in database.storage.get_all_studies()]
        listed = f"it has {', '.join(names)}" if names else "it has none yet"
        raise BadInput(
            f"there is no study {name!r} in {database.shown}", did_you_mean(name, names, listed)
        )
    setting = read_setting(about["task"], about["words"])
    setting = replace(setting, hpo=replace(setting.hpo, study=name, storage=url))
    return _opened(setting, _never)


def list_studies(url: str) -> list[str]:
    """Names of trainfit's studies in a database."""
    found = open_existing(url).storage.get_all_studies()
    return [study.study_name for study in found if ABOUT in study.user_attrs]


def _never() -> Objective:
    raise AssertionError("the study was there a moment ago")


def _about(database: Database, name: str) -> dict[str, Any] | None:
    try:
        study = database.storage.get_study_id_from_name(name)
    except KeyError:
        return None
    about: dict[str, Any] | None = database.storage.get_study_user_attrs(study).get(ABOUT)
    if about is not None:
        _check_about(about, name)
    if about is None and database.storage.get_n_trials(study) > 1:
        raise BadInput(
            f"the study {name} in {database.shown} is not one of trainfit's",
            "give another name (hpo.study)",
        )
    return about


def _check_about(about: Any, name: str) -> None:
    """Raise BadInput for a study whose description is damaged or of another program."""
    kinds: dict[str, type] = {
        "task": str,
        "words": list,
        "identity": dict,
        "space": dict,
        "notes": list,
    }
    kinds |= {"metric": str, "folds": int, "steps": int}
    there = about if isinstance(about, dict) else {}
    wrong = [key for key, kind in kinds.items() if not isinstance(there.get(key), kind)]
    if wrong:
        raise BadInput(
            f"the study {name} is damaged, in {wrong[0]}", "give another name (hpo.study)"
        )


def _make(database: Database, setting: StudySettings, objective: Objective) -> dict[str, Any]:
    hpo, values = setting.hpo, setting.values
    check_metric(hpo.metric, objective)
    space, notes = fit_space(
        hpo.space, values, sequences=objective.sequences, least_steps=hpo.least_steps
    )
    about = {
        "task": setting.task,
        "words": list(setting.words),
        "identity": codec.encode(setting.identity),
        "space": codec.encode(space),
        "metric": hpo.metric,
        "folds": objective.folds,
        "steps": steps_per_fold(hpo, values["training.num_epochs"]),
        "notes": notes,
    }
    study = optuna.create_study(
        storage=database.storage,
        study_name=setting.name,
        direction="maximize" if is_greater_better(hpo.metric, setting.task) else "minimize",
        load_if_exists=True,
    )
    if not study.get_trials(deepcopy=False):  # else a process died between these two lines
        study.enqueue_trial(defaults(space, values), user_attrs={"defaults": True})
    study.set_user_attr(ABOUT, about)
    return about


def _check_same(setting: StudySettings, about: dict[str, Any]) -> None:
    """Raise BadInput where the study was made with other settings."""
    new = "give the study another name (hpo.study)"
    if about["task"] != setting.task:
        raise BadInput(f"the study {setting.name} is of {about['task']}, not {setting.task}", new)
    asked, there = json.loads(json.dumps(codec.encode(setting.identity))), about["identity"]
    if asked["hpo.space"] != there["hpo.space"]:
        keys = {*asked["hpo.space"], *there["hpo.space"]}
        other = sorted(k for k in keys if asked["hpo.space"].get(k) != there["hpo.space"].get(k))
        raise BadInput(
            f"the study {setting.name} has another search space, in {', '.join(other)}", new
        )
    for key in sorted({*asked, *there}):
        if asked.get(key) != there.get(key):
            what = f"the study {setting.name} was made with {key}={json.dumps(there.get(key))}"
            raise BadInput(f"{what}, not {json.dumps(asked.get(key))}", new)
    steps = steps_per_fold(setting.hpo, setting.values["training.num_epochs"])
    if steps != about["steps"]:
        raise BadInput(
            f"the study {setting.name} reports {about['steps']} values a fold, "
            f"and hpo.pruner={setting.hpo.pruner} compares {steps}",
            new,
        )
