"""The loss is a sum with a weight: any cut of a step adds up to the same."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from trainfit.jobs import classification_loss, label_weight

LOGITS = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 2, 1, 1, 0, 2, 2])
WEIGHTS = torch.tensor([0.2, 1.5, 3.0])


def test_sum_over_weight_is_the_mean() -> None:
    loss, weight = classification_loss(LOGITS, LABELS)
    assert weight == 7.0
    torch.testing.assert_close(loss / weight, functional.cross_entropy(LOGITS, LABELS))


def test_class_weights_weigh_the_sum_and_the_weight() -> None:
    loss, weight = classification_loss(LOGITS, LABELS, class_weights=WEIGHTS)
    assert abs(weight - (2 * 0.2 + 2 * 1.5 + 3 * 3.0)) < 1e-6
    wanted = functional.cross_entropy(LOGITS, LABELS, WEIGHTS.double())
    torch.testing.assert_close(loss / weight, wanted)


def test_the_cut_does_not_matter() -> None:
    whole = classification_loss(LOGITS, LABELS, class_weights=WEIGHTS)
    parts = [
        classification_loss(LOGITS[part], LABELS[part], class_weights=WEIGHTS)
        for part in (slice(0, 1), slice(1, 5), slice(5, 7))
    ]
    torch.testing.assert_close(torch.stack([loss for loss, _ in parts]).sum(), whole[0])
    assert abs(sum(weight for _, weight in parts) - whole[1]) < 1e-9


def test_ignored_labels_count_nothing() -> None:
    labels = LABELS.clone()
    labels[3:] = -100
    loss, weight = classification_loss(LOGITS, labels, class_weights=WEIGHTS)
    wanted = classification_loss(LOGITS[:3], LABELS[:3], class_weights=WEIGHTS)
    torch.testing.assert_close(loss, wanted[0])
    assert abs(weight - wanted[1]) < 1e-9
    assert label_weight(labels) == 3.0


def test_a_known_weight_is_taken() -> None:
    assert classification_loss(LOGITS, LABELS, weight=2.5)[1] == 2.5


def test_the_loss_of_bf16_logits_is_computed_in_float32() -> None:
    logits = LOGITS.bfloat16()
    loss, _ = classification_loss(logits, LABELS, class_weights=WEIGHTS)
    wanted = functional.cross_entropy(logits.float(), LABELS, WEIGHTS, reduction="sum")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, wanted)


def test_labels_without_values_count_one_each() -> None:
    with FakeTensorMode():
        labels = torch.zeros(5, dtype=torch.long)
        loss, weight = classification_loss(torch.randn(5, 3), labels, class_weights=torch.ones(3))
    assert loss.shape == ()
    assert weight == 5.0
