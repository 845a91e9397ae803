"""What torch and the environment say, read without trainfit."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")
Observe = Callable[[], dict[str, Any]]


def answer(question: Callable[[], Any]) -> Any:
    """What torch answers, or that it refuses to."""
    try:
        return question()
    except RuntimeError:
        return "raises"


def parts() -> list[Any]:
    """Where torch keeps the precision of float32, the broader ones first."""
    backends: Any = torch.backends
    cudnn = backends.cudnn
    return [
        backends,
        cudnn,
        backends.cuda.matmul,
        backends.mkldnn.matmul,
        cudnn.conv,
        cudnn.rnn,
    ]


def look() -> dict[str, Any]:
    backends: Any = torch.backends
    cudnn, cuda = backends.cudnn, backends.cuda
    return {
        "matmul.allow_tf32": answer(lambda: cuda.matmul.allow_tf32),
        "cudnn.allow_tf32": answer(lambda: cudnn.allow_tf32),
        "matmul_precision": answer(torch.get_float32_matmul_precision),
        "fp32": [part.fp32_precision for part in (*parts(), backends.mkldnn)],
        "cudnn": (cudnn.benchmark, cudnn.deterministic),
        "deterministic": torch.get_deterministic_debug_mode(),
        "threads": torch.get_num_threads(),
        "kernels": (
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ),
        "order": torch._C._get_sdp_priority_order(),
        "environment": {name: os.environ.get(name) for name in VARIABLES},
        "python": random.getstate(),
        "numpy": [str(part) for part in numpy.random.get_state()],
        "torch": (torch.initial_seed(), torch.get_rng_state().tolist()),
    }


def forget_tf32() -> None:
    """Bring TF32 to where torch begins, from any state."""
    backends: Any = torch.backends
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32 = True
    for part in parts()[:4]:
        part.fp32_precision = "none"


def run_afresh(code: str, **variables: str) -> Any:
    """Run `code` in a Python of its own, and return the JSON that it prints last."""
    environment = {k: v for k, v in os.environ.items() if "ALLOC_CONF" not in k} | variables
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def afresh() -> Callable[..., Any]:
    return run_afresh


@pytest.fixture(scope="session")
def observe() -> Observe:
    return look


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test after which torch's switches stand otherwise than before."""
    passing = ("python", "numpy", "torch", "environment")

    def steady() -> dict[str, Any]:
        return {name: value for name, value in look().items() if name not in passing}

    before = steady()
    yield
    assert steady() == before


@pytest.fixture
def any_tf32() -> Iterator[Callable[[], None]]:
    """Let a test put TF32 into any state; the value brings back the one torch begins with."""
    yield forget_tf32
    forget_tf32()
