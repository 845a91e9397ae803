"""Variable-length attention: a kernel on a packed row, which needs no mask.

It is torch's flash kernel; where that is not available, torch's memory-efficient one
(efficient_packed.py), or trainfit's own for soft-capped logits.

`kernel_for` says where there is no kernel; it looks at numbers alone, so that a planner can ask
for a GPU that is not here. Everything runs inside a compiled graph and never waits for the GPU.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from trainfit.kernels import efficient_packed, supported
from trainfit.kernels.efficient_packed import differentiate

if TYPE_CHECKING:
    from trainfit.kernels.attention import Layout

F = TypeVar("F", bound=Callable[..., Any])
PackedKernel = Literal["varlen", "varlen_efficient", "softcapped"]
"""Kernel for packed rows: torch's flash kernel, its memory-efficient one, or trainfit's own."""


def _constant(function: F) -> F:
    """Mark a function whose result is a constant in compiled code.

    torch.compiler.assume_constant_result does the same, after it has imported the compiler.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


@torch.library.custom_op("trainfit::softcapped_attention", mutates_args=())
def softcapped_attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, seed: Tensor | None, longest: int,
    scale: float, cap: float, window: int, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend: `[tokens, heads, d]`, and the softmax's logarithms `[heads, tokens]`.

    Keys and values may have fewer heads. Tokens at a distance of `window` and beyond are not seen.
    With a `seed` (`draw_seed`), a share of `dropout` of the softmax's results is dropped.
    """
    from trainfit.kernels import softcapped_triton

    numbers = (longest, scale, cap, window, dropout)
    return softcapped_triton.forward(query, key, value, starts, seed, *numbers)


@torch.library.custom_op("trainfit::softcapped_attention_backward", mutates_args=())
def softcapped_attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, starts: Tensor,
    seed: Tensor | None, out: Tensor, sums: Tensor, longest: int, scale: float, cap: float,
    window: int, dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from trainfit.kernels import softcapped_triton

    tensors = (gradient.contiguous(), query, key, value, starts, seed, out, sums)
    return softcapped_triton.backward(*tensors, longest, scale, cap, window, dropout)


@softcapped_attention.register_fake
def _(query: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _head = query.shape
    return torch.empty_like(query), query.new_empty(heads, tokens, dtype=torch.float32)


@softcapped_attention_backward.register_fake
def _(
    _gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


differentiate(softcapped_attention, softcapped_attention_backward, tensors=5)

_OPERATION = "torch_attn::_varlen_attn"
_HALF = (torch.float16, torch.bfloat16)
_LARGEST_DROPPED = 192
"""Largest head whose backward pass has dropout on every GPU."""
_DROPS_LARGE = ((8, 0), (9, 0), (10, 0))
"""Compute capabilities whose shared memory holds larger ones too."""
_SEEDS = 1 << 62
_KERNEL = "torch.nn.attention.varlen"
"""Module of torch's kernel. It imports the compiler, so only a batch that needs it does."""


# Without eq: torch 2.11 hashes it while it traces a graph, before its fields are there.
@dataclass(frozen=True, slots=True, eq=False)
class VarlenAttention:
    """Attention inside each sequence of one packed row."""

    starts: Tensor
    """Start of each sequence, filler included; ends with the row's width."""
    longest: int
    """Upper bound of the sequences' lengths."""
    window: int | None
    """In layers with a sliding window, tokens at this distance and beyond are not seen."""
    dtype: torch.dtype
    """Dtype to compute in: rotary embeddings may have made the queries and keys float32."""
    causal: bool = False
    """A token sees none after it."""
    kernel: PackedKernel = "varlen"

    def __call__(
        self,
        _module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None,
        dropout: float,
        windowed: bool,
        softcap: float | None,
    ) -> Tensor:
        """Attend: from `[B, heads, tokens, head]` to `[B, tokens, heads, head]`."""
        reach = self.window - 1 if windowed and self.window is not None else -1
        ahead = 0 if self.causal else reach
        # The output has the query's strides, and the backward pass copies it unless contiguous.
        queries = query[0].transpose(0, 1).to(self.dtype).contiguous()
        keys, values = (part[0].transpose(0, 1).to(self.dtype) for part in (key, value))
        if softcap is not None:
            mixed, _ = softcapped_attention(
                queries,
                keys.contiguous(),
                values.contiguous(),
                self.starts,
                draw_seed(query.device) if dropout else None,
                self.longest,
                query.shape[-1] ** -0.5 if scaling is None else scaling,
                softcap,
                self.longest if reach < 0 else reach + 1,
                dropout,
            )
            return cast(Tensor, mixed)[None]
        if self.kernel == "varlen_efficient":
            # A window that reaches both ways is only given where every sequence is within it.
            window = reach + 1 if self.causal else 0
            given = (queries, keys, values, self.starts, self.longest)
            return efficient_packed.attend_efficiently(*given, scaling, window, self.causal)[None]
        rows = (queries, keys, values, self.starts, self.starts, self.longest, self.longest)
        if dropout:
            # varlen_attn without its fixed dropout of 0: torch keeps the generator's state on the
            # device for the backward pass, also in a CUDA graph.
            found = torch.ops.aten._flash_attention_forward(
                *rows, dropout, self.causal and reach < 0, False,
                scale=scaling, window_size_left=reach, window_size_right=ahead,
            )  # fmt: skip
            return cast(Tensor, found[0])[None]
        from torch.nn.attention.varlen import varlen_attn

        grouped: dict[str, Any] = {"enable_gqa": True} if takes_groups() else {}
        attended = varlen_attn(
            *rows,
            scale=scaling,
            window_size=(reach, ahead),
            **(grouped if query.shape[1] != key.shape[1] else {}),
        )
        return cast(Tensor, attended)[None]


def draw_seed(device: torch.device) -> Tensor:
    """Draw the seed of one dropout, on the device, so that CUDA graphs draw a new one each time."""
    return torch.randint(_SEEDS, (1,), device=device)


def varlen_attention(
    layout: Layout,
    window: int | None,
    dtype: torch.dtype,
    *,
    causal: bool = False,
    kernel: PackedKernel = "varlen",
) -> VarlenAttention:
    """Build the attention of a packed batch, once for all layers."""
    longest = min(layout.max_seqlen, layout.ids.shape[1])
    return VarlenAttention(starts_of(layout), longest, window, dtype, causal, kernel)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedRows:
    """Facts of packed rows and of a GPU that decide which kernel attends within them."""

    capability: tuple[int, int] | None
    """Compute capability of the GPU; None stands for one that is new enough."""
    dtype: torch.dtype
    head: int
    softcap: float | None = None
    dropout: float = 0.0
    causal: bool = False
    window: int | None = None
    """As in `attention.choose`."""
    longest: int | None = None
    """Upper bound of the sequences' lengths; None: unknown."""
    flash: bool = True
    """This torch has the flash kernel, and it may be taken."""


def kernel_for(rows: PackedRows) -> tuple[PackedKernel | None, str]:
    """Choose the fastest kernel for packed rows; else None and the reason why there is none."""
    if rows.softcap is not None:
        reason = _capped_obstacle(rows)
        return ("softcapped" if reason is None else None), reason or ""
    no_flash = _flash_obstacle(rows)
    if no_flash is None:
        return "varlen", ""
    reason = _efficient_obstacle(rows)
    if reason is None:
        return "varlen_efficient", ""
    return None, f"{no_flash}, and {reason}"


def _flash_obstacle(rows: PackedRows) -> str | None:
    """Reason why the flash kernel cannot take the rows; None: it can."""
    capability, head = rows.capability, rows.head
    if not rows.flash:
        return "this torch has no flash kernel"
    if capability is not None and capability < supported.FLASH_SINCE:
        return f"the flash kernel needs compute capability 8.0, not {dotted(capability)}"
    if rows.dtype not in _HALF:
        return f"the flash kernel does not compute in {dtype_name(rows.dtype)}"
    # Between 192 and 224 the backward pass exists on some GPUs only.
    if head % 8 or head > supported.LARGEST_HEAD or 192 < head <= 224:
        return f"the flash kernel takes no heads of {head}"
    if rows.dropout > 0 and head > _LARGEST_DROPPED and capability not in (None, *_DROPS_LARGE):
        return f"the flash kernel takes no attention dropout {rows.dropout} with heads of {head}"
    return None


def _efficient_obstacle(rows: PackedRows) -> str | None:
    """Reason why the memory-efficient kernel cannot take the rows; None: it can."""
    since = supported.BF16_SINCE if rows.dtype == torch.bfloat16 else supported.EFFICIENT_SINCE
    if rows.capability is not None and rows.capability < since:
        return f"the memory-efficient one needs {dotted(since)} in {dtype_name(rows.dtype)}"
    if rows.dtype not in (*_HALF, torch.float32):
        return f"the memory-efficient one does not compute in {dtype_name(rows.dtype)}"
    if rows.head % 8 or rows.head > supported.LARGEST_HEAD:
        return f"the memory-efficient one takes no heads of {rows.head}"
    if rows.dropout > 0:
        return f"the memory-efficient one has no attention dropout {rows.dropout} on packed rows"
    window, longest = rows.window, rows.longest
    if window is not None and not rows.causal and (longest is None or window < longest):
        return "the memory-efficient one has no sliding window that reaches both ways"
    return None


def _capped_obstacle(rows: PackedRows) -> str | None:
    """Reason why the kernel for soft-capped logits cannot take the rows; None: it can."""
    capped = f"its logits are soft-capped at {rows.softcap}"
    if reason := triton_obstacle(rows.capability):
        return f"{capped}, and {reason}"
    if rows.dtype not in _HALF:
        return f"{capped}, and attention is computed in {dtype_name(rows.dtype)}"
    if rows.head not in supported.CAPPED_HEADS:
        return f"{capped}, and it has heads of {rows.head}"
    return f"{capped}, and each token sees those before it alone" if rows.causal else None


def triton_obstacle(capability: tuple[int, int] | None) -> str | None:
    """Reason why trainfit's own attention kernels do not run on a GPU; None: they do."""
    if capability is not None and capability < supported.TRITON_SINCE:  # torch 2.11 cannot trace >=
        needed = f"compute capability {dotted(supported.TRITON_SINCE)}"
        return f"its kernel needs {needed}, not {dotted(capability)}"
    return None


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype as people write it."""
    return str(dtype).removeprefix("torch.")


def dotted(capability: tuple[int, int]) -> str:
    """Write a compute capability as NVIDIA does."""
    return ".".join(map(str, capability))


@_constant
def capability(index: int | None) -> tuple[int, int]:
    """The compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(index)


@_constant
def for_nvidia() -> bool:
    """Tell if this torch has NVIDIA's kernels; AMD's have no sliding window."""
    return torch.version.hip is None


@_constant
def flash_exists() -> bool:
    """Tell if this torch has NVIDIA's flash kernels."""
    return for_nvidia() and torch.backends.cuda.is_flash_attention_available()


@_constant
def takes_groups() -> bool:
    """Tell if the kernel is told of fewer heads of keys and values; older ones just take them."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


@_constant
def triton_exists() -> bool:
    return find_spec("triton") is not None


def triton_takes(tensor: Tensor) -> bool:
    """Tell if Triton can make kernels for a tensor's GPU: bf16 needs Ampere, others Volta."""
    least = (8, 0) if tensor.dtype == torch.bfloat16 else (7, 0)
    return triton_exists() and torch.cuda.get_device_capability(tensor.device) >= least


@_constant
def stands_in(device: str) -> bool:
    """Tell if the operation has a kernel on this kind of device, as the estimator's fakes do."""
    if _KERNEL not in sys.modules:
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(_OPERATION, device.upper())


def in_half_on_gpu(tensor: Tensor) -> bool:
    """Tell a half-precision tensor on a GPU, real or fake."""
    half = tensor.dtype in (torch.bfloat16, torch.float16)
    return half and (tensor.is_cuda or stands_in(tensor.device.type))


def starts_of(layout: Layout) -> Tensor:
    """Starts of the sequences of a packed row, with the filler cut into sequences of its own.

    A kernel leaves memory uninitialised where no sequence is, and a NaN there would reach every
    weight's gradient. No piece is longer than `max_seqlen`, which bounds the kernel's work; some
    may be empty.
    """
    assert layout.cu_seqlens is not None
    width = layout.ids.shape[1]
    longest = min(layout.max_seqlen, width)
    pieces = torch.arange(1, -(-width // longest) + 1, device=layout.ids.device)
    ends = (layout.cu_seqlens[-1:] + pieces * longest).clamp(max=width)
    return torch.cat([layout.cu_seqlens, ends]).int()
