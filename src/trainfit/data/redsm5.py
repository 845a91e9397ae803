"""ReDSM5: its files, the label of every pair of a post and a criterion, splits and tokens.

The label of a pair is 1 when any annotation of the two has status 1. The posts are sensitive: no
message here quotes one, and nothing of them is written to disk, tokens included.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack

import numpy as np
from numpy.typing import NDArray

from trainfit.core.errors import BadInput
from trainfit.data.folds import Fold, Folds, Shares, split
from trainfit.data.labels import balanced_weights
from trainfit.data.row_files import read_csv
from trainfit.data.tokens import Dataset, IntArray, Tokens, tokenize_pairs

if TYPE_CHECKING:
    from torch.utils.data import Dataset as TorchDataset

    from trainfit.data.tokenizers import Tokenizer

Wording = Literal["short", "full"]
CLASSES = ("no evidence", "evidence")


@dataclass(frozen=True, slots=True)
class Criterion:
    """A symptom that posts are checked for."""

    code: str
    symptom: str
    """Name in the annotations file."""
    short: str
    full: str

    def text(self, wording: Wording) -> str:
        """Text of the criterion that the model reads."""
        return self.short if wording == "short" else self.full


CRITERIA = tuple(
    Criterion(**row)
    for row in csv.DictReader(
        resources.files("trainfit.data").joinpath("criteria.csv").read_text("utf-8").splitlines()
    )
)
SPECIAL_CASE = "SPECIAL_CASE"
"""Value in the annotations that is no criterion and makes no pair."""

POSTS = "redsm5_posts.csv"
ANNOTATIONS = "redsm5_annotations.csv"
_SYMPTOM = ("DSM5_symptom", "symptom_label")
_COLUMNS: dict[str, list[str | tuple[str, ...]]] = {
    POSTS: ["post_id", "text"],
    ANNOTATIONS: ["post_id", _SYMPTOM, "status"],
}
_COLUMN = {criterion.symptom: number for number, criterion in enumerate(CRITERIA)}
_STATUS = {"1": True, "0": False, "1.0": True, "0.0": False}


class Annotation(NamedTuple):
    """Judgement of a sentence: evidence of the symptom, or (status False) none."""

    post_id: str
    symptom: str
    status: bool
    place: str
    """File and row, for error messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Posts and the evidence in them. Pair p is post p // 9 with criterion p % 9."""

    ids: tuple[str, ...] = field(repr=False)
    texts: tuple[str, ...] = field(repr=False)
    criteria: tuple[str, ...]
    """Texts of the criteria that the model reads."""
    evidence: NDArray[np.bool_] = field(repr=False)
    """True where a post gives evidence of a criterion: `[posts, criteria]`."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """Label of each pair."""
        return self.evidence.ravel().astype(np.int64)

    @property
    def post_of(self) -> NDArray[np.int64]:
        """Index of each pair's post."""
        return np.repeat(np.arange(len(self.ids)), len(self.criteria))

    @property
    def criterion_of(self) -> NDArray[np.int64]:
        """Index of each pair's criterion."""
        return np.tile(np.arange(len(self.criteria)), len(self.ids))


def check_redsm5(data_dir: Path | str) -> Path:
    """Return the folder; raise BadInput where a file or a column of it is missing."""
    folder = Path(data_dir)
    for name, columns in _COLUMNS.items():
        if not (folder / name).is_file():
            fix = "point data.data_dir at a copy of ReDSM5, or leave it out for synthetic data"
            raise BadInput(f"no {name} in {folder}", fix)
        next(read_csv(folder / name, columns), None)
    return folder


def read_redsm5(data_dir: Path | str, wording: Wording = "short") -> Corpus:
    """Read the corpus from a folder with the two files."""
    folder = check_redsm5(data_dir)
    posts = read_posts(folder / POSTS)
    annotations = read_annotations(folder / ANNOTATIONS)
    return label_posts(posts, annotations, [one.text(wording) for one in CRITERIA])


def read_posts(path: Path) -> dict[str, str]:
    """Read the texts of the posts by id; ids must differ and texts must not be empty."""
    rows: dict[str, int] = {}
    posts: dict[str, str] = {}
    for number, row in read_csv(path, _COLUMNS[POSTS]):
        post_id = row["post_id"].strip()
        place = f"{path}: row {number}"
        if not post_id:
            raise BadInput(f"{place} has no post_id", "give every post one")
        if post_id in rows:
            fix = "keep one row per post"
            raise BadInput(f"{place}: post_id {_id(post_id)} is also in row {rows[post_id]}", fix)
        if not row["text"].strip():
            raise BadInput(f"{place}: post {_id(post_id)} has no text", "fill in column text")
        rows[post_id] = number
        posts[post_id] = row["text"]
    if not posts:
        raise BadInput(f"{path} has no posts", "give a file with one row per post")
    return posts


def read_annotations(path: Path) -> list[Annotation]:
    """Read the annotations, without sentences and explanations."""
    annotations = []
    for number, row in read_csv(path, _COLUMNS[ANNOTATIONS]):
        place = f"{path}: row {number} (post {_id(row['post_id'].strip())})"
        symptom, status = row[_SYMPTOM[0]].strip(), row["status"].strip()
        if symptom not in _COLUMN and symptom != SPECIAL_CASE:
            shown = _shown(symptom, r"[A-Z0-9_]{1,30}")
            fix = f"use {', '.join(_COLUMN)} or {SPECIAL_CASE}"
            raise BadInput(f"{place}: unknown symptom{shown}", fix)
        if status not in _STATUS:
            shown = _shown(status, r"[0-9.+-]{1,8}") or " is neither"
            raise BadInput(f"{place}: status{shown}", "use 1 for evidence and 0 for none")
        annotations.append(Annotation(row["post_id"].strip(), symptom, _STATUS[status], place))
    return annotations


def label_posts(
    posts: Mapping[str, str], annotations: Iterable[Annotation], criteria: Sequence[str]
) -> Corpus:
    """Label every post per criterion: 1 when any annotation says so."""
    row = {post_id: number for number, post_id in enumerate(posts)}
    evidence = np.zeros((len(posts), len(CRITERIA)), dtype=np.bool_)
    for item in annotations:
        if item.post_id not in row:
            fix = "add the post, or drop the row"
            raise BadInput(f"{item.place}: no such post in {POSTS}", fix)
        if item.status and item.symptom != SPECIAL_CASE:
            evidence[row[item.post_id], _COLUMN[item.symptom]] = True
    return Corpus(
        ids=tuple(posts), texts=tuple(posts.values()), criteria=tuple(criteria), evidence=evidence
    )


def _id(value: str) -> str:
    """Show an id, unless its form suggests a piece of a post from a shifted column."""
    return value if re.fullmatch(r"[A-Za-z]{0,8}_?[0-9_-]{1,32}", value) else "(not an id)"


def _shown(value: str, pattern: str) -> str:
    """Show a value that matches `pattern`; others could be a piece of a post."""
    return f" {value}" if re.fullmatch(pattern, value) else ""


# ── pairs ─────────────────────────────────────────────────────────────────────────────────────


def split_corpus(corpus: Corpus, **shares: Unpack[Shares]) -> Folds:
    """Split the pairs by post, with every criterion's positives spread evenly."""
    return split(np.where(corpus.labels == 1, corpus.criterion_of + 1, 0), corpus.post_of, **shares)


def tokenize_corpus(corpus: Corpus, tokenizer: Tokenizer, max_length: int) -> Tokens:
    """Tokenise all pairs in order. They are never cached: tokens of posts can be decoded."""
    return tokenize_pairs(
        tokenizer,
        corpus.texts,
        corpus.criteria,
        corpus.post_of,
        corpus.criterion_of,
        corpus.labels,
        max_length=max_length,
    )


def nli_dataset(
    tokens: Tokens, folds: Folds, *, negative_ratio: float | None = None, seed: int = 0
) -> Dataset:
    """Make the dataset of the first fold; `negative_ratio` drops negatives of its training part."""
    chosen: Fold = folds.folds[0]
    kept = sample_negatives(tokens.labels, chosen.train, negative_ratio, seed)
    parts = {"train": kept, "validation": chosen.validation, "test": folds.test}
    for name, part in parts.items():
        if not part.size:
            raise BadInput(f"the {name} part has no pairs", "give it a share of the data")
    datasets = {name: tokens.subset(part) for name, part in parts.items()}
    metadata = {
        "classes": list(CLASSES),
        "criteria": [criterion.code for criterion in CRITERIA],
        "class_weights": balanced_weights(datasets["train"].labels, CLASSES),
        **{name: _describe(part) for name, part in datasets.items()},
    }
    return Dataset(**datasets, metadata=metadata)


def sample_negatives(
    labels: IntArray, indices: IntArray, ratio: float | None, seed: int
) -> IntArray:
    """Keep all positives and draw `ratio` negatives for each; None keeps all negatives."""
    if ratio is None:
        return indices
    positive, negative = indices[labels[indices] == 1], indices[labels[indices] == 0]
    count = min(negative.size, round(ratio * positive.size))
    drawn = np.random.default_rng((seed, 7)).choice(negative, count, replace=False)
    return np.sort(np.concatenate([positive, drawn]))


def _describe(part: Tokens) -> dict[str, Any]:
    assert part.groups is not None
    assert part.criteria is not None
    positive = np.bincount(part.criteria[part.labels == 1], minlength=len(CRITERIA))
    return {
        "pairs": len(part),
        "posts": int(np.unique(part.groups).size),
        "positives": int(part.labels.sum()),
        "positives_by_criterion": {
            criterion.code: int(count) for criterion, count in zip(CRITERIA, positive, strict=True)
        },
        "tokens": int(part.lengths.sum()),
        "mean_length": round(float(part.lengths.mean()), 1),
        "longest": int(part.lengths.max()),
    }


def load_redsm5_nli(
    data_dir: Path | str,
    tokenizer: Tokenizer,
    *,
    max_length: int = 512,
    wording: Wording = "short",
    negative_ratio: float | None = None,
    test_share: float = 0.2,
    validation_share: float = 0.2,
    seed: int = 0,
) -> tuple[TorchDataset[Any], TorchDataset[Any], TorchDataset[Any], dict[str, Any]]:
    """Load train, validation and test pairs of the ReDSM5 files, split by post, and metadata.

    Each is a torch dataset, padded to `max_length`, for a DataLoader of one's own; trainfit's own
    loop packs or buckets the same tokens. A pair that is too long loses the end of its post.
    """
    from torch.utils.data import StackDataset

    from trainfit.data.batches import collate_padded
    from trainfit.data.tokenizers import pad_id

    corpus = read_redsm5(data_dir, wording)
    folds = split_corpus(
        corpus, test_share=test_share, validation_share=validation_share, seed=seed
    )
    tokens = tokenize_corpus(corpus, tokenizer, max_length)
    data = nli_dataset(tokens, folds, negative_ratio=negative_ratio, seed=seed)
    filler = pad_id(tokenizer)

    def padded(part: Tokens) -> TorchDataset[Any]:
        rows: Any = collate_padded(part, range(len(part)), len(part), max_length, filler)
        return StackDataset(**rows)

    return padded(data.train), padded(data.validation), padded(data.test), data.metadata
