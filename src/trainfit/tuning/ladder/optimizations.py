"""The optimizations of the ladder: a rung each, or the reason why it is not applicable here.

Every row of the source documents' tables is among them. optimizations.yaml has their words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from trainfit.core.files import read_own_yaml
from trainfit.core.plan_records import Plan
from trainfit.core.records import HardwareProfile
from trainfit.kernels import supported
from trainfit.tuning.ladder.rungs import FUSIBLE, NAIVE_BATCH, NotApplicable, Rung

Made = Rung | NotApplicable


def rungs_for(
    best: Plan, profile: HardwareProfile, no_liger: str | None = None
) -> tuple[tuple[Rung, ...], tuple[NotApplicable, ...]]:
    """Rungs from the naive baseline up to `best`, and the optimizations that are not applicable.

    `no_liger` is why Liger has no kernels for the model, if it has none.
    """
    gpu, fused = bool(profile.gpus), best.attention in FUSIBLE
    missing = profile.compile.missing(gpu=gpu)
    if no_liger is None and not supported.is_installed():
        no_liger = "liger-kernel is not installed"
    no_liger = no_liger if gpu else "they are for GPUs"
    facts = {"batch": NAIVE_BATCH, "missing": " and ".join(missing), "no_liger": no_liger}
    rung = partial(_made, best, facts)

    def planned(*names: str) -> dict[str, Any]:
        return {name: getattr(best, name) for name in names}

    sizes = planned("batch_size", "micro_batch_tokens", "gradient_accumulation_steps")
    mode = best.compile_mode if best.compile else "default"
    made = [
        rung("TF32", best.runtime.tf32, runtime={"tf32": True}),
        rung("mixed precision", best.precision != "fp32", plan=planned("precision")),
        rung(
            "fused AdamW",
            best.optimizer == "adamw_fused",
            plan=planned("optimizer", "offload_optimizer"),
        ),
        rung("set_to_none", True, naive={"zeroed": False}),
        rung("loader workers", best.num_workers, plan=planned("num_workers", "prefetch_factor")),
        rung("pinned memory", best.pin_memory, plan={"pin_memory": True}),
        rung("persistent workers", best.persistent_workers, plan={"persistent_workers": True}),
        rung("data on the GPU", best.data_on_gpu, plan={"data_on_gpu": True}),
        rung("cuDNN benchmark", gpu, runtime={"cudnn_benchmark": True}),
        rung(
            "attention with packing" if best.packed and not fused else "attention kernel",
            fused,
            naive={"eager": False},
        ),
        *_planned_checkpointing(rung, best),
        rung("batch size", best.batch_size > NAIVE_BATCH, plan=sizes),
        rung("grouping by length", len(set(best.workload.lengths)) > 1, naive={"shuffled": False}),
        rung(
            "packing",
            best.packed,
            plan=planned("packed", "attention"),
            naive={"shuffled": False, "eager": False},
        ),
        rung("torch.compile", not missing, plan={"compile": True, "compile_mode": mode}),
        rung("captured steps", best.cuda_graph, plan={"cuda_graph": True}),
        *_trades(rung, best, profile),
        rung("Liger kernels", no_liger is None, naive={"liger": True}),
        rung("channels-last", False),
        rung("evaluation batch size", False),
    ]
    rungs = tuple(one for one in made if isinstance(one, Rung))
    return rungs, tuple(one for one in made if isinstance(one, NotApplicable))


def _planned_checkpointing(rung: Callable[..., Made], best: Plan) -> Iterator[Made]:
    """Checkpointing that the plan has: without it, larger batches do not fit."""
    if (mode := best.gradient_checkpointing) != "none":
        yield rung("planned checkpointing", True, plan={"gradient_checkpointing": mode})


def _trades(rung: Callable[..., Made], best: Plan, profile: HardwareProfile) -> Iterator[Made]:
    """Rungs that give one thing up for another, which nothing is built on."""
    frozen, gpus = best.workload.method == "frozen", profile.gpus
    if frozen or best.gradient_checkpointing == "none":
        yield rung("gradient checkpointing", not frozen, plan={"gradient_checkpointing": "full"})
    if best.precision == "bf16" and gpus and gpus[0].fp16:
        yield rung("fp16 instead of bf16", True, plan={"precision": "fp16"})
    compiles = not profile.compile.missing(gpu=True)
    graphs = {"compile": True, "compile_mode": "reduce-overhead"}
    name = "CUDA graphs" if compiles or not gpus else "CUDA graphs without a compiler"
    yield rung(name, gpus and compiles, plan=graphs)


def _made(
    best: Plan, facts: Mapping[str, object], name: str, applies: object, **change: Any
) -> Made:
    """Rung of a row of optimizations.yaml, or the reason why it is not applicable."""
    row = _table()[name]
    if applies:
        fields: dict[str, Any] = {k: row[k] for k in ("trades", "between_epochs") if k in row}
        fields |= {key: tuple(row[key]) for key in ("needs", "replaces") if key in row}
        what = row["what"].format(best=best, **facts)
        return Rung(name=row.get("name", name), what=what, **fields, **change)
    said = [r.why for r in best.reasons if r.setting == row.get("setting") and r.why]
    why = said[0] if said else row["otherwise"].format(best=best, **facts)
    return NotApplicable(
        name=row.get("name", name), reason=row.get("reason", "{why}").format(why=why)
    )


@cache
def _table() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = read_own_yaml(Path(__file__).with_name("optimizations.yaml"))
    return found
