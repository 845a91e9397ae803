"""Attention of a padded batch whose padding was dropped, on a packed row.

The variable-length kernels take the row where they can. Elsewhere attention alone is computed on
padded rows; everything around it has no padding either way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from trainfit.kernels import varlen
from trainfit.kernels.attention import (
    ARGUMENT,
    Attention,
    Layout,
    attend,
    computed_in,
    lay_out,
    masked_attention,
    packed_kernel,
)

_FULL = 0.9
"""Share of real tokens above which attention's copies cost more than padding."""
_WORTH = 0.1
"""Share of attention's work that one more group of rows must save; each costs some calls."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UnpaddedRows:
    """The real tokens of a padded batch `[rows, width]`, end to end in one row."""

    rows: int
    width: int
    mask: Tensor | None = None
    """`[rows, width]`, True for real tokens; None where nothing is padded."""
    places: Tensor | None = None
    """`[tokens]`: place of each token in the flat batch; None where nothing is padded."""
    starts: Tensor
    """`[rows + 1]`: start of each sequence in the row, and its end."""
    tokens: int
    longest: int
    sides: frozenset[str] = frozenset()
    """Sides of the batch that have padding: left, right."""
    filler: bool = False
    """True where filler may follow the last sequence, up to `tokens`."""

    def pack(self, values: Tensor) -> Tensor:
        """Drop the padding: `[rows, width, …]` to `[1, tokens, …]`."""
        flat = values.flatten(0, 1)
        return (flat if self.places is None else flat.index_select(0, self.places))[None]

    def restore(self, values: Tensor) -> Tensor:
        """Put the padding back as zeros: `[1, tokens, …]` to `[rows, width, …]`."""
        flat = values[0]
        if self.places is not None:
            empty = flat.new_zeros(self.rows * self.width, *flat.shape[1:])
            flat = empty.index_copy(0, self.places, flat)
        return flat.view(self.rows, self.width, *flat.shape[1:])

    def packed_layout(self) -> Layout:
        row = self.starts.new_empty(1, self.tokens)
        return lay_out(row, cu_seqlens=self.starts, max_seqlen=self.longest)

    def tight(self) -> UnpaddedRows:
        """The same tokens in rows that begin with them and are as wide as the longest.

        Filler has rows of its own, some of which may be empty; their first column counts as real,
        since a softmax over nothing is NaN.
        """
        starts = varlen.starts_of(self.packed_layout()) if self.filler else self.starts
        rows, lengths = len(starts) - 1, starts.diff()
        full = self.tokens == rows * self.longest and not self.filler
        token = torch.arange(self.tokens, device=lengths.device)
        row = torch.bucketize(token, starts, right=True) - 1
        column = torch.arange(self.longest, device=lengths.device)
        return replace(
            self,
            rows=rows,
            width=self.longest,
            mask=None if full else column < lengths[:, None].clamp(min=1),
            places=None if full else row * self.longest + token - starts[row],
            starts=starts,
            filler=False,
        )

    def padded_layout(self) -> Layout:
        batch = self.starts.new_empty(self.rows, self.width)
        return lay_out(batch, attention_mask=self.mask)


AttentionCase = tuple[torch.dtype, int, float | None, float]
"""Facts that decide between kernels: dtype, size of a head, cap of the logits, rate of dropout."""


# Without eq: torch 2.11 hashes it while it traces a graph, before its fields are there.
@dataclass(frozen=True, slots=True, eq=False)
class PaddedRowsAttention:
    """Attention of a packed row where no kernel takes it: on padded rows, with a mask."""

    rows: UnpaddedRows
    masked: Attention

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        """Attend: from `[B, heads, tokens, head]` to `[B, tokens, heads, head]`."""
        parts = (
            self.rows.restore(part.transpose(1, 2)).transpose(1, 2) for part in (query, key, value)
        )
        return self.rows.pack(self.masked(module, *parts, **options))


# Without eq, as above.
@dataclass(frozen=True, slots=True, eq=False)
class GroupedAttention:
    """Attention of a packed row whose sequences come in groups, each padded to its own width."""

    groups: tuple[PaddedRowsAttention, ...]

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        """Attend: from `[B, heads, tokens, head]` to `[B, tokens, heads, head]`."""
        sizes = [group.rows.tokens for group in self.groups]
        parts = zip(*(torch.split(part, sizes, 2) for part in (query, key, value)), strict=True)
        found = [g(module, *part, **options) for g, part in zip(self.groups, parts, strict=True)]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)


def without_padding(
    layout: Layout, window: int | None, *, causal: bool
) -> tuple[UnpaddedRows, GroupedAttention] | None:
    """Return the real tokens of padded rows on a CPU, and their attention.

    None where dropping the padding gains nothing. The number of tokens is read from the mask, which
    would make a GPU wait. Short rows are the last, and attention pads them in groups of their own.
    """
    mask = layout.mask
    if mask is None or mask.device.type != "cpu" or isinstance(mask, FakeTensor):
        return None
    if int(mask.sum()) > _FULL * mask.numel():
        return None
    width = mask.shape[1]
    ends = (mask * torch.arange(1, width + 1)).amax(1).clamp(min=1)
    ends, order = ends.sort(descending=True, stable=True)
    ordered, groups = mask[order], []
    starts = _starts(ends.tolist())
    for at, part in zip(starts, ordered.tensor_split(starts[1:]), strict=True):
        rows = _rows(part[:, : int(ends[at])])
        masked = masked_attention(rows.padded_layout(), window, causal=causal)
        groups.append(PaddedRowsAttention(rows, masked))
    row, column = ordered.nonzero(as_tuple=True)
    whole = replace(_rows(ordered), places=order[row] * width + column)
    return whole, GroupedAttention(tuple(groups))


def _starts(ends: list[int]) -> list[int]:
    """First rows of the groups; `ends` of rows fall, and a group is as wide as its first row."""
    starts = [0]
    while True:
        rest = ends[starts[-1] :]
        costs = [at * rest[0] ** 2 + (len(rest) - at) * rest[at] ** 2 for at in range(len(rest))]
        best = min(range(len(rest)), key=lambda at: costs[at])
        if costs[0] - costs[best] < _WORTH * len(ends) * ends[0] ** 2:
            return starts
        starts.append(starts[-1] + best)


def _rows(mask: Tensor) -> UnpaddedRows:
    """Describe the real tokens of rows with this mask."""
    places = mask.flatten().nonzero()[:, 0]
    full = len(places) == mask.numel()
    return UnpaddedRows(
        rows=mask.shape[0],
        width=mask.shape[1],
        mask=None if full else mask,
        places=None if full else places,
        starts=functional.pad(mask.sum(1).cumsum(0), (1, 0)),
        tokens=len(places),
        longest=mask.shape[1],
    )


@dataclass(frozen=True, slots=True, eq=False)
class UnpaddedAttention:
    """Attention inside each sequence of a packed row, by a kernel or on padded rows.

    The first layer decides, since autocast may begin inside of the model.
    """

    batch: UnpaddedRows
    layout: Layout
    window: int | None
    causal: bool
    found: dict[AttentionCase, Attention | PaddedRowsAttention] = field(default_factory=dict)
    """Attention of each case that a layer came with."""

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        dropout: float,
        softcap: float | None,
        **options: Any,
    ) -> Tensor:
        """Attend: from `[B, heads, tokens, head]` to `[B, tokens, heads, head]`."""
        # Rotary embeddings may have made queries and keys float32, but never the values.
        dtype = computed_in(query.device.type, value.dtype)
        attended = self._of((dtype, query.shape[-1], softcap, dropout))
        return attended(module, query, key, value, dropout=dropout, softcap=softcap, **options)

    def settled(
        self, cases: Collection[AttentionCase]
    ) -> UnpaddedAttention | Attention | PaddedRowsAttention:
        """Decide now, for layers that will come with one of these cases.

        Compiled layers must find nothing to decide: torch would compile them before and after it.
        """
        found = [self._of(case) for case in cases]
        return found[0] if len(found) == 1 else self

    def _of(self, case: AttentionCase) -> Attention | PaddedRowsAttention:
        if case not in self.found:
            self.found[case] = self._kernel(*case) or self._on_rows()
        return self.found[case]

    def _on_rows(self) -> PaddedRowsAttention:
        for one in self.found.values():
            if isinstance(one, PaddedRowsAttention):
                return one
        rows = self.batch.tight()
        masked = masked_attention(rows.padded_layout(), self.window, causal=self.causal)
        return PaddedRowsAttention(rows, masked)

    def _kernel(
        self, dtype: torch.dtype, head: int, softcap: float | None, dropout: float
    ) -> Attention | None:
        asked: Any = {"dtype": dtype, "head": head, "softcap": softcap, "dropout": dropout}
        kernel, _ = packed_kernel(self.layout, self.window, causal=self.causal, **asked)
        if kernel is None:
            return None
        return varlen.varlen_attention(
            self.layout, self.window, dtype, causal=self.causal, kernel=kernel
        )


def unpadded_attention(
    batch: UnpaddedRows, window: int | None, *, causal: bool
) -> UnpaddedAttention:
    """Build the attention of a batch, once for all layers."""
    return UnpaddedAttention(batch, batch.packed_layout(), window, causal)


_PREFIX = "trainfit_"
_EAGER = "eager_attention_forward"
IMPLEMENTATIONS = ("sdpa", "eager")
"""Attention implementations of transformers that packed rows can stand beside."""


def register_beside(own: str) -> str:
    """Make an attention known to transformers that takes packed rows and else is its `own`.

    The name stays set between forward passes: a block that is computed again in the backward pass
    asks for it then.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    def attend_by_either(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if options.get(ARGUMENT) is None:
            found: tuple[Tensor, Tensor | None] = own_attention(own, module)(
                module, query, key, value, attention_mask, **options
            )
            return found
        if own == "sdpa" and "softcap" in options:  # transformers' SDPA caps no logits either
            options["softcap"] = None
        return attend(module, query, key, value, None, **options)

    name = _PREFIX + own
    AttentionInterface.register(name, attend_by_either)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[own])
    return name


def takes_packed(name: str | None) -> bool:
    """Tell if an attention implementation is one of `register_beside`."""
    return bool(name) and str(name).startswith(_PREFIX)


def own_implementation(name: str | None) -> str | None:
    """Return transformers' name of the implementation that `register_beside` stands beside."""
    return name.removeprefix(_PREFIX) if name else name


def own_attention(own: str, module: nn.Module) -> Callable[..., Any]:
    """Return the attention of transformers that an implementation names for a module."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if own != "eager":
        function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[own]
        return function
    found: Callable[..., Any] = getattr(sys.modules[type(module).__module__], _EAGER)
    return found
