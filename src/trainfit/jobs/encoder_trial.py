"""A classifier for a trial: random weights, made-up tokens of the data's lengths, the real loop."""

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
from trainfit.jobs.classification import ClassifierTask
from trainfit.jobs.encoder import encoder_settings, model_decisions
from trainfit.jobs.models.classifier import build_classifier
from trainfit.jobs.models.classifier_settings import settings_from
from trainfit.jobs.placement import on_device
from trainfit.tuning.trial import Setup

_SPECIAL = 5
"""Ids below are a model's own: padding, beginning, end."""


def encoder_trial(
    plan: Plan, *, task: str, config: dict[str, Any], lengths: list[int], device: str = "cpu"
) -> Setup:
    """The run of a plan on sequences that are as long as the user's and say nothing."""
    plan = one_rank(plan)
    asked = codec.decode(SCHEMAS[task], config, "the configuration")
    assert not isinstance(asked, GptConfig)
    if plan.workload.method == "frozen":
        raise BadInput(
            "a frozen encoder runs once and its head trains in no time: there is nothing to tune",
            "train it, or set model.freeze_encoder=false",
        )
    settings = settings_from(asked.model, weights="random", **model_decisions(plan))
    tokens = made_up(lengths, job_plan.model_facts(asked.model.name).vocabulary)
    made = ClassifierTask(
        on_device(device, lambda: build_classifier(settings)),
        tokens,
        tokens.subset(range(1)),
        effective_batch=plan.effective_batch_size,
        seed=asked.seed,
    )
    loop = encoder_settings(asked, plan, tokens.lengths, device=device, ranks=1, seed=asked.seed)
    return Setup(made, loop, job_plan.runtime_settings(asked, plan))


def one_rank(plan: Plan) -> Plan:
    """The share of a step that one of several ranks computes: a trial runs alone."""
    share = math.ceil(plan.effective_batch_size / plan.ranks)
    return replace(plan, effective_batch_size=share, ranks=1, sharding="none")


def made_up(lengths: list[int], words: int) -> Tokens:
    """Random ids with random labels."""
    draws = np.random.default_rng(0)
    sizes = np.asarray(lengths, dtype=np.int64)
    return Tokens(
        ids=draws.integers(min(_SPECIAL, words - 1), words, int(sizes.sum())).astype(np.int32),
        starts=np.cumsum(sizes) - sizes,
        lengths=sizes,
        labels=draws.integers(0, 2, len(sizes)),
    )
