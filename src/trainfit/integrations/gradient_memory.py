"""Gradients that graphs write to fixed memory, which the weights have while nobody else needs it.

Copying them out would read and write every gradient once more in each step. So the memory itself
is lent: it comes back when the script sets its gradients to None. Where gradients are accumulated,
zeroed in place or kept, they are copied from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

_ALIGNED = 64
"""Numbers to a multiple of which each gradient begins: kernels read several at once."""


class GradientMemory:
    """Memory for the gradients of some weights, one set for all graphs."""

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self._flat = _flat(weights)
        self.parts = _parts(self._flat, weights)
        """One tensor for each weight."""
        self._storage = self._flat.untyped_storage() if self._flat is not None else None
        self._lends = self._flat is not None
        self._own = self._holders()

    def run(
        self, replay: Callable[[], None], used: Sequence[bool], weights: Sequence[nn.Parameter]
    ) -> list[Tensor | None]:
        """Replay a backward pass, and return the gradients that it wrote."""
        before = None
        if self._flat is not None and self._held():
            self._lends = False
            self._move_out(weights)
            before = self._flat.clone() if self._held() else None
        replay()
        taken = [part for part, is_used in zip(self.parts, used, strict=True) if is_used]
        if self._lends:
            given = [part.detach() for part in taken]
        else:
            given = [torch.empty_like(part) for part in taken]
            torch._foreach_copy_(given, taken)
        if before is not None and self._flat is not None:
            self._flat.copy_(before)
        found = iter(given)
        return [next(found) if is_used else None for is_used in used]

    def _holders(self) -> int:
        if self._storage is None:
            return 0
        count: int = torch._C._storage_Use_Count(self._storage._cdata)
        return count

    def _held(self) -> bool:
        """Tell if somebody else has a gradient in this memory."""
        return self._holders() > self._own

    def _move_out(self, weights: Sequence[nn.Parameter]) -> None:
        """Give gradients of the weights that are still here memory of their own."""
        here = {part.data_ptr() for part in self.parts}
        for weight in weights:
            gradient = weight.grad
            if gradient is not None and gradient.data_ptr() in here:
                gradient.data = gradient.clone()


def _flat(weights: Sequence[nn.Parameter]) -> Tensor | None:
    """Make memory for all weights in one piece; None where they are of several kinds."""
    kinds = {(weight.dtype, weight.device) for weight in weights}
    if len(kinds) != 1 or not all(weight.is_contiguous() for weight in weights):
        return None
    return weights[0].detach().new_empty(sum(map(_room, weights)))


def _parts(flat: Tensor | None, weights: Sequence[nn.Parameter]) -> list[Tensor]:
    if flat is None:
        return [torch.empty_like(weight, requires_grad=False) for weight in weights]
    rooms = torch.split(flat, [_room(weight) for weight in weights])
    return [
        room[: weight.numel()].view(weight.shape)
        for room, weight in zip(rooms, weights, strict=True)
    ]


def _room(weight: nn.Parameter) -> int:
    return -(-weight.numel() // _ALIGNED) * _ALIGNED
