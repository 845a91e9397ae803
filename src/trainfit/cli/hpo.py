"""`trainfit hpo`: search a job's settings over folds, with one worker or many."""

from __future__ import annotations

import json
import os
import time
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainfit.cli.job_words import JobCommand, config_option, job_options
from trainfit.cli.main import INTERRUPTED, loading, tell_notes
from trainfit.cli.ranks import workers_of
from trainfit.core import codec
from trainfit.core.errors import BadInput
from trainfit.core.libraries import HPO, need

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainfit.hpo.objective import Objective
    from trainfit.hpo.studies import OpenStudy, StudySettings

_TASKS = {
    "nli": "Search the settings of an NLI job.",
    "textclass": "Search the settings of a text-classification job.",
    "pairs": "Search the settings of a job on pairs of texts.",
    "tokens": "Search the settings of a job on words with tags.",
    "gpt": "Search the settings of a pretraining job.",
}
_STORAGE = click.option(
    "--storage", metavar="URL", help="The database; hpo.db in the folder runs where none is given."
)
_JSON = click.option("--json", "as_json", is_flag=True, help="End with one JSON object.")


class _Jobs(click.Group):
    """The built-in jobs as commands, and one for any module:Class."""

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Return the command of a job of the user's own by its name."""
        if ":" in name:
            return _task_command(name, f"Search the settings of {name}.")
        return super().get_command(context, name)


@click.group(cls=_Jobs)
def command() -> None:
    """Search a job's settings over folds, with one worker or many.

    trainfit hpo nli hpo.trials=50 hpo.hours=8 searches what conf/nli/hpo/default.yaml lists. The
    same command continues where it was left, and joins the study from another machine where
    hpo.storage is a PostgreSQL, or a journal in a shared folder. A sweep such as
    training.learning_rate=interval(1e-5,1e-4) changes the space, and a plain value takes a key out
    of it.
    """


def _checked(task: str, overrides: tuple[str, ...], config_file: Path | None) -> tuple[str, ...]:
    """Return the words of a study; raise BadInput for wrong ones before Optuna is imported."""
    from trainfit.conf.search_space_files import compose_study
    from trainfit.conf.starting import with_file
    from trainfit.jobs.configuration import configure
    from trainfit.jobs.registry import check_job

    need("hpo", *HPO)
    check_job(task)
    words = with_file(task, config_file, overrides)
    configure(task, compose_study(task, words).job)
    return words


def _search(
    task: str,
    overrides: tuple[str, ...],
    workers: int,
    as_json: bool,
    worker: int | None,
    share: float,
    others: float | None,
    beside: float | None,
) -> int:
    begun = time.perf_counter()
    with loading():
        from trainfit.cli.pages import study_page
        from trainfit.cli.train import report_on
        from trainfit.hpo.outcome import finish, summarise
        from trainfit.hpo.studies import open_study, read_setting
        from trainfit.reports import terminal

    setting = read_setting(task, overrides)
    objective = _objective(setting)
    with terminal.busy("opening the study") if worker is None else nullcontext():
        opened = open_study(setting, objective)
    if worker is not None:
        if others is not None:
            objective().suppose(others)
        return _work(opened, objective(), worker, share, beside)
    tell_notes(*opened.notes)
    with terminal.signs_of_life("searching"):
        ended = _run(opened, objective, workers)
    best = finish(opened, objective) if ended == "done" else None
    result = summarise(opened, best, time.perf_counter() - begun)
    if as_json:
        click.echo(codec.for_programs(codec.encode(result), None))
    else:
        again = " ".join(["trainfit hpo", task, *setting.words])
        terminal.console().print(study_page(result, str(setting.folder), again))
    report_on(str(setting.folder), as_json)
    return 0 if best is not None else INTERRUPTED


def _objective(setting: StudySettings) -> Callable[[], Objective]:
    """Return a function that reads the job when it is first needed, and once."""

    @cache
    def read() -> Objective:
        from trainfit.hpo.objective import Objective
        from trainfit.reports import training_lines

        composed, metric = setting.composed, setting.hpo.metric
        show = training_lines.show(composed)
        return Objective(composed, metric, alike=setting.alike, show=show)

    return read


def _run(opened: OpenStudy, objective: Callable[[], Objective], workers: int) -> str:
    """Run the trials here, in several processes, or (0) in as many as gain on this GPU."""
    from trainfit.cli.pages import Board
    from trainfit.hpo.outcome import status_of
    from trainfit.hpo.side_by_side import work_side_by_side
    from trainfit.hpo.workers import check_gpu_room, others_on, run_fleet, run_trial, seats, work
    from trainfit.jobs.job_plan import machine
    from trainfit.reports import terminal

    board = Board(terminal.console(stderr=True))
    board.forget(status_of(opened))

    def show(*_: Any) -> None:
        board.show(status_of(opened))

    if not workers:
        ended = work_side_by_side(opened, objective(), tell=show, say=board.say)
        show()
        return ended
    if workers == 1:
        return work(opened.queue(), partial(run_trial, opened, objective()), tell=show)
    gpus = machine(opened.setting.composed).gpus
    taken = seats(workers, len(gpus), os.environ, others_on(gpus))
    check_gpu_room(opened, objective, taken)
    return run_fleet(opened.setting, taken, show)


def _work(
    opened: OpenStudy, objective: Objective, parent: int, share: float, used: float | None
) -> int:
    """Be one of several workers; a helper of a worker where `used` is given."""
    from trainfit.hpo.objective import GpuShare
    from trainfit.hpo.workers import run_trial, work

    objective.room = GpuShare(share=share, used=used or 1.0, beside=used is not None)
    ended = work(opened.queue(), partial(run_trial, opened, objective), parent=parent)
    return 0 if ended == "done" else INTERRUPTED


class _Workers(click.IntRange):
    """A number, or auto, which is 0."""

    name = "auto|number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read a word of the command line."""
        number: int = 0 if value == "auto" else super().convert(value, param, ctx)
        return number


def _task_command(task: str, about: str) -> click.Command:
    @click.command(
        task,
        cls=JobCommand,
        help=f"{about}\n\nOVERRIDES are key=value words; hpo.… are the study's.",
    )
    @click.argument("overrides", nargs=-1)
    @config_option
    @job_options()
    @click.option(
        "--workers",
        type=_Workers(1, 1024),
        default="auto",
        show_default=True,
        help="Processes on this machine: a GPU each, or several to a GPU where the plan fits. "
        "auto: as many on the first GPU as fit and gain, one without a GPU.",
    )
    @click.option(
        "--gpus", metavar="all|N|0,2", help="GPUs of this machine: a worker on each of several."
    )
    @_JSON
    @click.option("--worker", type=int, hidden=True)
    @click.option("--share", type=float, default=1.0, hidden=True)
    @click.option("--others", type=float, hidden=True)
    @click.option("--beside", type=float, hidden=True)
    def run(
        overrides: tuple[str, ...],
        config_file: Path | None,
        gpus: str | None,
        workers: int,
        **given: Any,
    ) -> int:
        words = _checked(task, overrides, config_file)
        given["workers"] = workers_of(gpus, workers)
        with loading():
            from trainfit.hpo.storage import using_database

        with using_database():
            return _search(task, words, **given)

    return run


for _task, _about in _TASKS.items():
    command.add_command(_task_command(_task, _about))


@command.command()
@click.argument("words", nargs=-1, metavar="[STUDY] [hpo.storage=URL]")
@_STORAGE
@_JSON
def status(words: tuple[str, ...], storage: str | None, as_json: bool) -> None:
    """Trials of a STUDY, the best so far and the time left; without one, all studies."""
    need("hpo", *HPO)
    words, storage = _storage_word(words, storage)
    if len(words) > 1:
        raise click.UsageError(f"{words[1]!r} beside the study {words[0]!r}; give one study")
    study = words[0] if words else None
    from trainfit.cli.pages import status_page, studies_page
    from trainfit.hpo.outcome import status_of
    from trainfit.hpo.storage import reading_study
    from trainfit.hpo.studies import find_study, list_studies
    from trainfit.reports import terminal

    console, url = terminal.console(), storage or _default_storage()
    with reading_study():
        names = [study] if study is not None else list_studies(url)
        every = [status_of(find_study(name, url)) for name in names]
    if not as_json:
        console.print(studies_page(every) if study is None else status_page(every[0]))
    elif study is None:
        click.echo(json.dumps(codec.encode(every)))
    else:
        click.echo(codec.for_programs(codec.encode(every[0]), None))


@command.command()
@click.argument("study")
@click.argument("overrides", nargs=-1)
@_STORAGE
@_JSON
def best(study: str, overrides: tuple[str, ...], storage: str | None, as_json: bool) -> int:
    """Write the best configuration of a STUDY, and train its final model.

    The model that the study trained is shown where there is one. OVERRIDES change the
    configuration, such as optimization.compile=true training.num_epochs=20, and train another.
    """
    need("hpo", *HPO)
    from trainfit.cli.pages import final_score
    from trainfit.hpo.outcome import finish
    from trainfit.hpo.storage import reading_study, using_database
    from trainfit.hpo.studies import find_study

    overrides, storage = _storage_word(overrides, storage)
    with reading_study():
        opened = find_study(study, storage or _default_storage())
    with using_database():
        found = finish(opened, _objective(opened.setting), overrides)
    if found is None:
        return INTERRUPTED
    path = opened.setting.folder / "best.yaml"
    if as_json:
        click.echo(codec.for_programs({**codec.encode(found), "config": str(path)}, None))
        return 0
    scores = ", ".join(f"{final_score(name)} {value:.4f}" for name, value in found.test.items())
    click.echo(f"trial {found.trial} of {study}: {opened.setting.hpo.metric} {found.value:.4f}")
    click.echo(f"final model: {scores}")
    click.echo(f"model {found.run}, configuration {path}")
    return 0


def _storage_word(
    words: tuple[str, ...], storage: str | None
) -> tuple[tuple[str, ...], str | None]:
    """Take hpo.storage=URL out of the words; it says what --storage says."""
    from trainfit.conf.composition import parse_word

    named = [word for word in words if word.startswith("hpo.storage=")]
    for word in named:
        storage = storage or str(parse_word(word).value())
    return tuple(word for word in words if word not in named), storage


def _default_storage() -> str:
    from trainfit.hpo.studies import STORAGE, default_storage

    if not os.environ.get(STORAGE) and not Path("runs/hpo.db").is_file():
        fix = f"give the storage with --storage or {STORAGE}"
        raise BadInput("there is no study in runs/hpo.db", fix)
    return default_storage(Path("runs"))
