"""Pairs of few texts: each text is tokenised once, and joined with all that it occurs with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from trainfit.data.tokenizers import Tokenizer

Ids = NDArray[np.int32]
_COMPARED = 32
"""Pairs that are also tokenised as such."""


def join_pairs(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    seconds: Sequence[str],
    pairs: NDArray[np.int64],
    max_length: int,
    encode: Callable[[NDArray[np.int64]], tuple[Any, Any]],
) -> tuple[list[Ids], list[Ids] | None] | None:
    """Token ids and token types of pairs, which are rows of a text's and a second text's number.

    A pair that is too long loses the end of its first text. `encode` tokenises pairs as the model
    reads them. None where it makes anything else of some pairs, the longest among them.
    """
    firsts, others = (_alone(tokenizer, part, max_length) for part in (texts, seconds))
    sizes = [firsts[i].size + others[j].size for i, j in pairs.tolist()]
    longest, shortest = np.argmax(sizes), np.argmin(sizes)
    some = np.unique([*range(0, len(pairs), max(1, len(pairs) // _COMPARED)), longest])
    (whole,), kinds = encode(pairs[shortest : shortest + 1])
    i, j = pairs[shortest].tolist()
    places = _find(np.asarray(whole), firsts[i], others[j])
    if places is None:
        return None
    first, second = places
    spare = max_length - (len(whole) - firsts[i].size - others[j].size)
    insides = [(firsts[a][: spare - others[b].size], others[b]) for a, b in pairs.tolist()]

    def joined(sample: Any, parts: list[tuple[Ids, Ids]]) -> list[Ids]:
        around = np.asarray(sample, dtype=np.int32)
        before, between = around[:first], around[first + firsts[i].size : second]
        after = around[second + others[j].size :]
        return [np.concatenate([before, one, between, two, after]) for one, two in parts]

    ids, types = joined(whole, insides), None
    if kinds is not None:
        # A text's tokens are all of the type that the first of them has.
        of_first, of_second = (kinds[0][at] if at < len(whole) else 0 for at in places)
        filled = [(np.full(a.size, of_first), np.full(b.size, of_second)) for a, b in insides]
        types = joined(kinds[0], filled)
    found, found_types = encode(pairs[some])
    made = [(ids, found)] if types is None else [(ids, found), (types, found_types)]
    same = all(
        np.array_equal(rows[at], one)
        for rows, right in made
        for at, one in zip(some, right, strict=True)
    )
    return (ids, types) if same else None


def _alone(tokenizer: Tokenizer, texts: Sequence[str], max_length: int) -> list[Ids]:
    """Token ids of texts without special tokens, and no more than a pair may have."""
    encoded = tokenizer(
        list(texts),
        add_special_tokens=False,
        truncation=True,
        max_length=max_length,
        return_attention_mask=False,
        return_token_type_ids=False,
    )
    return [np.asarray(one, dtype=np.int32) for one in encoded["input_ids"]]


def _find(whole: Ids, first: Ids, second: Ids) -> tuple[int, int] | None:
    """Places of two texts in a pair; None where they are not in it."""
    spare = whole.size - first.size - second.size
    for start in range(spare + 1):
        if np.array_equal(whole[start : start + first.size], first):
            for gap in range(spare - start + 1):
                at = start + first.size + gap
                if np.array_equal(whole[at : at + second.size], second):
                    return start, at
    return None
