"""A plan built by hand, as the planner would hand it over."""

from dataclasses import replace
from typing import Any

from trainfit.core.plan_records import (
    MemoryEstimate,
    Plan,
    Reason,
    RuntimeSettings,
    TaskSpec,
    TimeEstimate,
    Workload,
)

MEMORY = MemoryEstimate(
    weights_gib=4.0,
    gradients_gib=3.75,
    optimizer_gib=7.5,
    activations_gib=5.0,
    workspace_gib=0.25,
    peak_allocated_gib=17.0,
    peak_reserved_gib=17.5,
    capacity_gib=23.5,
    fits=True,
    error_percent=1.5,
)
TIME = TimeEstimate(
    tokens_per_second=30_123.4,
    samples_per_second=96.25,
    mfu=0.412,
    step_seconds=0.166,
    epoch_seconds=138.8,
    total_seconds=2775.0,
    error_percent=20.0,
)
PLAN = Plan(
    fits=True,
    task=TaskSpec(factory="trainfit.jobs.nli:build", arguments={"model": "gemma-3-1b-it"}),
    workload=Workload(
        lengths=(120, 300, 512),
        sequences=13_356,
        max_length=512,
        effective_batch_size=16,
        epochs=20,
        method="dora",
    ),
    gpu="rtx_4090",
    precision="bf16",
    weights_dtype="bfloat16",
    runtime=RuntimeSettings(tf32=True, expandable_segments=True, seed=42),
    packed=False,
    attention="sdpa",
    batch_size=8,
    micro_batch_tokens=4096,
    gradient_accumulation_steps=2,
    effective_batch_size=16,
    cuts=(2, 4, 8),
    gradient_checkpointing="none",
    compile=True,
    compile_mode="max-autotune-no-cudagraphs",
    optimizer="adamw_fused",
    num_workers=6,
    pin_memory=True,
    persistent_workers=True,
    prefetch_factor=2,
    eval_batch_size=32,
    memory=MEMORY,
    time=TIME,
    reasons=(
        Reason(
            setting="precision",
            value="bf16",
            why="the GPU has it in its matrix units",
            alternatives=("fp16: needs loss scaling", "fp32: half as fast"),
        ),
        Reason(setting="batch_size", value=8, why="the largest that fits"),
    ),
    advice=("an effective batch of 32 is the MFU table's choice",),
)


def make_plan(**changes: Any) -> Plan:
    """A plan that fits a 24 GB card, with the changes given; `memory__x` changes the estimate."""
    nested = {key: changes.pop(key) for key in list(changes) if "__" in key}
    plan = replace(PLAN, **changes)
    for key, value in nested.items():
        part, name = key.split("__")
        plan = replace(plan, **{part: replace(getattr(plan, part), **{name: value})})
    return plan
