"""Checks of the machine around the GPUs: compiler, memory, disk, limits, environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainfit.doctor import detected, gpu_checks
from trainfit.doctor.facts import Facts
from trainfit.doctor.finding import Check, Fault, Finding, Seen, check, worst_first

FEW_FILES = 1024
FULL_SHM_GIB = 0.25
LITTLE_MEMORY_GIB = 2.0
FULL_DISK_GIB = 5.0
"""A checkpoint of a small model with its optimizer; one of a billion weights takes 12 GB."""
FULL_TEMPORARY_GIB = 0.5
SLOW_READ_MBS, SLOW_WRITE_MBS = 50.0, 20.0
"""Any disk of the last ten years is faster; a network mount may not be."""


@check(
    Fault(
        id="compile_support",
        severity="warning",
        title="torch.compile would fail here",
        why="It compiles C++ and Triton code on the spot, and fails at the first step without.",
        mend=(
            "`sudo apt install build-essential python3-dev` (or the headers of your Python); "
            "Triton comes with torch's CUDA build.",
            "Or do without: optimization.compile=false.",
        ),
    )
)
def compile_support(facts: Facts) -> Iterator[Seen]:
    """A C compiler, Python's headers and, for a GPU, Triton."""
    gpu = any(gpu.vendor in ("nvidia", "amd") for gpu in facts.profile.gpus)
    if missing := facts.profile.compile.missing(gpu=gpu):
        yield Seen(evidence=f"Missing: {', '.join(missing)}.")


@check(
    Fault(
        id="shm_full",
        severity="warning",
        title="/dev/shm is nearly full",
        why="Loader workers pass batches through it; files that dead processes left stay there.",
        mend=(
            "`ls -l /dev/shm` shows them; remove those of processes that are gone.",
            "Start the container with `--shm-size=8g`.",
            "training.num_workers=0 does without.",
        ),
    )
)
def shm_full(facts: Facts) -> Iterator[Seen]:
    """Little left of what there is; a small one is another finding."""
    free, size = facts.shm_free_gib, facts.profile.shm_gib
    if free is not None and size is not None and free < min(FULL_SHM_GIB, size / 4):
        yield Seen(evidence=f"{free:.2f} GiB of {size:.2f} GiB are free.")


@check(
    Fault(
        id="file_limit",
        severity="warning",
        title="Few files may be open at a time",
        why="Every tensor on its way from a loader worker is an open file: “Too many open files”.",
        mend=("`ulimit -n 65536` before the run.", "training.num_workers=2 needs fewer."),
    )
)
def file_limit(facts: Facts) -> Iterator[Seen]:
    """The soft limit of this process."""
    if facts.open_files is not None and facts.open_files < FEW_FILES:
        yield Seen(evidence=f"This process may open {facts.open_files} files.")


@check(
    Fault(
        id="disk_space",
        severity="warning",
        title="The disk is nearly full",
        why="Checkpoints are written whole or not at all: a full disk ends the run.",
        mend=(
            "Free some space, or write elsewhere: runs_dir=/path/with/space.",
            "training.keep_checkpoints=1 keeps fewer.",
        ),
    )
)
def disk_space(facts: Facts) -> Iterator[Seen]:
    """Where runs are written, and where temporary files are."""
    free, temporary = facts.profile.disk_free_gib, facts.temporary_free_gib
    if free < FULL_DISK_GIB:
        evidence = f"{free:.1f} GiB are free in this folder."
        yield Seen(evidence=evidence, severity="error" if free < FULL_DISK_GIB / 10 else None)
    elif temporary is not None and temporary < FULL_TEMPORARY_GIB:
        yield Seen(
            evidence=f"{temporary:.2f} GiB are free for temporary files, where compiled code goes.",
            mend=("`export TMPDIR=/path/with/space`",),
        )


@check(
    Fault(
        id="disk_unwritable",
        severity="warning",
        title="This folder cannot be written to",
        why="A run writes its folder here.",
        mend=("runs_dir=/path/of/yours", "`chmod u+w .`, where the folder is yours."),
    )
)
def disk_unwritable(facts: Facts) -> Iterator[Seen]:
    """A file was tried."""
    if facts.disk is None:
        yield Seen(evidence="A temporary file could not be written here.")


@check(
    Fault(
        id="disk_slow",
        severity="warning",
        title="The disk is slow",
        why="Reading data and writing checkpoints holds the GPU up.",
        mend=(
            "Keep the data on an SSD of this machine, not on a network mount.",
            "training.num_workers=4 reads ahead; training.checkpoint_steps=1000 saves less often.",
            "`trainfit check --measure` measures it for longer.",
        ),
    )
)
def disk_slow(facts: Facts) -> Iterator[Seen]:
    """The fastest piece of 32 MiB, written and read back without the page cache."""
    rates = facts.disk
    if rates is not None and (rates.read < SLOW_READ_MBS or rates.write < SLOW_WRITE_MBS):
        yield Seen(evidence=f"It wrote {rates.write:.0f} MB/s and read {rates.read:.0f} MB/s.")


@check(
    Fault(
        id="few_cores",
        severity="warning",
        title="Few cores for the GPUs",
        why="Each GPU wants a core for its process and one or two for loader workers; with fewer "
        "it waits for data.",
        mend=(
            "Give the container or job more cores (`--cpus`, `--cpus-per-task`).",
            "training.num_workers=auto leaves cores to the training itself; too many workers "
            "would be worse.",
            "Prepare data beforehand: the tokens of text files are kept after the first run.",
        ),
    )
)
def few_cores(facts: Facts) -> Iterator[Seen]:
    """Workers against cores: fewer than three a GPU."""
    gpus = [gpu for gpu in facts.profile.gpus if gpu.vendor != "apple"]
    cores = facts.profile.cpu.cores
    if gpus and cores < 3 * len(gpus):
        yield Seen(evidence=f"{cores} usable cores for {len(gpus)} GPU(s).")


@check(
    Fault(
        id="threads",
        severity="warning",
        title="More threads are set than there are cores",
        why="Threads that take turns on a core are slower than fewer threads.",
        mend=("`unset OMP_NUM_THREADS`, or set it to the cores a process has.",),
    )
)
def threads(facts: Facts) -> Iterator[Seen]:
    """What the environment asks of every process."""
    value, cores = facts.environment.get("OMP_NUM_THREADS", ""), facts.profile.cpu.cores
    if value.isdigit() and int(value) > cores:
        yield Seen(evidence=f"OMP_NUM_THREADS={value} with {cores} usable cores.")


@check(
    Fault(
        id="host_memory",
        severity="warning",
        title="Little host memory is free",
        why="When it runs out, the kernel kills the process, and the log says no more than Killed.",
        mend=(
            "End what else holds memory, or give the container more (`--memory`).",
            "training.num_workers=2 and training.prefetch_factor=2: each worker is a process.",
        ),
    )
)
def host_memory(facts: Facts) -> Iterator[Seen]:
    """Within what the cgroup allows."""
    free, size = facts.profile.memory_available_gib, facts.profile.memory_gib
    if free < min(LITTLE_MEMORY_GIB, size / 4):
        yield Seen(evidence=f"{free:.1f} GiB of {size:.1f} GiB are available.")


_SLOW_VARIABLES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "CUDA_LAUNCH_BLOCKING": (("1",), "every kernel waits for the one before"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (("1",), "every tensor asks the driver for memory"),
    "TORCHDYNAMO_DISABLE": (("1",), "torch.compile does nothing"),
    "TORCH_COMPILE_DISABLE": (("1",), "torch.compile does nothing"),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "every collective is checked"),
    "NCCL_DEBUG": (("TRACE",), "every collective is written down"),
    "NCCL_P2P_DISABLE": (("1",), "GPUs talk through the host"),
    "NCCL_SHM_DISABLE": (("1",), "ranks of one machine talk through the network"),
    "NCCL_IB_DISABLE": (("1",), "InfiniBand is not used"),
}


@check(
    Fault(
        id="slow_variables",
        severity="warning",
        title="A variable for debugging is still set",
        why="It makes every run slow: " + "; ".join(f"`{name}`" for name in _SLOW_VARIABLES) + ".",
        mend=("`unset` it.",),
    )
)
def slow_variables(facts: Facts) -> Iterator[Seen]:
    """Switches that help to find a fault and cost time ever after."""
    for name, (values, effect) in _SLOW_VARIABLES.items():
        if (value := facts.environment.get(name)) in values:
            yield Seen(evidence=f"{name}={value}: {effect}.", mend=(f"`unset {name}`",))


HOST_CHECKS: tuple[Check[Facts], ...] = (
    compile_support,
    shm_full,
    file_limit,
    disk_space,
    disk_unwritable,
    disk_slow,
    few_cores,
    threads,
    host_memory,
    slow_variables,
)

CHECKS: tuple[Check[Facts], ...] = (*detected.CHECKS, *gpu_checks.CHECKS, *HOST_CHECKS)


def examine(facts: Facts) -> tuple[Finding, ...]:
    """What is wrong with the machine, worst first."""
    return worst_first(finding for check in CHECKS for finding in check(facts))
