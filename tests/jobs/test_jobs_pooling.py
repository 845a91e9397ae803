"""Poolers against plain loops over single sequences, for padded and packed rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from trainfit.core.errors import BadInput
from trainfit.jobs.models.classifier import KeyValueProbePooler, QueryProbePooler, build_pooler
from trainfit.jobs.models.classifier_settings import Pooling
from trainfit.kernels.attention import Layout, lay_out

WIDTH = 12
SIDES = ("right", "left")


def padded(sequences: list[Tensor], side: str) -> tuple[Tensor, Layout]:
    """Rows with a large value in the padding, which must never show."""
    width = max(len(s) for s in sequences)
    hidden = torch.full((len(sequences), width, WIDTH), 1e3, dtype=torch.float64)
    mask = torch.zeros(len(sequences), width, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        place = slice(0, len(sequence)) if side == "right" else slice(width - len(sequence), None)
        hidden[row, place] = sequence
        mask[row, place] = 1
    return hidden, lay_out(mask, attention_mask=mask)


def packed(sequences: list[Tensor], filler: int) -> tuple[Tensor, Layout]:
    tail = torch.full((filler, WIDTH), 1e3, dtype=torch.float64)
    hidden = torch.cat([*sequences, tail])[None]
    starts = torch.tensor([0, *(len(s) for s in sequences)]).cumsum(0)
    return hidden, lay_out(hidden[..., 0], cu_seqlens=starts.int())


def query_probe(pooler: nn.Module, sequence: Tensor) -> Tensor:
    assert isinstance(pooler, QueryProbePooler)
    width = WIDTH // pooler.heads
    heads = []
    for head in range(pooler.heads):
        part = slice(head * width, (head + 1) * width)
        keys, values = pooler.key(sequence)[:, part], pooler.value(sequence)[:, part]
        heads.append(torch.softmax(keys @ pooler.probe[head] / width**0.5, 0) @ values)
    return pooler.output(torch.cat(heads))


def key_value_probe(pooler: nn.Module, sequence: Tensor) -> Tensor:
    assert isinstance(pooler, KeyValueProbePooler)
    width = WIDTH // pooler.heads
    total = torch.zeros(WIDTH, dtype=torch.float64)
    for token in sequence:
        query = pooler.query(token)
        for head in range(pooler.heads):
            part = slice(head * width, (head + 1) * width)
            shares = torch.softmax(pooler.keys[head] @ query[part] / width**0.5, 0)
            total[part] = total[part] + shares @ pooler.values[head]
    return pooler.output(total / len(sequence))


REFERENCES: dict[Pooling, Callable[[nn.Module, Tensor], Tensor]] = {
    "mean": lambda _, s: s.mean(0),
    "first": lambda _, s: s[:3].mean(0),
    "last": lambda _, s: s[-3:].mean(0),
    "max": lambda _, s: s.max(0).values,
    "attention_query": query_probe,
    "attention_kv": key_value_probe,
}


@pytest.mark.parametrize("pooling", REFERENCES)
@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    filler=st.integers(0, 4),
    seed=st.integers(0, 99),
)
def test_each_pooler_is_a_loop(
    pooling: Pooling, lengths: list[int], filler: int, seed: int
) -> None:
    torch.manual_seed(seed)
    pooler = build_pooler(pooling, WIDTH, 3).double()
    sequences = [torch.randn(n, WIDTH, dtype=torch.float64) for n in lengths]
    wanted = torch.stack([REFERENCES[pooling](pooler, s) for s in sequences])
    for rows in (*(padded(sequences, side) for side in SIDES), packed(sequences, filler)):
        torch.testing.assert_close(pooler(*rows), wanted)


@pytest.mark.parametrize("pooling", REFERENCES)
def test_no_mask_means_no_padding(pooling: Pooling) -> None:
    pooler = build_pooler(pooling, WIDTH, 3).double()
    hidden = torch.randn(4, 7, WIDTH, dtype=torch.float64)
    ones = torch.ones(4, 7)
    masked = pooler(hidden, lay_out(ones, attention_mask=ones))
    torch.testing.assert_close(pooler(hidden, lay_out(ones)), masked)


@pytest.mark.parametrize("pooling", REFERENCES)
def test_gradients_reach_the_sequence_and_nothing_else(pooling: Pooling) -> None:
    torch.manual_seed(0)
    pooler = build_pooler(pooling, WIDTH, 3).double()
    sequences = [torch.randn(n, WIDTH, dtype=torch.float64) for n in (4, 6)]
    hidden, layout = packed(sequences, 3)
    leaf = hidden.clone().requires_grad_()
    pooler(leaf, layout)[1].square().sum().backward()
    assert leaf.grad is not None
    assert leaf.grad[0, 4:10].any()
    assert not leaf.grad[0, :4].any()
    assert not leaf.grad[0, 10:].any()
    alone = sequences[1].clone().requires_grad_()
    REFERENCES[pooling](pooler, alone).square().sum().backward()
    torch.testing.assert_close(leaf.grad[0, 4:10], alone.grad)


def test_a_mean_of_bf16_is_summed_in_float32() -> None:
    hidden = torch.full((1, 500, WIDTH), 1.0).bfloat16()
    hidden[0, 0] = 2.0
    pooled = build_pooler("mean", WIDTH)(hidden, lay_out(hidden[..., 0]))
    torch.testing.assert_close(pooled, torch.full((1, WIDTH), 501 / 500))


def test_an_unknown_pooling_is_refused() -> None:
    with pytest.raises(BadInput, match="cls"):
        build_pooler("cls", WIDTH)  # type: ignore[arg-type]
