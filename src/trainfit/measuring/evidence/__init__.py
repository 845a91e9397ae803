"""What really ran in one step. Nothing here reads a configuration: only torch and the process."""

from trainfit.measuring.evidence.gathering import gather
from trainfit.measuring.evidence.seen import (
    AttentionSeen,
    BatchesSeen,
    CompilerSeen,
    Evidence,
    ProductsSeen,
    SwitchesSeen,
)
from trainfit.measuring.evidence.trace import Profiling, Trace, traced

__all__ = [
    "AttentionSeen",
    "BatchesSeen",
    "CompilerSeen",
    "Evidence",
    "ProductsSeen",
    "Profiling",
    "SwitchesSeen",
    "Trace",
    "gather",
    "traced",
]
