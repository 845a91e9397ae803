"""Training of a head on the outputs of a frozen encoder, which are computed once and cached.

The engine then trains the head alone. Its weights have the same names as in the whole classifier,
so that a checkpoint is the same either way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainfit.data.batches import Collate, labels_of
from trainfit.data.tokens import Tokens
from trainfit.jobs.classification import ClassifierTask
from trainfit.jobs.models.classifier import EncoderClassifier, Head
from trainfit.jobs.targets import Outputs
from trainfit.runs import timeline

Pool = Callable[[EncoderClassifier, Tokens], Outputs]
"""Computes the pooled outputs of sequences `[sequences, width]`."""
_Known = tuple[NDArray[np.int32], dict[int, NDArray[np.float64]]]
"""The token array, held so that its id is not reused, and the outputs by sequence start."""
_MOST_BYTES = 2 * 2**30
_MOST_ENCODERS = 4
"""Number of encoders whose outputs stay in memory, the last used."""


class SharedFeatures:
    """Cache of frozen encoders' outputs, for every fold and run of this process."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known] = {}

    def of(
        self, tokens: Tokens, encoder: Hashable, compute: Callable[[Tokens], Outputs]
    ) -> Outputs:
        """Return the outputs of these sequences; `compute` makes those that are missing."""
        key = (id(tokens.ids), encoder)
        last = self._known.pop(key, (tokens.ids, {}))
        self._known = dict(list(self._known.items())[1 - _MOST_ENCODERS :]) | {key: last}
        known = last[1]
        starts = tokens.starts.tolist()
        missing = [place for place, start in enumerate(starts) if start not in known]
        if missing:
            with timeline.stage("features"):
                found = compute(tokens.subset(missing))
            known.update(zip((starts[place] for place in missing), found, strict=True))
        return np.stack([known[start] for start in starts])


class FrozenTask(ClassifierTask):
    """Trains a head on the pooled outputs of the training and validation sequences."""

    def __init__(
        self,
        build: Callable[[], EncoderClassifier],
        train: Tokens,
        validation: Tokens,
        *,
        pool: Pool,
        **options: Any,
    ) -> None:
        """`options` are ClassifierTask's; `pool` runs the model that `build` makes."""
        super().__init__(build, train, validation, **options)
        self._pool = pool
        self._pooled: dict[str, Tensor] = {}

    def build_model(self) -> nn.Module:
        """Return the head, or the whole model if the outputs cannot be cached."""
        model = self._build()
        if not _can_be_cached(model, len(self._train) + len(self._validation)):
            return model
        for name, part in (("train", self._train), ("validation", self._validation)):
            self._pooled[name] = torch.from_numpy(self._pool(model, part)).float()
        return Head(model.cpu())

    def collate(
        self, sequences: Sequence[int], rows: int, width: int, slots: int | None
    ) -> Mapping[str, Tensor]:
        """Stack the outputs of these sequences, padded to the shape's number of rows."""
        if not self._pooled:
            return super().collate(sequences, rows, width, slots)
        chosen = torch.tensor(sequences, dtype=torch.long)
        places = rows if slots is None else slots
        pooled = self._pooled["train"][chosen]
        return {
            "pooled": nn.functional.pad(pooled, (0, 0, 0, places - len(chosen))),
            "labels": labels_of(self._train, chosen.numpy(), places),
            **self._beside,
        }

    def collate_there(self, device: torch.device) -> Collate | None:
        """Collate on the host where outputs are cached: they are there."""
        return None if self._pooled else super().collate_there(device)

    def outputs(self, model: nn.Module, batch_size: int) -> Outputs:
        if not self._pooled:
            return super().outputs(model, batch_size)
        device = next(model.parameters()).device
        parts = [
            model(part.to(device)).double().cpu()
            for part in torch.split(self._pooled["validation"], batch_size)
        ]
        return self._target.outputs(torch.cat(parts)).numpy()


def _can_be_cached(model: EncoderClassifier, sequences: int) -> bool:
    """True if nothing before the head is trained and the outputs fit into memory."""
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    size = sequences * model.encoder.config.hidden_size * 4
    return all(name.startswith("head.") for name in trained) and size <= _MOST_BYTES
