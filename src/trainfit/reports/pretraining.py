"""What came of a pretraining run: losses, speed, and where it stands by the tuning guide."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainfit.catalogue import find
from trainfit.reports.plan import duration
from trainfit.tasks.gpt.mfu import targets
from trainfit.tasks.gpt.result import GptResult


def page(result: GptResult) -> RenderableType:
    """The losses, the speed, where the time went, and what to try next."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column()
    for name, value in (
        ("validation loss", _beside(result)),
        ("training loss", _number(result.train_loss, "{:.4f} in the last lines of the log")),
        ("speed", _number(result.tokens_per_second, "{:,.0f} tokens/s")),
        ("mfu", _mfu(result)),
        ("memory", _number(result.peak_memory_gib, "{:.2f} GiB at the most")),
        ("time", _time(result)),
        ("events", ", ".join(sorted({event.kind for event in result.events})) or "none"),
    ):
        table.add_row(name, value)
    parts: list[RenderableType] = [table]
    if result.next_steps:
        steps = "  then  ".join(result.next_steps)
        parts.append(Text(f"To use the GPU better, try in this order: {steps}"))
    parts.append(Text(f"Run folder {result.run}; it writes: trainfit sample {result.run}"))
    return Group(*parts)


def _beside(result: GptResult) -> str:
    found = _number(result.val_loss, "{:.4f} nats per token")
    if result.unigram_entropy is None:
        return found
    return f"{found} (knowing only how common each token is: {result.unigram_entropy:.4f})"


def _mfu(result: GptResult) -> str:
    if result.mfu is None or result.gpu is None:
        return "not known: the catalogue has no peak for this device"
    spec = find(result.gpu)
    good, excellent = targets(spec)
    measured = ""
    if result.mfu_of_measured is not None:
        measured = f", {result.mfu_of_measured:.1%} of the peak measured here"
    return (
        f"{result.mfu:.1%} of {spec.slug}'s dense peak{measured}: {result.standing}"
        f" (good from {good[0]}%, excellent from {excellent[0]}%)"
    )


def _time(result: GptResult) -> str:
    spent = result.spent
    parts = {
        "computing": spent.computing,
        "waiting for data": spent.waiting,
        "compiling": spent.compiling,
        "evaluating": spent.evaluating,
    }
    shown = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items())
    return f"{duration(result.seconds)}: {shown}"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
