"""`trainfit.report`: runs and studies as one HTML page, as Markdown, or as JSON."""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TypeVar

from trainfit.core.codec import own_version
from trainfit.core.errors import MALFORMED, BadInput, TrainfitWarning
from trainfit.core.files import text_facts, write_output
from trainfit.core.records import Record
from trainfit.reports import curve_sections, run_sections
from trainfit.reports.model import Chapter, Headline, Remark, Section, shown
from trainfit.reports.score_sections import by_baseline, four, scores_section
from trainfit.reports.study_sections import is_study, ladder_section, study_chapter
from trainfit.runs import run_folder
from trainfit.runs.reader import RunFiles, read_run

_LONGEST_NAME = 120
T = TypeVar("T")

_SECTIONS: Sequence[Callable[[RunFiles], Section | None]] = (
    scores_section,
    curve_sections.training_section,
    curve_sections.speed_section,
    run_sections.timeline_section,
    run_sections.prediction_section,
    run_sections.receipt_section,
    ladder_section,
    run_sections.plan_section,
    run_sections.events_section,
    run_sections.setup_section,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report(Record):
    """A chapter per run or study, with a comparison first where there are several runs."""

    title: str
    made: str
    version: str
    chapters: tuple[Chapter, ...]

    def html(self) -> str:
        """The report as one self-contained HTML file."""
        from trainfit.reports.writers import page

        return page(self)

    def markdown(self) -> str:
        """The report as Markdown."""
        from trainfit.reports.writers import markdown

        return markdown(self)

    def __repr__(self) -> str:
        """Headlines of each chapter for a terminal."""
        facts = (
            text_facts(one.title, {h.label: h.value for h in one.headlines})
            for one in self.chapters
        )
        return "\n".join(facts)

    def _repr_html_(self) -> str:
        """The page in a frame, for a notebook."""
        return (
            f'<iframe srcdoc="{escape(self.html())}" title="{escape(self.title)}" '
            'style="width:100%;height:80vh;border:0"></iframe>'
        )


FORMATS: Mapping[str, tuple[str, Callable[[Report], str]]] = {
    "html": ("html", Report.html),
    "markdown": ("md", Report.markdown),
    "json": ("json", lambda report: report.to_json() + "\n"),
}
"""Ending of the file and writer, by name of the format."""


def report(*runs: str | Path | type) -> Report:
    """Make the report of runs and studies, by their folders or their names under runs/.

    A class of a job of yours is its newest run. A notebook shows the page; `html()`, `markdown()`
    and `to_json()` of the answer are its text.
    """
    if not runs:
        raise BadInput("report of no run", "give the folder of a run, or a job of yours")
    chapters: list[Chapter] = []
    read: list[RunFiles] = []
    for folder in map(find, runs):
        if is_study(folder):
            chapters.append(_study(folder, len(chapters)))
        else:
            read.append(read_run(folder))
            chapters.append(_chapter(read[-1], len(chapters)))
    if len(read) > 1 and (beside := _comparison(read)) is not None:
        chapters.insert(0, beside)
    return Report(
        title=chapters[0].title,
        made=time.strftime("%Y-%m-%d %H:%M"),
        version=own_version(),
        chapters=tuple(chapters),
    )


def _study(folder: Path, at: int) -> Chapter:
    try:
        return study_chapter(folder, at)
    except MALFORMED as error:
        what = f"study.json, figures.json or result.json in {folder} is damaged"
        fix = "run trainfit hpo again: it writes them anew"
        raise BadInput(f"{what} ({type(error).__name__})", fix) from None


def _comparison(runs: Sequence[RunFiles]) -> Chapter | None:
    try:
        return curve_sections.comparison(runs)
    except MALFORMED as error:
        text = f"the comparison is left out: a run is damaged ({type(error).__name__})"
        warnings.warn(text, TrainfitWarning, stacklevel=2)
        return None


def find(name: str | Path | type) -> Path:
    """Find the folder of a run or a study by path or name under runs/, or the newest of a job."""
    for folder in (Path(name), run_folder.ROOT / name) if isinstance(name, str | Path) else ():
        if is_study(folder):
            return folder
    return run_folder.find(name)


def place(run: str | Path, *others: str | Path) -> Path:
    """Default path of a page: in the first run's folder, as report.html or named by the others.

    So a comparison replaces neither the run's own page nor a comparison with other runs.
    """
    if not others:
        return find(run) / "report.html"
    names = "-".join(find(one).resolve().name for one in others)
    if len(names) > _LONGEST_NAME:
        names = f"{len(others)}-others-{hashlib.sha256(names.encode()).hexdigest()[:8]}"
    return find(run) / f"report-with-{names}.html"


def write(made: Report, path: Path, form: str = "html") -> Path:
    """Write a report to a file, whole or not at all."""
    write_output(path, FORMATS[form][1](made), "give --output a place that can be written")
    return path


def _chapter(run: RunFiles, at: int) -> Chapter:
    made: list[Section | None] = []
    for section in _SECTIONS:
        what = section.__name__.replace("_", " ")
        run, one = _or_without(what, section, run, None)
        made.append(one)
    run, about = _or_without("subtitle", _subtitle, run, "run")
    none: list[Headline] = []
    run, headlines = _or_without("headlines", _headlines, run, none)
    if made[-1] is None:  # with what is said of the others
        problems = tuple(Remark(text=text, tone="warning") for text in run.problems)
        made.append(Section(id="problems", title="Problems", blocks=problems))
    return Chapter(
        id=f"run-{at + 1}",
        title=f"{run.name}, on synthetic data" if run_sections.is_synthetic(run) else run.name,
        subtitle=about,
        status=run.status,
        headlines=tuple(headlines),
        sections=tuple(section for section in made if section is not None),
    )


def _or_without(
    what: str, make: Callable[[RunFiles], T], run: RunFiles, nothing: T
) -> tuple[RunFiles, T]:
    """Make a part of the page; where a file of the run is damaged, note it as a problem."""
    try:
        return run, make(run)
    except MALFORMED as error:
        problem = f"the {what} is left out: a file of the run is damaged ({type(error).__name__})"
        return replace(run, problems=(*run.problems, problem)), nothing


def _subtitle(run: RunFiles) -> str:
    began = run_sections.started(run)[:16]
    known = (run_sections.model_of(run), run_sections.device_of(run), began)
    words = " · ".join(word for word in known if word)
    return f"{run.config.get('task', 'run')} · {words}"


def _headlines(run: RunFiles) -> list[Headline]:
    found = []
    if (score := curve_sections.main_score(run)) is not None:
        label, one = score
        beside = [] if one.low is None else [f"95%: {one.low:.3f}–{one.high:.3f}"]
        if (entropy := run.results.get("unigram_entropy")) is not None:
            beside.append(f"unigram entropy {entropy:.4f}")
        figure = curve_sections.main_figure(run)
        for title, figures in by_baseline(run.results.get("baselines") or {}).items():
            beside += [f"{title} {four(figures[figure])}"] if figure in figures else []
        found.append(Headline(label=label, value=f"{one.value:.4f}", note="; ".join(beside)))
    steps = [int(part.train["step"][-1]) for part in run.parts if "step" in part.train]
    over = f"in {len(run.parts)} folds" if len(run.parts) > 1 else ""
    found.append(Headline(label="steps", value=f"{sum(steps):,}", note=over))
    if (seconds := run_sections.seconds_of(run)) is not None:
        found.append(Headline(label="training", value=shown(seconds, "duration")))
    if (rate := run_sections.typical(run, "tokens_per_second")) is not None:
        samples = shown(run_sections.typical(run, "samples_per_second"), "number")
        if any(part.setup is not None and part.setup.samples for part in run.parts):
            found.append(Headline(label="samples/s", value=samples))
        else:
            note = f"{samples} samples/s"
            found.append(Headline(label="tokens/s", value=shown(rate, "count"), note=note))
    if (mfu := run_sections.typical(run, "mfu")) is not None:
        found.append(Headline(label="MFU", value=shown(mfu, "percent")))
    if (memory := run_sections.measured_memory(run)) is not None:
        found.append(Headline(label="peak memory", value=shown(memory, "gib")))
    count = sum(len(part.events) for part in run.parts)
    ooms = sum(event.kind == "oom" for part in run.parts for event in part.events)
    note = f"{ooms} out of memory" if ooms else ""
    found.append(Headline(label="events", value=str(count), note=note))
    return found
