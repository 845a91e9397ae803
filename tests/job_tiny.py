"""Small jobs that train in a second: invented files of ReDSM5's form, a tiny encoder, a plan."""

from __future__ import annotations

import csv
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainfit.core.plan_records import Plan, RuntimeSettings, TaskSpec
from trainfit.core.records import HardwareProfile
from trainfit.data.redsm5 import CRITERIA
from trainfit.hardware import detect
from trainfit.jobs import job_plan
from trainfit.packing import cut_ladder, ladder
from trainfit.planning import planner
from trainfit.planning.question import Question

SECRET = "zyxquabberword"
"""Stands in one post, and must stand in no file of a run."""
_TREES = "alder birch cedar dogwood elm fir ginkgo hazel ivy juniper kapok larch maple"
_WORDS = _TREES.split(" ")


def write_redsm5(folder: Path, posts: int = 60, seed: int = 0) -> Path:
    """Posts of a few words; a post that names criterion k's word gives evidence of it."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    texts, marks = [], []
    for number in range(posts):
        post_id = f"s_{number}_{number % 7}"
        words = [_WORDS[k] for k in random.integers(9, len(_WORDS), 6)]
        for k in np.flatnonzero(random.random(9) < 0.3):
            words.insert(int(random.integers(len(words))), _WORDS[k])
            marks.append((post_id, f"{post_id}_1", "x", CRITERIA[k].symptom, 1, "x"))
        texts.append((post_id, " ".join([*words, SECRET] if number == 3 else words)))
    header = ("post_id", "sentence_id", "sentence_text", "DSM5_symptom", "status", "explanation")
    _write(folder / "redsm5_posts.csv", ("post_id", "text"), texts)
    _write(folder / "redsm5_annotations.csv", header, marks)
    return folder


def write_texts(path: Path, rows: int, seed: int = 0, classes: int = 2) -> Path:
    random = np.random.default_rng(seed)
    labels = random.integers(classes, size=rows)
    texts = [
        " ".join([_WORDS[int(label)], *(_WORDS[k] for k in random.integers(5, 13, 4))])
        for label in labels
    ]
    _write(path, ("text", "label"), list(zip(texts, labels.tolist(), strict=True)))
    return path


def write_pairs(path: Path, rows: int, seed: int = 0) -> Path:
    """Pairs whose second text names the first's tree, or another."""
    random = np.random.default_rng(seed)
    made = []
    for number in range(rows):
        first, second = random.integers(3, size=2)
        label = "same" if first == second else "other"
        tail = " ".join(random.choice(["juniper", "kapok"], 3))
        made.append((number, f"{_WORDS[first]} {tail}", f"maple {_WORDS[second]}", label))
    _write(path, ("id", "premise", "hypothesis", "label"), made)
    return path


def _write(path: Path, header: tuple[str, ...], rows: list[Any]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


TINY_BERT: dict[str, Any] = {
    "model_type": "bert",
    "vocab_size": 400,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
}


def tiny_model(folder: Path) -> Path:
    """A BERT of one layer, by its config alone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY_BERT))
    return folder


def quick_plan(
    question: Question,
    profile: HardwareProfile,
    *,
    memory_gib: float | None = None,
    ranks: int = 1,
    **_more: Any,
) -> Plan:
    """What the planner says on a CPU, without asking for memory in a process of its own."""
    effective = question.pinned("effective_batch_size") or question.workload.effective_batch_size
    cap = (question.pinned("batch_size") or effective) * question.workload.max_length
    first, *others = question.folds
    cuts = ladder(first, effective, cap, padded=True, ranks=ranks, folds=others)
    return Plan(
        fits=True,
        task=TaskSpec(factory=question.factory, arguments=question.arguments),
        workload=question.workload,
        gpu=None,
        ranks=ranks,
        precision="fp32",
        quantization=question.pinned("quantization") or "none",
        runtime=RuntimeSettings(
            seed=question.pinned("seed"), num_threads=question.pinned("num_threads")
        ),
        packed=False,
        attention="sdpa",
        batch_size=question.pinned("batch_size") or effective,
        micro_batch_tokens=cuts[0].tokens,
        gradient_accumulation_steps=cuts[0].micro_batches,
        effective_batch_size=effective,
        cuts=tuple(cut.micro_batches for cut in cuts),
        gradient_checkpointing=question.pinned("gradient_checkpointing") or "none",
        compile=False,
        compile_mode="default",
        optimizer=question.pinned("optimizer") or "adamw_fused",
        num_workers=0,
        pin_memory=False,
        persistent_workers=False,
        prefetch_factor=None,
        eval_batch_size=question.pinned("eval_batch_size") or 64,
        memory=None,
        time=None,
    )


def be_quick(patch: pytest.MonkeyPatch) -> None:
    """Plan without a second process, look at the hardware once, and at the same lengths once."""
    patch.setattr(planner, "plan", quick_plan)
    patch.setattr(job_plan, "detect", detect_once)
    patch.setattr(cut_ladder, "sample_parts", sample_once)


detect_once = cache(detect)
_SAMPLED: dict[tuple[Any, ...], Any] = {}


def sample_once(lengths: Any, *how: Any, sample: Any = cut_ladder.sample_parts) -> Any:
    key = (lengths.tobytes(), *how)
    if key not in _SAMPLED:
        _SAMPLED[key] = sample(lengths, *how)
    return _SAMPLED[key]


def words(tmp: Path, *more: str) -> list[str]:
    """Overrides of a job that is over in a second."""
    return [
        f"model.name={tiny_model(tmp / 'model')}",
        "model.weights=random",
        "model.method=full",
        f"runs_dir={tmp / 'runs'}",
        "training.learning_rate=0.003",
        "training.num_epochs=2",
        "device.deterministic=true",
        "baselines=false",
        *more,
    ]


def nli_words(tmp: Path, *more: str) -> list[str]:
    data = tmp / "data"
    if not data.is_dir():
        write_redsm5(data)
    return words(tmp, f"data.data_dir={data}", "data.max_length=80", *more)


def packed_bytes(weights: int, rows: int, kind: str) -> int:
    """Bytes of a quantized matrix with so many weights in `rows` rows."""
    if kind == "int8":
        return weights + 4 * rows
    blocks = -(-weights // 64)  # 64 codes of half a byte share a scale, 256 scales another one
    return blocks * 33 + 4 * (-(-blocks // 256) + 1)
