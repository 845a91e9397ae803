"""Open or make a study; refuse trials that do not belong together."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optuna
from optuna import Study

from trainfit.conf.search_space_files import Dimension
from trainfit.core import codec
from trainfit.core.errors import BadInput, did_you_mean
from trainfit.core.files import write_whole
from trainfit.hpo.objective import Objective, check_metric, is_greater_better
from trainfit.hpo.search_space import (
    Space,
    defaults,
    fit_space,
    make_pruner,
    note_on,
    steps_per_fold,
)
from trainfit.hpo.storage import Database, open_database
from trainfit.hpo.study_settings import StudySettings, read_setting
from trainfit.hpo.trial_queue import TrialQueue, quiet

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

    def desk(self) -> TrialQueue:
        """Queue of its trials."""
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
    database = open_database(url)
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
    found = open_database(url).storage.get_all_studies()
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
