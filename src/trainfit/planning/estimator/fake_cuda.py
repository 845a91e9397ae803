"""CUDA's decisions for steps that run on fake CPU tensors.

The memory of a step depends on choices that torch makes by device: autocast's lists, the attention
kernel, the form of a dropout mask, foreach. `install` makes the CPU choose as CUDA would. It
changes torch for the whole process and cannot be undone, so only a child process calls it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention.varlen  # makes the operation known
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from trainfit.core.errors import BadInput
from trainfit.kernels.saved_on_host import HostCopy, SavedOnHost
from trainfit.planning.estimator import step_work
from trainfit.planning.estimator.recorder import recorders
from trainfit.planning.estimator.step_time import Work

aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_GETTER = type(Tensor.grad.__get__)  # type: ignore[union-attr]
_MAX_HEAD = 256
"""Largest head size of the flash kernel."""

# Operations that CUDA's autocast computes in fp32 (autocast_mode.h of torch).
_FP32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm
    group_norm cosine_similarity cosine_embedding_loss nll_loss nll_loss_nd nll_loss2d
    kl_div l1_loss smooth_l1_loss huber_loss mse_loss binary_cross_entropy_with_logits
    margin_ranking_loss logsumexp renorm dist
"""
# Operations that it computes in fp32 unless the caller asks for a dtype.
_FP32_BY_DEFAULT = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum sum sum.dim_IntList
    linalg_vector_norm
"""


_library: list[Any] = []
"""Owner of the overrides, which torch drops with it."""


def install() -> None:
    """Replace torch's choices for the CPU by CUDA's in this process."""
    if _library:
        return
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of every kernel that is replaced
        for name in _FP32.split():
            library.impl(name, _in_fp32(_overload(name)), "AutocastCPU")
        for name in _FP32_BY_DEFAULT.split():
            library.impl(name, _fp32_by_default(_overload(name)), "AutocastCPU")
        library.impl("dropout", _dropout, "AutogradCPU")
        library.impl("scaled_dot_product_attention", _attention, "AutogradCPU")
        library.impl("_grouped_mm", _grouped_products, "Meta")
        for name, kernel in step_work.SEQUENCES.items():
            library.impl(name, kernel, "AutogradCPU")
    _library.append(library)
    # Fakes need no kernel, but callers check that the device has one.
    torch.library.register_kernel("torch_attn::_varlen_attn", "cpu", _only_fakes)
    _convert_in_place()
    _take_foreach()
    _autocast_as_cuda()
    _number_devices()
    torch._C._set_mkldnn_enabled(False)  # its LSTM keeps what it needs in memory of its own
    setattr(FakeTensor, "__deepcopy__", _copied)  # noqa: B010
    # Checks of a distribution's parameters look at values, and allocate a byte per element.
    torch.distributions.Distribution.set_default_validate_args(False)
    setattr(torch.cuda, "_lazy_init", _no_gpu)  # noqa: B010


def _no_gpu() -> None:
    fix = "leave such calls out of the step; .to('cuda') and device='cuda' are understood"
    raise BadInput("the step calls torch.cuda, and there is no GPU in an estimate", fix)


def _as_array(read: Callable[..., Any]) -> Callable[..., Any]:
    """Give NumPy the values; zeros, which are counted, where they are not known."""

    def answer(tensor: Tensor, *args: Any, **options: Any) -> Any:
        values = step_work.known(tensor)
        for mode in recorders() if values is None else ():
            mode.unknown["numpy()"] += 1
        with _disable_current_modes():
            values = torch.zeros(tensor.shape, dtype=tensor.dtype) if values is None else values
            return read(values, *args, **options)

    return answer


def _formatted(tensor: Tensor, spec: str) -> str:
    return format(tensor if tensor.dim() else tensor.item(), spec)


def _is_finite(test: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Answer a test of the values as if all were finite: a step that diverges is of no use."""

    def answer(tensor: Tensor) -> Tensor:
        out = test(tensor)
        if tensor.is_floating_point() and out.numel() <= step_work.MAX_VALUES:
            with _disable_current_modes():
                step_work.attach(out, torch.full(out.shape, test is torch.isfinite))
        return out

    return answer


READS: dict[Any, Callable[..., Any]] = {
    Tensor.numpy: _as_array(Tensor.numpy),
    Tensor.__array__: _as_array(Tensor.__array__),
    Tensor.__format__: _formatted,
    **{
        function: _is_finite(test)
        for test in (torch.isfinite, torch.isnan, torch.isinf)
        for function in (test, getattr(Tensor, test.__name__))
    },
}
"""Functions that read the values of a tensor."""


class OnOneDevice(TorchFunctionMode):
    """Take every mention of a CUDA device as the one that tensors are on here."""

    def __init__(self, device: str) -> None:
        """Put tensors on `device`: meta while a model is built, cpu in its step."""
        super().__init__()
        self._device = torch.device(device)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call it, with the device exchanged."""
        if type(func) is _GETTER:  # most of the calls: a tensor's shape and the like
            return func(*args)
        if func in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        kwargs = dict(kwargs or {})
        if func in READS and type(args[0]) is FakeTensor:
            return READS[func](*args, **kwargs)
        if func is torch.device:  # it takes no device in the place of a name
            return self._device if _is_number(*args) else self._exchanged(func(*args, **kwargs))
        if func is Tensor.to and _is_number(*args[1:2]):
            args = (args[0], self._device, *args[2:])
        if _is_number(kwargs.get("device")):
            kwargs["device"] = self._device
        kwargs = {name: self._exchanged(value) for name, value in kwargs.items()}
        return func(*map(self._exchanged, args), **kwargs)

    def _exchanged(self, value: Any) -> Any:
        named = isinstance(value, str) and value.partition(":")[0] == "cuda"
        cuda = isinstance(value, torch.device) and value.type == "cuda"
        return self._device if named or cuda else value


def _is_number(*device: Any) -> bool:
    """Tell a device that is named by its number alone, as in .to(0)."""
    return len(device) == 1 and type(device[0]) is int


def _number_devices() -> None:
    """Have model.to(0) take the number for a GPU's, where torch finds none."""
    plain = torch._C._nn._parse_to

    def parse(*args: Any, **kwargs: Any) -> Any:
        if _is_number(*args[:1]):
            args = ("cuda", *args[1:])
        if _is_number(kwargs.get("device")):
            kwargs["device"] = "cuda"
        return plain(*args, **kwargs)

    setattr(torch._C._nn, "_parse_to", parse)  # noqa: B010


def _copied(self: FakeTensor, memo: dict[int, Any]) -> Any:
    """Copy a fake for copy.deepcopy, as a real one: torch's own way asks for its address."""
    if id(self) not in memo:
        copied: Any = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied.requires_grad_(self.requires_grad)
        copied.grad = None if self.grad is None else _copied(self.grad, memo)  # type: ignore[arg-type]
    return memo[id(self)]


def _convert_in_place() -> None:
    """Have .half(), .to(dtype) and .to(memory_format=...) write weights' data, as for real ones.

    For fakes torch would exchange the tensors themselves, which fails where they are watched.
    """
    plain = torch.nn.Module._apply

    def apply(self: torch.nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        for child in self.children() if recurse else ():
            child._apply(fn)  # type: ignore[no-untyped-call]
        fakes: list[Any] = [w for w in self._parameters.values() if isinstance(w, FakeTensor)]
        if not fakes:
            return plain(self, fn, recurse=False)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for weight in fakes:
                weight.data = fn(weight)
                weight.grad = None if weight.grad is None else fn(weight.grad)
        for name, buffer in self._buffers.items():
            self._buffers[name] = None if buffer is None else fn(buffer)
        return self

    setattr(torch.nn.Module, "_apply", apply)  # noqa: B010


def _take_foreach() -> None:
    """Have optimizers take foreach where they are not told, as on CUDA.

    Clipping stays as it is: its temporaries are small, and times were calibrated on that count.
    Their `capturable`, which torch has for GPUs alone, is allowed too.
    """
    from torch.optim import optimizer, swa_utils

    for module in (optimizer, swa_utils):
        setattr(module, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])  # noqa: B010
    optimizer._foreach_supported_types.append(FakeTensor)
    allowed = optimizer._get_capturable_supported_devices
    allowed.__code__ = (lambda supports_xla=True: ["cpu"]).__code__  # noqa: ARG005 - same names


def _autocast_as_cuda() -> None:
    """Redirect CUDA's autocast to the CPU's, which takes CUDA's decisions in this process."""
    plain = torch.autocast.__init__

    def initialise(self: Any, device_type: str, dtype: Any = None, **options: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        plain(self, device_type, dtype, **options)

    setattr(torch.autocast, "__init__", initialise)  # noqa: B010


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _without_autocast() -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    return torch._C._ExcludeDispatchKeyGuard(keys)


def _in_fp32(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            args, kwargs = tree_map_only(Tensor, _raised, (args, kwargs))
            return op(*args, **kwargs)

    return kernel


def _raised(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


def _fp32_by_default(op: Any) -> Callable[..., Any]:
    names = [argument.name for argument in op._schema.arguments[1:]]

    def kernel(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        if given.get("dtype") is None and x.dtype in _HALF:
            given["dtype"] = torch.float32
        with _without_autocast():
            return op(x, **given)

    return kernel


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Drop out as on CUDA, with a mask of one byte per element."""
    if not train or p == 0:
        return x
    dropped: Tensor = aten.native_dropout(x, p, True)[0]
    return dropped


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Call the kernel that CUDA would: flash for half precision without a mask, else efficient."""
    head = query.shape[-1]
    scale = head**-0.5 if scale is None else scale
    if attn_mask is None and query.dtype in _HALF and head <= _MAX_HEAD:
        query, key, value = (_padded_head(t) for t in (query, key, value))
        flash = aten._scaled_dot_product_flash_attention
        out: Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :head]
    if attn_mask is not None and attn_mask.requires_grad:
        plain = aten._scaled_dot_product_attention_math
        weighted: Tensor = plain(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
        return weighted
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(groups, dim=-3) for t in (key, value))
    bias = None if attn_mask is None else _bias(attn_mask, query, key)
    efficient = aten._scaled_dot_product_efficient_attention
    needs_grad = any(t.requires_grad for t in (query, key, value))
    attended: Tensor = efficient(
        query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale
    )[0]
    return attended


def _grouped_products(
    a: Tensor, b: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    """Products of groups of rows, as of experts; CUDA takes every dtype, torch's own rule bf16."""
    if a.dtype is torch.bfloat16:
        return torch._meta_registrations.meta_grouped_mm(a, b, offs, bias, out_dtype)
    many = [] if a.dim() + b.dim() == 5 else [a.shape[0] if offs is None else len(offs)]
    return a.new_empty([*many, a.shape[-2], b.shape[-1]], dtype=out_dtype or a.dtype)


def _only_fakes(*_args: Any, **_kwargs: Any) -> Any:
    raise RuntimeError("variable-length attention without a GPU is for fake tensors alone")


def _padded_head(t: Tensor) -> Tensor:
    """Pad heads to a multiple of 8 for the flash kernel."""
    short = -t.shape[-1] % 8
    return torch.nn.functional.pad(t, (0, short)) if short else t


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Convert a mask to the efficient kernel's: additive, in its dtype, rows padded to 16."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(
            mask.logical_not(), -torch.inf
        )
    shape = (*query.shape[:-1], key.shape[-2])
    short = -mask.shape[-1] % 16
    if short:
        mask = torch.nn.functional.pad(mask, (0, short))[..., : mask.shape[-1]]
    return mask.expand(shape)


def hide_tracing() -> None:
    """Keep transformers, if the model is one, from building masks that a real step does without."""
    import_utils = sys.modules.get("transformers.utils.import_utils")
    if import_utils is not None:
        setattr(import_utils, "is_fake_tensor", lambda _tensor: False)  # noqa: B010


class FakeSavedOnHost(SavedOnHost):
    """Saved tensors that wait on the host: the same order of copies as on a GPU, without any."""

    def takes(self, tensor: Tensor) -> bool:
        """True for a fake tensor, which stands for one on a GPU."""
        return isinstance(tensor, FakeTensor)

    def copy_out(self, storage: torch.UntypedStorage, device: torch.device) -> tuple[Any, Any]:  # noqa: ARG002
        """Count the copy; host memory is not that of the GPU."""
        _note(storage.nbytes())
        return None, None

    def copy_back(self, copy: HostCopy) -> tuple[Tensor, Any]:
        """Count the copy, and take memory for it."""
        _note(copy.nbytes)
        return torch.empty(copy.nbytes, dtype=torch.uint8), None

    def wait(self, event: Any) -> None:
        """Do nothing: nothing is on its way."""


def saved_on_host(device: str) -> type[SavedOnHost]:
    """Place of activations that wait on the host; on the CPU, where fakes are, it is a fake too."""
    return FakeSavedOnHost if device == "cpu" else SavedOnHost


def _note(nbytes: int) -> None:
    work = Work(kind="transfer", nbytes=nbytes, half=False, backward=step_work.in_backward())
    for mode in recorders():
        mode.note(work)
