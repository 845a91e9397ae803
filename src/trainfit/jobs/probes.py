"""Models of the jobs on made-up data: steps for the planner, and runs for the tuner's trials.

A step is the engine's own, on tensors without values. To run one for real, build the model and its
step with `device` as torch's default device. A trial has random weights, synthetic tokens, and the
loop of a real run, which is imported for it alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from trainfit.conf import SCHEMAS, GptConfig
from trainfit.core import codec
from trainfit.core.errors import BadInput
from trainfit.core.plan_records import Plan, Precision
from trainfit.data.tokens import Tokens
from trainfit.engine.loop_settings import OptimizerSettings
from trainfit.engine.optimizer import build_optimizer
from trainfit.engine.step import loss_scale, plain_step
from trainfit.jobs.models.building import on_device
from trainfit.jobs.models.classifier import build_classifier, classification_loss
from trainfit.jobs.models.classifier_settings import ClassifierSettings, model_facts, settings_from
from trainfit.jobs.models.gpt_model import build_gpt
from trainfit.jobs.plan_choices import stream_is_half
from trainfit.kernels.attention import MaskedAttention
from trainfit.kernels.disentangled import DisentangledAttention
from trainfit.kernels.varlen import VarlenAttention
from trainfit.runtime import compile_blocks, compile_model, repeated_blocks

if TYPE_CHECKING:
    from trainfit.tuning.trial import Setup

CARRIERS = (MaskedAttention, VarlenAttention, DisentangledAttention)
"""Objects that bring tensors to a block beside its other arguments."""
Step = Callable[[], object]
Probe = tuple[nn.Module, Callable[[nn.Module], Step]]


def encoder_step(
    *,
    rows: int,
    width: int,
    slots: int | None,
    lengths: list[int] | None,
    micro_batches: int,
    precision: Precision,
    optimizer: Any = "adamw_fused",
    offload_optimizer: bool = False,
    depth: int | None = None,
    device: str = "cpu",
    compile: bool = False,
    offload_activations: bool = False,
    activation_budget: float = 1.0,
    overrides: dict[str, Any] | None = None,
    **settings: Any,
) -> Probe:
    """Return a classifier and the maker of its step; `settings` are ClassifierSettings."""
    changed = dict(overrides or {}) | ({} if depth is None else {"num_hidden_layers": depth})
    model = build_classifier(ClassifierSettings(overrides=changed, **settings))
    chosen = OptimizerSettings(kind=optimizer, learning_rate=1e-5, offload=offload_optimizer)

    def make_step(built: nn.Module) -> Step:
        made = build_optimizer(built, chosen)
        step = engine_step(built, loss, made, precision, device, offload_activations)
        if compile and device == "cpu":
            _simulate(repeated_blocks(built), CARRIERS, activation_budget)
        elif compile:
            compile_blocks(built, budget=activation_budget)
        batch = padded(rows, width) if slots is None else packed(width, slots, lengths or [])
        if settings.get("words"):
            batch["labels"] = torch.zeros_like(batch["input_ids"])
        return lambda: step([batch] * micro_batches, float(rows))

    return model, make_step


def gpt_step(
    *,
    name: str,
    rows: int,
    width: int,
    micro_batches: int,
    precision: Precision,
    checkpointing: Any,
    optimizer: Any = "adamw_fused",
    offload_optimizer: bool = False,
    depth: int | None = None,
    device: str = "cpu",
    compile: bool = False,
    offload_activations: bool = False,
    activation_budget: float = 1.0,
    loss_chunk: int | None = None,
    half_stream: bool | Literal["auto"] = False,
    slots: None = None,
    lengths: None = None,
    **sizes: Any,
) -> Probe:
    """Return a GPT and the maker of its step on blocks of `width` tokens, which are not packed.

    `sizes` are those of the model that differ from the catalogue.
    """
    assert slots is None
    assert lengths is None
    changed = sizes | {"block_size": width} | ({} if depth is None else {"n_layer": depth})
    model = build_gpt(
        name,
        checkpointing=checkpointing,
        loss_chunk=loss_chunk,
        half_stream=stream_is_half(half_stream, precision),
        **changed,
    )
    chosen = OptimizerSettings(kind=optimizer, learning_rate=1e-5, offload=offload_optimizer)

    def make_step(built: nn.Module) -> Step:
        def loss(gpt: nn.Module, batch: Mapping[str, Any]) -> Tensor:
            summed: Tensor = gpt(**batch)
            return summed

        made = build_optimizer(built, chosen)
        step = engine_step(built, loss, made, precision, device, offload_activations)
        if compile and device == "cpu":
            _simulate([built], (), activation_budget)
        elif compile:
            compile_model(built, budget=activation_budget)
        ids = torch.full((rows, width), 5)
        batch = {"input_ids": ids, "targets": ids}
        return lambda: step([batch] * micro_batches, float(rows * width))

    return model, make_step


def _simulate(blocks: Sequence[nn.Module], carriers: tuple[type, ...], budget: float) -> None:
    """Let blocks behave as compiled ones, in the estimator's child."""
    from trainfit.planning.estimator.compiled_steps import simulate  # imports the compiler

    simulate(blocks, carriers, budget)


def engine_step(
    model: nn.Module,
    loss: Callable[[nn.Module, Mapping[str, Any]], Tensor],
    optimizer: torch.optim.Optimizer,
    precision: Precision,
    device: str,
    offload_activations: bool,
) -> Callable[[list[dict[str, Any]], float], object]:
    """Return the engine's step as a function of micro-batches and their weight."""
    scale = loss_scale(precision, device)
    saved = None
    if offload_activations:
        from trainfit.planning.estimator.fake_cuda import saved_on_host  # imports the compiler

        saved = saved_on_host(device)
    return lambda batches, weight: plain_step(
        model,
        optimizer,
        loss,
        batches,
        weight,
        device_type=device,
        precision=precision,
        max_grad_norm=1.0,
        scale=scale,
        saved=saved,
    )


def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Sum the loss of a micro-batch."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return classification_loss(model(**inputs), batch["labels"])


def padded(rows: int, width: int) -> dict[str, Any]:
    """Make a micro-batch of padded rows, with padding in it."""
    mask = torch.ones(rows, width, dtype=torch.long)
    mask[:, width // 2 :] = 0
    return {
        "input_ids": torch.full((rows, width), 5),
        "attention_mask": mask,
        "labels": torch.zeros(rows, dtype=torch.long),
    }


def packed(width: int, slots: int, lengths: list[int]) -> dict[str, Any]:
    """Make a micro-batch of one packed row with these sequences in it."""
    ends = [0]
    for length in lengths[:slots]:
        ends.append(min(width, ends[-1] + length))
    ends += [ends[-1]] * (slots + 1 - len(ends))
    return {
        "input_ids": torch.full((1, width), 5),
        "cu_seqlens": torch.tensor(ends, dtype=torch.int32),
        "max_seqlen": max(lengths, default=width),
        "labels": torch.zeros(slots, dtype=torch.long),
    }


# ── trials ──────────────────────────────────────────────────────────────────────────────────────

_SPECIAL = 5
"""Smaller token ids are special in most models: padding, beginning, end."""
_STEPS = 64
"""Steps in a synthetic epoch of a GPT: a new epoch within a trial would cost time."""


def encoder_trial(
    plan: Plan, *, task: str, config: dict[str, Any], lengths: list[int], device: str = "cpu"
) -> Setup:
    """Build the run of a plan on random sequences that are as long as the user's."""
    from trainfit.jobs import job_plan
    from trainfit.jobs.classification import ClassifierTask, encoder_settings, model_decisions
    from trainfit.jobs.targets import OneClass, WordTags
    from trainfit.tuning.trial import Setup

    plan = one_rank(plan)
    asked = codec.decode(SCHEMAS[task], config, "the configuration")
    assert not isinstance(asked, GptConfig)
    if plan.workload.method == "frozen":
        raise BadInput(
            "a frozen encoder runs once and its head trains in no time: there is nothing to tune",
            "train it, or set model.freeze_encoder=false",
        )
    settings = settings_from(asked.model, weights="random", **model_decisions(plan, asked.model))
    tokens = synthetic_tokens(lengths, model_facts(asked.model.name).vocabulary)
    target: OneClass | None = None
    if settings.words:
        tags = np.random.default_rng(0).integers(0, 2, tokens.ids.size).astype(np.int32)
        tokens = replace(tokens, labels=tokens.lengths, tags=tags)
        target = WordTags(tuple(map(str, range(settings.classes))))
    made = ClassifierTask(
        on_device(device, lambda: build_classifier(settings)),
        tokens,
        tokens.subset(range(1)),
        effective_batch=plan.effective_batch_size,
        seed=asked.seed,
        target=target,
    )
    loop = encoder_settings(asked, plan, [tokens.lengths], device=device, ranks=1)
    return Setup(made, loop, job_plan.runtime_settings(asked, plan))


def gpt_trial(
    plan: Plan,
    *,
    task: str,
    config: dict[str, Any],
    lengths: list[int] | None = None,
    device: str = "cpu",
) -> Setup:
    """Build the run of a plan on random blocks; `lengths` can only be the blocks' length."""
    from trainfit.jobs import job_plan
    from trainfit.jobs.gpt import build, gpt_settings, shape_of
    from trainfit.jobs.pretraining import GptTask
    from trainfit.tuning.trial import Setup

    plan = one_rank(plan)
    asked = codec.decode(SCHEMAS[task], config, "the configuration")
    assert isinstance(asked, GptConfig)
    block = asked.data.max_length
    assert lengths is None or set(lengths) == {block}
    count = _STEPS * plan.effective_batch_size * block + 1
    words = shape_of(asked).vocab_size
    ids = np.random.default_rng(0).integers(0, words, count, dtype=np.uint32)
    made = GptTask(
        on_device(device, lambda: build(asked, plan)),
        ids,
        ids[: block + 1],
        block_size=block,
        effective_batch=plan.effective_batch_size,
        seed=asked.seed,
    )
    loop = gpt_settings(asked, plan, device=device, ranks=1)
    return Setup(made, loop, job_plan.runtime_settings(asked, plan))


def one_rank(plan: Plan) -> Plan:
    """Return the plan of one rank's share of a step, since a trial runs on one device."""
    share = math.ceil(plan.effective_batch_size / plan.ranks)
    return replace(plan, effective_batch_size=share, ranks=1, sharding="none")


def synthetic_tokens(lengths: list[int], words: int) -> Tokens:
    """Draw random ids with random labels."""
    draws = np.random.default_rng(0)
    sizes = np.asarray(lengths, dtype=np.int64)
    return Tokens(
        ids=draws.integers(min(_SPECIAL, words - 1), words, int(sizes.sum())).astype(np.int32),
        starts=np.cumsum(sizes) - sizes,
        lengths=sizes,
        labels=draws.integers(0, 2, len(sizes)),
    )
