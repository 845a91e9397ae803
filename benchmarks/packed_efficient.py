"""Packed rows by torch's memory-efficient kernel against padded rows by the same, in fp16.

    python benchmarks/packed_efficient.py --out FILE [--steps 30] [--rounds 3] [--tiny]

About 10 s for each of the 9 arms on a GPU, 2 minutes in all. The same words again go on where a
call ended; no arm begins after `--seconds`.

BERT-base with random weights and lengths as ReDSM5's, 16 sequences per step, in turns: `padded`
(four micro-batches of like length, as a plan would cut them), `packed` (one row of one width) and
`packed_flash` (the same by the flash kernel, which such a GPU has not). FILE holds the seconds of
every step, memory, the kernels that ran and the largest difference of the losses. --tiny shows on a
CPU that all works; padded rows alone run there.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainfit.engine.loop_settings import OptimizerSettings
from trainfit.engine.optimizer import build_optimizer
from trainfit.engine.step import loss_scale, plain_step
from trainfit.jobs.job_plan import assumed_lengths
from trainfit.jobs.models.classifier import build_classifier
from trainfit.jobs.models.classifier_settings import ClassifierSettings
from trainfit.jobs.probes import loss
from trainfit.measuring.evidence import attention_of
from trainfit.measuring.trace import Profiling

LONGEST, SEQUENCES, MICRO_BATCHES, WARM_UP = 512, 16, 4, 5
ARMS = {"padded": "masked", "packed": "varlen_efficient", "packed_flash": "varlen"}
"""Path of attention by arm."""
TINY = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
Batch = dict[str, Any]


def steps_of(count: int, longest: int) -> list[list[np.ndarray]]:
    """Random sequences of each step, the longest first."""
    draws = np.random.default_rng(0)
    lengths = draws.choice(np.asarray(assumed_lengths("nli", longest)), (count, SEQUENCES))
    return [
        [draws.integers(5, 90, size) for size in sorted(row.tolist(), reverse=True)]
        for row in lengths
    ]


def padded(step: list[np.ndarray], device: str) -> list[Batch]:
    """Micro-batches of like length, each padded to its longest sequence."""
    size = -(-len(step) // MICRO_BATCHES)
    parts = [step[at : at + size] for at in range(0, len(step), size)]
    return [_padded(part, device) for part in parts]


def _padded(rows: list[np.ndarray], device: str) -> Batch:
    ids = torch.zeros(len(rows), len(rows[0]), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = torch.from_numpy(row)
        mask[place, : len(row)] = 1
    labels = torch.tensor([len(row) % 2 for row in rows])
    found = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {name: value.to(device) for name, value in found.items()}


def packed(step: list[np.ndarray], width: int, device: str) -> list[Batch]:
    """One row with all sequences end to end, and filler up to `width`."""
    ids = torch.zeros(1, width, dtype=torch.long)
    joined = np.concatenate(step)
    ids[0, : len(joined)] = torch.from_numpy(joined)
    starts = np.cumsum([0, *(len(row) for row in step)])
    labels = torch.tensor([len(row) % 2 for row in step])
    found = {
        "input_ids": ids,
        "cu_seqlens": torch.from_numpy(starts).int(),
        "labels": labels,
    }
    return [{name: value.to(device) for name, value in found.items()} | {"max_seqlen": LONGEST}]


def arm(name: str, given: argparse.Namespace, device: str) -> dict[str, Any]:
    """Time the steps of an arm on a fresh model."""
    overrides = TINY if given.tiny else {}
    settings = ClassifierSettings(
        name="bert-base",
        classes=2,
        overrides=overrides,
        attention=ARMS[name],  # type: ignore[arg-type]
        attention_dropout=0.0,
        feed_forward_dropout=0.0,
        head_dropout=0.0,
    )
    torch.manual_seed(0)
    model = build_classifier(settings).to(device)
    optimizer = build_optimizer(model, OptimizerSettings(learning_rate=1e-5))
    scale = loss_scale("fp16", device)
    steps = steps_of(given.steps + WARM_UP, 32 if given.tiny else LONGEST)
    width = max(sum(map(len, step)) for step in steps)
    batches = [
        padded(step, device) if name == "padded" else packed(step, width, device) for step in steps
    ]
    losses, seconds = [], []
    chosen = chosen_kernel(device)
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None

    def take(step: list[Batch]) -> torch.Tensor:
        with chosen():
            return plain_step(
                model,
                optimizer,
                loss,
                step,
                SEQUENCES,
                device_type=device,
                precision="fp16" if device == "cuda" else "fp32",
                max_grad_norm=1.0,
                scale=scale,
            ).loss

    for number, step in enumerate(batches):
        wait()
        begun = time.perf_counter()
        losses.append(take(step))
        wait()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - begun)
    profiling = Profiling()
    take(batches[-1])
    wait()
    seen = attention_of(profiling.end())
    return {
        "arm": name,
        "computed_tokens": sum(b["input_ids"].numel() for s in batches for b in s) // len(batches),
        "seconds": [round(value, 5) for value in seconds],
        "median_seconds": round(median(seconds), 5),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3) if device == "cuda" else 0,
        "kernels": seen.calls,
        "losses": [round(float(value), 5) for value in losses],
    }


def chosen_kernel(device: str) -> Callable[[], AbstractContextManager[object]]:
    """Padded rows take the memory-efficient kernel too, as on a GPU without flash."""
    if device != "cuda":
        return nullcontext
    return lambda: sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=240, help="no arm begins later")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    until = time.monotonic() + given.seconds
    device = "cuda" if torch.cuda.is_available() and not given.tiny else "cpu"
    rows: list[dict[str, Any]] = (
        json.loads(given.out.read_text())["rows"] if given.out.exists() else []
    )
    done = {(row["round"], row["arm"]) for row in rows}
    record = {
        "command": ["python", *sys.argv],
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "rows": rows,
    }
    for number in range(given.rounds):
        for name in ARMS if device == "cuda" else ["padded"]:
            if (number, name) in done:
                continue
            if time.monotonic() > until:
                print("no time is left for the others: call again to go on", flush=True)
                return
            if device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            rows.append({"round": number} | arm(name, given, device))
            shown = {key: value for key, value in rows[-1].items() if key != "seconds"}
            print(json.dumps(shown | {"losses": shown["losses"][:3]}), flush=True)
            first = rows[0]["losses"]
            rows[-1]["loss_difference"] = max(
                abs(a - b) for a, b in zip(first, rows[-1]["losses"], strict=True)
            )
            given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
