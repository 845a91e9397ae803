"""The settings in effect when a run begins: one record for programs, and its lines for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from trainfit.core.plan_records import Precision
from trainfit.core.records import Record

AttentionKind = Literal[
    "sdpa",
    "varlen",
    "varlen_efficient",
    "disentangled",
    "softcap",
    "mask",
    "own",
    "products",
    "frozen",
    "job",
]
_KERNELS = {"flash": "Flash", "efficient": "memory-efficient", "math": "math"}
_MOST_CLASSES = 20
"""Classes that are counted in a line."""
_PADDED = "on padded rows of like length"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPath(Record):
    """The code that computes attention in this run."""

    kind: AttentionKind
    """sdpa: by `kernels`. mask: SDPA with a mask on packed rows. own, products: the model's code on
    padded rows. frozen: none. job: of the user's own, if it has any. The others are kernels for
    packed rows."""
    kernels: tuple[str, ...] = ()
    """SDPA's kernels on a GPU, the preferred one first."""
    dropout: float = 0.0
    """Attention dropout on packed rows."""
    obstacle: str = ""
    """Reason for which no kernel for packed rows can be used."""
    drops_padding: bool = False
    """True if padded rows are padded for attention alone."""

    def line(self, device: str, *, alike: bool = False) -> str:
        """One sentence for people; sequences that are all `alike` are not padded."""
        rows = f"packed rows, attention dropout {self.dropout:g}"
        if self.kind == "sdpa":
            return "SDPA attention" if alike and device != "cuda" else self._sdpa(device)
        capped = "Attention: soft-capped logits, which SDPA has no kernel for, by plain products"
        return {
            "varlen": "SDPA Flash Attention backend enabled (its variable-length kernel on"
            f" {rows})",
            "varlen_efficient": "Attention: torch's memory-efficient kernel with lengths on"
            f" {rows}",
            "disentangled": "Attention: trainfit's Triton kernel for disentangled attention"
            f" on {rows}",
            "softcap": f"Attention: trainfit's Triton kernel for soft-capped logits on {rows}",
            "mask": f"Attention: a mask on {rows} ({self.obstacle})",
            "own": f"Attention: the model's own, {_PADDED}",
            "products": f"{capped}, {_PADDED}",
            "frozen": "Frozen encoder: its outputs were computed once, and only the head is"
            " trained",
        }[self.kind]

    def _sdpa(self, device: str) -> str:
        if device != "cuda":
            alone = "; the rest is computed without padding" if self.drops_padding else ""
            return f"SDPA attention {_PADDED}{alone}"
        first, *others = [_KERNELS[kernel] for kernel in self.kernels] or ["no"]
        rest = f" (fallbacks: {', '.join(others)})" if others else ""
        return f"SDPA {first} Attention backend enabled{rest}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainingSetup(Record):
    """Tokens and batches of a GPT pretraining run."""

    train_tokens: int
    held_out_tokens: int
    vocabulary: int
    unigram_entropy: float | None
    effective_batch_size: int
    step_tokens: int
    batch_size: int
    """Sequences of a micro-batch, at most."""
    loss_chunk: int | None
    """Tokens whose logits exist at the same time; None for all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSetup(Record):
    """Rows of a run by part, and training rows by class."""

    train: int
    validation: int
    test: int = 0
    """0: there is none beside the validation part."""
    classes: dict[str, int] = field(default_factory=dict)
    """Training rows of each class; a row with several labels counts for each."""
    fold: int = 1
    folds: int = 1
    synthetic: bool = False

    def lines(self) -> Iterator[str]:
        """Sentences on the split and the classes."""
        total = self.train + self.validation + self.test
        made = " of synthetic data" if self.synthetic else ""
        fold = "" if self.folds == 1 else f"fold {self.fold} of {self.folds}, "
        test = f", {self.test:,} for the test" if self.test else ", which are the test too"
        yield (
            f"Data: {total:,} rows{made}: {fold}{self.train:,} to train on,"
            f" {self.validation:,} for validation{test}"
        )
        if self.classes:
            shown = [f"{name}: {count:,}" for name, count in self.classes.items()][:_MOST_CLASSES]
            more = len(self.classes) - len(shown)
            rest = f", and {more:,} more classes" if more else ""
            yield f"Classes to train on: {', '.join(shown)}{rest}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSetup(Record):
    """Settings in effect at the first step of a process, as torch and the loader report them."""

    device: str
    """cuda or cpu."""
    device_name: str | None
    compute_capability: tuple[int, int] | None
    threads: int
    ranks: int
    sharded: bool
    """Each rank holds a share of the model (FSDP2)."""
    tf32: tuple[str, ...]
    """Libraries that compute float32 products in TF32: matmul, cuDNN."""
    precision: Precision
    loss_scaling: bool
    attention: AttentionPath
    method: str | None = None
    """full, lora, frozen, or None for a job without methods."""
    optimizer: str
    fused: bool
    learning_rate: float
    weight_decay: float
    trained_weights: int
    weights: int
    data_on_gpu: bool = False
    num_workers: int
    pin_memory: bool
    prefetch_factor: int | None
    step_sequences: int
    """Sequences of the first step, of all ranks together."""
    micro_batches: int
    micro_batch_tokens: int
    packed: bool
    compiled: bool
    alike: bool = False
    """All sequences have one length: nothing is padded."""
    samples: bool = False
    """The job counts samples of one size, such as images, and not tokens."""
    indivisible: str | None = None
    """Reason for which steps are never cut into micro-batches."""
    tuned_samples_per_second: float | None = None
    """Rate that `tune` measured, where the plan was tuned."""
    pretraining: PretrainingSetup | None = None
    model: str | None = None
    """Name of the model, or of the class of a job of the user's own."""
    data: DataSetup | None = None

    @property
    def device_words(self) -> str:
        """The GPU's name, or the CPU with its threads."""
        threads = f"{self.threads} {'thread' if self.threads == 1 else 'threads'}"
        return self.device_name or f"{self.device} ({threads})"

    def lines(self) -> Iterator[str]:
        """Sentences for the head of train.log, the terminal and the report."""
        rows = "packed " if self.packed else "" if self.alike or self.samples else "padded "
        pieces = "micro-batch" if self.micro_batches == 1 else "micro-batches"
        if self.model is not None:
            yield self._model(self.model)
        if self.data is not None:
            yield from self.data.lines()
        yield self._device()
        yield self._tf32()
        yield f"Precision: {self.precision}" + (" with loss scaling" if self.loss_scaling else "")
        if self.attention.kind != "job":
            yield self.attention.line(self.device, alike=self.alike)
        yield (
            f"Using {'fused ' if self.fused else ''}{self.optimizer} optimizer"
            f" (lr={self.learning_rate:g}, wd={self.weight_decay:g})"
            f" on {self.trained_weights:,} of {self.weights:,} weights"
        )
        yield (
            f"DataLoader settings: num_workers={self.num_workers}, pin_memory={self.pin_memory},"
            f" prefetch_factor={self.prefetch_factor}"
            f"{', data on the GPU' if self.data_on_gpu else ''}"
        )
        yield (
            f"Steps of {self.micro_batches} {rows}{pieces}"
            f" of up to {self.micro_batch_tokens:,} {'samples' if self.samples else 'tokens'},"
            f" {'compiled' if self.compiled else 'not compiled'}"
        )
        if self.ranks > 1:
            yield self._ranks()
        if self.pretraining is not None:
            yield from _pretraining(self.pretraining, self.ranks)
        if self.indivisible is not None:
            yield f"Steps are not cut into micro-batches: {self.indivisible}"
        if self.tuned_samples_per_second is not None:
            yield (
                f"Settings as tuned on this machine: {self.tuned_samples_per_second:,.1f}"
                " samples/s (tune=off plans without measuring)"
            )

    def _model(self, name: str) -> str:
        if self.method == "frozen":
            return f"Model: {name}, frozen; the {self.trained_weights:,} weights of its head train"
        how = "" if self.method is None else f", method {self.method}"
        return f"Model: {name}, {self.weights:,} weights, {self.trained_weights:,} trained{how}"

    def _device(self) -> str:
        ranks = f", {self.ranks} ranks" if self.ranks > 1 else ""
        named = f"cuda ({self.device_name})" if self.device == "cuda" else self.device_words
        return f"Device: {named}{ranks}"

    def _tf32(self) -> str:
        if self.device != "cuda":
            return "TF32 does not apply: there is no GPU"
        capability = f"(GPU compute capability {self.compute_capability})"
        if not self.tf32:
            return f"TF32 off {capability}"
        return f"TF32 enabled for {' and '.join(self.tf32)} operations {capability}"

    def _ranks(self) -> str:
        least, more = divmod(self.step_sequences, self.ranks)
        share = f"{least} or {least + 1}" if more else f"{least}"
        model = (
            "each holds a share of the model (FSDP2)"
            if self.sharded
            else "each holds the model, and gradients are summed once a step"
        )
        return (
            f"{self.ranks} ranks: steps of {self.step_sequences} sequences, {share} on each;"
            f" {model}; samples/s and tokens/s are of all, MFU is per GPU"
        )


def _pretraining(setup: PretrainingSetup, ranks: int) -> Iterator[str]:
    entropy = setup.unigram_entropy
    known = "" if entropy is None else f", unigram entropy {entropy:.4f} nats"
    yield (
        f"Data: {setup.train_tokens:,} tokens to train on, {setup.held_out_tokens:,} held out,"
        f" a vocabulary of {setup.vocabulary:,}{known}"
    )
    chunk = setup.loss_chunk
    yield (
        f"Global batch {setup.effective_batch_size} ({setup.step_tokens:,} tokens a step),"
        f" {-(-setup.effective_batch_size // ranks)} on each of {ranks}"
        f" {'rank' if ranks == 1 else 'ranks'}, at most {setup.batch_size} at a time; loss "
        + ("of all tokens at once" if chunk is None else f"{chunk:,} tokens at a time")
    )
