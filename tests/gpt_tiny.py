"""A GPT job that trains in a second: a small corpus, a small model, and a plan without children."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import job_tiny
from trainfit.core.plan_records import Plan
from trainfit.core.records import HardwareProfile
from trainfit.data.token_preparation import Preparation, prepare_tokens
from trainfit.planning import decide, explain, planner
from trainfit.planning.question import Question

_NAMES = "alder birch cedar dogwood elm fir ginkgo hazel ivy juniper".split(" ")  # noqa: SIM905


def write_tokens(folder: Path, documents: int = 80, seed: int = 0) -> Path:
    """Token files of made-up Python."""
    if not folder.is_dir():
        random = np.random.default_rng(seed)
        source = folder.with_name(folder.name + "-texts")
        source.mkdir(parents=True)
        for number in range(documents):
            first, second = random.choice(_NAMES, 2)
            lines = [f"def {first}({second}):", f"    return {second} + {number}", ""] * 6
            (source / f"{number:03}.py").write_text("\n".join(lines))
        how = Preparation(vocab_size=300, validation_share=0.2, seed=1)
        prepare_tokens([source], folder, how, processes=1)
    return folder


def gpt_words(tmp: Path, *more: str) -> list[str]:
    """Overrides of a job that is over in a second, and `more` in place of its own."""
    own = [
        f"data.data_dir={write_tokens(tmp / 'tokens')}",
        f"runs_dir={tmp / 'runs'}",
        "model.name=gpt-tiny",
        "model.n_layer=2",
        "model.n_embd=32",
        "data.max_length=16",
        "training.batch_size=4",
        "training.eval_batch_size=8",
        "training.eval_iters=2",
        "training.max_steps=6",
        "training.eval_steps=3",
        "training.logging_steps=2",
        "training.warmup_steps=2",
        "training.learning_rate=0.01",
        "device.deterministic=true",
        "device.mixed_precision=off",  # what is compared is compared in one precision
    ]
    given = {_last(word) for word in more}
    if given & {"enable_amp", "amp_dtype", "use_bf16"}:
        given.add("mixed_precision")
    return [*(word for word in own if _last(word) not in given), *more]


def _last(word: str) -> str:
    return word.split("=")[0].split(".")[-1]


def plan_here(question: Question, profile: HardwareProfile, **options: Any) -> Plan:
    """The planner's own decisions, without asking about memory."""
    gpu = profile.gpus[0] if profile.gpus else None
    loader = {name: choice.value for name, choice in explain.loader(question, profile).items()}
    plan = job_tiny.quick_plan(question, profile, **options)
    plan = replace(
        plan,
        **loader,
        gpu=None if gpu is None else gpu.slug,
        precision=decide.precision(question, profile, plan.ranks).value,
        compile=bool(question.pinned("compile")),
        compile_mode=question.pinned("compile_mode"),
        effective_batch_size=decide.effective_batch(question, plan.ranks).value,
        task=replace(plan.task, arguments=question.arguments),
    )
    runtime = replace(
        plan.runtime,
        tf32=decide.tf32(question, gpu).value,
        cudnn_benchmark=question.pinned("cudnn_benchmark"),
        deterministic=question.pinned("deterministic"),
        expandable_segments=question.pinned("expandable_segments"),
    )
    return replace(plan, runtime=runtime)


def be_quick(patch: pytest.MonkeyPatch) -> None:
    """The same as for other jobs, with a GPT's plan."""
    job_tiny.be_quick(patch)
    patch.setattr(planner, "plan", plan_here)


def rows_of(run: Path, kind: str) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl of a kind."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]
