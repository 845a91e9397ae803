"""`trainfit plan`: every setting of a run with its reason; `trainfit tune` measures the fastest."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainfit.cli.job_words import job_command
from trainfit.cli.main import ABOVE_0, INTERRUPTED, machines_and_gpus, tell_notes
from trainfit.core import codec
from trainfit.core.errors import BadInput
from trainfit.core.files import write_output

if TYPE_CHECKING:
    from trainfit.conf import Composed
    from trainfit.core.plan_records import Plan
    from trainfit.jobs.tuned_plans import JobQuestion
    from trainfit.planning.sharding import ClusterRow


FORMATS = ("table", "json", "hf", "lightning", "accelerate", "hydra", "shell")


@job_command("output")
@click.option(
    "--gpu", metavar="SLUG|all", help="Plan for a GPU of the catalogue, or compare them all."
)
@click.option(
    "--gpus", metavar="N|MxN", help="Compare ways to use N GPUs, or M machines with N each."
)
@click.option("--memory", type=ABOVE_0, metavar="GIB", help="Use no more of the GPU than this.")
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="table",
    show_default=True,
    help="How to print the plan: for people, for a program, or as another tool's settings.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.option(
    "--plot", type=click.Path(path_type=Path), help="Draw memory against batch size, as SVG or PNG."
)
@click.option("--watts", type=ABOVE_0, help="Power of the machine, for the energy of the run.")
@click.option("--price", type=ABOVE_0, help="Price of an hour, for the cost of the run.")
def command(
    task: str,
    overrides: tuple[str, ...],
    config_file: Path | None,
    gpu: str | None,
    gpus: str | None,
    memory: float | None,
    form: str,
    as_json: bool,
    plot: Path | None,
    watts: float | None,
    price: float | None,
) -> None:
    """Every setting of a run with its reason, for this machine or any GPU.

    TASK is nli, textclass, pairs, tokens, gpt, or module:Class of yours. OVERRIDES are key=value
    words; what they set is kept, and the rest is planned around it.
    """
    _check_words(task, gpu)
    from trainfit.conf import compose
    from trainfit.conf.starting import with_file
    from trainfit.hardware.catalogue import find
    from trainfit.jobs import job_plan
    from trainfit.jobs.configuration import check_data, fit_to_data
    from trainfit.jobs.known_data import settle_sources
    from trainfit.planning import planner
    from trainfit.reports import plan_page as page
    from trainfit.reports import terminal
    from trainfit.reports.plots import check_plot

    form = "json" if as_json else form
    machines, each = (1, 0) if gpus is None else machines_and_gpus(gpus)
    if plot is not None:
        check_plot(plot)
    cap = () if memory is None else (f"device.memory_gib={memory:g}",)
    composed = settle_sources(compose(task, with_file(task, config_file, (*overrides, *cap))))
    check_data(composed.config)
    composed = fit_to_data(composed, None if gpu in (None, "all") else find(gpu))
    tell_notes(*composed.notes)
    if gpu == "all":
        if plot or memory or gpus or form not in ("table", "json"):
            fix = "leave out --gpus, --plot, --memory and --format"
            raise BadInput("--gpu all makes one table", fix)
        _compare(composed, watts, price, form)
        return
    if gpu is None:
        job_plan.plan_ahead(composed)
    question = job_plan.asked_question(composed, watts, price)
    with nullcontext() if gpu else terminal.busy("looking at the hardware"):
        profile = job_plan.machine(composed, gpu)
    with terminal.busy("planning"):
        ranks: Any = {"ranks": machines * (each or 1), "machines": machines}
        made = job_plan.answer(composed, question, profile, **ranks)
        rows = _ways(composed, question, profile, made, machines) if each else []
    if plot is not None:
        with terminal.busy("drawing"):
            _draw(plot, made, planner.curve(question, profile, made))
    if form == "table":
        terminal.console().print(page.plan_page(made))
        if rows:
            _show_ways(rows, profile, composed, machines, each)
    elif form == "json":
        more = {"cluster": codec.encode(rows)} if rows else {}
        click.echo(codec.for_programs(codec.encode(made) | more))
    else:
        _hand_over(form, made, composed)


def _check_words(task: str, gpu: str | None) -> None:
    """Check the job and the GPU, and have a child import torch while the rest is read."""
    from trainfit.hardware.catalogue import find
    from trainfit.jobs.registry import check_job
    from trainfit.planning.estimator.estimate import start

    check_job(task)
    if gpu is not None and gpu != "all":
        find(gpu)
        start(1)


def _ways(
    composed: Composed, question: Any, profile: Any, made: Plan, machines: int
) -> list[ClusterRow]:
    """Compare the ways to share the job, beside a plan for one GPU."""
    from trainfit.hardware.catalogue import find
    from trainfit.jobs import job_plan
    from trainfit.planning.sharding import compare_ways

    alone = job_plan.answer(composed, question, profile)
    if made.ranks == 1 or alone.memory is None or not profile.gpus:
        return []
    gpu = None if made.gpu is None else find(made.gpu)
    return compare_ways(question, alone, made, gpu, machines)


def _show_ways(
    rows: list[ClusterRow], profile: Any, composed: Composed, machines: int, each: int
) -> None:
    from trainfit.cli.ranks import whole_folds
    from trainfit.hardware.catalogue import find
    from trainfit.planning.sharding import link_rate
    from trainfit.reports import terminal
    from trainfit.reports.plan_page import cluster_page

    slug = profile.gpu.slug
    rate, link = link_rate(None if slug is None else find(slug), each)
    inside = f"{link}: {'rate unknown' if rate is None else f'{rate / 1e9:.0f} GB/s a direction'}"
    many = f"{machines} machines with {each} × " if machines > 1 else f"{each} × "
    terminal.console().print(cluster_page(rows, f"{many}{slug or profile.gpu.name}", inside))
    if machines == 1 and (why := whole_folds(composed.config, each)):
        click.echo(why)


def _compare(composed: Composed, watts: float | None, price: float | None, form: str) -> None:
    from trainfit.jobs import job_plan
    from trainfit.reports import plan_page, terminal

    with terminal.busy("planning for every GPU"):
        rows = job_plan.plan_all(composed, watts, price)
    if form == "json":
        click.echo(json.dumps(plan_page.comparison_data(rows), indent=2))
    else:
        terminal.console().print(plan_page.comparison(rows))


def _draw(path: Path, plan: Plan, points: Any) -> None:
    from trainfit.reports.plots import memory_plot, write_plot

    if plan.memory is None:
        raise BadInput("--plot of a plan without its memory", "leave --plot out")
    title = f"{plan.task.arguments['name']} on {plan.gpu or 'this machine'}"
    write_plot(path, memory_plot(points, plan.memory.capacity_gib, plan.batch_size, title))


def _hand_over(form: str, plan: Plan, composed: Composed) -> None:
    from trainfit.integrations.plan_exports import FORMATS as HANDOVERS

    handover = HANDOVERS[form](plan, composed)
    click.echo(handover.text)
    tell_notes(*handover.notes)


# ── tune ─────────────────────────────────────────────────────────────────────────────────────────


@job_command("output")
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
def tune(
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
    from trainfit.jobs.registry import check_job

    if ladder and batch_size_only:
        raise BadInput("--ladder and --batch-size-only are two questions", "give one of them")
    if batch_size_only and minutes is not None:
        raise BadInput("--batch-size-only takes seconds", "leave out --minutes")
    check_job(task)
    job = _job(task, with_file(task, config_file, overrides))
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
    tell_notes(*composed.notes)
    with terminal.busy("looking at the hardware"):
        profile = job_plan.machine(composed)
    with terminal.busy("preparing the data"):
        job: JobQuestion = job_module(task).prepare(composed).tuned_job(profile)
    return job


def _tune(job: JobQuestion, minutes: float | None, as_json: bool, output: Path | None) -> int:
    from trainfit.cli.pages import trial_line, tune_page, watched
    from trainfit.jobs.tuned_plans import MINUTES, tune
    from trainfit.reports import terminal

    minutes = minutes or MINUTES
    with watched("tuning", minutes * 60, quiet=as_json) as say:
        result = tune(job, minutes=minutes, tell=lambda trial: say(trial_line(trial)))
    _hand_out(codec.encode(result) | {"gain": result.gain}, as_json, output)
    if not as_json:
        terminal.console().print(tune_page(result))
    if result.ended == "interrupted":
        return INTERRUPTED
    return 0 if result.samples_per_second is not None else 1


def _ladder(job: JobQuestion, minutes: float | None, as_json: bool, output: Path | None) -> int:
    from trainfit.cli.pages import ladder_page, step_line, watched, write_ladder
    from trainfit.jobs.job_plan import with_tuned
    from trainfit.jobs.tuned_plans import trial_task
    from trainfit.reports import terminal
    from trainfit.tuning.climb import MINUTES, climb

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
    from trainfit.jobs.tuned_plans import job_of
    from trainfit.reports import terminal
    from trainfit.tuning.finder import find, page

    with terminal.busy("finding the batch size"):
        found = find(job_of(job.ask({})), job.profile)
    _hand_out(codec.encode(found), as_json, output)
    if not as_json:
        terminal.console().print(page(found))
    return 0


def _hand_out(data: dict[str, Any], as_json: bool, output: Path | None) -> None:
    """Print the data as JSON, write it to a file, or do both."""
    text = codec.for_programs(data)
    if output is not None:
        write_output(output, text + "\n")
    if as_json:
        click.echo(text)
