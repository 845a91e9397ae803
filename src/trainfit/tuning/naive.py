"""The naive baseline of the ladder, which no setting of trainfit can ask for.

`trial` is a factory of trials around another one. It undoes what the engine always does: fused
attention kernels, grouping by length, and gradients freed after a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainfit.core import codec
from trainfit.core.errors import BadInput
from trainfit.core.plan_records import Plan, TaskSpec
from trainfit.core.records import TrainTask
from trainfit.kernels.supported import use_liger
from trainfit.packing import MicroBatch
from trainfit.packing.cut_ladder import PaddedCut
from trainfit.packing.steps import IntArray
from trainfit.tuning.rungs import Naive
from trainfit.tuning.trial import Setup, build
from trainfit.tuning.tuned_cache import TrialCandidate


def trial(plan: Plan, *, inner: dict[str, Any], naive: dict[str, Any]) -> Setup:
    """Run of the factory `inner` by the plan, with the naive habits that are asked for."""
    asked = codec.decode(Naive, naive)
    spec = codec.decode(TaskSpec, inner)
    setup = build(TrialCandidate(settings={}, plan=plan, task=spec))
    settings = setup.settings
    if asked.shuffled:
        sequences = len(setup.task.steps(0)[0])
        longest = max(map(int, setup.task.lengths()))
        settings = replace(settings, cuts=(ShuffledCut.of(sequences, plan.batch_size, longest),))

    @contextmanager
    def around() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(setup.around())
            if asked.eager:
                stack.enter_context(eager_attention())
            yield

    return Setup(NaiveTask(setup.task, asked), settings, setup.runtime, around)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShuffledCut(PaddedCut):
    """Batches of random sequences, each padded to its longest."""

    @classmethod
    def of(cls, sequences: int, batch: int, longest: int) -> Self:
        """Cut of a step of `sequences` sequences."""
        full, rest = divmod(sequences, min(batch, sequences))
        rows = (min(batch, sequences),) * full + ((rest,) if rest else ())
        return cls(tokens=rows[0] * longest, shapes=((rows[0], longest),), rows=rows)

    def cut(self, lengths: IntArray, part: IntArray) -> list[MicroBatch]:
        """Shuffle a step, which comes sorted by length, and split it into micro-batches."""
        mixed = np.random.default_rng(int(part[0])).permutation(part)
        found = []
        for start in range(0, len(mixed), self.rows[0]):
            chosen = mixed[start : start + self.rows[0]]
            values = lengths[chosen]
            found.append(
                MicroBatch(
                    sequences=tuple(chosen.tolist()),
                    tokens=int(values.sum()),
                    rows=len(chosen),
                    width=int(values.max()),
                )
            )
        return found


class NaiveTask:
    """A task with its steps and its gradients handled naively."""

    def __init__(self, inner: TrainTask, naive: Naive) -> None:
        self._build, self.lengths = inner.build_model, inner.lengths
        self.weight, self.collate, self.evaluate = inner.weight, inner.collate, inner.evaluate
        self._loss, self._naive = inner.loss, naive
        self._zeros: list[Tensor] = []
        steps = inner.steps(0)
        self._steps = _shuffled(steps, len(inner.lengths())) if naive.shuffled else steps

    def build_model(self) -> nn.Module:
        """Build the task's model, with Liger's layers where they are asked for."""
        model = self._build()
        if self._naive.liger:
            _use_liger(model)
        return model

    def steps(self, epoch: int) -> Sequence[Sequence[int]]:
        """Steps of an epoch: the same in each, or short slices in turn."""
        size = self._naive.epoch_steps
        if size is None:
            return self._steps
        start = epoch * size % max(1, len(self._steps) - size + 1)
        return self._steps[start : start + size]

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Loss of the task; where gradients are kept, a step begins by zeroing them."""
        if self._naive.zeroed:
            self._zero(model)
        return self._loss(model, batch)

    def _zero(self, model: nn.Module) -> None:
        """Zero kept gradients at the start of a step, as zero_grad(set_to_none=False) does."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if any(parameter.grad is not None for parameter in trained):
            return  # in the middle of a step
        if self._zeros:
            torch._foreach_zero_(self._zeros)
        else:
            self._zeros = [torch.zeros_like(parameter) for parameter in trained]
        for parameter, gradient in zip(trained, self._zeros, strict=True):
            parameter.grad = gradient


def _use_liger(model: nn.Module) -> None:
    """Replace layers of the transformers model inside `model` by Liger's."""
    from transformers import PreTrainedModel

    found = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not found:
        raise BadInput("Liger is for transformers' models", "leave its kernels out")
    use_liger(found[0])


def _shuffled(steps: Sequence[Sequence[int]], sequences: int) -> list[list[int]]:
    """Steps of the same sizes, with sequences drawn at random."""
    order = np.random.default_rng(0).permutation(sequences)
    ends = np.cumsum([len(step) for step in steps])
    return [part.tolist() for part in np.split(order, ends)[: len(steps)]]


@contextmanager
def eager_attention() -> Iterator[None]:
    """Replace fused attention by three operations that write the scores to memory."""
    fused: Any = functional.scaled_dot_product_attention
    module: Any = functional
    module.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        module.scaled_dot_product_attention = fused


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute scaled_dot_product_attention by matrix products and a softmax."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (part.repeat_interleave(groups, dim=-3) for part in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-1, -2) * scale
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min)
    elif attn_mask is not None:
        scores = scores + attn_mask
    shares = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return functional.dropout(shares, dropout_p) @ value
