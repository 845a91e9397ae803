"""`trainfit sample`: text from a trained GPT."""

from __future__ import annotations

import json
from pathlib import Path

import click

from trainfit.cli.main import MANY, SEED, Number


@click.command()
@click.argument("run")
@click.option("--prompt", default="", help="What the text begins with; default: a new document.")
@click.option("--tokens", default=200, show_default=True, type=MANY, help="At most.")
@click.option(
    "--temperature",
    default=0.8,
    show_default=True,
    type=Number(0, 1000),
    help="Below 1: likelier tokens still likelier; 0: always the likeliest.",
)
@click.option(
    "--top-k",
    default=50,
    show_default=True,
    type=MANY,
    help="Choose among so many of the likeliest.",
)
@click.option("--seed", default=0, show_default=True, type=SEED)
@click.option("--json", "as_json", is_flag=True, help="One JSON object for a program.")
def command(
    run: str,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    as_json: bool,
) -> None:
    """Text from a trained GPT.

    RUN is the folder of a run of `trainfit train gpt`; one that is not finished writes with its
    best checkpoint.
    """
    from trainfit.jobs.sampling import open_writer
    from trainfit.runs import run_folder

    writer = open_writer(run_folder.find(run, Path("runs")))
    text = writer.write(prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    click.echo(json.dumps({"prompt": prompt, "text": text}) if as_json else text)
