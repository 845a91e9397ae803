"""The commands as functions: `trainfit.train("nli", "cv.folds=5")` for `train nli cv.folds=5`.

A job is nli, textclass, pairs, tokens, gpt, "module:Class", or a subclass of `trainfit.Job` itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainfit.core.errors import BadInput
from trainfit.jobs.registry import name_of

if TYPE_CHECKING:
    from trainfit.core.plan_records import Recommendation
    from trainfit.core.records import Receipt
    from trainfit.jobs.registry import Job
    from trainfit.tuning.tuned_cache import TuneResult

_RUNS = Path("runs")


def train(task: str | type[Job], *overrides: str, resume: str | Path | None = None) -> Any:
    """Train a job, score it on held-out data and export the model; return the result record.

    `resume` is a run folder to continue; it continues with its own configuration.
    """
    from trainfit.jobs import configuration, registry
    from trainfit.runs import run_folder

    name = name_of(task)
    module = registry.job_module(name)
    if resume is None:
        return module.train(configuration.configure(name, overrides))
    if overrides:
        raise BadInput(f"resume with {overrides[0]}", "a run continues with its own configuration")
    run = run_folder.find(resume, _RUNS)
    return module.train(configuration.configured_by(run, name), resume=run)


def tune(task: str | type[Job], *overrides: str, minutes: float = 3.0) -> TuneResult:
    """Measure for `minutes` which settings are fastest here, and keep them for `train`."""
    from trainfit.jobs import configuration, job_plan, registry, tuned_plans

    name = name_of(task)
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
    items: Sequence[Any] | Mapping[str, Any] | str,
    *,
    criterion: str | None = None,
) -> list[Any]:
    """Answer for texts by the model of a finished run, or for items by a job of yours.

    A text or a dict alone is one item. A model of words takes lists of words too, and answers for
    each word.
    """
    from trainfit.jobs import own_steps
    from trainfit.jobs.predict import answer, answer_words
    from trainfit.runs.run_folder import export_facts, exports_of

    items = [items] if isinstance(items, str | Mapping) else items
    place = _folder(run)
    if isinstance(run, type) or ":" in str(run):
        return own_steps.predict(name_of(run), place, items)  # type: ignore[arg-type]
    exports = exports_of(place)
    if export_facts(exports[0]).get("task") == "tokens":
        split = [item.split() if isinstance(item, str) else list(item) for item in items]
        return answer_words(exports, [words for words in split if words])
    if wrong := [item for item in items if not isinstance(item, str)]:
        raise BadInput(f"an item is a {type(wrong[0]).__name__}", "give texts")
    return answer(exports, list(items), criterion)


def check(gpu: str | None = None) -> Recommendation:
    """Return the settings to start from on this machine, or on a GPU of the catalogue."""
    from trainfit.hardware import as_if, detect
    from trainfit.hardware.catalogue import find
    from trainfit.jobs.tuned_plans import recommend

    return recommend(detect() if gpu is None else as_if(find(gpu)))


def _folder(run: str | Path | type[Job]) -> Path:
    from trainfit.runs import run_folder

    return run_folder.find(run, _RUNS)
