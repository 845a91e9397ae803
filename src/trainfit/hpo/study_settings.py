"""Settings of a study from a command: the job, the space, the name and the storage."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainfit.conf import Composed
from trainfit.conf.composition import parse_word, schema_defaults
from trainfit.conf.search_space_files import HpoConfig, compose_study
from trainfit.core import codec
from trainfit.core.settings import SETTINGS
from trainfit.hpo.search_space import BATCH, applies, as_words

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
