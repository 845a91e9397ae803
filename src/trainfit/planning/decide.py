"""Decisions of a plan that do not search, one function per setting, each with its reason."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from trainfit.core.errors import BadInput
from trainfit.core.libraries import has
from trainfit.core.plan_records import Precision
from trainfit.core.records import Gpu, HardwareProfile
from trainfit.hardware.catalogue import find
from trainfit.kernels.supported import EFFICIENT_SINCE, FLASH_SINCE, TRITON_SINCE
from trainfit.packing.steps import check_whole
from trainfit.planning import cpu_choice
from trainfit.planning.estimator.step_time import host_link
from trainfit.planning.question import Choice, Question, lacks

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


def quantization(question: Question, profile: HardwareProfile) -> Choice | None:
    """Return the format of frozen matrices, with what widens them; None where none are frozen."""
    choice = pinned(question, "quantization")
    if choice is None or question.workload.method == "full":
        return None
    if choice.value == "none":
        open_ = question.pins["quantization"].origin == "default"
        return replace(choice, why="frozen weights are used as they are") if open_ else choice
    why = f"{choice.why}: a frozen matrix is widened for each product with it"
    here = bool(profile.gpus) and not profile.simulated
    if choice.value == "nf4" and here and not has("bitsandbytes"):
        why += ", by torch's operations, since bitsandbytes is not installed"
    return replace(choice, why=why, alternatives=("none: as it is in memory",))


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
    if gpu is None and drops_padding(question):
        reason = f"{reason}; outside of attention nothing is computed on padding"
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


def drops_padding(question: Question) -> bool:
    """Tell if a CPU computes nothing but attention on padding, so that few large parts are best."""
    cut = question.pinned("gradient_accumulation_steps")
    plain = question.sized and not question.causal and not question.pinned("compile")
    return plain and cut is None and question.unpackable is None


def _no_packing(question: Question, gpu: Gpu | None, precise: Precision) -> str | None:
    if gpu is None:
        return question.unpackable or "the CPU has no variable-length attention"
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
    if not question.attention_known:
        return Choice(value="job", why="the job's own code, if it has any")
    if question.own_attention:
        return Choice(value="own", why=question.unpackable or "the model's own code on padded rows")
    fast = "flash where nothing is padded, else efficient"
    return Choice(value="sdpa", why="the kernel torch chooses" if gpu is None else fast)


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
    """Choose the optimizer, or the implementation of AdamW."""
    asked = pinned(question, "optimizer")
    if asked is not None:
        return replace(asked, why="; ".join(filter(None, [asked.why, _KEPT.get(asked.value)])))
    return Choice(
        value="adamw_fused",
        why="one kernel for all weights, and no temporaries",
        alternatives=("adamw: the same numbers, a kernel per weight",),
    )


_KEPT = {
    "adamw_bf16": "4 bytes of moments per weight instead of 8",
    "adamw_8bit": "2 bytes of moments per weight instead of 8",
    "adafactor": "sums of rows and columns instead of moments",
    "muon": "4 bytes of momentum per weight of a matrix instead of 8",
}
"""State of optimizers that keep less than AdamW."""
OFFLOADED = ("adamw_fused", "adamw_bf16")
"""Optimizers whose moments can be in the host's memory."""
_CAPTURED = ("adamw_fused", "adamw_bf16", "adamw_8bit")
"""Optimizers that never wait for the GPU."""


def offload(question: Question, gpu: Gpu | None) -> Choice:
    """Choose whether AdamW's moments are in the host's memory."""
    asked = pinned(question, "offload_optimizer")
    if asked is None or not asked.value:
        return asked or Choice(value=False, why="the moments stay on the GPU, beside the weights")
    kind = optimizer(question).value
    if kind not in OFFLOADED:
        what = f"optimization.offload_optimizer is for {' and '.join(OFFLOADED)}, not {kind}"
        raise BadInput(what, "use one of these, or set it to false")
    if gpu is None or gpu.vendor != "nvidia":
        return Choice(value=False, why="needs an NVIDIA GPU; it was asked for")
    _, link = host_link(None if gpu.slug is None else find(gpu.slug))
    return replace(asked, why=f"{asked.why}; the moments cross {link} twice in each step")


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
    """Choose if activations wait for the backward pass in host memory."""
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
    if question.pinned("sharding") not in (None, "none"):
        return "sharded weights are gathered in every layer"
    if optimizer(question).value not in _CAPTURED:
        return "only the fused kernels of AdamW never wait for the GPU"
    if offload(question, gpu).value:
        return "the optimizer's moments come from the host in each step"
    if checkpointing != "none":
        return "recomputation reads the random state, which a graph cannot"
    if question.pinned("compile") is True and question.pinned("compile_mode") in _GRAPH_MODES:
        return "torch.compile makes CUDA graphs itself in this mode"
    return None


_GRAPH_MODES = ("reduce-overhead", "max-autotune")
