"""Estimated gains of missing optimizations beside measured ones.

A plain loop over a model of transformers runs from several bases, each with some optimizations on.
From one profiled step of a base the gain of every missing change is estimated, as `trainfit verify
-- python train.py` does; then each change is made alone, and steps with and without it are timed in
turns. Gains are percent of a step's time. Models have the real shapes and random weights, batches
of 32, lengths of ReDSM5. The evidence of each base is kept, so that an estimate can be made anew.

python benchmarks/what_if.py --out FILE [--models bert-base …] [--bases …] [--changes …]
    [--seconds 280] [--tiny]
python benchmarks/what_if.py --out FILE --again FILE …

Each result is a line, and FILE is written after each. --again estimates anew, from the evidence of
earlier records, and writes the checks that give the estimates their errors: no GPU is needed.
--tiny shows on a CPU that all works.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

import trainfit
from trainfit.core import codec
from trainfit.core.plan_records import RuntimeSettings
from trainfit.hardware.model_shapes import model_shape, transformers_config
from trainfit.integrations.body_graphs import BodyGraphs
from trainfit.integrations.speeding import facts_in
from trainfit.jobs.job_plan import assumed_lengths
from trainfit.measuring import what_if as estimating
from trainfit.measuring.machine_rates import _launches
from trainfit.measuring.trace import Evidence
from trainfit.measuring.what_if import CHECKS, what_if

MODELS = (
    *("bert-base", "modernbert-base", "deberta-v3-base"),
    *("roberta-base", "gpt2", "gemma-3-1b"),
)
BASES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "half": ("bf16", "attention"),
    "checkpointed": ("bf16", "attention", "checkpointed"),
    "packed": ("bf16", "attention", "fused", "unpadded"),
}
"""Optimizations that are on; `checkpointed` is one whose absence is the gain."""
CHANGES = ("bf16", "tf32", "fused", "unpadded", "attention", "graphs", "checkpointing", "compile")
MADE = {
    "plain": ("bf16", "tf32", "fused", "unpadded", "attention"),
    "half": ("fused", "unpadded", "compile"),
    "checkpointed": ("checkpointing",),
    "packed": ("graphs",),
}
"""Changes to each base; the others would be made twice."""
TINY = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "pad_token_id": 0,
}
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
BLOCK, TURNS, WARM_UP = 6, 4, 8


@dataclass
class Training:
    """A loop with some optimizations on, which takes steps."""

    model: Any
    on: frozenset[str]
    batches: list[dict[str, torch.Tensor]]
    optimizer: torch.optim.Optimizer
    taken: int = 0
    times: list[float] = field(default_factory=list)

    def steps(self, count: int, *, timed: bool) -> None:
        """Take steps; all but the first of a block are timed."""
        with ExitStack() as stack:
            if "tf32" in self.on:
                stack.enter_context(trainfit.applied(RuntimeSettings(tf32=True)))
            for at in range(count):
                began = clock()
                self._step()
                if timed and at:
                    self.times.append(clock() - began)

    def _step(self) -> None:
        batch = self.batches[self.taken % len(self.batches)]
        self.taken += 1
        with torch.autocast(DEVICE, torch.bfloat16, enabled="bf16" in self.on):
            loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def clock() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def make(name: str, on: frozenset[str], given: argparse.Namespace) -> Training:
    torch.manual_seed(0)
    shape = model_shape(name)
    small: dict[str, Any] = dict(TINY) if given.tiny else {}
    if given.tiny and shape.config.get("layer_types"):
        small["layer_types"] = shape.config["layer_types"][:2]
    config = transformers_config(shape, **small, num_labels=3)
    config.pad_token_id = config.pad_token_id if config.pad_token_id is not None else 0
    own = "attention" not in on and config.model_type not in ("deberta-v2",)
    options = {"attn_implementation": "eager"} if own else {}
    with torch.device(DEVICE):
        model = AutoModelForSequenceClassification.from_config(config, **options).train()
    if "unpadded" in on:
        trainfit.unpadded(model, insist=True)
    if "graphs" in on:
        for facts in facts_in(model):
            facts.graphs = BodyGraphs()
    if "checkpointed" in on:
        model.gradient_checkpointing_enable()
    # Foreach, as torch chooses by itself where it is not told.
    kind = {"fused": True} if "fused" in on else {"foreach": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, **kind)
    training = Training(model, on, batches_of(config, given), optimizer)
    if "compile" in on:
        training.model = torch.compile(model)
    return training


def batches_of(config: Any, given: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """Four batches, padded to the longest, on the device."""
    import numpy as np

    draws = np.random.default_rng(0)
    pool = np.arange(4, 24) if given.tiny else assumed_lengths("nli", 512)
    found = []
    for _ in range(4):
        sizes = draws.choice(pool, given.batch)
        width = int(sizes.max())
        mask = torch.arange(width) < torch.as_tensor(sizes)[:, None]
        ids = torch.as_tensor(draws.integers(5, config.vocab_size, (given.batch, width)))
        rows = {
            "input_ids": torch.where(mask, ids, config.pad_token_id),
            "attention_mask": mask.long(),
            "labels": torch.as_tensor(draws.integers(0, 3, given.batch)),
        }
        found.append({name: value.to(DEVICE) for name, value in rows.items()})
    return found


def observed(training: Training) -> dict[str, Any]:
    """Evidence of one profiled step of a base, and the figures that an estimate takes beside it."""
    given = [{k: v.cpu() for k, v in training.batches[training.taken % 4].items()}]
    with trainfit.observe(warm_up=1) as seen:
        training.steps(1, timed=False)
        given[0] = {k: v.cpu() for k, v in training.batches[training.taken % 4].items()}
        seen._given.extend(given)  # the loop has no loader, which shows the padding
        training.steps(2, timed=False)
    assert seen.evidence is not None
    share = None
    if CUDA:
        total = torch.cuda.get_device_properties(0).total_memory
        share = torch.cuda.max_memory_allocated() / total
    return {
        "step_seconds": median(training.times),
        "host_seconds": host_seconds(training),
        "memory_share": share,
        "padding_share": padding_of(training.batches),
        "evidence": json.loads(
            json.dumps(codec.encode(seen.evidence))
        ),  # plain text, torch.version too
    }


def padding_of(batches: list[dict[str, torch.Tensor]]) -> float:
    """Share of padding in all batches; the step that is profiled has but one of them."""
    masks = [batch["attention_mask"] for batch in batches]
    return 1 - sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)


def host_seconds(training: Training) -> float:
    """Time in which the host starts a step's work: the GPU is idle first and not waited for."""
    found = []
    for _ in range(3):
        began = clock()
        training._step()
        found.append(time.perf_counter() - began)
    return median(found)


def estimates(case: dict[str, Any], rates: dict[str, float]) -> dict[str, float]:
    """Estimated percent of every missing change, from the evidence of a base."""
    found = what_if(
        codec.decode(Evidence, case["evidence"], "evidence"),
        step_seconds=case["step_seconds"],
        memory_share=case["memory_share"],
        padding_share=case["padding_share"],
        rates=rates,
    )
    return {one.name: one.percent for one in found}


def after(on: frozenset[str], change: str) -> frozenset[str] | None:
    """Optimizations with a change made; None where the base has no room for it."""
    if change == "checkpointing":
        return on - {"checkpointed"} if "checkpointed" in on else None
    if change in on or (change == "graphs" and ("unpadded" not in on or not CUDA)):
        return None
    return on | {change}


def compare(name: str, base: str, given: argparse.Namespace, tell: Any) -> None:
    """Estimate the changes to a base, make each, and time both in turns."""
    on = frozenset(BASES[base])
    before = make(name, on, given)
    before.steps(2, timed=False)
    before.steps(3, timed=True)
    # A large model's step in fp32 takes a second.
    few = max(2, min(BLOCK, int(1 / median(before.times))))
    before.steps(few, timed=True)
    case = {"model": name, "base": base} | observed(before)
    given.cases.append(case)
    predicted = estimates(case, given.rates)
    for change in [one for one in given.changes if one in MADE[base]]:
        changed = after(on, change)
        pointless = change == "attention" and name.startswith("deberta")  # it has but one
        if changed is None or pointless or time.monotonic() > given.ends:
            continue
        row: dict[str, Any] = {"model": name, "base": base, "change": change}
        row["predicted"] = predicted.get(change, 0.0)
        try:
            other = make(name, changed, given)
            other.steps(2 * WARM_UP if change == "graphs" else few, timed=False)
            before.times.clear()
            for _ in range(TURNS if few == BLOCK else 2):
                before.steps(few, timed=True)
                other.steps(few, timed=True)
            row["measured"] = 100 * (1 - median(other.times) / median(before.times))
            row["milliseconds"] = [1e3 * median(one.times) for one in (before, other)]
        except Exception as error:  # noqa: BLE001 a change that fails is a row too
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        tell(row)
        other = None  # type: ignore[assignment]
        gc.collect()


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--bases", nargs="+", choices=tuple(BASES), default=list(BASES))
    parser.add_argument("--changes", nargs="+", choices=CHANGES, default=list(CHANGES[:-1]))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=280.0)
    parser.add_argument("--again", nargs="+", type=Path, help="records to estimate anew")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for a CPU")
    given = parser.parse_args()
    given.ends = time.monotonic() + given.seconds
    given.cases = []
    given.rates = {one.name: one.value for one in _launches()} if CUDA else {}
    given.batch = 4 if given.tiny else given.batch
    return given


def main() -> None:
    given = asked()
    if given.again:
        again(given)
        return
    record: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/what_if.py", *sys.argv[1:]]),
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": torch.cuda.get_device_name() if CUDA else "CPU",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "rates": given.rates,
        "rows": [],
        "cases": given.cases,
    }

    def tell(row: dict[str, Any]) -> None:
        record["rows"].append(row)
        errors = [abs(one["predicted"] - one["measured"]) for one in done(record)]
        record["median_error"] = median(errors) if errors else None
        given.out.write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(row), flush=True)

    # Each model has its plain base first: where time runs out, all models have some rows.
    for base in given.bases:
        for name in given.models:
            if time.monotonic() > given.ends:
                break
            try:
                compare(name, base, given, tell)
            except Exception as error:  # noqa: BLE001
                tell({"model": name, "base": base, "error": f"{type(error).__name__}: {error}"})
            gc.collect()
            if CUDA:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
    print(json.dumps({"median_error": record.get("median_error"), "rows": len(done(record))}))


FITTED = (
    *("_PER_LAUNCH", "_CASTED", "_CAST", "_HALF_ATTENTION", "_TF32_ATTENTION", "_FUSED_EXACT"),
    *("_FUSED_UPDATE", "_PACKED_EXACT", "_UNPADDED_HOST", "_OWN_SCORES", "_OWN_SCORES_HOST"),
)
"""Constants of the estimates that were chosen by these records."""


def again(given: argparse.Namespace) -> None:
    """Estimate the rows of records anew, join the records, and write the checks."""
    records = [json.loads(path.read_text()) for path in given.again]
    checks = check(records)
    whole = {
        "median_error": median(one["error"] for one in checks),
        "median_error_left_out": median(left_out(records)),
    }
    given.out.write_text(json.dumps(whole | {"records": records}, indent=1) + "\n")
    kept = [{k: v for k, v in one.items() if k != "error"} for one in checks]
    CHECKS.write_text(json.dumps({"checks": kept}, indent=1) + "\n")
    for name in dict.fromkeys(one["change"] for one in checks):
        mine = [one["error"] for one in checks if one["change"] == name]
        print(json.dumps({"change": name, "median_error": median(mine), "rows": len(mine)}))
    print(json.dumps(whole | {"rows": len(checks)}))


def check(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Estimate every row of the records with the constants as they are now."""
    checks = []
    for record in records:
        cases = {(one["model"], one["base"]): one for one in record["cases"]}
        found = {key: estimates(case, record["rates"]) for key, case in cases.items()}
        for row in done(record):
            row["predicted"] = found[row["model"], row["base"]].get(row["change"], 0.0)
            one = {name: row[name] for name in ("model", "base", "change", "predicted", "measured")}
            error = abs(row["predicted"] - row["measured"])
            checks.append(one | {"device": record["device"], "error": error})
    return checks


def left_out(records: list[dict[str, Any]]) -> list[float]:
    """Errors of each model's rows, with the constants fitted to the other models alone."""
    from scipy.optimize import minimize

    chosen = {name: getattr(estimating, name) for name in FITTED}

    def errors(factors: Any, model: str, *, of_it: bool) -> list[float]:
        for (name, value), factor in zip(chosen.items(), factors, strict=True):
            setattr(estimating, name, value * factor)
        return [one["error"] for one in check(records) if (one["model"] == model) is of_it]

    found = []
    for model in sorted({one["model"] for record in records for one in done(record)}):
        # The start is not the choice, which knows the model that is left out.
        start = [1.3 if at % 2 else 0.75 for at in range(len(chosen))]
        rest = minimize(
            lambda x, m=model: sum(errors(x, m, of_it=False)),
            start,
            method="Powell",
            bounds=[(0.3, 3.0)] * len(start),
            options={"maxiter": 4},
        )
        found += errors(rest.x, model, of_it=True)
    for name, value in chosen.items():
        setattr(estimating, name, value)
    check(records)
    return found


def done(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in record["rows"] if "measured" in row]


if __name__ == "__main__":
    main()
