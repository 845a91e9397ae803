"""`trainfit doctor`: faults of a machine, a log or a run, and how to fix them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainfit.core import codec

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trainfit.doctor import Finding

_COLOURS = {"error": "bold red", "warning": "bold yellow", "info": "bold blue"}


@click.command()
@click.option(
    "--log",
    type=click.Path(path_type=Path, exists=True, dir_okay=False, readable=True),
    help="Read this log instead of looking at the machine.",
)
@click.option("--run", metavar="RUN", help="Read this run folder instead.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for a program.")
def command(log: Path | None, run: str | None, as_json: bool) -> int:
    """Find faults here, in a log or in a run, and how to fix them.

    Ends with 0 where nothing is wrong and with 1 where something is. Nothing is changed, and no
    process is ended. Of a log only the words of an error are shown, never its other lines.
    """
    from trainfit.doctor import is_healthy
    from trainfit.reports import terminal

    findings = _find(log, run, quiet=as_json)
    healthy = is_healthy(findings)
    if as_json:
        click.echo(codec.for_programs({"healthy": healthy, "findings": codec.encode(findings)}))
    else:
        terminal.console().print(page(findings, healthy))
    return 0 if healthy else 1


def _find(log: Path | None, run: str | None, *, quiet: bool) -> tuple[Finding, ...]:
    from trainfit.core.errors import BadInput
    from trainfit.doctor import examine, examine_run, gather, read_log
    from trainfit.reports import terminal

    if log is not None and run is not None:
        raise BadInput("--log and --run were both given", "give one of them")
    if log is not None:
        return read_log(log)
    if run is not None:
        from trainfit.runs import run_folder

        return examine_run(run_folder.find(run, Path("runs")))
    console = terminal.console(stderr=True)
    shows = console.is_terminal and not quiet
    with console.status("looking at the machine") if shows else nullcontext():
        return examine(gather())


def page(findings: Sequence[Finding], healthy: bool) -> RenderableType:
    """The findings for a person."""
    from rich.console import Group

    verdict = "Nothing is wrong." if healthy else "Something is wrong."
    if not findings:
        return verdict
    return Group(*(_finding(finding) for finding in findings), verdict)


def _finding(finding: Finding) -> RenderableType:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from trainfit.reports import terminal

    parts = (("evidence", finding.evidence), ("why", finding.why), ("fix", finding.mend))
    title = Text.assemble((finding.severity, _COLOURS[finding.severity]), ": ", finding.title)
    shown = Table.grid()
    shown.add_row(title.append(f" ({finding.id})", "dim"))
    shown.add_row(Padding(terminal.named_rows(parts), (0, 0, 1, 2)))
    return shown
