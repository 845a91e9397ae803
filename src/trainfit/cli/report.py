"""`trainfit report`: runs as one HTML page, as Markdown, or as the numbers behind the plots."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("runs", nargs=-1, required=True)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write there, in place of what is there.",
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
    needs no other file and no network. It goes into the first one's folder as report.html, and its
    path is printed; Markdown and JSON are printed themselves. With --output, all of them are
    written there and the path is printed.
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
    click.echo(write(made, output or place(runs[0]), form))
