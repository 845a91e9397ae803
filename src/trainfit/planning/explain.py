"""Explanations of a plan: reasons, alternatives, advice, and estimates of memory and time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trainfit.core.plan_records import MemoryEstimate, TimeEstimate
from trainfit.core.records import Gpu, HardwareProfile
from trainfit.hardware.catalogue import gpus
from trainfit.planning import decide
from trainfit.planning.cuts import FixedSettings, Selection
from trainfit.planning.decide import pinned
from trainfit.planning.estimator.depths import take
from trainfit.planning.estimator.estimate import CONTEXT_GIB, GIB, MARGIN, Target, recorded_error
from trainfit.planning.estimator.step_time import recorded_time_error
from trainfit.planning.fit import MODES, PARTS, Speed, StepCandidate
from trainfit.planning.question import MAX_WORKERS, Choice, Question, at_home, workers


def loader(question: Question, profile: HardwareProfile) -> dict[str, Choice]:
    """Choose workers, pinned memory, persistence and prefetching of the loader."""
    gpu, cores = profile.gpu, profile.cpu.cores
    most = workers(cores, None if gpu is None else gpu.memory_gib)
    home = data_on_gpu(question, gpu).value
    count = pinned(question, "num_workers") or Choice(
        value=most,
        why=f"{cores} {'assumed' if profile.cpu.assumed else 'usable'} cores less two, "
        f"at most {MAX_WORKERS}"
        + ("" if gpu is None else ", at most one per 3 GB of GPU memory")
        + ("; none is started while the data is on the GPU" if home else ""),
    )
    pin = pinned(question, "pin_memory") or Choice(
        value=gpu is not None,
        why="copies to the GPU overlap with computing" if gpu else "there is no GPU to copy to",
    )
    stay: Choice | None = None
    ahead: Choice | None = None
    if count.value:
        stay = pinned(question, "persistent_workers")
        ahead = pinned(question, "prefetch_factor")
    without = "there are no workers"
    return {
        "num_workers": count,
        "pin_memory": pin,
        "persistent_workers": stay
        or Choice(
            value=bool(count.value), why="no start-up each epoch" if count.value else without
        ),
        "prefetch_factor": ahead
        or Choice(
            value=2 if count.value else None,
            why="steps ahead per worker" if count.value else without,
        ),
    }


def data_on_gpu(question: Question, gpu: Gpu | None) -> Choice:
    """Choose whether the tokens are kept on the GPU, which then needs no loader process."""
    asked = pinned(question, "data_on_gpu")
    obstacle = _data_elsewhere(question, gpu)
    if asked is not None and (obstacle is None or not asked.value):
        return asked
    if obstacle is not None:
        return Choice(value=False, why=obstacle)
    return Choice(
        value=True,
        why="copied once; each step is gathered there, and no loader process is started",
        alternatives=("false: batches come from loader processes",),
    )


def _data_elsewhere(question: Question, gpu: Gpu | None) -> str | None:
    """Reason why the data stays on the host; None: it need not."""
    if gpu is None:
        return "there is no GPU"
    if not question.gathers or question.workload.method == "frozen":
        return "its batches are made on the host"
    if question.pinned("num_workers") and question.pinned("data_on_gpu") is not True:
        return "training.num_workers asks for loader processes"
    lengths, sequences = question.workload.lengths, question.workload.sequences
    tokens = sum(lengths) * sequences // max(1, len(lengths))
    return None if at_home(tokens, gpu.memory_gib) else f"{tokens:,} tokens are too many for it"


def eval_batch(question: Question, batch_size: int, *, roomy: bool = False) -> Choice:
    """Choose the batch of evaluation; it may be large where the memory is `roomy`."""
    times, word = (8, "eight times") if roomy else (2, "twice")
    return pinned(question, "eval_batch_size") or Choice(
        value=max(8, times * batch_size),
        why=f"{word} the training batch: evaluation keeps no activations",
    )


# ── reasons and the table ────────────────────────────────────────────────────────────────────────


_IF_ASKED = ("activation_budget", "offload_activations", "offload_optimizer")
"""Settings that trade time for memory, which are explained where they are used or asked for."""


def choices_for(
    question: Question,
    profile: HardwareProfile,
    fixed: FixedSettings,
    chosen: Selection,
    held: Target,
    how: dict[str, Choice],
) -> dict[str, Choice]:
    """Decide every setting that a plan explains, in the order of the page."""
    best = chosen.best
    cut = best.cutting.cut
    length = question.workload.max_length
    batch = decide.pinned(question, "batch_size") or Choice(
        value=max(1, cut.tokens // length),
        why=f"a micro-batch of {cut.tokens:,} tokens holds so many sequences of {length}"
        if question.sized
        else "samples of a micro-batch",
    )
    fill = best.cutting.tokens / best.cutting.computed
    most = question.pinned("micro_batch_tokens")
    limit = "" if most is None else f"at most {most:,} as pinned, "
    choices = {
        "precision": fixed.precision,
        "quantization": decide.quantization(question, profile),
        "num_threads": fixed.threads,
        "tf32": fixed.tf32,
        "packed": fixed.packed,
        "attention": fixed.attention,
        "effective_batch_size": fixed.effective,
        "batch_size": batch,
        "micro_batch_tokens": Choice(
            value=cut.tokens,
            why=f"{limit}fitted to the steps: {fill:.1%} of it are tokens of the data"
            if question.sized
            else f"{limit}a sample counts as one token",
        ),
        "gradient_accumulation_steps": _accumulation(question, fixed, chosen, held),
        "gradient_checkpointing": _checkpointing(question, fixed, chosen, held),
        **how,
        "activation_budget": how.get("activation_budget", fixed.budget),
        "offload_activations": fixed.offloaded,
        "optimizer": decide.optimizer(question),
        "offload_optimizer": decide.offload(question, profile.gpu),
        "data_on_gpu": data_on_gpu(question, profile.gpu),
        **loader(question, profile),
        "eval_batch_size": eval_batch(
            question, batch.value, roomy=_roomy(question, fixed, best, held)
        ),
    }
    asked = how.keys() | question.pins.keys()
    shown = (name for name in choices if name not in _IF_ASKED or name in asked)
    return {name: made for name in shown if (made := choices[name]) is not None}


def _roomy(question: Question, fixed: FixedSettings, best: StepCandidate, held: Target) -> bool:
    """Tell if packed rows of training take a small part of the memory."""
    sizes = question.sizes
    if sizes is None or sizes.family == "trainfit_gpt":  # logits of a vocabulary take much
        return False
    return bool(fixed.packed.value) and 4 * best.taken.peak_reserved < held.capacity


def _accumulation(
    question: Question, fixed: FixedSettings, chosen: Selection, held: Target
) -> Choice:
    best = chosen.best
    count, total = best.cutting.cut.micro_batches, fixed.effective.value
    pin = decide.pinned(question, "gradient_accumulation_steps")
    if pin is not None and pin.value == count:
        return pin
    what = "sequences" if question.sized else "samples"
    if count == 1:
        return Choice(value=1, why=f"all {total} {what} of a step go through at once")
    fewer = [
        c
        for c in chosen.candidates
        if c.checkpointing == best.checkpointing and c.cutting.cut.micro_batches < count
    ]
    alternatives = tuple(
        f"{c.cutting.cut.micro_batches}: {c.taken.peak_allocated / GIB:.1f} GiB"
        for c in sorted(fewer, key=lambda c: -c.cutting.cut.micro_batches)[:2]
    )
    tight = fewer and min(c.taken.peak_allocated for c in fewer) > held.capacity
    plain = fixed.cuttings[fixed.plain].cut.micro_batches
    if count < plain:
        limit = f"since {plain}, which pad less, take the GPU longer to be given"
    else:
        best_cut = "which pads the least" if question.sized else "as asked"
        limit = "fewer do not fit" if tight else best_cut
    return Choice(
        value=count,
        why=f"{total} {what} cut into {count} micro-batches, {limit}",
        alternatives=alternatives,
    )


_CHECKPOINTING = {
    "none": "the activations fit, so nothing is computed twice",
    "selective": "every second block is computed again: the fastest that fits",
    "full": "every block is computed again: the fastest that fits",
}


def _checkpointing(
    question: Question, fixed: FixedSettings, chosen: Selection, held: Target
) -> Choice:
    best = chosen.best
    if fixed.checkpointing is not None:
        return fixed.checkpointing
    if question.workload.method == "frozen":
        return Choice(value="none", why="a frozen encoder keeps nothing for a backward pass")
    if question.not_recomputed is not None:
        return Choice(value="none", why=question.not_recomputed)
    if not chosen.fits:
        return Choice(value=best.checkpointing, why="what takes the least memory; it does not fit")
    others = [
        _rival(mode, [c for c in chosen.candidates if c.checkpointing == mode], best, held)
        for mode in MODES
        if mode != best.checkpointing
    ]
    return Choice(
        value=best.checkpointing, why=_CHECKPOINTING[best.checkpointing], alternatives=tuple(others)
    )


def _rival(mode: str, rivals: Sequence[StepCandidate], best: StepCandidate, held: Target) -> str:
    """Compare another way of checkpointing with the best."""
    if not rivals:
        return f"{mode}: computes {'half' if mode == 'selective' else 'all'} of the blocks twice"
    fitting = [c for c in rivals if c.taken.peak_allocated <= held.capacity]
    if not fitting:
        need = min(c.taken.peak_allocated for c in rivals) / GIB
        return f"{mode}: needs {need:.1f} GiB at the least"
    if best.seconds and fitting[0].seconds:
        return f"{mode}: {fitting[0].seconds / best.seconds - 1:+.0%} time"
    return f"{mode}: fits too"


_SHORTEST = 64


def what_would_fit(
    question: Question, arguments: dict[str, Any], best: StepCandidate, held: Target, thorough: bool
) -> tuple[str, ...]:
    """Advise on changes that would fit, the smallest first; `best` needs the least memory."""
    lines = []
    need = best.taken.peak_allocated
    pinned = [
        name
        for name in ("batch_size", "gradient_checkpointing", "precision")
        if name in question.pins and question.pins[name].origin != "default"
    ]
    if pinned:
        lines.append(f"leave {' and '.join(pinned)} to the plan")
    if thorough:
        lines += _other_methods(question, arguments, best, held)
        lines += _shorter(question, arguments, best, held)
    larger = _smallest_gpu(need)
    if larger is not None:
        lines.append(f"the smallest GPU of the catalogue that holds it: {larger}")
    return tuple(lines)


def _other_methods(
    question: Question, arguments: dict[str, Any], best: StepCandidate, held: Target
) -> list[str]:
    if question.causal or question.workload.method != "full":
        return []
    base = arguments | best.cutting.shape
    least = "full" if question.not_recomputed is None else "none"
    asked = {
        "LoRA (model.method=lora)": {"method": "lora", "checkpointing": least},
        "a frozen encoder (model.freeze_encoder=true)": {
            "method": "frozen",
            "checkpointing": "none",
        },
    }
    half = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[arguments["precision"]]
    shapes = [base | change | {"dtype": half} for change in asked.values()]
    found = take(question.factory, shapes, (held,), question.layers)
    return [
        f"{name}: {taken[0].peak_allocated / GIB:.1f} GiB"
        for name, taken in zip(asked, found, strict=True)
        if taken[0].peak_allocated <= held.capacity
    ]


def _shorter(
    question: Question, arguments: dict[str, Any], best: StepCandidate, held: Target
) -> list[str]:
    """Find the longest length, by halves, with which a single sequence fits."""
    shape = best.cutting.shape
    length = question.workload.max_length // 2
    tried: list[int] = []
    while length >= _SHORTEST and len(tried) < 2:
        tried.append(length)
        length //= 2
    if not tried:
        return []
    shapes = [
        arguments
        | shape
        | {"checkpointing": best.checkpointing, "rows": 1, "width": width}
        | ({"lengths": [width], "slots": 1} if shape["slots"] is not None else {})
        for width in tried
    ]
    found = take(question.factory, shapes, (held,), question.layers)
    for width, taken in zip(tried, found, strict=True):
        if taken[0].peak_allocated <= held.capacity:
            need = taken[0].peak_allocated / GIB
            return [f"data.max_length={width}: {need:.1f} GiB with one sequence at a time"]
    return []


def _smallest_gpu(need: float) -> str | None:
    able = [
        spec
        for spec in gpus()
        if (spec.memory_gib - CONTEXT_GIB) * (1 - MARGIN) * GIB >= need and spec.vendor == "nvidia"
    ]
    if not able:
        return None
    smallest = min(able, key=lambda spec: (spec.memory_gib, -spec.bandwidth_gbs))
    return f"{smallest.slug} ({smallest.memory_gb:g} GB)"


def memory_of(
    best: StepCandidate, target: Target, gpu: Gpu | None, fits: bool | None, compiled: bool = False
) -> MemoryEstimate:
    taken = best.taken
    reserved = min(taken.peak_reserved, target.capacity) if fits else taken.peak_reserved
    return MemoryEstimate(
        **{f"{name}_gib": getattr(taken, name) / GIB for name in PARTS},
        parameters=round(taken.parameters),
        peak_allocated_gib=taken.peak_allocated / GIB,
        peak_reserved_gib=reserved / GIB,
        capacity_gib=target.capacity / GIB,
        fits=taken.peak_allocated <= target.capacity if fits is None else fits,
        bound=taken.bound,
        error_percent=None
        if gpu is None or taken.bound
        else recorded_error(gpu.compute_capability, compiled, taken.family),
    )


def time_of(
    question: Question, best: StepCandidate, speed: Speed, ranks: int, effective: int
) -> TimeEstimate | None:
    """Build the time estimate of a candidate; None for a GPU without a known peak."""
    if speed.gpu is None or best.seconds is None:
        return None
    step = best.seconds
    work = question.workload
    steps = math.ceil(work.sequences / effective)
    peak = speed.peak
    epoch = steps * step
    total = epoch * work.epochs
    hours = total / 3600
    return TimeEstimate(
        tokens_per_second=best.cutting.tokens * ranks / step,
        samples_per_second=effective / step,
        mfu=None if not peak else best.flops / (step * peak * 1e12),
        step_seconds=step,
        epoch_seconds=epoch,
        total_seconds=total,
        error_percent=None
        if best.taken.bound
        else recorded_time_error(speed.gpu.compute_capability, best.taken.family),
        energy_kwh=None if question.watts is None else hours * question.watts / 1000,
        cost=None if question.price_per_hour is None else hours * question.price_per_hour,
    )
