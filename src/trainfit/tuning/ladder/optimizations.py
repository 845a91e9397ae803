"""The optimizations of the ladder: a rung each, or the reason why it is not applicable here.

Every row of the source documents' tables is among them.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainfit.core.plan_records import Plan
from trainfit.core.records import HardwareProfile
from trainfit.kernels import supported
from trainfit.tuning.ladder.rungs import FUSIBLE, NAIVE_BATCH, NotApplicable, Rung

Made = Rung | NotApplicable


def rungs_for(
    best: Plan, profile: HardwareProfile, no_liger: str | None = None
) -> tuple[tuple[Rung, ...], tuple[NotApplicable, ...]]:
    """Rungs from the naive baseline up to `best`, and the optimizations that are not applicable.

    `no_liger` is why Liger has no kernels for the model, if it has none.
    """
    made = [
        *_arithmetic(best),
        *_loader(best),
        *_kernels(best, profile),
        *_shape(best),
        _compile(best, profile),
        *_trades(best, profile),
        _liger(no_liger, profile),
        _no("channels-last", "it is a layout of images, and text has none"),
        _no(
            "evaluation batch size",
            f"evaluation is no part of a training step; the plan has {best.eval_batch_size}",
        ),
    ]
    rungs = tuple(one for one in made if isinstance(one, Rung))
    return rungs, tuple(one for one in made if isinstance(one, NotApplicable))


def _no(name: str, reason: str) -> NotApplicable:
    return NotApplicable(name=name, reason=reason)


def _why(plan: Plan, setting: str, otherwise: str) -> str:
    return next((r.why for r in plan.reasons if r.setting == setting and r.why), otherwise)


def _arithmetic(best: Plan) -> Iterator[Made]:
    if best.runtime.tf32:
        what = "fp32 products on the matrix units"
        yield Rung(name="TF32", what=what, runtime={"tf32": True})
    else:
        yield _no("TF32", _why(best, "tf32", "the plan has it off"))
    if best.precision == "fp32":
        yield _no("mixed precision", _why(best, "precision", "the plan is in fp32"))
    else:
        what = f"autocast to {best.precision}"
        yield Rung(name="mixed precision", what=what, plan={"precision": best.precision})
    if best.optimizer != "adamw_fused":
        yield _no("fused AdamW", _why(best, "optimizer", "the plan has another"))
    else:
        what = "one kernel for all weights, not a dozen for each"
        yield Rung(name="fused AdamW", what=what, plan={"optimizer": best.optimizer})
    what = "gradients are let go after a step, not filled with zeros"
    yield Rung(name="set_to_none", what=what, naive={"zeroed": False})


def _loader(best: Plan) -> Iterator[Made]:
    if best.num_workers:
        ahead = best.prefetch_factor
        yield Rung(
            name="loader workers",
            what=f"{best.num_workers} processes make batches ahead, {ahead} each",
            plan={"num_workers": best.num_workers, "prefetch_factor": ahead},
        )
    else:
        why = _why(best, "num_workers", "they are off")
        yield _no("loader workers", f"0 planned: {why}")
    if best.pin_memory:
        what = "batches in page-locked memory, copied while the GPU computes"
        yield Rung(name="pinned memory", what=what, plan={"pin_memory": True})
    else:
        yield _no("pinned memory", _why(best, "pin_memory", "the plan has it off"))
    if best.persistent_workers:
        yield Rung(
            name="persistent workers",
            what="loader processes stay from epoch to epoch",
            plan={"persistent_workers": True},
            needs=("loader workers",),
            between_epochs=True,
        )
    else:
        why = _why(best, "persistent_workers", "there are no workers")
        yield _no("persistent workers", why)


def _kernels(best: Plan, profile: HardwareProfile) -> Iterator[Made]:
    if profile.gpus:
        what = "cuDNN times its algorithms, for convolutions"
        yield Rung(name="cuDNN benchmark", what=what, runtime={"cudnn_benchmark": True})
    else:
        yield _no("cuDNN benchmark", "cuDNN is for GPUs")
    if best.attention in FUSIBLE:
        what = "scaled_dot_product_attention, not products and a softmax"
        yield Rung(name="attention kernel", what=what, naive={"eager": False})
    else:
        comes = "; its kernel comes with packing" if best.packed else ""
        yield _no("attention kernel", f"the model's attention is its own{comes}")


def _shape(best: Plan) -> Iterator[Made]:
    """Rungs that change the shape of a step's micro-batches."""
    if best.gradient_checkpointing != "none":  # without it the larger batches do not fit
        yield Rung(
            name="gradient checkpointing",
            what=f"blocks are computed again in the backward pass ({best.gradient_checkpointing})",
            plan={"gradient_checkpointing": best.gradient_checkpointing},
        )
    if best.batch_size <= NAIVE_BATCH:
        yield _no("batch size", f"the plan has {best.batch_size} at a time")
    else:
        names = ("batch_size", "micro_batch_tokens", "gradient_accumulation_steps")
        yield Rung(
            name="batch size",
            what=f"{best.batch_size} sequences at a time, not {NAIVE_BATCH}",
            plan={name: getattr(best, name) for name in names},
        )
    if len(set(best.workload.lengths)) <= 1:
        yield _no("grouping by length", "every sequence is as long as the others")
    else:
        what = "sequences of like length together, in steps of like size"
        yield Rung(name="grouping by length", what=what, naive={"shuffled": False})
    if not best.packed:
        yield _no("packing", _why(best, "packed", "the plan pads"))
    else:
        yield Rung(
            name="packing",
            what=f"sequences end to end, attention by {best.attention}",
            plan={"packed": True, "attention": best.attention},
            naive={"shuffled": False, "eager": False},
            needs=("mixed precision",),
            replaces=("grouping by length", "attention kernel"),
        )


def _compile(best: Plan, profile: HardwareProfile) -> Made:
    if missing := profile.compile.missing(gpu=bool(profile.gpus)):
        return _no("torch.compile", f"it would fail here: {' and '.join(missing)} missing")
    return Rung(
        name="torch.compile",
        what="operations are joined into kernels of their own",
        plan={"compile": True, "compile_mode": best.compile_mode if best.compile else "default"},
    )


def _trades(best: Plan, profile: HardwareProfile) -> Iterator[Made]:
    """Rungs that give one thing up for another, which nothing is built on."""
    if best.workload.method == "frozen":
        why = "a frozen encoder keeps nothing for a backward pass"
        yield _no("gradient checkpointing", why)
    elif best.gradient_checkpointing == "none":
        yield Rung(
            name="gradient checkpointing",
            what="every block is computed again in the backward pass: time for memory",
            plan={"gradient_checkpointing": "full"},
            trades=True,
        )
    if best.precision == "bf16" and profile.gpus and profile.gpus[0].fp16:
        what = "autocast to fp16, with loss scaling"
        plan = {"precision": "fp16"}
        yield Rung(name="fp16 instead of bf16", what=what, plan=plan, trades=True)
    if not profile.gpus:
        yield _no("CUDA graphs", "they are for GPUs")
    elif profile.compile.missing(gpu=True):
        yield _no("CUDA graphs", "they come with torch.compile")
    else:
        yield Rung(
            name="CUDA graphs",
            what="compiled with mode reduce-overhead: kernels are launched together",
            plan={"compile": True, "compile_mode": "reduce-overhead"},
            trades=True,
        )


def _liger(obstacle: str | None, profile: HardwareProfile) -> Made:
    if not profile.gpus:
        return _no("Liger kernels", "they are for GPUs")
    if obstacle is not None or not supported.is_installed():
        return _no("Liger kernels", obstacle or "liger-kernel is not installed")
    what = "norms, rotations and feed-forwards of transformers' models by Liger's kernels"
    return Rung(name="Liger kernels", what=what, naive={"liger": True}, trades=True)
