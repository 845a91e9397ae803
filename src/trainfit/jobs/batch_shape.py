"""The shape of a job's batches, found by collating a few samples: what a batch is without its data.

A batch may be any nesting of lists, tuples and dicts of tensors. Its leaves travel between
processes as a plain mapping, and the planner's child builds batches of any size from the shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from trainfit.core.errors import BadInput

COUNT = "count"
"""Leaf that says which samples of a micro-batch count; one without any has a stand-in."""
_ROWS, _WIDTH = "rows", "width"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchShape:
    """The nesting of a batch, and the shape and dtype of each of its tensors."""

    structure: str
    """The nesting as JSON, in the form of torch's pytree."""
    leaves: tuple[tuple[tuple[int | str, ...], str], ...]
    """Sizes and dtype; "rows" and "width" stand for the samples and for the longest of them."""

    def flatten(self, batch: Any, count: int) -> dict[str, Tensor]:
        """Return the tensors of a batch by name, with a flag for each sample: the first `count`."""
        counted = torch.arange(max(count, 1)) < count
        return {str(at): leaf for at, leaf in enumerate(_tensors(batch)[0])} | {COUNT: counted}

    def restore(self, leaves: Mapping[str, Tensor]) -> Any:
        """Return the batch that `flatten` took apart."""
        spec = _pytree.treespec_loads(self.structure)
        return _pytree.tree_unflatten([leaves[str(at)] for at in range(len(self.leaves))], spec)

    def make(self, rows: int, width: int) -> dict[str, Tensor]:
        """Return a batch of zeros with `rows` samples, each as long as `width`."""
        sizes: dict[int | str, int | str] = {_ROWS: rows, _WIDTH: width}
        made = {
            str(at): torch.zeros([int(sizes.get(n, n)) for n in shape], dtype=getattr(torch, dtype))
            for at, (shape, dtype) in enumerate(self.leaves)
        }
        return made | {COUNT: torch.ones(rows, dtype=torch.bool)}


def find_shape(
    collate: Callable[[list[Any]], Any], data: Any, lengths: Sequence[int]
) -> BatchShape:
    """Collate one and two samples, and a longer one, and see which sizes change."""
    short = min(range(len(lengths)), key=lambda at: lengths[at])
    long = max(range(len(lengths)), key=lambda at: lengths[at])
    one, structure = _tensors(collate([data[short]]))
    two, _ = _tensors(collate([data[short], data[short]]))
    other, _ = _tensors(collate([data[long]]))
    leaves = []
    for a, b, c in zip(one, two, other, strict=True):
        if a.dim() == 0:
            raise BadInput(
                "collate gives a tensor without a dimension", "give one value per sample"
            )
        sizes: list[int | str] = []
        for at, n in enumerate(a.shape):
            if b.shape[at] != n:
                sizes.append(_ROWS)
            else:
                sizes.append(_WIDTH if c.shape[at] != n else n)
        leaves.append((tuple(sizes), str(a.dtype).removeprefix("torch.")))
    return BatchShape(structure=structure, leaves=tuple(leaves))


def _tensors(batch: Any) -> tuple[list[Tensor], str]:
    leaves, spec = _pytree.tree_flatten(batch)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise BadInput(
                f"collate gives a {type(leaf).__name__}", "give tensors, in lists, tuples or dicts"
            )
    return leaves, _pytree.treespec_dumps(spec)
