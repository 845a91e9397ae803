"""What to try: the planner's own answer, and what differs from it in one setting.

Every candidate is a complete plan (space.py). What cannot win or does not fit is told, with the
reason, and not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from trainfit.kernels import liger
from trainfit.records import Plan
from trainfit.tuning.space import KEPT, Space, changed, fits, predicted_gib, room, with_budget


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A plan that differs from another, or why it is not worth a trial."""

    plan: Plan
    skipped: str = ""


def promising(space: Space) -> Iterator[Variant]:
    """What is most likely to beat the planner's answer, in the order to try it in."""
    axes = (_compile, _budget) if space.on_gpu else (_budget, _optimizer)
    return _along(space, space.base, axes)


def neighbours(space: Space, plan: Plan) -> Iterator[Variant]:
    """Every plan that is one setting away from `plan`, the most likely to be faster first.

    Made as they are asked for: some take the planner seconds.
    """
    return _along(space, plan, _GPU_AXES if space.on_gpu else _CPU_AXES)


Axis = Callable[[Space, Plan], Iterator[Variant]]


def _along(space: Space, plan: Plan, axes: tuple[Axis, ...]) -> Iterator[Variant]:
    for axis in axes:
        for variant in axis(space, plan):
            fine = variant.skipped or fits(space, variant.plan)
            yield variant if fine else _too_large(space, variant)


# ── the axes ──────────────────────────────────────────────────────────────────────────────────


def _compile(space: Space, plan: Plan) -> Iterator[Variant]:
    if not space.free("compile"):
        return
    if plan.compile:
        yield Variant(plan=changed(replace(plan, compile_mode="default"), compile=False))
    elif not space.profile.compile.missing(gpu=space.on_gpu):
        yield Variant(plan=changed(plan, compile=True))


def _graphs(space: Space, plan: Plan) -> Iterator[Variant]:
    """CUDA graphs record one shape."""
    static = plan.packed or space.question.causal
    why = "" if static else "CUDA graphs need one shape, and padded rows have several"
    yield from _mode(space, plan, "reduce-overhead", why)


def _autotune(space: Space, plan: Plan) -> Iterator[Variant]:
    """It takes the longest to compile."""
    yield from _mode(space, plan, "max-autotune-no-cudagraphs")


def _mode(space: Space, plan: Plan, mode: str, why: str = "") -> Iterator[Variant]:
    if plan.compile and space.free("compile", "compile_mode"):
        other = "default" if plan.compile_mode == mode else mode
        yield Variant(plan=replace(plan, compile_mode=other), skipped=why)


def _budget(space: Space, plan: Plan) -> Iterator[Variant]:
    """Other cuts of the same step. A pinned batch size is a cap, and all below it is free."""
    if not space.free("gradient_accumulation_steps"):
        return
    for factor in (0.5, 2.0):
        made = with_budget(space, plan, factor)
        if made.micro_batch_tokens != plan.micro_batch_tokens:
            yield Variant(plan=made)


def _packing(space: Space, plan: Plan) -> Iterator[Variant]:
    if not (space.base.packed and plan.packed and space.free("flash")):
        return
    padded = space.ask({"flash": False})
    alike = changed(
        padded, optimizer=plan.optimizer, gradient_checkpointing=plan.gradient_checkpointing
    )
    made = replace(alike, **{name: getattr(plan, name) for name in _LOADER})
    why = "" if padded.fits else "padded rows do not fit, by the planner"
    yield Variant(plan=made, skipped=why)


_LOADER = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")


def _workers(space: Space, plan: Plan) -> Iterator[Variant]:
    if not space.free("num_workers"):
        return
    most = space.base.num_workers
    for count in dict.fromkeys((0, most // 2, most)):
        if count != plan.num_workers:
            yield Variant(
                plan=replace(
                    plan,
                    num_workers=count,
                    persistent_workers=count > 0,
                    prefetch_factor=2 if count else None,
                )
            )


def _optimizer(space: Space, plan: Plan) -> Iterator[Variant]:
    if space.free("optimizer"):
        other = "adamw" if plan.optimizer == "adamw_fused" else "adamw_fused"
        yield Variant(plan=changed(plan, optimizer=other))


def _checkpointing(space: Space, plan: Plan) -> Iterator[Variant]:
    """To compute twice only pays where it makes room for larger micro-batches."""
    if not space.free("gradient_checkpointing") or space.question.workload.method == "frozen":
        return
    larger = with_budget(space, plan, 2.0)
    roomy = larger.micro_batch_tokens != plan.micro_batch_tokens
    why = "" if roomy else "micro-batches cannot be larger: it would only compute more"
    for mode in KEPT:
        if KEPT[mode] < KEPT[plan.gradient_checkpointing]:
            yield Variant(plan=changed(larger, gradient_checkpointing=mode), skipped=why)
        elif mode != plan.gradient_checkpointing:
            yield Variant(plan=changed(plan, gradient_checkpointing=mode))


def _liger(space: Space, plan: Plan) -> Iterator[Variant]:
    """By the memory of a plan without it, which is not less."""
    if space.question.no_liger is None and liger.is_installed() and space.free("liger"):
        yield Variant(plan=replace(plan, liger=not plan.liger))


def _kernel(space: Space, plan: Plan) -> Iterator[Variant]:
    """Packed rows have a kernel of their own; flash takes no mask, which padded rows have."""
    if not (space.on_gpu and not plan.packed and plan.attention == "sdpa" and space.free("flash")):
        return
    for kernel in (None, "flash", "efficient") if space.question.causal else (None, "efficient"):
        if kernel != plan.runtime.attention:
            yield Variant(plan=replace(plan, runtime=replace(plan.runtime, attention=kernel)))


def _tf32(space: Space, plan: Plan) -> Iterator[Variant]:
    """Products that are left in fp32, by the matrix units or without them."""
    if space.on_gpu and space.profile.gpus[0].tf32 and space.free("tf32"):
        other = replace(plan.runtime, tf32=not plan.runtime.tf32)
        why = "no product is faster without the matrix units" if plan.runtime.tf32 else ""
        yield Variant(plan=replace(plan, runtime=other), skipped=why)


def _precision(space: Space, plan: Plan) -> Iterator[Variant]:
    if not (space.on_gpu and space.free("precision")):
        return
    gpu = space.profile.gpus[0]
    if plan.precision == "bf16" and gpu.fp16:
        yield Variant(plan=changed(plan, precision="fp16"))
    elif plan.precision == "fp16" and gpu.native_bf16:
        yield Variant(plan=changed(plan, precision="bf16"))
    if plan.precision != "fp32":
        slow = "a fraction of the speed of half precision, by the GPU's peaks"
        exact = replace(plan, precision="fp32", packed=False)
        yield Variant(plan=exact, skipped=slow)


def _pinning(space: Space, plan: Plan) -> Iterator[Variant]:
    if space.on_gpu and space.free("pin_memory"):
        yield Variant(plan=replace(plan, pin_memory=not plan.pin_memory))


_GPU_AXES = (
    _compile,
    _budget,
    _workers,
    _graphs,
    _packing,
    _autotune,
    _optimizer,
    _checkpointing,
    _liger,
    _kernel,
    _precision,
    _tf32,
    _pinning,
)
_CPU_AXES = (_budget, _workers, _optimizer, _checkpointing, _compile)


def _too_large(space: Space, variant: Variant) -> Variant:
    need = predicted_gib(space.base, variant.plan)
    most = room(space.base)
    return replace(variant, skipped=f"needs about {need:.1f} GiB of {most:.1f}, by the planner")
