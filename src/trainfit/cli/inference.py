"""`trainfit predict` and `sample` use a trained model; `trainfit export` hands it on."""

from __future__ import annotations

import csv
import io
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from trainfit.cli.main import MANY, SEED, Number, loading, tell_notes
from trainfit.core.errors import BadInput, RunFailed, printable
from trainfit.core.files import check_output, write_output
from trainfit.core.libraries import ONNX, need
from trainfit.runs import run_folder

STANDARD_INPUT = Path("-")


@click.command()
@click.argument("run")
@click.argument(
    "file", required=False, type=click.Path(path_type=Path, exists=True, allow_dash=True)
)
@click.option(
    "--text",
    "texts",
    multiple=True,
    help="A text to classify, may repeat; for a job of yours, an item as JSON or text.",
)
@click.option(
    "--second", "seconds", multiple=True, help="The second text of a pair, as often as --text."
)
@click.option("--run", "folder", metavar="RUN", help="A run of module:Class; else its newest.")
@click.option("--criterion", help="Ask about one criterion: its code, such as A.4, or a text.")
@click.option(
    "--file",
    "path",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="CSV, TSV, JSONL, JSON or Parquet with a column of texts, as the word after RUN.",
)
@click.option("--text-column", default="auto", show_default=True, help="Column of the texts.")
@click.option(
    "--second-column", default="auto", show_default=True, help="Column of a pair's second texts."
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Write there, as CSV or JSON by its ending, instead of printing.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json", "jsonl", "csv"]),
    help="How to print; default: a table on a terminal, JSON in a pipe.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
def predict(
    run: str,
    file: Path | None,
    folder: str | None,
    texts: tuple[str, ...],
    seconds: tuple[str, ...],
    criterion: str | None,
    path: Path | None,
    text_column: str,
    second_column: str,
    output: Path | None,
    form: str | None,
    as_json: bool,
) -> None:
    """Probabilities from a trained model, for a text or a file.

    RUN is the folder of a finished run, and FILE a table with a column of texts, a .txt file with a
    text per line, or - for such lines on standard input. A run with folds answers with the mean of
    its models. An NLI model answers for every criterion unless one is named. A model of pairs takes
    --second too, or a file with two columns of texts. A model of words takes a text, split at
    spaces, a file of texts or of lists of words, or a CoNLL file. RUN may be module:Class, a job of
    yours.
    """
    from trainfit.reports import terminal

    if sum(bool(given) for given in (texts, path, file)) != 1:
        raise BadInput("give one of --text and a file", "- reads a text per line from a pipe")
    if seconds and len(seconds) != len(texts):
        counts = f"{len(texts)} of --text and {len(seconds)} of --second"
        raise BadInput(counts, "give as many of each, or a file with two columns of texts")
    path = path or file
    form = _form(output, form, as_json)
    place = run_folder.find(folder or run)
    exports = [] if ":" in run else run_folder.exports_of(place)
    facts = run_folder.export_facts(exports[0]) if exports else {}
    tags = facts.get("task") == "tokens"
    lines = path is not None and path.suffix.lower() == ".txt" and not path.is_dir()
    if path is not None and (path == STANDARD_INPUT or (lines and not tags)):
        texts, path = _read_lines(path), None
    columns = {"text": text_column}
    columns |= {"second": second_column} if facts.get("pairs") is True else {}
    if tags:
        if seconds or criterion is not None:
            raise BadInput("the model tags words", "leave --second and --criterion out")
        sentences = _read_words(path, texts, text_column, facts)
        with loading():
            from trainfit.jobs.predict import answer_words
        with terminal.busy("predicting"):
            tagged = answer_words(exports, sentences)
        _give(tagged, output, form)
        return
    if ":" in run:
        from trainfit.jobs import own_steps

        items = [*map(_as_item, texts)] if path is None else read_items(path, text_column)
        _give(own_steps.predict(run, place, items), output, form)
        return
    if path is not None:
        found, numbers = _read_table(path, columns, facts.get("columns"))
    else:
        given = {"text": texts, "second": seconds} if seconds else {"text": texts}
        asked = enumerate(zip(*given.values(), strict=True), 1)
        filled = {at: row for at, row in asked if all(map(str.strip, row))}
        found = {role: [row[place] for row in filled.values()] for place, role in enumerate(given)}
        numbers = [*filled]
        _tell_skipped(len(texts) - len(filled), len(texts))
    with loading():
        from trainfit.jobs.predict import answer
    with terminal.busy("predicting"):
        rows = answer(exports, found["text"], criterion, found.get("second"))
    rows = [row | {"row": numbers[row["row"] - 1]} for row in rows]
    _give(rows, output, form)


def _read_words(
    path: Path | None, texts: Sequence[str], column: str, facts: Mapping[str, Any]
) -> dict[int, list[str]]:
    """Read the words of each row of a file by its number, or split the texts."""
    from trainfit.data.conll_files import read_sentences
    from trainfit.data.labels import check_characters

    if path is not None:
        return read_sentences(path, column, [str(name) for name in facts.get("classes", ())])
    return {at: check_characters(text, "--text").split() for at, text in enumerate(texts, 1)}


def read_items(path: Path, column: str) -> list[Any]:
    """Items for a job of the user's own: the values of a JSONL file, or the texts of a table."""
    from trainfit.data.row_files import read_lines

    if column == "auto" and path.suffix in (".jsonl", ".ndjson"):
        items = []
        for number, line in enumerate(read_lines(path), 1):
            try:
                items += [json.loads(line)] if line.strip() else []
            except ValueError:
                raise BadInput(f"{path}: row {number} is not JSON", "write one per line") from None
        if not all(isinstance(item, dict) and "text" in item for item in items):
            return items
    return [_as_item(text) for text in _read_table(path, {"text": column})[0]["text"]]


def _as_item(text: str) -> Any:
    """Read an item of a job of the user's own: JSON, or a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _read_table(
    path: Path, columns: Mapping[str, str], trained: object = None
) -> tuple[dict[str, list[str]], list[int]]:
    """Read the texts of a file by role, and the numbers of their rows.

    With `auto` the file's column is that of the `trained` names, or the one its name tells.
    """
    from trainfit.data.columnar import choose_columns, shown_name
    from trainfit.data.row_files import column_names
    from trainfit.data.text_files import read_filled

    told = "auto" in columns.values()
    names = column_names(path) if told else list(columns.values())
    known = trained if isinstance(trained, dict) else {}
    wanted = {
        role: known[role] if name == "auto" and known.get(role) in names else name
        for role, name in columns.items()
    }
    chosen = choose_columns(names, wanted, str(path), {r: f"--{r}-column" for r in columns})
    rows, skipped = read_filled(path, list(chosen.values()))
    if told:
        tell_notes(f"the texts are of {' and '.join(map(shown_name, chosen.values()))}")
    _tell_skipped(skipped, len(rows) + skipped)
    return {role: [row[at] for row in rows.values()] for at, role in enumerate(chosen)}, list(rows)


def _read_lines(path: Path) -> tuple[str, ...]:
    """Read a text per line, of a file or, for -, of standard input."""
    from trainfit.data.row_files import read_lines

    if path != STANDARD_INPUT:
        found = tuple(line.rstrip("\r\n") for line in read_lines(path))
    else:
        try:
            whole = b"" if sys.stdin is None else sys.stdin.buffer.read()
            found = tuple(line.rstrip("\r") for line in whole.decode("utf-8-sig").split("\n"))
        except UnicodeError:
            fix = "convert it, such as with iconv -f ENCODING -t UTF-8"
            raise BadInput("standard input is not UTF-8 text", fix) from None
        found = found if found[-1] else found[:-1]
    filled = [line for line in found if line.strip()]
    if filled and all(isinstance(_as_item(line), dict) for line in filled):
        name = "standard input" if path == STANDARD_INPUT else path
        raise BadInput(f"{name} has objects, not a text per line", "give them as a .jsonl file")
    return found


def _tell_skipped(skipped: int, every: int) -> None:
    """Count the rows without a text in a note."""
    if skipped:
        tell_notes(f"skipped {skipped:,} of {every:,} rows without text")


def _form(output: Path | None, form: str | None, as_json: bool) -> str | None:
    """Return the asked form, or raise BadInput where it or the file cannot be written."""
    if output is not None and output.suffix not in (".csv", ".json"):
        raise BadInput(f"--output {output}", "end its name in .csv or .json")
    if output is not None:
        check_output(output)
    if as_json and form not in (None, "json"):
        raise BadInput(f"--json with --format {form}", "give one of them")
    return "json" if as_json else form


def _give(rows: Sequence[Any], output: Path | None, form: str | None) -> None:
    """Write the rows to a file, or print them."""
    if output is None:
        _print(rows, form or ("table" if sys.stdout.isatty() else "json"))
        return
    write_output(output, _csv(rows) if output.suffix == ".csv" else json.dumps(rows, indent=2))
    click.echo(f"{len(rows)} rows in {output}")


def _print(rows: Sequence[Any], form: str) -> None:
    """Print rows; a job of the user's own may answer with others than tables have."""
    if not rows or not all(isinstance(row, dict) for row in rows):
        form = form if form == "jsonl" else "json"
    if form == "table":
        from trainfit.reports import terminal

        terminal.console().print(terminal.answers_table(rows))
    elif form == "csv":
        click.echo(_shown(_csv(rows)), nl=False)
    elif form == "jsonl":
        click.echo("\n".join(json.dumps(row) for row in rows))
    else:
        click.echo(json.dumps(rows, indent=2))


def _shown(text: str) -> str:
    """Return the text as it is for a file or a program, and readable in a terminal."""
    return printable(text) if sys.stdout.isatty() else text


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    if not all(isinstance(row, dict) for row in rows):
        raise BadInput("the answers have no names for columns", "write JSON instead of CSV")
    names = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    for row in rows:  # several labels are a list, which CSV has not
        cells = {k: "|".join(map(str, v)) if isinstance(v, list) else v for k, v in row.items()}
        writer.writerow(cells)
    return text.getvalue()


@click.command()
@click.argument("run")
@click.option("--prompt", default="", help="What the text begins with; default: a new document.")
@click.option("--tokens", default=200, show_default=True, type=MANY, help="Most tokens to write.")
@click.option(
    "--temperature",
    default=0.8,
    show_default=True,
    type=Number(0, 1000),
    help="Lower is less random; 0 always takes the likeliest token.",
)
@click.option(
    "--top-k",
    default=50,
    show_default=True,
    type=MANY,
    help="Choose among this many of the likeliest tokens.",
)
@click.option("--seed", default=0, show_default=True, type=SEED)
@click.option("--json", "as_json", is_flag=True, help="One JSON object for a program.")
def sample(
    run: str, prompt: str, tokens: int, temperature: float, top_k: int, seed: int, as_json: bool
) -> None:
    """Text from a trained GPT.

    RUN is the folder of a run of `trainfit train gpt`; one that is not finished writes with its
    best checkpoint.
    """
    from trainfit.reports import terminal

    place = run_folder.find(run)
    with loading():
        from trainfit.jobs.gpt import open_writer
    with terminal.busy("writing"):
        writer = open_writer(place)
        text = writer.write(prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    click.echo(json.dumps({"prompt": prompt, "text": text}) if as_json else _shown(text))


# ── export ───────────────────────────────────────────────────────────────────────────────────────


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
def export(run: str, onnx: bool, hub: str | None, as_json: bool) -> None:
    """The model of a finished run as ONNX, or on the hub.

    RUN is the folder of a finished run of a classifier. --onnx adds a file to its export, or to
    that of each fold. --push-to-hub uploads the files of the export, with ONNX where it is there.
    """
    from trainfit.data.hub import check_push

    if not onnx and hub is None:
        raise BadInput("nothing to export", "give --onnx or --push-to-hub OWNER/NAME")
    place = run_folder.find(run)
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
    if len(exports) > 1:
        what = f"{exports[0].parent.parent} has {len(exports)} models, one of each fold"
        raise BadInput(what, "push that of a run without cv.folds")
    return exports[0]


def push_run(run: Path, hub: str) -> str:
    """Upload the export of a run; return the address of the model. A failure spoils no run."""
    from trainfit.data.hub import push_files
    from trainfit.reports import terminal

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
