"""Settings of the training loop, which jobs derive from the configuration and the plan."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from trainfit.core.codec import Range
from trainfit.core.errors import BadInput, did_you_mean
from trainfit.core.plan_records import Plan, Precision, ReduceDtype, Sharding
from trainfit.core.records import Record
from trainfit.packing import Cut, PackedCut, PaddedCut

if TYPE_CHECKING:
    from torch.optim import Optimizer

Positive = Annotated[int, Range(1)]
Count = Annotated[int, Range(0)]
Share = Annotated[float, Range(0, 1)]
Amount = Annotated[float, Range(0)]

OFFLOADED = ("adamw_fused", "adamw_bf16")
"""Optimizers whose moments can be in the host's memory."""
_PLENTY = 4
"""Times the planned memory that a GPU must have for a first step without compiled code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings(Record):
    """The optimizer, and the clipping of the gradient before its update."""

    kind: str = "adamw_fused"
    """A class of torch.optim in small letters; with _fused at the end, its fused kernel.

    adamw_bf16 and adamw_8bit are trainfit's own, whose moments take fewer bytes.
    """
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    """Further keyword arguments of that class, such as momentum."""
    learning_rate: Amount
    weight_decay: Amount = 0.0
    """Weight decay of matrices; biases and norms never decay."""
    decay_embeddings: bool = True
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Betas of AdamW; other optimizers take theirs from `options`."""
    eps: Amount = 1e-8
    """Epsilon of AdamW."""
    max_grad_norm: Amount | None = 1.0
    """Clip the gradient's norm; None: do not."""
    offload: bool = False
    """Keep AdamW's moments in the host's memory."""

    def __post_init__(self) -> None:
        """Refuse an unknown optimizer, or one without these options."""
        if self.kind not in ("adamw", *OFFLOADED, "adamw_8bit") or self.options:
            check_options(self)
        if self.offload and self.kind not in OFFLOADED:
            raise BadInput(
                f"the moments of {self.kind} cannot be kept in the host's memory",
                f"use {' or '.join(OFFLOADED)}, or set optimization.offload_optimizer=false",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleSettings(Record):
    """The learning rate over the run, counted in optimizer steps."""

    kind: Literal["linear", "cosine", "cosine_with_restarts", "constant"] = "linear"
    warmup_ratio: Share | None = None
    """Share of all steps; None where `warmup_steps` is given."""
    warmup_steps: Count | None = None
    min_ratio: Share = 0.0
    """Final share of the learning rate."""
    cycles: Positive = 2
    """Number of cycles for cosine_with_restarts."""

    def __post_init__(self) -> None:
        """Refuse both forms of warm-up together."""
        if self.warmup_ratio is not None and self.warmup_steps is not None:
            raise BadInput(
                f"warmup_ratio is {self.warmup_ratio} and warmup_steps is {self.warmup_steps}",
                "give one of them",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSettings(Record):
    """Worker processes that collate steps ahead of time, or data on the GPU."""

    on_gpu: bool = False
    """Gather steps from data on the GPU, where the task can; no worker is then started."""
    num_workers: Count = 0
    pin_memory: bool = False
    """Pin memory; ignored without a GPU."""
    persistent_workers: bool = False
    """Keep the workers from epoch to epoch."""
    prefetch_factor: Positive | None = None
    """Steps ahead per worker; None: torch's own choice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopSettings(Record):
    """Settings of a run. Those about memory and speed alone do not change its result."""

    epochs: Amount = 1.0
    max_steps: Positive | None = None
    """Number of optimizer steps; overrides `epochs`."""
    drop_last: bool = False
    """Leave out the last step of an epoch where it has fewer sequences than the first."""
    seed: Count = 0
    device: str = "cpu"
    """cpu, cuda or cuda:N; under torchrun every process takes the GPU of its local rank."""
    precision: Precision = "fp32"
    """Autocast's dtype; fp32: no autocast."""
    cuts: tuple[PackedCut | PaddedCut, ...]
    """Ladder of cuts (packing.ladder): the first is used, the finer ones when memory runs out."""
    cut_changes: tuple[tuple[int, int], ...] = ()
    """Replay a run's RunResult.cuts: from step s on, use rung r."""
    optimizer: OptimizerSettings
    schedule: ScheduleSettings = ScheduleSettings()
    loader: LoaderSettings = LoaderSettings()
    compile: bool = False
    compile_mode: str = "default"
    compile_scope: Literal["blocks", "model"] = "blocks"
    """Compile repeated blocks (takes seconds) or the whole model with its loss (takes a minute)."""
    activation_budget: Share = 1.0
    """Share of a compiled block's activations that is kept; the rest is computed again."""
    eager_first: bool = False
    """Take a run's first step eagerly, and compile in the second: the first loss comes sooner."""
    cuda_graph: bool = False
    """Capture whole steps as CUDA graphs, on one GPU, where the task is `capturable`."""
    offload_activations: bool = False
    """Activations wait for the backward pass in host memory."""
    sharding: Sharding = "none"
    reduce_dtype: ReduceDtype = "fp32"
    """Dtype in which ranks sum gradients."""

    eval_steps: Positive | None = None
    """Steps between evaluations; None: after each epoch."""
    eval_batch_size: Positive = 32
    metric: str | None = None
    """Metric that decides which evaluation is best; None: no best one is chosen."""
    greater_is_better: bool = True
    early_stopping_patience: Positive | None = None
    """Evaluations without a better metric before the run stops; None: never."""

    logging_steps: Positive = 10
    checkpoint_steps: Positive | None = None
    """Steps between checkpoints; None: after each evaluation."""
    keep_checkpoints: Count = 2
    """Number of newest checkpoints to keep, besides the best. 0: none, and no resuming."""

    save_last: bool = True
    """Write a checkpoint after the last step, also where the best weights are in memory."""

    profile_step: bool = True
    """Profile one step after the warm-up, for the receipt."""

    nonfinite: Literal["skip", "stop"] = "skip"
    """Reaction to a loss or gradient that is not finite: skip the step, or stop the run."""
    nonfinite_limit: Positive = 25
    """Skipped steps in a row after which the run stops."""

    @property
    def graphs(self) -> bool:
        """True where torch.compile uses CUDA graphs."""
        return self.compile and self.compile_mode in ("reduce-overhead", "max-autotune")

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other."""
        if not self.cuts:
            raise BadInput("there is no cut", "give the cuts of packing.ladder")
        if self.early_stopping_patience is not None and self.metric is None:
            raise BadInput(
                f"early_stopping_patience is {self.early_stopping_patience} without a metric",
                "name the metric that decides",
            )
        rungs = [rung for _, rung in self.cut_changes]
        if any(not 0 <= rung < len(self.cuts) for rung in rungs):
            raise BadInput(f"the rungs to replay are {rungs}", f"the ladder has {len(self.cuts)}")


def _has_plenty(plan: Plan) -> bool:
    """True where an eager step, which takes more memory than a compiled one, surely fits."""
    memory = plan.memory
    return memory is not None and _PLENTY * memory.peak_reserved_gib < memory.capacity_gib


def loop_settings(
    config: Any,
    plan: Plan,
    cuts: Sequence[Cut],
    *,
    device: str,
    metric: str,
    greater_is_better: bool = True,
    save_last: bool = True,
    compile_scope: Any = "blocks",
) -> LoopSettings:
    """Return the loop's settings: numbers of the configuration, decisions of the plan."""
    training = config.training
    betas = (getattr(training, "beta1", 0.9), getattr(training, "beta2", 0.999))
    return LoopSettings(
        epochs=training.num_epochs,
        max_steps=training.max_steps,
        seed=config.seed,
        device=device,
        precision=plan.precision,
        cuts=tuple(cuts),
        optimizer=OptimizerSettings(
            kind=plan.optimizer,
            learning_rate=training.learning_rate,
            weight_decay=training.weight_decay,
            betas=betas,
            max_grad_norm=training.max_grad_norm or None,
            offload=plan.offload_optimizer,
        ),
        schedule=ScheduleSettings(
            kind=training.scheduler,
            warmup_ratio=training.warmup_ratio,
            warmup_steps=training.warmup_steps,
            min_ratio=getattr(training, "min_learning_rate_ratio", 0.0),
        ),
        loader=LoaderSettings(
            on_gpu=plan.data_on_gpu,
            num_workers=plan.num_workers,
            pin_memory=plan.pin_memory,
            persistent_workers=plan.persistent_workers,
            prefetch_factor=plan.prefetch_factor,
        ),
        compile=plan.compile,
        compile_mode=plan.compile_mode,
        compile_scope=compile_scope,
        activation_budget=plan.activation_budget,
        eager_first=plan.compile and device.startswith("cuda") and _has_plenty(plan),
        cuda_graph=plan.cuda_graph,
        offload_activations=plan.offload_activations,
        sharding=plan.sharding,
        reduce_dtype=plan.reduce_dtype,
        eval_steps=training.eval_steps,
        eval_batch_size=plan.eval_batch_size,
        metric=metric,
        greater_is_better=greater_is_better,
        early_stopping_patience=training.early_stopping_patience,
        logging_steps=training.logging_steps,
        checkpoint_steps=training.checkpoint_steps,
        keep_checkpoints=training.keep_checkpoints,
        save_last=save_last,
        nonfinite=training.nonfinite,
        profile_step=training.profile_step,
        drop_last=training.drop_last,
    )


def optimizer_classes() -> dict[str, type[Optimizer]]:
    """Optimizers of torch.optim by their names in small letters.

    LBFGS and SparseAdam are left out: the one computes the loss several times in a step, the other
    needs sparse gradients.
    """
    from torch import optim

    kinds = {name.lower(): kind for name, kind in vars(optim).items() if isinstance(kind, type)}
    known = {n: kind for n, kind in kinds.items() if issubclass(kind, optim.Optimizer)}
    return {n: kind for n, kind in known.items() if n not in ("optimizer", "lbfgs", "sparseadam")}


def check_options(settings: OptimizerSettings) -> None:
    """Raise BadInput for an unknown optimizer, or for options that it does not take."""
    name, classes = settings.kind.removesuffix("_fused"), optimizer_classes()
    if name in ("adamw_bf16", "adamw_8bit"):
        first = next(iter(settings.options))
        raise BadInput(f"the optimizer {name} has no option {first!r}", "leave options empty")
    if name not in classes:
        fix = did_you_mean(name, classes, f"use one of {', '.join(sorted(classes))}")
        raise BadInput(f"there is no optimizer {settings.kind!r}", fix)
    taken = set(inspect.signature(classes[name]).parameters) - {"params", "lr", "weight_decay"}
    wanted = [*settings.options, *(["fused"] if settings.kind.endswith("_fused") else [])]
    for option in wanted:
        if option not in taken:
            fix = did_you_mean(option, taken, f"it takes {', '.join(sorted(taken))}")
            raise BadInput(f"the optimizer {name} has no option {option!r}", fix)
    if settings.weight_decay and name == "rprop":
        raise BadInput("the optimizer rprop has no weight decay", "set weight_decay to 0")


def rate_factor(step: int, total: int, settings: ScheduleSettings) -> float:
    """Share of the learning rate at `step` (from 0) of `total` steps.

    Warm-up ends at the full rate; the decay would end one step after the last.
    """
    warmup = warmup_steps(total, settings)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if settings.kind == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return settings.min_ratio + (1 - settings.min_ratio) * _decay(progress, settings)


def warmup_steps(total: int, settings: ScheduleSettings) -> int:
    """Number of warm-up steps."""
    if settings.warmup_steps is not None:
        return settings.warmup_steps
    return math.ceil(total * (settings.warmup_ratio or 0.0))


def _decay(progress: float, settings: ScheduleSettings) -> float:
    if settings.kind == "linear":
        return 1 - progress
    if settings.kind == "cosine_with_restarts" and progress < 1:
        progress = settings.cycles * progress % 1
    return (1 + math.cos(math.pi * progress)) / 2
