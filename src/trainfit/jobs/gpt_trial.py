"""A GPT for a trial: random weights, blocks of made-up tokens, the real loop."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainfit.conf import SCHEMAS, GptConfig
from trainfit.core import codec
from trainfit.core.plan_records import Plan
from trainfit.jobs import job_plan
from trainfit.jobs.encoder_trial import one_rank
from trainfit.jobs.gpt import build, gpt_settings, shape_of
from trainfit.jobs.placement import on_device
from trainfit.jobs.pretraining import GptTask
from trainfit.tuning.trial import Setup

_STEPS = 64
"""In an epoch of made-up blocks: a new epoch in the middle of a trial would cost it time."""


def gpt_trial(
    plan: Plan,
    *,
    task: str,
    config: dict[str, Any],
    lengths: list[int] | None = None,
    device: str = "cpu",
) -> Setup:
    """The run of a plan. The blocks are all of one length, so `lengths` tell nothing new."""
    plan = one_rank(plan)
    asked = codec.decode(SCHEMAS[task], config, "the configuration")
    assert isinstance(asked, GptConfig)
    assert lengths is None or set(lengths) == {asked.data.max_length}
    block = asked.data.max_length
    words = shape_of(asked).vocab_size
    draws = np.random.default_rng(0)
    count = _STEPS * plan.effective_batch_size * block + 1
    ids = draws.integers(0, words, count, dtype=np.uint32)
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
