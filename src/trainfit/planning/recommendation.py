"""Starting values for a machine before any model is known: the documents' rows, with reasons."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from trainfit.catalogue import GpuSpec, find
from trainfit.conf import preset
from trainfit.records import Cpu, Gpu, HardwareProfile, Precision, Reason, Recommendation

# Presets by the least memory (GiB, as a program sees it) that they were written for. A 16 GB card
# shows 14.5 to 16, a 24 GB one 22 to 24 or 25.8 in decimal GB, and neither may fall into another
# row; where a size has several rows the cautious one stands here.
_BY_MEMORY = (
    (139.0, "h200"),
    (79.0, "h100"),
    (44.0, "a40"),
    (39.0, "a100"),
    (30.0, "rtx_5090"),
    (21.5, "gpu_3090"),
    (14.0, "t4"),
    (0.0, "gpu_low_mem"),
)
MAX_WORKERS = 8
GB_PER_WORKER = 3


def preset_for_memory(memory_gib: float, native_bf16: bool = False) -> str:
    """The cautious preset for a GPU of which only the memory is known."""
    name = next(name for least, name in _BY_MEMORY if memory_gib >= least)
    return "rtx_4080" if name == "t4" and native_bf16 else name


def workers(cores: int, gpu_memory_gb: float | None) -> int:
    """Loader processes: two cores are left for the training process itself."""
    limits = [cores - 2, MAX_WORKERS]
    if gpu_memory_gb is not None:
        limits.append(math.ceil(gpu_memory_gb) // GB_PER_WORKER)  # the box says 24, a program 23.5
    return max(0, min(limits))


def recommend(profile: HardwareProfile) -> Recommendation:
    """The settings to start from on this machine."""
    gpu = min(profile.gpus, key=lambda g: g.memory_gib, default=None)
    reasons: list[Reason] = []

    def settle(setting: str, value: Any, why: str) -> Any:
        reasons.append(Reason(setting=setting, value=value, why=why))
        return value

    spec = find(gpu.slug) if gpu is not None and gpu.slug is not None else None
    name = settle("preset", *_preset(gpu, spec, several=len(profile.gpus) > 1))
    row = preset("nli", name)
    source = f"preset {name}"
    result = Recommendation(
        preset=name,
        precision=settle("precision", *_precision(gpu, profile.cpu)),
        tf32=settle("tf32", *_tf32(gpu)),
        batch_size=settle(
            "batch_size",
            row["training.batch_size"],
            f"{source}, for sequences of 512 tokens" + _advice(spec),
        ),
        gradient_accumulation_steps=settle("gradient_accumulation_steps", *_accumulation(row)),
        gradient_checkpointing=settle("gradient_checkpointing", *_checkpointing(row, gpu)),
        freeze_encoder=settle(
            "freeze_encoder",
            row.get("model.freeze_encoder", False),
            "the memory holds no gradients of a large encoder"
            if row.get("model.freeze_encoder")
            else "the preset leaves every weight free to train",
        ),
        compile=settle("compile", *_compile(row, gpu, profile)),
        num_workers=settle("num_workers", *_workers(row, gpu, profile)),
    )
    return replace(result, reasons=tuple(reasons))


def _preset(gpu: Gpu | None, spec: GpuSpec | None, several: bool) -> tuple[str, str]:
    if gpu is None:
        return "cpu", "no GPU that torch can use"
    which = f"the smallest of the GPUs, {gpu.name}" if several else gpu.name
    if spec is not None and spec.preset is not None:
        return spec.preset, f"written for {which}"
    name = preset_for_memory(gpu.memory_gib, gpu.native_bf16)
    return name, f"the cautious preset for {gpu.memory_gib:.1f} GiB ({which})"


def _precision(gpu: Gpu | None, cpu: Cpu) -> tuple[Precision, str]:
    if gpu is None and cpu.native_bf16:
        return "fp32", (
            "the safe start on a CPU; this one has native bf16: try device.mixed_precision=bf16"
        )
    if gpu is None:
        return "fp32", "no native bf16 on this CPU"
    if gpu.native_bf16:
        return "bf16", "native here, with the range of fp32: no loss scaling needed"
    if gpu.fp16:
        return "fp16", (
            f"no native bf16 on compute capability {gpu.compute_capability} (torch emulates it, "
            "slowly); fp16 with loss scaling"
        )
    return "fp32", "no half-precision matrix units"


def _tf32(gpu: Gpu | None) -> tuple[bool, str]:
    if gpu is not None and gpu.tf32:
        return True, "fp32 matrix products run on the matrix units, with fp32's range"
    return False, "needs a GPU of compute capability 8.0 or newer"


def _advice(spec: GpuSpec | None) -> str:
    if spec is None or spec.batch_advice is None:
        return ""
    low, high = spec.batch_advice
    return f"; the tuning guide's range for a small GPT is {low} to {high}"


def _accumulation(row: dict[str, Any]) -> tuple[int, str]:
    steps = row.get("optimization.gradient_accumulation_steps", 1)
    size = row["training.batch_size"]
    if steps == 1:
        return 1, "the batch fits as it is"
    return steps, f"{size} × {steps} makes an effective batch of {size * steps}"


def _checkpointing(row: dict[str, Any], gpu: Gpu | None) -> tuple[bool, str]:
    wanted = row.get("model.use_gradient_checkpointing", False)
    if gpu is None:
        return wanted, "memory is not the limit on a CPU"
    if wanted:
        return True, f"{gpu.memory_gib:.1f} GiB: memory is worth more than a third of the speed"
    return False, f"{gpu.memory_gib:.1f} GiB: enough to keep the activations"


def _compile(row: dict[str, Any], gpu: Gpu | None, profile: HardwareProfile) -> tuple[bool, str]:
    if gpu is None or gpu.vendor == "apple":
        return False, "compiling pays on CUDA and ROCm GPUs"
    if not row.get("optimization.compile", False):
        return (
            False,
            "the preset starts without it; optimization.compile=true once the run is stable",
        )
    missing = profile.compile.missing(gpu=True)
    if missing and not profile.simulated:
        return False, f"torch.compile would fail here: {' and '.join(missing)} missing"
    return True, "repeated shapes pay the compile time back"


def _workers(row: dict[str, Any], gpu: Gpu | None, profile: HardwareProfile) -> tuple[int, str]:
    cores = profile.cpu.cores
    most = workers(cores, None if gpu is None else gpu.memory_gib)
    pinned = row.get("training.num_workers", "auto")
    if isinstance(pinned, int) and pinned <= most:
        return pinned, f"as the preset has it; {cores} usable cores would allow {most}"
    return most, f"{cores} usable cores, two of them left to the training process"
