"""`trainfit init`: a commented configuration to start from."""

from __future__ import annotations

from pathlib import Path

import click

from trainfit.cli.completion import task_argument


@click.command()
@task_argument(default="nli")
@click.option(
    "--output", type=click.Path(path_type=Path), help="Where to write it; TASK.yaml otherwise."
)
def command(task: str, output: Path | None) -> None:
    """Write a commented configuration to start from.

    TASK is nli (if none is named), textclass or gpt. Nothing is overwritten. Use the file with
    `trainfit train TASK --config FILE`.
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
