"""Classification as the engine's TrainTask: steps, loss and scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from trainfit.conf.schema import EncoderModel
from trainfit.core.plan_records import Plan
from trainfit.data.batches import (
    Batch,
    Collate,
    collate_packed,
    collate_padded,
    device_tokens,
    send,
)
from trainfit.data.tokens import IGNORED, IntArray, Tokens
from trainfit.engine.evaluation import collect, own_batches
from trainfit.engine.loop_settings import LoopSettings, loop_settings
from trainfit.engine.recovery import Parts
from trainfit.engine.setup import describe
from trainfit.jobs.models.backbone import PackedPath, drops_padding, packed_path
from trainfit.jobs.models.classifier import EncoderClassifier, Head, build_classifier
from trainfit.jobs.models.classifier_settings import settings_from
from trainfit.jobs.targets import OneClass, Outputs
from trainfit.measuring import flops
from trainfit.packing import PackedCut, deal_steps, ladder
from trainfit.packing.cut_ladder import MOST_SHAPES, quantize
from trainfit.packing.steps import divide_up, fit_packed_parts
from trainfit.runs.opening import AttentionKind, AttentionPath, RunSetup
from trainfit.runtime import eagerly

if TYPE_CHECKING:
    from trainfit.jobs.configuration import EncoderConfig


class ClassifierTask:
    """Labelled sequences, dealt into steps by length."""

    capturable = True

    def __init__(
        self,
        build: Callable[[], EncoderClassifier],
        train: Tokens,
        validation: Tokens,
        *,
        effective_batch: int,
        seed: int = 0,
        target: OneClass | None = None,
        class_weights: Sequence[float] | None = None,
        pad_id: int = 0,
        longest: int | None = None,
    ) -> None:
        """`target` None is one class per sequence; `class_weights` None are equal ones.

        `longest` is the longest sequence of all folds, for which kernels are shaped; None: of this.
        """
        self._build = build
        self._target = target or OneClass()
        self._train = replace(train, labels=self._target.to_learn(train.labels))
        self._validation = validation
        self._effective_batch, self._seed, self._pad_id = effective_batch, seed, pad_id
        self._class_weights = None if class_weights is None else np.asarray(class_weights)
        self._weights = self._target.weights(train, self._class_weights)
        self._longest = longest or (int(train.lengths.max()) if len(train) else None)

    def build_model(self) -> nn.Module:
        """Build the model, on the CPU or on the device that it trains on."""
        return self._build()

    def lengths(self) -> Sequence[int]:
        """Number of tokens of each training sequence."""
        lengths: list[int] = self._train.lengths.tolist()
        return lengths

    def steps(self, epoch: int) -> Sequence[Sequence[int]]:
        """Deal an epoch into full batches of nearly the same number of tokens."""
        dealt = deal_steps(self._train.lengths, self._effective_batch, self._seed, epoch)
        return [step.tolist() for step in dealt]

    def weight(self, sequences: Sequence[int]) -> float:
        """Number of sequences or of words with tags, or the sum of their classes' weights."""
        # Words without any token leave a sentence nothing to learn.
        return float(self._weights[list(sequences)].sum()) or 1.0

    def collate(
        self, sequences: Sequence[int], rows: int, width: int, slots: int | None
    ) -> Mapping[str, Any]:
        """Make a packed micro-batch with `slots`, else a padded one."""
        if slots is None:
            padded = collate_padded(self._train, sequences, rows, width, self._pad_id)
            return padded | self._beside
        packed = collate_packed(self._train, sequences, width, slots, self._pad_id)
        # Without max_seqlen the kernel assumes sequences as long as the row, and is much slower.
        return packed | {"max_seqlen": self._longest} | self._beside

    def collate_there(self, device: torch.device) -> Collate | None:
        """Copy the tokens to a device and collate there; None where they are too large for it."""
        held = device_tokens(self._train, device, self._pad_id)
        beside = {name: tensor.to(device) for name, tensor in self._beside.items()}

        def collate(sequences: Sequence[int], rows: int, width: int, slots: int | None) -> Batch:
            assert held is not None
            if slots is None:
                return held.padded(sequences, rows, width) | beside
            packed: dict[str, Any] = held.packed(sequences, width, slots) | beside
            return packed | {"max_seqlen": self._longest}

        return None if held is None else collate

    @property
    def _beside(self) -> dict[str, Tensor]:
        """The weights of the classes, where they have some."""
        if self._class_weights is None:
            return {}
        return {"class_weights": torch.from_numpy(self._class_weights).float()}

    def loss(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Sum the loss of a micro-batch; `weight` is computed from labels on the CPU."""
        inputs = dict(batch)
        labels, weights = inputs.pop("labels"), inputs.pop("class_weights", None)
        return self._target.loss(model(**inputs), labels, weights)

    def evaluate(self, model: nn.Module, batch_size: int) -> dict[str, float]:
        found = self.outputs(model, batch_size)
        return self._target.evaluate(self._validation.truth, found)

    def outputs(self, model: nn.Module, batch_size: int) -> Outputs:
        return predict(model, self._validation, batch_size, self._pad_id, self._target)


def ideal_seconds(model: EncoderModel, plan: Plan) -> Callable[[Sequence[int]], float] | None:
    """Return the time of a step at the GPUs' peak, for the MFU; None where it is not known."""
    dtype = flops.dtype_in_use(plan.precision, plan.runtime.tf32)
    peak = flops.peak_of([plan.gpu] * plan.ranks, dtype)
    if peak is None:
        return None
    method = plan.workload.method
    settings = settings_from(model, method=method, checkpointing="none", weights="random")
    with torch.device("meta"):
        encoder = build_classifier(settings).encoder
    return flops.ideal_seconds(flops.count_flops(encoder), peak)


def opening(parts: Parts, plan: Plan) -> RunSetup:
    """Record the settings in effect, with the attention that the model will really take."""
    return describe(parts, _attention(parts, plan.workload.max_length))


def _attention(parts: Parts, longest: int) -> AttentionPath | None:
    model = parts.model
    if isinstance(model, Head):
        return AttentionPath(kind="frozen")
    if not isinstance(model, EncoderClassifier):
        return None
    if not isinstance(parts.settings.cuts[0], PackedCut):
        return _on_padded_rows(model, parts.device)
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    precision = halves.get(parts.settings.precision)
    kernel, obstacle = packed_path(model.encoder, model.traits, precision, longest)
    dropout = model.traits.attention_dropout
    return AttentionPath(kind=_KINDS[kernel], dropout=dropout, obstacle=obstacle)


_KINDS: dict[PackedPath | None, AttentionKind] = {
    "varlen": "varlen",
    "varlen_efficient": "varlen_efficient",
    "softcapped": "softcap",
    "disentangled": "disentangled",
    None: "mask",
}
"""Kind of attention by the kernel for packed rows; a mask where there is none."""


def _on_padded_rows(model: EncoderClassifier, device: torch.device) -> AttentionPath | None:
    """Attention on padded rows; None where torch's SDPA is all there is to say."""
    if model.traits.own_attention:
        return AttentionPath(kind="own")
    if model.traits.softcap is not None:
        return AttentionPath(kind="products")
    plain = device.type == "cpu" and model.settings.attention == "auto"
    drops = plain and drops_padding(model.encoder, model.traits)
    return AttentionPath(kind="sdpa", drops_padding=True) if drops else None


def predict(
    model: nn.Module,
    tokens: Tokens,
    batch_size: int,
    pad_id: int = 0,
    target: OneClass | None = None,
) -> Outputs:
    """Probabilities of the classes, or a number, for each sequence or word, in the given order."""
    logits = in_batches(model, model, tokens, batch_size, pad_id)
    return (target or OneClass()).outputs(logits).numpy()


@torch.no_grad()
def in_batches(
    model: nn.Module,
    compute: Callable[..., Tensor],
    tokens: Tokens,
    batch_size: int,
    pad_id: int = 0,
    *,
    packed: bool | None = None,
) -> Tensor:
    """Apply `compute`, the model or a part of it, to each sequence, in the given order.

    Where words have tags, the outputs of the tokens that begin them are returned.

    Rows are packed where the device has a kernel for it, with no more tokens than `batch_size`
    sequences of the longest length have; all have one shape. Else sequences of similar length are
    padded together, in a few shapes. A compiled model runs eagerly, since they are not training's.
    """
    device = next(model.parameters()).device
    if packed is None:
        longest = int(tokens.lengths.max(initial=1))
        packed = isinstance(model, EncoderClassifier) and model.packs_here(longest)
    parts: list[Tensor] = []
    order: list[int] = []
    batches = (_packed if packed else _padded)(tokens, batch_size, pad_id, device)
    with eagerly(model):
        for number, counts in own_batches(len(batches)):
            chosen, make = batches[number]
            batch = make()
            inputs = {
                name: send(value, device) if isinstance(value, Tensor) else value
                for name, value in batch.items()
                if name != "labels"
            }
            found = compute(**inputs)
            if tokens.tags is None:
                found = found[: len(chosen)]
            else:
                begun = np.flatnonzero(batch["labels"].numpy() != IGNORED)
                found = found.flatten(0, 1)[send(torch.from_numpy(begun), device)]
            if counts:
                parts.append(found.double())
                order += chosen
    # Once, since each copy would make the device wait.
    outputs, owned = collect(len(batches), torch.cat(parts), torch.tensor(order))
    owners = owned.numpy()
    if tokens.tags is not None:
        owners = np.repeat(owners, tokens.labels[owners])
    return outputs[torch.from_numpy(np.argsort(owners, kind="stable"))]


Batches = list[tuple[Sequence[int], Callable[[], dict[str, Any]]]]
"""Sequences of each batch, and what makes its inputs; slots and rows beyond them are empty."""


def _padded(tokens: Tokens, batch_size: int, pad_id: int, device: torch.device) -> Batches:
    """Pad rows of similar length; the longest come first, so that memory runs out early or never.

    Rows for a GPU have a few widths, which can be captured; a CPU computes as little as possible.
    """
    order = _longest_first(tokens)
    rows = divide_up(order.size, divide_up(order.size, batch_size))
    firsts = tokens.lengths[order[::rows]]
    few = MOST_SHAPES if device.type == "cuda" else firsts.size
    _, widths = quantize(firsts, few)[-1]
    batches: Batches = []
    for number, first in enumerate(firsts.tolist()):
        chosen = order[number * rows : (number + 1) * rows].tolist()
        width = min(width for width in widths if width >= first)
        batches.append((chosen, partial(collate_padded, tokens, chosen, rows, width, pad_id)))
    return batches


def _packed(tokens: Tokens, batch_size: int, pad_id: int, _device: torch.device) -> Batches:
    """Pack rows of one width, with one number of slots."""
    order = _longest_first(tokens)
    longest = int(tokens.lengths[order[0]])
    cut = fit_packed_parts([tokens.lengths[order].tolist()], longest, batch_size * longest)

    def make(chosen: Sequence[int]) -> dict[str, Any]:
        inputs = collate_packed(tokens, chosen, cut.tokens, cut.slots, pad_id)
        return {**inputs, "max_seqlen": longest}

    return [
        (batch.sequences, partial(make, batch.sequences))
        for batch in cut.cut(tokens.lengths, order)
    ]


def _longest_first(tokens: Tokens) -> IntArray:
    order: IntArray = np.argsort(tokens.lengths, kind="stable")[::-1]
    return order


# ── settings of the loop and of the model ─────────────────────────────────────────────────────────


_SLACK = 1.02
"""Factor on the planned tokens, since steps dealt with another seed are a little larger."""
_SECOND_SHAPE = 0.03
"""Share of the time that a second shape of packed rows saves, about."""


def model_decisions(plan: Plan, asked: EncoderModel) -> dict[str, Any]:
    """The fields of ClassifierSettings that the plan decides."""
    decided: dict[str, Any] = {
        "method": plan.workload.method,
        "checkpointing": plan.gradient_checkpointing,
        "dtype": plan.weights_dtype,
        "quantization": plan.quantization,
        "liger": plan.liger,
    }
    if not plan.packed:
        if plan.gpu is not None:  # nor does an evaluation take packed rows
            decided["attention"] = "masked"
    elif asked.attention_dropout is None:  # it costs time, so that packed rows have it on request
        decided["attention_dropout"] = 0.0
    return decided


def encoder_settings(
    config: EncoderConfig,
    plan: Plan,
    folds: Sequence[IntArray],
    *,
    device: str,
    ranks: int,
    target: OneClass | None = None,
) -> LoopSettings:
    """Return the settings of the first fold; all folds, of these lengths, share their cuts."""
    first, *others = folds
    cuts = ladder(
        first,
        plan.effective_batch_size,
        _cap(config, plan, max(int(lengths.max()) for lengths in folds)),
        padded=not plan.packed,
        ranks=ranks,
        seed=config.seed,
        at_least=plan.gradient_accumulation_steps,
        at_most=plan.gradient_accumulation_steps,
        folds=others,
    )
    seconds = (plan.time.job_seconds if plan.time else None) or 0.0
    compiling = plan.time.stages.get("compile", 0.0) if plan.time else 0.0
    if plan.compile and seconds * _SECOND_SHAPE <= compiling:
        cuts = tuple(
            replace(cut, budgets=cut.budgets[-1:]) if isinstance(cut, PackedCut) else cut
            for cut in cuts
        )  # each shape is compiled by itself
    in_folds = config.cv.folds is not None  # their checkpoints are deleted after their export
    target = target or OneClass()
    return loop_settings(
        config,
        plan,
        cuts,
        device=device,
        metric=target.metric,
        greater_is_better=target.greater_is_better,
        save_last=not in_folds,
    )


def _cap(config: EncoderConfig, plan: Plan, longest: int) -> int:
    """Most tokens of a micro-batch: as planned, and never over a batch_size that was set.

    Where both batch_size and gradient_accumulation_steps are set, the run keeps to both.
    """
    planned = math.ceil(plan.micro_batch_tokens * _SLACK)
    if config.training.batch_size != "auto":
        asked = plan.batch_size * config.data.max_length
        free = config.optimization.gradient_accumulation_steps == "auto"
        planned = min(asked, planned) if free else asked
    return max(longest, planned)
