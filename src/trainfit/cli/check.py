"""`trainfit check`: hardware and settings to start from; `trainfit doctor`: faults and fixes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainfit.cli.main import tell_notes
from trainfit.core import codec
from trainfit.core.errors import BadInput, TrainfitError
from trainfit.core.records import Note
from trainfit.runs import run_folder

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trainfit.core.plan_records import Recommendation
    from trainfit.core.records import HardwareProfile, Measurements
    from trainfit.doctor import Finding


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for a program.")
@click.option("--short", is_flag=True, help="Print one line per GPU.")
@click.option(
    "--gpu",
    metavar="SLUG",
    help="Show a GPU of the catalogue as if it were here; `list` shows them all.",
)
@click.option(
    "--measure", is_flag=True, help="Measure this machine for ten seconds, and store the rates."
)
def command(as_json: bool, short: bool, gpu: str | None, measure: bool) -> None:
    """Hardware, what it supports, and the settings to start from."""
    from trainfit.hardware.catalogue import find, gpus
    from trainfit.measuring import remembered
    from trainfit.planning.cpu_choice import dismissed, start_ahead
    from trainfit.reports import terminal

    if gpu is not None and measure:
        raise BadInput(f"--measure cannot measure {gpu}, which is not here", "leave out --gpu")
    if gpu == "list":
        terminal.console().print(terminal.gpu_list(gpus()))
        return
    if not (gpu or measure or short):
        start_ahead()
    with dismissed():
        with nullcontext() if gpu else terminal.busy("looking at the hardware"):
            profile = _profile(gpu)
        if measure:
            measured: Measurements | None = _measure(profile, quiet=as_json)
        else:
            measured = None if profile.simulated else remembered(profile)
        specs = [None if g.slug is None else find(g.slug) for g in profile.gpus]
        if as_json:
            more = {"datasheet": specs, "recommended": _recommended(profile), "measured": measured}
            click.echo(codec.for_programs(codec.encode(profile) | codec.encode(more)))
        elif short:
            lines = [terminal.gpu_line(g) for g in profile.gpus]
            click.echo("\n".join(lines or [note.text for note in profile.notes[:1]]))
        else:
            console = terminal.console()
            console.print(terminal.machine_page(profile, specs, measured))
            recommended = _recommended(profile)
            if recommended is not None:
                console.print(terminal.recommended_page(recommended))


def _recommended(profile: HardwareProfile) -> Recommendation | None:
    """Settings to start from; None, with a note, where no plan can be made."""
    from trainfit.jobs import tuned_plans
    from trainfit.reports import terminal

    try:
        with terminal.busy(f"planning {tuned_plans.subject()} (kept for the next time)"):
            return tuned_plans.recommend(profile)
    except TrainfitError as error:
        tell_notes(f"no settings to recommend: {error}")
        return None


def _profile(gpu: str | None) -> HardwareProfile:
    from trainfit.hardware import as_if, detect
    from trainfit.hardware.catalogue import find

    if gpu is None:
        return detect()
    spec = find(gpu)
    profile = as_if(spec)
    if gpu == spec.slug:
        return profile
    note = Note(code="short_form", text=f"{gpu} was taken as {spec.slug}, the usual one.")
    return replace(profile, notes=(note, *profile.notes))


def _measure(profile: HardwareProfile, quiet: bool) -> Measurements:
    """Measure with a line of progress in a terminal, and keep the result for the planner."""
    from trainfit.measuring import measure, remember
    from trainfit.reports import terminal

    console = terminal.console(stderr=True)
    if quiet or not console.is_terminal:
        measured = measure(profile)
    else:
        with console.status("measuring") as status:
            measured = measure(profile, progress=lambda name: status.update(f"measuring {name}"))
    remember(measured)
    return measured


# ── doctor ───────────────────────────────────────────────────────────────────────────────────────


_COLOURS = {"error": "bold red", "warning": "bold yellow", "info": "bold blue"}


@click.command()
@click.option(
    "--log",
    type=click.Path(path_type=Path, exists=True, dir_okay=False, readable=True),
    help="Read this log instead of looking at the machine.",
)
@click.option("--run", metavar="RUN", help="Read this run folder instead.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for a program.")
def doctor(log: Path | None, run: str | None, as_json: bool) -> int:
    """Find faults here, in a log or in a run, and how to fix them.

    Ends with 0 where nothing is wrong and with 1 where something is. Nothing is changed, and no
    process is ended. Of a log only the words of an error are shown, never its other lines.
    """
    from trainfit.doctor import is_healthy
    from trainfit.reports import terminal

    findings = _find(log, run)
    healthy = is_healthy(findings)
    if as_json:
        click.echo(codec.for_programs({"healthy": healthy, "findings": codec.encode(findings)}))
    else:
        # A log may end with what nobody has seen before; a machine was looked at part by part.
        fine = "Nothing is wrong." if log is None else "Nothing known is wrong in this log."
        terminal.console().print(page(findings, healthy, fine))
    return 0 if healthy else 1


def _find(log: Path | None, run: str | None) -> tuple[Finding, ...]:
    from trainfit.doctor import examine, examine_run, gather, read_log
    from trainfit.reports import terminal

    if log is not None and run is not None:
        raise BadInput("--log and --run were both given", "give one of them")
    if log is not None:
        return read_log(log)
    if run is not None:
        return examine_run(run_folder.find(run))
    with terminal.busy("looking at the machine"):
        return examine(gather())


def page(
    findings: Sequence[Finding], healthy: bool, fine: str = "Nothing is wrong."
) -> RenderableType:
    """The findings for a person; `fine` where nothing is wrong."""
    from rich.console import Group

    verdict = fine if healthy else "Something is wrong."
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
