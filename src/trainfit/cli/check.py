"""`trainfit check`: the hardware, what it supports, and settings to start from."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import click

from trainfit.core import codec

if TYPE_CHECKING:
    from trainfit.core.plan_records import Recommendation
    from trainfit.core.records import HardwareProfile, Measurements


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
    from trainfit.core.errors import BadInput
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
    from trainfit.core.errors import TrainfitError
    from trainfit.jobs import tuned_plans
    from trainfit.reports import terminal

    try:
        with terminal.busy(f"planning {tuned_plans.subject()} (kept for the next time)"):
            return tuned_plans.recommend(profile)
    except TrainfitError as error:
        click.echo(f"trainfit: note: no settings to recommend: {error}", err=True)
        return None


def _profile(gpu: str | None) -> HardwareProfile:
    from dataclasses import replace

    from trainfit.core.records import Note
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
