"""In which dtype matrices were multiplied, by the operators' own inputs."""

from __future__ import annotations

import math
import re

from trainfit.measuring.evidence.seen import ProductsSeen
from trainfit.measuring.evidence.trace import Operator, Trace

_FIRST_FACTOR = {
    "aten::mm": 0,
    "aten::bmm": 0,
    "aten::_scaled_mm": 0,
    "aten::_int_mm": 0,
    "aten::addmm": 1,
    "aten::baddbmm": 1,
    "aten::_addmm_activation": 1,
    "mkldnn::_linear_pointwise": 0,
}
"""The operators that multiply, and which of their inputs is the left factor."""
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
_TF32 = re.compile(r"tf32|s1688", re.IGNORECASE)
_EXACT = re.compile(r"sgemm|simt|f32f32_f32f32", re.IGNORECASE)
_SHOWN = 3


def products_of(trace: Trace) -> ProductsSeen:
    """The share of each dtype in the operations, and the kernels that did them."""
    work: dict[str, float] = {}
    for operator in trace.operators:
        dtype, operations = _product(operator)
        if dtype is not None:
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


def _product(operator: Operator) -> tuple[str | None, float]:
    """The dtype and the multiplications of a product; None for what is none."""
    if operator.name.startswith(_TEMPLATE) and operator.dtypes:
        return short(operator.dtypes[0]), 1.0
    first = _FIRST_FACTOR.get(operator.name)
    if first is None or len(operator.dtypes) < first + 2:
        return None, 0.0
    left, right = operator.shapes[first : first + 2]
    return short(operator.dtypes[first]), math.prod(left) * float(right[-1] if right else 1)


def _is_cast(operator: Operator) -> bool:
    kinds = {_DTYPES.get(dtype) for dtype in operator.dtypes[:2]}
    return operator.name == "aten::copy_" and len(kinds) == 2 and bool(kinds & _HALF)


def work_of(operator: Operator) -> float:
    """Multiplications of a product; 0 for what is none."""
    return _product(operator)[1]


def short(dtype: str) -> str:
    """A dtype as people write it."""
    return _DTYPES.get(dtype, dtype)
