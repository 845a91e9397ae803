"""How large a batch fits: trainfit's finder, the truth by bisection, and Lightning's finder.

GPT-2 124M (the small GPT with GPT-2's vocabulary), 1,024 tokens, bf16, eager, on the whole GPU and
under caps. The truth is the largest step that runs three times when one after the other is tried,
which runs out of memory on purpose; the finder is run before it and never learns of it. How often
memory ran out is what the allocator itself counted.

    python benchmarks/finder.py --output FILE [--caps 0 8 16 24] [--no-lightning]
    python benchmarks/finder.py --output FILE --tiny    a CPU: predicted only, under a made-up limit

A cap of 0 is the whole GPU. Results are written as they come.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from trainfit.core import codec
from trainfit.core.files import write_whole
from trainfit.core.plan_records import TaskSpec
from trainfit.jobs.job_plan import plan
from trainfit.jobs.models.gpt_model import build_gpt
from trainfit.jobs.tuned_plans import job_of
from trainfit.planning.estimator.estimate import Request, Target, ask, told
from trainfit.tuning.finder import BatchSizeFound, BatchSizeJob, find

GIB = 1 << 30
CUDA = torch.cuda.is_available()
GPT2 = ("model.name=gpt-small", "model.vocab_size=50304", "data.max_length=1024")
TINY = ("model.name=gpt-tiny", "data.max_length=64", "device.use_cuda=false")
EAGER = ("optimization.compile=false", "model.use_gradient_checkpointing=false")
EFFECTIVE = "training.effective_batch_size=512"
TRIED = 3
"""Steps of a size before it counts as one that fits."""


def capped(cap_gib: float) -> None:
    """Let this process reserve so much of the GPU; 0 is all of it."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_gib * GIB / total) if cap_gib else 1.0)


def counted(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `work` says, how long it took, and how often memory ran out meanwhile."""
    before = torch.cuda.memory_stats().get("num_ooms", 0) if CUDA else 0
    began = time.perf_counter()
    try:
        found = work()
    except Exception as error:  # noqa: BLE001 - a contender that fails is a result
        found = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    found["wall_seconds"] = time.perf_counter() - began
    found["ooms"] = torch.cuda.memory_stats().get("num_ooms", 0) - before if CUDA else None
    return found


def largest_by_bisection(fits: Callable[[int], bool]) -> dict[str, Any]:
    """Double until it fails, then halve the difference."""
    tried: list[tuple[int, bool]] = []

    def fine(rows: int) -> bool:
        tried.append((rows, fits(rows)))
        return tried[-1][1]

    low, high = 0, 1
    while fine(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fine(middle) else (low, middle)
    return {"largest_rows": low, "tried": tried}


def truth(job: BatchSizeJob) -> dict[str, Any]:
    """The largest step that runs; on a CPU, the largest that the allocator's model serves."""
    if not CUDA:
        return largest_by_bisection(lambda rows: _predicted_to_fit(job, rows))
    from trainfit.runtime import applied
    from trainfit.tuning.trial import Steps, device_for_probes

    assert job.factory is not None
    with applied(job.runtime), device_for_probes():
        steps = Steps(job.factory, job.arguments)
        return largest_by_bisection(lambda rows: _runs(steps, rows))


def _runs(steps: Any, rows: int) -> bool:
    from trainfit.engine.memory_errors import give_back_memory, is_out_of_memory

    give_back_memory()
    try:
        step = steps(rows)
        for _ in range(TRIED):
            step()
        torch.cuda.synchronize()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def _predicted_to_fit(job: BatchSizeJob, rows: int) -> bool:
    assert job.factory is not None
    assert job.memory_gib is not None
    target = Target(sm_count=1, compute_capability="0.0", capacity=int(job.memory_gib * GIB))
    task = TaskSpec(factory=job.factory, arguments=job.arguments(rows))
    return told(ask([Request(task=task, targets=(target,))])[0]).rooms[0].fits


def lightning_finder(mode: str) -> dict[str, Any]:
    """Lightning's own finder on the same model; it tries sizes until memory runs out."""
    import lightning
    from lightning.pytorch.tuner import Tuner

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            with torch.device("cuda"):
                self.model = build_gpt(
                    "gpt-small", checkpointing="none", vocab_size=50304, block_size=1024
                )

        def training_step(self, batch: Any, _index: int) -> Any:
            (ids,) = batch
            return self.model(input_ids=ids, targets=ids) / ids.numel()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-5, fused=True)

        def train_dataloader(self) -> Any:
            ids = torch.full((4096, 1024), 5)
            return DataLoader(TensorDataset(ids), batch_size=self.batch_size)

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = Module()
        trainer = lightning.Trainer(
            accelerator="gpu",
            devices=1,
            precision="bf16-mixed",
            max_steps=3,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        began = time.perf_counter()
        rows = Tuner(trainer).scale_batch_size(module, mode=mode)
        seconds = time.perf_counter() - began
    return {"largest_rows": rows, "seconds_after_build": seconds, "version": lightning.__version__}


def in_short(found: BatchSizeFound) -> dict[str, Any]:
    """The finder's answer; of micro-batches that are alike, of which there may be hundreds, one."""
    return codec.encode(found) | {"cuts": [list(cut) for cut in Counter(found.cuts).items()]}


def one_cap(cap: float, words: tuple[str, ...], limit_gib: float | None) -> dict[str, Any]:
    """The finder and then the truth, with the memory of the GPU capped."""
    if CUDA:
        capped(cap)
    made = plan("gpt", *words, *EAGER, EFFECTIVE)
    job = job_of(made, memory_gib=limit_gib)
    found = counted(lambda: in_short(find(job)))
    reference = counted(lambda: truth(job))
    row: dict[str, Any] = {"cap_gib": cap or None, "finder": found, "truth": reference}
    if "error" not in found and reference.get("largest_rows"):
        row["error_percent"] = 100 * (found["largest_rows"] / reference["largest_rows"] - 1)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--caps", type=float, nargs="*", default=(0, 8, 16, 24))
    parser.add_argument("--no-lightning", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if not CUDA and not arguments.tiny:
        parser.error("there is no GPU: give --tiny")
    record: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/finder.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": torch.cuda.get_device_name() if CUDA else platform.processor() or "CPU",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "finder": [],
        "lightning": {},
    }

    def keep(name: str, value: Any) -> None:
        write_whole(arguments.output, json.dumps(record, indent=1) + "\n")
        print(name, {k: v for k, v in value.items() if not isinstance(v, (list, dict))}, flush=True)

    began = time.perf_counter()
    for cap in (0.0,) if arguments.tiny else arguments.caps:
        words, limit = (TINY, 0.1) if arguments.tiny else (GPT2, None)
        row = one_cap(cap, words, limit)
        record["finder"].append(row)
        for part in ("finder", "truth"):
            keep(f"{cap or 'whole'} {part}", row[part])
    if CUDA and not arguments.no_lightning and not arguments.tiny:
        capped(0)
        for mode in ("power", "binsearch"):
            found = record["lightning"][mode] = counted(partial(lightning_finder, mode))
            keep(f"lightning {mode}", found)
    record["seconds"] = time.perf_counter() - began
    keep("all", {"seconds": record["seconds"]})


if __name__ == "__main__":
    main()
