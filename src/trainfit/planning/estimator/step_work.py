"""Fake tensors with known values, and the least work of an operation: operations and bytes.

Sequences packed by their lengths are here too: torch reads the lengths by their address.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decompositions
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.flop_counter import flop_registry

from trainfit.kernels import quantized
from trainfit.planning.estimator.quick_fakes import VALUES
from trainfit.planning.estimator.step_time import Work


def make_fake(model: torch.nn.Module, mode: FakeTensorMode) -> list[Tensor]:
    """Replace every tensor of a meta model by a fake one; shared ones stay shared.

    Returns those that the model holds beside its parameters and buffers.

    Models are built on the meta device, not under the fake mode: a truncated normal reads what it
    drew, and peft moves modules in a way that fake tensors do not support.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}

    def fake(tensor: Tensor) -> Tensor:
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
    return _fake_beside(model, fake)


def _fake_beside(model: torch.nn.Module, fake: Callable[[Tensor], Any]) -> list[Tensor]:
    """Replace tensors that are plain attributes of a module, or in lists and dicts of them."""
    found: list[Tensor] = []
    for module in model.modules():
        for name, value in vars(module).items():
            plain = isinstance(value, Tensor | list | tuple | dict) and name not in _KEPT
            if plain and any(map(_is_meta, tree_iter(value))):
                faked = tree_map(lambda item: fake(item) if _is_meta(item) else item, value)
                vars(module)[name] = faked
                found += [item for item in tree_iter(faked) if isinstance(item, FakeTensor)]
    return found


_KEPT = ("_parameters", "_buffers", "_modules")
"""Attributes of a module whose tensors and modules are found without them."""


def _is_meta(item: Any) -> bool:
    return isinstance(item, Tensor) and item.is_meta


aten = torch.ops.aten
MAX_VALUES = 1 << 22
"""Largest tensor whose values are computed beside its fake."""
_STALE = "_trainfit_stale"


BY_SHAPE = (aten.zeros_like, aten.ones_like, aten.full_like)
"""Operations that read no values."""


def compute(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Compute an operation on small integers whose values are known; the flag says so."""
    if func._overloadpacket in BY_SHAPE and not args[0].is_floating_point():
        with _disable_current_modes():  # of its first argument the shape alone counts
            args = torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:]
    if func is aten.rand.default and math.prod(args[0]) == 1:
        with _disable_current_modes():  # code drops a layer or an adapter where it is near 0 or 1
            return True, torch.full(args[0], 0.5)
    if args and isinstance(args[0], FakeTensor) and known(args[0]) is None:
        return False, None  # most operations end here
    tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
    if not _about_integers(func, tensors, args, kwargs) or any(known(t) is None for t in tensors):
        return False, None
    real_args, real_kwargs = tree_map(known, (args, kwargs))
    with _disable_current_modes():
        return True, func(*real_args, **real_kwargs)


def _about_integers(func: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> bool:
    """True if the result is integers: of integer inputs, or made as such."""
    dtype = kwargs.get("dtype")
    if tensors:
        return dtype is None or not dtype.is_floating_point
    if dtype is not None:
        return dtype in (torch.long, torch.int32, torch.bool)
    filled = func._overloadpacket is aten.full and isinstance(args[1], int)
    return filled or func._overloadpacket in (aten.arange, aten.randperm)


def known(item: Any) -> Any:
    """Values beside a fake or a meta tensor, or None; anything else is its own value."""
    if not isinstance(item, FakeTensor) and not _is_meta(item):
        return item
    values = getattr(item, VALUES, None)
    if values is None:
        return getattr(item, "constant", None)  # torch keeps those of single numbers itself
    return None if getattr(values.untyped_storage(), _STALE, False) else values


def attach(out: Any, values: Any, floats: int = 1) -> None:
    """Attach values to the tensors they belong to; of numbers, at most `floats`."""
    fakes = [t for t in tree_iter(out) if isinstance(t, Tensor)]
    reals: list[Any] = [t for t in tree_iter(values) if isinstance(t, Tensor)]
    if len(fakes) != len(reals):
        reals = [None] * len(fakes)
    for fake, real in zip(fakes, reals, strict=True):
        most = floats if fake.is_floating_point() else MAX_VALUES
        if real is not None and real.numel() <= most:
            setattr(fake, VALUES, real)
        elif hasattr(fake, VALUES):  # written to by something unknown, and so are its aliases
            setattr(getattr(fake, VALUES).untyped_storage(), _STALE, True)


def _packets(names: str) -> frozenset[Any]:
    return frozenset(getattr(aten, name) for name in names.split())


_FREE = _packets("""
    empty empty_strided empty_like new_empty detach lift_fresh _unsafe_view
""")
"""Operations without a kernel, as views are."""
_PRODUCTS = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm})
_PRODUCTS_OF = {
    # A DeBERTa also multiplies both sides by positions, and in the backward pass does it again.
    "disentangled_attention": 4,
    "disentangled_attention_backward": 11,
    # Without atomic additions the scores are computed for queries and again for keys.
    "softcapped_attention_backward": 7,
}
"""Matrix products per tile of scores, of kernels with other numbers than the usual ones."""
_PACKED = _packets("_flash_attention_forward _flash_attention_backward")
"""Attention on packed rows with dropout."""
_EFFICIENT = "efficient_attention"
"""Operation on packed rows by torch's memory-efficient kernel, as fast as that on padded ones."""
_BACKWARD = 5
"""Products of attention's backward pass: two for each forward product, and the scores again."""
_SLOW = _packets("""
    sum native_layer_norm_backward embedding_dense_backward gather scatter scatter_add
    index_put _foreach_norm linalg_vector_norm
""")
"""Reductions over long strides and scattered reads: well below the bandwidth of a plain copy."""

_UPDATES = ("_foreach_", "_fused_", "adamw_", "host_")
"""Operations of the optimizer's update."""


_FETCH, _STORE = "trainfit::host_fetch_", "trainfit::host_store_"
"""Copies from and to the host; those to it overlap with the others, since a link has two ways."""
_own = torch.ops.trainfit
QUANTIZED = frozenset({_own.quantized_linear, _own.quantized_linear_backward})
"""Products with a weight that is widened before them."""


def in_backward() -> bool:
    """Tell if autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def works_of(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[Work, ...]:
    """Work of the kernels of one operation; empty where none runs."""
    if func._overloadpacket in QUANTIZED:
        return _quantized_works(args[0], args[1:-1], args[-1], out)
    work = _work_of(func, args, kwargs, out)
    return () if work is None else (work,)


def _quantized_works(x: Tensor, packed: Any, shape: list[int], out: Tensor) -> tuple[Work, Work]:
    """Work of widening a weight, and of the product with it."""
    wide = quantized.widened_bytes(shape, out.element_size())
    rows = x.numel() // x.shape[-1]
    read = sum(tensor_bytes(each) for each in packed if each is not None)
    backward = in_backward()
    half = out.dtype in (torch.bfloat16, torch.float16)
    product = Work(
        kind="product",
        flops=2 * rows * shape[0] * shape[1],
        nbytes=tensor_bytes(x) + wide + tensor_bytes(out),
        half=half,
        aligned=all(size % 8 == 0 for size in (rows, *shape)),
        backward=backward,
    )
    return replace(product, kind="copy", flops=0, nbytes=read + wide), product


def _work_of(func: Any, args: Any, kwargs: Any, out: Any) -> Work | None:
    packet = func._overloadpacket
    if func.is_view or packet in _FREE or func.name() == _STORE:
        return None
    inputs = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
    outputs = [t for t in tree_iter(out) if isinstance(t, Tensor)] or _written(func, args)
    if not outputs:
        return None
    flops, skipped, again = _flops(func, args, kwargs, out)
    return Work(
        kind=_kind(func, flops),
        flops=flops,
        skipped=skipped,
        again=again,
        nbytes=tensor_bytes(outputs[0])
        if func.name() == _FETCH
        else sum(map(tensor_bytes, inputs)) + sum(map(tensor_bytes, outputs)),
        half=outputs[0].dtype in (torch.bfloat16, torch.float16),
        aligned=all(size % 8 == 0 for t in inputs for size in t.shape[-2:]),
        backward=in_backward(),
        update=func.__name__.startswith(_UPDATES),
    )


def _kind(func: Any, flops: int) -> Any:
    packet = func._overloadpacket
    if func.name() == _FETCH:
        return "link"
    if packet in _PRODUCTS:
        return "product"
    if flops:
        own = func.namespace == "trainfit" and not func.__name__.startswith(_EFFICIENT)
        return "own_attention" if own else "attention"
    return "slow" if packet in _SLOW else "copy"


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, int, int]:
    """Floating-point operations in all, those skipped as masked, and those repeated."""
    packet = func._overloadpacket
    if func.namespace in ("torch_attn", "trainfit") or packet in _PACKED:
        return _packed_flops(func, args, kwargs)
    if packet not in flop_registry:
        return 0, 0, 0
    flops = int(flop_registry[packet](*args, **kwargs, out_val=out))
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    again = flops // _BACKWARD if "attention_backward" in func.__name__ else 0
    return flops, flops // 2 if given.get("is_causal") else 0, again


def _packed_flops(func: Any, args: Any, kwargs: Any) -> tuple[int, int, int]:
    """Operations of attention on packed rows, by the sum of squared lengths within the window."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if "query" not in given:
        return 0, 0, 0  # no attention: an activation, a loss
    begins = [given[name] for name in ("starts", "cu_seq_q", "cum_seq_q") if name in given]
    query, starts = given["query"], known(begins[0])
    heads, head = query.shape[-2:]
    if starts is None:
        return 0, 0, 0
    reach = given["window"] - 1 if "window" in given else (given.get("window_size") or [-1])[0]
    reach = given.get("window_size_left", reach)
    with _disable_current_modes():  # values, which must not become fakes
        lengths = starts.diff().double()
        seen = lengths if reach < 0 else lengths.clamp(max=2 * reach + 1)
        pairs = (lengths * seen).sum().item()
    if given.get("causal"):
        pairs /= 2
    name = func.__name__.removesuffix(".default")
    forward = _PRODUCTS_OF.get(name.removesuffix("_backward"), 2)
    if "backward" not in name:
        products, repeated = forward, 0
    else:
        products = _PRODUCTS_OF.get(name, _BACKWARD)
        repeated = products - 2 * forward
    each = 2 * heads * head * pairs
    return int(products * each), 0, int(repeated * each)


def _written(func: Any, args: Any) -> list[Tensor]:
    """Tensors that an operation without a result, such as a fused update, writes to."""
    arguments = zip(func._schema.arguments, args, strict=False)
    changed = [value for argument, value in arguments if argument.alias_info is not None]
    return [t for t in tree_iter(changed) if isinstance(t, Tensor)]


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes to read or write a tensor; an expanded dimension is one row."""
    distinct = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        distinct *= size if stride else 1
    return distinct * tensor.element_size()


# ── sequences packed by their lengths ─────────────────────────────────────────────────────────────


def _sizes(batch_sizes: Tensor) -> list[int]:
    """Sequences at each step of packed ones, which `pack_padded_sequence` knew."""
    found = known(batch_sizes)
    if found is None:
        raise RuntimeError("the sizes of a packed sequence are not known")
    with _disable_current_modes():
        sizes: list[int] = found.tolist()
    return sizes


def _unpack(data: Tensor, padded: Tensor, sizes: Sequence[int]) -> None:
    """Copy packed rows to their places in (steps, sequences, ...)."""
    row = step = 0
    for count, alike in groupby(sizes):
        steps = len(list(alike))
        part = data[row : row + steps * count].reshape(steps, count, *data.shape[1:])
        padded[step : step + steps, :count].copy_(part)
        row, step = row + steps * count, step + steps


def _pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding: float, total: int
) -> tuple[Tensor, Tensor]:
    sizes = _sizes(batch_sizes)
    steps = max(total, len(sizes))
    padded = data.new_full((steps, sizes[0], *data.shape[1:]), padding)
    _unpack(data, padded, sizes)
    lengths = torch.empty(sizes[0], dtype=torch.long)
    with _disable_current_modes():
        attach(lengths, (torch.tensor(sizes) > torch.arange(sizes[0])[:, None]).sum(1))
    return padded.transpose(0, 1) if batch_first else padded, lengths


def _pack_backward(
    gradient: Tensor, shape: Sequence[int], batch_sizes: Tensor, batch_first: bool
) -> Tensor:
    shape = (shape[1], shape[0], *shape[2:]) if batch_first else shape
    padded = gradient.new_zeros(shape)
    _unpack(gradient, padded, _sizes(batch_sizes))
    return padded.transpose(0, 1) if batch_first else padded


def _recurrent(steps: Callable[..., Any]) -> Callable[..., Any]:
    """Run packed sequences step by step; torch asks for the address of the sizes."""

    def kernel(data: Tensor, batch_sizes: Tensor, *rest: Any) -> Any:
        return steps(data, _sizes(batch_sizes), *rest)

    return kernel


SEQUENCES: dict[str, Callable[..., Any]] = {
    "_pad_packed_sequence": _pad,
    "_pack_padded_sequence_backward": _pack_backward,
    "lstm.data": _recurrent(decompositions.lstm_data_impl),
    "gru.data": _recurrent(decompositions.gru_impl_data),
    "rnn_tanh.data": _recurrent(decompositions.rnn_tanh_data),
    "rnn_relu.data": _recurrent(decompositions.rnn_relu_data),
}
"""Operations of torch on packed sequences that read the sizes by their address."""
