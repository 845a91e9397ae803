"""Choices about data on its way to the GPU: loader processes, where tokens are kept, evaluation."""

from __future__ import annotations

from trainfit.core.records import Gpu, HardwareProfile
from trainfit.planning.decide import pinned
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
