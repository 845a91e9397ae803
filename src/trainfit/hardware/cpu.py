"""The processor: its name, the cores this process may use, and whether it multiplies bfloat16."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from trainfit.records import Cpu

_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""The x86 flags and the Arm feature of native bfloat16 products."""
_BELOW_BF16 = frozenset(
    {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
)
"""Values of oneDNN's ONEDNN_MAX_CPU_ISA that keep it from native bfloat16 products."""

Sysctl = Callable[[str], str | None]


def probe_cpu(
    cpuinfo: str, *, affinity: int, host_cores: int, quota: int | None, sysctl: Sysctl
) -> Cpu:
    """The processor, from the text of /proc/cpuinfo or, where there is none, from sysctl."""
    fields = _first_of_each(cpuinfo)
    name = fields.get("model name") or sysctl("machdep.cpu.brand_string")
    flags = f"{fields.get('flags', '')} {fields.get('features', '')}".split()
    bf16 = bool(_BF16_FLAGS.intersection(flags)) or sysctl("hw.optional.arm.FEAT_BF16") == "1"
    bf16 = bf16 and os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() not in _BELOW_BF16
    cores = min(affinity, quota or affinity)
    return Cpu(
        name=name or platform.processor() or platform.machine(),
        cores=cores,
        host_cores=max(host_cores, cores),
        native_bf16=bf16,
    )


def allowed_by_affinity() -> int:
    """The cores that the scheduler may put this process on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_cpuinfo(root: Path = Path("/")) -> str:
    """The text of /proc/cpuinfo; empty on a system that has none."""
    try:
        return (root / "proc/cpuinfo").read_text()
    except OSError:
        return ""


def sysctl(name: str) -> str | None:
    """A value that macOS keeps of its hardware; None on other systems."""
    if platform.system() != "Darwin" or (program := shutil.which("sysctl")) is None:
        return None
    try:
        answer = subprocess.run([program, "-n", name], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def _first_of_each(cpuinfo: str) -> dict[str, str]:
    """The first value of each key: the cores of a machine repeat it."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    return fields
