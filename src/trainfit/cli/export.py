"""`trainfit export`: the model of a finished run as ONNX."""

from __future__ import annotations

import json
from pathlib import Path

import click

from trainfit.cli.main import loading


@click.command()
@click.argument("run")
@click.option("--onnx", is_flag=True, help="Write onnx/model.onnx, checked by onnxruntime.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for a program.")
def command(run: str, onnx: bool, as_json: bool) -> None:
    """The model of a finished run as ONNX.

    RUN is the folder of a finished run of a classifier, whose export gets another file; of a run
    with folds each export does.
    """
    from trainfit.core.errors import BadInput
    from trainfit.core.libraries import ONNX, need
    from trainfit.reports import terminal
    from trainfit.runs import run_folder

    if not onnx:
        raise BadInput("nothing to export", "give --onnx")
    exports = run_folder.exports_of(run_folder.find(run, Path("runs")))
    need("--onnx", *ONNX)
    with loading():
        from trainfit.jobs.onnx_export import write_onnx
    made: dict[str, list[str]] = {"onnx": []}
    for folder in exports:
        with terminal.busy(f"writing ONNX of {folder}"):
            made["onnx"].append(str(write_onnx(folder)))
    if as_json:
        click.echo(json.dumps(made, indent=2))
        return
    for path in made["onnx"]:
        click.echo(f"ONNX: {path}")
