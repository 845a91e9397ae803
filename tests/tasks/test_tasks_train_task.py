"""A classifier's micro-batches through the task, as the engine asks for them."""

from typing import Any

import numpy as np
import pytest
import torch
from tasks_tiny import tiny

from trainfit.data.tokens import Tokens
from trainfit.tasks.encoder import classifier
from trainfit.tasks.encoder.task import ClassifierTask

LENGTHS = (7, 3, 12, 5)


def tokens() -> Tokens:
    lengths = np.array(LENGTHS)
    return Tokens(
        ids=np.random.default_rng(0).integers(5, 60, lengths.sum()).astype(np.int32),
        starts=np.cumsum([0, *LENGTHS[:-1]]),
        lengths=lengths,
        labels=np.array([0, 1, 1, 0]),
    )


@pytest.fixture
def task() -> ClassifierTask:
    model = tiny("bert-base").double().eval()
    return ClassifierTask(lambda: model, tokens(), tokens(), effective_batch=4)


def test_a_packed_micro_batch_has_the_loss_and_gradient_of_the_padded_one(task: ClassifierTask):
    model = task.build_model()
    found = []
    for rows, width, slots in ((1, 32, 6), (4, 12, None)):
        model.zero_grad()
        loss = task.loss(model, task.collate((0, 1, 2, 3), rows, width, slots))
        loss.backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        found.append((float(loss), torch.cat(gradients)))
    (packed, one), (padded, other) = found
    assert packed == pytest.approx(padded, rel=1e-10)
    assert float((one - other).norm()) < 1e-9 * float(other.norm())


def test_a_packed_row_says_how_long_its_sequences_are(
    task: ClassifierTask, monkeypatch: pytest.MonkeyPatch
):
    seen: list[Any] = []
    plain = classifier.lay_out

    def noting(*args: Any, **kwargs: Any) -> Any:
        seen.append(plain(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(classifier, "lay_out", noting)
    task.loss(task.build_model(), task.collate((1, 3), 1, 32, 6))
    assert [layout.max_seqlen for layout in seen] == [max(LENGTHS)]
