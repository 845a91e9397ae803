"""`trainfit tune`: measure what is fastest here, for minutes, and keep it for `train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainfit.cli.job_words import (
    JobCommand,
    config_option,
    job_options,
    overrides_argument,
    task_argument,
)
from trainfit.cli.main import ABOVE_0
from trainfit.core import codec

if TYPE_CHECKING:
    from trainfit.jobs.tuned_plans import JobQuestion


@click.command(cls=JobCommand)
@task_argument()
@overrides_argument()
@config_option
@job_options("output")
@click.option(
    "--minutes", type=ABOVE_0, help="Minutes to use; default: 3, or 10 for the ladder.", metavar="N"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for a program.")
@click.option("--ladder", is_flag=True, help="Measure what each optimization gives, one by one.")
@click.option(
    "--batch-size-only", is_flag=True, help="Find the largest batch that fits, without an OOM."
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="A file for the JSON; with --ladder, a folder for ladder.json and its picture.",
)
def command(
    task: str,
    overrides: tuple[str, ...],
    config_file: Path | None,
    minutes: float | None,
    as_json: bool,
    ladder: bool,
    batch_size_only: bool,
    output: Path | None,
) -> int:
    """Measure what is fastest on this machine, and keep it for train.

    TASK is nli, textclass, pairs, tokens, gpt, or module:Class of yours. OVERRIDES are key=value
    words; what they set is held fixed, and the rest is tried. Trials run the
    job's own loop on synthetic tokens of its lengths, in processes of their own.
    """
    from trainfit.conf.starting import with_file
    from trainfit.core.errors import BadInput
    from trainfit.jobs.registry import check_job

    if ladder and batch_size_only:
        raise BadInput("--ladder and --batch-size-only are two questions", "give one of them")
    if batch_size_only and minutes is not None:
        raise BadInput("--batch-size-only takes seconds", "leave out --minutes")
    check_job(task)
    words = with_file(task, config_file, overrides)
    job = _job(task, words)
    if batch_size_only:
        return _batch_size(job, as_json, output)
    if ladder:
        return _ladder(job, minutes, as_json, output)
    return _tune(job, minutes, as_json, output)


def _job(task: str, words: tuple[str, ...]) -> JobQuestion:
    """The job as `train` would begin it: its own data decides the lengths."""
    from trainfit.jobs import job_plan
    from trainfit.jobs.configuration import configure
    from trainfit.jobs.registry import job_module
    from trainfit.reports import terminal

    composed = configure(task, words)
    for note in composed.notes:
        click.echo(f"trainfit: note: {note}", err=True)
    with terminal.busy("looking at the hardware"):
        profile = job_plan.machine(composed)
    with terminal.busy("preparing the data"):
        job: JobQuestion = job_module(task).prepare(composed).tuned_job(profile)
    return job


def _tune(job: JobQuestion, minutes: float | None, as_json: bool, output: Path | None) -> int:
    from trainfit.cli.main import INTERRUPTED
    from trainfit.cli.pages import result_data, result_page, trial_line, watched
    from trainfit.jobs.tuned_plans import MINUTES, tune
    from trainfit.reports import terminal

    minutes = minutes or MINUTES
    with watched("tuning", minutes * 60, quiet=as_json) as say:
        result = tune(job, minutes=minutes, tell=lambda trial: say(trial_line(trial)))
    _hand_out(result_data(result), as_json, output)
    if not as_json:
        terminal.console().print(result_page(result))
    if result.ended == "interrupted":
        return INTERRUPTED
    return 0 if result.samples_per_second is not None else 1


def _ladder(job: JobQuestion, minutes: float | None, as_json: bool, output: Path | None) -> int:
    from trainfit.cli.main import INTERRUPTED
    from trainfit.cli.pages import ladder_page, step_line, watched, write_ladder
    from trainfit.jobs.job_plan import with_tuned
    from trainfit.jobs.tuned_plans import trial_task
    from trainfit.reports import terminal
    from trainfit.tuning.ladder.climb import MINUTES, climb

    minutes = minutes or MINUTES
    with terminal.busy("planning"):
        best = with_tuned(job, job.ask({}))
    with watched("climbing", minutes * 60, quiet=as_json) as say:
        ladder = climb(
            best,
            trial_task(job),
            job.profile,
            title=f"{job.composed.task}, {job.question.arguments['name']}",
            no_liger=job.question.no_liger,
            minutes=minutes,
            watch=lambda step: say(step_line(step)),
        )
    files = write_ladder(ladder, output or Path(f"ladder-{job.composed.task}"))
    if as_json:
        click.echo(codec.for_programs(codec.encode(ladder)))
    else:
        terminal.console().print(ladder_page(ladder))
    for path in files:
        click.echo(f"Written: {path}", err=as_json)
    return INTERRUPTED if ladder.ended == "interrupted" else 0


def _batch_size(job: JobQuestion, as_json: bool, output: Path | None) -> int:
    from trainfit.jobs.batch_size import job_of
    from trainfit.reports import terminal
    from trainfit.tuning.finder.finder import find, page

    with terminal.busy("finding the batch size"):
        found = find(job_of(job.ask({})), job.profile)
    _hand_out(codec.encode(found), as_json, output)
    if not as_json:
        terminal.console().print(page(found))
    return 0


def _hand_out(data: dict[str, Any], as_json: bool, output: Path | None) -> None:
    """Print the data as JSON, write it to a file, or do both."""
    from trainfit.core.files import write_output

    text = codec.for_programs(data)
    if output is not None:
        write_output(output, text + "\n")
    if as_json:
        click.echo(text)
