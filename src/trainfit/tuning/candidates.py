"""Candidates for tune: complete plans that differ from the planner's in one setting.

A candidate that cannot win or does not fit is recorded with the reason, and not run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from trainfit.core.plan_records import MemoryEstimate, Plan
from trainfit.core.records import HardwareProfile, Scalar
from trainfit.core.settings import BY_NAME, chosen_by, with_values
from trainfit.kernels import supported
from trainfit.packing import Cut, ladder
from trainfit.planning import decide
from trainfit.planning.cuts import Folds, as_arrays
from trainfit.planning.estimator.estimate import MARGIN
from trainfit.planning.fit import profile_cuts
from trainfit.planning.question import Question

Ask = Callable[[Mapping[str, Scalar]], Plan]
"""The planner's answer with further settings pinned."""
KEPT = {"none": 1.0, "selective": 0.6, "full": 0.3}
"""Upper bound of the share of activations that stays in memory, by checkpointing mode."""
_ARGUMENTS = {
    "precision": "precision",
    "optimizer": "optimizer",
    "compile": "compile",
    "gradient_checkpointing": "checkpointing",
}
"""Settings that the factory of the estimated step takes, and its names for them."""
_EAGER = 2.2
"""Upper bound of an eager step's activations, as a multiple of a compiled step's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """Question, machine and starting plan of a search."""

    question: Question
    profile: HardwareProfile
    base: Plan
    """The planner's own answer."""
    ask: Ask

    @property
    def on_gpu(self) -> bool:
        """True where there is a GPU to train on."""
        return bool(self.profile.gpus)

    def free(self, *names: str) -> bool:
        """Tell if neither the user nor a preset has set any of these."""
        pins = self.question.pins
        return all(name not in pins or pins[name].origin == "default" for name in names)


def settings_of(plan: Plan) -> dict[str, Scalar]:
    """Values of the tuned settings, by name."""
    return {row.name: row.of(plan) for row in chosen_by("tune")}


def differences(base: Plan, plan: Plan) -> dict[str, Scalar]:
    """Tuned settings in which `plan` differs from `base`, with its values."""
    before = settings_of(base)
    return {name: value for name, value in settings_of(plan).items() if value != before[name]}


# ── consistent plans ──────────────────────────────────────────────────────────────────────────


def changed(plan: Plan, **changes: Any) -> Plan:
    """Replace settings of the plan, and the estimated step's arguments of the same names."""
    arguments = plan.task.arguments | {
        _ARGUMENTS[name]: value for name, value in changes.items() if name in _ARGUMENTS
    }
    task = replace(plan.task, arguments=arguments)
    return replace(with_values(plan, changes), task=task)


def recomputing(space: Space, plan: Plan, mode: str) -> Plan:
    """Change the checkpointing, and reset the activation budget, which saves the same memory."""
    budget = {"activation_budget": 1.0} if space.free("activation_budget") else {}
    return changed(plan, gradient_checkpointing=mode, **budget)


def with_budget(space: Space, plan: Plan, factor: float) -> Plan:
    """Change the tokens of a micro-batch by about `factor`; optimizer steps stay the same."""
    workload = space.question.workload
    longest = max(map(max, space.question.folds))
    share = math.ceil(plan.effective_batch_size / plan.ranks)
    rows = share if space.free("batch_size") else space.base.batch_size
    most = max(longest, rows * workload.max_length)
    if not plan.packed:
        most = min(most, max(longest, round(plan.micro_batch_tokens * factor)))
    count = min(max(1, round(plan.gradient_accumulation_steps / factor)), share)
    batch, ranks = plan.effective_batch_size, plan.ranks
    rungs, shape = _cut(space.question.folds, plan.packed, batch, most, ranks, count)
    cut = rungs[0]
    return replace(
        plan,
        task=replace(plan.task, arguments=plan.task.arguments | shape),
        micro_batch_tokens=cut.tokens,
        batch_size=max(1, math.ceil(cut.tokens / workload.max_length)),
        gradient_accumulation_steps=cut.micro_batches,
        cuts=tuple(rung.micro_batches for rung in rungs),
        memory=_scaled(plan.memory, cut.tokens / plan.micro_batch_tokens),
        time=None,
    )


@lru_cache(maxsize=32)
def _cut(
    folds: Folds, packed: bool, effective: int, cap: int, ranks: int, count: int
) -> tuple[tuple[Cut, ...], dict[str, Any]]:
    """Ladder of cuts, and the shape of the first; cached, since it takes a while.

    `count` is the least number of packed micro-batches, or the most of padded ones.
    """
    first, *others = arrays = as_arrays(folds)
    rungs = ladder(
        first,
        effective,
        cap,
        padded=not packed,
        ranks=ranks,
        at_least=count if packed else 1,
        at_most=count,
        folds=others,
    )
    return rungs, profile_cuts(arrays, rungs[:1], effective, ranks)[0].shape


def _scaled(memory: MemoryEstimate | None, factor: float) -> MemoryEstimate | None:
    """Scale the activations of an estimate, and the peaks with them."""
    if memory is None:
        return None
    more = memory.activations_gib * (factor - 1)
    return replace(
        memory,
        activations_gib=memory.activations_gib + more,
        peak_allocated_gib=memory.peak_allocated_gib + more,
        peak_reserved_gib=memory.peak_reserved_gib + more,
    )


# ── what fits ─────────────────────────────────────────────────────────────────────────────────


def fits(space: Space, plan: Plan) -> bool:
    """Tell if a plan fits: by an upper bound, or by the planner where the bound is too high."""
    if predicted_gib(space.base, plan) <= room(space.base):
        return True
    pins: dict[str, Scalar] = {
        "batch_size": plan.batch_size,
        "gradient_checkpointing": plan.gradient_checkpointing,
        "compile": plan.compile,
    }
    return space.ask(pins).fits


def predicted_gib(base: Plan, plan: Plan) -> float:
    """Upper bound of the memory that `plan` reserves, from the breakdown of `base`."""
    memory = base.memory
    if memory is None:
        return 0.0
    factor = plan.micro_batch_tokens / base.micro_batch_tokens
    factor *= KEPT[plan.gradient_checkpointing] / KEPT[base.gradient_checkpointing]
    if base.compile and not plan.compile and not memory.bound:
        factor *= _EAGER
    return memory.peak_reserved_gib + memory.activations_gib * (factor - 1)


def room(base: Plan) -> float:
    """Memory in GiB that a step may use, less the safety margin."""
    return math.inf if base.memory is None else base.memory.capacity_gib * (1 - MARGIN)


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A plan to try; `skipped` is the reason not to, if there is one."""

    plan: Plan
    skipped: str = ""


def promising(space: Space) -> Iterator[Variant]:
    """Variants most likely to beat the planner's plan, in the order to try them."""
    axes = (_compile, _budget) if space.on_gpu else (_budget, _optimizer)
    return _along(space, space.base, axes)


def neighbours(space: Space, plan: Plan) -> Iterator[Variant]:
    """Every plan that is one setting away from `plan`, the most likely to be faster first.

    A generator, since some of them take the planner seconds.
    """
    axes = _GPU_AXES if space.on_gpu else _CPU_AXES
    return _along(space, plan, (*axes, *_LAST))


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
        yield Variant(plan=changed(plan, compile=False, compile_mode="default"))
    elif not space.profile.compile.missing(gpu=space.on_gpu):
        yield Variant(plan=changed(plan, compile=True))


def _graphs(space: Space, plan: Plan) -> Iterator[Variant]:
    """Compile mode reduce-overhead: CUDA graphs, which record one shape."""
    static = plan.packed or space.question.causal
    why = "" if static else "CUDA graphs need one shape, and padded rows have several"
    if plan.cuda_graph:
        why = "whole steps are captured already"
    yield from _mode(space, plan, "reduce-overhead", why)


def _mode(space: Space, plan: Plan, mode: str, why: str = "") -> Iterator[Variant]:
    if plan.compile and space.free("compile", "compile_mode"):
        other = "default" if plan.compile_mode == mode else mode
        yield Variant(plan=changed(plan, compile_mode=other), skipped=why)


# It takes the longest to compile.
_autotune = partial(_mode, mode="max-autotune-no-cudagraphs")


def _budget(space: Space, plan: Plan) -> Iterator[Variant]:
    """Half and twice the tokens per micro-batch; a pinned batch size is an upper limit."""
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
    if plan.data_on_gpu or not space.free("num_workers"):
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


def _switch(name: str, space: Space, plan: Plan) -> Iterator[Variant]:
    """Other values of a setting that depends on nothing else."""
    row = BY_NAME[name]
    if space.free(name) and (space.on_gpu or not row.gpu_only):
        for value in row.tries:
            if value != row.of(plan):
                yield Variant(plan=changed(plan, **{name: value}))


def _optimizer(space: Space, plan: Plan) -> Iterator[Variant]:
    """The implementations of AdamW alone: other optimizers train other models."""
    if plan.optimizer in BY_NAME["optimizer"].tries and not plan.offload_optimizer:
        yield from _switch("optimizer", space, plan)


def _checkpointing(space: Space, plan: Plan) -> Iterator[Variant]:
    """Recomputing activations pays only where it makes room for larger micro-batches."""
    if not space.free("gradient_checkpointing") or space.question.workload.method == "frozen":
        return
    larger = with_budget(space, plan, 2.0)
    roomy = larger.micro_batch_tokens != plan.micro_batch_tokens
    why = "" if roomy else "micro-batches cannot be larger: it would only compute more"
    for mode in KEPT:
        if KEPT[mode] < KEPT[plan.gradient_checkpointing]:
            yield Variant(plan=recomputing(space, larger, mode), skipped=why)
        elif mode != plan.gradient_checkpointing:
            yield Variant(plan=recomputing(space, plan, mode))


def _liger(space: Space, plan: Plan) -> Iterator[Variant]:
    """Bound memory by the plan without Liger, which never uses less."""
    if space.question.no_liger is None and supported.is_installed():
        yield from _switch("liger", space, plan)


def _kernel(space: Space, plan: Plan) -> Iterator[Variant]:
    """Attention kernels of padded rows; flash takes no mask, so it is for causal models alone."""
    if space.on_gpu and not plan.packed and plan.attention == "sdpa" and space.free("flash"):
        for variant in _switch("attention_kernel", space, plan):
            if space.question.causal or variant.plan.runtime.attention != "flash":
                yield variant


def _captured(space: Space, plan: Plan) -> Iterator[Variant]:
    """Captured steps, where the run can take them: a trial of one rank's share always could."""
    able = decide.captured(space.question, space.profile, plan.gradient_checkpointing, plan.ranks)
    for variant in _switch("cuda_graph", space, plan):
        yield variant if able.value or plan.cuda_graph else replace(variant, skipped=able.why)


def _tf32(space: Space, plan: Plan) -> Iterator[Variant]:
    """TF32 for the matrix products that stay in fp32."""
    if space.on_gpu and space.profile.gpus[0].tf32:
        why = "no product is faster without the matrix units" if plan.runtime.tf32 else ""
        for variant in _switch("tf32", space, plan):
            yield replace(variant, skipped=why)


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


_GPU_AXES: tuple[Axis, ...] = (
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
    _captured,
)
_CPU_AXES: tuple[Axis, ...] = (_budget, _workers, _optimizer, _checkpointing, _compile)
_DEPENDENT = (
    "tf32",
    "attention_kernel",
    "compile",
    "compile_mode",
    "cuda_graph",
    "liger",
    "gradient_checkpointing",
    "optimizer",
)
"""Settings with an axis of their own; all others are tried last, one after the other."""
_LAST = tuple(
    partial(_switch, row.name)
    for row in chosen_by("tune")
    if row.tries and row.name not in _DEPENDENT
)


def _too_large(space: Space, variant: Variant) -> Variant:
    need = predicted_gib(space.base, variant.plan)
    most = room(space.base)
    return replace(variant, skipped=f"needs about {need:.1f} GiB of {most:.1f}, by the planner")
