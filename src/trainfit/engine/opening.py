"""The first lines of a run: what is really set, read back from torch and from the parts built."""

from __future__ import annotations

from typing import Any

import torch

from trainfit.engine.recovery import Parts
from trainfit.packing import PackedCut
from trainfit.runtime.switches import attention_order

_KERNELS = {"flash": "Flash", "efficient": "memory-efficient", "math": "math"}
_FLASH_FROM = (8, 0)
"""Compute capability from which on torch has a flash kernel, for half precision alone."""


def opening_lines(parts: Parts, attention: str | None = None) -> list[str]:
    """Device, TF32, precision, attention, optimizer and loader, as they are now.

    `attention` is the line of a task that knows more about it than torch's switches tell.
    """
    return [
        _device(parts),
        _tf32(parts),
        f"Precision: {parts.settings.precision}"
        + ("" if parts.scale is None else " with loss scaling"),
        attention or _attention(parts),
        _optimizer(parts),
        _loader(parts),
        _batches(parts),
        *([_ranks(parts)] if parts.world.size > 1 else []),
    ]


def _device(parts: Parts) -> str:
    ranks = f", {parts.world.size} ranks" if parts.world.size > 1 else ""
    if parts.device.type != "cuda":
        return f"Device: {parts.device.type} ({torch.get_num_threads()} threads){ranks}"
    return f"Device: cuda ({torch.cuda.get_device_name(parts.device)}){ranks}"


def _tf32(parts: Parts) -> str:
    backends: Any = torch.backends
    matmul = backends.cuda.matmul.fp32_precision == "tf32"
    cudnn = backends.cudnn.conv.fp32_precision == "tf32"
    if parts.device.type != "cuda":
        return "TF32 does not apply: there is no GPU"
    capability = torch.cuda.get_device_capability(parts.device)
    where = {(True, True): "matmul and cuDNN", (True, False): "matmul", (False, True): "cuDNN"}
    if (matmul, cudnn) not in where:
        return f"TF32 off (GPU compute capability {capability})"
    return (
        f"TF32 enabled for {where[matmul, cudnn]} operations (GPU compute capability {capability})"
    )


def _attention(parts: Parts) -> str:
    if parts.device.type != "cuda":
        return "SDPA attention on padded rows of like length"
    capability = torch.cuda.get_device_capability(parts.device)
    flash = capability >= _FLASH_FROM and parts.settings.precision != "fp32"
    usable = [kind for kind in attention_order() if kind in _KERNELS and (flash or kind != "flash")]
    first, *others = [_KERNELS[kind] for kind in usable] or ["no"]
    rest = f" (fallbacks: {', '.join(others)})" if others else ""
    return f"SDPA {first} Attention backend enabled{rest}"


def _optimizer(parts: Parts) -> str:
    groups = parts.optimizer.param_groups
    kind = "fused " if all(group["fused"] for group in groups) else ""
    settings = parts.settings.optimizer
    trained = sum(p.numel() for group in groups for p in group["params"])
    whole = sum(p.numel() for p in parts.model.parameters())
    return (
        f"Using {kind}{type(parts.optimizer).__name__} optimizer"
        f" (lr={settings.learning_rate:g}, wd={groups[0]['weight_decay']:g})"
        f" on {trained:,} of {whole:,} weights"
    )


def _loader(parts: Parts) -> str:
    loader = parts.loader.workers()
    return (
        f"DataLoader settings: num_workers={loader.num_workers}, pin_memory={loader.pin_memory},"
        f" prefetch_factor={loader.prefetch_factor}"
    )


def _ranks(parts: Parts) -> str:
    ranks = parts.world.size
    batch = len(parts.task.steps(0)[0])
    share = (
        f"{batch // ranks}" if batch % ranks == 0 else f"{batch // ranks} or {batch // ranks + 1}"
    )
    model = (
        "each holds a share of the model (FSDP2)"
        if parts.sharded
        else "each holds the model, and gradients are summed once a step"
    )
    return (
        f"{ranks} ranks: steps of {batch} sequences, {share} on each; {model};"
        " samples/s and tokens/s are of all, MFU is per GPU"
    )


def _batches(parts: Parts) -> str:
    cut = parts.settings.cuts[0]
    kind = "packed" if isinstance(cut, PackedCut) else "padded"
    compiled = any(module._compiled_call_impl is not None for module in parts.model.modules())
    return (
        f"Steps of {cut.micro_batches} {kind} micro-batches of up to {cut.tokens:,} tokens,"
        f" {'compiled' if compiled else 'not compiled'}"
    )
