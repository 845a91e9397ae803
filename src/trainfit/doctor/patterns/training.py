"""The training itself: numbers that are not numbers, precision, kernels not used, slow steps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import median

from trainfit.doctor.advice import FASTER, GUIDE_MFU, NO_FP16, STEADIER, WIDER_RANGE, nan_steps
from trainfit.doctor.finding import Fault, Seen
from trainfit.doctor.patterns.pattern import Context, Pattern, Sign, quote

_HALF = r"['\"]?(?:fp16|float16|torch\.float16|torch\.half|16-mixed)\b"
FP16 = tuple(
    re.compile(sign)
    for sign in (
        r"fp16['\"]?\s*[:=]\s*['\"]?(?:True|true|1)\b",
        rf"precision['\"]?\s*[:= ]\s*{_HALF}",
        rf"dtype['\"]?\s*[:=]\s*{_HALF}",
    )
)
"""Signs that a run computes in fp16."""


def _nan(signs: Sequence[Sign], context: Context) -> Seen | None:
    return Seen(evidence=quote(signs), mend=nan_steps(context.fp16))


def _mfu(signs: Sequence[Sign], _context: Context) -> Seen | None:
    shares = [share for sign in signs if (share := float(sign.groups["mfu"] or 0)) > 0]
    if not shares or (middle := median(shares)) >= GUIDE_MFU:
        return None
    return Seen(evidence=f"mfu {middle:.1f}% (median of {len(shares)} lines)")


TRAINFIT_OOM = Fault(
    id="trainfit_oom",
    severity="warning",
    title="Memory ran out, and the run went on with a finer cut",
    why="Results do not change, but a retried step costs time, and finer cuts are slower.",
    mend=(
        "Begin with what fits: training.batch_size=8 (lower than now); the effective batch stays.",
        "device.expandable_segments=true, where a retry with the same "
        "cut went through: that was fragmentation.",
        "In an evaluation: training.eval_batch_size=8.",
    ),
)

PATTERNS = (
    Pattern(
        fault=Fault(
            id="nan_loss",
            severity="error",
            title="The loss is not a number",
            why="From here on every weight may be spoiled. Mostly fp16 overflowed, the learning "
            "rate is too high, or the data is bad.",
            mend=(*nan_steps(fp16=True), NO_FP16),
        ),
        like="{'loss': nan, 'grad_norm': nan}",
        signs=(
            # The look back stands behind the first word: regular expressions that begin with a
            # plain word are searched for ten times as fast.
            r"loss(?<![A-Za-z]loss)['\"]?\s*[:=]?\s*(?:nan|NaN|-?inf)\b",
            r"Loss['\"]?\s*[:=]?\s*(?:nan|NaN|-?inf)\b",
            r"loss(?<!if loss)(?<!when loss)(?<!where loss)(?<!case loss) is (?:nan|NaN|inf)\b",
            r"Loss is (?:nan|NaN|inf)\b",
            r"grad(?:ient)?[_ ]norm['\"]?\s*[:=]?\s*(?:nan|NaN)\b",
            r"Function '\w+Backward\d*' returned nan values in its \d+th output",
            r"skipped at step \d+: step \d+: loss [\d.einfa+-]+, gradient norm [\d.einfa+-]+",
        ),
        explain=_nan,
    ),
    Pattern(
        fault=Fault(
            id="fp16_overflow",
            severity="error",
            title="fp16 overflows at every loss scale",
            why="The scale has reached its smallest value and gradients still overflow.",
            mend=(WIDER_RANGE, *STEADIER),
        ),
        like="Current loss scale already at minimum",
        signs=(
            r"[Cc]urrent loss scale already at minimum",
            r"Minimum loss scale reached \([\d.e-]+\)",
            r"value cannot be converted to type at::Half without overflow",
        ),
    ),
    Pattern(
        fault=Fault(
            id="fp16_weights",
            severity="error",
            title="The weights themselves are in fp16",
            why="Loss scaling needs trained weights in fp32; AdamW on half-precision weights loses "
            "small updates.",
            mend=(
                "Load the model in fp32 (dtype=torch.float32) and let autocast do the rest: "
                "device.mixed_precision=auto.",
            ),
        ),
        like="Attempting to unscale FP16 gradients",
        signs=(r"Attempting to unscale FP16 gradients",),
    ),
    Pattern(
        fault=TRAINFIT_OOM,
        like="oom at step 12: memory ran out again: steps are cut into 8 from here",
        signs=(
            r"oom at step \d+: memory ran out(?: again: steps are cut into \d+ from here"
            r"|: the cache was given back and the step is taken again"
            r"| in an evaluation: \d+ sequences at a time from here)?",
        ),
    ),
    Pattern(
        fault=Fault(
            id="fused_optimizer",
            severity="error",
            title="The fused optimizer is not there",
            why="An older torch, or weights on a device that it has no kernel for.",
            mend=(
                "optimization.optimizer=adamw (auto chooses by the device); in transformers "
                "optim=adamw_torch.",
            ),
        ),
        like="Optimizer not found: adamw_torch_fused",
        signs=(
            r"Optimizer not found: adamw_torch_fused",
            r"`fused=True` requires all the params to be floating point Tensors",
        ),
    ),
    Pattern(
        fault=Fault(
            id="attention_kernel",
            severity="error",
            title="No attention kernel fits, or flash attention does not run on this GPU",
            why="Flash attention needs compute capability 8.0 and half precision. Turning the math "
            "kernel off removes the only one that always works.",
            mend=(
                "model.use_flash_attention=false; the other kernels stay as fallbacks.",
                "In a script of your own: torch.backends.cuda.enable_math_sdp(True), and no "
                "attn_implementation='flash_attention_2' before Ampere.",
            ),
        ),
        like="FlashAttention only supports Ampere GPUs or newer",
        signs=(
            r"FlashAttention only supports Ampere GPUs or newer",
            r"No available kernel\. ?Aborting execution",
        ),
    ),
    Pattern(
        fault=Fault(
            id="tf32_off",
            severity="warning",
            title="TF32 is available and off",
            why="fp32 matrix products run many times slower than they could.",
            mend=(
                "device.tf32=true (from compute capability 8.0 on; older GPUs have none). In a "
                "script of your own: torch.backends.cuda.matmul.allow_tf32 = True.",
            ),
        ),
        like="TensorFloat32 tensor cores for float32 matrix multiplication available but not "
        "enabled",
        signs=(
            r"TensorFloat32 tensor cores for float32 matrix multiplication available but not "
            r"enabled",
        ),
    ),
    Pattern(
        fault=Fault(
            id="illegal_instruction",
            severity="error",
            title="The processor refused an instruction",
            why="A virtual machine shows what its processor cannot do (AMX), or a wheel was built "
            "for a newer one.",
            mend=(
                "Stay in fp32 on that CPU: device.mixed_precision=off.",
                "`export ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16` to do without AMX.",
            ),
        ),
        like="Illegal instruction (core dumped)",
        signs=(r"Illegal instruction(?: \(core dumped\)|\s*$)", r"Signal 4 \(SIGILL\) received"),
    ),
    Pattern(
        fault=Fault(
            id="low_mfu",
            severity="warning",
            title="The GPU does little of what it could (MFU)",
            why="15 to 25% is usual for a small model, 30% and more is good; a few percent mean "
            "small batches, no mixed precision, or waiting for data.",
            mend=FASTER,
        ),
        like="iter 100: loss 8.5174, time 1011.21ms, mfu 1.6%",
        signs=(r"mfu(?<![a-z]mfu)['\"]?[:= ]+(?P<mfu>-?\d+(?:\.\d+)?)\s?%",),
        explain=_mfu,
    ),
)
