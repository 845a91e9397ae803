"""`trainfit report`: runs as one page; `trainfit watch`: a running job in the terminal."""

from __future__ import annotations

from pathlib import Path

import click

from trainfit.cli.main import Number


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
def command(runs: tuple[str, ...], output: Path | None, form: str | None, as_json: bool) -> None:
    """Runs as one HTML page: scores, curves, plan, events.

    RUNS are folders of runs or studies, or their names under runs/; several are compared. The page
    needs no other file and no network. It goes into the folder of the (first) run as
    report.html, and its path is printed. Markdown and JSON are printed themselves. With --output,
    all of them are written there and the path is printed.
    """
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
    from trainfit.core.errors import BadInput
    from trainfit.runs import run_folder

    root = Path("runs")
    if run is not None:
        return run_folder.find(run, root)
    found = [path.parent for path in root.glob("*/run.json")]
    if not found:
        raise BadInput(f"there is no run in {root}", "say which one: trainfit watch RUN")
    return max(found, key=lambda folder: folder.stat().st_mtime)
