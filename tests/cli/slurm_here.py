"""A Slurm of one machine, in a folder of its own: munged, slurmctld and slurmd."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
PATH = f"/usr/sbin:/sbin:{os.environ['PATH']}"


def lacking() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Slurm:
    """Daemons of one cluster; they end with `stop`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env: Mapping[str, str] = os.environ | {
            "PATH": PATH,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
        }
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        folder, host = self.folder, platform.node()
        for name in ("state", "spool"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        munge = ["--key-file", "--socket", "--pid-file", "--log-file", "--seed-file"]
        files = (key, *(folder / f"munge.{end}" for end in ("sock", "pid", "log", "seed")))
        words = [f"{option}={path}" for option, path in zip(munge, files, strict=True)]
        (folder / "slurm.conf").write_text(
            f"""ClusterName=trainfit
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder / "munge.sock"},cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SlurmctldPort={_free_port()}
SlurmdPort={_free_port()}
SlurmctldPidFile={folder / "slurmctld.pid"}
SlurmdPidFile={folder / "slurmd.pid"}
SlurmdSpoolDir={folder / "spool"}
StateSaveLocation={folder / "state"}
ReturnToService=2
JobRequeue=1
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
        )
        self._daemon("munged", "--foreground", "--force", *words)
        time.sleep(1)
        self._daemon("slurmctld", "-D")
        self._daemon("slurmd", "-D")
        until = time.monotonic() + 30
        while "idle" not in self.run("sinfo", "-h", "-o", "%t"):
            if time.monotonic() > until:
                raise RuntimeError(self.run("sinfo") + self._logs())
            time.sleep(0.5)

    def stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def run(self, *words: str) -> str:
        done = subprocess.run(words, env=self.env, capture_output=True, text=True)
        return done.stdout + done.stderr

    def _daemon(self, *words: str) -> None:
        log = (self.folder / f"{words[0]}.out").open("wb")
        self._daemons.append(
            subprocess.Popen(words, env=self.env, stdout=log, stderr=subprocess.STDOUT)
        )

    def _logs(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("*.out"))
