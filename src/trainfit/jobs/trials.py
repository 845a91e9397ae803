"""Jobs as trials of the tuner: random weights, synthetic tokens, and the loop of a real run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from trainfit.conf import SCHEMAS, GptConfig
from trainfit.core import codec
from trainfit.core.errors import BadInput
from trainfit.core.plan_records import Plan
from trainfit.data.tokens import Tokens
from trainfit.jobs import job_plan
from trainfit.jobs.classification import ClassifierTask, encoder_settings, model_decisions
from trainfit.jobs.gpt import build, gpt_settings, shape_of
from trainfit.jobs.models.building import on_device
from trainfit.jobs.models.classifier import build_classifier
from trainfit.jobs.models.classifier_settings import model_facts, settings_from
from trainfit.jobs.pretraining import GptTask
from trainfit.jobs.targets import OneClass, WordTags
from trainfit.tuning.trial import Setup

_SPECIAL = 5
"""Smaller token ids are special in most models: padding, beginning, end."""
_STEPS = 64
"""Steps in a synthetic epoch of a GPT: a new epoch within a trial would cost time."""


def encoder_trial(
    plan: Plan, *, task: str, config: dict[str, Any], lengths: list[int], device: str = "cpu"
) -> Setup:
    """Build the run of a plan on random sequences that are as long as the user's."""
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
