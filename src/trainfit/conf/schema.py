"""The keys of a configuration and what each may hold. Values are in the YAML files beside this.

`auto` leaves a setting to the planner, which says why it chose what it chose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from trainfit.codec import Range

Auto = Literal["auto"]
Switch = bool | Auto
Positive = Annotated[int, Range(1)]
Count = Annotated[int, Range(0)]
Share = Annotated[float, Range(0, 1)]
Amount = Annotated[float, Range(0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What the processor is asked to do."""

    use_cuda: Switch
    """Train on the GPU; auto means if there is one."""
    mixed_precision: Literal["auto", "bf16", "fp16", "off"]
    """Autocast's dtype. auto: bf16 where it is native, else fp16 with loss scaling, else off."""
    tf32: Switch
    """fp32 matrix products in TF32, on compute capability 8.0 and up."""
    cudnn_benchmark: bool
    """Let cuDNN try its algorithms; for convolutions with fixed shapes."""
    deterministic: bool
    """Same seed, same bits; slower."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimization:
    """How a step is computed, not what it computes."""

    optimizer: Literal["auto", "adamw_fused", "adamw"]
    compile: Switch
    """torch.compile. auto: where it pays back within the run."""
    compile_mode: Literal[
        "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
    ]
    gradient_accumulation_steps: Positive | Auto
    """Micro-batches per optimizer step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """The loop, the optimizer's numbers and the loader."""

    batch_size: Positive | Auto
    """The memory knob: a micro-batch holds at most batch_size × max_length tokens."""
    eval_batch_size: Positive | Auto
    effective_batch_size: Positive | Auto
    """Sequences per optimizer step, over all ranks. auto: batch_size × accumulation × ranks."""
    num_epochs: Amount
    max_steps: Positive | None
    """Stop after so many optimizer steps; null: after num_epochs."""
    learning_rate: Amount
    weight_decay: Amount
    warmup_ratio: Share | None
    """Share of the steps that warm up; null where warmup_steps says it."""
    warmup_steps: Count | None
    scheduler: Literal["linear", "cosine", "cosine_with_restarts", "constant"]
    max_grad_norm: Amount | None
    """Clip the gradient's norm; null: do not."""
    eval_steps: Positive | None
    """Evaluate every so many steps, never at step 0; null: after each epoch."""
    eval_iters: Positive | None
    """Batches per evaluation; null: all of the validation data."""
    logging_steps: Positive
    early_stopping_patience: Positive | None
    """Evaluations without a better score before the run stops; null: never."""
    num_workers: Count | Auto
    """Loader processes. auto: usable cores - 2, at most 8, at most one per 3 GB of GPU memory."""
    pin_memory: Switch
    persistent_workers: Switch
    prefetch_factor: Positive | Auto


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderModel:
    """The model of a classification job."""

    name: str
    """A name of the catalogue or the hub, or a local folder."""
    method: Literal["full", "lora", "dora"]
    freeze_encoder: Switch
    use_gradient_checkpointing: Switch
    """Recompute activations in the backward pass: less memory, about a third slower."""
    use_flash_attention: bool
    """Prefer the flash kernel; others stay as fallbacks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GptModel:
    """The model of a pretraining job."""

    name: str
    """A GPT shape of the catalogue."""
    use_gradient_checkpointing: Switch
    use_flash_attention: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class NliData:
    """Pairs of a post and a criterion."""

    data_dir: str | None
    """A folder with the ReDSM5 files; null: data of the same shape, made from the seed."""
    max_length: Positive
    negative_ratio: Amount | None
    """Negatives per positive in training; null: all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextData:
    """Texts with a label, or a stream of tokens."""

    data_dir: str | None
    max_length: Positive
    """Tokens per sequence; for a GPT the block size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossValidation:
    """Folds by group, so that one post is never in two."""

    folds: Annotated[int, Range(2)] | None
    """null: one split with a held-out test."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NliConfig:
    """`trainfit … nli`."""

    seed: Count
    device: Device
    model: EncoderModel
    data: NliData
    training: Training
    optimization: Optimization
    cv: CrossValidation


@dataclass(frozen=True, kw_only=True, slots=True)
class TextclassConfig:
    """`trainfit … textclass`."""

    seed: Count
    device: Device
    model: EncoderModel
    data: TextData
    training: Training
    optimization: Optimization
    cv: CrossValidation


@dataclass(frozen=True, kw_only=True, slots=True)
class GptConfig:
    """`trainfit … gpt`."""

    seed: Count
    device: Device
    model: GptModel
    data: TextData
    training: Training
    optimization: Optimization


Config = NliConfig | TextclassConfig | GptConfig
SCHEMAS: dict[str, type[Config]] = {
    "nli": NliConfig,
    "textclass": TextclassConfig,
    "gpt": GptConfig,
}
