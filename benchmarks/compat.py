"""Run a smoke set of commands at the lowest and the highest versions that trainfit takes.

    python benchmarks/compat.py --output FILE [--only lowest]     # also: make compat

Each environment is a fresh venv with trainfit's own wheel and the versions named here; all other
libraries, torch among them, are those of the Python that runs this. Nothing large is downloaded.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

from result_files import ROOT, recorded, table

ENVIRONMENTS: dict[str, dict[str, str]] = {
    "lowest": {
        "transformers": "5.1.0",
        "peft": "0.18.0",
        "optuna": "4.0.0",
        "tokenizers": "0.22.0",
    },
    "pinned": {},
    "highest": {
        "transformers": "5.22.2",
        "huggingface_hub": "2.4.0",
        "httpx2": "",
        "httpcore2": "",
        "truststore": "",
    },
}
"""Libraries that differ from those of constraints.txt; "" is any version of what others need."""
SHOWN = ("torch", "transformers", "peft", "optuna", "tokenizers", "huggingface_hub")
_TINY = ("model.name=modernbert-tiny", "model.weights=random", "baselines=false")
_TRAIN = ("train", "textclass", "data.train=train.csv", *_TINY, "training.num_epochs=1")
_SPACE = ("training.learning_rate=interval(1e-4,1e-3)", "hpo.trials=2", "cv.folds=2")
CHECKS: dict[str, tuple[str, ...]] = {
    "plan": ("plan", "nli", "--gpu", "t4", "model.name=modernbert-tiny", "model.method=dora"),
    "train": (*_TRAIN, "runs_dir=full"),
    "train LoRA": (*_TRAIN, "model.method=lora", "runs_dir=lora"),
    "predict": ("predict", "full", "--text", "a good film"),
    "predict LoRA": ("predict", "lora", "--text", "a good film"),
    "hpo": ("hpo", "nli", *_SPACE, "training.num_epochs=1", "--workers", "1"),
    "verify": ("verify", "--", "python", "trainer.py"),
    "doctor": ("doctor", "--json"),
}
"""Command of each check; `full` and `lora` stand for the runs that were trained before."""
TRAINER = """
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from trainfit.integrations import TrainfitCallback

size = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
model = BertForSequenceClassification(BertConfig(vocab_size=32, **size))
rows = [{"input_ids": torch.arange(1, 9), "labels": torch.tensor(0)}] * 16
arguments = TrainingArguments("out", max_steps=8, per_device_train_batch_size=2, report_to=[],
    use_cpu=True, disable_tqdm=True, save_strategy="no")
callback = TrainfitCallback(warm_up=2)
Trainer(model, arguments, train_dataset=rows, callbacks=[callback]).train()
assert callback.receipt is not None
"""


def build_wheel(folder: Path) -> Path:
    """Build trainfit's wheel."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT]
    subprocess.run(command, check=True)
    [wheel] = folder.glob("*.whl")
    return wheel


def make_environment(folder: Path, packages: list[str]) -> Path:
    """Make a venv with these packages alone on top of the libraries of this Python."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps"]
    subprocess.run([*pip, *packages], check=True)
    [site] = folder.glob("lib/python*/site-packages")
    # A folder that a .pth file names comes last, and .pth files in it are not read.
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def run(python: Path, words: tuple[str, ...], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run trainfit's command of an environment, away from the checkout."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")
    surroundings = {name: value for name, value in os.environ.items() if name not in hidden}
    surroundings |= {"OMP_NUM_THREADS": "1", "TRAINFIT_CACHE": str(folder / "cache")}
    command = [str(python.with_name("trainfit")), *words]
    return subprocess.run(
        command, cwd=folder, env=surroundings, capture_output=True, text=True, timeout=600
    )


def prepare(folder: Path) -> None:
    """Write the table and the script that the checks use."""
    folder.mkdir(exist_ok=True)
    (folder / "trainer.py").write_text(TRAINER)
    with (folder / "train.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        for number in range(120):
            word = "good" if number % 2 else "bad"
            rows.writerow([f"a {word} film, number {number}", word])


def check(python: Path, folder: Path, name: str) -> dict[str, Any]:
    """Run one check; its seconds, and the last line of an error."""
    runs = {path.parent.name: str(path) for path in folder.glob("*/textclass-*")}
    there = {"python": str(python), **runs}
    words = CHECKS[name]
    begun = time.perf_counter()
    swapped = tuple(there.get(word, word) for word in words)
    done = run(python, swapped, folder)
    found: dict[str, Any] = {"command": " ".join(words), "exit_code": done.returncode}
    found["seconds"] = round(time.perf_counter() - begun, 1)
    if done.returncode:
        found["error"] = (done.stderr.strip().splitlines() or [""])[-1]
    return found


def versions(python: Path) -> dict[str, str]:
    """Versions of the libraries in an environment."""
    code = "import json, sys; from importlib.metadata import version\n"
    code += "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    command = [str(python), "-c", code, "trainfit", *SHOWN]
    told: dict[str, str] = json.loads(subprocess.check_output(command, text=True))
    return told


def measure(name: str, wheel: Path, folder: Path) -> dict[str, Any]:
    """Make one environment and run every check in it."""
    pins = [f"{key}=={value}" if value else key for key, value in ENVIRONMENTS[name].items()]
    python = make_environment(folder / "venv", [str(wheel), *pins])
    work = folder / "work"
    prepare(work)
    checks = {}
    for one in CHECKS:
        checks[one] = check(python, work, one)
        print(name, one, checks[one], file=sys.stderr, flush=True)
    return {"name": name, "versions": versions(python), "checks": checks}


def _cell(found: dict[str, Any]) -> str:
    return "failed" if found["exit_code"] else "works"


def compat_table() -> str:
    """Versions, and what works with them: a column for each environment."""
    made = recorded("compat-cpu")["environments"]
    libraries = [[name, *(each["versions"][name] for each in made)] for name in SHOWN]
    checks = [[name, *(_cell(each["checks"][name]) for each in made)] for name in CHECKS]
    return table(["", *(each["name"] for each in made)], [*libraries, *checks])


TABLES = {"compat": compat_table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", choices=list(ENVIRONMENTS), action="append")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build_wheel(folder)
        made = []
        for each in given.only or ENVIRONMENTS:
            (folder / each).mkdir()
            made.append(measure(each, wheel, folder / each))
    record = {
        "command": "python benchmarks/compat.py --output FILE",
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version(), "system": platform.system()},
        "environments": made,
    }
    if given.output:
        given.output.write_text(json.dumps(record, indent=1) + "\n")
    failed = [f"{e['name']}: {n}" for e in made for n, c in e["checks"].items() if c["exit_code"]]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
