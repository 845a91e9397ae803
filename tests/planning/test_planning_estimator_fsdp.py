"""What no GPU holds alone is planned for several: the bytes that each need not hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from trainfit.core.plan_records import MemoryEstimate
from trainfit.hardware.model_shapes import model_shape, sizes_of
from trainfit.planning.bounds import count_weights
from trainfit.planning.estimator.estimate import GIB
from trainfit.planning.sharding import room_gained

ALONE = MemoryEstimate(
    weights_gib=12.0,
    gradients_gib=12.0,
    optimizer_gib=24.0,
    activations_gib=2.0,
    workspace_gib=0.5,
    peak_allocated_gib=50.0,
    peak_reserved_gib=51.0,
    capacity_gib=40.0,
    fits=False,
    error_percent=2.0,
)


def test_two_ranks_hold_half_of_the_weights_and_of_the_state() -> None:
    """Of 36 GiB 18 are elsewhere, and two of 24 blocks, 1 GiB, are fetched whole."""
    assert room_gained(ALONE, layers=24, ranks=2) == 17 * GIB
    assert room_gained(ALONE, layers=24, ranks=4) == 26 * GIB


def test_a_model_of_one_block_is_whole_while_it_is_computed() -> None:
    assert room_gained(ALONE, layers=1, ranks=2) == 6 * GIB
    assert room_gained(replace(ALONE, optimizer_gib=0.0), layers=1, ranks=2) == -6 * GIB


def test_weights_outside_of_the_blocks_are_whole_through_a_step() -> None:
    """An embedding of 6 GiB, which the root of the model keeps, and two of 24 blocks of 6 GiB."""
    assert room_gained(ALONE, 24, 2, rest_gib=6.0) == (18 - 6.5) * GIB
    assert room_gained(ALONE, 24, 2, rest_gib=99.0) == (18 - 12) * GIB


def test_one_rank_takes_what_was_measured_more_with_shards() -> None:
    """BERT-base on an H200: copies of the embedding and of blocks, beside the shards."""
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-18-one-rank-h200.json"
    runs = json.loads(path.read_text())["records"][0]["runs"]
    whole, shards = ([r["peak_gib"] for r in runs if r["way"] == w] for w in ("whole", "sharded"))
    sizes = sizes_of(model_shape("bert-base").config)
    assert sizes is not None
    memory = replace(ALONE, weights_gib=count_weights(sizes) * 4 / GIB, optimizer_gib=0.0)
    rest = 4 * sizes.vocabulary * sizes.hidden / GIB
    predicted = -room_gained(memory, sizes.layers, 1, rest) / GIB
    assert max(shards) - max(whole) <= predicted <= 1.5 * (max(shards) - max(whole))


@pytest.mark.parametrize("layers", [1, 2, 12, 48])
def test_more_ranks_never_gain_less(layers: int) -> None:
    gained = [room_gained(ALONE, layers, ranks) for ranks in (1, 2, 4, 8, 64)]
    assert gained == sorted(gained)
    assert gained[0] == int(-12 * GIB * min(1, 2 / layers))  # copies of two blocks
    assert gained[-1] < 36 * GIB
