"""Several ranks: NCCL, the meeting of ranks, torchrun."""

from __future__ import annotations

from trainfit.doctor.finding import Fault
from trainfit.doctor.patterns.pattern import Pattern

_TELL = "`export NCCL_DEBUG=INFO` for one run: its last WARN line is the cause."

PATTERNS = (
    Pattern(
        fault=Fault(
            id="nccl_duplicate_gpu",
            severity="error",
            title="Two ranks are on one GPU",
            why="NCCL needs a GPU of its own for each rank.",
            mend=(
                "`torchrun --nproc-per-node` must not be more than the GPUs that are visible.",
                "In a script of your own: torch.cuda.set_device(int(os.environ['LOCAL_RANK'])).",
                "`unset CUDA_VISIBLE_DEVICES`, or list every GPU.",
            ),
        ),
        like="Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 3b000",
        signs=(r"Duplicate GPU detected\s?: rank \d+ and rank \d+ both on CUDA device \w+",),
    ),
    Pattern(
        fault=Fault(
            id="nccl_timeout",
            severity="error",
            title="A rank waited for the others until NCCL's timeout",
            why="One rank died, hangs, or took another way through the code than the rest.",
            mend=(
                "Look at the other ranks' logs: the one that did not come has the cause, often "
                "running out of memory.",
                "Ranks must take the same number of steps and evaluations.",
                "`export TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1` for one "
                "run shows where each one stood.",
                _TELL,
                "`export NCCL_P2P_DISABLE=1` for one run, where GPUs without NVLink hang at once.",
            ),
        ),
        like="Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8121, …)",
        signs=(
            r"Watchdog caught collective operation timeout: WorkNCCL\([^)\n]{0,200}\)",
            r"Process group watchdog thread terminated with exception",
            r"Some NCCL operations have failed or timed out",
        ),
    ),
    Pattern(
        fault=Fault(
            id="nccl_error",
            severity="error",
            title="NCCL failed",
            why="A system call, a CUDA call or a peer failed in a collective operation.",
            mend=(
                _TELL,
                "System error: /dev/shm too small (`--shm-size=8g`), or the wrong interface "
                "(`export NCCL_SOCKET_IFNAME=eth0`; `ip -brief link` lists them).",
                "CUDA error: see whether each rank has its own GPU with free memory "
                "(`nvidia-smi`).",
                "Remote error: another rank died first; its log has the cause.",
                "Every machine must have the same torch and NCCL.",
            ),
        ),
        like="ncclSystemError: System call or external library call failed",
        signs=(
            r"(?:NCCL error[^\n]{0,120}|nccl\w*: )unhandled (?:system|cuda) error",
            r"nccl(?:SystemError|UnhandledCudaError|InternalError|InvalidUsage|RemoteError):",
            r"NCCL communicator was aborted on rank \d+",
        ),
    ),
    Pattern(
        fault=Fault(
            id="rendezvous",
            severity="error",
            title="The ranks did not find each other",
            why="The address or port of the first rank is wrong, taken or closed.",
            mend=(
                "A port that is taken: `torchrun --master-port 29501`, or end the earlier run.",
                "Several machines: the first one's address in `--rdzv-endpoint HOST:29500`, open "
                "in the firewall.",
                "On one machine: `torchrun --standalone --nproc-per-node 2 -m trainfit train nli`.",
            ),
        ),
        like="The server socket has failed to listen on … EADDRINUSE",
        signs=(
            r"The (?:client|server) socket has failed to (?:connect to|listen on|bind to)"
            r"[^\n]{0,80}\(errno: \d+ - [A-Z][a-z ]+\)",
            r"EADDRINUSE",
            r"DistStoreError: Timed out after \d+ seconds waiting for clients",
        ),
    ),
    Pattern(
        fault=Fault(
            id="child_failed",
            severity="error",
            title="A rank failed, and its error is not in this log",
            why="torchrun only passes on that a process ended.",
            mend=(
                "Look at that rank's own log: `torchrun --log-dir logs --redirects 3` keeps them.",
                "Run it alone, without torchrun, to see the error itself.",
            ),
        ),
        like="torch.distributed.elastic.multiprocessing.errors.ChildFailedError",
        signs=(
            r"torch\.distributed\.elastic\.multiprocessing\.errors\.ChildFailedError",
            r"multiprocessing\.api:failed \(exitcode: -?\d+\)",
        ),
        symptom=True,
    ),
)
