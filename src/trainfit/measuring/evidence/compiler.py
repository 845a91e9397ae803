"""What torch.compile made of the program, and whether it ran."""

from __future__ import annotations

import re
import sys
from typing import Any

from trainfit.measuring.evidence.seen import CompilerSeen
from trainfit.measuring.evidence.trace import Trace

_REGION = re.compile(r"Torch-Compiled Region: (\S+)")
_RESUMED = "torch_dynamo_resume_in_"
_LAUNCH = ("cudaGraphLaunch", "cuGraphLaunch", "hipGraphLaunch")
_SHOWN = 5


def compiler_of(trace: Trace) -> CompilerSeen:
    """The regions of the step, and the compiler's own counters."""
    ran = [found[1] for op in trace.operators if (found := _REGION.match(op.name))]
    launches = trace.calls(*_LAUNCH)
    dynamo = sys.modules.get("torch._dynamo.utils")  # not imported: nothing was compiled
    if dynamo is None:
        return CompilerSeen(regions=len(ran), graph_launches=launches)
    frames = dynamo.get_compilation_metrics()
    resumed = {str(f.compile_id) for f in frames if (f.co_name or "").startswith(_RESUMED)}
    reasons = dict.fromkeys(_line(text) for text in dynamo.counters["graph_break"])
    failures = dict.fromkeys(_failure(frame) for frame in frames if frame.fail_type)
    return CompilerSeen(
        regions=len(ran),
        resumed=sum(name in resumed for name in ran),
        graphs=int(dynamo.counters["stats"]["unique_graphs"]),
        breaks=tuple(reasons)[:_SHOWN],
        recompiles=sum(frame.recompile_reason is not None for frame in frames),
        failures=tuple(failures)[:_SHOWN],
        attempts=int(dynamo.counters["frames"]["total"]),
        graph_launches=launches,
    )


def _failure(frame: Any) -> str:
    kind = str(frame.fail_type).rpartition(".")[2].removesuffix("'>")
    return f"{kind}: {' '.join(str(frame.fail_reason or '').split())}"[:200]


def _line(text: str) -> str:
    """The first words of what the compiler tells over many lines."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:200]
