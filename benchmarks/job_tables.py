"""Tables and the picture of whole jobs by the clock, from the records of jobs.py.

Without a record of that name they are empty, and so is their place in README and docs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from result_files import RESULTS, ROOT, table
from trainfit.reports.geometry import linear
from trainfit.reports.plots import escaped, picture, text_at

PICTURE = "time-to-result.svg"
Run = dict[str, Any]
_WHO = {"trainfit": "trainfit", "trainer": "Trainer"}
_GROUPS = {
    "start": ("start",),
    "data and plan": ("data", "plan"),
    "build": ("build", "features"),
    "compile, capture": ("compile", "capture"),
    "steps": ("steps",),
    "evaluation": ("evaluation", "judge"),
    "checkpoints, export": ("checkpoint", "export"),
    "rest": (),
}
"""Stages by their name in the picture; those that are in none are the rest."""


def records(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Every record of jobs.py, oldest first, without those of the tiny size."""
    paths = sorted(folder.glob("*-time-to-result-*.json"))
    found = [one for path in paths for one in json.loads(path.read_text())["records"]]
    return [one for one in found if not one["tiny"]]


def jobs(found: Iterable[Mapping[str, Any]]) -> dict[str, tuple[str, list[Run]]]:
    """By job: its title and its finished runs on the last day, from one call or from several.

    Where only trainfit ran that day, Trainer's runs of the day before it count: it did not change.
    """
    made: dict[str, tuple[str, list[Run]]] = {}
    by_day = sorted(found, key=lambda one: str(one.get("date")), reverse=True)
    for who in _WHO:
        days = dict[str, str]()
        for one in by_day:
            runs = [r for r in one.get("runs", ()) if "error" not in r and r["who"] == who]
            if runs and days.setdefault(one["job"], str(one.get("date"))) == str(one.get("date")):
                made.setdefault(one["job"], (one["title"], []))[1].extend(runs)
    found_jobs = [(name, kept) for name, kept in made.items() if name != "steps"]
    return dict(sorted(found_jobs, key=lambda one: not _of(one[1][1], "trainer")))


def _seconds(runs: Sequence[Run], around: str = "") -> str:
    listed = ", ".join(f"{run['seconds']:.0f}" for run in runs)
    return f"{around}{listed}{around}" if runs else "–"


def _of(runs: Sequence[Run], who: str, cache: str | None = None) -> list[Run]:
    found = [run for run in runs if run["who"] == who]
    return [run for run in found if cache is None or run["cache"] == cache]


def _times(runs: Sequence[Run]) -> str:
    """Trainer's fastest run over trainfit's slowest."""
    ours, theirs = ([run["seconds"] for run in _of(runs, who)] for who in _WHO)
    return f"{min(theirs) / max(ours):.1f}×" if ours and theirs else "–"


def _first(runs: Sequence[Run], who: str) -> str:
    found = [run.get("first_update_seconds") for run in _of(runs, who)]
    return ", ".join(f"{seconds:.0f}" for seconds in found if seconds is not None) or "–"


def _range(figures: Iterable[float | None], form: str) -> str:
    known = sorted(figure for figure in figures if figure is not None)
    return "–".join(dict.fromkeys(form.format(end) for end in known[:1] + known[-1:])) or "–"


def whole_jobs(found: Sequence[Mapping[str, Any]] | None = None) -> str:
    """Seconds of every run, from the command to the exit."""
    rows = []
    for title, runs in jobs(records() if found is None else found).values():
        rows.append(
            (
                title,
                _seconds(_of(runs, "trainfit", "cold"), "**"),
                _seconds(_of(runs, "trainfit", "warm"), "**"),
                _seconds(_of(runs, "trainer", "cold")),
                _seconds(_of(runs, "trainer", "warm")),
                _times(runs),
            )
        )
    heads = ("job, seconds", "trainfit, cold", "warm", "Trainer, cold", "warm", "faster")
    return table(heads, rows) if rows else ""


def job_details() -> str:
    """First update, full speed, prediction, share outside of steps, and scores."""
    rows = []
    for title, runs in jobs(records()).values():
        ours, theirs = _of(runs, "trainfit"), _of(runs, "trainer")
        score = "val_loss" if any(run.get("val_loss") for run in runs) else "f1"
        rows.append(
            (
                title,
                _first(runs, "trainfit"),
                ", ".join(f"{r['full_speed_seconds']:.0f}" for r in ours if "stages" in r) or "–",
                _first(runs, "trainer"),
                ", ".join(map(_predicted, ours)) or "–",
                _range((outside(run) for run in ours), "{:.0%}"),
                _range((run.get(score) for run in ours), "{:.3f}"),
                _range((run.get(score) for run in theirs), "{:.3f}"),
            )
        )
    heads = (
        "job",
        "first update, s",
        "full speed, s",
        "Trainer's first update, s",
        "predicted, s, and how far off",
        "outside steps and evaluations",
        "score",
        "Trainer's score",
    )
    return table(heads, rows) if rows else ""


def _predicted(run: Run) -> str:
    """Seconds that were predicted before the first step, and their error."""
    told = run.get("predicted_seconds")
    return "–" if told is None else f"{told:.0f} ({told / run['seconds'] - 1:+.0%})"


def outside(run: Run) -> float | None:
    """Share of a run that is neither a step nor an evaluation."""
    if "stages" not in run:
        return None
    inside = sum(run["stages"].get(name, 0.0) for name in ("steps", "evaluation"))
    return 1 - inside / float(run["seconds"])


def step_speeds() -> str:
    """Samples per second by model and effective batch, Trainer's in brackets."""
    rates: dict[str, dict[int, dict[str, float]]] = {}
    for one in records():
        for run in one.get("runs", ()):
            if one["job"] == "steps" and run.get("samples_per_second"):
                of_batch = rates.setdefault(run["model"], {}).setdefault(run["batch"], {})
                of_batch[run["who"]] = run["samples_per_second"]
    sizes = sorted({size for found in rates.values() for size in found})
    rows = [
        (_NAMES.get(model, model), *(_pair(found.get(size, {})) for size in sizes))
        for model, found in rates.items()
    ]
    return table(("samples/s at effective batch", *sizes), rows) if rows else ""


_NAMES = {
    "bert": "BERT-base",
    "deberta": "DeBERTa-v3-base",
    "gemma": "Gemma-3-1B, DoRA",
    "modernbert": "ModernBERT-base",
}


def _pair(rates: Mapping[str, float]) -> str:
    shown = {who: f"{rate:,.0f}" for who, rate in rates.items()}
    behind = f" ({shown['trainer']})" if "trainer" in shown else ""
    return f"**{shown['trainfit']}**{behind}" if "trainfit" in shown else behind.strip() or "–"


def readme() -> str:
    """Whole jobs first, then steps, with the picture and where they come from."""
    return _chapter("docs/", "docs/time-to-result.md")


def page() -> str:
    """The same for the page itself."""
    return _chapter("", None)


def _chapter(folder: str, link: str | None) -> str:
    found = records()
    if not jobs(found):
        return ""
    where = " and ".join(dict.fromkeys(one["hardware"] for one in found))
    more = f" [How it was measured]({link})." if link else ""
    parts = [
        f"Whole jobs on {where}, from the command to the exit of the process: seconds of every "
        "run. Cold: nothing is cached; warm: the same command again. Faster: Trainer's fastest run "
        f"over trainfit's slowest.{more}",
        whole_jobs(found),
        f"![Where the time of each job goes, by stage]({folder}{PICTURE})\n",
        "Speed of the steps alone, Trainer's in brackets:" if step_speeds() else "",
        step_speeds(),
    ]
    return "\n".join(f"{part}\n" if not part.endswith("\n") else part for part in parts if part)


# ── the picture ───────────────────────────────────────────────────────────────────────────────

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW, _BAR = 900, 390, 70, 84, 26, 16
_COLORS = ("8b949e", "8a63c9", "4f8799", "d98324", "2f6fb5", "2e9461", "c8485e", "ab8d12")
_STYLE = "".join(f".s{at} {{ fill: #{color}; }}\n" for at, color in enumerate(_COLORS))


def grouped(run: Run) -> dict[str, float]:
    """Seconds by the names of the picture, up to the exit of the process.

    A study has no time line of its own, and is all rest.
    """
    stages = dict(run.get("stages", {}))
    made = {
        name: sum(stages.pop(stage, 0.0) for stage in own) for name, own in _GROUPS.items() if own
    }
    return {**made, "rest": max(0.0, run["seconds"] - sum(made.values()))}


def draw(found: Sequence[Mapping[str, Any]]) -> str:
    """A bar for each contender's last run of each job."""
    bars: list[tuple[str, Run]] = []
    for title, runs in jobs(found).values():
        for who, name in _WHO.items():
            label = f"{title}: {name}" if who == "trainfit" else name
            bars += [(label, run) for run in _of(runs, who)[-1:]]
    if not bars:
        return ""
    axis = linear(0.0, max(run["seconds"] for _, run in bars), 5)
    height = _TOP + _ROW * len(bars) + 34
    title = "Seconds from the command to the exit, by stage"

    def x(seconds: float) -> float:
        return _LEFT + axis.place(seconds) * (_WIDTH - _LEFT - _RIGHT)

    def body() -> Iterator[str]:
        yield text_at(16, 26, title, "title")
        place = 16
        for at, name in enumerate(_GROUPS):
            yield f'<rect class="s{at}" x="{place}" y="42" width="12" height="12"/>'
            yield text_at(place + 16, 52, name, "small")
            place += 36 + 6 * len(name)
        for value in axis.ticks:
            yield f'<path class="grid" d="M{x(value):.1f} {_TOP - 12}V{height - 30}"/>'
            yield text_at(x(value), height - 14, f"{value:g}", "small middle")
        for at, (label, run) in enumerate(bars):
            yield from _bar(_TOP + at * _ROW, label, run, x)

    return picture(_WIDTH, height, title, _STYLE, body())


def _bar(y: float, label: str, run: Run, x: Callable[[float], float]) -> Iterator[str]:
    yield text_at(_LEFT - 10, y + 12, label, "small end")
    base = 0.0
    for at, (name, seconds) in enumerate(grouped(run).items()):
        left, right = x(base), x(base + seconds)
        hover = f"<title>{escaped(name)} {seconds:.1f} s</title>"
        yield (
            f'<rect class="s{at}" x="{left:.2f}" y="{y:.2f}" width="{right - left:.2f}" '
            f'height="{_BAR}">{hover}</rect>'
        )
        base += seconds
    yield text_at(x(base) + 6, y + 12, f"{run['seconds']:.0f} s", "small")


def pictures() -> dict[Path, str]:
    """The picture, where there is a record."""
    drawn = draw(records())
    return {ROOT / "docs" / PICTURE: drawn} if drawn else {}


TABLES: dict[str, Callable[[], str]] = {
    "time-to-result": readme,
    "whole-jobs": page,
    "job-details": job_details,
}
