"""Micro-batches of fixed shape out of flat tokens: arrays in, CPU tensors out, no loop by token."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainfit.data.tokens import Indices, IntArray, Tokens
from trainfit.errors import BadInput

_IGNORED = -100
"""The label of a slot or a row without a sequence: cross-entropy skips it."""


def collate_packed(
    tokens: Tokens, sequences: Indices, width: int, slots: int, pad_id: int = 0
) -> dict[str, Tensor]:
    """One row of `width` tokens: the sequences end to end, then filler.

    `cu_seqlens` has where each sequence begins and where the filler does; unused slots are
    sequences of no tokens there.
    """
    chosen = np.asarray(sequences, dtype=np.int64)
    lengths = tokens.lengths[chosen]
    used = int(lengths.sum())
    if used > width or chosen.size > slots:
        raise BadInput(
            f"{chosen.size} sequences of {used} tokens for a row of {width} and {slots} slots",
            "cut the step again",
        )
    ends = np.full(slots + 1, used, dtype=np.int32)
    ends[0] = 0
    ends[1 : chosen.size + 1] = np.cumsum(lengths)
    target = np.arange(used)
    batch = _gather(tokens, chosen, target, (1, width), pad_id)
    return batch | {
        "cu_seqlens": torch.from_numpy(ends),
        "labels": _labels(tokens, chosen, slots),
    }


def collate_padded(
    tokens: Tokens, sequences: Indices, rows: int, width: int, pad_id: int = 0
) -> dict[str, Tensor]:
    """A row per sequence, padded on the right; rows without one are all padding."""
    chosen = np.asarray(sequences, dtype=np.int64)
    lengths = tokens.lengths[chosen]
    longest = int(lengths.max(initial=0))
    if longest > width or chosen.size > rows:
        raise BadInput(
            f"{chosen.size} sequences of up to {longest} tokens for {rows} rows of {width}",
            "cut the step again",
        )
    target = np.repeat(np.arange(chosen.size) * width, lengths) + _within(lengths)
    mask = np.zeros((rows, width), dtype=np.int64)
    mask.reshape(-1)[target] = 1
    batch = _gather(tokens, chosen, target, (rows, width), pad_id)
    return batch | {
        "attention_mask": torch.from_numpy(mask),
        "labels": _labels(tokens, chosen, rows),
    }


def _gather(
    tokens: Tokens, chosen: IntArray, target: IntArray, shape: tuple[int, int], pad_id: int
) -> dict[str, Tensor]:
    """The tokens of the chosen sequences at their places in a batch of that shape."""
    lengths = tokens.lengths[chosen]
    source = np.repeat(tokens.starts[chosen], lengths) + _within(lengths)
    batch = {"input_ids": _placed(tokens.ids, source, target, shape, pad_id)}
    if tokens.types is not None:
        batch["token_type_ids"] = _placed(tokens.types, source, target, shape, 0)
    return batch


def _placed(
    values: NDArray[np.int32] | NDArray[np.uint8],
    source: IntArray,
    target: IntArray,
    shape: tuple[int, int],
    filler: int,
) -> Tensor:
    batch = np.full(shape, filler, dtype=np.int64)
    batch.reshape(-1)[target] = values[source]
    return torch.from_numpy(batch)


def _within(lengths: IntArray) -> IntArray:
    """The place of every token in its own sequence, sequences end to end."""
    ends = np.cumsum(lengths)
    within: IntArray = np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)
    return within


def _labels(tokens: Tokens, chosen: IntArray, places: int) -> Tensor:
    labels = np.full(places, _IGNORED, dtype=np.int64)
    labels[: chosen.size] = tokens.labels[chosen]
    return torch.from_numpy(labels)
