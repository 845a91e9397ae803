"""Two machines: network namespaces with addresses of their own.

Where the kernel has netem, their link has latency and loss.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from job_tiny import nli_words

PLACE = "10.77.{}.1:29411"
BACK = 120
"""Seconds from a machine's return to the end of the run."""
WORDS = (
    "training.num_epochs=3",
    "training.effective_batch_size=16",
    "training.checkpoint_steps=4",
    "training.eval_steps=50",
    "tune=off",
)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Machines:
    """Two namespaces, joined by a pair of interfaces."""

    def __init__(self) -> None:
        self.net = os.getpid() % 250
        self.names = [f"tf{os.getpid()}{side}" for side in "ab"]

    def build(self) -> None:
        cables = [f"v{os.getpid()}{side}" for side in "ab"]
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for number, (name, cable) in enumerate(zip(self.names, cables, strict=True), start=1):
            ip("link", "set", cable, "netns", name)
            ip("-n", name, "addr", "add", f"10.77.{self.net}.{number}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
            netem = ["qdisc", "add", "dev", cable, "root", "netem", "delay", "1ms", "loss", "0.1%"]
            subprocess.run(["tc", "-n", name, *netem], capture_output=True)

    def remove(self) -> None:
        for number, name in enumerate(self.names):
            self.kill(number)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def start(self, number: int, words: list[str]) -> subprocess.Popen[str]:
        options = ["--gpus", "1", "--nodes", "2", "--rdzv", PLACE.format(self.net)]
        inside = ["ip", "netns", "exec", self.names[number]]
        return subprocess.Popen(
            [*inside, sys.executable, "-m", "trainfit", *words, *options],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def kill(self, number: int) -> None:
        """Kill every process of a machine, as a lost one does: without a word."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.names[number]], capture_output=True, text=True
        )
        for pid in found.stdout.split():
            os.kill(int(pid), signal.SIGKILL)


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("iproute2 is not installed")
    made = Machines()
    try:
        made.build()
    except subprocess.CalledProcessError as error:
        made.remove()
        pytest.skip(f"no network namespaces here ({error.stderr.decode().strip()})")
    yield made
    made.remove()


def words_of(tmp: Path, name: str) -> list[str]:
    words = [word for word in nli_words(tmp, *WORDS) if not word.startswith("runs_dir")]
    return ["train", "nli", *words, f"runs_dir={tmp / name}"]


def ended(process: subprocess.Popen[str], seconds: float) -> str:
    said, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, said
    return said


def exported(root: Path) -> dict[str, bytes]:
    [folder] = root.glob("*/export")
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.fixture(scope="module")
def undisturbed(machines: Machines, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("machines")
    both = [machines.start(number, words_of(folder, "whole")) for number in range(2)]
    for process in both:
        ended(process, 150)
    return folder


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lost", [1, 0], ids=["the second", "the first"])
def test_a_machine_that_is_lost_comes_back_and_the_run_ends_with_the_same_bits(
    machines: Machines, undisturbed: Path, lost: int
) -> None:
    name = f"lost-{lost}"
    words = words_of(undisturbed, name)
    both = [machines.start(number, words) for number in range(2)]
    until = time.monotonic() + 120
    root = undisturbed / name
    while not any(root.glob("*/checkpoints/step-*")) and time.monotonic() < until:
        time.sleep(0.05)
    machines.kill(lost)
    both[lost].communicate()
    time.sleep(3)
    back = time.monotonic()
    both[lost] = machines.start(lost, words)
    said = [ended(process, BACK) for process in both]
    assert time.monotonic() - back < BACK
    [run] = root.iterdir()
    assert "from step-" in (run / "train.log").read_text(), said
    assert exported(root) == exported(undisturbed / "whole")
