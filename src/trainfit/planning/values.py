"""Values beside fake tensors.

Fake tensors have no values, yet model code asks for some ("is anything padded?"). So the values of
small integer and bool tensors, and of single numbers made from them, are computed for real beside
the fakes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map

aten = torch.ops.aten
_MAX_VALUES = 1 << 22
"""The largest tensor whose values are worth computing beside its fake."""
_VALUES, _STALE = "_trainfit_values", "_trainfit_stale"


def compute(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Compute the operation for real where it is about small integers whose values are known."""
    if args and isinstance(args[0], FakeTensor) and known(args[0]) is None:
        return False, None  # most operations, told at a glance
    tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
    if not _about_integers(func, tensors, kwargs) or any(known(t) is None for t in tensors):
        return False, None
    real_args, real_kwargs = tree_map(known, (args, kwargs))
    with _disable_current_modes():
        return True, func(*real_args, **real_kwargs)


def _about_integers(func: Any, tensors: list[torch.Tensor], kwargs: Any) -> bool:
    """Whether to compute it: tensors stay integers, and what is made from nothing is one."""
    dtype = kwargs.get("dtype")
    if tensors:
        return dtype is None or not dtype.is_floating_point
    counts = func._overloadpacket is aten.arange and dtype is None
    return counts or dtype in (torch.long, torch.int32, torch.bool)


def known(item: Any) -> Any:
    """The values beside a fake tensor, or None; whatever else, a literal too, is its own value."""
    if not isinstance(item, FakeTensor):
        return item
    values = getattr(item, _VALUES, None)
    if values is None:
        return item.constant  # torch keeps those of single numbers itself
    return None if getattr(values.untyped_storage(), _STALE, False) else values


def attach(out: Any, values: Any) -> None:
    """Leave the values on the fakes they belong to."""
    fakes = [t for t in tree_iter(out) if isinstance(t, torch.Tensor)]
    reals: list[Any] = [t for t in tree_iter(values) if isinstance(t, torch.Tensor)]
    if len(fakes) != len(reals):
        reals = [None] * len(fakes)
    for fake, real in zip(fakes, reals, strict=True):
        if real is not None and real.numel() <= (1 if real.is_floating_point() else _MAX_VALUES):
            setattr(fake, _VALUES, real)
        elif hasattr(fake, _VALUES):  # written to by something unknown, and so are its aliases
            setattr(getattr(fake, _VALUES).untyped_storage(), _STALE, True)
