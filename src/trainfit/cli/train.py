"""`trainfit train`: a job from its data to its scores."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainfit.cli.inference import check_push_of, push_option, push_run
from trainfit.cli.job_words import (
    JobCommand,
    config_option,
    job_options,
    overrides_argument,
    task_argument,
)
from trainfit.cli.ranks import AskedRanks, launch, rank_options

if TYPE_CHECKING:
    from trainfit.conf import Composed

_USE = {
    "nli": 'Predict: trainfit predict {run} --text "…"',
    "textclass": 'Predict: trainfit predict {run} --text "…"',
    "tokens": 'Predict: trainfit predict {run} --text "…"',
    "pairs": 'Predict: trainfit predict {run} --text "…" --second "…"',
    "gpt": "Write: trainfit sample {run}",
}
"""Last line of a training: the command that uses its model."""


@click.command(cls=JobCommand)
@task_argument()
@overrides_argument()
@config_option
@job_options()
@click.option("--json", "as_json", is_flag=True, help="End with one JSON object for a program.")
@click.option("--dry-run", is_flag=True, help="Show configuration and plan; train nothing.")
@click.option(
    "--resume",
    metavar="RUN|auto",
    help="Continue a run: its folder, or auto for one that the same words left unfinished, if any.",
)
@push_option
@rank_options
def command(
    task: str,
    overrides: tuple[str, ...],
    config_file: Path | None,
    as_json: bool,
    dry_run: bool,
    resume: str | None,
    hub: str | None,
    ranks: AskedRanks,
) -> int:
    """Train a job, score it on held-out data, and export the model.

    TASK is nli, textclass, pairs, tokens, gpt, or module:Class of yours. OVERRIDES are your data, a
    file or a folder, and key=value words such as cv.folds=5; `trainfit config TASK` shows the keys.
    Without data of yours a small model trains on synthetic data, or for gpt on the source of
    Python's standard library.
    """
    from trainfit.cli.main import INTERRUPTED, loading
    from trainfit.conf.starting import with_file
    from trainfit.jobs.job_plan import plan_ahead
    from trainfit.jobs.registry import check_job, job_module

    check_job(task)
    composed, run = _composed(task, with_file(task, config_file, overrides), resume)
    if not dry_run:
        words = click.get_current_context().find_root().obj
        if (code := launch(ranks, words, composed.config)) is not None:
            return code
    first = os.environ.get("RANK", "0") == "0"
    if hub is not None and first:
        check_push_of(task, composed.config, hub)
    plan_ahead(composed)
    with loading():
        from trainfit.jobs import job_times
        from trainfit.reports import training_lines
        from trainfit.runs import timeline

        job = job_module(task)
    for note in composed.notes if first else ():
        click.echo(f"trainfit: note: {note}", err=True)
    if dry_run:
        _dry_run(job, composed, as_json)
        return 0
    with timeline.recording(from_process_start=True):
        result = job.train(composed, training_lines.show(composed), resume=run)
        with timeline.stage("report"):
            training_lines.end(result, as_json=as_json)
            if result.status == "finished" and first:
                report_on(result.run, as_json)
                if task in _USE:
                    click.echo(_USE[task].format(run=shlex.quote(result.run)), err=as_json)
    if result.status == "finished" and first:
        job_times.learn(Path(result.run))
        if hub is not None:
            click.echo(f"Pushed: {push_run(Path(result.run), hub)}", err=as_json)
    return INTERRUPTED if result.status == "stopped" else 0


def _composed(
    task: str, overrides: tuple[str, ...], resume: str | None
) -> tuple[Composed, Path | None]:
    """Return the configuration of a new run, or that of the run to resume and its folder."""
    from trainfit.core.errors import BadInput
    from trainfit.jobs.configuration import configure, configured_by
    from trainfit.runs import run_folder

    if resume is None:
        return configure(task, overrides), None
    if resume == "auto":
        composed = configure(task, overrides)
        return composed, _left_run(composed)
    if overrides:
        raise BadInput(
            f"--resume with {overrides[0]}",
            "a run continues with its own configuration: leave it out",
        )
    run = run_folder.find(resume, Path("runs"))
    return configured_by(run, task), run


def _left_run(composed: Composed) -> Path | None:
    """Find the newest run of this configuration that has not ended."""
    from trainfit.runs import run_folder

    wanted = run_folder.written_config(composed.written())
    found = [
        path.parent
        for path in Path(composed.config.runs_dir).glob("*/config.json")
        if path.read_text(encoding="utf-8") == wanted
        and not (path.parent / "results.json").is_file()
        and (path.parent / "data.json").is_file()
    ]
    return max(found, key=lambda run: run.stat().st_mtime_ns, default=None)


def report_on(run: str, as_json: bool) -> None:
    """End with the path of the run's page; a page that cannot be written spoils no run."""
    from trainfit.core.errors import TrainfitError
    from trainfit.reports.run_report import place, report, write

    try:
        path = write(report(run), place(run))
    except TrainfitError as error:
        click.echo(f"trainfit: note: no report: {error}", err=True)
    else:
        click.echo(f"Report: {path}", err=as_json)


def _dry_run(job: Any, composed: Composed, as_json: bool) -> None:
    from trainfit.core import codec
    from trainfit.jobs.job_plan import machine
    from trainfit.jobs.run import make_plan
    from trainfit.reports import plan_page as page
    from trainfit.reports import terminal

    with terminal.busy("planning"):
        profile = machine(composed)
        plan = make_plan(job.prepare(composed), profile)
    if as_json:
        data = {"config": codec.encode(composed.config), "plan": codec.encode(plan)}
        click.echo(codec.for_programs(data))
        return
    console = terminal.console()
    console.print(terminal.config_table(composed), "")
    console.print(page.plan_page(plan))
