"""The switches that are torch's own: one small function each.

Every one sets its value, leaves in `restore` what puts the old one back, and returns what torch
says afterwards, which is not always what was asked.
"""

from __future__ import annotations

import importlib.util
import os
import random
from contextlib import ExitStack
from typing import Any

from trainfit.errors import BadInput
from trainfit.records import Change
from trainfit.runtime.environment import cuda_started, has_segments, set_variable

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_REPRODUCIBLE = (":4096:8", ":16:8")  # the values that torch accepts as deterministic
_KERNELS = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}
_MAX_SEED = 2**32 - 1  # numpy takes no larger one


def _assign(owner: Any, name: str, value: object, restore: ExitStack) -> None:
    """Set an attribute, and leave in `restore` what puts the old value back."""
    restore.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def num_threads(count: int, restore: ExitStack) -> Change:
    """Threads of an operation on the CPU."""
    import torch

    if count < 1:
        raise BadInput(f"num_threads is {count}", "give 1 or more, or leave it out")
    before = torch.get_num_threads()
    restore.callback(torch.set_num_threads, before)
    torch.set_num_threads(count)
    return Change(name="num_threads", requested=count, before=before, after=torch.get_num_threads())


def cudnn_benchmark(on: bool, restore: ExitStack) -> Change:
    """Let cuDNN time its kernels and keep the fastest for each shape."""
    import torch

    cudnn = torch.backends.cudnn
    before, note = cudnn.benchmark, ""
    if on and torch.are_deterministic_algorithms_enabled():
        note = "left as it was: the fastest kernel differs from run to run, and deterministic is on"
    else:
        _assign(cudnn, "benchmark", on, restore)
    return Change(
        name="cudnn_benchmark", requested=on, before=before, after=cudnn.benchmark, note=note
    )


def deterministic(on: bool, restore: ExitStack) -> Change:
    """Use only operations that give the same bits each time; those that cannot will raise."""
    import torch

    cudnn = torch.backends.cudnn
    before = _is_deterministic()
    restore.callback(
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(on)
    _assign(cudnn, "deterministic", on, restore)
    note = ""
    if on:
        _assign(cudnn, "benchmark", False, restore)
        note = _reproducible_cublas(restore)
    return Change(
        name="deterministic", requested=on, before=before, after=_is_deterministic(), note=note
    )


def _is_deterministic() -> bool:
    import torch

    cudnn = torch.backends.cudnn
    chosen = torch.are_deterministic_algorithms_enabled() and cudnn.deterministic
    return bool(chosen and not cudnn.benchmark)


def _reproducible_cublas(restore: ExitStack) -> str:
    """Give cuBLAS a workspace that makes it reproducible; a note where that comes too late."""
    if os.environ.get(_CUBLAS) in _REPRODUCIBLE:
        return ""
    if cuda_started():
        return (
            "CUDA had already started, so matrix products may still differ from run to run; "
            f"set {_CUBLAS}={_REPRODUCIBLE[0]} before the process starts"
        )
    set_variable(_CUBLAS, _REPRODUCIBLE[0], restore)
    return ""


def attention(kernel: str, restore: ExitStack) -> Change:
    """Try `kernel` first; the others stay enabled behind it, so that nothing loses its fallback."""
    import torch
    import torch.compiler.config
    from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel

    if kernel not in _KERNELS:
        raise BadInput(
            f"attention is {kernel!r}", f"give one of {', '.join(_KERNELS)}, or leave it out"
        )
    before = attention_order()
    # sdpa_kernel restores the order of the enabled kernels only, and puts the others last.
    restore.callback(torch._C._set_sdp_priority_order, torch._C._get_sdp_priority_order())
    wanted = [getattr(SDPBackend, _KERNELS[kernel]), *_cur_sdpa_kernel_backends(with_priority=True)]
    restore.enter_context(sdpa_kernel(wanted, set_priority=True))
    # What torch.compile keeps on disk is found by everything but this preference.
    tag = torch.compiler.config.cache_key_tag
    _assign(torch.compiler.config, "cache_key_tag", f"{tag} attention={kernel}", restore)
    after = attention_order()
    return Change(
        name="attention",
        requested=kernel,
        before=before[0] if before else None,
        after=after[0],
        note=f"then {', '.join(after[1:])}",
    )


def attention_order() -> list[str]:
    """The attention kernels that torch may use, in the order in which it tries them."""
    from torch.nn.attention import _cur_sdpa_kernel_backends

    enabled = _cur_sdpa_kernel_backends(with_priority=True)
    return [kernel.name.lower().removesuffix("_attention") for kernel in enabled]


def seed(value: int, restore: ExitStack) -> Change:
    """Seed Python, numpy where it is installed, and torch on every device."""
    import torch

    if not 0 <= value <= _MAX_SEED:
        raise BadInput(f"seed is {value}", f"give a number from 0 to {_MAX_SEED}")
    before = torch.initial_seed()
    restore.callback(random.setstate, random.getstate())
    random.seed(value)
    if importlib.util.find_spec("numpy") is not None:
        import numpy

        restore.callback(numpy.random.set_state, numpy.random.get_state())
        numpy.random.seed(value)
    restore.callback(torch.set_rng_state, torch.get_rng_state())
    # A CUDA that has not started has no random state yet; torch keeps the seed for its start.
    if cuda_started():
        restore.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
    torch.manual_seed(value)
    return Change(name="seed", requested=value, before=before, after=torch.initial_seed())


def empty_cache(on: bool, _restore: ExitStack) -> Change:
    """Give memory that no tensor uses back to the GPU. It is an act: nothing is left to undo."""
    import torch

    if not cuda_started():
        note = "CUDA has not started: nothing is cached"
        return Change(name="empty_cache", requested=on, before=True, after=True, note=note)
    held, before = _cached()
    torch.cuda.empty_cache()
    left, after = _cached()
    note = f"reserved {held:,} bytes before, {left:,} after"
    return Change(name="empty_cache", requested=on, before=before, after=after, note=note)


def _cached() -> tuple[int, bool | None]:
    """Bytes that the allocator holds, and whether a tensor lives in each of its segments."""
    import torch

    cuda: Any = torch.cuda
    if not has_segments():
        return cuda.memory_reserved(), None
    segments = cuda.memory_snapshot()
    return sum(s["total_size"] for s in segments), all(s["active_size"] for s in segments)
