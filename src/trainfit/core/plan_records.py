"""Records of a plan: the workload, the task, every setting with its reason, and the estimates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from trainfit.core.errors import BadInput
from trainfit.core.records import Measurement, Record, Scalar

Precision = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason(Record):
    """One setting, its value, why, and what lost against it."""

    setting: str
    value: Scalar
    why: str
    alternatives: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation(Record):
    """The plan of a default job on a machine, in the settings to start from."""

    task: str
    model: str
    """The model that the settings are for; another one has a plan of its own."""
    method: Literal["full", "lora", "dora", "frozen"]
    max_length: int
    fits: bool
    preset: str
    """The documents' row for the GPU, which `hardware=` pins; the plan does without it."""
    precision: Precision
    tf32: bool
    batch_size: int
    gradient_accumulation_steps: int
    gradient_checkpointing: bool
    """True where any block is computed again; the reason of that name says which."""
    freeze_encoder: bool
    compile: bool
    num_workers: int
    num_threads: int | None
    """Threads of torch's operations on a CPU; None beside a GPU: as torch has it."""
    reasons: tuple[Reason, ...] = ()
    advice: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload(Record):
    """What is to be trained, apart from the model: how long the sequences are and how many."""

    lengths: tuple[int, ...]
    """Tokens per sequence, or a sample of them."""
    sequences: int
    """Sequences in an epoch."""
    max_length: int
    effective_batch_size: int
    """Sequences in an optimizer step, over all ranks."""
    epochs: float
    method: Literal["full", "lora", "dora", "frozen"] = "full"


OWN_FACTORIES = (
    "trainfit.jobs.probes:encoder_step",
    "trainfit.jobs.encoder_trial:encoder_trial",
    "trainfit.jobs.probes:gpt_step",
    "trainfit.jobs.gpt_trial:gpt_trial",
)
"""Factories that a file may name: they build a model and a step, and take no further name."""
_RENAMED_FACTORIES = {
    "trainfit.tasks.encoder.probe:probe": "trainfit.jobs.probes:encoder_step",
    "trainfit.tasks.encoder.trial:trial": "trainfit.jobs.encoder_trial:encoder_trial",
    "trainfit.tasks.gpt.probe:probe": "trainfit.jobs.probes:gpt_step",
    "trainfit.tasks.gpt.trial:trial": "trainfit.jobs.gpt_trial:gpt_trial",
}
"""Names that plans of version 0.1 carry."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSpec(Record):
    """How a child process builds the task: an import path and its JSON arguments."""

    factory: str
    """module:callable"""
    arguments: dict[str, Any]
    from_file: bool = field(default=False, compare=False)
    """Read from a file, which may come from anyone: only trainfit's own factories are imported."""

    def from_a_file(self) -> Self:
        """Mark the task as read from a file, and translate a factory's name of version 0.1."""
        factory = _RENAMED_FACTORIES.get(self.factory, self.factory)
        return replace(self, factory=factory, from_file=True)

    def check(self) -> Self:
        """Return the task, or refuse the factory of one that a file named."""
        if self.from_file and self.factory not in OWN_FACTORIES:
            raise BadInput(
                f"{self.factory!r} was read from a file, and is not imported",
                "name it yourself: TaskSpec(factory=..., arguments=plan.task.arguments)",
            )
        return self

    def function(self) -> Callable[..., Any]:
        """The factory, imported."""
        from importlib import import_module

        self.check()
        module, _, name = self.factory.partition(":")
        try:
            found: Callable[..., Any] = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise BadInput(
                f"cannot load {self.factory!r} ({error})", "give it as module:function"
            ) from None
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeSettings(Record):
    """Process-wide switches that runtime applies; None leaves one as it is."""

    tf32: bool | None = None
    cudnn_benchmark: bool | None = None
    deterministic: bool | None = None
    num_threads: int | None = None
    attention: Literal["flash", "efficient", "math"] | None = None
    """The attention kernel to prefer; the others stay as fallbacks."""
    expandable_segments: bool | None = None
    empty_cache: bool | None = None
    seed: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate(Record):
    """Where the memory of a step goes, and what is left."""

    weights_gib: float
    """Weights of the model itself; adapters are apart."""
    gradients_gib: float
    optimizer_gib: float
    activations_gib: float
    workspace_gib: float
    peak_allocated_gib: float
    peak_reserved_gib: float
    capacity_gib: float
    fits: bool
    """Whether the step runs within the capacity, with the allocator giving back its cache."""
    error_percent: float | None
    """The largest error recorded on this architecture; None where nothing was recorded."""
    adapters_gib: float = 0.0
    """Weights of LoRA's or DoRA's adapters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeEstimate(Record):
    """How fast it will run; a figure is None where nothing was recorded to base it on."""

    tokens_per_second: float | None
    """Tokens of the data, without filler and padding."""
    samples_per_second: float | None
    mfu: float | None
    """The share of the dense peak that goes into operations the step must do."""
    step_seconds: float | None
    epoch_seconds: float | None
    total_seconds: float | None
    error_percent: float | None
    """The error that nine in ten recorded steps keep to; None: not recorded on this kind of GPU."""
    energy_kwh: float | None = None
    """Of the whole run, where the watts were given."""
    cost: float | None = None
    """Of the whole run, where a price per hour was given, in its currency."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(Record):
    """Every setting of a run, each with its reason."""

    fits: bool
    task: TaskSpec
    """The step that was estimated, for a child process to build again."""
    workload: Workload
    gpu: str | None
    """The catalogue's row; None for a CPU or a GPU that it does not know."""
    device: Literal["cuda", "cpu"] | None = None
    """Device to train on, as torch names it; None in plans of version 0.1."""
    ranks: int = 1
    sharding: Literal["none", "fsdp"] = "none"
    """Each rank holds the whole model, or a share of it where no GPU could alone."""
    precision: Precision
    weights_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of weights that are not trained; those that are trained are kept in float32."""
    runtime: RuntimeSettings
    packed: bool
    """Sequences end to end in rows of a fixed number of tokens; else padded ones of like length."""
    attention: str
    """The attention path: varlen, disentangled, softcapped, sdpa, or the model's own."""
    batch_size: int
    micro_batch_tokens: int
    """The most tokens of a micro-batch, filler and padding included: it sets the memory."""
    gradient_accumulation_steps: int
    effective_batch_size: int
    cuts: tuple[int, ...]
    """Micro-batches per step: the one planned, then those to fall back on when memory runs out."""
    gradient_checkpointing: Literal["none", "selective", "full"]
    compile: bool
    compile_mode: str
    liger: bool = False
    """Norms and gated feed-forwards by Liger's kernels."""
    optimizer: Literal["adamw_fused", "adamw"]
    num_workers: int
    pin_memory: bool
    persistent_workers: bool
    prefetch_factor: int | None
    """Batches ahead per worker; None without workers."""
    eval_batch_size: int
    memory: MemoryEstimate | None
    time: TimeEstimate | None
    reasons: tuple[Reason, ...] = ()
    advice: tuple[str, ...] = ()
    """What would fit, where this does not; and what else to know."""
    assumptions: tuple[str, ...] = ()
    """Facts about the machine that nobody could look up, since it is not here."""
    measurements: tuple[Measurement, ...] = ()
