"""What an operation has to do at the least: floating-point operations, and bytes through memory.

A step is thousands of operations but only dozens of different ones, so they are counted by kind.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.flop_counter import flop_registry

from trainfit.planning.estimator.step_time import Work


def make_fake(model: torch.nn.Module, mode: FakeTensorMode) -> None:
    """Give every tensor of a meta model a fake one on the default device; shared ones stay so.

    Models are not built under the fake mode itself: a truncated normal looks at what it drew, and
    peft moves modules in a way that fake tensors do not take. The meta device does both.
    """
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            with mode:
                empty = torch.empty(tensor.shape, dtype=tensor.dtype)
            if isinstance(tensor, torch.nn.Parameter):
                empty = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
            made[id(tensor)] = tensor, empty  # the original too, so that its id stays its own
        return made[id(tensor)][1]

    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = fake(tensor)  # type: ignore[assignment]


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


aten = torch.ops.aten
_FREE = frozenset(
    {
        aten.empty,
        aten.empty_strided,
        aten.empty_like,
        aten.new_empty,
        aten.detach,
        aten.lift_fresh,
        aten._unsafe_view,
    }
)
"""No kernel runs for these; views are free as well."""
_PRODUCTS = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm})
_PRODUCTS_OF = {
    # A DeBERTa also multiplies both sides by positions, and in the backward pass does it again.
    "disentangled_attention": 4,
    "disentangled_attention_backward": 11,
    # Without atomic additions the scores are computed for queries and again for keys.
    "softcapped_attention_backward": 7,
}
"""Matrix products of a tile of scores, where they are not two, and five in the backward pass."""
_BACKWARD = 5
"""Two for each of the forward pass's, and the scores once more."""
_SLOW = frozenset(
    {
        aten.sum,
        aten.native_layer_norm_backward,
        aten.embedding_dense_backward,
        aten.gather,
        aten.scatter,
        aten.scatter_add,
        aten.index_put,
        aten._foreach_norm,
        aten.linalg_vector_norm,
    }
)
"""Reductions over long strides and scattered reads: well below the bandwidth of a plain copy."""

_UPDATES = ("_foreach_", "_fused_")
"""What an update runs, once per step whatever the number of micro-batches."""


def work_of(func: Any, args: Any, kwargs: Any, out: Any) -> Work | None:
    """The work of one operation, or None where no kernel runs."""
    packet = func._overloadpacket
    if func.is_view or packet in _FREE:
        return None
    inputs = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
    outputs = [t for t in tree_iter(out) if isinstance(t, torch.Tensor)] or _written(func, args)
    if not outputs:
        return None
    flops, skipped, again = _flops(func, args, kwargs, out)
    return Work(
        kind=_kind(func, flops),
        flops=flops,
        skipped=skipped,
        again=again,
        nbytes=sum(map(tensor_bytes, inputs)) + sum(map(tensor_bytes, outputs)),
        half=outputs[0].dtype in (torch.bfloat16, torch.float16),
        aligned=all(size % 8 == 0 for t in inputs for size in t.shape[-2:]),
        backward=torch._C._current_graph_task_id() != -1,
        update=func.__name__.startswith(_UPDATES),
    )


def _kind(func: Any, flops: int) -> Any:
    packet = func._overloadpacket
    if packet in _PRODUCTS:
        return "product"
    if flops:
        return "own_attention" if func.namespace == "trainfit" else "attention"
    return "slow" if packet in _SLOW else "copy"


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, int, int]:
    """Operations by the formula; those a kernel skips since they are masked; those it repeats."""
    packet = func._overloadpacket
    if func.namespace in ("torch_attn", "trainfit"):
        return _packed_flops(func, args, kwargs)
    if packet not in flop_registry:
        return 0, 0, 0
    flops = int(flop_registry[packet](*args, **kwargs, out_val=out))
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    again = flops // _BACKWARD if "attention_backward" in func.__name__ else 0
    return flops, flops // 2 if given.get("is_causal") else 0, again


def _packed_flops(func: Any, args: Any, kwargs: Any) -> tuple[int, int, int]:
    """By the sum of squared lengths; a window shortens what each token sees."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if "query" not in given:
        return 0, 0, 0  # no attention: an activation, a loss
    query, starts = given["query"], known(given.get("starts", given.get("cu_seq_q")))
    heads, head = query.shape[-2:]
    if starts is None:
        return 0, 0, 0
    reach = given["window"] - 1 if "window" in given else (given.get("window_size") or [-1])[0]
    with _disable_current_modes():  # these are values, and no mode is to make fakes of them
        lengths = starts.diff().double()
        seen = lengths if reach < 0 else lengths.clamp(max=2 * reach + 1)
        pairs = (lengths * seen).sum().item()
    name = func.__name__.removesuffix(".default")
    forward = _PRODUCTS_OF.get(name.removesuffix("_backward"), 2)
    if "backward" not in name:
        products, repeated = forward, 0
    else:
        products = _PRODUCTS_OF.get(name, _BACKWARD)
        repeated = products - 2 * forward
    each = 2 * heads * head * pairs
    return int(products * each), 0, int(repeated * each)


def _written(func: Any, args: Any) -> list[torch.Tensor]:
    """The tensors that an operation without a result, such as a fused optimizer, writes to."""
    arguments = zip(func._schema.arguments, args, strict=False)
    changed = [value for argument, value in arguments if argument.alias_info is not None]
    return [t for t in tree_iter(changed) if isinstance(t, torch.Tensor)]


def tensor_bytes(tensor: torch.Tensor) -> int:
    """What has to be read or written of it: an expanded dimension is one row."""
    distinct = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        distinct *= size if stride else 1
    return distinct * tensor.element_size()
