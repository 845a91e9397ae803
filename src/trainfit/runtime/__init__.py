"""The only place that writes torch's process-wide switches and environment variables.

`apply` does what a plan or its settings ask and returns what changed, as read back; `undo` puts
it back; `applied` does both around a block. `compile_model` and `compile_blocks` compile and
survive the compiler; `eagerly` sets what they made aside, `forget_compiled` drops it.
"""

from trainfit.runtime.compile import (
    compile_blocks,
    compile_model,
    compile_seconds,
    compiled_folder,
    eagerly,
    forget_compiled,
    forget_if_full,
    repeated_blocks,
    start_compilers,
    start_gpu,
)
from trainfit.runtime.switches import applied, apply, undo

__all__ = [
    "applied",
    "apply",
    "compile_blocks",
    "compile_model",
    "compile_seconds",
    "compiled_folder",
    "eagerly",
    "forget_compiled",
    "forget_if_full",
    "repeated_blocks",
    "start_compilers",
    "start_gpu",
    "undo",
]
