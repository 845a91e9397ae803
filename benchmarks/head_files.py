"""Data of benchmarks/heads.py: files that trainfit reads, with as many words as ReDSM5's posts.

    FOLDER/train.csv, validation.csv, test.csv      or .jsonl where words have tags

`python benchmarks/head_files.py MODEL FOLDER [--tiny]` writes a model with random weights and a
tokenizer of such texts, in a process of its own: the one that keeps the time holds no GPU.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from job_files import write_model
from trainfit.data.redsm5 import CRITERIA
from trainfit.data.synthetic import CUES, make_drafts

PARTS = ("train", "validation", "test")
_TEXTS = {one.symptom: one.text("short") for one in CRITERIA}
Row = dict[str, Any]


def pairs(draft: Any, number: int) -> Row:
    """A post with the text of a criterion, and a class: the post is evidence of it, or not."""
    told = {mark.symptom: mark.status for mark in draft.marks if mark.symptom in _TEXTS}
    symptom = next(iter(told), CRITERIA[number % len(CRITERIA)].symptom)
    label = "yes" if told.get(symptom) else "no"
    return {"text1": " ".join(draft.sentences), "text2": _TEXTS[symptom], "label": label}


def several_labels(draft: Any, _number: int) -> Row:
    """A post and every symptom that it is evidence of."""
    told = sorted({mark.symptom for mark in draft.marks if mark.status})
    return {"text": " ".join(draft.sentences), "labels": "|".join(told)}


def word_tags(draft: Any, _number: int) -> Row:
    """Words of a post with a tag each: a cue is an entity."""
    words = " ".join(draft.sentences).split()
    cue = [CUES.index(word) if word in CUES else None for word in words]
    return {"tokens": words, "tags": ["O" if at is None else f"B-{at % 3}" for at in cue]}


KINDS: dict[str, Callable[[Any, int], Row]] = {
    "pairs": pairs,
    "labels": several_labels,
    "tags": word_tags,
}


def write_parts(folder: Path, kind: str, sizes: tuple[int, ...], *, tiny: bool) -> None:
    """Write the rows of each part, one post each."""
    folder.mkdir(parents=True, exist_ok=True)
    drafts = enumerate(_drafts("small" if tiny else "full"))
    for part, size in zip(PARTS, sizes, strict=True):
        rows = [KINDS[kind](draft, number) for number, draft in islice(drafts, size)]
        with file_of(folder, kind, part).open("w", newline="", encoding="utf-8") as file:
            if kind == "tags":
                file.writelines(json.dumps(row) + "\n" for row in rows)
                continue
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def file_of(folder: Path, kind: str, part: str) -> Path:
    return folder / f"{part}.{'jsonl' if kind == 'tags' else 'csv'}"


def _drafts(scale: Any) -> Iterator[Any]:
    """Posts of one seed after the other."""
    seed = 0
    while True:
        yield from make_drafts(scale, seed)
        seed += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    count = 200 if given.tiny else 1484
    drafts = islice(_drafts("small" if given.tiny else "full"), count)
    texts = [" ".join(draft.sentences) for draft in drafts] + list(_TEXTS.values())
    write_model(given.folder, given.model, texts, tiny=given.tiny, real_lengths=not given.tiny)


if __name__ == "__main__":
    main()
