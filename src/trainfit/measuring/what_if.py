"""Gains of the optimizations that are missing, estimated from one profiled step.

A step takes as long as the GPU is busy or as the host starts kernels, whichever is longer, by the
estimator's own rule and calibration. Each change makes some parts of the step's work shorter; the
factors are rates of the machine where they are known, and else the constants below.
`benchmarks/what_if.py` makes the changes and compares.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from trainfit.core.records import Record
from trainfit.hardware.catalogue import lookup
from trainfit.measuring import profiled_step as part
from trainfit.measuring.trace import Evidence
from trainfit.planning.estimator.step_time import reference, smooth_maximum

_IDLE = 0.1
"""Share of idle time from which on the GPU waits for the host."""
_POWER = 6
"""Exponent of `smooth_maximum`."""
_REFERENCE = "launch_forward"
"""Measured launches in microseconds; those of the calibration's machine stand in for them."""
_PER_LAUNCH = 2.4
"""Time of the host for an operator of a model, in launches of a small one: Python, autocast."""
_REACHED = {"bf16": 0.6, "tf32": 0.68}
"""Share of a gain in peak rate that products of usual sizes get."""
_CASTED = 1.05
"""Time of other kernels under autocast: half the bytes, but casts come on top."""
_CAST = 1.5
"""Operators of the host with autocast, which casts every weight and many inputs."""
_HALF_ATTENTION, _TF32_ATTENTION = 0.3, 0.48
"""Time of attention made of batched products, in half precision and with TF32."""
_FUSED_UPDATE = 1 / 3
"""Bytes of a fused AdamW: each weight, gradient and moment once instead of three times."""
_FUSED_ATTENTION, _FUSED_EXACT = 1 / 3, 0.62
"""Time of attention in one kernel, which keeps scores in registers; in fp32 it is slower."""
_ATTENTION_POWER = 1.5
"""Attention grows with the square of a length, and padding is most where texts are short."""
_PACKED_EXACT = 1.3
"""Time of fp32 attention on packed rows, by that of batched products with padding."""
_UNPADDED_HOST = 1.1
"""Operators of the host without padding: rows are packed, and unpacked for the head."""
_OWN_SCORES, _OWN_SCORES_HOST = 0.5, 0.8
"""Time of a DeBERTa's other kernels, and of its host, where one kernel computes its scores."""
_REPLAYED = 0.55
"""Host time that graphs leave: loader, packing, head, loss, clipping, optimizer."""
_COMPILED_OTHER = 0.5
_COMPILED_HOST = 0.35
"""Time of other kernels that are fused, and of the host, with torch.compile."""
_FORWARD = 0.25
"""Share of a forward pass in a step that computes it twice."""
_ROOM = 0.5
"""Share of the memory in use up to which checkpointing is not needed."""
_LEAST = 1.0
"""Percent from which on a gain is told."""

Words = Mapping[str, str]
"""Exact change by framework: transformers, lightning, accelerate, torch for all others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf(Record):
    """One change that is missing, and its estimated gain."""

    name: str
    percent: float
    """Share of a step's time that it saves."""
    error: float | None
    """Median error of recorded checks in points; None: none is recorded."""
    why: str
    change: str

    def line(self) -> str:
        """Say it in one line."""
        error = "error not recorded" if self.error is None else f"±{self.error:.0f} points"
        return f"{self.name}: {self.percent:.0f}% less time ({error}): {self.why}; {self.change}"


class Step(NamedTuple):
    """Seconds of a step: its parts on the device, the host's, and waiting for the loader."""

    parts: dict[str, float]
    host: float
    waiting: float
    gpu: bool

    @property
    def seconds(self) -> float:
        """Time of the step."""
        busy = sum(self.parts.values())
        return (smooth_maximum(busy, self.host) if self.gpu else busy) + self.waiting

    def scaled(self, host: float = 1.0, **factors: float) -> Step:
        """The same step with some parts, and the host, by factors."""
        parts = {name: value * factors.get(name, 1.0) for name, value in self.parts.items()}
        return self._replace(parts=parts, host=self.host * host)


class _Facts(NamedTuple):
    seen: Evidence
    step: Step
    memory_share: float | None
    padding: float | None
    rates: Mapping[str, float]

    def faster(self, old: str, new: str) -> float | None:
        """How many times as fast products of one dtype are as those of another."""
        if f"matmul_{old}" in self.rates and f"matmul_{new}" in self.rates:
            return self.rates[f"matmul_{new}"] / self.rates[f"matmul_{old}"]
        spec = lookup(self.seen.device_name) if self.seen.device_name else None
        peaks = (spec.peak_tflops(old), spec.peak_tflops(new)) if spec else (None, None)
        if peaks[0] is None or peaks[1] is None:
            return None
        return max(1.0, _REACHED[new] * peaks[1] / peaks[0])


Estimate = Callable[[_Facts], tuple[Step, str] | None]
"""The step after a change and the reason for its gain; None where the change is not missing."""


def what_if(
    seen: Evidence,
    *,
    step_seconds: float | None = None,
    framework: str = "torch",
    memory_share: float | None = None,
    padding_share: float | None = None,
    rates: Mapping[str, float] | None = None,
) -> tuple[WhatIf, ...]:
    """Estimate the gain of every missing change, the largest first.

    `step_seconds` is the time of a step that is not profiled, `memory_share` the peak memory as a
    share of the GPU's, `padding_share` that of many batches where they were seen, `rates` the
    machine's by the names of `machine_rates`.
    """
    step = _step_of(seen, step_seconds or seen.step_seconds, rates or {})
    if step is None:
        return ()
    if padding_share is None:
        padding_share = seen.batches.padding_share
    facts = _Facts(seen, step, memory_share, padding_share, rates or {})
    errors = recorded_errors() if step.gpu else {}  # of a GPU
    found = []
    for name, (estimate, words) in _CHANGES.items():
        if (answer := estimate(facts)) is None:
            continue
        after, why = answer
        percent = 100 * (1 - after.seconds / step.seconds)
        if percent >= _LEAST:
            change = words.get(framework, words["torch"])
            change = change if step.gpu else change.replace(_PINNED, "")
            found.append(
                WhatIf(name=name, percent=percent, error=errors.get(name), why=why, change=change)
            )
    return tuple(sorted(found, key=lambda one: -one.percent))


def _step_of(seen: Evidence, seconds: float, rates: Mapping[str, float]) -> Step | None:
    parts = {name: value for name, value in seen.parts.items() if name != part.LOADING}
    busy = sum(parts.values())
    waiting = min(0.99, seen.batches.waited_share or 0.0) * seconds
    worked = seconds - waiting
    if not busy or worked <= 0:
        return None
    gpu, host = seen.device == "cuda", 0.0
    if gpu and 1 - busy / worked > _IDLE:
        return Step(parts, _rest(worked, busy), waiting, gpu)
    if gpu:
        host = min(0.9 * worked, sum(seen.launches.values()) * _launch_seconds(rates))
    # Kernels may run beside each other, and the profiler makes a CPU's operators longer.
    factor = _rest(worked, host) / busy
    return Step({name: value * factor for name, value in parts.items()}, host, waiting, gpu)


def _rest(total: float, known: float) -> float:
    """The other one of the two that `smooth_maximum` makes a total of."""
    return float(max(0.0, total**_POWER - known**_POWER) ** (1 / _POWER))


def _launch_seconds(rates: Mapping[str, float]) -> float:
    """Time of the host for an operator, with its share of Python."""
    return _PER_LAUNCH * rates.get(_REFERENCE, reference()[_REFERENCE]) / 1e6


# ── the changes ───────────────────────────────────────────────────────────────────────────────


def _bf16(facts: _Facts) -> tuple[Step, str] | None:
    exact = facts.step.parts.get(part.PRODUCTS, 0.0)
    now = "tf32" if facts.seen.products.tf32_kernels else "fp32"
    times = facts.faster(now, "bf16")
    if not exact or times is None or facts.seen.device != "cuda":
        return None
    share = exact / facts.step.seconds
    after = facts.step.scaled(_CAST, products=1 / times, attention=_HALF_ATTENTION, other=_CASTED)
    return after, f"products in {now} take {share:.0%} of the step, {times:.1f} times as fast"


def _tf32(facts: _Facts) -> tuple[Step, str] | None:
    exact = facts.step.parts.get(part.PRODUCTS, 0.0)
    times = facts.faster("fp32", "tf32")
    if not exact or times is None or facts.seen.products.tf32_kernels:
        return None
    share = exact / facts.step.seconds
    batched = 1.0 if facts.seen.attention.calls else _TF32_ATTENTION
    after = facts.step.scaled(products=1 / times, attention=batched)
    return after, f"products in fp32 take {share:.0%}, {times:.1f} times as fast; rounds otherwise"


def _fused(facts: _Facts) -> tuple[Step, str] | None:
    kinds = {name: kind for name, kind in facts.seen.optimizers.items() if name.startswith("Adam")}
    if not kinds or set(kinds.values()) <= {"fused", "compiled", "own"}:
        return None
    launches = facts.seen.launches
    saved = launches.get(part.UPDATE, 0) / max(1, sum(launches.values()))
    share = facts.step.parts.get(part.UPDATE, 0.0) / facts.step.seconds
    after = facts.step.scaled(1 - 0.9 * saved, update=_FUSED_UPDATE)
    return after, f"the update takes {share:.0%} of the step, and a third of it in one pass"


def _unpadded(facts: _Facts) -> tuple[Step, str] | None:
    padding = facts.padding
    if not padding or facts.seen.batches.packed or not facts.step.parts.get(part.ATTENTION):
        return None
    real, seen = 1 - padding, facts.seen.attention
    exact = part.HALF_PRODUCTS not in facts.step.parts
    own_scores = not seen.calls and seen.gathers >= seen.softmaxes > 0  # a DeBERTa's
    if own_scores and exact:
        return None  # the kernel of its scores is one of half precision
    host, other, attention = _UNPADDED_HOST, real, real**_ATTENTION_POWER
    attention = attention if facts.step.gpu else 1.0  # a CPU has no kernel for packed rows
    if own_scores:
        host, other = _OWN_SCORES_HOST, _OWN_SCORES * real
    elif exact and not seen.calls:
        attention = _PACKED_EXACT
    after = facts.step.scaled(
        host, products=real, half_products=real, attention=attention, other=other
    )
    return after, f"{padding:.0%} of the tokens are padding"


def _attention(facts: _Facts) -> tuple[Step, str] | None:
    seen = facts.seen.attention
    if not seen.softmaxes or seen.calls:
        return None
    share = facts.step.parts.get(part.ATTENTION, 0.0) / facts.step.seconds
    exact = part.HALF_PRODUCTS not in facts.step.parts
    after = facts.step.scaled(0.9, attention=_FUSED_EXACT if exact else _FUSED_ATTENTION)
    return after, f"attention without a kernel of its own takes {share:.0%} of the step"


def _loader(facts: _Facts) -> tuple[Step, str] | None:
    if not facts.step.waiting or facts.seen.batches.workers:
        return None
    share = facts.step.waiting / facts.step.seconds
    return facts.step._replace(waiting=0.0), f"{share:.0%} of the step is waiting for the loader"


def _idle(step: Step) -> float:
    return 1 - sum(step.parts.values()) / step.seconds


def _graphs(facts: _Facts) -> tuple[Step, str] | None:
    text = facts.seen.batches.capacity is not None and part.ATTENTION in facts.step.parts
    if not facts.step.gpu or not text or facts.seen.compiler.graph_launches:
        return None
    after = facts.step.scaled(_REPLAYED)
    return after, f"the GPU is idle for {_idle(facts.step):.0%} of the step, waiting for Python"


def _compile(facts: _Facts) -> tuple[Step, str] | None:
    compiler = facts.seen.compiler
    if not facts.step.gpu or compiler.regions or compiler.graph_launches:
        return None
    share = facts.step.parts.get(part.OTHER, 0.0) / facts.step.seconds
    after = facts.step.scaled(_COMPILED_HOST, other=_COMPILED_OTHER)
    return after, f"kernels beside products and attention take {share:.0%}, and half of it if fused"


def _checkpointing(facts: _Facts) -> tuple[Step, str] | None:
    room = facts.memory_share is not None and facts.memory_share <= _ROOM
    if not facts.seen.recomputed or not room:
        return None
    kept = 1 - _FORWARD
    after = facts.step.scaled(kept, products=kept, half_products=kept, attention=kept, other=kept)
    return after, f"the forward pass runs twice, with {facts.memory_share:.0%} of the memory in use"


_PINNED = ", pin_memory=True"
_RUN = "run it by `trainfit run -- python …`"
_UNPADDED = "trainfit.unpadded(model), where it takes the model"


def _with_run(words: str, torch: str) -> Words:
    """Words for the loops that `trainfit run` knows, and those for a plain one of torch."""
    return {"transformers": words, "lightning": words, "accelerate": words, "torch": torch}


_CHANGES: dict[str, tuple[Estimate, Words]] = {
    "bf16": (
        _bf16,
        {
            "transformers": "TrainingArguments(bf16=True)",
            "lightning": "Trainer(precision='bf16-mixed')",
            "accelerate": "Accelerator(mixed_precision='bf16')",
            "torch": "with torch.autocast('cuda', torch.bfloat16): around the forward pass",
        },
    ),
    "tf32": (
        _tf32,
        {
            "transformers": "TrainingArguments(tf32=True)",
            "lightning": "torch.set_float32_matmul_precision('high')",
            "torch": "torch.set_float32_matmul_precision('high')",
        },
    ),
    "fused": (
        _fused,
        {
            "transformers": "TrainingArguments(optim='adamw_torch_fused')",
            "lightning": "torch.optim.AdamW(…, fused=True) in configure_optimizers",
            "torch": "torch.optim.AdamW(…, fused=True)",
        },
    ),
    "unpadded": (_unpadded, _with_run(f"{_UNPADDED}, or {_RUN}", _UNPADDED)),
    "attention": (
        _attention,
        {"torch": "from_pretrained(…, attn_implementation='sdpa'), where the model has it"},
    ),
    "loader": (
        _loader,
        {
            "transformers": "TrainingArguments(dataloader_num_workers=4)",
            "torch": f"DataLoader(…, num_workers=4{_PINNED})",
        },
    ),
    "graphs": (_graphs, _with_run(_RUN, "trainfit.speed_up(model)")),
    "compile": (
        _compile,
        {
            "transformers": "TrainingArguments(torch_compile=True)",
            "lightning": "trainer.fit(torch.compile(module))",
            "torch": "model = torch.compile(model)",
        },
    ),
    "checkpointing": (
        _checkpointing,
        {
            "transformers": "TrainingArguments(gradient_checkpointing=False)",
            "torch": "leave gradient checkpointing out",
        },
    ),
}
"""Estimate and exact change of each optimization."""
NAMES = tuple(_CHANGES)


# ── the errors ────────────────────────────────────────────────────────────────────────────────

CHECKS = Path(__file__).with_name("what_if_checks.json")
"""Predicted and measured percents, as `benchmarks/what_if.py` records them."""


def recorded_errors(path: Path = CHECKS) -> dict[str, float]:
    """Median error of the recorded checks in points, by change."""
    errors: dict[str, list[float]] = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["checks"]:
        errors.setdefault(row["change"], []).append(abs(row["predicted"] - row["measured"]))
    return {name: median(every) for name, every in errors.items()}
