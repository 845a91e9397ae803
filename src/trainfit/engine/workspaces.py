"""What cuBLAS keeps of a GPU's memory, taken before the first step rather than in it."""

from __future__ import annotations

import torch


def take_workspaces() -> None:
    """Multiply once on torch's default device, forward and backward.

    cuBLAS takes a workspace for each thread that calls it, here the program's and autograd's, with
    the thread's first product, and keeps it. In the middle of a step that is a piece of whatever
    large block is free, and the rest of its segment can never be given back: with a GPT's logits
    more than a gigabyte. Taken first, it has a segment of its own.
    """
    one = torch.ones(8, 8, requires_grad=True)
    (one @ one).sum().backward()  # type: ignore[no-untyped-call]
