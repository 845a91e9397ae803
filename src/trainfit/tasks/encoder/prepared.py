"""What a job brings, its plan, and the folder it begins in or goes on in."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainfit import codec
from trainfit.conf import Composed, GptConfig
from trainfit.data.tokens import Dataset
from trainfit.engine import run_folder
from trainfit.engine.distributed import World, first_says
from trainfit.engine.relaunch import find_launch
from trainfit.errors import BadInput, reason
from trainfit.files import write_whole
from trainfit.records import HardwareProfile, Plan
from trainfit.tasks import planned, tuned
from trainfit.tasks.encoder import scores
from trainfit.tasks.encoder.choosing import Chosen
from trainfit.tasks.encoder.classifier import EncoderClassifier

if TYPE_CHECKING:
    from trainfit.tasks.encoder.choosing import EncoderConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What a job brings: its data in folds, its model, and what it is compared with."""

    composed: Composed
    chosen: Chosen
    datasets: tuple[Dataset, ...]
    """One, or one for each fold; `test` is what its score is taken on, and nothing else."""
    ids: tuple[Sequence[str], ...]
    """Of what is in each `test`."""
    build: Callable[..., EncoderClassifier]
    """The model of the configuration, with what the plan decided."""
    baselines: Callable[[int], dict[str, float]]
    """The F1 of what the model of a fold must beat."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else is needed to use the exported model."""

    @property
    def config(self) -> EncoderConfig:
        """The configuration of the job."""
        config = self.composed.config
        assert not isinstance(config, GptConfig)
        return config

    @property
    def cross_validated(self) -> bool:
        """Whether there are folds."""
        return self.config.cv.folds is not None


def tuned_job(prepared: Prepared, profile: HardwareProfile, ranks: int = 1) -> tuned.Job:
    """What the planner and the tuner are asked: the job with its real lengths."""
    _check_vocabulary(prepared)
    lengths = prepared.datasets[0].train.lengths.tolist()
    question = planned.question(prepared.composed, lengths)
    return tuned.Job(composed=prepared.composed, question=question, profile=profile, ranks=ranks)


def _check_vocabulary(prepared: Prepared) -> None:
    """Raise BadInput for a token that the model has no embedding for: a GPU would only stop."""
    name = prepared.config.model.name
    rows = planned.model_facts(name).vocabulary
    parts = [
        part for data in prepared.datasets for part in (data.train, data.validation, data.test)
    ]
    arrays = {id(part.ids): part.ids for part in parts}  # most parts share one
    largest = max(int(ids.max()) for ids in arrays.values())
    if rows and largest >= rows:
        raise BadInput(
            f"the tokenizer makes token {largest}, and {name} has embeddings for {rows} only",
            "give a folder whose tokenizer goes with its weights",
        )


def make_plan(prepared: Prepared, profile: HardwareProfile, ranks: int = 1) -> Plan:
    """The plan for the job's real lengths, as it was tuned before if it was."""
    job = tuned_job(prepared, profile, ranks)
    plan = planned.answer(job.composed, job.question, profile, ranks=ranks)
    if not plan.fits:
        advice = plan.advice[0] if plan.advice else "take a smaller model"
        raise BadInput("the job does not fit this machine", advice)
    return tuned.with_tuned(job, plan)


def begin(
    prepared: Prepared, profile: HardwareProfile, world: World, resume: Path | None
) -> tuple[Plan, Path]:
    """The plan and the folder: the first rank decides, and the others do the same."""
    said = ""
    launch = find_launch(world)
    config = _written_config(prepared.composed)
    if world.first and resume is None:
        resume = launch.find_run(Path(prepared.config.runs_dir), config)
    if world.first and resume is None:
        if prepared.config.tune == "force":
            tuned.tune(tuned_job(prepared, profile, world.size))
        plan = make_plan(prepared, profile, world.size)
        task = prepared.composed.task
        folder = run_folder.create(Path(prepared.config.runs_dir), task, config=config, plan=plan)
        profile.save(folder / "hardware.json")
        write_whole(folder / "data.json", json.dumps(_data(prepared), indent=2) + "\n")
        launch.note(folder)
        said = json.dumps([plan.to_json(indent=None), str(folder)])
    elif world.first and resume is not None:
        _check_same_data(resume, prepared)
        plan = Plan.load(resume / "plan.json")
        said = json.dumps([plan.to_json(indent=None), str(resume)])
    text, name = json.loads(first_says(world, said))
    return Plan.from_json(text), Path(name)


def _written_config(composed: Composed) -> dict[str, Any]:
    names = ("task", "hardware", "experiment", "config", "origins")
    return {name: codec.encode(getattr(composed, name)) for name in names}


def _data(prepared: Prepared) -> dict[str, Any]:
    """What was trained on, without a text: counts, and a checksum."""
    return {
        "checksum": scores.checksum(prepared.datasets),
        "folds": [dataset.metadata for dataset in prepared.datasets],
    }


def _check_same_data(run: Path, prepared: Prepared) -> None:
    try:
        before = codec.read_object(run / "data.json")["checksum"]
    except (OSError, ValueError, KeyError) as error:
        what = f"cannot read data.json in {run} ({reason(error)})"
        raise BadInput(what, "give a run's folder") from None
    if before != scores.checksum(prepared.datasets):
        raise BadInput(f"the data is not what {run} was trained on", "start a new run with it")
