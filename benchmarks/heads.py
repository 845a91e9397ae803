"""Speed of training each kind of head: trainfit's plain command beside transformers' Trainer.

The same model folder (random weights of the real shape), the same rows, as long as ReDSM5's posts,
the same batch and longest sequence. Three epochs of 50 steps: the first is the warm-up, and the
figure is that of the other two, so that both have trained on the same samples. trainfit runs as
its plain command in a fresh process; Trainer's settings come one after the other in another one,
and its best counts. `trainfit-long` is the plain command of a job of 10,000 steps, as many as a
third of MNLI has, which pays compiling back: it is stopped after 300, and the last 200 are timed.

python benchmarks/heads.py JOB MODEL --out FILE [--settings grouped compiled] [--rounds 1] [--tiny]

One call is one JOB with one MODEL, and adds a record to FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from head_files import file_of, write_parts
from jobs import HERE, Bench, Job, hardware, timed, versions


class Head(NamedTuple):
    """A job: its command, and the kind of its data, by which Trainer's script knows its head."""

    title: str
    command: tuple[str, ...]
    """Words after `trainfit train`; the first is the task."""
    kind: str


HEADS = {
    "pairs": Head("pairs of texts, a class each", ("pairs",), "pairs"),
    "multilabel": Head("texts, several labels each", ("textclass", "data.target=multi"), "labels"),
    "tokens": Head("words, a tag each", ("tokens",), "tags"),
}
MODELS = {"bert": "bert-base", "modernbert": "modernbert-base"}
GROUPED = {"train_sampling_strategy": "group_by_length"}
TRAINER: dict[str, dict[str, Any]] = {
    "padded": {"train_sampling_strategy": "random"},
    "grouped": GROUPED,
    "compiled": {**GROUPED, "torch_compile": True},
}
"""Arguments of Trainer by setting, beside bf16, TF32, fused AdamW and padding to the longest."""
TRAINFIT = {"trainfit": 150, "trainfit-long": 10_000}
"""Steps of the job; a short one is not compiled."""
WARM_UP, STOP = 100, 300
"""Steps of a long job that are not timed, and after which it is stopped."""
SETTINGS = (*TRAINFIT, *TRAINER)


class Size(NamedTuple):
    """Batch, rows of each part, longest sequence."""

    batch: int
    parts: tuple[int, int, int]
    max_length: int

    @property
    def epoch(self) -> int:
        return self.parts[0] // self.batch


# 50 batches are what Trainer sorts by length at once.
FULL, TINY = Size(32, (1600, 64, 64), 512), Size(8, (160, 16, 16), 64)
EPOCHS = 3


def command(
    head: Head, size: Size, data: Path, model: Path, runs: Path, steps: int | None = None
) -> list[str]:
    """The command line after `trainfit`: a job of so many steps, evaluated at its end."""
    train, validation, test = (
        str(file_of(data, head.kind, part)) for part in ("train", "validation", "test")
    )
    steps = steps or EPOCHS * size.epoch
    task, *more = head.command
    return [
        *("train", task, train, *more, "--model", str(model), "--output", str(runs)),
        *("--batch-size", str(size.batch), f"data.max_length={size.max_length}"),
        *(f"data.validation={validation}", f"data.test={test}", "baselines=false"),
        *(f"training.max_steps={steps}", f"training.eval_steps={steps}"),
    ]


def run_trainfit(
    bench: Bench, size: Size, words: list[str], runs: Path, *, long: bool
) -> dict[str, Any]:
    """A run of the command, and the speed that its own rows tell."""
    shutil.rmtree(runs, ignore_errors=True)
    stop, warm_up = (size.epoch * STOP // 50, size.epoch * WARM_UP // 50) if long else (0, None)
    enough = (lambda: steps_done(runs) >= stop) if long else None
    words = [sys.executable, "-m", "trainfit", *words]
    found = timed(bench, words, bench.scratch / "caches", False, enough)
    if "error" not in found:
        found |= read_speed(runs, size, warm_up)
    shutil.rmtree(runs, ignore_errors=True)
    return found


def steps_done(runs: Path) -> int:
    """Steps that the one run of a folder has logged so far."""
    from trainfit.core.errors import TrainfitError
    from trainfit.runs.reader import read_run

    try:
        [folder] = (path.parent for path in runs.glob("*/run.json"))
        [part] = read_run(folder).parts
        return int(part.train["step"][-1])
    except (TrainfitError, ValueError, LookupError, OSError):
        return 0  # it has not begun


def read_speed(runs: Path, size: Size, warm_up: int | None = None) -> dict[str, Any]:
    """Samples per second of the steps after a warm-up, which is the first epoch by itself."""
    warm_up = size.epoch if warm_up is None else warm_up
    from trainfit.runs.reader import read_run

    [folder] = (path.parent for path in runs.glob("*/run.json"))
    read = read_run(folder)
    [part] = read.parts
    rows = zip(part.train["step"], part.train["samples_per_second"], strict=True)
    rates = [float(rate) for step, rate in rows if step > warm_up]
    plan = json.loads((folder / "plan.json").read_text())
    names = ("batch_size", "compile", "cuda_graph", "packed", "precision", "checkpointing")
    return {
        # Rows are of equally many samples.
        "samples_per_second": len(rates) / sum(1 / rate for rate in rates),
        "timed_steps": int(part.train["step"][-1]) - warm_up,
        "rows": rates,
        "peak_gib": float(part.train["memory_gib"][-1]),
        "losses": [float(loss) for loss in part.train["loss"]],
        "plan": {name: plan.get(name) for name in names},
        "events": [event.kind for event in part.events],
    }


def run_trainer(bench: Bench, spec: dict[str, Any]) -> dict[str, Any]:
    """Each setting's outcome, by name."""
    scratch = bench.scratch / "trainer"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    files = {"scratch": str(scratch), "result": str(scratch / "result.json")}
    (scratch / "spec.json").write_text(json.dumps(spec | files))
    words = [sys.executable, str(HERE / "trainer_head.py"), str(scratch / "spec.json")]
    whole = timed(bench, words, bench.scratch / "caches", cold=False)
    result = Path(files["result"])
    said = json.loads(result.read_text()) if result.exists() else {"settings": {}}
    missing = {"error": whole.get("error", "no result")}
    return {
        name: {"mean_tokens": said.get("mean_tokens"), **said["settings"].get(name, missing)}
        for name in spec["settings"]
    }


def compare(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """trainfit's slowest run of each job beside Trainer's fastest."""
    rates = [(run["setting"], run["samples_per_second"]) for run in runs if "error" not in run]
    theirs = [(rate, name) for name, rate in rates if name in TRAINER]
    if not theirs:
        return {}
    best, name = max(theirs)
    ours = {job: [rate for one, rate in rates if one == job] for job in TRAINFIT}
    times = {job: min(found) / best for job, found in ours.items() if found}
    return {"best_trainer": name, "times_as_fast": times}


def race(bench: Bench, head: Head, size: Size, model: str, settings: list[str]) -> None:
    """Rounds of trainfit and Trainer in turn."""
    data, runs = bench.scratch / f"data-{head.kind}", bench.scratch / "runs"
    folder = bench.scratch / "models" / model
    write_parts(data, head.kind, size.parts, tiny=bench.tiny)
    if not (folder / "tokenizer.json").exists():
        words = [sys.executable, str(HERE / "head_files.py"), model, str(folder)]
        subprocess.run([*words, *(["--tiny"] if bench.tiny else [])], check=True)
    commands = {
        name: command(head, size, data, folder, runs, size.epoch * steps // 50)
        for name, steps in TRAINFIT.items()
        if name in settings
    }
    bench.record["trainfit_words"] = {
        name: [word.replace(f"{bench.scratch}/", "") for word in words]
        for name, words in commands.items()
    }
    spec = {
        "kind": head.kind,
        "data": str(file_of(data, head.kind, "train")),
        "model": str(folder),
        "settings": {name: TRAINER[name] for name in TRAINER if name in settings},
        "steps": EPOCHS * size.epoch,
        "warm_up": size.epoch,
        "batch": size.batch,
        "max_length": size.max_length,
        "workers": 0 if bench.tiny else 8,
        "seed": 42,
    }
    for number in range(1, bench.rounds + 1):
        for name, words in commands.items():
            found = run_trainfit(bench, size, words, runs, long=name == "trainfit-long")
            keep(bench, {"round": number, "setting": name, **found})
        if spec["settings"]:
            for name, found in run_trainer(bench, spec).items():
                keep(bench, {"round": number, "setting": name, **found})


def keep(bench: Bench, run: dict[str, Any]) -> None:
    """Add a run to the record, with the comparison so far."""
    bench.record |= compare([*bench.record.get("runs", ()), run])
    bench.keep(run)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("job", choices=HEADS)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on the CPU")
    parser.add_argument("--scratch", type=Path, help="where models and data are kept")
    parser.add_argument("--limit", type=float, help="most seconds of one process")
    given = parser.parse_args()
    roots = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    os.environ["PYTHONPATH"] = os.pathsep.join(str(Path(root).resolve()) for root in roots)
    head, size = HEADS[given.job], TINY if given.tiny else FULL
    scratch = given.scratch or Path(tempfile.gettempdir()) / "trainfit-heads"
    scratch = scratch.resolve() / ("tiny" if given.tiny else "full")
    scratch.mkdir(parents=True, exist_ok=True)
    bench = Bench(
        job=Job(title=head.title),
        name=given.job,
        scratch=scratch,
        out=given.out,
        rounds=given.rounds,
        tiny=given.tiny,
        warm=True,
        only=None,
        limit=given.limit,
    )
    bench.record = {
        "id": f"{given.job}-{given.model}-{time.strftime('%Y%m%d-%H%M%S')}",
        "job": given.job,
        "title": head.title,
        "model": MODELS[given.model],
        "command": " ".join(["python", "benchmarks/heads.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": "CPU" if given.tiny else hardware(),
        "cores": os.cpu_count(),
        "versions": versions(),
        "tiny": given.tiny,
        "batch": size.batch,
        "max_length": size.max_length,
        "trainer_settings": TRAINER,
    }
    race(bench, head, size, MODELS[given.model], given.settings)
    shown = {name: bench.record.get(name) for name in ("best_trainer", "times_as_fast")}
    print(json.dumps(shown), flush=True)
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
