"""The hardware guide's function API: the same names, keys and printed lines, on top of trainfit.

    from trainfit.hardware_optimizer import detect_gpu_info, optimize_pytorch_settings

A script of one's own can use these without the rest of trainfit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from trainfit.conf import layer
from trainfit.core.errors import BadInput, did_you_mean
from trainfit.core.plan_records import RuntimeSettings
from trainfit.core.records import Applied, HardwareProfile
from trainfit.hardware import detect
from trainfit.measuring import MemoryTracker, benchmark_dataloader
from trainfit.planning import preset_for_memory, workers
from trainfit.runtime import apply, compile_model

__all__ = [
    "MemoryTracker",
    "benchmark_dataloader",
    "compile_model",
    "detect_gpu_info",
    "enable_memory_efficient_mode",
    "get_optimal_num_workers",
    "get_recommended_config",
    "optimize_pytorch_settings",
    "print_hardware_info",
]


def detect_gpu_info() -> dict[str, Any]:
    """The first GPU in plain values; without one, has_gpu is False and the rest is empty."""
    profile = detect()
    gpu = profile.gpu
    return {
        "has_gpu": gpu is not None,
        "gpu_count": len(profile.gpus),
        "gpu_name": gpu.name if gpu else None,
        "gpu_memory_gb": gpu.memory_gib if gpu else 0.0,
        "compute_capability": gpu.compute_capability if gpu else None,
        "supports_bfloat16": gpu is not None and gpu.native_bf16,
        "supports_tf32": gpu is not None and gpu.tf32,
    }


def get_recommended_config(gpu_memory_gb: float | None = None) -> dict[str, Any]:
    """The plan for the machine that is here, or the guide's cautious row for a size of memory.

    The plan is that of `trainfit check`, for the model that `model` names. `mixed_precision` is
    "bf16", "fp16", "auto" or False, so that it also reads as yes or no.
    """
    if gpu_memory_gb is None:
        return _planned()
    if not gpu_memory_gb >= 0:
        raise BadInput(f"gpu_memory_gb is {gpu_memory_gb}", "give the size in GB, 0 for a CPU")
    return _row(preset_for_memory(gpu_memory_gb) if gpu_memory_gb else "cpu")


def _planned() -> dict[str, Any]:
    """The plan for this machine in the guide's keys, and the model that it is for."""
    from trainfit.jobs.tuned_plans import recommend

    found = recommend(detect())
    names = (
        "batch_size",
        "num_workers",
        "gradient_checkpointing",
        "gradient_accumulation_steps",
        "compile",
        "model",
    )
    precision = False if found.precision == "fp32" else found.precision
    return {name: getattr(found, name) for name in names} | {"mixed_precision": precision}


def _row(name: str) -> dict[str, Any]:
    """A preset in the guide's keys."""
    values = layer("nli", "hardware", name)
    precision = values["device.mixed_precision"]
    pinned = values["training.num_workers"]
    return {
        "batch_size": values["training.batch_size"],
        "num_workers": get_optimal_num_workers() if pinned == "auto" else pinned,
        "gradient_checkpointing": values.get("model.use_gradient_checkpointing", False),
        "gradient_accumulation_steps": values.get("optimization.gradient_accumulation_steps", 1),
        "mixed_precision": False if precision == "off" else precision,
        "compile": values.get("optimization.compile", False),
    }


def print_hardware_info() -> None:
    """Print the machine and what to set on it."""
    from trainfit.hardware.catalogue import find
    from trainfit.jobs.tuned_plans import recommend, subject
    from trainfit.reports import terminal

    profile, console = detect(), terminal.console()
    specs = [None if gpu.slug is None else find(gpu.slug) for gpu in profile.gpus]
    console.print(terminal.machine_page(profile, specs, None))
    with terminal.busy(f"planning {subject()} (kept for the next time)"):
        recommended = recommend(profile)
    console.print(terminal.recommended_page(recommended))


def optimize_pytorch_settings(config: Mapping[str, Any] | None = None) -> Applied:
    """Set torch up for training: cuDNN benchmark, TF32, threads, and an empty cache.

    `config` overrides any of tf32, cudnn_benchmark, deterministic, num_threads, attention,
    expandable_segments, empty_cache and seed. What get_recommended_config returns may be in it
    too: that is for the training loop, and is passed over here. Returns what changed;
    runtime.undo takes it back.
    """
    profile = detect()
    wanted: dict[str, Any] = {
        "tf32": any(gpu.tf32 for gpu in profile.gpus),
        "cudnn_benchmark": True,
        "num_threads": profile.cpu.cores,
        "empty_cache": True,
    }
    for_the_loop = {*_row("cpu"), "model"}
    for key, value in (config or {}).items():
        if key in for_the_loop:
            continue
        if key not in RuntimeSettings.__dataclass_fields__:
            names = list(RuntimeSettings.__dataclass_fields__)
            raise BadInput(f"unknown setting {key!r}", did_you_mean(key, names, f"use {names}"))
        wanted[key] = value
    return apply(RuntimeSettings(**wanted))


def enable_memory_efficient_mode() -> Applied:
    """Prefer memory-efficient attention, growable segments and an empty cache.

    Returns what it did. Segments can only be set before CUDA starts: later, the change says so.
    """
    attention: Literal["efficient"] = "efficient"
    return apply(RuntimeSettings(expandable_segments=True, attention=attention, empty_cache=True))


def get_optimal_num_workers() -> int:
    """Loader processes for this machine: usable cores - 2, at most 8, one per 3 GB of GPU."""
    profile: HardwareProfile = detect()
    return workers(profile.cpu.cores, profile.gpus[0].memory_gib if profile.gpus else None)
