"""Evidence of one step from its trace and the process: compiler, batches, products, attention."""

from __future__ import annotations

import math
import multiprocessing
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from trainfit.core.records import Scalar
from trainfit.measuring.trace import (
    AttentionSeen,
    BatchesSeen,
    CompilerSeen,
    Operator,
    ProductsSeen,
    QuantizedSeen,
    SwitchesSeen,
    Trace,
    cuda_in_use,
)

_REGION = re.compile(r"Torch-Compiled Region: (\S+)")
_RESUMED = "torch_dynamo_resume_in_"
_LAUNCH = ("cudaGraphLaunch", "cuGraphLaunch", "hipGraphLaunch")
_SHOWN_FRAMES = 5


def compiler_of(trace: Trace) -> CompilerSeen:
    """Read the compiled regions of the step and the compiler's own counters."""
    ran = [found[1] for op in trace.operators if (found := _REGION.match(op.name))]
    launches = trace.calls(*_LAUNCH)
    dynamo = sys.modules.get("torch._dynamo.utils")  # not imported: nothing was compiled
    if dynamo is None:
        return CompilerSeen(regions=len(ran), graph_launches=launches)
    frames = dynamo.get_compilation_metrics()
    resumed = {str(f.compile_id) for f in frames if (f.co_name or "").startswith(_RESUMED)}
    reasons = dict.fromkeys(
        t.strip().partition("\n")[0][:200] for t in dynamo.counters["graph_break"]
    )
    failures = dict.fromkeys(_failure(frame) for frame in frames if frame.fail_type)
    return CompilerSeen(
        regions=len(ran),
        resumed=sum(name in resumed for name in ran),
        graphs=int(dynamo.counters["stats"]["unique_graphs"]),
        breaks=tuple(reasons)[:_SHOWN_FRAMES],
        recompiles=sum(frame.recompile_reason is not None for frame in frames),
        failures=tuple(failures)[:_SHOWN_FRAMES],
        attempts=int(dynamo.counters["frames"]["total"]),
        graph_launches=launches,
    )


def _failure(frame: Any) -> str:
    kind = str(frame.fail_type).rpartition(".")[2].removesuffix("'>")
    return f"{kind}: {' '.join(str(frame.fail_reason or '').split())}"[:200]


_WORKER = "pt_data_worker"
"""Name of torch's loader processes."""
_FETCH = "enumerate(DataLoader)"


def switches() -> SwitchesSeen:
    """Read torch's own switches."""
    import torch

    backends: Any = torch.backends
    cuda = torch.cuda.is_available()
    return SwitchesSeen(
        tf32=backends.cuda.matmul.fp32_precision == "tf32" if cuda else None,
        flash=backends.cuda.flash_sdp_enabled() if cuda else None,
        cudnn_benchmark=bool(backends.cudnn.benchmark),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        allocator=_allocator() if cuda_in_use() else {},
        threads=torch.get_num_threads(),
    )


def _allocator() -> dict[str, Scalar]:
    import torch

    memory: Any = torch.cuda.memory
    found: dict[str, Scalar] = {"backend": torch.cuda.get_allocator_backend()}
    if found["backend"] == "native":
        settings: Mapping[str, Any] = memory._snapshot()["allocator_settings"]
        found |= {
            str(name): value
            for name, value in settings.items()
            if value is None or isinstance(value, (bool, int, float, str))
        }
    return found


def count_workers() -> int:
    """Count the live loader processes of this process."""
    if sys.platform != "linux":  # elsewhere they have no name, but few others are daemons
        return sum(child.daemon for child in multiprocessing.active_children())
    import psutil

    return sum(_name(child) == _WORKER for child in psutil.Process().children())


def _name(process: Any) -> str:
    import psutil

    try:
        alive = process.status() != psutil.STATUS_ZOMBIE
        return str(process.name()) if alive else ""
    except psutil.Error:
        return ""


def batches(given: Iterable[Any], trace: Trace, seconds: float) -> BatchesSeen:
    """Describe the loader's batches, as they were before they went to the device."""
    looked = [look_at(batch) for batch in given]
    known = [seen for seen in looked if seen.capacity is not None]
    packed = [seen.packed for seen in looked if seen.packed is not None]
    fetched = [op.seconds for op in trace.operators if op.name.startswith(_FETCH)]
    copied = {"Pinned": 0, "Pageable": 0}
    for kernel in trace.kernels:
        for kind in copied:
            if kernel.name.startswith(f"Memcpy HtoD ({kind}"):
                copied[kind] += kernel.copied
    return BatchesSeen(
        tensors=sum(seen.tensors for seen in looked),
        pinned=sum(seen.pinned for seen in looked),
        on_gpu=sum(seen.on_gpu for seen in looked),
        tokens=sum(seen.tokens or 0 for seen in known) if known else None,
        capacity=sum(seen.capacity or 0 for seen in known) if known else None,
        packed=any(packed) if packed else None,
        sequences=sum(seen.sequences or 0 for seen in looked) or None,
        micro_batches=len(looked) or None,
        workers=count_workers(),
        waited_share=min(1.0, sum(fetched) / seconds) if fetched and seconds > 0 else None,
        pinned_bytes=copied["Pinned"],
        pageable_bytes=copied["Pageable"],
    )


def look_at(batch: Any) -> BatchesSeen:
    """Describe one batch; its tokens are counted by a mask or by the ends of its sequences."""
    import torch

    named = dict(batch) if isinstance(batch, Mapping) else {}
    leaves = list(_leaves(batch))
    tensors = [t for t in leaves if t.device.type == "cpu"]
    mask, ends, ids = (named.get(key) for key in ("attention_mask", "cu_seqlens", "input_ids"))
    tokens = capacity = packed = None
    rows = next((t.shape[0] for t in leaves if t.dim()), None)
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        tokens, capacity, packed = int(mask.count_nonzero()), mask.numel(), False
    elif isinstance(ends, torch.Tensor) and isinstance(ids, torch.Tensor):
        tokens, capacity, packed = int(ends.max()), ids.numel(), True
    return BatchesSeen(
        tensors=len(tensors),
        pinned=sum(t.is_pinned() for t in tensors) if torch.cuda.is_available() else 0,
        on_gpu=sum(t.is_cuda for t in leaves),
        tokens=tokens,
        capacity=capacity,
        packed=packed,
        sequences=None if packed else rows,
    )


def _leaves(value: Any) -> Iterable[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)


_FIRST_FACTOR = {
    "aten::mm": 0,
    "aten::bmm": 0,
    "aten::_scaled_mm": 0,
    "aten::_int_mm": 0,
    "aten::addmm": 1,
    "aten::baddbmm": 1,
    "aten::_addmm_activation": 1,
    "mkldnn::_linear_pointwise": 0,
    "aten::convolution": 0,
    "aten::convolution_backward": 1,
}
"""The operators that multiply, and which input is the left factor; the right one comes next."""
_TEMPLATE = "triton_tem"  # a product that Inductor wrote itself
_DTYPES = {
    "c10::BFloat16": "bf16",
    "c10::Half": "fp16",
    "float": "fp32",
    "double": "fp64",
    "signed char": "int8",
}
_HALF = {"bf16", "fp16"}
_MULTIPLIES = re.compile(r"gemm|gemv|xmma|nvjet|cutlass|triton_tem|cublas", re.IGNORECASE)
_TF32 = re.compile(r"tf32|^(?!.*(f16|fp16)).*s1688", re.IGNORECASE)
"""Kernels with TF32's instruction, s1688, which half precision has too: on Turing, and on GPUs such
as an RTX 3090, whose kernels name their dtype beside it."""
_EXACT = re.compile(r"sgemm|simt|f32f32_f32f32", re.IGNORECASE)
_SHOWN = 3


def products_of(trace: Trace) -> ProductsSeen:
    """Find the share of each dtype in the operations, and the kernels that did them."""
    work: dict[str, float] = {}
    for operator in trace.operators:
        dtype, operations = _product(operator)
        if dtype is not None and not operator.updating:  # Muon multiplies too
            work[dtype] = work.get(dtype, 0.0) + operations
    total = sum(work.values())
    kernels = [kernel for kernel in trace.kernels if _MULTIPLIES.search(kernel.name)]
    return ProductsSeen(
        shares={dtype: operations / total for dtype, operations in work.items()},
        casts=sum(_is_cast(operator) for operator in trace.operators),
        kernels=tuple(kernel.name for kernel in kernels[:_SHOWN]),
        tf32_kernels=sum(k.launches for k in kernels if _TF32.search(k.name)),
        exact_kernels=sum(
            k.launches for k in kernels if _EXACT.search(k.name) and not _TF32.search(k.name)
        ),
    )


_CODES = {"unsigned char": "nf4", "signed char": "int8"}
_QUANTIZED = ("trainfit::quantized_linear", "trainfit::quantized_linear_backward")


def quantized_of(trace: Trace) -> QuantizedSeen:
    """Count the products with codes by the dtype of the codes, and the bytes of these."""
    calls = [op for op in trace.operators if op.name in _QUANTIZED and len(op.dtypes) > 1]
    return QuantizedSeen(
        products=dict(Counter(_CODES.get(op.dtypes[1], op.dtypes[1]) for op in calls)),
        nbytes=sum(math.prod(op.shapes[1]) for op in calls),
    )


def _product(operator: Operator) -> tuple[str | None, float]:
    """Dtype and multiplications of a product; None for another operator."""
    if operator.name.startswith(_TEMPLATE) and operator.dtypes:
        return short(operator.dtypes[0]), 1.0
    first = _FIRST_FACTOR.get(operator.name)
    if first is None or len(operator.dtypes) < first + 2:
        return None, 0.0
    left, right = operator.shapes[first : first + 2]
    dtype = short(operator.dtypes[first])
    if "convolution" in operator.name:  # as with a stride of one, in the backward pass twice
        pixels = math.prod(left[:1] + left[2:])
        return dtype, float(pixels * math.prod(right) * (1 + first))
    return dtype, math.prod(left) * float(right[-1] if right else 1)


def _is_cast(operator: Operator) -> bool:
    kinds = {_DTYPES.get(dtype) for dtype in operator.dtypes[:2]}
    return operator.name == "aten::copy_" and len(kinds) == 2 and bool(kinds & _HALF)


def work_of(operator: Operator) -> float:
    """Multiplications of a product; 0 for another operator."""
    return _product(operator)[1]


def short(dtype: str) -> str:
    """Short name of a C++ dtype."""
    return _DTYPES.get(dtype, dtype)


_KERNELS = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_attention_math": "math",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "cpu",
    "torch_attn::_varlen_attn": "varlen",
    "trainfit::efficient_attention": "varlen_efficient",
    "trainfit::disentangled_attention": "disentangled",
    "trainfit::softcapped_attention": "softcapped",
    "flash_attn::_flash_attn_forward": "flash",
    "flash_attn::_flash_attn_varlen_forward": "varlen",
    "flex_attention": "flex",
}
"""Kernel by operator; compiled graphs call these operators too."""
_FLEX = "triton_tem_fused_flex_attention"
_ASKED = "aten::scaled_dot_product_attention"
_MASK = {
    _ASKED: 3,
    "aten::_scaled_dot_product_efficient_attention": 3,
    "aten::_scaled_dot_product_cudnn_attention": 3,
    "aten::_scaled_dot_product_attention_math": 3,
    "aten::_scaled_dot_product_flash_attention_for_cpu": 5,
}
"""Position of the mask among the inputs."""
_FLASH = "aten::_flash_attention_forward"
"""Flash kernel below other operators; by itself it is called on packed rows with dropout."""
_DROPOUT = {
    "aten::_scaled_dot_product_flash_attention": 3,
    "aten::_scaled_dot_product_efficient_attention": 5,
    "aten::_scaled_dot_product_cudnn_attention": 5,
    "aten::_scaled_dot_product_attention_math": 4,
    "aten::_scaled_dot_product_flash_attention_for_cpu": 3,
    "trainfit::disentangled_attention": 8,
    "trainfit::softcapped_attention": 9,
    _FLASH: 7,
}
"""Position of the dropout among the inputs; torch's kernels for packed rows have none."""
_SOFTMAX = ("aten::_softmax", "aten::_safe_softmax")


def attention_of(trace: Trace) -> AttentionSeen:
    """Count the forward calls by kernel, and describe their inputs."""
    asked = [op for op in trace.operators if _kernel(op) or op.name == _ASKED]
    shown = next((op for op in asked if op.shapes and op.shapes[0]), None)
    return AttentionSeen(
        calls=dict(Counter(kernel for op in asked if (kernel := _kernel(op)))),
        masked=any(_has_mask(op) for op in asked),
        dtype=short(shown.dtypes[0]) if shown else None,
        head=shown.shapes[0][-1] if shown else None,
        softmaxes=trace.calls(*_SOFTMAX),
        gathers=trace.calls("aten::gather"),
        dropout=max((_dropout(op) for op in asked if _kernel(op)), default=None),
    )


def _dropout(operator: Operator) -> float:
    place = _DROPOUT.get(operator.name, sys.maxsize)
    value = operator.values[place] if place < len(operator.values) else None
    return round(float(value), 6) if value is not None else 0.0


def is_forward_attention(name: str) -> bool:
    """True if the operator computes attention, not its gradient."""
    return name in _KERNELS or name == _FLASH


def _kernel(operator: Operator) -> str | None:
    if operator.name.startswith(_FLEX) and "backward" not in operator.name:
        return "flex"
    if operator.name == _FLASH:  # within SDPA, rows have a dimension more
        packed = [len(shape) for shape in operator.shapes[:1]] == [3]
        return "varlen" if packed and _dropout(operator) else None
    return _KERNELS.get(operator.name)


def _has_mask(operator: Operator) -> bool:
    place = _MASK.get(operator.name)
    return place is not None and len(operator.dtypes) > place and bool(operator.dtypes[place])
