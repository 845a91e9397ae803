"""Random numbers in graphs that are computed again: their results are kept instead.

torch's partitioner, given a budget for activations, may draw a dropout's mask again in the backward
pass, and it is another one: the gradients are wrong without a word.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

LEAST_BUDGET = 1e-6
"""At a budget of 0 the partitioner would keep nothing at all, these results included."""


def keep_random(graph: fx.Graph) -> None:
    """Mark the results of random operations, attention with dropout too, as kept."""
    for node in graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
