"""Memory and files: libraries below torch, the host, shared memory, loader workers, the disk."""

from __future__ import annotations

from trainfit.doctor.finding import Fault
from trainfit.doctor.patterns.out_of_memory import LESS_MEMORY, stated
from trainfit.doctor.patterns.pattern import Pattern

_FEWER_WORKERS = "Fewer loader workers: training.num_workers=2, then training.num_workers=0."

PATTERNS = (
    Pattern(
        fault=Fault(
            id="library_alloc_failed",
            severity="error",
            title="A CUDA library could not allocate its workspace",
            why="cuBLAS or cuDNN asks the driver itself, beside torch: the GPU was full.",
            mend=(
                "Leave it room: training.batch_size=8 (lower than now), then "
                "model.use_gradient_checkpointing=true and data.max_length=768.",
                "`nvidia-smi` shows whether another process holds the memory.",
                "If nothing is full, an index may be out of range: `export CUDA_LAUNCH_BLOCKING=1` "
                "for one run shows where.",
            ),
        ),
        like="CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)",
        signs=(
            r"CUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)",
            r"(?:CUDNN_STATUS|CUSOLVER_STATUS|CUFFT)_ALLOC_FAILED",
        ),
    ),
    Pattern(
        fault=Fault(
            id="mps_oom",
            severity="error",
            title="The Apple GPU's memory ran out",
            why="It shares the host's memory, and torch keeps to a part of it.",
            mend=LESS_MEMORY[:3],
        ),
        like="MPS backend out of memory (MPS allocated: 17.95 GB, …",
        signs=(
            r"MPS backend out of memory \(MPS allocated: [\d.]+ [KMG]i?B",
            f"(?i:{stated('MPS backend out of memory')})",
        ),
        word="memory",
    ),
    Pattern(
        fault=Fault(
            id="shm_full_log",
            severity="error",
            title="Shared memory ran out",
            why="Loader workers and NCCL pass data through /dev/shm; Docker gives 64 MiB.",
            mend=(
                "Start the container with `--shm-size=8g` or `--ipc=host`; in Kubernetes mount an "
                "emptyDir of medium Memory at /dev/shm.",
                _FEWER_WORKERS,
                "`df -h /dev/shm` shows how full it is.",
            ),
        ),
        like="DataLoader worker (pid 4077) is killed by signal: Bus error",
        signs=(
            r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) is killed by signal: Bus error",
            r"unable to (?:write to file|mmap|open shared memory object|allocate shared memory)"
            r"[^\n]{0,12}</torch_\w+>[^\n]{0,40}(?:No space left on device|Cannot allocate memory)",
            r"unable to allocate shared memory\s?\(shm\)",
            r"Error while creating shared memory segment /dev/shm/nccl-\w+",
        ),
    ),
    Pattern(
        fault=Fault(
            id="loader_worker_killed",
            severity="error",
            title="A loader worker was killed",
            why="The kernel kills a process when the host's or the container's memory runs out.",
            mend=(
                _FEWER_WORKERS,
                "training.prefetch_factor=2 keeps fewer batches ahead.",
                "Give the container more memory (`--memory`), or the job (`--mem`).",
                "`dmesg | grep -i 'killed process'` confirms it.",
            ),
        ),
        like="DataLoader worker (pid 51123) is killed by signal: Killed",
        signs=(r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) is killed by signal: Killed",),
    ),
    Pattern(
        fault=Fault(
            id="loader_worker_crashed",
            severity="error",
            title="A loader worker died",
            why="Its own error stands above, or a library crashed in the copy of the process.",
            mend=(
                "See the error itself, in the main process: training.num_workers=0.",
                "Then fewer workers: training.num_workers=2.",
                "A library that does not survive a fork: `export TOKENIZERS_PARALLELISM=false`.",
            ),
        ),
        like="DataLoader worker (pid(s) 812) exited unexpectedly",
        signs=(
            r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) "
            r"(?:is killed by signal: (?:Segmentation fault|Aborted)|exited unexpectedly)",
        ),
    ),
    Pattern(
        fault=Fault(
            id="too_many_workers",
            severity="warning",
            title="More loader workers than cores",
            why="They take turns on the cores, and the training process waits with them.",
            mend=("training.num_workers=auto, which is cores − 2 and at most 8.",),
        ),
        like="This DataLoader will create 16 worker processes in total",
        signs=(r"This DataLoader will create \d+ worker processes in total",),
    ),
    Pattern(
        fault=Fault(
            id="too_many_open_files",
            severity="error",
            title="Too many open files",
            why="Every tensor on its way from a worker is an open file.",
            mend=(
                "`ulimit -n 65536` before the run.",
                _FEWER_WORKERS,
                "In a script of your own: "
                "torch.multiprocessing.set_sharing_strategy('file_system').",
            ),
        ),
        like="OSError: [Errno 24] Too many open files",
        signs=(
            r"\[Errno 24\] Too many open files",
            r"Too many open files\. Communication with the workers is no longer possible",
            r"received 0 items of ancdata",
        ),
    ),
    Pattern(
        fault=Fault(
            id="host_oom",
            severity="error",
            title="The host's memory ran out",
            why="The kernel or the scheduler kills the process, often without a line in its log.",
            mend=(
                "`dmesg | grep -i 'killed process'` shows who was killed and at what size.",
                "Give the container (`--memory`) or the job (`--mem`) more.",
                "Each loader worker is a process: training.num_workers=2 and "
                "training.prefetch_factor=2.",
                "Load the model once: fewer ranks on this machine, or a smaller one.",
            ),
        ),
        like="Memory cgroup out of memory: Killed process 8123 (python)",
        signs=(
            r"^(?:[\w./-]{1,80}: line \d+:\s+\d+ )?Killed(?=\s*$|\s{2,})",
            r"(?:Out of memory|Memory cgroup out of memory): Killed process \d+",
            r"oom-kill:constraint=CONSTRAINT_\w+",
            r"[Dd]etected \d+ oom[-_]kill event",
            r"exitcode\s*: -9\b",
            r"Signal 9 \(SIGKILL\) received by PID \d+",
            r"died with <Signals\.SIGKILL: 9>",
            r"DefaultCPUAllocator: can't allocate memory: you tried to allocate \d+ bytes",
            r"(?:_ArrayMemoryError|MemoryError): Unable to allocate [\d.]+ [KMGT]iB",
        ),
    ),
    Pattern(
        fault=Fault(
            id="disk_full",
            severity="error",
            title="The disk is full",
            why="A checkpoint or a cache could not be written.",
            mend=(
                "`df -h .` and free some space, or runs_dir=/path/with/space.",
                "training.keep_checkpoints=1 keeps fewer checkpoints.",
                "Caches elsewhere: `export HF_HOME=/path/with/space`.",
            ),
        ),
        like="OSError: [Errno 28] No space left on device",
        signs=(
            r"OSError: \[Errno 28\] No space left on device",
            r"PytorchStreamWriter failed writing file",
        ),
    ),
)
