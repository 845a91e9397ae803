"""The loss is a sum over sequences: any cut of a step adds up to the same."""

from __future__ import annotations

import torch
from torch.nn import functional

from trainfit.jobs.models.classifier import classification_loss

LOGITS = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 2, 1, 1, 0, 2, 2])
WEIGHTS = torch.tensor([0.2, 1.5, 3.0])


def test_the_sum_over_the_weights_is_the_mean() -> None:
    plain = classification_loss(LOGITS, LABELS)
    torch.testing.assert_close(plain / 7, functional.cross_entropy(LOGITS, LABELS))
    weighted = classification_loss(LOGITS, LABELS, WEIGHTS)
    wanted = functional.cross_entropy(LOGITS, LABELS, WEIGHTS.double())
    torch.testing.assert_close(weighted / WEIGHTS.double()[LABELS].sum(), wanted)


def test_the_cut_does_not_matter() -> None:
    parts = [
        classification_loss(LOGITS[part], LABELS[part], WEIGHTS)
        for part in (slice(0, 1), slice(1, 5), slice(5, 7))
    ]
    torch.testing.assert_close(
        torch.stack(parts).sum(), classification_loss(LOGITS, LABELS, WEIGHTS)
    )


def test_ignored_labels_count_nothing() -> None:
    labels = LABELS.clone()
    labels[3:] = -100
    wanted = classification_loss(LOGITS[:3], LABELS[:3], WEIGHTS)
    torch.testing.assert_close(classification_loss(LOGITS, labels, WEIGHTS), wanted)


def test_the_loss_of_bf16_logits_is_computed_in_float32() -> None:
    logits = LOGITS.bfloat16()
    loss = classification_loss(logits, LABELS, WEIGHTS)
    wanted = functional.cross_entropy(logits.float(), LABELS, WEIGHTS, reduction="sum")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, wanted)
