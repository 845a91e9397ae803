"""A job from its data to its page: `trainfit prepare`, `train`, `report` and `watch`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainfit.cli.inference import push_option, push_run
from trainfit.cli.job_words import job_command
from trainfit.cli.main import INTERRUPTED, SEED, Number, loading, tell_notes
from trainfit.cli.ranks import AskedRanks, launch, rank_options
from trainfit.core import codec
from trainfit.core.errors import BadInput, TrainfitError, brief
from trainfit.core.files import read_text
from trainfit.runs import run_folder, timeline

if TYPE_CHECKING:
    from trainfit.conf import Composed
    from trainfit.data.token_preparation import Progress


@click.command()
@click.argument("task")
@click.argument("more", nargs=-1, type=click.Path(path_type=Path), metavar="[FILE_OR_FOLDER]...")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A text, CSV, JSONL or Parquet file, or a folder of them; may be given several times. "
    "Without one: the source of Python's standard library.",
)
@click.option(
    "--output", required=True, type=click.Path(path_type=Path), help="A new folder to write."
)
@click.option("--vocab-size", default=30_000, show_default=True, help="Size of the vocabulary.")
@click.option("--special", multiple=True, help="A word that is one token; may be repeated.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="Use this tokenizer.json.")
@click.option("--validation", default=0.05, show_default=True, help="Share of held-out documents.")
@click.option("--separator", default="<|endoftext|>", show_default=True, help="End of a document.")
@click.option("--column", default="text", show_default=True, help="Column of a table's texts.")
@click.option(
    "--seed", default=42, type=SEED, show_default=True, help="Seed of the held-out choice."
)
@click.option(
    "--processes", type=click.IntRange(1, 1024), help="Processes to use; default: one per core."
)
@click.option("--json", "as_json", is_flag=True, help="End with one JSON object for a program.")
def prepare(
    task: str,
    more: tuple[Path, ...],
    inputs: tuple[Path, ...],
    output: Path,
    vocab_size: int,
    special: tuple[str, ...],
    tokenizer: Path | None,
    validation: float,
    separator: str,
    column: str,
    seed: int,
    processes: int | None,
    as_json: bool,
) -> None:
    """Token files of a corpus, for pretraining a GPT.

    TASK is gpt. A tokenizer is learned from the corpus, or given. Further files and folders may
    follow the first after --input.
    """
    from trainfit.data.token_preparation import Preparation, prepare_tokens

    if task != "gpt":
        fix = "the job with token files is gpt"
        raise BadInput(f"there is nothing to prepare for {task!r}", fix)
    if not separator:
        fix = "give the text that ends a document, or leave it out"
        raise BadInput("--separator is empty", fix)
    given = {
        "vocab_size": vocab_size,
        "special": list(special),
        "validation_share": validation,
        "seed": seed,
        "separator": _unescaped(separator),
        "column": column,
    }
    with _bar() as progress:
        header = prepare_tokens(
            [*inputs, *more],
            output,
            codec.decode(Preparation, given),
            tokenizer=tokenizer,
            processes=processes,
            progress=progress,
        )
    if as_json:
        click.echo(codec.for_programs({"output": str(output), **codec.encode(header)}, None))
        return
    train, held = header.train, header.validation
    click.echo(
        f"{output}: {train.tokens:,} tokens of {train.documents:,} documents to train on, "
        f"{held.tokens:,} of {held.documents:,} held out, a vocabulary of {header.vocab_size:,}"
    )
    click.echo(f"Train on them: trainfit train gpt data.data_dir={output}")


def _unescaped(separator: str) -> str:
    """Separator with typed escapes replaced by their characters."""
    try:
        found = separator.encode("latin-1", "backslashreplace").decode("unicode_escape")
        found.encode()  # \\ud800 is no character
    except UnicodeError:
        fix = "write a backslash as two, a new line as \\n"
        raise BadInput(f"--separator is {brief(separator)!r}", fix) from None
    return found


@contextmanager
def _bar() -> Iterator[Progress | None]:
    """Progress bar in a terminal; None elsewhere."""
    from rich.progress import Progress as Bar

    from trainfit.reports import terminal

    console = terminal.console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with Bar(console=console, transient=True) as bar:
        tasks: dict[str, int] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(f"making the {what}", total=total)
            bar.update(tasks[what], completed=done)  # type: ignore[arg-type]

        yield progress


# ── train ─────────────────────────────────────────────────────────────────────────────────────────


_USE = {
    "nli": 'Predict: trainfit predict {run} --text "…"',
    "textclass": 'Predict: trainfit predict {run} --text "…"',
    "tokens": 'Predict: trainfit predict {run} --text "…"',
    "pairs": 'Predict: trainfit predict {run} --text "…" --second "…"',
    "gpt": "Write: trainfit sample {run}",
}
"""Last line of a training: the command that uses its model."""
_RESULTS = "results.json"


@job_command()
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
    from trainfit.conf.starting import with_file
    from trainfit.jobs.job_plan import plan_ahead
    from trainfit.jobs.registry import check_job, job_module

    check_job(task)
    composed, run = _composed(task, with_file(task, config_file, overrides), resume)
    if not dry_run:
        words = click.get_current_context().find_root().obj
        code = _report_alone(run, as_json) if run and resume == "auto" else None
        if code is not None or (code := launch(ranks, words, composed.config)) is not None:
            return code
    first = run_folder.is_first_rank()
    if hub is not None and first:
        _check_push_of(task, composed.config, hub)
    plan_ahead(composed, trains=not dry_run)
    with loading():
        from trainfit.jobs import job_times
        from trainfit.reports import training_lines

        job = job_module(task)
    tell_notes(*(composed.notes if first else ()))
    if dry_run:
        _dry_run(job, composed, as_json)
        return 0
    with timeline.recording(from_process_start=True):
        result = job.train(composed, training_lines.show(composed), resume=run)
        with timeline.stage("report"):
            training_lines.end(result, as_json=as_json)
            if result.status == "finished" and first:
                report_on(result.run, as_json)
                decodes = task != "gpt" or (Path(result.run) / "tokenizer.json").is_file()
                if task in _USE and decodes:
                    click.echo(_USE[task].format(run=shlex.quote(result.run)), err=as_json)
    if result.status == "finished" and first:
        job_times.learn(Path(result.run))
        if hub is not None:
            click.echo(f"Pushed: {push_run(Path(result.run), hub)}", err=as_json)
    return INTERRUPTED if result.status == "stopped" else 0


def _check_push_of(task: str, config: Any, hub: str) -> None:
    """Raise BadInput, before anything is trained, if the model could not be pushed to the hub."""
    from trainfit.data.hub import check_push

    if task == "gpt" or ":" in task:
        fix = "leave it out, and upload what you choose with `hf upload`"
        raise BadInput(f"--push-to-hub takes classifiers with a model card, not {task}", fix)
    if config.cv.folds is not None:
        what = f"--push-to-hub takes one model, and cv.folds={config.cv.folds} trains as many"
        raise BadInput(what, "leave one of them out")
    check_push(hub)


def _composed(
    task: str, overrides: tuple[str, ...], resume: str | None
) -> tuple[Composed, Path | None]:
    """Return the configuration of a new run, or that of the run to resume and its folder."""
    from trainfit.jobs.configuration import configure, configured_by

    if resume is None or resume == "auto":
        composed = configure(task, overrides)
        run_folder.check_root(Path(composed.config.runs_dir))
        return composed, _left_run(composed) if resume else None
    if overrides:
        fix = "a run continues with its own configuration: leave it out"
        raise BadInput(f"--resume with {overrides[0]}", fix)
    run = run_folder.find(resume)
    return configured_by(run, task), run


def _left_run(composed: Composed) -> Path | None:
    """Find the newest run of this configuration that has not ended, or has no report yet."""

    def is_same(path: Path) -> bool:
        with suppress(OSError, ValueError):  # a damaged file of another run
            return read_text(path) == wanted
        return False

    wanted = run_folder.written_config(composed.written())
    found = [
        path.parent
        for path in Path(composed.config.runs_dir).glob("*/config.json")
        if is_same(path)
        and not ((path.parent / _RESULTS).is_file() and (path.parent / "report.html").is_file())
        and (path.parent / "data.json").is_file()
    ]
    return max(found, key=lambda run: run.stat().st_mtime_ns, default=None)


def _report_alone(run: Path, as_json: bool) -> int | None:
    """End a run that was killed between its results and its report; None for any other."""
    if not (run / _RESULTS).is_file() or "RANK" in os.environ:  # other ranks wait for this one
        return None
    click.echo(f"Trained already: {run}; its report was missing", err=as_json)
    report_on(str(run), as_json)
    if as_json:
        click.echo(codec.for_programs(codec.read_object(run / _RESULTS), None))
    return 0


def report_on(run: str, as_json: bool) -> None:
    """End with the path of the run's page; a page that cannot be written spoils no run."""
    from trainfit.reports import terminal

    try:
        with terminal.busy("writing the report"):
            from trainfit.reports.run_report import place, report, write

            path = write(report(run), place(run))
    except TrainfitError as error:
        tell_notes(f"no report: {error}")
    else:
        click.echo(f"Report: {path}", err=as_json)


def _dry_run(job: Any, composed: Composed, as_json: bool) -> None:
    from trainfit.jobs.job_plan import machine
    from trainfit.jobs.tuned_plans import make_plan
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


# ── report and watch ──────────────────────────────────────────────────────────────────────────────


@click.command()
@click.argument("runs", nargs=-1, required=True)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write there; a file that is there is replaced.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(("html", "markdown", "json")),
    help="What to write; html unless the ending of --output says otherwise.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
def report(runs: tuple[str, ...], output: Path | None, form: str | None, as_json: bool) -> None:
    """Runs as one HTML page: scores, curves, plan, events.

    RUNS are folders of runs or studies, or their names under runs/; several are compared. The page
    needs no other file and no network. It goes into the folder of the (first) run as
    report.html, and its path is printed. Markdown and JSON are printed themselves. With --output,
    all of them are written there and the path is printed.
    """
    from trainfit.reports import terminal

    with terminal.busy("reading the run" if len(runs) == 1 else f"reading {len(runs)} runs"):
        from trainfit.reports.run_report import FORMATS, place, report, write

        made = report(*runs)
    endings = {f".{ending}": name for name, (ending, _) in FORMATS.items()}
    if form is None:
        form = endings.get(output.suffix.lower(), "html") if output else "html"
    form = "json" if as_json else form
    if output is None and form != "html":
        click.echo(FORMATS[form][1](made), nl=False)
        return
    click.echo(write(made, output or place(*runs), form))


@click.command()
@click.argument("run", required=False)
@click.option("--once", is_flag=True, help="Draw once and exit; the default without a terminal.")
@click.option(
    "--every",
    type=Number(0.1, 86_400),
    default=1.0,
    show_default=True,
    help="Seconds between two updates.",
)
@click.option("--json", "as_json", is_flag=True, help="Print its state as one JSON object.")
def watch(run: str | None, once: bool, every: float, as_json: bool) -> int:
    """A running job in the terminal, from another terminal.

    RUN is the folder of a run, or its name under runs/; without it, the newest there. It ends with
    the run, or on Ctrl-C, which leaves the run alone.
    """
    from trainfit.reports import terminal
    from trainfit.reports.live import Watcher, follow, frame

    watcher = Watcher(_find(run))
    if as_json:
        click.echo(watcher.look().to_json())
        return 0
    console = terminal.console()
    if once or not console.is_terminal:
        console.print(frame(watcher.look()))
        return 0
    try:
        standing = follow(watcher, console, every)
    except KeyboardInterrupt:
        return 0
    return 1 if standing.status == "failed" else 0


def _find(run: str | None) -> Path:
    if run is not None:
        return run_folder.find(run)
    found = [path.parent for path in run_folder.ROOT.glob("*/run.json")]
    if not found:
        raise BadInput(f"there is no run in {run_folder.ROOT}", "say which one: trainfit watch RUN")
    return max(found, key=lambda folder: folder.stat().st_mtime)
