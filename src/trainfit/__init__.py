"""trainfit fits a training run to the hardware it is on.

The commands are functions: `trainfit.train("nli", "cv.folds=5")` for `train nli cv.folds=5`. A job
is nli, textclass, pairs, tokens, gpt, "module:Class", or a subclass of `trainfit.Job` itself.

The other public names are loaded when they are first used: `import trainfit` imports no torch.
"""

from __future__ import annotations

from functools import cache, wraps
from importlib import import_module
from inspect import isfunction, signature
from numbers import Real
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from trainfit.conf import compose as compose
    from trainfit.core.errors import BadConfig as BadConfig
    from trainfit.core.errors import BadInput as BadInput
    from trainfit.core.errors import OutOfMemory as OutOfMemory
    from trainfit.core.errors import RunFailed as RunFailed
    from trainfit.core.errors import TrainfitError as TrainfitError
    from trainfit.core.errors import TrainfitWarning as TrainfitWarning
    from trainfit.core.plan_records import Recommendation
    from trainfit.core.records import Receipt
    from trainfit.doctor.finding import Finding
    from trainfit.hardware import as_if as as_if
    from trainfit.hardware import detect as detect
    from trainfit.hardware.catalogue import lookup as lookup
    from trainfit.hpo.outcome import StudyResult
    from trainfit.integrations.speeding import padded as padded
    from trainfit.integrations.speeding import speed_up as speed_up
    from trainfit.integrations.speeding import unpadded as unpadded
    from trainfit.jobs.job_plan import plan as plan
    from trainfit.jobs.registry import Job as Job
    from trainfit.jobs.registry import tunable as tunable
    from trainfit.jobs.tuned_plans import find_batch_size as find_batch_size
    from trainfit.jobs.tuned_plans import recommend as recommend
    from trainfit.measuring import measure as measure
    from trainfit.measuring.observe import observe as observe
    from trainfit.planning import estimate as estimate
    from trainfit.reports.run_report import report as report
    from trainfit.runtime import applied as applied
    from trainfit.runtime import apply as apply
    from trainfit.runtime import undo as undo
    from trainfit.tuning.tuned_cache import TuneResult

    # These two are packages that can be called.
    def doctor(
        *, log: str | Path | None = None, run: str | Path | type[Job] | None = None
    ) -> tuple[Finding, ...]: ...
    def hpo(task: str | type[Job], *overrides: str) -> StudyResult: ...


__version__ = "0.1.0"

_NAMES = {
    "conf": "compose",
    "core.errors": "BadConfig BadInput OutOfMemory RunFailed TrainfitError TrainfitWarning",
    "hardware": "as_if detect",
    "hardware.catalogue": "lookup",
    "integrations.speeding": "padded speed_up unpadded",
    "jobs.job_plan": "plan",
    "jobs.registry": "Job tunable",
    "jobs.tuned_plans": "find_batch_size recommend",
    "measuring": "measure",
    "measuring.observe": "observe",
    "planning": "estimate",
    "reports.run_report": "report",
    "runtime": "applied apply undo",
}
_HOMES = {name: f"trainfit.{home}" for home, names in _NAMES.items() for name in names.split()}
_PACKAGES = ("doctor", "hpo")
"""Packages that can be called."""
_COMMANDS = ("check", "predict", "train", "tune", "verify")
__all__ = ["__version__", *_COMMANDS, *_HOMES, *_PACKAGES]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"trainfit.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'trainfit' has no attribute {name!r}")
    found = getattr(import_module(_HOMES[name]), name)
    return _telling(found) if isfunction(found) else found


@cache
def _telling(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a public function that fails in one line where an argument is not of its kind."""

    @wraps(call)
    def told(*args: Any, **given: Any) -> Any:
        from trainfit.core.errors import MALFORMED, BadInput, brief

        try:
            return call(*args, **given)
        except MALFORMED as error:
            expected, bound = get_type_hints(call), signature(call)
            for name, value in bound.bind(*args, **given).arguments.items():
                one = bound.parameters[name]
                values = value if one.kind is one.VAR_POSITIONAL else (value,)
                if not all(_fits(each, expected.get(name)) for each in values):
                    what = f"{name} of trainfit.{call.__name__} is {brief(repr(value))}"
                    raise BadInput(what, f"give {one.annotation}") from error
            raise

    return told


def _fits(value: Any, kind: Any) -> bool:
    """Tell if a value is of an annotated type, as far as its class tells."""
    if isinstance(kind, TypeVar):
        kind = kind.__bound__
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    kind = {float: Real}.get(kind, get_origin(kind) or kind)
    return kind is Any or not isinstance(kind, type) or isinstance(value, kind)


def __dir__() -> list[str]:
    return sorted(__all__)


def train(task: str | type[Job], *overrides: str, resume: str | Path | None = None) -> Any:
    """Train a job, score it on held-out data and export the model; return the result record.

    `resume` is a run folder to continue; it continues with its own configuration.
    """
    from trainfit.core.errors import BadInput
    from trainfit.jobs import configuration, registry

    name = registry.name_of(task)
    module = registry.job_module(name)
    if resume is None:
        return module.train(configuration.configure(name, overrides))
    if overrides:
        raise BadInput(f"resume with {overrides[0]}", "a run continues with its own configuration")
    folder = _folder(resume)
    return module.train(configuration.configured_by(folder, name), resume=folder)


def tune(task: str | type[Job], *overrides: str, minutes: float = 3.0) -> TuneResult:
    """Measure for `minutes` which settings are fastest here, and keep them for `train`."""
    from trainfit.jobs import configuration, job_plan, registry, tuned_plans

    name = registry.name_of(task)
    module = registry.job_module(name)
    composed = configuration.configure(name, overrides)
    job = module.prepare(composed).tuned_job(job_plan.machine(composed))
    return tuned_plans.tune(job, minutes=minutes)


def verify(run: str | Path | type[Job]) -> Receipt:
    """Return the receipt of a run: what was asked for against what was seen to run.

    `run` is a run folder, its name under runs/, or a job of yours, for its newest run.
    """
    from trainfit.measuring.receipt import read_receipt

    return read_receipt(_folder(run))


def predict(
    run: str | Path | type[Job],
    items: Sequence[Any] | dict[str, Any] | str,
    *,
    criterion: str | None = None,
    folder: str | Path | None = None,
) -> list[Any]:
    """Answer for texts by the model of a finished run, or for items by a job of yours.

    A job of yours answers by its newest run, or by that in `folder`. A text or a dict alone is one
    item. A model of pairs takes pairs, one of words lists of
    words too, and answers for each word.
    """
    from collections.abc import Collection, Iterable

    from trainfit.core.errors import BadInput
    from trainfit.jobs import own_steps, registry
    from trainfit.jobs.predict import answer, answer_words
    from trainfit.runs.run_folder import export_facts, exports_of

    items = [items] if isinstance(items, str | dict) else items
    if not isinstance(items, Iterable):
        raise BadInput(f"the items are {items!r}", "give a list of them")
    place = _folder(run if folder is None else folder)
    if isinstance(run, type) or ":" in str(run):
        return own_steps.predict(registry.name_of(run), place, items)  # type: ignore[arg-type]
    exports = exports_of(place)
    facts = export_facts(exports[0])
    words, pairs = facts.get("task") == "tokens", facts.get("pairs") is True
    asked = "texts or lists of words" if words else "pairs of texts" if pairs else "texts"
    rows = []
    for item in items:
        row = item.split() if words and isinstance(item, str) else item
        row = row if words or pairs else [item]
        fits = isinstance(row, Collection) and not isinstance(row, str | dict)
        if not fits or not all(isinstance(one, str) for one in row):
            raise BadInput(f"an item is a {type(item).__name__}", f"give {asked}")
        if not words and len(row) != 1 + pairs:
            raise BadInput(f"an item has {len(row)} texts", f"give {asked}")
        rows.append(list(row))
    if words:
        return answer_words(exports, dict(enumerate(rows, 1)))
    seconds = [row[1] for row in rows] if pairs else None
    return answer(exports, [row[0] for row in rows], criterion, seconds)


def check(gpu: str | None = None) -> Recommendation:
    """Return the settings to start from on this machine, or on a GPU of the catalogue."""
    from trainfit.hardware import as_if, detect
    from trainfit.jobs.tuned_plans import recommend

    return recommend(detect() if gpu is None else as_if(gpu))


def _folder(run: str | Path | type[Job]) -> Path:
    from pathlib import Path

    from trainfit.runs import run_folder

    return run_folder.find(run, Path("runs"))
