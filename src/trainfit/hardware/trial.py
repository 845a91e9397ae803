"""Whether the CPU's bfloat16 works: tried in a child, since where it does not, the process dies."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import cache

from trainfit.records import Note

_PRODUCT = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
_SECONDS = 60


@cache
def bf16_fault(
    command: tuple[str, ...] = (sys.executable, "-c", _PRODUCT), seconds: float = _SECONDS
) -> str | None:
    """The signal that a bfloat16 product ended with, such as SIGILL; None if it lived.

    Some virtual machines show AMX in the processor's flags and do not let it run. What gives no
    answer is not trusted either. The processor stays the same: it is tried once in a process.
    """
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return "a timeout"
    except OSError:
        return None
    return signal.Signals(-done.returncode).name if done.returncode < 0 else None


def bf16_note(fault: str) -> Note:
    """What to do about it."""
    return Note(
        code="cpu_bf16_dies",
        text=f"The processor says that it multiplies bfloat16, but a product died of {fault} here.",
        fix="Stay in fp32 (device.mixed_precision=off), or `export "
        "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16` to do without AMX.",
    )
