"""Classification as the engine's TrainTask: steps, loss and scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainfit.conf.schema import EncoderModel
from trainfit.core.plan_records import Plan
from trainfit.data.batches import collate_packed, collate_padded
from trainfit.data.tokens import IntArray, Tokens
from trainfit.engine.recovery import Parts
from trainfit.engine.setup import describe
from trainfit.jobs import tuned_plans
from trainfit.jobs.metrics import class_metrics
from trainfit.jobs.models.backbone import Traits, packed_obstacle
from trainfit.jobs.models.classifier import (
    EncoderClassifier,
    Head,
    build_classifier,
    classification_loss,
)
from trainfit.jobs.models.classifier_settings import settings_from
from trainfit.measuring import flops
from trainfit.packing import PackedCut, deal_steps
from trainfit.runs.opening import AttentionKind, AttentionPath, RunSetup
from trainfit.runtime import eagerly

Probabilities = NDArray[np.float64]


class ClassifierTask:
    """Labelled sequences, dealt into steps by length."""

    capturable = True

    def __init__(
        self,
        build: Callable[[], EncoderClassifier],
        train: Tokens,
        validation: Tokens,
        *,
        effective_batch: int,
        seed: int = 0,
        class_weights: Sequence[float] | None = None,
        pad_id: int = 0,
        longest: int | None = None,
    ) -> None:
        """`class_weights` are the factors of the classes' losses; None for equal ones.

        `longest` is the longest sequence of all folds, for which kernels are shaped; None: of this.
        """
        self._build = build
        self._train, self._validation = train, validation
        self._effective_batch, self._seed, self._pad_id = effective_batch, seed, pad_id
        self._class_weights = None if class_weights is None else np.asarray(class_weights)
        self._longest = longest or (int(train.lengths.max()) if len(train) else None)

    def build_model(self) -> nn.Module:
        """Build the model, on the CPU or on the device that it trains on."""
        return self._build()

    def lengths(self) -> Sequence[int]:
        """Number of tokens of each training sequence."""
        lengths: list[int] = self._train.lengths.tolist()
        return lengths

    def steps(self, epoch: int) -> Sequence[Sequence[int]]:
        """Deal an epoch into full batches of nearly the same number of tokens."""
        dealt = deal_steps(self._train.lengths, self._effective_batch, self._seed, epoch)
        return [step.tolist() for step in dealt]

    def weight(self, sequences: Sequence[int]) -> float:
        """Number of sequences, or the sum of their classes' weights."""
        if self._class_weights is None:
            return float(len(sequences))
        return float(self._class_weights[self._train.labels[list(sequences)]].sum())

    def collate(
        self, sequences: Sequence[int], rows: int, width: int, slots: int | None
    ) -> Mapping[str, Any]:
        """Make a packed micro-batch with `slots`, else a padded one."""
        if slots is None:
            padded = collate_padded(self._train, sequences, rows, width, self._pad_id)
            return padded | self._beside
        packed = collate_packed(self._train, sequences, width, slots, self._pad_id)
        # Without max_seqlen the kernel assumes sequences as long as the row, and is much slower.
        return packed | {"max_seqlen": self._longest} | self._beside

    @property
    def _beside(self) -> dict[str, Tensor]:
        """The weights of the classes, where they have some."""
        if self._class_weights is None:
            return {}
        return {"class_weights": torch.from_numpy(self._class_weights).float()}

    def loss(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Sum the loss of a micro-batch; `weight` is computed from labels on the CPU."""
        inputs = dict(batch)
        labels, weights = inputs.pop("labels"), inputs.pop("class_weights", None)
        return classification_loss(model(**inputs), labels, weights)

    def evaluate(self, model: nn.Module, batch_size: int) -> dict[str, float]:
        """Metrics on the validation part."""
        found = self.probabilities(model, batch_size)
        labels = self._validation.labels
        chance = np.maximum(found[np.arange(labels.size), labels], 1e-12)
        return {"loss": float(-np.log(chance).mean()), **class_metrics(labels, found).scalars()}

    def probabilities(self, model: nn.Module, batch_size: int) -> Probabilities:
        """Probabilities of the validation part."""
        return predict(model, self._validation, batch_size, self._pad_id)


def ideal_seconds(model: EncoderModel, plan: Plan) -> Callable[[Sequence[int]], float] | None:
    """Return the time of a step at the GPUs' peak, for the MFU; None where it is not known."""
    dtype = flops.dtype_in_use(plan.precision, plan.runtime.tf32)
    peak = flops.peak_of([plan.gpu] * plan.ranks, dtype)
    if peak is None:
        return None
    method = plan.workload.method
    settings = settings_from(model, method=method, checkpointing="none", weights="random")
    with torch.device("meta"):
        encoder = build_classifier(settings).encoder
    return flops.ideal_seconds(flops.count_flops(encoder), peak)


def opening(parts: Parts, plan: Plan) -> RunSetup:
    """Record the settings in effect, with the attention that the model will really take."""
    return replace(
        describe(parts, _attention(parts)),
        method=plan.workload.method,
        tuned_samples_per_second=tuned_plans.tuned_rate(plan),
    )


def _attention(parts: Parts) -> AttentionPath | None:
    model = parts.model
    if isinstance(model, Head):
        return AttentionPath(kind="frozen")
    if not isinstance(model, EncoderClassifier):
        return None
    if not isinstance(parts.settings.cuts[0], PackedCut):
        return _on_padded_rows(model.traits)
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    precision = halves.get(parts.settings.precision)
    return _on_packed_rows(model.traits, packed_obstacle(model.encoder, model.traits, precision))


def _on_padded_rows(traits: Traits) -> AttentionPath | None:
    """Attention that does not go through SDPA; None where it does."""
    if traits.own_attention:
        return AttentionPath(kind="own")
    return None if traits.softcap is None else AttentionPath(kind="products")


def _on_packed_rows(traits: Traits, obstacle: str | None) -> AttentionPath:
    """The kernel that attends within packed rows, or the reason for a mask."""
    kind: AttentionKind = "varlen" if traits.softcap is None else "softcap"
    if traits.own_attention:
        kind = "disentangled"
    if obstacle is not None:
        kind = "mask"
    return AttentionPath(kind=kind, dropout=traits.attention_dropout, obstacle=obstacle or "")


def predict(model: nn.Module, tokens: Tokens, batch_size: int, pad_id: int = 0) -> Probabilities:
    """Probabilities of the classes for each sequence, in the given order."""
    logits = in_batches(model, model, tokens, batch_size, pad_id)
    return logits.softmax(-1).numpy()


@torch.no_grad()
def in_batches(
    model: nn.Module,
    compute: Callable[..., Tensor],
    tokens: Tokens,
    batch_size: int,
    pad_id: int = 0,
    *,
    packed: bool | None = None,
) -> Tensor:
    """Apply `compute`, the model or a part of it, to each sequence, in the given order.

    Rows are packed where the device has a kernel for it, with as many tokens as `batch_size`
    sequences of the longest length have. Else sequences of similar length are padded together. A
    compiled model runs eagerly, since every width would be compiled anew.
    """
    device = next(model.parameters()).device
    if packed is None:
        packed = isinstance(model, EncoderClassifier) and model.packs_here
    order = np.argsort(tokens.lengths, kind="stable")[::-1]
    parts: list[Tensor] = []  # the longest come first, so that memory runs out early or never
    with eagerly(model):
        for batch in (_packed if packed else _padded)(tokens, order, batch_size, pad_id):
            inputs = {
                name: value.to(device) if isinstance(value, Tensor) else value
                for name, value in batch.items()
                if name != "labels"
            }
            parts.append(compute(**inputs).double())
    found = torch.cat(parts).cpu()  # once, since each copy would make the device wait
    return found[torch.from_numpy(np.argsort(order, kind="stable"))]


def _padded(
    tokens: Tokens, order: IntArray, batch_size: int, pad_id: int
) -> Iterator[dict[str, Any]]:
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        width = int(tokens.lengths[chosen].max())
        yield collate_padded(tokens, chosen, len(chosen), width, pad_id)


def _packed(
    tokens: Tokens, order: IntArray, batch_size: int, pad_id: int
) -> Iterator[dict[str, Any]]:
    ends = np.cumsum(tokens.lengths[order])
    longest = int(tokens.lengths.max(initial=0))
    start = 0
    while start < len(order):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + batch_size * longest, side="right"))
        chosen = order[start:stop]
        batch = collate_packed(tokens, chosen, int(ends[stop - 1]) - before, len(chosen), pad_id)
        yield {**batch, "max_seqlen": longest}
        start = stop
