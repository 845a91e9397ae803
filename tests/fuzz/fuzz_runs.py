"""Runs, exports, studies and caches that were whole, and logs."""

from __future__ import annotations

import random

from fuzz_case import FIFO, FOLDER, LOOP, ZERO, Case, Edit, Special, kind
from fuzz_damage import DAMAGES
from fuzz_templates import TINY
from fuzz_values import TEXTS

_READERS = [
    ["report", "runs/run"],
    ["report", "runs/run", "--json"],
    ["report", "runs/run", "--format", "markdown"],
    ["report", "runs/run", "runs/run"],
    ["watch", "runs/run", "--once"],
    ["watch", "runs/run", "--json"],
    ["watch", "--once"],
    ["verify", "runs/run"],
    ["verify", "runs/run", "--json"],
    ["doctor", "--run", "runs/run"],
    ["doctor", "--run", "runs/run", "--json"],
]


def _edits(chosen: random.Random, among: list[str]) -> tuple[Edit, ...]:
    count = chosen.choice([1, 1, 1, 2])
    hows = ["json", "json", *DAMAGES]
    return tuple(
        Edit(chosen.choice(hows), chosen.randrange(2**32), chosen.choice(among))
        for _ in range(count)
    )


@kind(20)
def damaged_runs(chosen: random.Random) -> Case:
    task = chosen.choice(["nli", "textclass", "gpt"])
    argv = chosen.choice([*_READERS, ["train", task, "--resume", "runs/run"]])
    among = ["runs/run/*", "runs/run/*.json", "runs/run/*.jsonl", "runs/run/**/*"]
    return Case(argv, template=task, edits=_edits(chosen, among))


@kind(8)
def damaged_exports(chosen: random.Random) -> Case:
    task = chosen.choice(["nli", "textclass", "gpt"])
    if task == "gpt":
        argv = ["sample", "runs/run", "--tokens", "2"]
    else:
        argv = ["predict", "runs/run", "--text", "alder birch"]
    return Case(argv, template=task, edits=_edits(chosen, ["runs/run/**/*"]))


@kind(5)
def damaged_checkpoints(chosen: random.Random) -> Case:
    task = chosen.choice(["nli", "gpt"])
    gone = Edit("delete", 0, "result.json")
    edits = (gone, *_edits(chosen, ["runs/run/checkpoints/**/*", "runs/run/*"]))
    argv = ["train", task, "--resume", "runs/run"]
    return Case(argv, template=task, edits=edits)


@kind(4)
def damaged_studies(chosen: random.Random) -> Case:
    argv = chosen.choice(
        [
            ["hpo", "status"],
            ["hpo", "status", "s"],
            ["hpo", "status", "s", "--json"],
            ["hpo", "best", "s"],
            ["hpo", "status", "nowhere"],
            ["report", "runs/hpo-s"],
            ["report", "runs/hpo-s", "--json"],
        ]
    )
    return Case(argv, template="study", edits=_edits(chosen, ["runs/hpo.db", "runs/hpo-s/*"]))


@kind(5)
def damaged_caches(chosen: random.Random) -> Case:
    """A damaged cache is made anew: the command works."""
    task = chosen.choice(["textclass", "gpt", "nli"])
    argv = ["train", task, "--dry-run", *TINY[task], "runs_dir=runs"]
    edits = _edits(chosen, ["cache/**/*"])
    return Case(argv, template=task, edits=edits, expect="ok")


_LOGS: list[bytes | Special] = [
    b"",
    bytes(5000),
    bytes(range(256)) * 100,
    b"CUDA out of memory\n" * 10000,
    b"x" * (3 << 20),
    b"RuntimeError: " + b"CUDA error: " * 20000,
    b"\x1b[31m" * 50000,
    "Traceback\n\ud800\n".encode("utf-8", "surrogatepass"),
    "loss nan\n".encode("utf-16"),
    FIFO,
    FOLDER,
    LOOP,
    ZERO,
]


@kind(4)
def logs(chosen: random.Random) -> Case:
    more = chosen.choice([[], ["--json"]])
    return Case(["doctor", "--log", "l.txt", *more], files={"l.txt": chosen.choice(_LOGS)})


@kind(6)
def run_names(chosen: random.Random) -> Case:
    names = [text for text in TEXTS if text != "auto"]  # which would begin a training
    name = chosen.choice([*names, "runs", "runs/nowhere", "r" * 300, "a/" * 3000, "l"])
    argv = chosen.choice(
        [
            ["report", name],
            ["verify", name],
            ["watch", name, "--once"],
            ["predict", name, "--text", "x"],
            ["sample", name],
            ["doctor", "--run", name],
            ["train", "nli", "--resume", name],
            ["hpo", "status", name],
            ["hpo", "best", name],
        ]
    )
    files: dict[str, bytes | str | Special] = {"l": LOOP} if name == "l" else {}
    return Case(argv, files=files, expect="refused" if not name.startswith("-") else "any")
