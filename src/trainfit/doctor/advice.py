"""Steps that several faults share, so that they say the same everywhere."""

from __future__ import annotations

BUSY = 80
"""Percent of the time that a GPU should work, and of its memory that training should use."""
IDLE = 70
"""Below this share of the time the guides call for a change."""
GUIDE_MFU = 15.0
"""Percent: what the tuning guide calls good in most setups begins here."""

RAISE_BATCH = (
    "Raise training.batch_size until 85 to 90% of the memory is used, then data.max_length."
)
PRECISION = "device.mixed_precision=auto and device.tf32=true."
COMPILE = "optimization.compile=true once the run is stable."
LOADER = (
    "training.num_workers=4 (2 to 8, and never more than cores − 2) with training.pin_memory=true, "
    "so that the GPU does not wait for data."
)
FEWER_PAUSES = "training.logging_steps=100 and a larger training.eval_steps, for fewer pauses."
REST = "device.cudnn_benchmark=true, where there are convolutions; data on an SSD."
FASTER = (RAISE_BATCH, PRECISION, COMPILE, LOADER, FEWER_PAUSES, REST)

WIDER_RANGE = (
    "Leave fp16: it overflows over 65,504. device.mixed_precision=bf16 where it is native (compute "
    "capability 8.0 and up), else device.mixed_precision=off, which is fp32."
)
LOWER_RATE = (
    "Lower the learning rate by 10 to 20%, then more: training.learning_rate=1.6e-5; and warm up "
    "for longer: training.warmup_ratio=0.1."
)
STEADIER = (
    LOWER_RATE,
    "Clip the gradient: training.max_grad_norm=1.0.",
    "optimization.compile=false while you look for the cause.",
    "Look for bad labels, empty texts and weights that are not finite; "
    "training.nonfinite=stop ends at the first such step.",
)
LOSS_SCALING = "Where fp16 must be, scale the loss and keep the weights in fp32, as trainfit does."
NO_FP16 = (
    "Do not go from bf16 to fp16 for it, as some guides say: bf16 has the range of fp32, fp16 a "
    "far smaller one. If anything, device.mixed_precision=off for a while."
)


def nan_steps(fp16: bool) -> tuple[str, ...]:
    """What to do about losses that are not finite, by what they were computed in."""
    return (WIDER_RANGE, *STEADIER, LOSS_SCALING) if fp16 else (*STEADIER, NO_FP16)
