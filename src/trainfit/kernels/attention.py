"""Layout of a batch, and how its attention is computed, chosen in one place for every model.

A model is built with `attn_implementation=register()`. Before each forward pass `choose` makes an
`Attention` for the batch, which travels through the model as the keyword argument `ARGUMENT` and
is called by every layer. It looks both ways, whatever the model was trained as, unless `causal` is
asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainfit.core.errors import BadInput
from trainfit.kernels import varlen
from trainfit.kernels.varlen import PackedKernel, PackedRows, VarlenAttention

# ── layout: never looks at the values of a tensor, so that fakes and graphs can have one ──────────


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The sequences in a batch of rows `[B, T]`.

    Padded: row b holds sequence b, and `mask` says which of its tokens are real. Packed: one row
    holds all sequences end to end, and `cu_seqlens` says where each begins; the tokens after the
    last one are filler.
    """

    sequences: int
    ids: Tensor
    """`[B, T]`: the sequence of each token; `sequences` for padding and filler."""
    positions: Tensor
    """`[B, T]`: the place of each token in its sequence; 0 for padding and filler."""
    lengths: Tensor
    """`[sequences]`: tokens in each."""
    mask: Tensor | None = None
    """`[B, T]`, True for real tokens; None where nothing is padded, and for packed rows."""
    cu_seqlens: Tensor | None = None
    """`[sequences + 1]`: where each sequence begins, and where the filler does."""
    max_seqlen: int
    """Upper bound of the sequences' lengths."""


def lay_out(
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Layout:
    """Build the layout of a batch: packed with `cu_seqlens`, else one sequence per row.

    Leave `attention_mask` out when nothing is padded: to look whether it is all ones would make
    the GPU wait, so a mask that is given is used.
    """
    if cu_seqlens is None:
        return _padded(input_ids, attention_mask)
    if attention_mask is not None:
        fix = "give attention_mask for padded rows or cu_seqlens for packed ones"
        raise BadInput("a batch with both attention_mask and cu_seqlens", fix)
    if input_ids.shape[0] != 1:
        fix = "pack all sequences into one row"
        raise BadInput(f"packed rows of shape {tuple(input_ids.shape)}", fix)
    return _packed(input_ids, cu_seqlens, max_seqlen)


def _padded(input_ids: Tensor, attention_mask: Tensor | None) -> Layout:
    rows, width = input_ids.shape
    row = torch.arange(rows, device=input_ids.device)[:, None]
    if attention_mask is None:
        mask = None
        ids = row.expand(rows, width)
        positions = torch.arange(width, device=input_ids.device).expand(rows, width)
        lengths = torch.full_like(row[:, 0], width)
    else:
        mask = attention_mask.bool()
        ids = torch.where(mask, row, rows)
        # Counting real tokens is right for padding on either side.
        positions = (mask.cumsum(-1) - 1) * mask
        lengths = mask.sum(-1)
    return Layout(
        sequences=rows, ids=ids, positions=positions, lengths=lengths, mask=mask, max_seqlen=width
    )


def _packed(input_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int | None) -> Layout:
    width = input_ids.shape[1]
    starts = cu_seqlens.long()
    sequences = starts.shape[0] - 1
    token = torch.arange(width, device=input_ids.device)
    # All starts, since Inductor 2.11 cannot bucketize with a slice such as starts[1:].
    ids = torch.bucketize(token, starts, right=True) - 1
    # Filler stays at position 0, within the table of learned positions.
    positions = torch.where(ids < sequences, token - starts[ids], 0)
    return Layout(
        sequences=sequences,
        ids=ids[None],
        positions=positions[None],
        lengths=starts.diff(),
        cu_seqlens=cu_seqlens,
        max_seqlen=width if max_seqlen is None else max_seqlen,
    )


# ── attention ─────────────────────────────────────────────────────────────────────────────────────


# Without eq: torch 2.11 hashes it while it traces a graph, before its fields are there.
@dataclass(frozen=True, slots=True, eq=False)
class MaskedAttention:
    """Attention inside each sequence, with the masks of one batch."""

    full: Tensor | None
    """Broadcasts to `[B, heads, T, T]`. True: seen. None: every token sees every other."""
    windowed: Tensor | None
    """Mask of the layers with a sliding window, as `full`."""

    def __call__(
        self,
        module: nn.Module,
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
        mask = self.windowed if windowed else self.full
        if softcap is not None:
            return _softcapped(query, key, value, mask, scaling, dropout, softcap)
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output, _ = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=False
        )
        attended: Tensor = output
        return attended


def masked_attention(
    layout: Layout, window: int | None, *, causal: bool = False
) -> MaskedAttention:
    """Build the masks of a batch, once for all layers."""
    full = _visible(layout, None, causal)
    # A window longer than every sequence needs no mask. But beside a full mask, the windowed mask
    # always has the same shape, to avoid recompilation.
    outgrown = window is not None and (full is not None or window < layout.max_seqlen)
    return MaskedAttention(full, _visible(layout, window, causal) if outgrown else full)


def same_sequence(layout: Layout) -> Tensor:
    """`[B, T, T]`: True for two tokens of one sequence; filler is a sequence of its own."""
    return layout.ids[:, :, None] == layout.ids[:, None, :]


def _visible(layout: Layout, window: int | None, causal: bool) -> Tensor | None:
    """Build a mask of `MaskedAttention`; None where every token sees every other."""
    visible = None
    if layout.mask is not None:
        visible = layout.mask[:, None, :]
    elif layout.cu_seqlens is not None:
        visible = same_sequence(layout)
    if window is not None or causal:
        token = torch.arange(layout.ids.shape[1], device=layout.ids.device)
        distance = (token[:, None] - token[None, :])[None]
        distance = distance if causal else distance.abs()
        near = distance < (layout.ids.shape[1] if window is None else window)
        near = near & (distance >= 0) if causal else near
        # Padding beyond the window of every real token sees itself: an empty softmax is NaN, and
        # NaN times a gradient of zero is NaN.
        visible = near if visible is None else (visible & near) | (distance == 0)
    return None if visible is None else visible[:, None]


def _softcapped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float,
) -> Tensor:
    """Attend with logits squashed to ±softcap, which no kernel of torch's SDPA can do."""
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = query @ key.transpose(-1, -2) * scaling
    logits = torch.tanh(logits / softcap) * softcap
    if mask is not None:
        logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    precise = torch.promote_types(logits.dtype, torch.float32)
    shares = logits.softmax(-1, dtype=precise).to(query.dtype)
    if dropout > 0:  # the layer passes 0 outside training
        shares = functional.dropout(shares, dropout)
    return (shares @ value).transpose(1, 2).contiguous()


NAME = "trainfit"
"""The name under which transformers knows this attention."""
ARGUMENT = "trainfit_attention"
"""The keyword argument of a model's forward that carries the `Attention` to its layers."""

Path = Literal["auto", "varlen", "varlen_efficient", "masked"]
"""How attention is computed; auto: the fastest way that there is for the batch. varlen: any kernel
for packed rows, varlen_efficient: torch's memory-efficient one."""

_UNKNOWN_TERMS = ("position_bias", "s_aux", "head_mask")
"""Terms that some models add to the logits; a model that needs one is refused."""


Attention: TypeAlias = MaskedAttention | VarlenAttention
"""Attends within the sequences of one batch: `[B, heads, T, d]` to `[B, T, heads, d]`."""


def choose(
    layout: Layout,
    window: int | None,
    *,
    path: Path = "auto",
    dtype: torch.dtype,
    head: int,
    softcap: float | None = None,
    dropout: float = 0.0,
    causal: bool = False,
) -> Attention:
    """Choose the fastest attention for a batch that `path` allows.

    In layers with a sliding window a token sees those at a distance below `window`, both ways or,
    if `causal`, before it.
    `dtype` is that of the model's weights; autocast, where it is on, has the last word.
    """
    if path == "masked":
        return masked_attention(layout, window, causal=causal)
    dtype = computed_in(layout.ids.device.type, dtype)
    asked: Any = {"dtype": dtype, "head": head, "softcap": softcap, "dropout": dropout}
    kernel, reason = packed_kernel(layout, window, path=path, causal=causal, **asked)
    if kernel is not None:
        return varlen.varlen_attention(layout, window, dtype, causal=causal, kernel=kernel)
    if path != "auto":
        fix = "set attention to auto or masked"
        raise BadInput(f"no variable-length attention here: {reason}", fix)
    return masked_attention(layout, window, causal=causal)


def packed_kernel(
    layout: Layout,
    window: int | None,
    *,
    dtype: torch.dtype,
    head: int,
    softcap: float | None,
    dropout: float,
    causal: bool,
    path: Path = "auto",
) -> tuple[PackedKernel | None, str]:
    """Choose the kernel that takes these rows; else None and the reason why none can."""
    device = layout.ids.device
    reason = _no_kernel(layout, softcap, demanded=path != "auto")
    if reason is not None:
        return None, reason
    return varlen.kernel_for(
        PackedRows(
            capability=varlen.capability(device.index) if device.type == "cuda" else None,
            dtype=dtype,
            head=head,
            softcap=softcap,
            dropout=dropout,
            causal=causal,
            window=window,
            longest=layout.max_seqlen,
            flash=path != "varlen_efficient" and (device.type != "cuda" or varlen.flash_exists()),
        )
    )


def computed_in(device: str, weights: torch.dtype) -> torch.dtype:
    """Return the dtype of matrix products: autocast's where it is on, else the weights'."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weights


def _no_kernel(layout: Layout, softcap: float | None, *, demanded: bool) -> str | None:
    """Reason why no kernel can take these rows by their lengths, whatever the model."""
    device = layout.ids.device
    if layout.cu_seqlens is None:
        return "the rows are padded, not packed"
    if device.type == "cuda":
        return missing(softcap)
    if not (demanded and varlen.stands_in(device.type)):
        return f"the rows are on the device {device.type}"
    return None


def missing(softcap: float | None) -> str | None:
    """Name the missing library that a GPU kernel needs; None: all are here."""
    if softcap is not None:
        return None if varlen.triton_exists() else "Triton is not installed"
    return None if varlen.for_nvidia() else "this torch is not for NVIDIA's GPUs"


def register() -> str:
    """Make the attention known to transformers, once or again, and return its name.

    No mask function goes with it: transformers then builds no mask of its own.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    return NAME


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    trainfit_attention: Attention | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attend for a transformers layer, by the batch's `Attention`."""
    terms = [name for name in _UNKNOWN_TERMS if rest.get(name) is not None]
    if trainfit_attention is None or attention_mask is not None or terms:
        raise BadInput(
            f"{type(module).__name__} does not hand attention on as it must"
            + (f" (it adds {', '.join(terms)})" if terms else ""),
            "choose another model: BERT, ModernBERT, Gemma, Llama and Qwen families work",
        )
    attended = trainfit_attention(
        module,
        query,
        key,
        value,
        scaling=scaling,
        dropout=dropout,
        # Families count the window differently, so the number given to `choose` is used.
        windowed=sliding_window is not None,
        softcap=softcap,
    )
    return attended, None
