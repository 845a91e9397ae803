"""Every setting of a plan with its reason, and what lost against it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainfit.planning import decisions
from trainfit.planning.basis import Basis
from trainfit.planning.compiling import Compiling
from trainfit.planning.fitting import MODES, Candidate
from trainfit.planning.memory import GIB, Target
from trainfit.planning.question import Choice, Question
from trainfit.planning.weighing import Weighed
from trainfit.records import HardwareProfile, Reason


def reasons_for(
    question: Question,
    profile: HardwareProfile,
    basis: Basis,
    weighed: Weighed,
    held: Target,
    compiling: Compiling,
) -> list[Reason]:
    """Every setting with its reason."""
    gpu = profile.gpus[0] if profile.gpus else None
    best = weighed.best
    cut = best.cutting.cut
    length = question.workload.max_length
    batch = decisions.pinned(question, "batch_size") or Choice(
        value=max(1, math.ceil(cut.tokens / length)),
        why=f"a micro-batch of {cut.tokens:,} tokens holds so many sequences of {length}",
    )
    fill = best.cutting.tokens / best.cutting.computed
    choices = {
        "precision": basis.precision,
        **({} if basis.threads is None else {"num_threads": basis.threads}),
        "tf32": basis.tf32,
        "packed": basis.packed,
        "attention": basis.attention,
        "effective_batch_size": basis.effective,
        "batch_size": batch,
        "micro_batch_tokens": Choice(
            value=cut.tokens, why=f"fitted to the steps: {fill:.1%} of it are tokens of the data"
        ),
        "gradient_accumulation_steps": _accumulation(question, basis, weighed, held),
        "gradient_checkpointing": _checkpointing(question, basis, weighed, held),
        "compile": compiling.choice,
        "optimizer": decisions.optimizer(question),
        **decisions.loader(question, profile, gpu),
        "eval_batch_size": decisions.eval_batch(question, batch.value),
    }
    return [
        Reason(setting=name, value=c.value, why=c.why, alternatives=c.alternatives)
        for name, c in choices.items()
    ]


def _accumulation(question: Question, basis: Basis, weighed: Weighed, held: Target) -> Choice:
    best = weighed.best
    count, total = best.cutting.cut.micro_batches, basis.effective.value
    pin = decisions.pinned(question, "gradient_accumulation_steps")
    if pin is not None and pin.value == count:
        return pin
    if count == 1:
        return Choice(value=1, why=f"all {total} sequences of a step go through at once")
    fewer = [
        c
        for c in weighed.candidates
        if c.checkpointing == best.checkpointing and c.cutting.cut.micro_batches < count
    ]
    alternatives = tuple(
        f"{c.cutting.cut.micro_batches}: {c.taken.peak_allocated / GIB:.1f} GiB"
        for c in sorted(fewer, key=lambda c: -c.cutting.cut.micro_batches)[:2]
    )
    tight = fewer and min(c.taken.peak_allocated for c in fewer) > held.capacity
    plain = basis.cuttings[basis.plain].cut.micro_batches
    if count < plain:
        limit = f"since {plain}, which pad less, take the GPU longer to be given"
    else:
        limit = "fewer do not fit" if tight else "which pads the least"
    return Choice(
        value=count,
        why=f"{total} sequences cut into {count} micro-batches, {limit}",
        alternatives=alternatives,
    )


_CHECKPOINTING = {
    "none": "the activations fit, so nothing is computed twice",
    "selective": "every second block is computed again: the fastest that fits",
    "full": "every block is computed again: the fastest that fits",
}


def _checkpointing(question: Question, basis: Basis, weighed: Weighed, held: Target) -> Choice:
    best = weighed.best
    if basis.checkpointing is not None:
        return basis.checkpointing
    if question.workload.method == "frozen":
        return Choice(value="none", why="a frozen encoder keeps nothing for a backward pass")
    if not weighed.fits:
        return Choice(value=best.checkpointing, why="what takes the least memory; it does not fit")
    others = [
        _rival(mode, [c for c in weighed.candidates if c.checkpointing == mode], best, held)
        for mode in MODES
        if mode != best.checkpointing
    ]
    return Choice(
        value=best.checkpointing,
        why=_CHECKPOINTING[best.checkpointing],
        alternatives=tuple(others),
    )


def _rival(mode: str, rivals: Sequence[Candidate], best: Candidate, held: Target) -> str:
    """How another way of checkpointing fares."""
    if not rivals:
        return f"{mode}: computes {'half' if mode == 'selective' else 'all'} of the blocks twice"
    fitting = [c for c in rivals if c.taken.peak_allocated <= held.capacity]
    if not fitting:
        need = min(c.taken.peak_allocated for c in rivals) / GIB
        return f"{mode}: needs {need:.1f} GiB at the least"
    if best.seconds and fitting[0].seconds:
        return f"{mode}: {fitting[0].seconds / best.seconds - 1:+.0%} time"
    return f"{mode}: fits too"
