"""The loss of a classifier as a sum and a weight, so that a step can be cut anywhere."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

IGNORED = -100
"""A label that does not count: it belongs to a sequence that only fills up a fixed number."""


def classification_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    class_weights: Tensor | None = None,
    weight: float | None = None,
) -> tuple[Tensor, float]:
    """The summed cross-entropy of a micro-batch, and its weight.

    Give the `weight` where it is known (`label_weight` of the labels before they go to the GPU):
    to ask labels on the GPU for it makes the CPU wait for them.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if class_weights is not None:
        class_weights = class_weights.to(logits)
    loss = functional.cross_entropy(
        logits, labels, class_weights, reduction="sum", ignore_index=IGNORED
    )
    return loss, label_weight(labels, class_weights) if weight is None else weight


def label_weight(labels: Tensor, class_weights: Tensor | None = None) -> float:
    """How much these labels count: their number, or the sum of the weights of their classes.

    Fake and meta tensors hold no values; there every label counts as one.
    """
    if isinstance(labels, FakeTensor) or labels.is_meta:
        return float(labels.numel())
    counted = labels[labels != IGNORED]
    if class_weights is None:
        return float(counted.numel())
    return float(class_weights.double()[counted].sum())
