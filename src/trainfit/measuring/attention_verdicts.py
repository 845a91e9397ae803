"""Verdicts of the receipt about attention: its path, its dropout and the flash kernel."""

from __future__ import annotations

from trainfit.core.records import Scalar
from trainfit.measuring.judgement import Judgement
from trainfit.measuring.trace import AttentionSeen, Evidence

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
