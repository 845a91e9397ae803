"""Gemma 3 1B in fp16 with activations beyond its range, as the engine runs it, against bf16.

    python benchmarks/gemma_fp16.py --out FILE [--method lora] [--length 512] [--rows 4] [--tiny]

About 30 s for each of the 4 arms on a GPU, 2 minutes in all. The same words again go on where a
call ended; no arm begins after `--seconds`.

No published weights are needed: gains of the norms are raised until hidden states and the inputs of
down-projections pass 65,504, as published ones do. Arms: `fp32`, `bf16`, `fp16`, and `fp16_plain`,
which is transformers' code under autocast without trainfit's changes (classifier.py). FILE holds
for each arm the loss, the largest number after each block and before each down-projection, how many
numbers are not finite, the gradient's error against fp32, seconds per step and memory. --tiny shows
on a CPU that all works.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from trainfit.core.plan_records import Precision
from trainfit.engine.step import accumulate, loss_scale
from trainfit.jobs.models import classifier
from trainfit.jobs.models.classifier import EncoderClassifier, build_classifier
from trainfit.jobs.models.classifier_settings import ClassifierSettings
from trainfit.jobs.probes import loss

ARMS: dict[str, Precision] = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp16_plain": "fp16"}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
GAINS = {"post_feedforward_layernorm": 3_000.0, "pre_feedforward_layernorm": 400.0}
REPEATS = 5
TINY = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}


def build(given: argparse.Namespace, arm: str, device: str) -> EncoderClassifier:
    """Build the model with raised gains; a plain arm has nothing changed for fp16."""
    changing = classifier.keep_in_range
    if arm == "fp16_plain":
        classifier.keep_in_range = lambda _model: None
    torch.manual_seed(0)
    settings = ClassifierSettings(
        name="gemma-3-1b-it",
        method=given.method,
        dtype="float32" if given.method == "full" else DTYPES[ARMS[arm]],  # type: ignore[arg-type]
        overrides=TINY if given.tiny else {},
        attention="masked",
        lora_dropout=0.0,
        head_dropout=0.0,
    )
    try:
        model = build_classifier(settings).to(device)
    finally:
        classifier.keep_in_range = changing
    scale = 20.0 if given.tiny else 1.0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            for part, gain in GAINS.items():
                if part in name:
                    weight.fill_(gain * scale if part.startswith("post") else gain)
            if "up_proj" in name or "gate_proj" in name:
                weight.mul_(4.0)
    return model


def watch(model: EncoderClassifier, seen: dict[str, list[float]]) -> None:
    """Note the largest number and the count of non-finite ones after blocks and before products."""

    def note(key: str, tensor: Tensor) -> None:
        wide = tensor.detach().float()
        seen.setdefault(key, []).append(wide.abs().nan_to_num(posinf=torch.inf).max().item())
        seen.setdefault("not_finite", []).append(float((~wide.isfinite()).sum()))

    for name, module in model.named_modules():
        if type(module).__name__.endswith("DecoderLayer"):
            module.register_forward_hook(
                lambda _m, _g, out: note("blocks", out[0] if isinstance(out, tuple) else out)
            )
        elif name.endswith("down_proj"):
            module.register_forward_pre_hook(lambda _m, given: note("down_inputs", given[0]))


def finite(number: float) -> float | None:
    """Return a number that JSON knows, rounded; None for another."""
    return float(f"{number:.6g}") if math.isfinite(number) else None


def run(given: argparse.Namespace, arm: str, device: str) -> dict[str, Any]:
    """Run an arm: one watched step, then timed ones."""
    precision = ARMS[arm]
    rows, length = (2, 12) if given.tiny else (given.rows, given.length)
    model = build(given, arm, device)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 90, (rows, length), generator=generator).to(device)
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.arange(rows, device=device) % 2,
    }
    scale = loss_scale(precision, device)

    def step() -> Tensor:
        model.zero_grad()
        return accumulate(
            model, loss, [batch], float(rows), device_type=device, precision=precision, scale=scale
        )

    seen: dict[str, list[float]] = {}
    watch(model, seen)
    found = float(step())
    slopes = [p.grad.flatten().double().cpu() for p in model.parameters() if p.grad is not None]
    gradient = torch.cat(slopes) / (1.0 if scale is None else float(scale.factor))
    seconds = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    blocks = len(seen["blocks"]) // (REPEATS + 1)
    first = {key: values[:blocks] for key, values in seen.items() if key != "not_finite"}
    return {
        "arm": arm,
        "loss": found,
        "not_finite": int(sum(seen["not_finite"][: 2 * blocks])),
        "gradients_not_finite": int((~gradient.isfinite()).sum()),
        "largest": {key: [finite(value) for value in values] for key, values in first.items()},
        "median_seconds": round(median(seconds), 5),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3) if device == "cuda" else 0,
        "gradient": gradient,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--method", choices=["full", "lora"], default="lora")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=240, help="no arm begins later")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    until = time.monotonic() + given.seconds
    device = "cuda" if torch.cuda.is_available() and not given.tiny else "cpu"
    rows: list[dict[str, Any]] = (
        json.loads(given.out.read_text())["rows"] if given.out.exists() else []
    )
    left = [arm for arm in ARMS if arm not in {row["arm"] for row in rows}]
    if left and rows:
        left.insert(0, "fp32")  # its gradient is what the others are compared with
    record = {
        "command": ["python", *sys.argv],
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "rows": rows,
    }
    sure: Tensor | None = None
    for arm in left:
        if time.monotonic() > until:
            print("no time is left for the others: call again to go on", flush=True)
            break
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        row = run(given, arm, device)
        gradient = row.pop("gradient")
        sure = gradient if sure is None else sure
        error = float(torch.linalg.norm(gradient - sure) / torch.linalg.norm(sure))
        if any(one["arm"] == arm for one in rows):
            continue
        first = rows[0]["loss"] if rows else row["loss"]
        row |= {"gradient_error": finite(error), "loss_difference": finite(row["loss"] - first)}
        rows.append(row | {"loss": finite(row["loss"])})
        print(json.dumps({k: v for k, v in row.items() if k != "largest"}), flush=True)
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
