"""`trainfit verify`: settings that were really active; `trainfit run`: a script made faster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainfit.core import codec

if TYPE_CHECKING:
    from trainfit.cli.verify_pages import Verified


class WithCommand(click.Command):
    """Keeps the words after -- apart: they are a command, not options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own, words = args, None
        if "--" in args:
            at = args.index("--")
            own, words = args[:at], args[at + 1 :]
        rest = super().parse_args(ctx, own)
        ctx.params["words"] = words
        return rest


@click.command(cls=WithCommand)
@click.argument("run", required=False)
@click.option("--strict", is_flag=True, help="Exit with 1 where something requested is not active.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for a program.")
@click.option("--markdown", is_flag=True, help="Print the status report as Markdown.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write there instead of printing.",
)
def command(
    run: str | None,
    strict: bool,
    as_json: bool,
    markdown: bool,
    output: Path | None,
    words: list[str] | None,
) -> int:
    """Show which settings were really active, by evidence of a step.

    RUN is the folder of a run, or its name under runs/. Or give a training command of your own:
    trainfit verify -- python train.py …; it runs as it is, and its exit code is kept. With --json
    or --markdown its own output goes to the standard error.
    """
    from trainfit.cli import verify_pages as pages
    from trainfit.core.errors import BadInput
    from trainfit.runs import run_folder

    if as_json and markdown:
        raise BadInput("--json and --markdown were both given", "give one of them")
    if (run is None) == (words is None):
        raise BadInput("verify takes a run or a command", "give RUN, or -- and a command")
    code, verified = 0, None
    if words is not None:
        code, verified = _observe(words, quiet=(as_json or markdown) and output is None)
    else:
        verified = pages.of_run(run_folder.find(str(run), Path("runs")))
    if verified is None:
        return code or 1
    text: Any = None
    if as_json:
        text = codec.for_programs(pages.data(verified)) + "\n"
    elif markdown:
        text = pages.markdown(verified)
    _show(verified, text, output)
    failed = any(item.status == "not_active" for item in verified.receipt.items)
    return code or int(strict and failed)


def _show(verified: Verified, text: str | None, output: Path | None) -> None:
    from trainfit.cli import verify_pages as pages
    from trainfit.core.files import write_output
    from trainfit.reports import terminal

    if output is not None:
        write_output(output, text if text is not None else pages.markdown(verified))
        click.echo(output)
    elif text is not None:
        click.echo(text, nl=False)
    else:
        terminal.console().print(pages.table(verified))


def _observe(words: list[str], *, quiet: bool) -> tuple[int, Verified | None]:
    from trainfit.cli import verify_pages as pages
    from trainfit.core.errors import BadInput, redact, redact_words
    from trainfit.measuring.observe import run_observed

    if not words:
        raise BadInput("there is no command after --", "give one, as in: python train.py")
    code, seen = run_observed(words, sys.stderr if quiet else None)
    if seen is None or seen.receipt is None:
        why = seen.obstacle if seen else "no Python of the command made an optimizer step of torch"
        print(f"trainfit: nothing to verify: {redact(why)}", file=sys.stderr)
        return code, None
    return code, pages.of_command(" ".join(redact_words(words)), seen)


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
