"""Folders that cases start from: whole runs, data and models, made once by the commands."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

TINY = {
    "nli": [
        "model.name=model",
        "model.weights=random",
        "model.method=full",
        "data.data_dir=data",
        "data.max_length=64",
        "training.max_steps=1",
        "training.batch_size=4",
        "training.num_workers=0",
        "baselines=false",
    ],
    "textclass": [
        "model.name=model",
        "model.weights=random",
        "model.method=full",
        "data.train=data.csv",
        "data.max_length=32",
        "training.max_steps=1",
        "training.batch_size=4",
        "training.num_workers=0",
        "baselines=false",
    ],
    "pairs": [
        "model.name=model",
        "model.weights=random",
        "model.method=full",
        "data.train=pairs.csv",
        "data.max_length=32",
        "training.max_steps=1",
        "training.batch_size=4",
        "training.num_workers=0",
        "baselines=false",
    ],
    "tokens": [
        "model.name=model",
        "model.weights=random",
        "model.method=full",
        "data.train=words.conll",
        "data.max_length=32",
        "training.max_steps=1",
        "training.batch_size=4",
        "training.num_workers=0",
        "baselines=false",
    ],
    "gpt": [
        "model.name=gpt-tiny",
        "model.n_layer=1",
        "model.n_head=2",
        "model.n_embd=32",
        "data.data_dir=tokens",
        "data.max_length=16",
        "training.max_steps=1",
        "training.batch_size=4",
        "training.eval_iters=1",
        "training.num_workers=0",
    ],
}
"""Words of jobs that are over in a second, in a folder made from the template of their name."""


def command(argv: list[str], *, real_plan: bool = False) -> int:
    """Run a command in this process; the planner is quick unless its own answer matters."""
    from trainfit.cli.main import run

    if real_plan:
        return run(argv)
    with mock.patch("trainfit.planning.planner.plan", _plan_quickly):
        return run(argv)


def _plan_quickly(question: Any, *given: Any, **more: Any) -> Any:
    """Build the model, as the planner's process does, and plan without a step of it."""
    from job_tiny import quick_plan
    from trainfit.jobs.models.classifier import try_building
    from trainfit.jobs.models.classifier_settings import ClassifierSettings

    if question.factory.endswith(":encoder_step"):
        try_building(ClassifierSettings(**question.arguments))
    return quick_plan(question, *given, **more)


def make(name: str, folder: Path) -> None:
    """Make the template `name` in the new `folder`."""
    folder.mkdir(parents=True)
    os.chdir(folder)
    with mock.patch.dict(os.environ, TRAINFIT_CACHE=str(folder / "cache")):
        TEMPLATES[name]()


def _train(task: str, *more: str) -> None:
    assert command(["train", task, *TINY[task], "runs_dir=runs", *more]) == 0
    [made] = [path.parent for path in Path("runs").glob("*/run.json")]
    made.rename("runs/run")


def _nli() -> None:
    from job_tiny import tiny_model, write_redsm5

    write_redsm5(Path("data"), posts=40)
    tiny_model(Path("model"))
    _train("nli")


def _textclass() -> None:
    import datasets
    import pyarrow.feather
    import pyarrow.parquet

    from job_tiny import tiny_model, write_texts

    tiny_model(Path("model"))
    write_texts(Path("data.csv"), 60)
    loaded = datasets.Dataset.from_csv("data.csv", cache_dir="hf")
    table = loaded.data.table
    pyarrow.parquet.write_table(table, "data.parquet")
    pyarrow.feather.write_feather(table, "data.arrow")
    rows = table.to_pylist()
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("data.json").write_text(json.dumps(rows))
    Path("data.tsv").write_text(
        "text\tlabel\n" + "".join(f"{row['text']}\t{row['label']}\n" for row in rows)
    )
    loaded.save_to_disk("saved")
    _train("textclass")


def _pairs() -> None:
    from job_tiny import tiny_model, write_pairs

    tiny_model(Path("model"))
    write_pairs(Path("pairs.csv"), 60)
    _train("pairs")


def _tokens() -> None:
    from job_tiny import tiny_model

    tiny_model(Path("model"))
    rows = ("saw x O\nAnna x B-PER\nAlder x I-PER", "Bo x B-PER\nleft x O", "the x O\nhouse x O")
    Path("words.conll").write_text("\n\n".join(rows * 20) + "\n")
    _train("tokens")


def _gpt() -> None:
    from gpt_tiny import write_tokens

    write_tokens(Path("tokens"), documents=30)
    _train("gpt", "training.checkpoint_steps=1")


def _corpus() -> None:
    Path("corpus").mkdir()
    for number in range(30):
        Path(f"corpus/{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n" * 9)
    rows = [{"text": f"a text of {n} words"} for n in range(30)]
    Path("corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("corpus.csv").write_text("text\n" + "".join(f"{row['text']}\n" for row in rows))


def _model() -> None:
    """A model with weights and a tokenizer, and data to train it on."""
    from transformers import AutoConfig, AutoModel

    from job_tiny import tiny_model, write_texts
    from trainfit.data.tokenizers import learn_tokenizer

    tiny_model(Path("model"))
    AutoModel.from_config(AutoConfig.from_pretrained("model")).save_pretrained("model")
    learn_tokenizer(["alder birch cedar"] * 30, vocabulary=300).save_pretrained("model")
    write_texts(Path("data.csv"), 60)


def _study() -> None:
    _nli()
    words = [w for w in TINY["nli"] if not w.startswith("training.max_steps")]
    job = [*words, "training.num_epochs=0.1", "cv.folds=2"]
    argv = ["hpo", "nli", *job, "hpo.trials=2", "hpo.study=s", "runs_dir=runs"]
    assert command(argv) in (0, 1)


TEMPLATES: dict[str, Callable[[], None]] = {
    "nli": _nli,
    "textclass": _textclass,
    "pairs": _pairs,
    "tokens": _tokens,
    "gpt": _gpt,
    "corpus": _corpus,
    "model": _model,
    "study": _study,
}
