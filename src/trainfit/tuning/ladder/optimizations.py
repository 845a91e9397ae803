"""The optimizations of the ladder, one function each: a rung, or why it has no place here.

Every row of the source documents' tables is among them.
"""

from __future__ import annotations

from functools import partial

from trainfit.core.plan_records import Plan
from trainfit.core.records import HardwareProfile
from trainfit.kernels import supported
from trainfit.tuning.ladder.rungs import FUSIBLE, NAIVE_BATCH, NotApplicable, Rung

Made = Rung | NotApplicable | None


def rungs_for(
    best: Plan, profile: HardwareProfile, no_liger: str | None = None
) -> tuple[tuple[Rung, ...], tuple[NotApplicable, ...]]:
    """The rungs from the naive baseline up to `best`, and what is not applicable here.

    `no_liger` is why Liger has nothing for the model, where it has nothing.
    """
    makers = (
        _tf32,
        _precision,
        _optimizer,
        _gradients,
        _workers,
        _pinned,
        _persistent,
        _cudnn,
        _attention,
        _needed_checkpointing,
        _batch,
        _grouping,
        _packing,
        _compile,
        _checkpointing,
        _other_half,
        _graphs,
        partial(_liger, no_liger),
        _channels_last,
        _evaluation,
    )
    made = [maker(best, profile) for maker in makers]
    rungs = tuple(one for one in made if isinstance(one, Rung))
    return rungs, tuple(one for one in made if isinstance(one, NotApplicable))


def _no(name: str, reason: str) -> NotApplicable:
    return NotApplicable(name=name, reason=reason)


def _why(plan: Plan, setting: str, otherwise: str) -> str:
    """The planner's reason."""
    return next((r.why for r in plan.reasons if r.setting == setting and r.why), otherwise)


# ── arithmetic ────────────────────────────────────────────────────────────────────────────────


def _tf32(best: Plan, _profile: HardwareProfile) -> Made:
    if not best.runtime.tf32:
        return _no("TF32", _why(best, "tf32", "the plan has it off"))
    return Rung(name="TF32", what="fp32 products on the matrix units", runtime={"tf32": True})


def _precision(best: Plan, _profile: HardwareProfile) -> Made:
    name = "mixed precision"
    if best.precision == "fp32":
        return _no(name, _why(best, "precision", "the plan is in fp32"))
    return Rung(name=name, what=f"autocast to {best.precision}", plan={"precision": best.precision})


def _optimizer(best: Plan, _profile: HardwareProfile) -> Made:
    if best.optimizer != "adamw_fused":
        return _no("fused AdamW", _why(best, "optimizer", "the plan has another"))
    what = "one kernel for all weights, not a dozen for each"
    return Rung(name="fused AdamW", what=what, plan={"optimizer": best.optimizer})


def _gradients(_best: Plan, _profile: HardwareProfile) -> Made:
    what = "gradients are let go after a step, not filled with zeros"
    return Rung(name="set_to_none", what=what, naive={"zeroed": False})


def _cudnn(_best: Plan, profile: HardwareProfile) -> Made:
    if not profile.gpus:
        return _no("cuDNN benchmark", "cuDNN is for GPUs")
    what = "cuDNN times its algorithms, for convolutions"
    return Rung(name="cuDNN benchmark", what=what, runtime={"cudnn_benchmark": True})


def _attention(best: Plan, _profile: HardwareProfile) -> Made:
    if best.attention not in FUSIBLE:
        comes = "; its kernel comes with packing" if best.packed else ""
        return _no("attention kernel", f"the model's attention is its own{comes}")
    what = "scaled_dot_product_attention, not products and a softmax"
    return Rung(name="attention kernel", what=what, naive={"eager": False})


# ── loader ────────────────────────────────────────────────────────────────────────────────────


def _workers(best: Plan, _profile: HardwareProfile) -> Made:
    if not best.num_workers:
        return _no("loader workers", f"0 planned: {_why(best, 'num_workers', 'they are off')}")
    return Rung(
        name="loader workers",
        what=f"{best.num_workers} processes make batches ahead, {best.prefetch_factor} each",
        plan={"num_workers": best.num_workers, "prefetch_factor": best.prefetch_factor},
    )


def _pinned(best: Plan, _profile: HardwareProfile) -> Made:
    if not best.pin_memory:
        return _no("pinned memory", _why(best, "pin_memory", "the plan has it off"))
    what = "batches in page-locked memory, copied while the GPU computes"
    return Rung(name="pinned memory", what=what, plan={"pin_memory": True})


def _persistent(best: Plan, _profile: HardwareProfile) -> Made:
    if not best.persistent_workers:
        return _no("persistent workers", _why(best, "persistent_workers", "there are no workers"))
    return Rung(
        name="persistent workers",
        what="loader processes stay from epoch to epoch",
        plan={"persistent_workers": True},
        needs=("loader workers",),
        between_epochs=True,
    )


# ── the step's shape ──────────────────────────────────────────────────────────────────────────


def _needed_checkpointing(best: Plan, _profile: HardwareProfile) -> Made:
    """Of a plan that does not fit without, below what makes batches larger."""
    if best.gradient_checkpointing == "none":
        return None
    return Rung(
        name="gradient checkpointing",
        what=f"blocks are computed again in the backward pass ({best.gradient_checkpointing})",
        plan={"gradient_checkpointing": best.gradient_checkpointing},
    )


def _batch(best: Plan, _profile: HardwareProfile) -> Made:
    if best.batch_size <= NAIVE_BATCH:
        return _no("batch size", f"the plan has {best.batch_size} at a time")
    names = ("batch_size", "micro_batch_tokens", "gradient_accumulation_steps")
    return Rung(
        name="batch size",
        what=f"{best.batch_size} sequences at a time, not {NAIVE_BATCH}",
        plan={name: getattr(best, name) for name in names},
    )


def _grouping(best: Plan, _profile: HardwareProfile) -> Made:
    if len(set(best.workload.lengths)) <= 1:
        return _no("grouping by length", "every sequence is as long as the others")
    what = "sequences of like length together, in steps of like size"
    return Rung(name="grouping by length", what=what, naive={"shuffled": False})


def _packing(best: Plan, _profile: HardwareProfile) -> Made:
    if not best.packed:
        return _no("packing", _why(best, "packed", "the plan pads"))
    return Rung(
        name="packing",
        what=f"sequences end to end, attention by {best.attention}",
        plan={"packed": True, "attention": best.attention},
        naive={"shuffled": False, "eager": False},
        needs=("mixed precision",),
        replaces=("grouping by length", "attention kernel"),
    )


def _compile(best: Plan, profile: HardwareProfile) -> Made:
    obstacle = _no_compile(profile)
    if obstacle is not None:
        return _no("torch.compile", obstacle)
    mode = best.compile_mode if best.compile else "default"
    return Rung(
        name="torch.compile",
        what="operations are joined into kernels of their own",
        plan={"compile": True, "compile_mode": mode},
    )


def _no_compile(profile: HardwareProfile) -> str | None:
    missing = profile.compile.missing(gpu=bool(profile.gpus))
    if missing:
        return f"it would fail here: {' and '.join(missing)} missing"
    return None


# ── trades, and what has no place ─────────────────────────────────────────────────────────────


def _checkpointing(best: Plan, _profile: HardwareProfile) -> Made:
    if best.workload.method == "frozen":
        why = "a frozen encoder keeps nothing for a backward pass"
        return _no("gradient checkpointing", why)
    if best.gradient_checkpointing != "none":
        return None
    return Rung(
        name="gradient checkpointing",
        what="every block is computed again in the backward pass: time for memory",
        plan={"gradient_checkpointing": "full"},
        trades=True,
    )


def _other_half(best: Plan, profile: HardwareProfile) -> Made:
    if best.precision != "bf16" or not profile.gpus or not profile.gpus[0].fp16:
        return None
    return Rung(
        name="fp16 instead of bf16",
        what="autocast to fp16, with loss scaling",
        plan={"precision": "fp16"},
        trades=True,
    )


def _graphs(_best: Plan, profile: HardwareProfile) -> Made:
    if not profile.gpus:
        return _no("CUDA graphs", "they are for GPUs")
    if _no_compile(profile) is not None:
        return _no("CUDA graphs", "they come with torch.compile")
    return Rung(
        name="CUDA graphs",
        what="compiled with mode reduce-overhead: kernels are launched together",
        plan={"compile": True, "compile_mode": "reduce-overhead"},
        trades=True,
    )


def _liger(obstacle: str | None, _best: Plan, profile: HardwareProfile) -> Made:
    if not profile.gpus:
        return _no("Liger kernels", "they are for GPUs")
    if obstacle is not None:
        return _no("Liger kernels", obstacle)
    if not supported.is_installed():
        return _no("Liger kernels", "liger-kernel is not installed")
    what = "norms, rotations and feed-forwards of transformers' models by Liger's kernels"
    return Rung(name="Liger kernels", what=what, naive={"liger": True}, trades=True)


def _channels_last(_best: Plan, _profile: HardwareProfile) -> Made:
    return _no("channels-last", "it is a layout of images, and text has none")


def _evaluation(best: Plan, _profile: HardwareProfile) -> Made:
    why = f"evaluation is no part of a training step; the plan has {best.eval_batch_size}"
    return _no("evaluation batch size", why)
