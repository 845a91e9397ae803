"""Tokens on the training device: the batches are those that are collated on the host."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfit.core.errors import BadInput
from trainfit.data.batches import DeviceTokens, collate_packed, collate_padded, device_tokens
from trainfit.data.tokens import Tokens, from_lists
from trainfit.jobs.classification import ClassifierTask

PAD = 7


def held(tokens: Tokens) -> DeviceTokens:
    there = device_tokens(tokens, torch.device("cpu"), PAD)
    assert there is not None
    return there


@st.composite
def token_sets(draw: st.DrawFn) -> Tokens:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    numbers = np.random.default_rng(draw(st.integers(0, 99)))
    ids = [numbers.integers(10, 99, length).tolist() for length in lengths]
    kind = draw(st.sampled_from(["class", "labels", "number"]))
    shape = (len(ids), 3) if kind == "labels" else (len(ids),)
    labels = numbers.integers(0, 3, shape)
    tokens = from_lists(ids, labels.tolist())
    flat = int(tokens.ids.size)
    return replace(
        tokens,
        labels=labels.astype(np.int64 if kind == "class" else np.float32),
        types=numbers.integers(0, 2, flat).astype(np.uint8) if draw(st.booleans()) else None,
        tags=numbers.integers(-1, 4, flat).astype(np.int32) if draw(st.booleans()) else None,
    )


def alike(there: dict[str, torch.Tensor], here: dict[str, torch.Tensor]) -> None:
    assert there.keys() == here.keys()
    for name, tensor in here.items():
        assert there[name].dtype == tensor.dtype, name
        torch.testing.assert_close(there[name], tensor, rtol=0, atol=0, equal_nan=True)


@settings(deadline=None, max_examples=60)
@given(token_sets(), st.data())
def test_batches_are_those_of_the_host(tokens: Tokens, data: st.DataObject) -> None:
    part = tokens.subset(data.draw(st.permutations(range(len(tokens)))))
    count = data.draw(st.integers(0, len(part)))
    chosen = list(range(len(part)))[:count]
    spare = data.draw(st.integers(0, 5))
    used = int(part.lengths[chosen].sum())
    slots, width = max(1, count + spare), max(1, used + spare)
    there = held(part)
    alike(there.packed(chosen, width, slots), collate_packed(part, chosen, width, slots, PAD))
    widest = max(1, int(part.lengths[chosen].max(initial=0)) + spare)
    alike(there.padded(chosen, slots, widest), collate_padded(part, chosen, slots, widest, PAD))


def test_what_does_not_fit_a_row_is_refused() -> None:
    there = held(from_lists([[1, 2, 3], [4]], [0, 1]))
    with pytest.raises(BadInput, match="2 sequences of 4 tokens for a row of 3"):
        there.packed([0, 1], 3, 2)
    with pytest.raises(BadInput, match="up to 3 tokens for 1 rows of 2"):
        there.padded([0], 1, 2)


def test_a_task_collates_there_what_it_collates_here() -> None:
    tokens = from_lists([[5, 6], [7], [8, 9, 10]], [0, 1, 1])
    task = ClassifierTask(
        lambda: pytest.fail("no model is needed"),
        tokens,
        tokens,
        effective_batch=2,
        class_weights=[1.0, 3.0],
    )
    there = task.collate_there(torch.device("cpu"))
    assert there is not None
    for slots in (None, 4):
        here, found = task.collate([2, 0], 3, 8, slots), there([2, 0], 3, 8, slots)
        assert found.pop("max_seqlen", None) == here.pop("max_seqlen", None)
        alike(found, here)
