"""Keys of a configuration and what each may hold; `auto` leaves a setting to the planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from trainfit.conf.aliases import (
    Amount,
    Auto,
    CompileMode,
    Gibibytes,
    HeldOut,
    Layers,
    Name,
    Place,
    Rate,
    Seed,
    Sequences,
    Share,
    Small,
    Steps,
    Switch,
    Tokens,
    Tracking,
    Tuning,
    Vocabulary,
    Width,
    Workers,
)
from trainfit.core.codec import Range
from trainfit.core.plan_records import OptimizerName


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceConfig:
    """Device and its arithmetic."""

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
    num_threads: Small | Auto
    """CPU threads of this process. A small model on a busy machine is fastest with one."""
    expandable_segments: bool | None
    """The allocator's segments grow: fewer gaps; null: as PYTORCH_CUDA_ALLOC_CONF says."""
    memory_gib: Gibibytes | None = None
    """Most memory of the GPU that plan and run may use, beside CUDA's own; null: what is free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimization:
    """Optimizer, compiler, and ways to save memory."""

    optimizer: Auto | OptimizerName
    """auto: adamw_fused. All others but adamw keep less beside the weights."""
    compile: Switch
    """torch.compile. auto: where it pays back within the run."""
    compile_mode: CompileMode
    cuda_graph: Switch
    """Capture whole steps as CUDA graphs. auto: where shapes are fixed and their memory fits."""
    gradient_accumulation_steps: Sequences | Auto
    """Micro-batches per step; more where memory needs it, unless batch_size is set too."""
    liger: bool
    """Norms and gated feed-forwards by Liger's kernels, where liger-kernel is installed."""
    offload_activations: Switch = "auto"
    """Activations wait for the backward pass in host memory: less of the GPU's, and slower."""
    activation_budget: Share | Auto = "auto"
    """Share of a compiled block's activations to keep; the rest is computed again. auto: all."""
    sharding: Literal["auto", "none", "fsdp", "hybrid"] = "auto"
    """Share the model among ranks (hybrid: of a machine). auto: where it does not fit one GPU."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which ranks sum gradients: bf16 halves what they send."""
    offload_optimizer: Switch = "auto"
    """Keep AdamW's moments in the host's memory: less on the GPU, and slower steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """The loop, the optimizer's numbers and the loader."""

    batch_size: Sequences | Auto
    """The memory knob: a micro-batch holds at most batch_size × max_length tokens."""
    eval_batch_size: Sequences | Auto
    effective_batch_size: Sequences | Auto
    """Sequences per optimizer step, over all ranks. auto: batch_size × accumulation × ranks."""
    num_epochs: Annotated[float, Range(0.0001, 10**6)]
    max_steps: Steps | None
    """Optimizer steps of the run; null: as num_epochs says."""
    learning_rate: Rate
    weight_decay: Rate
    warmup_ratio: Share | None
    """Share of the steps that warm up; null where warmup_steps says it."""
    warmup_steps: Annotated[int, Range(0, 10**9)] | None
    scheduler: Literal["linear", "cosine", "cosine_with_restarts", "constant"]
    max_grad_norm: Annotated[float, Range(0, 10**9)] | None
    """Clip the gradient's norm; null or 0: do not."""
    eval_steps: Steps | None
    """Steps between evaluations, the first not at step 0; null: after each epoch."""
    eval_iters: Steps | None
    """Batches per evaluation, of eval_batch_size (auto: 32); null: all of the validation data."""
    logging_steps: Steps
    early_stopping_patience: Steps | None
    """Evaluations without a better score before the run stops; null: never."""
    checkpoint_steps: Steps | None
    """Steps between checkpoints; null: after each evaluation."""
    keep_checkpoints: Steps
    """Number of newest checkpoints to keep, besides the best."""
    nonfinite: Literal["skip", "stop"]
    """Reaction to a loss or gradient that is not finite: skip the step, or stop the run."""
    profile_step: bool
    """Profile one step after the warm-up, for `trainfit verify`; it costs about that step again."""
    num_workers: Workers | Auto
    """Loader processes. auto: usable cores - 2, at most 8, at most one per 3 GB of GPU memory."""
    pin_memory: Switch
    persistent_workers: Switch
    prefetch_factor: Small | Auto
    data_on_gpu: Switch = "auto"
    """Keep the tokens on the GPU, without loader processes. auto: where they are small for it."""
    drop_last: bool = False
    """Leave out an epoch's last step where it is not full; gpt always does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GptTraining(Training):
    """The loop of a pretraining job, whose optimizer has numbers of its own."""

    beta1: Share
    beta2: Share
    min_learning_rate_ratio: Share
    """Where the schedule ends, as a share of learning_rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderModel:
    """The model of a classification job."""

    name: Place
    """A name of the catalogue or the hub, or a local folder."""
    weights: Literal["auto", "random", "pretrained"]
    """auto: pretrained, but random for synthetic data, whose words no model has read."""
    method: Literal["full", "lora", "dora"]
    quantization: Literal["none", "nf4", "int8"] = "none"
    """Codes of 4 or 8 bits for the matrices of the blocks, where the encoder is not trained."""
    freeze_encoder: Switch
    """Train the head alone. auto: where nothing else fits the memory; not where method is set."""
    use_gradient_checkpointing: Switch | Literal["selective"]
    """Recompute activations in the backward pass: less memory, about a third slower.
    selective: those of every second block."""
    use_flash_attention: bool
    """Prefer the flash kernel; others stay as fallbacks."""
    pooling: Literal["auto", "mean", "first", "last", "max", "attention_kv", "attention_query"]
    """How a sequence of vectors becomes one.

    auto: as transformers' own head for the model does, with which the export is a transformers
    classifier; decoders stay causal. With all others they look both ways.
    """
    pool_tokens: Tokens
    """The k of first-k and last-k pooling."""
    head_dropout: Share | None
    """null: that of transformers' own head with pooling auto, else 0.1."""
    attention_dropout: Share | None
    """null: as the model's own config says on padded rows, and none on packed ones."""
    feed_forward_dropout: Share | None
    """null: as the model's own config says."""
    lora_rank: Width
    lora_alpha: Amount
    lora_dropout: Share


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensModel(EncoderModel):
    """The model of a job on words, which pools nothing."""

    pooling: Literal["auto"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GptModel:
    """The model of a pretraining job."""

    name: Place
    """A GPT shape of the catalogue: gpt-tiny, gpt-mini, gpt-small, gpt-medium or gpt-124m."""
    n_layer: Layers | None
    """null: as the name says. So are the next two."""
    n_head: Small | None
    n_embd: Width | None
    vocab_size: Vocabulary | Auto
    """Rows of the embedding. auto: the tokenizer's tokens, up to a multiple of 64."""
    dropout: Share
    use_gradient_checkpointing: Switch | Literal["selective"]
    use_flash_attention: bool
    loss_chunk: Steps | Auto | None
    """Tokens whose loss and gradients are computed at a time; null: all logits at once.
    auto: so on a GPU; on a CPU at once, unless a step does not fit or must recompute its blocks."""
    half_stream: Switch
    """Pass half precision from block to block; auto: with bf16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NliData:
    """Pairs of a post and a criterion."""

    data_dir: Place | None
    """A folder with the ReDSM5 files; null: data of the same shape, made from the seed."""
    scale: Literal["small", "full"]
    """Size of synthetic data. small: 1,000 short posts. full: number and lengths of ReDSM5."""
    criteria: Literal["short", "full"]
    """Text of a criterion: a few words, or a whole sentence."""
    max_length: Tokens
    """Tokens per pair. A longer one loses the end of its post, never of the criterion."""
    negative_ratio: Amount | None
    """Negatives per positive in training; null: all of them."""
    class_weights: bool
    """Weigh each class in the loss against its share of the data."""
    test_share: HeldOut
    """Share of the posts held out from training and from the choice of a model."""
    validation_share: HeldOut
    """Share of the other posts, where there are no folds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFilesData:
    """Texts, or pairs of them, with a label."""

    train: Place | None
    """A CSV, TSV, JSONL, JSON or Parquet file, a folder that datasets' save_to_disk wrote, or one
    with files such as train.csv, validation.csv and test.csv, or the name of a dataset of the
    hub, such as imdb or owner/name:subset; null: synthetic texts."""
    split: Name | None = None
    """The split to train on, where the data has several; null: train, with validation and test."""
    stream_above_gib: Amount | None = None
    """Stream larger datasets of the hub, and store none of them; null: those larger than memory."""
    validation: Place | None
    """null: that of the folder, else a share of the training file, as for the test."""
    test: Place | None
    label_column: Name
    """Column of the labels. auto: by its name, such as label, sentiment or category."""
    target: Literal["auto", "single", "multi", "regression"] = "auto"
    """One class per text, several labels, or a number. auto: as the labels look; a note tells.
    Several labels are lists, or stand in one field with |, ; or a comma between them."""
    group_column: Name | None
    """Rows of one group, such as an author, stay on one side of a split; null: no groups."""
    split_column: Name | None = "auto"
    """Column that says train, validation or test. auto: one named split, set or partition that
    does; null: none."""
    scale: Literal["small", "full"]
    """Size of synthetic data. small: 1,200 short texts. full: 20,000 of up to 160 words."""
    max_length: Tokens
    class_weights: bool
    """Weigh each class in the loss against its share of the data; of single classes only."""
    test_share: HeldOut
    validation_share: HeldOut


@dataclass(frozen=True, kw_only=True, slots=True)
class TextclassData(TextFilesData):
    """Texts with a label."""

    text_column: Name
    """Column of the texts. auto: by its name, such as text, review or comment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairsData(TextFilesData):
    """Pairs of texts with a label, such as premise and hypothesis or query and passage."""

    first_column: Name
    """Column of the first texts. auto: by its name, such as premise, sentence1 or query; so for the
    second. Of a pair that is too long, the longer text is cut."""
    second_column: Name


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensData(TextFilesData):
    """Words with a tag each, in lists or in CoNLL files: a word and its tag per line."""

    target: Literal["auto"] = "auto"
    words_column: Name
    """Column of the lists of words. auto: by its name, such as tokens or words; so for that of the
    tags, label_column, such as ner_tags or tags."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextData:
    """A stream of tokens."""

    data_dir: Place | None
    """A text file, a folder of .txt files, one of `trainfit prepare gpt`, or of nanoGPT's token
    files with a meta.json; null: the source of Python's standard library."""
    max_length: Tokens
    """Tokens per sequence: the block size."""
    vocab_size: Annotated[int, Range(257, 2**24)]
    """Vocabulary of the tokenizer that is learned where data_dir names no tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossValidation:
    """Folds by group, so that one post is never in two."""

    folds: Annotated[int, Range(2, 1000)] | None
    """null: one split with a held-out test. With folds the test is left alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Keys of every run."""

    seed: Seed
    runs_dir: Place
    """The folder that run folders are made in."""
    tracking: Tracking
    tune: Tuning


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderRunConfig(RunConfig):
    """Keys of a classification job."""

    baselines: bool
    """Score the majority class and a bag of words beside the model."""
    device: DeviceConfig
    model: EncoderModel
    data: NliData | TextFilesData
    training: Training
    optimization: Optimization
    cv: CrossValidation


@dataclass(frozen=True, kw_only=True, slots=True)
class NliConfig(EncoderRunConfig):
    """`trainfit … nli`."""

    data: NliData


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFilesConfig(EncoderRunConfig):
    """Keys of a job on files of texts, or of pairs of them."""

    data: TextFilesData


@dataclass(frozen=True, kw_only=True, slots=True)
class TextclassConfig(TextFilesConfig):
    """`trainfit … textclass`."""

    data: TextclassData


@dataclass(frozen=True, kw_only=True, slots=True)
class PairsConfig(TextFilesConfig):
    """`trainfit … pairs`."""

    data: PairsData


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensConfig(TextFilesConfig):
    """`trainfit … tokens`."""

    model: TokensModel
    data: TokensData


@dataclass(frozen=True, kw_only=True, slots=True)
class GptConfig(RunConfig):
    """`trainfit … gpt`."""

    device: DeviceConfig
    model: GptModel
    data: TextData
    training: GptTraining
    optimization: Optimization


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnConfig(RunConfig):
    """`trainfit … module:Class`; the fields of the job's own Config stand beside these as `job`."""

    device: DeviceConfig
    training: Training
    optimization: Optimization


Config = NliConfig | TextclassConfig | PairsConfig | TokensConfig | GptConfig
SCHEMAS: dict[str, type[Config]] = {
    "nli": NliConfig,
    "textclass": TextclassConfig,
    "pairs": PairsConfig,
    "tokens": TokensConfig,
    "gpt": GptConfig,
}
