"""The signs of faults in logs: a table per subject, causes before what follows from them."""

from trainfit.doctor.patterns import compiling, cuda, distributed, memory, out_of_memory, training
from trainfit.doctor.patterns.pattern import Context, Pattern

PATTERNS: tuple[Pattern, ...] = (
    *out_of_memory.PATTERNS,
    *memory.PATTERNS,
    *cuda.PATTERNS,
    *compiling.PATTERNS,
    *training.PATTERNS,
    *distributed.PATTERNS,
)

__all__ = ["PATTERNS", "Context", "Pattern"]
