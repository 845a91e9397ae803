"""AdamW's moments where GPU memory is short: in fewer bytes, or in the host's memory.

Fewer bytes: bfloat16, or one byte and a scale per block. The weights stay in float32, and
`kernels.fused_ops` makes the updates.

On the host all weights' moments lie end to end in pinned memory. An update takes them in buckets:
while one is updated, the next comes in and the one before goes back, each on a stream of its own.
Two slots on the GPU are all the memory that this takes there. The kernels and numbers are those of
moments that stay on the GPU. Nothing is allocated once an update has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from trainfit.core.errors import BadInput
from trainfit.engine.memory_errors import retried
from trainfit.engine.parallel import local
from trainfit.kernels.fused_ops import BLOCK, LEAST, adamw_8bit_, adamw_bf16_, laid_out
from trainfit.kernels.saved_on_host import check_free, host_fetch_, host_store_, host_zeros, pin

Moments = Literal["bf16", "8bit"]
SMALL: dict[str, Moments] = {"adamw_bf16": "bf16", "adamw_8bit": "8bit"}
"""Moments by the optimizer's name in a configuration."""
CODES = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
"""State of a weight whose moments are codes."""


class Piece(NamedTuple):
    """A weight of this rank, or a part of it, with all that its update reads and writes."""

    weight: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    number: int
    """Place of the weight among all that are trained."""
    start: int = 0
    """First element of the part."""


class SmallAdamW(torch.optim.Optimizer):
    """AdamW with small moments; the engine's `update_once` calls its kernels."""

    def __init__(self, groups: list[dict[str, Any]], moments: Moments, **options: Any) -> None:
        """Take torch's groups and AdamW's lr, betas and eps."""
        super().__init__(groups, {"weight_decay": 0.0, "fused": True, "moments": moments} | options)
        odd = {p.dtype for group in self.param_groups for p in group["params"]} - {torch.float32}
        if odd:
            raise BadInput(
                f"the small moments of AdamW are for float32 weights, not {odd.pop()}",
                "set optimization.optimizer=adamw_fused",
            )

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Update all weights that have a gradient."""
        from trainfit.engine.step import update_once

        where = self.param_groups[0]["params"][0].device
        update_once(self, torch.ones((), dtype=torch.bool, device=where))


def small_moments(parameter: Tensor, moments: Moments) -> dict[str, Tensor]:
    """Make the moments of a weight, all zero; in its own layout, sharded where it is."""
    small = local(parameter).numel() < LEAST
    if moments == "bf16" or small:
        dtype = torch.float32 if moments == "8bit" else torch.bfloat16
        return {
            name: torch.zeros_like(parameter, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")
        }
    blocks = -(-parameter.numel() // BLOCK)
    return {
        name: torch.zeros(blocks, device=parameter.device)
        if name.endswith("_scale")
        else torch.zeros_like(parameter, dtype=torch.uint8)
        for name in CODES
    }


def launch(
    pieces: list[Piece], counts: list[Tensor], group: dict[str, Any], found_inf: Tensor
) -> None:
    """Update pieces of one group by a fused kernel; `counts` are their steps with this one."""
    beta1, beta2 = group["betas"]
    weights, gradients, states, numbers, starts = map(list, zip(*pieces, strict=True))
    if group.get("moments") is None:
        torch._fused_adamw_(
            weights,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            counts,
            found_inf=found_inf,
            beta1=beta1,
            beta2=beta2,
            **{name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")},
        )
        return
    rate = group["lr"]
    if not isinstance(rate, Tensor):
        rate = torch.full((), rate, device=found_inf.device)
    taken = (torch.stack(counts), rate, found_inf)
    fixed = (beta1, beta2, group["eps"], group["weight_decay"])
    if "exp_avg_scale" in states[0]:
        moments = [[state[name] for state in states] for name in CODES]
        adamw_8bit_(weights, gradients, *moments, *taken, *fixed)
    else:
        moments = [[state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")]
        adamw_bf16_(weights, gradients, *moments, numbers, starts, *taken, *fixed)


# ── on the host ─────────────────────────────────────────────────────────────────────────────────

BUCKET = 8 * 2**20
"""Elements of a bucket: 32 MiB of each moment in float32, a millisecond on PCIe."""
_ALIGNED = 64
"""Weights begin at multiples of this, as kernels that read 16 bytes at a time like it."""
_FEWEST = 8
"""Buckets that few moments are cut into, so that the slots take less than the moments would."""
NAMES = ("exp_avg", "exp_avg_sq")


@dataclass(slots=True)
class _Part:
    """Elements of a weight that lie in a bucket."""

    parameter: Tensor
    number: int
    start: int
    length: int
    offset: int
    """Place in the bucket."""


@dataclass(slots=True)
class _MomentBucket:
    """A range of the moments, and the weights in it."""

    first: int
    length: int
    parts: list[_Part]


class HostMoments:
    """Moments of an optimizer's weights in the host's memory."""

    def __init__(self, groups: list[dict[str, Any]], dtype: torch.dtype) -> None:
        """Make moments of zeros, and the slots on the weights' device."""
        first = groups[0]["params"][0].detach()
        self.device: torch.device = first.device
        self.places: dict[Tensor, int] = {}
        weights = sum(p.numel() for group in groups for p in group["params"])
        self.bucket = min(BUCKET, _aligned(-(-weights // _FEWEST)))
        self.buckets = list(self._cut(groups))
        total = max((b.first + b.length for group in self.buckets for b in group), default=0)
        if first.is_cuda:
            check_free(total * dtype.itemsize * len(NAMES))
        self.flat = {name: host_zeros(first, total, dtype) for name in NAMES}
        if first.is_cuda:
            pin(list(self.flat.values()), self)
        most = max((b.length for group in self.buckets for b in group), default=0)
        self.slots: list[dict[str, Tensor]] = [
            {name: torch.empty(most, dtype=dtype, device=self.device) for name in NAMES}
            for _ in range(2)
        ]
        self._queues = _Queues(self.device)

    def _cut(self, groups: list[dict[str, Any]]) -> Iterator[list[_MomentBucket]]:
        """Lay out the weights end to end, and cut them into buckets, group by group."""
        place = number = 0
        for group in groups:
            buckets = [_MomentBucket(place, 0, [])]
            for parameter in group["params"]:
                self.places[parameter] = place
                start = 0
                while start < parameter.numel():
                    last = buckets[-1]
                    length = min(parameter.numel() - start, self.bucket - last.length)
                    last.parts.append(_Part(parameter, number, start, length, last.length))
                    last.length += _aligned(length)
                    start, place = start + length, last.first + last.length
                    if last.length >= self.bucket:
                        buckets.append(_MomentBucket(place, 0, []))
                number += 1
            yield [bucket for bucket in buckets if bucket.parts]

    def of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Moments of a weight, as its optimizer's state holds them."""
        place, shape = self.places[parameter], (parameter.shape, parameter.stride())
        return {name: flat.as_strided(*shape, place) for name, flat in self.flat.items()}

    def update(self, group: int, work: Callable[[list[Piece], list[Tensor]], None]) -> None:
        """Have `work` update the weights of a group that have a gradient, bucket by bucket."""
        self._queues.begin()
        for turn, bucket in enumerate(self.buckets[group]):
            at = turn % 2
            slot = self.slots[at]
            with self._queues.coming(at):
                retried(partial(self._copy, bucket, slot, fetch=True))
            self._queues.came(at)
            parts = [part for part in bucket.parts if part.parameter.grad is not None]
            if parts:
                pieces = retried(partial(_pieces, parts, slot))
                work(pieces, [part.parameter for part in parts])
            with self._queues.going(at):
                retried(partial(self._copy, bucket, slot, fetch=False))
            self._queues.gone(at)
        self._queues.end()

    def _copy(self, bucket: _MomentBucket, slot: dict[str, Tensor], *, fetch: bool) -> None:
        """Copy a bucket into a slot, or back."""
        for name, flat in self.flat.items():
            there = flat[bucket.first : bucket.first + bucket.length]
            here = slot[name][: bucket.length]
            if fetch:
                host_fetch_(here, there)
            else:
                host_store_(there, here)

    def settle(self) -> None:
        """Wait until the moments of the last update are in the host's memory."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGNED) * _ALIGNED


def _pieces(parts: list[_Part], slot: dict[str, Tensor]) -> list[Piece]:
    return [_piece(part, slot) for part in parts]


def _piece(part: _Part, slot: dict[str, Tensor]) -> Piece:
    range_ = slice(part.offset, part.offset + part.length)
    own = slice(part.start, part.start + part.length)
    weight, gradient = part.parameter, cast(Tensor, part.parameter.grad)
    return Piece(
        _flat(weight)[own],
        _flat(laid_out(gradient, weight))[own],
        {name: moments[range_] for name, moments in slot.items()},
        part.number,
        part.start,
    )


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,))


class _Queues:
    """Two streams for copies, and the events by which they and the updates wait for each other."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._device = device
        if self._on_gpu:
            self._in, self._out = (
                torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )
            self._loaded, self._updated, self._stored = (
                [torch.cuda.Event(), torch.cuda.Event()]  # type: ignore[no-untyped-call]
                for _ in range(3)
            )

    def begin(self) -> None:
        """Let copies begin after the work so far."""
        if self._on_gpu:
            self._in.wait_stream(torch.cuda.current_stream(self._device))

    def coming(self, slot: int) -> AbstractContextManager[object]:
        """Fill a slot in the block, once it is free."""
        if not self._on_gpu:
            return nullcontext()
        self._in.wait_event(self._stored[slot])
        return torch.cuda.stream(self._in)

    def came(self, slot: int) -> None:
        """Let the update wait for the slot."""
        if self._on_gpu:
            self._loaded[slot].record(self._in)
            torch.cuda.current_stream(self._device).wait_event(self._loaded[slot])

    def going(self, slot: int) -> AbstractContextManager[object]:
        """Empty a slot in the block, once it is updated."""
        if not self._on_gpu:
            return nullcontext()
        self._updated[slot].record(torch.cuda.current_stream(self._device))
        self._out.wait_event(self._updated[slot])
        return torch.cuda.stream(self._out)

    def gone(self, slot: int) -> None:
        """Note that the slot is free after the copies so far."""
        if self._on_gpu:
            self._stored[slot].record(self._out)

    def end(self) -> None:
        """Let later work wait for the copies."""
        if self._on_gpu:
            torch.cuda.current_stream(self._device).wait_stream(self._out)
