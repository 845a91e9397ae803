"""`trainfit config`: the composed configuration; `trainfit init`: a file to start from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainfit.cli.job_words import JobCommand, job_options, overrides_argument, task_argument
from trainfit.core import codec

if TYPE_CHECKING:
    pass


config_option = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A YAML file of yours, as `trainfit init` writes one; key=value words win over it.",
)


@click.command(cls=JobCommand)
@task_argument()
@overrides_argument()
@config_option
@job_options()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for a program.")
def command(task: str, overrides: tuple[str, ...], config_file: Path | None, as_json: bool) -> None:
    """The composed configuration, and where each value came from.

    TASK is nli, textclass, pairs, tokens, gpt, or module:Class of yours. OVERRIDES are key=value
    words, such as hardware=gpu_4090 training.batch_size=20, and later ones win.
    """
    from trainfit.conf import compose
    from trainfit.conf.starting import with_file
    from trainfit.jobs.registry import check_job
    from trainfit.reports import terminal

    if ":" in task:
        check_job(task)
    composed = compose(task, with_file(task, config_file, overrides))
    for note in composed.notes:
        click.echo(f"trainfit: note: {note}", err=True)
    if as_json:
        values = {
            key: {"value": value, "from": composed.origins[key]}
            for key, value in composed.values().items()
        }
        about = {name: getattr(composed, name) for name in ("task", "hardware", "experiment")}
        click.echo(codec.for_programs(about | {"values": values}))
        return
    console = terminal.console()
    experiment = f", experiment {composed.experiment}" if composed.experiment else ""
    console.print(f"{composed.task} with hardware {composed.hardware}{experiment}")
    console.print(terminal.config_table(composed))


@click.command()
@task_argument(default="nli")
@click.option(
    "--output", type=click.Path(path_type=Path), help="Where to write it; TASK.yaml otherwise."
)
def init(task: str, output: Path | None) -> None:
    """Write a commented configuration to start from.

    TASK is nli (if none is named), textclass, pairs, tokens or gpt. Nothing is overwritten. Use the
    file with `trainfit train TASK --config FILE`.
    """
    from trainfit.conf.composition import schema_of
    from trainfit.conf.starting import starting_file
    from trainfit.core.errors import BadInput
    from trainfit.core.files import check_output, write_output

    schema_of(task)
    path = check_output(output or Path(f"{task}.yaml"))
    if path.exists():
        raise BadInput(f"{path} exists", "give another name with --output")
    write_output(path, starting_file(task, str(path)))
    click.echo(str(path))
