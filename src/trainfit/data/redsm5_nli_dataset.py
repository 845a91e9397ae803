"""ReDSM5's pairs as torch datasets of tensors of one size, for a DataLoader of one's own.

    train_dataset, validation_dataset, test_dataset, metadata = load_redsm5_nli(folder, tokenizer)

trainfit's own loop does not pad to one size: it packs or buckets the same tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import Dataset

from trainfit.data.batches import collate_padded
from trainfit.data.pairs import nli_dataset, split_corpus, tokenize_corpus
from trainfit.data.redsm5 import Wording, read_redsm5
from trainfit.data.tokenizers import pad_id
from trainfit.data.tokens import Tokens

if TYPE_CHECKING:
    from trainfit.data.tokenizers import Tokenizer


class PaddedPairs(Dataset[dict[str, Tensor]]):
    """Pairs as input_ids, attention_mask, labels and maybe token_type_ids, padded on the right."""

    def __init__(self, tokens: Tokens, width: int, pad_id: int) -> None:
        self._tokens, self._width, self._pad_id = tokens, width, pad_id

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = collate_padded(self._tokens, [index], 1, self._width, self._pad_id)
        return {name: values[0] for name, values in row.items()}


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
) -> tuple[PaddedPairs, PaddedPairs, PaddedPairs, dict[str, Any]]:
    """Train, validation and test pairs of the real files, split by post, and their metadata.

    The metadata has counts, class names and class weights, and no text. A pair that is too long
    loses the end of its post.
    """
    corpus = read_redsm5(data_dir, wording)
    folds = split_corpus(
        corpus, test_share=test_share, validation_share=validation_share, seed=seed
    )
    tokens = tokenize_corpus(corpus, tokenizer, max_length)
    data = nli_dataset(tokens, folds, 0, negative_ratio=negative_ratio, seed=seed)
    train, validation, test = (
        PaddedPairs(part, max_length, pad_id(tokenizer))
        for part in (data.train, data.validation, data.test)
    )
    return train, validation, test, data.metadata
