"""Records of a plan: the workload, the task, every setting with its reason, and the estimates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Literal, Self

from trainfit.core.errors import BadInput
from trainfit.core.files import text_facts, text_table
from trainfit.core.records import Measurement, Record, Scalar

Sharding = Literal["none", "fsdp", "hybrid"]
"""A rank holds the model (none), a share of it (fsdp), or a share of its machine's (hybrid)."""
ReduceDtype = Literal["fp32", "bf16"]
Precision = Literal["bf16", "fp16", "fp32"]
Quantization = Literal["none", "nf4", "int8"]
OptimizerName = Literal["adamw_fused", "adamw", "adamw_bf16", "adamw_8bit", "adafactor", "muon"]
"""Optimizers of the jobs that trainfit has; jobs of one's own may return any."""


def shown(value: Scalar) -> str:
    """Value of a setting in words."""
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "none"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason(Record):
    """A setting with its value, the reason, and the alternatives that lost."""

    setting: str
    value: Scalar
    why: str
    alternatives: tuple[str, ...] = ()


def _reason_table(reasons: Sequence[Reason]) -> str:
    return text_table([(one.setting, shown(one.value), one.why) for one in reasons])


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation(Record):
    """Settings to start from: the plan of a default job on a machine."""

    task: str
    model: str
    """Model that the settings are for."""
    method: Literal["full", "lora", "dora", "frozen"]
    max_length: int
    fits: bool
    preset: str
    """Preset of the documents for the GPU, for `hardware=`; the plan does not use it."""
    precision: Precision
    tf32: bool
    batch_size: int
    gradient_accumulation_steps: int
    gradient_checkpointing: bool
    """True where any block is recomputed; the reason of that name says which."""
    freeze_encoder: bool
    compile: bool
    num_workers: int
    num_threads: int | None
    """Threads of torch's CPU operations; None: torch's default, as with a GPU."""
    reasons: tuple[Reason, ...] = ()
    advice: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Settings with their reasons for a terminal."""
        title = f"Settings to start from: {self.task}, {self.model}, method {self.method}"
        return f"{title}\n{_reason_table(self.reasons)}".rstrip()


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload(Record):
    """Data and batch of a training run: how many sequences, and how long."""

    lengths: tuple[int, ...]
    """Tokens per sequence, or a sample of them."""
    sequences: int
    """Sequences in an epoch."""
    max_length: int
    effective_batch_size: int
    """Sequences in an optimizer step, over all ranks."""
    epochs: float
    method: Literal["full", "lora", "dora", "frozen"] = "full"
    trainings: int = 1
    """Trainings of the job, which share a plan: its folds, or those of all trials."""


OWN_FACTORIES = (
    "trainfit.jobs.probes:encoder_step",
    "trainfit.jobs.probes:encoder_trial",
    "trainfit.jobs.probes:gpt_step",
    "trainfit.jobs.probes:gpt_trial",
)
"""Factories that a file may name: they build a model and a step, and import nothing else."""
_RENAMED_FACTORIES = {
    "trainfit.tasks.encoder.probe:probe": "trainfit.jobs.probes:encoder_step",
    "trainfit.tasks.gpt.probe:probe": "trainfit.jobs.probes:gpt_step",
}
"""Former names of the factories, as in recorded measurements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSpec(Record):
    """Recipe for a child process to build the task: an import path and JSON arguments."""

    factory: str
    """Import path of the function, as module:name."""
    arguments: dict[str, Any]
    from_file: bool = field(default=False, compare=False)
    """True if read from a file, which is not trusted: only trainfit's factories are imported."""

    def from_a_file(self) -> Self:
        """Mark the task as read from a file, and translate a factory's name of version 0.1."""
        factory = _RENAMED_FACTORIES.get(self.factory, self.factory)
        return replace(self, factory=factory, from_file=True)

    def check(self) -> Self:
        """Return the task, or raise BadInput for a foreign factory that a file named."""
        if self.from_file and self.factory not in OWN_FACTORIES:
            fix = "name it yourself: TaskSpec(factory=..., arguments=plan.task.arguments)"
            raise BadInput(f"{self.factory!r} was read from a file, and is not imported", fix)
        return self

    def function(self) -> Callable[..., Any]:
        """Import the factory."""
        self.check()
        module, _, name = self.factory.partition(":")
        try:
            found: Callable[..., Any] = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            python = module.endswith(".py")
            fix = f"write {module[:-3]}:{name}" if python else "give it as module:function"
            raise BadInput(f"cannot load {self.factory!r} ({error})", fix) from None
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeSettings(Record):
    """Process-wide switches that runtime applies; None leaves a switch unchanged."""

    tf32: bool | None = None
    cudnn_benchmark: bool | None = None
    deterministic: bool | None = None
    num_threads: int | None = None
    attention: Literal["flash", "efficient", "math"] | None = None
    """The attention kernel to prefer; the others stay as fallbacks."""
    expandable_segments: bool | None = None
    memory_gib: float | None = None
    """Most memory of the GPU that the process may reserve."""
    empty_cache: bool | None = None
    seed: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate(Record):
    """Memory of a step by use, and the capacity."""

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
    """True if the step runs within the capacity once the allocator frees its cache."""
    error_percent: float | None
    """Largest error recorded on this architecture; None: nothing was recorded."""
    adapters_gib: float = 0.0
    """Weights of LoRA's or DoRA's adapters."""
    parameters: int | None = None
    """Number of weights of the model itself."""
    bound: bool = False
    """True: upper bounds by the sizes of the model, and no prediction of what will be used."""

    def __repr__(self) -> str:
        """GiB by use for a terminal."""
        verdict = "Fits" if self.fits else "Does not fit"
        uses = {
            name: value
            for name in self.__slots__
            if (value := getattr(self, name)) is not None
            and name not in ("fits", "parameters", "bound")
        }
        return text_facts(f"{verdict}, GiB by use", uses)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeEstimate(Record):
    """Estimated speed; a figure is None where no recording supports it."""

    tokens_per_second: float | None = None
    """Tokens of the data per second, without filler and padding."""
    samples_per_second: float | None = None
    mfu: float | None = None
    """Model FLOPs utilization: share of the dense peak spent on necessary operations."""
    step_seconds: float | None = None
    epoch_seconds: float | None = None
    total_seconds: float | None = None
    error_percent: float | None = None
    """Error bound of nine in ten recorded steps; None: not recorded on this kind of GPU."""
    energy_kwh: float | None = None
    """Energy of the whole run, where the watts were given."""
    cost: float | None = None
    """Cost of the whole run, in the currency of the given price per hour."""
    job_seconds: float | None = None
    """Time of the whole job, from the command to its end: all folds, evaluations and files."""
    stages: dict[str, float] = field(default_factory=dict, hash=False)
    """Seconds of each stage of the job, as the time line of a run names them."""
    by_rule: dict[str, float] = field(default_factory=dict, hash=False)
    """Seconds of each stage by rule alone, before what earlier runs on this machine taught."""

    def at(self, step: float, batch: int, work: Workload) -> TimeEstimate:
        """Tell the time of the same training with steps of `step` seconds for `batch` sequences."""
        samples = batch / step
        epoch = math.ceil(work.sequences / batch) * step
        times = step / (self.step_seconds or step)
        mfu = None if self.mfu is None else self.mfu / times
        return TimeEstimate(
            tokens_per_second=samples * sum(work.lengths) / max(len(work.lengths), 1),
            samples_per_second=samples,
            mfu=mfu if mfu is not None and mfu <= 1 else None,
            step_seconds=step,
            epoch_seconds=epoch,
            total_seconds=epoch * work.epochs,
            energy_kwh=None if self.energy_kwh is None else self.energy_kwh * times,
            cost=None if self.cost is None else self.cost * times,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(Record):
    """Every setting of a run, each with its reason."""

    fits: bool
    task: TaskSpec
    """Step that was estimated, so that a child process can build it again."""
    workload: Workload
    gpu: str | None
    """The catalogue's row; None for a CPU or a GPU that it does not know."""
    device: Literal["cuda", "cpu"] | None = None
    """Device to train on, as torch names it; None in plans of version 0.1."""
    ranks: int = 1
    sharding: Sharding = "none"
    reduce_dtype: ReduceDtype = "fp32"
    """Dtype in which ranks sum gradients."""
    precision: Precision
    weights_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of frozen weights; trained weights are kept in float32."""
    quantization: Quantization = "none"
    """Format of the frozen matrices of the blocks; none: as `weights_dtype`."""
    runtime: RuntimeSettings
    packed: bool
    """Rows of sequences end to end; else padded batches of similar length."""
    attention: str
    """The attention path: varlen, varlen_efficient, disentangled, softcapped, sdpa, own for the
    model's own, or job for whatever a job of the user's own has."""
    batch_size: int
    micro_batch_tokens: int
    """Maximum tokens of a micro-batch, filler and padding included: it sets the memory."""
    gradient_accumulation_steps: int
    effective_batch_size: int
    cuts: tuple[int, ...]
    """Micro-batches per step: the planned number, then fallbacks when memory runs out."""
    gradient_checkpointing: Literal["none", "selective", "full"]
    compile: bool
    compile_mode: str
    cuda_graph: bool = False
    """Capture whole steps as CUDA graphs."""
    activation_budget: float = 1.0
    """Share of a compiled block's activations that is kept; the rest is computed again."""
    offload_activations: bool = False
    """Activations wait for the backward pass in host memory."""
    liger: bool = False
    """Use Liger's kernels for norms and gated feed-forwards."""
    optimizer: OptimizerName
    offload_optimizer: bool = False
    """Keep AdamW's moments in the host's memory, and bring them to the GPU for each update."""
    data_on_gpu: bool = False
    """Keep the tokens on the GPU and gather steps there; loader processes are then not started."""
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
    """Changes that would make the job fit, and further hints."""
    assumptions: tuple[str, ...] = ()
    """Assumed facts about data that is not named, or a machine that is not here."""
    data: str | None = None
    """The data in words: a name, rows and classes; None where none was read."""
    step_parts: tuple[int, ...] = ()
    """Sequences of each micro-batch of a rank's first step; empty where not known."""
    measurements: tuple[Measurement, ...] = ()

    def verdict(self) -> str:
        """Line that says whether the run fits, and by how much."""
        text = f"{'Fits' if self.fits else 'Does not fit'} {self.gpu or 'this machine'}"
        if self.memory is None:
            return f"{text}: memory not estimated"
        peak, capacity = self.memory.peak_reserved_gib, self.memory.capacity_gib
        error = self.memory.error_percent
        stated = "" if error is None else f" ± {error:.1f}%"
        share = f"{peak / capacity:.0%}"
        if self.memory.bound:
            return f"{text}: at most {peak:.1f} GiB of {capacity:.1f} GiB ({share})"
        return f"{text}: predicted peak {peak:.2f} GiB{stated} of {capacity:.2f} GiB ({share})"

    def __repr__(self) -> str:
        """Verdict and settings for a terminal."""
        return f"{self.verdict()}\n{_reason_table(self.reasons)}".rstrip()
