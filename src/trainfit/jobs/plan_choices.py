"""Choices that are made around the planner: freeze the encoder, a GPT's size and its loss.

Nothing here imports torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainfit.conf import Composed, GptConfig
from trainfit.conf.composition import put_value
from trainfit.core import codec
from trainfit.core.plan_records import Plan, Precision, Reason
from trainfit.data.corpus import find_texts
from trainfit.data.token_files import is_prepared
from trainfit.data.token_preparation import Preparation
from trainfit.hardware.catalogue import GpuSpec, known_spec
from trainfit.hardware.host import allowed_by_affinity
from trainfit.hardware.model_shapes import model_shape
from trainfit.hardware.nvml import load_nvml, probe_nvml
from trainfit.jobs.job_times import CORE_RATE
from trainfit.planning.question import Question
from trainfit.planning.savers import count_savers, savers_of

MakePlans = Callable[[Question, list[str]], Mapping[str, Plan]]
"""Function that plans a question for several GPUs; returns the plans by the GPUs' names."""
_SPENDING = ("batch_size", "gradient_accumulation_steps", "gradient_checkpointing")
"""Settings whose pinned values may cost memory; without these pins a plan takes the least."""
CHUNK = 16384
"""Tokens whose logits exist at a time: enough for matrix products at full speed."""
FINE_CHUNK = 4096
"""Tokens whose logits exist at a time where memory is short."""
_CHECKPOINTING = ("none", "selective", "full")


# ── model.freeze_encoder=auto ─────────────────────────────────────────────────────────────────


def choose_freezing(
    composed: Composed, question: Question, make: MakePlans, gpus: list[str]
) -> dict[str, Plan]:
    """Freeze the encoder where its gradients and optimizer states fit in no other way."""
    plans = dict(make(question, gpus))
    if not _may_freeze(composed):
        return plans
    least = {gpu: plan for gpu, plan in plans.items() if not plan.fits}
    pins = {name: pin for name, pin in question.pins.items() if name not in _SPENDING}
    if least and pins != question.pins:
        made = make(replace(question, pins=pins), list(least))
        least = {gpu: plan for gpu, plan in made.items() if not plan.fits}
    frozen = make(_frozen(question), list(least)) if least else {}
    return {gpu: _choose(plan, least.get(gpu), frozen.get(gpu)) for gpu, plan in plans.items()}


def _may_freeze(composed: Composed) -> bool:
    """True where the method is left at its default and the weights are pretrained."""
    config = composed.config
    if isinstance(config, GptConfig) or config.model.freeze_encoder != "auto":
        return False
    return composed.origins["model.method"] != "override" and config.model.weights != "random"


def _frozen(question: Question) -> Question:
    return replace(
        question,
        arguments=question.arguments | {"method": "frozen"},
        workload=replace(question.workload, method="frozen"),
    )


def _choose(plan: Plan, least: Plan | None, frozen: Plan | None) -> Plan:
    """Return the plan, or the frozen one where even `least`, of the least memory, does not fit."""
    method = plan.workload.method
    if least is None or least.memory is None or frozen is None:
        words = " ".join(saver.word for saver in savers_of(plan))
        fits = f"the gradients and optimizer states of {method} fit"
        if words:  # slower than a frozen encoder, which learns less
            fits = f"{method} fits with {words}, and what fits in some way is trained"
        why = fits if plan.fits else f"{method} fits with smaller settings"
        return _because(plan, "freeze_encoder", False, why, "true: trains the head alone")
    need = f"{least.memory.peak_allocated_gib:.1f} GiB of {least.memory.capacity_gib:.1f}"
    if not frozen.fits:
        why = f"{method} needs {need}, and frozen it does not fit either"
        return _because(plan, "freeze_encoder", False, why)
    why = f"{method} needs {need} at the least: only the head is trained"
    other = f"false: model.method={method} on a larger GPU"
    return _because(frozen, "freeze_encoder", True, why, other)


# ── the loss and the residual stream of a GPT ─────────────────────────────────────────────────


def choose_gpt(
    composed: Composed, question: Question, make: Callable[[Question], Plan], *, gpu: bool
) -> Plan:
    """Add the chunk of the loss and the dtype between blocks to the plan that `make` gives."""
    config = composed.config
    assert isinstance(config, GptConfig)
    asked = config.model.loss_chunk
    if asked == "auto":
        plan = _choose_chunk(question, make, gpu)
    else:
        plan = _with_chunk(make(question), asked, _origin(composed, "model.loss_chunk"))
    half = stream_is_half(config.model.half_stream, plan.precision)
    if config.model.half_stream != "auto":
        why = _origin(composed, "model.half_stream")
    elif half:
        why = "bf16 has float32's range: half the traffic between blocks"
    elif plan.precision == "fp16":
        why = "fp16 would not hold every sum"
    else:
        why = "nothing is in half precision"
    other = "false: float32 between blocks" if half else "true: half precision"
    return _because(plan, "half_stream", half, why, other)


def stream_is_half(asked: bool | str, precision: Precision) -> bool:
    """True where blocks pass their results on in half precision; auto does so in bf16 only."""
    return precision == "bf16" if asked == "auto" else bool(asked)


def _choose_chunk(question: Question, make: Callable[[Question], Plan], gpu: bool) -> Plan:
    """Choose how many tokens' logits exist at a time.

    A GPU has a kernel for loss and gradients together, on the logits of a chunk. A CPU computes all
    logits at once with the fewest operations. They are the largest tensor of a small GPT though:
    finer chunks are tried where a step does not fit, or fits only with gradient checkpointing.
    """
    plan = make(_chunked(question, CHUNK)) if gpu else make(question)
    value = CHUNK if gpu else None
    if not any(_cost(plan)):
        why = "loss and gradients in one pass over the logits of so many tokens"
        return _with_chunk(plan, value, why if gpu else "all logits fit at once")
    finer = make(_chunked(question, FINE_CHUNK))
    if _cost(finer) >= _cost(plan):
        return _with_chunk(plan, value, "finer chunks would not help")
    why = "it costs less than other savings" if plan.fits else "else the step does not fit"
    return _with_chunk(finer, FINE_CHUNK, f"only so many tokens' logits exist at a time; {why}")


def _chunked(question: Question, chunk: int) -> Question:
    return replace(question, arguments=question.arguments | {"loss_chunk": chunk})


def _cost(plan: Plan) -> tuple[bool, int, int]:
    """Cost of a plan's memory savers, for comparing two plans."""
    recomputed = _CHECKPOINTING.index(plan.gradient_checkpointing)
    return not plan.fits, count_savers(plan), recomputed


def _origin(composed: Composed, key: str) -> str:
    origin = composed.origins[key]
    return {"override": "you set it", "default": "the default"}.get(origin, origin)


def _with_chunk(plan: Plan, value: int | None, why: str) -> Plan:
    other = f"{FINE_CHUNK}: less memory" if value != FINE_CHUNK else "null: all at once"
    return _because(plan, "loss_chunk", value, why, other)


def _because(plan: Plan, setting: str, value: int | bool | None, why: str, *others: str) -> Plan:
    reason = Reason(setting=setting, value=value, why=why, alternatives=others)
    return replace(plan, reasons=(*plan.reasons, reason))


# ── the size of a GPT ────────────────────────────────────────────────────────────────────────────

# For a given number of operations the loss is least with about 20 tokens per parameter (Hoffmann
# et al., 2022, arXiv:2203.15556), so an hour of the machine says which model is large enough.
# Epochs after some repeat too much of a small text (Muennighoff et al., 2023, arXiv:2305.16264),
# so the text limits the steps. Nothing here imports torch.


ORIGIN = "the text"
"""Origin of a value that is chosen here."""
HELD_OUT = 0.1
_LEAST = 50
"""Occurrences that make a piece of the user's text a token: a rare one may be a name."""
_BYTES = 257
"""Tokens of the smallest vocabulary: every byte, and the end of a text."""
_MOST_TOKENS = 30_000
ROUND = 64
"""The vocabulary is filled up to a multiple of this: matrix units like round sizes."""
_PER_PARAMETER = 20
_HOUR = 3600.0
_LARGER = 1.5
"""Factor by which a model may be larger than the best for an hour."""
_GPU_SHARE = 0.3
"""Share of a GPU's dense peak that a step reaches."""
_UNKNOWN_GPU = 1e13


@dataclass(frozen=True, slots=True)
class _Size:
    """A model of the catalogue, and how it is trained from a text."""

    name: str
    least_tokens: int
    """Tokens of the text from which on it learns more than the size before it."""
    block: int
    batch: int
    most_epochs: int
    learning_rate: float
    dropout: float


_SIZES = (
    _Size("gpt-tiny", 0, 128, 16, 20, 3e-3, 0.0),
    _Size("gpt-mini", 200_000, 256, 64, 20, 1e-3, 0.2),
    _Size("gpt-small", 50_000_000, 1024, 64, 4, 6e-4, 0.0),
)


def text_of(composed: Composed) -> Path | None:
    """Return the text file or folder of texts that a GPT job is to learn from; None: tokens."""
    config = composed.config
    if not isinstance(config, GptConfig) or config.data.data_dir is None:
        return None
    place = Path(config.data.data_dir)
    return None if is_prepared(place) else place


def preparation(config: GptConfig) -> Preparation:
    """Return how a text that is named as data becomes tokens."""
    return Preparation(
        vocab_size=config.data.vocab_size, seed=config.seed, validation_share=HELD_OUT, least=_LEAST
    )


def fitted(composed: Composed, gpu: GpuSpec | None = None) -> Composed:
    """Choose the settings that are left at auto, for the job's text.

    `gpu` is a GPU that is not in this machine.
    """
    place, config = text_of(composed), composed.config
    if place is None or ORIGIN in composed.origins.values():
        return composed
    assert isinstance(config, GptConfig)
    size = sum(path.stat().st_size for path in find_texts(place))
    free = {key for key, origin in composed.origins.items() if origin == "default"}
    words = vocabulary(size) if "data.vocab_size" in free else config.data.vocab_size
    tokens = estimate_tokens(size, words)
    rate, machine = _rate(config, gpu)
    rows = -(-words // ROUND) * ROUND
    chosen = {"data.vocab_size": words, "model.vocab_size": rows}
    chosen |= _chosen(config, free, tokens, words, rate)
    data = codec.encode(config)
    for key in chosen.keys() & free:
        put_value(data, key, chosen[key])
    settled = codec.decode(GptConfig, data)
    note = _note(settled, size, tokens, machine, "model.name" in free)
    return replace(
        composed,
        config=settled,
        origins=composed.origins | dict.fromkeys(chosen.keys() & free, ORIGIN),
        notes=(*composed.notes, note),
    )


def vocabulary(size: int) -> int:
    """Choose the tokens to learn from a text of `size` bytes: about their square root.

    So each of them occurs often enough to be learned. Small texts are left as bytes.
    """
    count = 2 ** int(math.log2(max(1.0, math.sqrt(size))))
    return _BYTES if count < 2 * _BYTES - 2 else min(count, _MOST_TOKENS)


def estimate_tokens(size: int, words: int) -> int:
    """Estimate the tokens to train on in a text of `size` bytes, by the vocabulary."""
    bytes_per_token = 1 + 0.55 * math.log2(words / (_BYTES - 1))
    return max(1, round(size * (1 - HELD_OUT) / bytes_per_token))


def choose_size(tokens: int, words: int, rate: float) -> str:
    """Name the largest GPT that the text fills, and that an hour at `rate` operations trains."""
    best = math.sqrt(rate * _HOUR / (6 * _PER_PARAMETER))
    able = [
        size.name
        for size in _SIZES
        if size.least_tokens <= tokens and _parameters(size.name, words) <= _LARGER * best
    ]
    return able[-1] if able else _SIZES[0].name


def _chosen(
    config: GptConfig, free: set[str], tokens: int, words: int, rate: float
) -> dict[str, Any]:
    """Choose the model and its training; keys that somebody set are looked up, and not chosen."""
    training = config.training
    name = choose_size(tokens, words, rate) if "model.name" in free else config.model.name
    size = next((one for one in _SIZES if one.name == name), _SIZES[-1])
    held_out = tokens * HELD_OUT
    block = min(size.block, 2 ** max(3, int(math.log2(max(8.0, held_out / 4)))))
    block = block if "data.max_length" in free else config.data.max_length
    batch = size.batch
    if training.effective_batch_size != "auto":
        batch = training.effective_batch_size
    elif training.batch_size != "auto":
        parts = config.optimization.gradient_accumulation_steps
        batch = training.batch_size * (1 if parts == "auto" else parts)
    seen = min(_PER_PARAMETER * _parameters(name, words), size.most_epochs * tokens)
    if "training.num_epochs" not in free:
        seen = round(training.num_epochs * tokens)
    steps = training.max_steps or max(1, round(seen / (batch * block)))
    asked = {
        "model.name": name,
        "model.dropout": size.dropout,
        "data.max_length": block,
        "training.effective_batch_size": batch,
        "training.max_steps": steps,
        "training.learning_rate": size.learning_rate,
        "training.warmup_steps": max(1, steps // 20),
        "training.eval_steps": max(1, steps // 10),
        "training.eval_iters": 20,
        "training.logging_steps": max(1, steps // 100),
    }
    left = {
        "training.effective_batch_size": "training.batch_size",
        "training.max_steps": "training.num_epochs",
        "training.warmup_steps": "training.warmup_ratio",
    }
    return {key: value for key, value in asked.items() if left.get(key, key) in free}


def _parameters(name: str, words: int) -> int:
    """Parameters of a GPT of the catalogue with another vocabulary."""
    shape = model_shape(name)
    return int(shape.parameters + (words - shape.config["vocab_size"]) * shape.config["n_embd"])


def _rate(config: GptConfig, gpu: GpuSpec | None) -> tuple[float, str]:
    """Return about how many operations a second a step reaches, and the machine in words."""
    if config.device.use_cuda is not False:
        if gpu is not None:
            return _gpu_rate(gpu), gpu.slug
        if os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
            for found in probe_nvml(load_nvml, os.getpid()).gpus[:1]:
                return _gpu_rate(known_spec(found.name, found.memory_gib or 0.0)), found.name
    cores = allowed_by_affinity()
    return CORE_RATE * cores, f"{cores} CPU {'core' if cores == 1 else 'cores'}"


def _gpu_rate(spec: GpuSpec | None) -> float:
    peak = None if spec is None else spec.bf16_tflops or spec.fp16_tflops
    return _UNKNOWN_GPU if peak is None else _GPU_SHARE * peak * 1e12


def _note(config: GptConfig, size: int, tokens: int, machine: str, free: bool) -> str:
    words, training = config.data.vocab_size, config.training
    about = round(tokens, 2 - int(math.log10(tokens)))  # it is no more exact
    kind = "bytes" if words == _BYTES else f"a vocabulary of {words:,}"
    why = f"{config.model.name}, which suits so much text on {machine}"
    model = why if free else config.model.name
    length = (
        f"{training.num_epochs:g} epochs"
        if training.max_steps is None
        else f"{training.max_steps:,} steps"
    )
    return (
        f"{size / 1e6:,.1f} MB of text, about {about:,} tokens ({kind}): {model}, {length}; "
        "model.name and training.max_steps choose otherwise"
    )
