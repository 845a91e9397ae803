"""A run in a terminal as it goes: progress, loss, speed, memory, GPUs and what happened."""

from __future__ import annotations

import math
import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainfit.reports.markdown import spark
from trainfit.reports.numbers import MISSING, shown
from trainfit.reports.plan import duration
from trainfit.reports.watching import Standing, Watcher

_STYLES = {"running": "green", "finished": "green", "failed": "bold red"}
_URGENT = ("oom", "failed", "skipped")
_EVENTS = 6


def follow(watcher: Watcher, console: Console, every: float) -> Standing:
    """Draw until the run has ended; returns how it did."""
    standing = watcher.look()
    with Live(frame(standing), console=console, auto_refresh=False) as live:
        while standing.status in ("running", "quiet"):
            time.sleep(every)
            standing = watcher.look()
            live.update(frame(standing), refresh=True)
    return standing


def frame(now: Standing) -> RenderableType:
    """One picture."""
    parts: list[RenderableType] = [_progress(now), "", _figures(now)]
    if now.evaluation:
        parts += ["", _validation(now)]
    if now.gpus:
        parts += ["", _gpus(now)]
    if now.events:
        parts += ["", *_events(now)]
    title = Text.assemble((now.run, "bold"), "  ", (_state(now), _STYLES.get(now.status, "yellow")))
    return Panel(Group(*parts), title=title, title_align="left", padding=(1, 2))


def _state(now: Standing) -> str:
    if now.status == "quiet" and now.quiet_seconds is not None:
        return f"no line for {duration(now.quiet_seconds)}"
    return "not begun" if now.status == "quiet" else now.status


def _progress(now: Standing) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    steps = f"step {now.step:,} of {now.total_steps:,}" if now.total_steps else "no step yet"
    epoch = "" if now.epoch is None else f"epoch {now.epoch:.2f}"
    left = "" if now.eta_seconds is None else f"{duration(now.eta_seconds)} left"
    if now.whole_eta_seconds is not None:
        left += f", {duration(now.whole_eta_seconds)} for all folds"
    bar = ProgressBar(total=max(now.total_steps, 1), completed=now.step, width=32)
    table.add_row(Text(now.part or "training"), bar, steps, epoch, left)
    return table


def _figures(now: Standing) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    known = now.figures
    table.add_row("loss", _number(known, "loss", "{:.4f}"), Text(spark(now.losses, 48), "cyan"))
    table.add_row(
        "tokens/s",
        _number(known, "tokens_per_second", "{:,.0f}"),
        Text(spark(now.rates, 48), "cyan"),
    )
    table.add_row("samples/s", _number(known, "samples_per_second", "{:,.1f}"), "")
    table.add_row("MFU", _number(known, "mfu", "{:.1%}"), "")
    table.add_row("memory", _number(known, "memory_gib", "{:.2f} GiB"), "the most so far")
    table.add_row("learning rate", _number(known, "learning_rate", "{:.2e}"), "")
    table.add_row("waiting for data", _number(known, "wait_share", "{:.1%}"), "")
    return table


def _validation(now: Standing) -> Text:
    scores = {k: v for k, v in now.evaluation.items() if k not in ("step", "seconds")}
    figures = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
    return Text.assemble(
        ("validation", "dim"), f" at step {now.evaluation['step']:,.0f}: {figures}"
    )


def _number(figures: dict[str, float], name: str, form: str) -> str:
    value = figures.get(name, math.nan)
    return form.format(value) if math.isfinite(value) else MISSING


def _gpus(now: Standing) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("GPU", justify="right")
    table.add_column("utilisation", no_wrap=True)
    for name in ("", "temperature", "power", "memory in use"):
        table.add_column(name, justify="right")
    for gpu in now.gpus:
        share = gpu.get("utilisation_percent")
        table.add_row(
            str(gpu.get("index")),
            ProgressBar(total=100, completed=share or 0, width=24),
            MISSING if share is None else f"{share}%",
            shown(gpu.get("temperature_c"), "celsius"),
            shown(gpu.get("power_w"), "watts"),
            shown(gpu.get("memory_used_gib"), "gib"),
        )
    return table


def _events(now: Standing) -> list[Text]:
    """The last few."""
    lines = [
        Text(
            f"{event.kind} at step {event.step:,}: {event.text}",
            "red" if event.kind in _URGENT else "yellow",
        )
        for event in now.events[-_EVENTS:]
    ]
    more = len(now.events) - len(lines)
    return [Text(f"{more} events before these", "dim"), *lines] if more > 0 else lines
