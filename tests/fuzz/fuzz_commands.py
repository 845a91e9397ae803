"""Commands and their options, and the environment."""

from __future__ import annotations

import random

from fuzz_case import FIFO, FOLDER, LOOP, Case, Special, kind
from fuzz_templates import TINY
from fuzz_values import ANY_VALUES, TEXTS

_NUMBERS = ["nan", "inf", "-inf", "1e400", "-1", "0", str(10**30), "1e30", "x", "", "9" * 400]
_PATHS = ["", "\0", "o" * 300, "a/" * 3000, "/dev/full", "/dev/null", "/", ".", "loop", "fifo"]
_OPTIONS: dict[str, dict[str, list[str]]] = {
    "plan": {
        "--gpu": [*TEXTS, "t4", "nowhere"],
        "--model": [*TEXTS, "nowhere", "a/b", "model"],
        "--memory": _NUMBERS,
        "--watts": _NUMBERS,
        "--price": _NUMBERS,
        "--format": ["table", "json", "hf", "lightning", "accelerate", "hydra", "shell", "", "x"],
        "--plot": [*_PATHS, "p.svg", "p.xyz"],
        "--config": _PATHS,
    },
    "check": {"--gpu": [*TEXTS, "t4", "list", "nowhere"]},
    "predict": {
        "--text": TEXTS,
        "--criterion": TEXTS,
        "--file": _PATHS,
        "--text-column": TEXTS,
        "--output": [*_PATHS, "o.csv", "o.json", "o" * 300 + ".csv", "/dev/full/x.csv"],
        "--format": ["table", "json", "jsonl", "csv", "", "x"],
    },
    "sample": {
        "--prompt": TEXTS,
        "--tokens": ["1", "2", *_NUMBERS],
        "--temperature": _NUMBERS,
        "--top-k": ["1", *_NUMBERS],
        "--seed": [*_NUMBERS, str(2**63), str(2**64)],
    },
    "report": {"--output": [*_PATHS, "r.html", "o" * 300 + ".html"], "--format": ["json", "x", ""]},
    "watch": {"--every": _NUMBERS},
    "verify": {"--output": _PATHS},
    "init": {"--output": [*_PATHS, "c.yaml"]},
    "tune": {"--minutes": ["nan", "-1", "0", "x", "-inf", ""]},
    "train": {"--resume": TEXTS, "--config": _PATHS},
    "doctor": {"--log": _PATHS, "--run": TEXTS},
    "completion": {},
    "run": {"--only": TEXTS, "--without": TEXTS},
    "export": {"--json": ["", "x"], "--push-to-hub": [*TEXTS, "a/b", "a/b/c"]},
}
_ARGUMENTS: dict[str, list[str]] = {
    "plan": ["gpt", *TINY["gpt"]],
    "check": [],
    "predict": ["runs/run"],
    "sample": ["runs/run"],
    "report": ["runs/run"],
    "watch": ["runs/run", "--once"],
    "verify": ["runs/run"],
    "init": ["nli"],
    "tune": ["gpt", *TINY["gpt"]],
    "train": ["gpt", "--dry-run"],
    "doctor": [],
    "completion": ["bash"],
    "run": [],
    "export": ["runs/run"],
}
_TEMPLATES = {"predict": "textclass"}


@kind(20)
def options(chosen: random.Random) -> Case:
    command = chosen.choice(sorted(set(_OPTIONS) - {"completion"}))
    known = _OPTIONS[command]
    argv = [command, *_ARGUMENTS[command]]
    for option in chosen.sample(sorted(known), min(len(known), chosen.choice([1, 1, 2]))):
        argv += [option, chosen.choice(known[option])]
    if command == "doctor" and not {"--log", "--run"} & set(argv):
        argv += ["--log", "nowhere"]
    if command == "predict" and not {"--text", "--file"} & set(argv):
        argv += ["--text", "alder"]
    if command == "sample" and "--tokens" not in argv:
        argv += ["--tokens", "2"]
    files: dict[str, bytes | str | Special] = {"loop": LOOP, "fifo": FIFO}
    return Case(argv, template=_TEMPLATES.get(command, "gpt"), files=files)


@kind(8)
def short_words(chosen: random.Random) -> Case:
    """Data by position, and options that stand for keys, or nearly."""
    known = ["--data", "--model", "--output", "--epochs", "--batch-size", "--lr"]
    argv = ["config", chosen.choice(["nli", "textclass", "gpt"])]
    for option in chosen.sample([*known, "--batch_size", "--learning-rate"], chosen.choice([1, 2])):
        argv += [option, chosen.choice([*_NUMBERS, *_PATHS, *TEXTS])]
    if chosen.random() < 0.5:
        argv.append(chosen.choice([*_PATHS, *TEXTS]))
    return Case(argv)


@kind(8)
def command_lines(chosen: random.Random) -> Case:
    """Commands, tasks and flags in any order."""
    command = chosen.choice([*_OPTIONS, "config", "hpo", "prepare", "", "nowhere", "x" * 5000])
    if command in ("doctor", "check", "tune"):  # these would look at the machine
        command = "config"
    rest = chosen.choices(
        [
            "--help",
            "--json",
            "--version",
            "--nowhere",
            "-x",
            "--",
            "-",
            "nli",
            "seed=1",
            *chosen.sample(ANY_VALUES, 4),
        ],
        k=chosen.randrange(4),
    )
    if command == "train":
        rest.append("--dry-run")
    if command in ("verify", "run") and "--" in rest:
        rest.remove("--")
    return Case([command, *rest])


_CACHES: dict[str, Special | bytes | None] = {
    "file": b"x",
    "loop": LOOP,
    "fifo": FIFO,
    "": None,
    "rel/ative": None,
    "/proc/nowhere": None,
    "/dev/null": None,
    "/dev/null/x": None,
    "c" * 300: None,
    "c/" * 3000: None,
    "~": None,
    "\udcff": None,
    "folder": FOLDER,
}


@kind(6)
def caches(chosen: random.Random) -> Case:
    """A cache that cannot be used costs time, and no run."""
    name = chosen.choice(sorted(_CACHES))
    content = _CACHES[name]
    task = chosen.choice(["textclass", "gpt", "nli"])
    argv = ["train", task, "--dry-run", *TINY[task], "runs_dir=runs"]
    files = {} if content is None else {name: content}
    return Case(argv, template=task, files=files, env={"TRAINFIT_CACHE": name}, expect="ok")


_VARIABLES = [
    "TRAINFIT_CACHE",
    "XDG_CACHE_HOME",
    "HOME",
    "PYTORCH_CUDA_ALLOC_CONF",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "LANG",
    "LC_ALL",
    "COLUMNS",
    "LINES",
    "TERM",
    "NO_COLOR",
    "FORCE_COLOR",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TMPDIR",
    "TRAINFIT_SOAK",
]


@kind(6)
def environments(chosen: random.Random) -> Case:
    name = chosen.choice(_VARIABLES)
    values = [value for value in [*TEXTS, *_NUMBERS] if "\0" not in value]
    argv = chosen.choice(
        [
            ["config", "nli"],
            ["check", "--gpu", "t4"],
            ["init", "gpt", "--output", "o.yaml"],
            ["train", "gpt", "--dry-run", *TINY["gpt"], "runs_dir=runs"],
            ["report", "runs/run"],
            ["watch", "runs/run", "--once"],
        ]
    )
    return Case(argv, template="gpt", env={name: chosen.choice(values)})
