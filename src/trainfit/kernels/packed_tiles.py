"""What the Triton kernels on packed rows have in common: a sequence, and its tiles."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_sequence(starts):
    """Where this program's sequence begins, and its length."""
    index = tl.program_id(1)
    start = tl.load(starts + index)
    return start, tl.load(starts + index + 1) - start


@triton.jit
def row_pointers(tensor, start, rows, head, HEADS: tl.constexpr, HEAD: tl.constexpr):
    """To rows of one head of a sequence in a `[tokens, heads, d]` tensor."""
    first = tensor + (start.to(tl.int64) * HEADS + head) * HEAD
    return first + rows[:, None] * (HEADS * HEAD) + tl.arange(0, HEAD)[None, :]


@triton.jit
def load_rows(tensor, start, rows, count, head, HEADS: tl.constexpr, HEAD: tl.constexpr):
    """Rows of one head of a sequence; zeros beyond its end."""
    pointers = row_pointers(tensor, start, rows, head, HEADS, HEAD)
    return tl.load(pointers, mask=(rows < count)[:, None], other=0.0)
