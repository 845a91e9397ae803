"""`trainfit prepare`: a corpus into token files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainfit.cli.main import SEED

if TYPE_CHECKING:
    from trainfit.data.token_preparation import Progress


@click.command()
@click.argument("task")
@click.argument("more", nargs=-1, type=click.Path(path_type=Path), metavar="[FILE_OR_FOLDER]...")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A text, CSV, JSONL or Parquet file, or a folder of them; may be given several times. "
    "Without one: the source of Python's standard library.",
)
@click.option(
    "--output", required=True, type=click.Path(path_type=Path), help="A new folder to write."
)
@click.option("--vocab-size", default=30_000, show_default=True, help="Size of the vocabulary.")
@click.option("--special", multiple=True, help="A word that is one token; may be repeated.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="Use this tokenizer.json.")
@click.option("--validation", default=0.05, show_default=True, help="Share of held-out documents.")
@click.option("--separator", default="<|endoftext|>", show_default=True, help="End of a document.")
@click.option("--column", default="text", show_default=True, help="Column of a table's texts.")
@click.option(
    "--seed", default=42, type=SEED, show_default=True, help="Seed of the held-out choice."
)
@click.option(
    "--processes", type=click.IntRange(1, 1024), help="Processes to use; default: one per core."
)
@click.option("--json", "as_json", is_flag=True, help="End with one JSON object for a program.")
def command(
    task: str,
    more: tuple[Path, ...],
    inputs: tuple[Path, ...],
    output: Path,
    vocab_size: int,
    special: tuple[str, ...],
    tokenizer: Path | None,
    validation: float,
    separator: str,
    column: str,
    seed: int,
    processes: int | None,
    as_json: bool,
) -> None:
    """Token files of a corpus, for pretraining a GPT.

    TASK is gpt. A tokenizer is learned from the corpus, or given. Further files and folders may
    follow the first after --input.
    """
    from trainfit.core import codec
    from trainfit.core.errors import BadInput
    from trainfit.data.token_preparation import Preparation, prepare_tokens

    if task != "gpt":
        raise BadInput(
            f"there is nothing to prepare for {task!r}", "the job with token files is gpt"
        )
    if not separator:
        raise BadInput(
            "--separator is empty", "give the text that ends a document, or leave it out"
        )
    given = {
        "vocab_size": vocab_size,
        "special": list(special),
        "validation_share": validation,
        "seed": seed,
        "separator": _unescaped(separator),
        "column": column,
    }
    with _bar() as progress:
        header = prepare_tokens(
            [*inputs, *more],
            output,
            codec.decode(Preparation, given),
            tokenizer=tokenizer,
            processes=processes,
            progress=progress,
        )
    if as_json:
        click.echo(codec.for_programs({"output": str(output), **codec.encode(header)}, None))
        return
    train, held = header.train, header.validation
    click.echo(
        f"{output}: {train.tokens:,} tokens of {train.documents:,} documents to train on, "
        f"{held.tokens:,} of {held.documents:,} held out, a vocabulary of {header.vocab_size:,}"
    )
    click.echo(f"Train on them: trainfit train gpt data.data_dir={output}")


def _unescaped(separator: str) -> str:
    """Separator with typed escapes replaced by their characters."""
    from trainfit.core.errors import BadInput, brief

    try:
        found = separator.encode("latin-1", "backslashreplace").decode("unicode_escape")
        found.encode()  # \\ud800 is no character
    except UnicodeError:
        raise BadInput(
            f"--separator is {brief(separator)!r}", "write a backslash as two, a new line as \\n"
        ) from None
    return found


@contextmanager
def _bar() -> Iterator[Progress | None]:
    """Progress bar in a terminal; None elsewhere."""
    from rich.progress import Progress as Bar

    from trainfit.reports import terminal

    console = terminal.console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with Bar(console=console, transient=True) as bar:
        tasks: dict[str, int] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(f"making the {what}", total=total)
            bar.update(tasks[what], completed=done)  # type: ignore[arg-type]

        yield progress
