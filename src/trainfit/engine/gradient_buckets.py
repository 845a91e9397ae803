"""Gradients of a replicated model, summed over ranks in flat buckets during the backward pass.

A rank that runs out of memory in its backward pass must not leave others waiting. So every rank
sums every bucket once per try, in one order, whatever happens to it: a rank that fails, or has no
sequences, adds zeros for the buckets that it did not reach. All ranks then vote, and sums of a try
that failed anywhere are dropped: nothing was applied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainfit.core.errors import RunFailed

T = TypeVar("T")
_BUCKET = 25 * 2**20
"""Bytes of a bucket, as of DistributedDataParallel: enough for the full rate of a link."""


@dataclass(slots=True)
class _Bucket:
    """Parameters whose gradients are summed at once, and the state of a try."""

    parameters: list[Tensor]
    views: dict[Tensor, Tensor] = field(default_factory=dict)
    flat: Tensor | None = None
    half: Tensor | None = None
    """Copy in the dtype of the sum, where that is another."""
    arrived: set[Tensor] = field(default_factory=set)
    """Parameters whose gradient is complete."""
    work: dist.Work | None = None

    def allocate(self) -> Tensor:
        """Give the flat gradient, zeros at first."""
        if self.flat is None:
            like = self.parameters[0]
            sizes = [parameter.numel() for parameter in self.parameters]
            self.flat = torch.zeros(sum(sizes), dtype=like.dtype, device=like.device)
            parts = zip(self.parameters, torch.split(self.flat, sizes), strict=True)
            self.views = {parameter: part.view_as(parameter) for parameter, part in parts}
        return self.flat

    def clear(self) -> None:
        """Drop everything of a try."""
        self.flat = self.half = self.work = None
        self.views = {}
        self.arrived = set()


class GradientBuckets:
    """Buckets of a model's trained parameters, the last of which get their gradients first.

    Memory is taken when a bucket's first gradient arrives, as it would be without buckets.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        dtype: torch.dtype | None = None,
        *,
        bucket_bytes: int = _BUCKET,
    ) -> None:
        """Watch the parameters; `dtype` is that of the sum where it differs from theirs."""
        self._parameters, self._dtype = tuple(parameters), dtype
        self._buckets = [_Bucket(part) for part in _divided(parameters, bucket_bytes)]
        self._owner = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._used: set[Tensor] = set()
        self._last = False
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._arrive)  # type: ignore[no-untyped-call]

    def watched(self, batches: Iterable[T], count: int) -> Iterator[T]:
        """Yield the `count` micro-batches of a try; buckets are summed during the last one."""
        for number, batch in enumerate(batches, start=1):
            self._last = number == count
            yield batch

    def sum_rest(self) -> tuple[bool, ...]:
        """Start the sums that are left; tells for each parameter if it got a gradient here."""
        self._last = False
        for bucket in self._buckets:
            if bucket.work is None:
                self._sum(bucket)
        return tuple(parameter in self._used for parameter in self._parameters)

    def finish(self, used: Sequence[bool]) -> None:
        """Wait for the sums, and make them the gradients of parameters that any rank used."""
        wanted = dict(zip(self._parameters, used, strict=True))
        for bucket in self._buckets:
            _wait(bucket)
            if bucket.half is not None and bucket.flat is not None:
                bucket.flat.copy_(bucket.half)
            for parameter in bucket.parameters:
                parameter.grad = bucket.views[parameter] if wanted[parameter] else None
            bucket.clear()
        self._used = set()

    def drop(self) -> None:
        """Wait for the sums of a try that failed, and forget them."""
        for bucket in self._buckets:
            _wait(bucket)
            bucket.clear()
        self._used = set()

    def _arrive(self, parameter: Tensor) -> None:
        bucket = self._owner[parameter]
        if bucket.work is not None:
            raise RunFailed(
                "a weight got a gradient after its sum over ranks had begun",
                "checkpoint activations with use_reentrant=False",
            )
        self._used.add(parameter)
        bucket.allocate()
        view = bucket.views[parameter]
        if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
            parameter.grad = view
        if self._last:
            bucket.arrived.add(parameter)
            self._sum_complete()

    def _sum_complete(self) -> None:
        """Start the sums of complete buckets, in order: the order is the same on all ranks."""
        for bucket in self._buckets:
            if bucket.work is None:
                if len(bucket.arrived) < len(bucket.parameters):
                    return
                self._sum(bucket)

    def _sum(self, bucket: _Bucket) -> None:
        summed = bucket.allocate()
        if self._dtype is not None and self._dtype != summed.dtype:
            summed = bucket.half = summed.to(self._dtype)
        bucket.work = dist.all_reduce(summed, async_op=True)


def _wait(bucket: _Bucket) -> None:
    if bucket.work is not None:
        bucket.work.wait()


def _divided(parameters: Sequence[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
    """Divide into buckets of one dtype and about that size, the last parameters first."""
    parts: list[list[Tensor]] = []
    size = 0
    for parameter in reversed(parameters):
        alike = parts and parts[-1][0].dtype == parameter.dtype
        alike = alike and parts[-1][0].device == parameter.device
        if not alike or size >= bucket_bytes:
            parts.append([])
            size = 0
        parts[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return parts
