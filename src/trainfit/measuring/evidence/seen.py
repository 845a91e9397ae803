"""The evidence of one step as a record: counts, names and dtypes, without a judgement."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainfit.records import Record, Scalar


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductsSeen(Record):
    """The matrix products of the step."""

    shares: dict[str, float] = field(default_factory=dict)
    """Of their operations, by the dtype of what was multiplied: bf16, fp16, fp32, …"""
    casts: int = 0
    """Copies to or from half precision, as autocast makes them."""
    kernels: tuple[str, ...] = ()
    """Those that took longest on the GPU."""
    tf32_kernels: int = 0
    exact_kernels: int = 0
    """Kernels whose name says that they multiply fp32 as it is."""

    @property
    def dtype(self) -> str | None:
        """What most operations were computed in."""
        return max(self.shares, key=lambda name: self.shares[name]) if self.shares else None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSeen(Record):
    """How attention was computed."""

    calls: dict[str, int] = field(default_factory=dict)
    """Forward calls by kernel: flash, efficient, cudnn, math, cpu, varlen, flex, and two of
    trainfit's own, disentangled and softcapped."""
    masked: bool = False
    """Whether scaled_dot_product_attention was given a mask."""
    dtype: str | None = None
    head: int | None = None
    """The size of a head."""
    softmaxes: int = 0
    """Calls of softmax, which attention without a kernel of its own makes."""

    @property
    def kernel(self) -> str | None:
        """The one that was called most."""
        return max(self.calls, key=lambda name: self.calls[name]) if self.calls else None


@dataclass(frozen=True, kw_only=True, slots=True)
class CompilerSeen(Record):
    """What torch.compile had made, and what of it ran."""

    regions: int = 0
    """Compiled pieces that ran in the step."""
    resumed: int = 0
    """Of those, pieces that go on after a graph break."""
    graphs: int = 0
    breaks: tuple[str, ...] = ()
    """The reasons of graph breaks, in one line each."""
    recompiles: int = 0
    failures: tuple[str, ...] = ()
    """What the compiler failed with."""
    attempts: int = 0
    """Frames that the compiler was given."""
    graph_launches: int = 0
    """CUDA graphs that were launched in the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchesSeen(Record):
    """What the loader gave for the step."""

    tensors: int = 0
    pinned: int = 0
    tokens: int | None = None
    """Without padding; None where the batch does not say."""
    capacity: int | None = None
    """With it."""
    packed: bool | None = None
    """Sequences lie end to end in rows; None where the batch does not say."""
    sequences: int | None = None
    micro_batches: int | None = None
    workers: int = 0
    """Loader processes that were alive."""
    waited_share: float | None = None
    """Of the step's time, spent waiting for the loader."""
    pinned_bytes: int = 0
    pageable_bytes: int = 0
    """Copied to the GPU from either kind of memory."""

    @property
    def padding_share(self) -> float | None:
        """Of what the model computed."""
        if self.tokens is None or not self.capacity:
            return None
        return 1.0 - self.tokens / self.capacity


@dataclass(frozen=True, kw_only=True, slots=True)
class SwitchesSeen(Record):
    """What torch says of itself at the moment of the step."""

    tf32: bool | None = None
    flash: bool | None = None
    """Whether scaled_dot_product_attention may take its flash kernel."""
    cudnn_benchmark: bool = False
    deterministic: bool = False
    allocator: dict[str, Scalar] = field(default_factory=dict)
    threads: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence(Record):
    """All that one step showed."""

    step: int
    device: str
    """cpu or cuda."""
    device_name: str = ""
    torch: str = ""
    products: ProductsSeen = ProductsSeen()
    attention: AttentionSeen = AttentionSeen()
    compiler: CompilerSeen = CompilerSeen()
    batches: BatchesSeen = BatchesSeen()
    switches: SwitchesSeen = SwitchesSeen()
    updates: dict[str, int] = field(default_factory=dict)
    """Calls of the optimizer's arithmetic by how it is done: fused, foreach, single."""
    recomputed: int = 0
    """Operators of the forward pass that ran inside the backward pass."""
    zeroed: bool | None = None
    """Whether gradients were filled with zeros instead of let go; None: nobody cleared them."""
    clipped: bool = False
    """Whether the gradients were multiplied by a factor bounded by their norm."""
    gradients: int = 0
    """Gradients that the backward passes added to a weight's."""
    convolutions: int = 0
    liger: int = 0
    """Launches of Liger's kernels."""
    kernels: dict[str, float] = field(default_factory=dict)
    """Milliseconds of the kernels that took longest."""
    seconds: float = 0.0
    """What it took to look."""
