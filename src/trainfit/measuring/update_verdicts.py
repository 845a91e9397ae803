"""Verdicts on the optimizer: its kernel, the dtype of its moments, and where they are."""

from __future__ import annotations

from trainfit.core.records import Scalar
from trainfit.measuring.judgement import Judgement
from trainfit.measuring.trace import Evidence

_FUSED = ("fused", "compiled", "own")
_HAVE_FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
"""Optimizers of torch with a fused kernel."""
_MOMENTS = {"adamw_fused": "float32", "adamw": "float32", "adamw_bf16": "bfloat16"}
"""Dtype of the moments by optimizer; those of adamw_8bit are uint8 unless all weights are small."""
_BY_CLASS = {"Muon": "muon", "Adafactor": "adafactor", "AdamW8bit": "adamw_8bit"}
_NO_STEP = "no optimizer step was seen"


def fused_optimizer(_: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by the operators that updated the weights."""
    if not seen.updates:
        return _NO_STEP
    calls = ", ".join(f"{count} {kind}" for kind, count in seen.updates.items())
    names = ", ".join(f"{name} ({kind})" for name, kind in seen.optimizers.items())
    evidence = f"calls that updated the weights: {calls}" + (f", by {names}" if names else "")
    able = [kind for name, kind in seen.optimizers.items() if name in _HAVE_FUSED]
    observed = all(kind in _FUSED for kind in able or seen.updates)
    if not observed:
        evidence += "; the fused kernel was not called"
    fix = (
        "build AdamW with fused=True; it takes floating-point weights of one device, "
        "so look for a fallback that was taken silently"
    )
    return Judgement(observed, evidence, fix)


def optimizer(requested: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by the operators that updated the weights, and by the dtype of the moments."""
    if not seen.updates:
        return _NO_STEP
    observed = _observed(seen)
    evidence = f"updates by {', '.join(f'{n} ({kind})' for n, kind in seen.optimizers.items())}"
    if seen.moments:
        sizes = (f"{size / 2**20:,.1f} MiB {where}" for where, size in seen.moments.items())
        evidence += f"; state: {', '.join(sizes)}"
    dtype = _MOMENTS.get(observed)
    kept = not seen.moments or dtype is None or any(n.startswith(dtype) for n in seen.moments)
    fix = f"train with optimization.optimizer={requested}, and no optimizer of the job's own"
    return Judgement(observed, evidence, fix, requested == observed and kept)


def _observed(seen: Evidence) -> str:
    """Name of the optimizer in a configuration, or of its class."""
    names = seen.optimizers
    for name, known in _BY_CLASS.items():
        if name in names:
            return known
    if "SmallAdamW" in names:
        kinds = {where.partition(" ")[0] for where in seen.moments}
        return "adamw_bf16" if "bfloat16" in kinds else "adamw_8bit"
    if "AdamW" in names:
        return "adamw_fused" if names["AdamW"] == "fused" else "adamw"
    return next(iter(names), "unknown")


def offload(_: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by the memory that holds the moments, and the copies from it."""
    held = sum(size for where, size in seen.moments.items() if where.endswith("on the host"))
    evidence = (
        f"{held / 2**20:,.1f} MiB of moments in the host's memory, "
        f"fetched by {seen.fetched} copies in the step"
    )
    fix = "use adamw_fused or adamw_bf16, which trainfit keeps there, on an NVIDIA GPU"
    return Judgement(held > 0 and seen.fetched > 0, evidence, fix)
