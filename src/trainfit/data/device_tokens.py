"""Tokens on the training device: steps are gathered there, without a loader process.

The batches are those of `collate_packed` and `collate_padded`, tensor for tensor. Only a few
numbers for each sequence are copied to the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainfit.data.batches import check_packed, check_padded, labels_of
from trainfit.data.tokens import IGNORED, Indices, IntArray, Tokens
from trainfit.planning.question import at_home


@dataclass(frozen=True, slots=True)
class DeviceTokens:
    """Tokens and labels as tensors of one device; the last label is that of an empty place."""

    tokens: Tokens
    ids: Tensor
    types: Tensor | None
    tags: Tensor | None
    labels: Tensor
    pad_id: int

    def packed(self, sequences: Indices, width: int, slots: int) -> dict[str, Tensor]:
        """Gather sequences end to end into one row of `width` tokens."""
        chosen = np.asarray(sequences, dtype=np.int64)
        used = check_packed(self.tokens, chosen, width, slots)
        lengths = self.tokens.lengths[chosen]
        ends = np.cumsum(lengths)
        offsets = self.tokens.starts[chosen] - ends + lengths
        which, offset, end = self._copied(
            slots, (chosen, len(self.tokens)), (offsets, 0), (ends, used)
        )
        places = torch.arange(width, device=self.ids.device)
        owner = torch.searchsorted(end, places, right=True).clamp_(max=slots - 1)
        batch = self._gathered((offset[owner] + places)[None], (places < end[-1])[None])
        starts = torch.nn.functional.pad(end, (1, 0)).int()
        return {"labels": self.labels[which]} | batch | {"cu_seqlens": starts}

    def padded(self, sequences: Indices, rows: int, width: int) -> dict[str, Tensor]:
        """Gather one row per sequence; unused rows see their first token, which is padding."""
        chosen = np.asarray(sequences, dtype=np.int64)
        check_padded(self.tokens, chosen, rows, width)
        starts, lengths = self.tokens.starts[chosen], self.tokens.lengths[chosen]
        which, start, length = self._copied(
            rows, (chosen, len(self.tokens)), (starts, 0), (lengths, 0)
        )
        places = torch.arange(width, device=self.ids.device)
        inside = places < length[:, None]
        batch = self._gathered(start[:, None] + places, inside)
        seen = inside | ((places == 0) & (length == 0)[:, None])
        return {"labels": self.labels[which]} | batch | {"attention_mask": seen.long()}

    def _copied(self, places: int, *rows: tuple[IntArray, int]) -> tuple[Tensor, ...]:
        """Copy numbers of each sequence to the device at once, each filled up to `places`."""
        table = np.stack([np.full(places, filler) for _, filler in rows])
        for row, (values, _) in zip(table, rows, strict=True):
            row[: values.size] = values
        return torch.from_numpy(table).to(self.ids.device, non_blocking=True).unbind()

    def _gathered(self, source: Tensor, inside: Tensor) -> dict[str, Tensor]:
        source = source.clamp(0, len(self.ids) - 1)

        def placed(values: Tensor, filler: int) -> Tensor:
            return values[source].long().masked_fill_(~inside, filler)

        batch = {"input_ids": placed(self.ids, self.pad_id)}
        if self.types is not None:
            batch["token_type_ids"] = placed(self.types, 0)
        if self.tags is not None:
            batch["labels"] = placed(self.tags, IGNORED)
        return batch


def device_tokens(tokens: Tokens, device: torch.device, pad_id: int) -> DeviceTokens | None:
    """Copy tokens to the device; None where they are too many for its memory."""
    if device.type == "cuda":
        _free, total = torch.cuda.mem_get_info(device)
        if not at_home(int(tokens.lengths.sum()), total / 2**30):
            return None

    def there(values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.array(values)).to(device)

    every = np.arange(len(tokens))
    return DeviceTokens(
        tokens=tokens,
        ids=there(tokens.ids),
        types=None if tokens.types is None else there(tokens.types),
        tags=None if tokens.tags is None else there(tokens.tags),
        labels=labels_of(tokens, every, len(tokens) + 1).to(device),
        pad_id=pad_id,
    )
