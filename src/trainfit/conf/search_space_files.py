"""The configuration of a study: how it is run, and which keys of a job it searches.

It stands beside the job's own configuration, in the folder hpo/ of each task, because no other
command reads it. On the command line `hpo.trials=20` sets a field, `hpo=embedded` chooses a file,
and Hydra's sweeps change the space: `training.learning_rate=tag(log,interval(1e-6,1e-4))`,
`model.pooling=mean,max`, `model.lora_rank=range(4,33)`. A plain value takes a key out of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, Literal

from trainfit.conf import composition
from trainfit.conf.aliases import Name, Share, Steps
from trainfit.core import codec
from trainfit.core.codec import Length, Range
from trainfit.core.errors import BadConfig, BadInput, brief, did_you_mean, nearest
from trainfit.core.files import check_name

Number = Annotated[float, Range(-1e15, 1e15)]
Count = Annotated[int, Range(0, 10**6)]
Seconds = Annotated[int, Range(1, 10**6)]
Kind = Literal["log", "uniform", "int", "categorical"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimension:
    """Values that a searched key may take."""

    kind: Kind
    """log: a number, evenly over its magnitudes; uniform: evenly; int; categorical: a choice."""
    low: Number | None = None
    high: Number | None = None
    choices: tuple[Any, ...] = ()
    when: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Searched only where these keys have one of these values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HpoConfig:
    """`hpo.…` of `trainfit hpo`."""

    study: Name | None = None
    """Name of the study; null: a hash of its settings, so that the same command finds it."""
    storage: Annotated[str, Length(1, 4096)] | None = None
    """sqlite:///FILE, postgresql://… or journal:FILE; null: hpo.db in runs_dir."""
    trials: Annotated[int, Range(1, 10**6)] = 50
    """Trials of the whole study, over all workers and restarts."""
    hours: Annotated[float, Range(0, 10**5)] | None = None
    """Hours of this command after which no trial begins; null: no limit."""
    metric: Name
    """Metric on the validation data; its mean over folds is the trial's value. auto: the one that
    chooses the best checkpoint."""
    sampler_startup: Count = 10
    """Random trials before the sampler (TPE) learns from them."""
    pruner: Literal["median", "hyperband", "wilcoxon", "none"] = "median"
    """median and hyperband compare trials after every epoch; wilcoxon after every fold."""
    pruner_startup: Count = 5
    """Trials that the median needs before it prunes."""
    pruner_warmup: Count = 3
    """Evaluations of a trial before it may be pruned."""
    pruner_threshold: Share = 0.1
    """The p-value under which wilcoxon prunes."""
    least_steps: Steps = 10
    """An effective batch that leaves an epoch fewer steps is left out of the space."""
    heartbeat: Seconds = 10
    """Seconds between two signs of life of a worker."""
    grace: Seconds = 60
    """Seconds without a sign of life after which a worker's trial is given to another."""
    retries: Count = 3
    """Retries of a trial whose worker died."""
    config: dict[str, Any]
    """Keys of the job that a study sets, unless the command does."""
    space: dict[str, Dimension]
    """Dimensions by key of the job's configuration."""

    def __post_init__(self) -> None:
        """Refuse a name that would lead out of runs_dir: a folder is named after the study."""
        if self.study is not None:
            check_name(self.study, "hpo.study")


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyWords:
    """Words of a command, sorted into those of the study and those of the job."""

    hpo: HpoConfig
    job: tuple[str, ...]
    """Words for the job's own configuration, those of hpo.config first."""
    notes: tuple[str, ...] = ()


def compose_study(task: str, words: Sequence[str], otherwise: str = "default") -> StudyWords:
    """The study's configuration and the job's words, or one error with every mistake in them.

    `otherwise` is the file of hpo/ to take where the words name none.
    """
    composition.schema_of(task)
    chosen, settings, sweeps, job, problems = _sorted_words(task, words)
    data = _shipped(task, chosen or otherwise) | dict(composition.study_of(task)) | settings
    try:
        hpo = codec.decode(HpoConfig, data, "hpo")
    except BadInput as error:
        raise BadConfig([*problems, *getattr(error, "problems", (error,))]) from None
    fixed = {composition.key_for(task, word.partition("=")[0]) for word in job}
    space = {k: d for k, d in hpo.space.items() if k not in fixed} | sweeps
    problems += [p for name, one in space.items() if (p := _fault(task, name, one)) is not None]
    if not space:
        fix = "leave some keys to be searched, or mark fields with trainfit.tunable"
        problems.append(BadInput("the search space is empty", fix))
    if problems:
        raise problems[0] if len(problems) == 1 else BadConfig(problems)
    first = [composition.as_word(k, v) for k, v in hpo.config.items() if k not in fixed]
    notes = [f"{key} is given: it is not searched" for key in hpo.space if key in fixed]
    return StudyWords(hpo=replace(hpo, space=space), job=(*first, *job), notes=tuple(notes))


def _sorted_words(
    task: str, words: Sequence[str]
) -> tuple[str | None, dict[str, Any], dict[str, Dimension], list[str], list[BadInput]]:
    """Sort words into file, fields of hpo, searched keys, the job's words, and mistakes."""
    chosen: str | None = None
    settings: dict[str, Any] = {}
    sweeps: dict[str, Dimension] = {}
    job: list[str] = []
    problems: list[BadInput] = []
    for word in words:
        try:
            override = composition.parse_word(word)
            written = override.key_or_group
            if written == "hpo":
                chosen = composition.choose(task, "hpo", override.value())
            elif written.startswith("hpo."):
                _set(settings, written.removeprefix("hpo."), override.value())
            elif override.is_sweep_override():
                key = composition.key_for(task, written) or written
                sweeps[key] = _swept(override.value(), word)
            else:
                job.append(word)
        except BadInput as error:
            problems.append(error)
    return chosen, settings, sweeps, job, problems


def _set(settings: dict[str, Any], name: str, value: Any) -> None:
    fields = HpoConfig.__dataclass_fields__
    if name not in fields:
        near = " or ".join(f"hpo.{one}" for one in nearest(name, fields))
        fix = f"did you mean {near}?" if near else f"the fields of hpo are {', '.join(fields)}"
        raise BadInput(f"unknown key hpo.{name}", fix)
    settings[name] = value


def _swept(sweep: Any, word: str) -> Dimension:
    """Convert a sweep of Hydra's grammar to a dimension."""
    kind: Kind = "log" if "log" in sweep.tags else "uniform"
    match type(sweep).__name__:
        case "IntervalSweep":
            return Dimension(kind=kind, low=float(sweep.start), high=float(sweep.end))
        case "RangeSweep" if sweep.step == 1:
            return Dimension(kind="int", low=float(sweep.start), high=float(sweep.stop) - 1)
        case "ChoiceSweep":
            return Dimension(kind="categorical", choices=tuple(sweep.list))
    fix = "use interval(low,high), range(first,end) or a list of values"
    raise BadInput(f"cannot search {brief(word)!r}", fix)


def _fault(task: str, name: str, one: Dimension) -> BadInput | None:
    """Fault that makes a dimension impossible to search, or None."""
    if name not in composition.keys(task):
        fix = did_you_mean(name, composition.keys(task), f"`trainfit config {task}` shows the keys")
        return BadInput(f"unknown parameter {name} in the search space", fix)
    if strange := [key for key in one.when if key not in composition.keys(task)]:
        fix = did_you_mean(strange[0], composition.keys(task))
        return BadInput(f"unknown key {strange[0]} in the condition of {name}", fix)
    if one.kind == "categorical":
        empty = BadInput(f"the search space of {name} has no choices", "give it some")
        return _refused(task, name, one.choices) if one.choices else empty
    return _range_fault(name, one) or _refused(task, name, _ends(one))


def _range_fault(name: str, one: Dimension) -> BadInput | None:
    if one.low is None or one.high is None:
        return BadInput(f"the search space of {name} has no low and high", "give both")
    if not math.isfinite(one.high - one.low):
        what = f"the range of {name} is not finite: {one.low:g} to {one.high:g}"
        return BadInput(what, "give two numbers")
    if not one.low < one.high:
        what = f"the range of {name} is empty: {one.low:g} to {one.high:g}"
        return BadInput(what, "give a low below the high")
    if one.kind == "int" and not (one.low.is_integer() and one.high.is_integer()):
        what = f"the range of {name} is of whole numbers: {one.low:g} to {one.high:g}"
        return BadInput(what, "give whole ones, or use a uniform range")
    if one.kind == "log" and not one.low > 0:
        what = f"the range of {name} begins at {one.low:g}, which has no logarithm"
        return BadInput(what, "begin above 0, or use a uniform range")
    return None


def _ends(one: Dimension) -> tuple[Any, ...]:
    """Least and greatest value that the sampler can give."""
    assert one.low is not None
    assert one.high is not None
    return (int(one.low), int(one.high)) if one.kind == "int" else (one.low, one.high)


def _refused(task: str, name: str, values: Sequence[Any]) -> BadInput | None:
    """Error for the first value that the key does not take, or None."""
    for value in values:
        try:
            codec.decode(composition.key_type(task, name), value)
        except BadInput as error:
            return BadInput(f"{name} is searched at {brief(json.dumps(value))}", error.fix)
    return None


@cache
def _shipped(task: str, name: str) -> dict[str, Any]:
    return composition.hydra_files(composition.group_folder(task, "hpo"), name)[1]
