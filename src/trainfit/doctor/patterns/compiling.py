"""torch.compile: its tools, its failures, its recompilations."""

from __future__ import annotations

from trainfit.doctor.finding import Fault
from trainfit.doctor.patterns.pattern import Pattern

_OFF = "optimization.compile=false trains without it."

PATTERNS = (
    Pattern(
        fault=Fault(
            id="compiler_missing",
            severity="error",
            title="torch.compile found no C compiler",
            why="Inductor and Triton compile small C and C++ files on the spot.",
            mend=(
                "`sudo apt install build-essential`; `echo $CC` must be empty or name a compiler.",
                _OFF,
            ),
        ),
        like="Failed to find C compiler. Please specify via CC environment variable",
        signs=(
            r"Failed to find C compiler",
            r"InvalidCxxCompiler: No working C\+\+ compiler found",
            r"No such file or directory: '(?:g\+\+|gcc|cc|c\+\+|clang\+\+)'",
        ),
    ),
    Pattern(
        fault=Fault(
            id="headers_missing",
            severity="error",
            title="torch.compile found no Python headers",
            why="What it compiles includes Python.h.",
            mend=("`sudo apt install python3-dev` (the headers of the Python in use).", _OFF),
        ),
        like="fatal error: Python.h: No such file or directory",
        signs=(r"fatal error: '?Python\.h'?(?:: No such file or directory| file not found)",),
    ),
    Pattern(
        fault=Fault(
            id="triton_missing",
            severity="error",
            title="Triton is missing, or does not know this GPU",
            why="torch.compile writes GPU kernels in Triton, from compute capability 7.0 on.",
            mend=(
                "Install torch's CUDA build, which brings Triton: `pip install --force-reinstall "
                "torch`.",
                "On a GPU before compute capability 7.0 there is none: optimization.compile=false.",
            ),
        ),
        like="Cannot find a working triton installation",
        signs=(
            r"Cannot find a working triton installation",
            r"No module named 'triton'",
            r"which is too old to be supported by the triton GPU compiler",
        ),
    ),
    Pattern(
        fault=Fault(
            id="triton_resources",
            severity="error",
            title="A Triton kernel needs more than the GPU has",
            why="Kernels tuned for data-centre GPUs ask for more shared memory than others have.",
            mend=(
                "optimization.compile_mode=default instead of max-autotune.",
                "Update torch, then the driver.",
                _OFF,
            ),
        ),
        like="out of resource: shared memory, Required: 131072, Hardware limit: 101376",
        signs=(r"out of resource: shared memory, Required: \d+, Hardware limit: \d+",),
    ),
    Pattern(
        fault=Fault(
            id="cudagraph_overwritten",
            severity="error",
            title="A CUDA graph's output was used after the next step",
            why="reduce-overhead replays one graph, and its outputs are written over.",
            mend=("optimization.compile_mode=default", _OFF),
        ),
        like="accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run",
        signs=(
            r"accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run",
        ),
    ),
    Pattern(
        fault=Fault(
            id="compile_failed",
            severity="error",
            title="torch.compile failed",
            why="The compiler met code it cannot take; it fails at the first call, not before.",
            mend=(
                _OFF,
                "Another mode: optimization.compile=true with "
                "optimization.compile_mode=reduce-overhead, or default.",
                "Update torch (`pip install --upgrade torch`) and the driver.",
                "`export TORCH_LOGS=+dynamo` for one run shows what it was compiling.",
            ),
        ),
        like="torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised",
        signs=(
            r"torch\._(?:dynamo|inductor)\.exc\.\w+",
            r"BackendCompilerFailed: backend='\w+' raised",
            r"RuntimeError: Compilation failed",
            r"triton\.compiler\.errors\.CompilationError",
            r"PTXASError: PTXAS error",
        ),
        symptom=True,
    ),
    Pattern(
        fault=Fault(
            id="recompile_limit",
            severity="warning",
            title="torch.compile gave up on a function after too many recompilations",
            why="Each new shape compiles again; over the limit the function runs uncompiled.",
            mend=(
                "Keep shapes fixed: trainfit's packed rows have one or two; elsewhere pad to a "
                "multiple, and drop the last batch.",
                "`export TORCH_LOGS=recompiles` for one run names what changed.",
                _OFF,
            ),
        ),
        like="torch._dynamo hit config.recompile_limit (8)",
        signs=(
            r"torch\._dynamo hit config\.(?:accumulated_)?(?:cache_size|recompile)_limit"
            r"(?: \(\d+\))?",
        ),
    ),
)
