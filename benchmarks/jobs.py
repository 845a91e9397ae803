"""Whole jobs by the clock: trainfit's command line beside a plain Trainer script.

The clock runs from the start of the process to its exit. Both get the same pretrained folder
(random weights of the real shape), the same files, folds, epochs, batch, learning rate and length,
each run in a fresh process. trainfit is the plain command with the words that a user would write,
its caches empty in the first round and kept in the next ones. The Trainer script is
trainer_job.py. Rounds alternate, and each run is written down as it ends.

python benchmarks/jobs.py JOB --out FILE [--rounds 2] [--only trainfit] [--warm] [--tiny]
python benchmarks/jobs.py --cpu --out FILE         the embedded NLI job, on this CPU
python benchmarks/jobs.py steps --out FILE --models bert --batches 16 64

One call is one JOB, and adds a record to FILE. --warm keeps the caches of an earlier call with the
same --scratch, so that rounds can be spread over calls. --tiny shows in a minute that all works.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

HERE = Path(__file__).parent
BATCHES = (16, 32, 64, 128)
LIBRARIES = (
    *("trainfit", "torch", "triton", "transformers", "tokenizers", "safetensors", "peft"),
    *("accelerate", "huggingface_hub", "numpy", "scipy", "sklearn", "pandas", "sympy", "networkx"),
    *("hydra", "omegaconf", "antlr4", "optuna", "sqlalchemy", "click", "rich", "jinja2"),
)
MODELS = {
    "bert": "bert-base",
    "deberta": "deberta-v3-base",
    "gemma": "gemma-3-1b-it",
    "modernbert": "modernbert-base",
}
_SPACE = (
    "training.learning_rate=tag(log,interval(5e-6,3e-5))",
    "training.weight_decay=tag(log,interval(0.001,0.1))",
    "training.warmup_ratio=interval(0.05,0.15)",
    "training.scheduler=linear,cosine",
)
_FIXED = ("model.pooling=first", "model.head_dropout=0.1", "model.feed_forward_dropout=0.1")
"""Keys of the default search space that Trainer's classifier does not have."""


class Setting(NamedTuple):
    """A setting of the Trainer script."""

    precision: str
    workers: int
    threads: int | None = None
    """None: as torch chooses."""

    @property
    def name(self) -> str:
        threads = f", {self.threads} thread" if self.threads else ""
        return f"{self.precision}, {self.workers} workers{threads}"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that both contenders do."""

    title: str
    command: str = "train nli"
    kind: str = "pairs"
    model: str = ""
    posts: int = 1484
    """Posts or texts."""
    folds: int | None = None
    epochs: int = 1
    batch: int = 64
    method: str = "full"
    pooling: str | None = None
    """Pooling of the Trainer script's classifier; None: that of transformers' own head."""
    learning_rate: float = 2e-5
    patience: int | None = None
    """Evaluations without a better one that end a fold; None: in so few epochs none would."""
    max_length: int = 512
    scale: str = "full"
    max_steps: int | None = None
    words: tuple[str, ...] = ()
    data_words: tuple[str, ...] = ()
    """Words that decide which samples there are, beside `words`."""
    tokens: int = 0
    trials: int = 0
    notes: str = ""
    """What a reader of the record must know."""
    settings: tuple[Setting, ...] = (Setting("bf16", 8),)
    """Settings of the Trainer script; the best of several counts."""


JOBS = {
    "bert": Job(title="BERT-base, 5 folds × 3 epochs", model="bert-base", folds=5, epochs=3),
    "deberta": Job(
        title="DeBERTa-v3-base, 5 folds × 3 epochs", model="deberta-v3-base", folds=5, epochs=3
    ),
    "gemma": Job(
        title="Gemma-3-1B with DoRA, 400 posts, 5 folds × 1 epoch",
        model="gemma-3-1b-it",
        posts=400,
        folds=5,
        batch=32,
        method="dora",
    ),
    "frozen": Job(
        title="Gemma-3-1B frozen, 400 posts, 5 folds × 3 epochs",
        model="gemma-3-1b-it",
        posts=400,
        folds=5,
        epochs=3,
        batch=32,
        method="frozen",
    ),
    "modernbert": Job(
        title="ModernBERT-base, 8,000 texts, 3 epochs",
        command="train textclass",
        kind="texts",
        model="modernbert-base",
        posts=8000,
        epochs=3,
    ),
    "gpt124": Job(
        title="GPT-2 124M, 300 steps of 64 × 1,024 tokens",
        command="train gpt",
        kind="tokens",
        tokens=24 * 2**20,
        max_length=1024,
        max_steps=300,
        learning_rate=6e-4,
    ),
    "hpo": Job(
        title="DeBERTa-v3-base, 12 trials × 3 folds × 1 epoch",
        command="hpo nli",
        model="deberta-v3-base",
        folds=3,
        trials=12,
        words=("data.negative_ratio=1", "hpo.pruner=none", *_FIXED, *_SPACE),
        data_words=("data.negative_ratio=1",),
    ),
    "embedded": Job(
        title="the embedded NLI job, 5 folds, on the CPU",
        model="modernbert-tiny",
        scale="small",
        posts=1000,
        folds=5,
        epochs=14,
        batch=32,
        pooling="max",  # as the experiment has it
        learning_rate=3e-3,
        patience=3,
        max_length=64,
        words=("hardware=auto", "cv.folds=5"),
        data_words=("experiment=nli_embedded",),
        notes="Trainer's classifier pools by the maximum and stops early, as trainfit's does.",
        settings=(Setting("fp32", 0), Setting("fp32", 0, 1), Setting("bf16", 0)),
    ),
    "steps": Job(title="samples per second by batch", posts=400, words=("baselines=false",)),
}


def tiny_job(name: str) -> Job:
    """The job in the smallest size that still has all of its parts."""
    job = JOBS[name]
    small = replace(
        job,
        epochs=1,
        tokens=2**16,
        max_length=64,
        scale="small",
        max_steps=job.max_steps and 12,
        trials=job.trials and 2,
    )
    if name == "embedded":
        return small
    posts = 300 if job.kind == "texts" else 60
    return replace(small, posts=posts, batch=8, folds=job.folds and 2)


@dataclass
class Bench:
    """A call of this script: what it was asked for, and the record that it writes."""

    job: Job
    name: str
    scratch: Path
    out: Path
    rounds: int
    tiny: bool
    warm: bool
    only: str | None
    limit: float | None
    record: dict[str, Any] = field(default_factory=dict)
    failed: bool = False

    def keep(self, run: dict[str, Any]) -> None:
        """Add a run to the record, and write the file."""
        from trainfit.core.files import write_whole

        self.failed |= "error" in run
        self.record.setdefault("runs", []).append(run)
        earlier = json.loads(self.out.read_text())["records"] if self.out.exists() else []
        others = [one for one in earlier if one.get("id") != self.record["id"]]
        content = {"records": [*others, self.record]}
        write_whole(self.out, json.dumps(content, indent=1) + "\n")
        long = ("stages", "plan_time", "trials", "folds")
        shown = {name: value for name, value in run.items() if name not in long}
        print(json.dumps(shown), flush=True)


# ── the two contenders ────────────────────────────────────────────────────────────────────────


def trainfit_words(bench: Bench, job: Job, runs: Path) -> list[str]:
    """The command line after `trainfit`, as a user would write it."""
    data, size = data_folder(bench, job), f"training.effective_batch_size={job.batch}"
    words = [*job.command.split(), f"runs_dir={runs}"]
    if bench.name == "embedded":
        tiny = ("training.num_epochs=1",) if bench.tiny else ()
        return [*words, *job.words, *tiny]
    if job.kind == "tokens":
        shape = "gpt-tiny" if bench.tiny else "gpt-124m"
        words += [f"data.data_dir={data}", f"model.name={shape}", size]
        words += ["training.warmup_steps=30", f"training.learning_rate={job.learning_rate}"]
    else:
        pairs = job.kind == "pairs"
        source = f"data.data_dir={data}" if pairs else f"data.train={data / 'texts.csv'}"
        batch = f"training.effective_batch_size={','.join(map(str, batches(job)))}"
        frozen = job.method == "frozen"
        words += [source, f"model.name={model_folder(bench, job)}", batch if job.trials else size]
        words += ["model.freeze_encoder=true"] if frozen else [f"model.method={job.method}"]
        words += [f"training.num_epochs={job.epochs}", f"data.max_length={job.max_length}"]
    if job.kind == "tokens" and bench.tiny:
        words += [f"data.max_length={job.max_length}"]
    if job.folds:
        words += [f"cv.folds={job.folds}"]
    if job.max_steps:
        words += [f"training.max_steps={job.max_steps}"]
    if job.trials:
        words += [f"hpo.trials={job.trials}", "hpo.study=jobs"]
    return [*words, *job.words]


def run_trainfit(bench: Bench, job: Job, cold: bool) -> dict[str, Any]:
    """A run of the command, with what its folder says about it."""
    runs = bench.scratch / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    caches = bench.scratch / "caches" / bench.name / "trainfit"
    words = [sys.executable, "-m", "trainfit", *trainfit_words(bench, job, runs)]
    found = timed(bench, words, caches, cold)
    if "error" not in found:
        found |= read_study(bench, runs) if job.trials else read_folder(runs, job)
    if stages := found.get("stages"):
        stages["exit"] = max(0.0, found["seconds"] - sum(stages.values()))
    shutil.rmtree(runs, ignore_errors=True)
    return {"who": "trainfit", **found}


def read_folder(runs: Path, job: Job) -> dict[str, Any]:
    """Time line, prediction and score of the run in a folder of runs."""
    from trainfit.runs import timeline
    from trainfit.runs.reader import finite, read_run

    [folder] = (path.parent for path in runs.glob("*/run.json"))
    read = read_run(folder)
    plan = json.loads((folder / "plan.json").read_text())
    time_ = plan.get("time") or {}
    per_fold = time_.get("total_seconds")
    whole = time_.get("job_seconds") or (per_fold and per_fold * (job.folds or 1))
    updates = [row for row in read.timeline if row["stage"] == timeline.FIRST_UPDATE]
    warm_ups = [
        row["begin"] + row["seconds"]
        for row in read.timeline
        if row["stage"] in ("capture", "compile") and row["fold"] == updates[0]["fold"]
    ]
    rates = [finite(part.train, "samples_per_second", start=1) for part in read.parts]
    settled = [float(rate) for part in rates for rate in part[len(part) // 4 :]]
    results = read.results
    return {
        "first_update_seconds": updates[0]["begin"],
        "full_speed_seconds": max([updates[0]["begin"], *warm_ups]),
        "predicted_seconds": whole,
        "plan_time": time_,
        "plan": {name: plan.get(name) for name in ("batch_size", "compile", "packed", "precision")},
        "stages": timeline.seconds_by_stage(read.timeline),
        "samples_per_second": median(settled) if settled else None,
        "f1": results.get("metrics", {}).get("f1"),
        "steps": sum(int(part.result.get("steps") or 0) for part in read.parts),
        "val_loss": results.get("val_loss"),
        "events": sum(len(part.events) for part in read.parts),
    }


def read_study(bench: Bench, runs: Path) -> dict[str, Any]:
    """Trials of the study, which the other script is given too."""
    words = ["hpo", "status", "jobs", "--json", "--storage", f"sqlite:///{runs / 'hpo.db'}"]
    said = subprocess.run(
        [sys.executable, "-m", "trainfit", *words], capture_output=True, text=True, check=True
    )
    trials = json.loads(said.stdout)["trials"]
    trials_file(bench).write_text(json.dumps([one["params"] for one in trials]))
    result = json.loads((runs / "hpo-jobs" / "result.json").read_text())
    kept = ("params", "value", "state", "seconds")
    shown = [{name: one[name] for name in kept} for one in trials]
    return {"trials": shown, "f1": result["best"]["test"]["f1"]}


def trials_file(bench: Bench) -> Path:
    return bench.scratch / "trials.json"


def run_trainer(bench: Bench, job: Job, cold: bool, setting: Setting) -> dict[str, Any]:
    """A run of the Trainer script."""
    scratch = bench.scratch / "trainer"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    if job.trials and not trials_file(bench).exists():
        trials_file(bench).write_text("[]")
    spec = {
        "job_kind": "study" if job.trials else job.kind,
        "kind": job.kind,
        "model": str(model_folder(bench, job)),
        "data": str(data_folder(bench, job)),
        "parts": str(parts_file(bench, job)),
        "scratch": str(scratch),
        "result": str(scratch / "result.json"),
        "trials_file": str(trials_file(bench)),
        "trials": job.trials,
        "batches": batches(job),
        "epochs": job.epochs,
        "batch": job.batch,
        "max_steps": job.max_steps,
        "max_length": job.max_length,
        "method": job.method,
        "pooling": job.pooling,
        "learning_rate": job.learning_rate,
        "patience": job.patience,
        "precision": setting.precision,
        "workers": 0 if bench.tiny else setting.workers,
        "threads": setting.threads,
        "seed": 42,
        **gpt_spec(bench.tiny),
    }
    (scratch / "spec.json").write_text(json.dumps(spec))
    words = [sys.executable, str(HERE / "trainer_job.py"), str(scratch / "spec.json")]
    found = timed(bench, words, bench.scratch / "caches" / bench.name / "trainer", cold)
    result = scratch / "result.json"
    said = json.loads(result.read_text()) if result.exists() else {}
    shutil.rmtree(scratch, ignore_errors=True)
    said.pop("seconds", None)
    return {"who": "trainer", "setting": setting.name, **said, **found}


def gpt_spec(tiny: bool) -> dict[str, Any]:
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 64} if tiny else {}
    return {
        "shape": shape,
        "vocabulary": 512 if tiny else 50_304,
        "evaluated": 16 if tiny else 3200,
        "compile": not tiny,
    }


def timed(
    bench: Bench,
    words: list[str],
    caches: Path,
    cold: bool,
    enough: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """Seconds of a fresh process from its start to its exit; it is stopped once it has `enough`."""
    if cold:
        shutil.rmtree(caches, ignore_errors=True)
    environment = os.environ | {
        "TRAINFIT_CACHE": str(caches / "trainfit"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "true",
        # Bytecode belongs to an installation, and not to the job: pip writes it.
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(bench.scratch / "bytecode"),
    }
    if bench.tiny:
        environment |= {"CUDA_VISIBLE_DEVICES": ""}
    log = bench.scratch / "output.log"
    load = os.getloadavg()[0]
    before = cpu_seconds()
    with log.open("w") as output:
        environment["JOB_BEGAN"] = str(time.time())
        began = time.monotonic()
        process = subprocess.Popen(
            words,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=bench.scratch,
            start_new_session=True,
        )
        try:
            if enough is not None:
                stop_after(process, enough, bench.limit)
            code: int | None = process.wait(bench.limit)
            code = code if enough is None else 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its loader processes too
            process.wait()
            code = None
        seconds = time.monotonic() - began
    found: dict[str, Any] = {
        "cache": "cold" if cold else "warm",
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds() - before, 2),
        "load_average": round(load, 2),
    }
    if code != 0:
        end = log.read_text(errors="replace")[-1500:]
        found["error"] = f"stopped after {bench.limit} s" if code is None else f"exit {code}: {end}"
    return found


def cpu_seconds() -> float:
    """CPU seconds of all children so far: on a busy machine they vary less than the clock."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def stop_after(
    process: subprocess.Popen[bytes], enough: Callable[[], bool], limit: float | None
) -> None:
    """Interrupt a process, as a person would, once it has done enough."""
    ends = time.monotonic() + (limit or math.inf)
    while process.poll() is None and time.monotonic() < ends:
        if enough():
            process.send_signal(signal.SIGINT)
            return
        time.sleep(0.2)


# ── files ─────────────────────────────────────────────────────────────────────────────────────


def data_folder(bench: Bench, job: Job) -> Path:
    return bench.scratch / "data" / f"{job.kind}-{job.scale}-{job.tokens or job.posts}"


def model_folder(bench: Bench, job: Job) -> Path:
    size = "tiny-" if bench.tiny else ""
    return bench.scratch / "models" / f"{size}{job.model}"


def parts_file(bench: Bench, job: Job) -> Path:
    return bench.scratch / f"parts-{bench.name}-{data_folder(bench, job).name}.json"


def batches(job: Job) -> list[int]:
    return [job.batch // 2, job.batch, 2 * job.batch]


def make_files(bench: Bench, jobs: list[Job]) -> None:
    """Make the models and the data in a child, which also brings all libraries into memory."""
    job = jobs[0]
    folds = [f"cv.folds={job.folds}"] if job.folds else []
    spec = {
        "kind": job.kind,
        "data": str(data_folder(bench, job)),
        "parts": str(parts_file(bench, job)),
        "models": {str(model_folder(bench, one)): one.model for one in jobs},
        "posts": job.posts,
        "scale": job.scale,
        "tokens": job.tokens,
        "data_words": [*job.data_words, *folds],
        "nested": not job.trials,
        "tiny": bench.tiny,
    }
    path = bench.scratch / "files.json"
    path.write_text(json.dumps(spec))
    libraries = "import torch, transformers, sklearn.metrics, peft, accelerate, trainfit.cli.train"
    subprocess.run([sys.executable, "-c", libraries], check=False)
    compile_libraries(bench)
    subprocess.run([sys.executable, str(HERE / "job_files.py"), str(path)], check=True)


def compile_libraries(bench: Bench) -> None:
    """Compile what the contenders import to bytecode, as an installation by pip has it."""
    prefix = bench.scratch / "bytecode"
    if prefix.exists():
        return
    specs = filter(None, map(importlib.util.find_spec, LIBRARIES))
    folders = [place for spec in specs for place in spec.submodule_search_locations or ()]
    environment = os.environ | {"PYTHONPYCACHEPREFIX": str(prefix), "PYTHONDONTWRITEBYTECODE": ""}
    words = [sys.executable, "-m", "compileall", "-q", "-j", "0", *folders]
    subprocess.run(words, env=environment, check=False, capture_output=True)


# ── the rounds ────────────────────────────────────────────────────────────────────────────────


def whole_job(bench: Bench) -> None:
    """Rounds of both contenders in turn."""
    make_files(bench, [bench.job])
    slower: set[Setting] = set()
    for number in range(bench.rounds):
        cold = number == 0 and not bench.warm
        if bench.only != "trainer":
            bench.keep({"round": number + 1, **run_trainfit(bench, bench.job, cold)})
        if bench.only == "trainfit":
            continue
        settings = [each for each in bench.job.settings if each not in slower]
        took: dict[Setting, float] = {}
        for each in settings:
            found = run_trainer(bench, bench.job, cold, each)
            bench.keep({"round": number + 1, **found})
            took[each] = float("inf") if "error" in found else found["seconds"]
        slower |= {each for each in settings if took[each] > min(took.values())}


def step_speeds(bench: Bench, models: list[str], sizes: list[int]) -> None:
    """Speed of the steps by model and effective batch, by the runs' own metrics."""
    jobs = list(step_jobs(bench, models, sizes))
    make_files(bench, [job for _, job in jobs])
    for model, job in jobs:
        about = {"model": model, "batch": job.batch, "steps": job.max_steps}
        if bench.only != "trainer":
            bench.keep(about | run_trainfit(bench, job, cold=False))
        if bench.only != "trainfit":
            bench.keep(about | run_trainer(bench, job, False, job.settings[0]))


def step_jobs(bench: Bench, models: list[str], sizes: list[int]) -> Iterator[tuple[str, Job]]:
    for model in models:
        gemma = model == "gemma"
        samples, least, method = (4096, 60, "dora") if gemma else (12_288, 120, "full")
        for size in sizes:
            steps = 12 if bench.tiny else max(least, samples // size)
            quiet = (f"training.eval_steps={steps}", "training.eval_iters=1")
            changes: dict[str, Any] = {"batch": size, "max_steps": steps, "method": method}
            quiet += ("training.logging_steps=2",) if bench.tiny else ()
            words = (*bench.job.words, *quiet)
            yield model, replace(bench.job, model=MODELS[model], words=words, **changes)


def hardware() -> str:
    """Name of the GPU, or of the processor."""
    try:
        import pynvml

        pynvml.nvmlInit()
        name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
        pynvml.nvmlShutdown()
        return str(name)
    except Exception:  # noqa: BLE001 - no driver, no library, no GPU: the CPU trains
        return platform.processor() or "CPU"


def versions() -> dict[str, str]:
    from trainfit import __version__

    names = ("torch", "transformers", "peft", "accelerate", "optuna")
    found = {"python": platform.python_version(), "trainfit": __version__}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = [name for name in JOBS if name != "embedded"]
    parser.add_argument("job", nargs="?", choices=names, metavar="JOB", help=", ".join(names))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=("trainfit", "trainer"))
    parser.add_argument("--warm", action="store_true", help="keep the caches of an earlier call")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on the CPU")
    parser.add_argument("--cpu", action="store_true", help="the embedded NLI job, on the CPU")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", nargs="*", type=int, default=list(BATCHES))
    parser.add_argument("--scratch", type=Path, help="where models and data are kept")
    parser.add_argument("--limit", type=float, help="most seconds of one run")
    parser.add_argument("--words", nargs="*", default=[], help="further words for trainfit")
    given = parser.parse_args()
    if (given.job is None) is not given.cpu:
        parser.error("give a JOB, or --cpu")
    return given


def main() -> int:
    given = asked()
    roots = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    os.environ["PYTHONPATH"] = os.pathsep.join(str(Path(root).resolve()) for root in roots)
    name = given.job or "embedded"
    job = tiny_job(name) if given.tiny else JOBS[name]
    job = replace(job, words=(*job.words, *given.words))
    scratch = given.scratch or Path(tempfile.gettempdir()) / "trainfit-jobs"
    scratch.mkdir(parents=True, exist_ok=True)
    if given.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    bench = Bench(
        job=job,
        name=name,
        scratch=scratch.resolve(),
        out=given.out,
        rounds=given.rounds,
        tiny=given.tiny,
        warm=given.warm,
        only=given.only,
        limit=given.limit,
    )
    bench.record = {
        "id": f"{name}-{time.strftime('%Y%m%d-%H%M%S')}",
        "job": name,
        "title": job.title,
        "command": " ".join(["python", "benchmarks/jobs.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": "CPU" if given.cpu or given.tiny else hardware(),
        "cores": os.cpu_count(),
        "versions": versions(),
        "tiny": given.tiny,
        "trainfit_words": trainfit_words(bench, job, Path("runs")),
        "notes": job.notes,
    }
    if name == "steps":
        step_speeds(bench, given.models, given.batches)
    else:
        whole_job(bench)
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
