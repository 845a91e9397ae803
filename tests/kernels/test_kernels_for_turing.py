"""trainfit's own attention kernels, compiled for a T4 that is not here: do they fit into it?"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu
SHARED = 64 << 10
"""Bytes of shared memory that a block may have on compute capability 7.5."""
SCRIPT = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

driver.active.get_current_target = lambda: GPUTarget("cuda", 75, 32)
made = []
jit.KernelInterface.__getitem__ = lambda self, grid: lambda *given, **options: made.append(
    (self.fn.__name__, self.warmup(*given, grid=grid, **options))
)
from trainfit.kernels import disentangled_triton, softcapped_triton

starts = torch.tensor([0, 50, 250], dtype=torch.int32, device="cuda")
for head in (16, 32, 64, 128, 256):
    q = torch.empty(250, 2, head, device="cuda", dtype=torch.float16)
    sums = torch.empty(2, 250, device="cuda")
    for seed in (None, torch.zeros(1, dtype=torch.long, device="cuda")):
        rate = 0.0 if seed is None else 0.1
        capped = (200, 0.1, 50.0, 64, rate)
        softcapped_triton.forward(q, q, q, starts, seed, *capped)
        softcapped_triton.backward(q, q, q, q, starts, seed, q, sums, *capped)
        if head < 256:
            places = torch.empty(2, 400, 2, head, device="cuda", dtype=torch.float16)
            given = (q, q, q, places, starts, seed)
            disentangled_triton.forward(*given, 200, 0.1, rate)
            disentangled_triton.backward(q, *given, q, sums, 200, 0.1, rate)
    for name, kernel in made:
        print(head, name, kernel.metadata.shared, "mma" in kernel.asm["ptx"])
    made.clear()
"""


def test_every_kernel_fits_and_uses_the_matrix_units() -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    assert {int(head) for head, *_ in rows} == {16, 32, 64, 128, 256}
    assert [row for row in rows if int(row[2]) > SHARED] == []
    assert [row for row in rows if row[3] != "True" and "products" not in row[1]] == []
