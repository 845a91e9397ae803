"""Question to the planner: a job, its data, its pinned settings; rules for presets and workers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from trainfit.core.errors import BadInput, did_you_mean
from trainfit.core.plan_records import Precision, Workload
from trainfit.core.records import Cpu, Gpu, Record, Scalar
from trainfit.core.settings import SETTINGS, unknown_pins
from trainfit.hardware.catalogue import GpuSpec, find
from trainfit.hardware.model_shapes import ModelSizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin(Record):
    """A setting that was decided before the plan, and its origin."""

    value: Scalar
    origin: str
    """default, preset NAME, experiment NAME or override."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question(Record):
    """A job to plan. The step is built by `factory` in another process."""

    task: str
    factory: str
    """module:function of the probe, which takes `arguments` and the planned settings."""
    arguments: dict[str, Any]
    layers: int
    """Number of equal blocks of the model."""
    sizes: ModelSizes | None = None
    """Sizes of the model, for bounds of its memory; None where they are not known."""
    workload: Workload
    """Its lengths are those of the first fold."""
    more_folds: tuple[tuple[int, ...], ...] = ()
    """Lengths of the other folds, which share the plan and its shapes."""
    quick: dict[str, Any] = field(default_factory=dict)
    """Arguments that make the model quicker to build without changing the speed of its layers."""
    pins: dict[str, Pin] = field(default_factory=dict)
    default_batch: int = 16
    """Sequences per optimizer step where no setting says."""
    unpackable: str | None = None
    """Reason why no GPU can attend within packed rows of the model; None: it can."""
    attention_known: bool = True
    """False for the model of a job of the user's own, which may have no attention."""
    own_attention: bool = False
    """The model's own code attends to padded rows, where the memory margin is wider."""
    packed_attention: str = "varlen"
    """Kernel for packed rows: varlen, softcapped, or disentangled for a DeBERTa."""
    window: int | None = None
    """Tokens that layers with a sliding window see to either side, at least; None: all layers see
    every token."""
    fp16_overflows: bool = False
    """Hidden states leave the range of fp16, so that sums stay in fp32 there."""
    not_recomputed: str | None = None
    """Reason why the blocks cannot be computed again in the backward pass; None: they can."""
    no_liger: str | None = "Liger is for transformers' models"
    """Reason why Liger has no kernels for the model; None: it has."""
    uncapturable: str | None = "its loss may wait for the GPU"
    """Reason why steps cannot be captured as CUDA graphs; None: they can."""
    gathers: bool = False
    """The job can gather its steps from tokens that are kept on the GPU."""
    causal: bool = False
    """True for next-token prediction on blocks of one length, without packing or padding."""
    indivisible: str | None = None
    """Reason why a step must not be cut into micro-batches; None: it may be."""
    savers: tuple[str, ...] = ()
    """Settings that the planner may change where the job does not fit otherwise."""
    watts: float | None = None
    price_per_hour: float | None = None
    data: str | None = None
    """The data in words: a name, rows and classes; None where it is not known."""
    assumed: tuple[str, ...] = ()
    """Facts about the data that are assumed."""

    def __post_init__(self) -> None:
        """Raise BadInput for a pin that no row of the settings table takes."""
        if unknown := unknown_pins(self.pins):
            known = [row.name for row in SETTINGS if row.pinned]
            fix = did_you_mean(unknown[0], known, f"these can be pinned: {', '.join(known)}")
            raise BadInput(f"cannot pin {unknown[0]!r}: no such setting", fix)

    @property
    def folds(self) -> tuple[tuple[int, ...], ...]:
        """Lengths of the training sequences of every fold."""
        return (self.workload.lengths, *self.more_folds)

    @property
    def sized(self) -> bool:
        """True where sequences have lengths in tokens; False for samples of one size, as images."""
        return self.workload.max_length > 1

    def pinned(self, name: str) -> Any:
        """Return the value of a pinned setting, or None."""
        return self.pins[name].value if name in self.pins else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A decision, its reason, and the alternatives that lost."""

    value: Any
    why: str
    alternatives: tuple[str, ...] = ()


# Least memory (GiB, as a program sees it), native bf16 needed, preset. A 16 GB card shows 14.5 to
# 16, a 24 GB one 22 to 24 or 25.8 in decimal GB, and neither may fall into another row. Where
# several presets have one size, the cautious one is here.
_BY_MEMORY = (
    (139.0, False, "h200"),
    (79.0, False, "h100"),
    (44.0, False, "a40"),
    (39.0, False, "a100"),
    (30.0, False, "rtx_5090"),
    (21.5, False, "gpu_3090"),
    (14.0, True, "rtx_4080"),
    (14.0, False, "t4"),
    (0.0, False, "gpu_low_mem"),
)
MAX_WORKERS = 8
GB_PER_WORKER = 3
HOME_SHARE = 1 / 200
BYTES_PER_TOKEN = 4


def preset_for_memory(memory_gib: float, native_bf16: bool = False) -> str:
    """Choose the cautious preset for a GPU of which only the memory is known."""
    return next(
        name
        for least, needs_bf16, name in _BY_MEMORY
        if memory_gib >= least and native_bf16 >= needs_bf16
    )


def workers(cores: int, gpu_memory_gb: float | None) -> int:
    """Choose the number of loader processes; two cores are left for training."""
    limits = [cores - 2, MAX_WORKERS]
    if gpu_memory_gb is not None:
        limits.append(math.ceil(gpu_memory_gb) // GB_PER_WORKER)  # a 24 GB card shows 23.5
    return max(0, min(limits))


def at_home(tokens: int, gpu_memory_gb: float) -> bool:
    """True where tokens are few enough to be kept on a GPU, beside which they do not count."""
    return tokens * BYTES_PER_TOKEN <= gpu_memory_gb * 2**30 * HOME_SHARE


def preset_for(gpu: Gpu | None) -> tuple[str, str]:
    """Return the preset for a GPU, or the cautious one for its memory, and the reason."""
    if gpu is None:
        return "cpu", "no GPU that torch can use"
    spec = None if gpu.slug is None else find(gpu.slug)
    advice = _advice(spec)
    if spec is not None and spec.preset is not None:
        return spec.preset, f"written for {gpu.name}{advice}"
    name = preset_for_memory(gpu.memory_gib, gpu.native_bf16)
    return name, f"the cautious preset for {gpu.memory_gib:.1f} GiB ({gpu.name}){advice}"


def _advice(spec: GpuSpec | None) -> str:
    if spec is None or spec.batch_advice is None:
        return ""
    low, high = spec.batch_advice
    return f"; the tuning guide's batch for a small GPT is {low} to {high}"


def lacks(precise: Precision, cpu: Cpu, gpu: Gpu | None) -> str | None:
    """Reason why the GPU, or else the CPU, lacks products in a precision; None: it has them."""
    if gpu is None:
        able = precise == "fp32" or (precise == "bf16" and cpu.native_bf16)
        return None if able else "this CPU does not multiply it"
    able = {"bf16": gpu.native_bf16, "fp16": gpu.fp16}.get(precise, True)
    return None if able else f"compute capability {gpu.compute_capability} has none"
