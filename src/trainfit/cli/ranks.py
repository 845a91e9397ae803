"""Ranks of a command: --gpus and --nodes start torch's own launcher, which starts it on each GPU.

Where a launcher has started this process already (torchrun, or srun with a task per rank), it joins
the others instead.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import click

from trainfit.cli.main import INTERRUPTED, tell_notes
from trainfit.core.errors import BadInput, RunFailed, reason
from trainfit.core.libraries import safe_flags

_RESTARTS = 3
"""Restarts of a job on several machines, unless --max-restarts says otherwise."""
_PATIENCE = 600.0
"""Seconds in which a lost machine may come back."""
_EFFICIENCY = 0.8
"""Assumed speed of ranks that share a fold, by that of as many GPUs alone."""
_STOPPING = "300"
"""Seconds that ranks have for their checkpoint when they are asked to stop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedRanks:
    """Ranks that the options ask for."""

    gpus: str | None = None
    """all, a number, or GPUs by their numbers."""
    nodes: int = 1
    rdzv: str | None = None
    restarts: int | None = None

    def __post_init__(self) -> None:
        """Refuse words that cannot be meant, before torch is imported."""
        if self.gpus is not None and not re.fullmatch(r"all|[1-9]\d{0,3}|(\d+,)+\d*", self.gpus):
            raise BadInput(f"--gpus {self.gpus}", "give all, a number, or GPUs such as 0,2")
        if self.nodes > 1 and (self.rdzv is None or self.gpus is None):
            fix = "add --gpus all --rdzv HOST:PORT, the same on every machine, of the first one"
            raise BadInput(f"--nodes {self.nodes} without --gpus and --rdzv", fix)
        if self.rdzv is not None and not re.fullmatch(
            r"[\w.-]+:\d{1,5}|\[[\w:]+\]:\d{1,5}", self.rdzv
        ):
            raise BadInput(f"--rdzv {self.rdzv}", "give HOST:PORT, such as node1:29400")


def rank_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options about ranks; the command gets them as `ranks`."""

    @wraps(function)
    def run(
        gpus: str | None, nodes: int, rdzv: str | None, max_restarts: int | None, **given: Any
    ) -> Any:
        asked = AskedRanks(gpus=gpus, nodes=nodes, rdzv=rdzv, restarts=max_restarts)
        return function(ranks=asked, **given)

    for option in (
        click.option(
            "--max-restarts", type=click.IntRange(0, 1000), help="Restarts of ranks that died."
        ),
        click.option("--rdzv", metavar="HOST:PORT", help="Where the machines find each other."),
        click.option("--nodes", type=click.IntRange(1, 10_000), default=1, help="Machines to use."),
        click.option(
            "--gpus", metavar="all|N|0,2", help="GPUs of this machine; without any, CPU ranks."
        ),
    ):
        run = option(run)
    return run


def is_rank() -> bool:
    """Tell if a launcher has started this process as one of several ranks; join Slurm's."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return True
    variables = slurm_rank(os.environ)
    if variables:
        from trainfit.runtime.environment import set_variables

        set_variables(variables)
    return bool(variables)


def slurm_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for torch of a process that srun started as one of several tasks; empty for others.

    SLURM_STEP_… is of srun alone: the batch script has the other variables too, and is one process.
    """
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    nodes = int(environment.get("SLURM_STEP_NUM_NODES", "1"))
    if tasks == 1:
        return {}
    host = first_host(environment["SLURM_STEP_NODELIST"])
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(-(-tasks // nodes)),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(slurm_port(environment)),
    }


def with_slurm(asked: AskedRanks, environment: Mapping[str, str]) -> AskedRanks:
    """Meet the other machines where srun started one task with --gpus on each of them."""
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    alone = environment.get("SLURM_STEP_NUM_NODES") == str(tasks)
    if asked.gpus is None or asked.nodes > 1 or tasks == 1 or not alone:
        return asked
    host = first_host(environment["SLURM_STEP_NODELIST"])
    return replace(asked, nodes=tasks, rdzv=f"{host}:{slurm_port(environment)}")


def slurm_port(environment: Mapping[str, str]) -> int:
    """Port of a job's ranks: two jobs on one machine have two."""
    return 20_000 + int(environment.get("SLURM_JOB_ID", "0")) % 20_000


def first_host(nodes: str) -> str:
    """Return the first host of a list in Slurm's short form, such as gpu[03-06,9],login."""
    found = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\]([^,]*))?", nodes)
    if found is None:
        raise BadInput(f"cannot read the nodes {nodes!r}", "set MASTER_ADDR and RANK yourself")
    return "".join(part or "" for part in found.groups())


def launch(asked: AskedRanks, words: Sequence[str], config: Any) -> int | None:
    """Start the command on each rank and return its exit code; None where it is to run here."""
    asked = with_slurm(asked, os.environ)
    if (asked.nodes == 1 and is_rank()) or asked.gpus is None or "RANK" in os.environ:
        return None
    names = _chosen(asked.gpus)
    if not isinstance(names, int):
        if asked.nodes == 1 and (why := whole_folds(config, len(names))):
            from trainfit.runtime.environment import give_folds

            tell_notes(why)
            give_folds(names)
            return None
        _show(names)
    count = names if isinstance(names, int) else len(names)
    return None if count * asked.nodes == 1 else _launch(asked, count, words)


def workers_of(gpus: str | None, workers: int) -> int:
    """Return the workers of a study: --workers, or one for each of several GPUs."""
    if gpus is None:
        return workers
    names = _chosen(AskedRanks(gpus=gpus).gpus or "all", "workers")
    if not isinstance(names, int):
        _show(names)
        return workers or (len(names) if len(names) > 1 else 0)
    return workers or names


def whole_folds(config: Any, gpus: int) -> str:
    """Say why whole folds train on a GPU each; empty where all GPUs share each fold.

    Folds need no communication, but the last round may leave GPUs idle.
    """
    folds = getattr(getattr(config, "cv", None), "folds", None)
    if folds is None or gpus == 1 or config.tracking != "none":
        return ""
    if config.optimization.sharding not in ("auto", "none"):
        return ""
    rounds = -(-folds // gpus)
    if rounds * gpus * _EFFICIENCY > folds:
        return ""
    return (
        f"{folds} folds on {gpus} GPUs, each fold on one of them: {rounds} after another, without "
        f"communication; ranks would have to reach more than {folds / (rounds * gpus):.0%} of "
        f"{gpus} GPUs, and {_EFFICIENCY:.0%} is assumed"
    )


def _chosen(gpus: str, what: str = "ranks") -> tuple[str, ...] | int:
    import torch

    names, note = choose(gpus, torch.cuda.device_count(), os.environ, what)
    tell_notes(*filter(None, [note]))
    return names


def _show(names: Sequence[str]) -> None:
    from trainfit.runtime.environment import set_variables

    set_variables({"CUDA_VISIBLE_DEVICES": ",".join(names)})


def choose(
    gpus: str, there: int, environment: Mapping[str, str], what: str = "ranks"
) -> tuple[tuple[str, ...] | int, str]:
    """Return the names of the GPUs, or a number of CPU ranks, and a note on it."""
    named = environment.get("CUDA_VISIBLE_DEVICES", "")
    names = tuple(name for name in named.split(",") if name) or tuple(map(str, range(there)))
    if not there:
        listed = gpus.strip(",").split(",")
        count = 1 if gpus == "all" else len(listed) if "," in gpus else int(gpus)
        over = " over gloo" if what == "ranks" else ""
        many = f"one {what[:-1]}" if count == 1 else f"{count} {what}{over}"
        return count, f"there is no GPU here: {many} on the CPU"
    if gpus == "all":
        return names, ""
    listed = [number for number in gpus.split(",") if number]
    chosen = list(map(int, listed)) if "," in gpus else range(int(gpus))
    if max(chosen) >= there or len(set(chosen)) < len(chosen):
        has = "1 GPU" if there == 1 else f"{there} GPUs"
        raise BadInput(f"--gpus {gpus}, and this machine has {has}", "give fewer, or --gpus all")
    return tuple(names[number] for number in chosen), ""


def _launch(asked: AskedRanks, count: int, words: Sequence[str]) -> int:
    from trainfit.runtime.environment import set_variables

    set_variables(
        {
            # With a shared store, a machine that came back finds no one (docs/many-gpus.md).
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": _STOPPING,
        }
    )
    if asked.rdzv is not None and (name := interface_to(asked.rdzv)):
        set_variables({"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", name)})
    logging.disable(logging.ERROR)  # the launcher's; what ranks say is theirs
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return _run_agent(asked, count, words)
        except _lost_store() as error:
            # The machine with the meeting place is gone: wait for it to come back.
            if asked.nodes == 1 or time.monotonic() > deadline:
                raise RunFailed(
                    f"the machines do not meet at {asked.rdzv or 'this one'} ({reason(error)})",
                    "start the same command on each, and open the port between them",
                ) from None
            time.sleep(1)


def _lost_store() -> tuple[type[Exception], ...]:
    from torch.distributed import DistError
    from torch.distributed.elastic.rendezvous import RendezvousError

    return DistError, RendezvousError


def _run_agent(asked: AskedRanks, count: int, words: Sequence[str]) -> int:
    """Run torch's launcher to its end, and turn its errors into an exit code."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    usual = _RESTARTS if asked.nodes > 1 else 0
    config = LaunchConfig(
        min_nodes=asked.nodes,
        max_nodes=asked.nodes,
        nproc_per_node=count,
        run_id="trainfit" if asked.rdzv else f"trainfit-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint=asked.rdzv or "localhost:0",
        rdzv_configs={} if asked.rdzv is None else {"is_host": str(is_here(asked.rdzv))},
        local_addr=None if asked.rdzv is None else own_address(asked.rdzv),
        max_restarts=usual if asked.restarts is None else asked.restarts,
    )
    try:
        elastic_launch(config, sys.executable)(*safe_flags(), "-m", "trainfit", *words)
    except ChildFailedError as error:
        return _exit_code(error)
    except SignalException:
        return INTERRUPTED
    return 0


def _resolved(rdzv: str) -> tuple[socket.AddressFamily, Any]:
    host, _, port = rdzv.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    except OSError as error:
        raise BadInput(f"--rdzv {rdzv} ({reason(error)})", "give a name that resolves") from None
    return found[0][0], found[0][4]


def own_address(rdzv: str) -> str:
    """Address of this machine that reaches the rendezvous; its name may mean a loopback."""
    family, place = _resolved(rdzv)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # sends nothing, only chooses the interface
        return str(probe.getsockname()[0])


def is_here(rdzv: str) -> bool:
    """True if the rendezvous is an address of this machine."""
    family, place = _resolved(rdzv)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((place[0], 0))
        except OSError:
            return False
        return True


def interface_to(rdzv: str) -> str | None:
    """Name of the network interface that reaches the rendezvous; None where none is found."""
    import psutil

    own = own_address(rdzv)
    found = psutil.net_if_addrs().items()
    return next((name for name, each in found if any(a.address == own for a in each)), None)


def _exit_code(error: Any) -> int:
    """Exit code of the job; ranks have said what was wrong, unless one was killed."""
    codes = [failure.exitcode for failure in error.failures.values()]
    rank, first = error.get_first_failure()
    for code in (2, INTERRUPTED):
        if code in codes:
            return code
    if first.exitcode < 0:
        name = signal.Signals(-first.exitcode).name
        raise RunFailed(f"rank {rank} was ended by {name}", "continue with --resume")
    return 1
