"""`trainfit export`: the model of a finished run as ONNX, or on the hub."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from trainfit.cli.main import loading

push_option = click.option(
    "--push-to-hub",
    "hub",
    metavar="OWNER/NAME",
    help="Upload the exported model and its card, to a private model of the hub.",
)


@click.command()
@click.argument("run")
@click.option("--onnx", is_flag=True, help="Write onnx/model.onnx, checked by onnxruntime.")
@push_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object for a program.")
def command(run: str, onnx: bool, hub: str | None, as_json: bool) -> None:
    """The model of a finished run as ONNX, or on the hub.

    RUN is the folder of a finished run of a classifier. --onnx adds a file to its export, or to
    that of each fold. --push-to-hub uploads the files of the export, with ONNX where it is there.
    """
    from trainfit.core.errors import BadInput
    from trainfit.core.libraries import ONNX, need
    from trainfit.data.hub import check_push
    from trainfit.runs import run_folder

    if not onnx and hub is None:
        raise BadInput("nothing to export", "give --onnx or --push-to-hub OWNER/NAME")
    place = run_folder.find(run, Path("runs"))
    exports = run_folder.exports_of(place)
    if onnx:
        need("--onnx", *ONNX)
    if hub is not None:
        _only(exports)
        check_push(hub)
    made: dict[str, Any] = {}
    if onnx:
        made["onnx"] = _write_onnx(exports)
    if hub is not None:
        made["hub"] = push_run(place, hub)
    if as_json:
        click.echo(json.dumps(made, indent=2))
        return
    for path in made.get("onnx", ()):
        click.echo(f"ONNX: {path}")
    if hub is not None:
        click.echo(f"Pushed: {made['hub']}")


def _write_onnx(exports: Sequence[Path]) -> list[str]:
    from trainfit.reports import terminal

    with loading():
        from trainfit.jobs.onnx_export import write_onnx
    made = []
    for folder in exports:
        with terminal.busy(f"writing ONNX of {folder}"):
            made.append(str(write_onnx(folder)))
    return made


def _only(exports: Sequence[Path]) -> Path:
    """Return the only export, or raise BadInput for those of folds."""
    from trainfit.core.errors import BadInput

    if len(exports) > 1:
        what = f"{exports[0].parent.parent} has {len(exports)} models, one of each fold"
        raise BadInput(what, "push that of a run without cv.folds")
    return exports[0]


def push_run(run: Path, hub: str) -> str:
    """Upload the export of a run; return the address of the model. A failure spoils no run."""
    from trainfit.core.errors import RunFailed
    from trainfit.data.hub import push_files
    from trainfit.reports import terminal
    from trainfit.runs import run_folder

    folder = _only(run_folder.exports_of(run))
    with loading():
        from trainfit.jobs.exports import files_to_share
    files = files_to_share(folder)
    with terminal.busy(f"pushing {folder} to {hub}"):
        try:
            return push_files(folder, files, hub)
        except RunFailed as error:
            again = f"trainfit export {shlex.quote(str(run))} --push-to-hub {hub}"
            raise RunFailed(error.what, f"the run is kept; to push it again: {again}") from error


def check_push_of(task: str, config: Any, hub: str) -> None:
    """Raise BadInput, before anything is trained, where its model could not be pushed."""
    from trainfit.core.errors import BadInput
    from trainfit.data.hub import check_push

    if task == "gpt" or ":" in task:
        fix = "leave it out, and upload what you choose with `hf upload`"
        raise BadInput(f"--push-to-hub takes classifiers with a model card, not {task}", fix)
    if config.cv.folds is not None:
        what = f"--push-to-hub takes one model, and cv.folds={config.cv.folds} trains as many"
        raise BadInput(what, "leave one of them out")
    check_push(hub)
