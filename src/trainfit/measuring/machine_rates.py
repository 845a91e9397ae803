"""Measured rates of the machine, beside its datasheet: about ten seconds."""

from __future__ import annotations

import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from trainfit.core import caches
from trainfit.core.errors import BadInput
from trainfit.core.files import cache_folder
from trainfit.core.plan_records import RuntimeSettings
from trainfit.core.records import HardwareProfile, Measurement, Measurements
from trainfit.hardware.catalogue import GpuSpec, find
from trainfit.measuring.timing import time_work
from trainfit.runtime import applied

ITEM_SECONDS = 0.8
REST_SECONDS = 0.3
"""Pause before each item: a GPU at its power cap is slow for the next one too."""
BURST = 20
"""Number of samples before the power cap sets in, after some 50 ms on a large GPU."""
WARM_UP = 3
MOST_SAMPLES = 400
MIB = 1024**2


def measure(
    profile: HardwareProfile, folder: Path | None = None, progress: Callable[[str], object] = str
) -> Measurements:
    """Measure the first GPU, or the CPU, and the disk under `folder`; calls `progress` per item."""
    items: list[Measurement] = []
    for name, take in _items(profile, folder or Path.cwd()):
        progress(name)
        if profile.gpus:
            time.sleep(REST_SECONDS)
        items += take()
    return Measurements(
        device=device_name(profile),
        torch=profile.torch.version if profile.torch else "",
        driver=profile.driver,
        taken=datetime.now(UTC).isoformat(timespec="seconds"),
        items=tuple(items),
    )


def device_name(profile: HardwareProfile) -> str:
    """Name of the device for the cache: the GPU with its UUID, or the CPU."""
    if not profile.gpus:
        return profile.cpu.name
    gpu = profile.gpus[0]
    return f"{gpu.name} {gpu.uuid}" if gpu.uuid else gpu.name


def remember(measurements: Measurements) -> Path:
    """Save measurements for the planner; returns the file."""
    path = place("measured", measurements.device)
    caches.write(path, measurements)
    return path


def remembered(profile: HardwareProfile) -> Measurements | None:
    """Load the measurements of this device, or None; a damaged file is deleted."""
    return caches.read(Measurements, place("measured", device_name(profile)))


def remembered_rates(gpu: str) -> dict[str, float]:
    """Measured rates of a GPU of this name, by their names; empty if it was never measured."""
    for path in sorted((cache_folder() / "measured").glob("*.json")):
        found = caches.read(Measurements, path)
        # The name, and perhaps a UUID: an RTX 3080 Ti is another GPU than an RTX 3080.
        named = rf"{re.escape(gpu)}( \S+-\S+)?"
        if found is not None and gpu and re.fullmatch(named, found.device):
            return {item.name: item.value for item in found.items}
    return {}


def place(folder: str, device: str) -> Path:
    """Path of a device's file in a folder of the cache."""
    safe = "".join(c if c.isalnum() or c in "-." else "_" for c in device)
    return cache_folder() / folder / f"{safe}.json"


def _items(
    profile: HardwareProfile, folder: Path
) -> Iterator[tuple[str, Callable[[], list[Measurement]]]]:
    gpu = profile.gpu
    spec = find(gpu.slug) if gpu is not None and gpu.slug is not None else None
    device = "cpu" if gpu is None else "mps" if gpu.vendor == "apple" else "cuda"
    kinds = ["fp32"]
    if gpu is not None:
        kinds = [k for k, there in (("bf16", gpu.native_bf16), ("fp16", gpu.fp16)) if there]
        kinds += ["tf32", "fp32"] if gpu.tf32 else ["fp32"]
    elif profile.cpu.native_bf16:
        kinds = ["bf16", "fp32"]
    for kind in kinds:
        yield f"matrix products in {kind}", partial(_matmul, kind, device, spec)
    yield "copies in memory", partial(_copy, device, spec)
    if device == "cuda":
        yield "copies from the host, pinned", partial(_host_to_device, pinned=True)
        yield "copies from the host, pageable", partial(_host_to_device, pinned=False)
        yield "launches", _launches
    yield "reads from the disk", partial(_disk, folder)


def _matmul(kind: str, device: str, spec: GpuSpec | None) -> list[Measurement]:
    """Time square products of random data; zeros would run faster.

    A GPU falls back to what its power cap allows after a burst, so there are two figures: the first
    products, as others publish, and the later ones.
    """
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind, torch.float32)
    size = 1024 if device == "cpu" else 8192 if kind != "fp32" else 4096
    with applied(RuntimeSettings(tf32=kind == "tf32")):
        a = torch.randn(size, size, device=device).to(dtype)
        b = torch.randn(size, size, device=device).to(dtype)
        out = torch.empty_like(a)
        seconds = _time(lambda: torch.mm(a, b, out=out))
    peak = spec.peak_tflops(kind) if spec is not None else None
    rate = partial(_measurement, unit="TFLOP/s", amount=2 * size**3 / 1e12, datasheet=peak)
    if device == "cpu" or len(seconds) < 2 * BURST:
        return [rate(f"matmul_{kind}", seconds=seconds)]
    return [
        rate(f"matmul_{kind}", seconds=seconds[:BURST]),
        rate(f"matmul_{kind}_sustained", seconds=seconds[len(seconds) // 2 :]),
    ]


def _copy(device: str, spec: GpuSpec | None) -> list[Measurement]:
    """Time copies, counting bytes read and written as a datasheet does."""
    import torch

    size = 256 * MIB if device == "cpu" else _spare_bytes(device)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = _time(lambda: target.copy_(source))
    peak = spec.bandwidth_gbs if spec is not None else None
    return [_measurement("copy", "GB/s", 2 * size / 1e9, seconds, peak)]


def _spare_bytes(device: str) -> int:
    """Size of a buffer many times the cache, at most an eighth of the free memory."""
    import torch

    free = torch.cuda.mem_get_info()[0] if device == "cuda" else 2048 * MIB
    return min(4096 * MIB, free // 8)


def _host_to_device(pinned: bool) -> list[Measurement]:
    import torch

    size = 256 * MIB
    source = torch.ones(size, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    seconds = _time(lambda: target.copy_(source, non_blocking=True))
    name = "host_to_device_pinned" if pinned else "host_to_device_pageable"
    return [_measurement(name, "GB/s", size / 1e9, seconds, None)]


def _launches(operations: int = 2000) -> list[Measurement]:
    """Time the CPU's launches of small operations, forward and backward.

    They bound a step of many small kernels, however fast the GPU.
    """
    import torch

    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    forward, backward = [], []
    for _ in range(WARM_UP + 3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        y = x
        for _ in range(operations // 4):
            y = (y @ x).mul(0.5).add(x).tanh()
        forward.append((time.perf_counter() - started) / operations * 1e6)
        torch.cuda.synchronize()
        started = time.perf_counter()
        y.sum().backward()  # type: ignore[no-untyped-call]
        backward.append((time.perf_counter() - started) / operations * 1e6)
    return [
        Measurement(
            name=name,
            unit="µs",
            value=statistics.median(samples[WARM_UP:]),
            samples=tuple(samples[WARM_UP:]),
        )
        for name, samples in (("launch_forward", forward), ("launch_backward", backward))
    ]


def _disk(folder: Path, size: int = 256 * MIB) -> list[Measurement]:
    """Time sequential reads of a file that the page cache was told to forget."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".trainfit-read-") as file:
            block = os.urandom(MIB)
            for _ in range(size // MIB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            seconds = [_read_cold(file.fileno()) for _ in range(3)]
    except OSError as error:
        fix = f"free {size // MIB} MiB there, or measure from a folder you may write to"
        raise BadInput(f"cannot measure the disk under {folder} ({error})", fix) from None
    return [_measurement("disk_read", "GB/s", size / 1e9, seconds, None)]


def _read_cold(handle: int) -> float:
    if hasattr(os, "posix_fadvise"):  # Linux; elsewhere the page cache may flatter the disk
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(handle, 0, os.SEEK_SET)
    started = time.perf_counter()
    while os.read(handle, 8 * MIB):
        pass
    return time.perf_counter() - started


def _time(work: Callable[[], object]) -> Sequence[float]:
    """Seconds of each repetition after a warm-up, for about ITEM_SECONDS in all."""
    timing = time_work(work, warm_up=WARM_UP, repeats=MOST_SAMPLES, most_seconds=ITEM_SECONDS)
    return timing.seconds


def _measurement(
    name: str, unit: str, amount: float, seconds: Sequence[float], datasheet: float | None
) -> Measurement:
    """Rates of the samples, and their median."""
    rates = tuple(amount / s for s in seconds)
    return Measurement(
        name=name, unit=unit, value=statistics.median(rates), samples=rates, datasheet=datasheet
    )
