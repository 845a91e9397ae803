"""Models and data of benchmarks/jobs.py, made before any clock runs.

    SCRATCH/models/NAME/     config, random weights and a learned tokenizer, as a hub model has them
    SCRATCH/data/NAME/       CSVs of ReDSM5's form and lengths, texts with a label, or tokens
    …/parts.json             which pairs or rows train, choose the epoch and are scored, by fold

In a process of its own, so that the one that starts the jobs holds neither torch nor the GPU:
python benchmarks/job_files.py SPEC.json
"""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainfit.conf import compose
from trainfit.data.folds import hold_out, make_folds
from trainfit.data.redsm5 import ANNOTATIONS, CRITERIA, POSTS, read_redsm5, sample_negatives
from trainfit.data.synthetic import CLASSES, criteria_texts, make_drafts, make_texts
from trainfit.jobs.nli import split_parts

SEED = 42
_HEADER = ("post_id", "sentence_id", "sentence_text", "DSM5_symptom", "status", "explanation")
_GPT_WORDS = 50_257
_REAL_LENGTHS = 300
"""Vocabulary with which the made-up posts have as many tokens as real ones: 302 on average."""
_TINY = {
    "vocab_size": 1000,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "pad_token_id": 0,
}
_TINY_GEMMA = {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 32}


def prepare(spec: dict[str, Any]) -> None:
    """Make what is missing of a job's files."""
    data = Path(spec["data"])
    kinds = {"pairs": write_posts, "texts": write_texts, "tokens": write_tokens}
    if not (data / "complete").exists():
        shutil.rmtree(data, ignore_errors=True)
        data.mkdir(parents=True)
        kinds[spec["kind"]](data, spec)
        (data / "complete").touch()
    if spec["kind"] != "tokens":
        parts = pair_parts(data, spec) if spec["kind"] == "pairs" else text_parts(data, spec)
        Path(spec["parts"]).write_text(json.dumps(parts))
        for folder, name in spec["models"].items():
            texts, real = read_texts(data, spec), spec["scale"] == "full"
            write_model(Path(folder), name, texts, tiny=spec["tiny"], real_lengths=real)


# ── data ──────────────────────────────────────────────────────────────────────────────────────


def write_posts(folder: Path, spec: dict[str, Any]) -> None:
    """Posts and annotations of ReDSM5's form; `criteria.json` has the texts of the criteria."""
    drafts = list(make_drafts(spec["scale"], SEED))[: spec["posts"]]
    posts = [(draft.id, " ".join(draft.sentences)) for draft in drafts]
    marks = [
        (
            draft.id,
            f"{draft.id}_{m.sentence}",
            draft.sentences[m.sentence],
            m.symptom,
            int(m.status),
            "",
        )
        for draft in drafts
        for m in draft.marks
    ]
    _write_csv(folder / POSTS, ("post_id", "text"), posts)
    _write_csv(folder / ANNOTATIONS, _HEADER, marks)
    made_up = criteria_texts("short") if spec["scale"] == "small" else None
    texts = made_up or [one.text("short") for one in CRITERIA]
    criteria = dict(zip((one.symptom for one in CRITERIA), texts, strict=True))
    (folder / "criteria.json").write_text(json.dumps(criteria))


def write_texts(folder: Path, spec: dict[str, Any]) -> None:
    """Texts with a label."""
    made = make_texts("small" if spec["tiny"] else "full", SEED)
    rows = [
        (text, CLASSES[label]) for text, label in zip(made.texts, made.labels.tolist(), strict=True)
    ]
    _write_csv(folder / "texts.csv", ("text", "label"), rows[: spec["posts"]])


def write_tokens(folder: Path, spec: dict[str, Any]) -> None:
    """Token files in nanoGPT's form: a stream in which each token hints at the next."""
    words = 500 if spec["tiny"] else _GPT_WORDS
    draws = np.random.default_rng(SEED)
    for name, count in (
        ("train.bin", spec["tokens"]),
        ("val.bin", max(2**12, spec["tokens"] // 20)),
    ):
        ids = draws.zipf(1.2, count) % words
        ids[1::2] = (ids[0::2][: len(ids[1::2])] * 7 + 1) % words
        ids.astype("<u2").tofile(folder / name)
    (folder / "meta.json").write_text(json.dumps({"vocab_size": words}))


def _write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])


def read_texts(folder: Path, spec: dict[str, Any]) -> list[str]:
    """Texts that a tokenizer is learned from."""
    name = POSTS if spec["kind"] == "pairs" else "texts.csv"
    csv.field_size_limit(10**9)
    with (folder / name).open(newline="", encoding="utf-8") as file:
        found = [row["text"] for row in csv.DictReader(file)]
    if spec["kind"] == "pairs":
        found += json.loads((folder / "criteria.json").read_text()).values()
    return found


# ── which samples are for what: as trainfit deals them, for the other script ─────────────────────


def pair_parts(folder: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Pair p is post p // 9, in the order of the file, with criterion p % 9."""
    corpus = read_redsm5(folder)

    def dealt(words: list[str]) -> list[dict[str, list[int]]]:
        config: Any = compose("nli", words).config
        ratio, seed = config.data.negative_ratio, config.seed
        _, parts = split_parts(corpus, config, nested=spec["nested"])
        return [
            {
                "train": sample_negatives(corpus.labels, part.folds[0].train, ratio, seed).tolist(),
                "validation": part.folds[0].validation.tolist(),
                "test": part.test.tolist(),
            }
            for part in parts
        ]

    words = spec["data_words"]
    return {"folds": dealt(words), "final": dealt([*words, "cv.folds=null"])[0]}


def text_parts(folder: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Rows of texts.csv in one split, as text_datasets deals them."""
    config: Any = compose("textclass", spec["data_words"]).config
    with (folder / "texts.csv").open(newline="", encoding="utf-8") as file:
        labels = np.array([CLASSES.index(row["label"]) for row in csv.DictReader(file)])
    shares = config.data.test_share, config.data.validation_share
    items, test = hold_out(np.arange(len(labels)), labels, None, shares[0], config.seed)
    [fold] = make_folds(items, labels, None, folds=None, share=shares[1], seed=config.seed + 1)
    part = {"train": fold.train, "validation": fold.validation, "test": test}
    return {"folds": [{name: rows.tolist() for name, rows in part.items()}]}


# ── models ────────────────────────────────────────────────────────────────────────────────────


def write_model(
    folder: Path, name: str, texts: Sequence[str], *, tiny: bool, real_lengths: bool = False
) -> None:
    """A folder like a hub model's: its config, weights and tokenizer."""
    if (folder / "tokenizer.json").exists():
        return
    import torch
    from transformers import AutoModel

    from trainfit.data.tokenizers import learn_tokenizer
    from trainfit.hardware.model_shapes import model_shape, transformers_config

    shape = model_shape(name)
    overrides = _tiny(shape.config) if tiny else {}
    config = transformers_config(shape, **overrides)
    gemma = config.model_type.startswith("gemma")
    torch.manual_seed(SEED)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModel.from_config(config, dtype=torch.bfloat16 if gemma else torch.float32)
    model.save_pretrained(folder)
    pad = config.pad_token_id
    tokenizer = learn_tokenizer(
        texts,
        vocabulary=_REAL_LENGTHS if real_lengths else min(config.vocab_size, 8192),
        pad_id=pad if isinstance(pad, int) and 0 <= pad <= 4 else 0,
    )
    if (getattr(config, "type_vocab_size", None) or 0) < 2:
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.save_pretrained(folder)


def _tiny(config: dict[str, Any]) -> dict[str, Any]:
    sizes: dict[str, Any] = dict(_TINY)
    if config["model_type"].startswith("gemma"):
        sizes |= _TINY_GEMMA
    if config.get("layer_types"):
        sizes["layer_types"] = config["layer_types"][: _TINY["num_hidden_layers"]]
    return sizes


if __name__ == "__main__":
    prepare(json.loads(Path(sys.argv[1]).read_text()))
