"""Verdicts by the kernels that ran: attention, and the update of the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from trainfit.core.records import Scalar
from trainfit.measuring.trace import AttentionSeen, Evidence


@dataclass(frozen=True, slots=True)
class Judgement:
    """Observed value of a setting, with its evidence and the fix where it is not as requested."""

    observed: Scalar
    evidence: str
    fix: str = ""
    right: bool | None = None
    """False if the observation is not as requested; None: compare the values."""
    on: bool | None = None
    """True if the optimization is on; None: the observed value says so."""


class ReceiptRule(NamedTuple):
    """An item of the receipt."""

    title: str
    judge: Callable[[Scalar, Evidence], Judgement | str]
    elsewhere: str = ""
    """Reason why it does not apply without a GPU."""


_HALF = ("bf16", "fp16")
_SDPA = ("flash", "efficient", "cudnn", "math", "cpu")
_OWN = {
    "disentangled": "the model has attention of its own",
    "softcapped": "the model caps its logits, which the flash kernel does not do",
}
_LARGEST_HEAD = 256


def attention(requested: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by the kernel that was called most."""
    found = seen.attention
    if found.kernel is None and not found.softmaxes:
        return "no attention was computed in the step"
    observed = found.kernel or "eager"
    calls = ", ".join(f"{count} {kernel}" for kernel, count in found.calls.items())
    evidence = f"calls: {calls}" if calls else f"{found.softmaxes} softmaxes and no kernel"
    if found.masked:
        evidence += ", with a mask"
    right = {"sdpa": observed in _SDPA, "own": True, "flash": _is_flash(found)}.get(
        str(requested), requested == observed
    )
    fix = "see flash_attention" if requested == "flash" else _attention_fix(str(requested))
    return Judgement(observed, evidence, fix, right)


def _attention_fix(requested: str) -> str:
    return {
        "sdpa": "build the model with attn_implementation='sdpa'",
        "varlen": "packed rows in half precision on compute capability 8.0 or newer",
        "varlen_efficient": "packed rows on an NVIDIA GPU",
        **dict.fromkeys(_OWN, "packed rows on a GPU with Triton"),
    }.get(requested, f"build the model with attn_implementation={requested!r}")


def attention_dropout(_: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by the number that the attention kernel was given."""
    found = seen.attention
    if found.dropout is None:
        return "no attention kernel ran that tells its dropout"
    evidence = f"the {found.kernel} kernel was given dropout {found.dropout:g}"
    return Judgement(found.dropout, evidence, "train with model.attention_dropout as planned")


def flash_attention(_: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by the kernel, and what kept it from running."""
    found = seen.attention
    if found.kernel is None or found.kernel in _OWN:
        return _OWN.get(found.kernel or "", "no attention kernel ran")
    observed = _is_flash(found)
    cause, fix = _no_flash(seen)
    evidence = f"the {found.kernel} kernel ran" + ("" if observed else f": {cause}")
    return Judgement(observed, evidence, fix)


def _is_flash(found: AttentionSeen) -> bool:
    """True for a flash kernel, or cuDNN's without a mask, which newer GPUs prefer."""
    return found.kernel in ("flash", "varlen") or (found.kernel == "cudnn" and not found.masked)


def _no_flash(seen: Evidence) -> tuple[str, str]:
    found = seen.attention
    if found.masked:
        return "a mask was passed, which the flash kernel does not take", (
            "pack sequences (training on packed rows needs no mask), or pass is_causal"
        )
    if found.dtype not in _HALF:
        return f"it was given {found.dtype}, and takes half precision", "mixed precision"
    if found.head is not None and found.head > _LARGEST_HEAD:
        return f"heads of {found.head} are too large for it", "a model with smaller heads"
    if seen.switches.flash is False:
        return "torch's switch for it is off", "torch.backends.cuda.enable_flash_sdp(True)"
    return "torch chose another", "see torch.backends.cuda.can_use_flash_attention"


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
