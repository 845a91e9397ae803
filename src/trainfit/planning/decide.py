"""Decisions of a plan that do not search, one function per setting, each with its reason."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from trainfit.core.plan_records import Precision
from trainfit.core.records import Gpu, HardwareProfile
from trainfit.kernels.supported import EFFICIENT_SINCE, FLASH_SINCE, TRITON_SINCE
from trainfit.packing.steps import check_whole
from trainfit.planning import cpu_choice
from trainfit.planning.question import MAX_WORKERS, Choice, Question, at_home, lacks, workers

_HALF = ("bf16", "fp16")
_PACKED = {
    "varlen": "the flash kernel on packed rows: no mask in memory",
    "varlen_efficient": "torch's memory-efficient kernel on packed rows: no mask in memory",
    "softcapped": "trainfit's kernel for soft-capped logits on packed rows: no scores in memory",
    "disentangled": "DeBERTa's three terms in one kernel on packed rows: no scores in memory",
}


def pinned(question: Question, name: str) -> Choice | None:
    """Return the choice of a pinned setting, or None."""
    pin = question.pins.get(name)
    if pin is None:
        return None
    said = {"override": "you set it", "default": "the default"}.get(pin.origin, pin.origin)
    return Choice(value=pin.value, why=said)


def precision(question: Question, profile: HardwareProfile, ranks: int = 1) -> Choice:
    """Choose the dtype of matrix products."""
    choice = _precision(question, profile, ranks)
    if choice.value == "fp16" and question.fp16_overflows:
        kept = "hidden states, which leave fp16's range in this model, stay in fp32"
        return replace(choice, why=f"{choice.why}; {kept}")
    return choice


def _precision(question: Question, profile: HardwareProfile, ranks: int) -> Choice:
    gpu = profile.gpu
    choice = pinned(question, "precision")
    if choice is not None:
        reason = lacks(choice.value, profile.cpu, gpu)
        if reason is None:
            return choice
        others = {name: pin for name, pin in question.pins.items() if name != "precision"}
        free = _precision(replace(question, pins=others), profile, ranks)
        why = f"{choice.value} was asked for ({choice.why}), and {reason}"
        return Choice(value=free.value, why=why)
    if gpu is None:
        return cpu_choice.choose(question, profile, ranks).precision
    if gpu.native_bf16:
        return Choice(
            value="bf16",
            why="native here, with the range of fp32: no loss scaling",
            alternatives=(
                "fp16: needs loss scaling and overflows",
                "fp32: a fraction of the speed",
            ),
        )
    if gpu.fp16:
        return Choice(
            value="fp16",
            why=f"no native bf16 on compute capability {gpu.compute_capability}; with loss scaling",
            alternatives=("bf16: emulated here, and slow", "fp32: a fraction of the speed"),
        )
    return Choice(value="fp32", why="no half-precision matrix units")


def threads(question: Question, profile: HardwareProfile, ranks: int = 1) -> Choice | None:
    """Choose the threads of torch's CPU operations; None leaves torch's default."""
    choice = pinned(question, "num_threads")
    if choice is not None or profile.gpus:
        return choice
    return cpu_choice.choose(question, profile, ranks).threads


def tf32(question: Question, gpu: Gpu | None) -> Choice:
    """Choose if fp32 products run on the matrix units."""
    choice = pinned(question, "tf32")
    able = gpu is not None and gpu.tf32
    if choice is not None and (able or not choice.value):
        return choice
    if able:
        return Choice(
            value=True, why="what stays in fp32 runs on the matrix units, in fp32's range"
        )
    asked = "; it was asked for" if choice is not None else ""
    return Choice(value=False, why=f"needs a GPU of compute capability 8.0 or newer{asked}")


def packing(question: Question, gpu: Gpu | None, precise: Precision) -> Choice:
    """Choose packed rows with variable-length attention, or padded ones."""
    if not question.sized:
        return Choice(value=False, why="all samples have one size")
    if question.causal:
        return Choice(value=False, why="every sequence is a full block: there is nothing to pack")
    reason = _no_packing(question, gpu, precise)
    if reason is None:
        return Choice(
            value=True,
            why="sequences end to end in rows of a fixed size: no padding, one shape",
            alternatives=("padded batches of like length: they compute on padding",),
        )
    return Choice(
        value=False,
        why=f"padded batches of like length, since {reason}",
        alternatives=("packed rows",),
    )


def _no_packing(question: Question, gpu: Gpu | None, precise: Precision) -> str | None:
    if gpu is None:
        return "the CPU has no variable-length attention"
    if gpu.vendor != "nvidia":
        return f"{gpu.name} has no variable-length attention (it needs NVIDIA's kernels)"
    if question.pinned("flash") is False:
        return "model.use_flash_attention is false"
    if question.unpackable is not None:
        return question.unpackable
    if question.packed_attention in _TRITON:
        return _no_triton(gpu, precise)
    no_flash = _no_flash(gpu, precise)
    return None if no_flash is None else _no_efficient(question, gpu, no_flash)


_TRITON = ("softcapped", "disentangled")
"""Kernels for packed rows that are trainfit's own."""


def _no_triton(gpu: Gpu, precise: Precision) -> str | None:
    """Reason why trainfit's own kernel for packed rows does not run; None: it does."""
    if precise not in _HALF:
        return f"its kernel for packed rows needs half precision, not {precise}"
    if _capability(gpu) < TRITON_SINCE:
        least = ".".join(map(str, TRITON_SINCE))
        return f"its kernel for packed rows needs compute capability {least}, and {_own(gpu)}"
    return None


def _no_flash(gpu: Gpu, precise: Precision) -> str | None:
    """Reason why the flash kernel for packed rows does not run; None: it does."""
    if _capability(gpu) < FLASH_SINCE:
        least = ".".join(map(str, FLASH_SINCE))
        return f"the flash kernel needs compute capability {least}, and {_own(gpu)}"
    return None if precise in _HALF else f"the flash kernel needs half precision, not {precise}"


def _no_efficient(question: Question, gpu: Gpu, no_flash: str) -> str | None:
    """Reason why the memory-efficient kernel cannot stand in for the flash one; None: it can."""
    if _capability(gpu) < EFFICIENT_SINCE:
        return f"{no_flash}, too old for packed rows"
    if dropout := question.arguments.get("attention_dropout"):
        return f"{no_flash}, and the memory-efficient one has no attention dropout {dropout} there"
    window = question.window
    if window is not None and window < question.workload.max_length:
        return (
            f"{no_flash}, and the memory-efficient one has no sliding window of {window} tokens "
            "to both sides"
        )
    return None


def _own(gpu: Gpu) -> str:
    return f"{gpu.name} has {gpu.compute_capability}"


def _capability(gpu: Gpu) -> tuple[int, int]:
    major, _, minor = gpu.compute_capability.partition(".")
    return int(major), int(minor or 0)


def attention_path(
    question: Question, packed: bool, gpu: Gpu | None, precise: Precision = "bf16"
) -> Choice:
    """Choose the attention path by name."""
    if packed:
        return _packed_path(question, gpu, precise)
    if question.own_attention:
        return Choice(value="own", why=question.unpackable or "the model's own code on padded rows")
    where = (
        "the kernel torch chooses"
        if gpu is None or not question.sized
        else "flash where nothing is padded, else efficient"
    )
    return Choice(value="sdpa", why=where)


def _packed_path(question: Question, gpu: Gpu | None, precise: Precision) -> Choice:
    """Name the kernel for packed rows; torch's memory-efficient one stands in for flash."""
    kernel = question.packed_attention
    no_flash = None if gpu is None or kernel != "varlen" else _no_flash(gpu, precise)
    if no_flash is None:
        return Choice(value=kernel, why=_PACKED[kernel])
    kernel = "varlen_efficient"
    return Choice(
        value=kernel, why=f"{_PACKED[kernel]}; {no_flash}", alternatives=("sdpa on padded rows",)
    )


def optimizer(question: Question) -> Choice:
    """Choose the implementation of AdamW."""
    return pinned(question, "optimizer") or Choice(
        value="adamw_fused",
        why="one kernel for all weights, and no temporaries",
        alternatives=("adamw: the same numbers, a kernel per weight",),
    )


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


def effective_batch(question: Question, ranks: int) -> Choice:
    """Choose the sequences per optimizer step."""
    choice = pinned(question, "effective_batch_size")
    if choice is not None:
        return choice
    batch, steps = question.pinned("batch_size"), question.pinned("gradient_accumulation_steps")
    if batch is None:
        return Choice(
            value=question.default_batch,
            why="the documents' effective batch; memory decides only how it is cut",
        )
    total = batch * (steps or 1) * ranks
    factors = [f"batch size {batch}", *([f"accumulation {steps}"] if steps else [])]
    return Choice(
        value=total, why=" × ".join([*factors, *([f"{ranks} ranks"] if ranks > 1 else [])])
    )


def cap_tokens(question: Question, effective: int, ranks: int) -> int:
    """Return the maximum tokens of a micro-batch before memory limits it."""
    length = question.workload.max_length
    share = math.ceil(effective / ranks)
    batch: Any = question.pinned("batch_size")
    steps: Any = question.pinned("gradient_accumulation_steps")
    sequences = min(share, batch or share, math.ceil(share / steps) if steps else share)
    tokens = int(sequences * length)
    most: Any = question.pinned("micro_batch_tokens")
    return tokens if most is None else min(tokens, check_whole("micro_batch_tokens", most))


def offloaded(question: Question, gpu: Gpu | None) -> Choice:
    """Choose where activations wait for the backward pass."""
    asked = pinned(question, "offload_activations")
    if asked is None or not asked.value:
        return asked or Choice(value=False, why="activations stay on the GPU, where they are quick")
    if gpu is None:
        return Choice(value=False, why="there is no GPU to take them from; it was asked for")
    if question.workload.method == "frozen":
        return Choice(value=False, why="a frozen encoder saves none; it was asked for")
    return asked


def activation_budget(question: Question) -> Choice:
    """Choose the share of activations that compiled blocks keep."""
    asked = pinned(question, "activation_budget")
    if asked is None:
        return Choice(value=1.0, why="compiled blocks keep what torch's partitioner saves")
    return replace(asked, value=float(asked.value), why=f"{asked.why}; it acts on compiled blocks")


def captured(
    question: Question, profile: HardwareProfile, checkpointing: str, ranks: int = 1
) -> Choice:
    """Capture whole steps as CUDA graphs where they can be."""
    pin = pinned(question, "cuda_graph")
    if pin is not None and not pin.value:
        return pin
    reason = _no_capture(question, profile, checkpointing, ranks)
    if reason is not None:
        asked = "; it was asked for" if pin is not None else ""
        return Choice(value=False, why=f"{reason}{asked}", alternatives=("true",))
    return pin or Choice(
        value=True,
        why="one launch for a whole step: small steps do not wait for Python",
        alternatives=("false: the same numbers, a launch per kernel",),
    )


def _no_capture(
    question: Question, profile: HardwareProfile, checkpointing: str, ranks: int = 1
) -> str | None:
    gpu = profile.gpu
    if gpu is None or gpu.vendor != "nvidia":
        return "CUDA graphs are for NVIDIA's GPUs"
    if question.uncapturable is not None:
        return question.uncapturable
    if offloaded(question, gpu).value:
        return "activations go to the host and back, which a graph cannot"
    if ranks > 1:
        return "ranks agree on each step before it is finished"
    if optimizer(question).value != "adamw_fused":
        return "only the fused AdamW never waits for the GPU"
    if checkpointing != "none":
        return "recomputation reads the random state, which a graph cannot"
    if question.pinned("compile") is True and question.pinned("compile_mode") in _GRAPH_MODES:
        return "torch.compile makes CUDA graphs itself in this mode"
    return None


_GRAPH_MODES = ("reduce-overhead", "max-autotune")
