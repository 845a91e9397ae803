"""Work of a profiled step by its kind: products, attention, update, copies, and the rest."""

from __future__ import annotations

import re

from trainfit.measuring.trace import Operator, Trace

PRODUCTS, HALF_PRODUCTS, ATTENTION = "products", "half_products", "attention"
UPDATE, LOADING, OTHER = "update", "loading", "other"

_ATTENTION = re.compile(r"attention|attn|softmax|aten::bmm$|aten::baddbmm$")
"""Attention without a kernel of its own is batched products around a softmax."""
_PRODUCT = re.compile(r"mm$|_addmm_activation|convolution|linear_pointwise|triton_tem")
_HALF = {"c10::BFloat16", "c10::Half"}
_LOADING = re.compile(r"enumerate\(DataLoader\)")


def parts_of(trace: Trace) -> tuple[dict[str, float], dict[str, int]]:
    """Seconds of the step's work, and its operators that have some, by their kind.

    On a GPU the time is that of kernels; those of no operator are the rest.
    """
    seconds: dict[str, float] = {}
    launches: dict[str, int] = {}
    for operator in trace.operators:
        if operator.own_seconds > 0:
            kind = _kind(operator)
            seconds[kind] = seconds.get(kind, 0.0) + operator.own_seconds
            launches[kind] = launches.get(kind, 0) + 1
    unknown = sum(kernel.seconds for kernel in trace.kernels) - sum(seconds.values())
    if trace.kernels and unknown > 0:
        seconds[OTHER] = seconds.get(OTHER, 0.0) + unknown
    return seconds, launches


def _kind(operator: Operator) -> str:
    if operator.updating:
        return UPDATE
    if _LOADING.match(operator.name):
        return LOADING
    if _ATTENTION.search(operator.name):
        return ATTENTION
    if _PRODUCT.search(operator.name):
        return HALF_PRODUCTS if _HALF & set(operator.dtypes) else PRODUCTS
    return OTHER
