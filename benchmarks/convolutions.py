"""Record what cuDNN takes for convolutions, and the peaks of small CNN steps, on a GPU.

    python benchmarks/convolutions.py out.json

torch asks cuDNN's heuristics for an algorithm (benchmark mode is off) and allocates whatever
workspace it wants through the caching allocator, for as long as the kernel runs.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

SHAPES = [
    # batch, channels, filters, side, kernel, stride, groups
    (64, 3, 64, 224, 7, 2, 1),
    (64, 64, 64, 56, 1, 1, 1),
    (64, 64, 64, 56, 3, 1, 1),
    (64, 64, 256, 56, 1, 1, 1),
    (64, 128, 128, 28, 3, 1, 1),
    (64, 128, 128, 56, 3, 2, 1),
    (64, 256, 512, 28, 1, 2, 1),
    (64, 512, 512, 7, 3, 1, 1),
    (16, 64, 64, 64, 3, 1, 1),
    (16, 3, 64, 64, 3, 1, 1),
    (256, 3, 768, 224, 16, 16, 1),
    (32, 96, 96, 56, 7, 1, 96),
    (8, 32, 32, 128, 5, 1, 1),
    (128, 16, 16, 32, 3, 1, 1),
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def peak(work: Callable[[], Any]) -> int:
    """Bytes that `work` takes beyond what is there before and what it returns."""
    for _ in range(2):
        out = work()
        del out
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = work()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    extra = torch.cuda.max_memory_allocated() - before - kept
    del out
    return extra


def convolution(shape: tuple[int, ...], dtype: str, last: bool) -> dict[str, Any]:
    batch, channels, filters, side, kernel, stride, groups = shape
    form = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(batch, channels, side, side, device="cuda", dtype=DTYPES[dtype])
    w = torch.randn(filters, channels // groups, kernel, kernel, device="cuda", dtype=DTYPES[dtype])
    x, w = x.to(memory_format=form), w.to(memory_format=form)
    common = ([stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], groups)
    y = torch.ops.aten.convolution(x, w, None, *common)
    g = torch.ones_like(y)
    backward = torch.ops.aten.convolution_backward

    def run(mask: list[bool]) -> Callable[[], Any]:
        return lambda: backward(g, x, w, None, *common, mask)

    return {
        "shape": shape,
        "dtype": dtype,
        "channels_last": last,
        "input": x.nbytes,
        "weight": w.nbytes,
        "output": y.nbytes,
        "forward": peak(lambda: torch.ops.aten.convolution(x, w, None, *common)),
        "grad_input": peak(run([True, False, False])),
        "grad_weight": peak(run([False, True, False])),
    }


def small_cnn(width: int = 64) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise([3, width, width, 2 * width, 4 * width]):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if after > width else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def step(
    *,
    model: str = "cnn",
    batch: int = 64,
    side: int = 64,
    width: int = 64,
    half: str = "",
    last: bool = False,
    default_optimizer: bool = False,
) -> tuple[nn.Module, Callable[[nn.Module], Callable[[], None]]]:
    """One optimizer step, for the estimator and for the GPU alike."""
    if model == "cnn":
        built: nn.Module = small_cnn(width)
    else:
        built = nn.Sequential(*(nn.Linear(width, width) for _ in range(12)))

    def make_step(built: nn.Module) -> Callable[[], None]:
        dtype = DTYPES[half] if half else torch.float32
        built.to(dtype)
        shape = (batch, 3, side, side) if model == "cnn" else (batch, width)
        x = torch.ones(shape, dtype=dtype)
        if last:
            built.to(memory_format=torch.channels_last)
            x = x.to(memory_format=torch.channels_last)
        options = {} if default_optimizer else {"fused": True}
        optimizer = torch.optim.AdamW(built.parameters(), **options)

        def run() -> None:
            built(x).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return run

    return built, make_step


STEPS: list[dict[str, Any]] = [
    {},
    {"half": "bf16"},
    {"half": "bf16", "last": True},
    {"last": True},
    {"batch": 128, "side": 128, "half": "bf16", "last": True},
    {"batch": 32, "side": 224, "width": 32},
    {"model": "mlp", "width": 2048, "default_optimizer": True},
    {"model": "mlp", "width": 2048},
    {"model": "mlp", "width": 2048, "half": "bf16", "default_optimizer": True},
]


def measured(arguments: dict[str, Any]) -> dict[str, Any]:
    torch.cuda.empty_cache()
    with torch.device("cuda"):
        model, make = step(**arguments)
        run = make(model)
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            run()
        torch.cuda.synchronize()
    return {
        "arguments": arguments,
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
    }


def main() -> None:
    torch.backends.cudnn.benchmark = False
    steps = [measured(arguments) for arguments in STEPS]
    grid = itertools.product(SHAPES, DTYPES, (False, True))
    found = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "steps": steps,
        "convolutions": [convolution(*each) for each in grid],
    }
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
