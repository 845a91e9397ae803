"""Data of the NLI job: every post with every criterion, split by post, tokenised in memory only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from trainfit.core.errors import BadInput
from trainfit.data.folds import Fold, Folds, Shares, split
from trainfit.data.redsm5 import CRITERIA, Corpus, Wording, read_redsm5
from trainfit.data.text_files import balanced_weights
from trainfit.data.tokens import Dataset, IntArray, Tokens, tokenize_pairs

if TYPE_CHECKING:
    from torch.utils.data import Dataset as TorchDataset

    from trainfit.data.tokenizers import Tokenizer

CLASSES = ("no evidence", "evidence")


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
    tokens: Tokens,
    folds: Folds,
    fold: int,
    *,
    negative_ratio: float | None = None,
    seed: int = 0,
) -> Dataset:
    """Make the dataset of one fold; `negative_ratio` drops negatives of the training part."""
    chosen: Fold = folds.folds[fold]
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
    data = nli_dataset(tokens, folds, 0, negative_ratio=negative_ratio, seed=seed)
    filler = pad_id(tokenizer)

    def padded(part: Tokens) -> TorchDataset[Any]:
        rows: Any = collate_padded(part, range(len(part)), len(part), max_length, filler)
        return StackDataset(**rows)

    return padded(data.train), padded(data.validation), padded(data.test), data.metadata
