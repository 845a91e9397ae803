"""`trainfit run`: a training script of yours, made faster without a change in it."""

from __future__ import annotations

import sys

import click

from trainfit.cli.verify import WithCommand


@click.command(cls=WithCommand)
@click.option("--only", multiple=True, metavar="NAME", help="Make this change alone; may repeat.")
@click.option("--without", multiple=True, metavar="NAME", help="Leave this change out; may repeat.")
@click.option("--dry-run", is_flag=True, help="End where the training would begin.")
def run(
    only: tuple[str, ...], without: tuple[str, ...], dry_run: bool, words: list[str] | None
) -> int:
    """Run a training script of your own faster, with the same losses.

    trainfit run -- python train.py …: trainers of transformers, sentence-transformers, Lightning
    and Accelerate compute nothing on padding (unpadded), replay passes as CUDA graphs (graphs) of
    compiled blocks (compile) and take AdamW's fused kernel (fused). TF32 (tf32) rounds differently
    and must be named with --only. The exit code is the script's.
    """
    from trainfit.core.errors import BadInput
    from trainfit.integrations.script_hooks import run_sped_up
    from trainfit.integrations.speedups import chosen

    if not words:
        raise BadInput("there is no command to run", "give -- and one, as in: -- python train.py")
    names = chosen(only or None, without)
    code, found = run_sped_up(words, names, dry_run=dry_run)
    said = "trainfit: nothing changed: no training of a known trainer was seen"
    print(said if found is None else found.line(), file=sys.stderr)
    return code
