"""Record what torch's CUDA caching allocator really did, as ground truth for the replay.

    python benchmarks/record_allocator.py FOLDER

Each workload runs in a process of its own, from the first allocation on, and leaves one file
NAME.json.gz: every allocation, free and segment in order, and torch's own peaks. The files that
the tests use, in tests/planning/allocator_traces/, were recorded on an NVIDIA H200.

An event is one of
    ["alloc", name, bytes requested, address]     ["free", name]
    ["segment", address, bytes]                   ["segment_free", address, bytes]
    ["oom", bytes rounded up]
with addresses counted in units of 512 bytes from the lowest one seen. An expandable segment's
pages are "segment" too.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

UNIT = 512
MIB = 1 << 20
EDGES = (1, 512, 513, MIB - 1, MIB, MIB + 1, 2 * MIB, 5 * MIB, 10 * MIB - 512, 10 * MIB, 64 * MIB)
"""Sizes at which a rule changes; repeated, so that free blocks of one size compete."""


class Decoder(nn.Module):
    """A small GPT, so that the log has what a training step's log has."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        return self.head(self.layers(self.embedding(tokens), mask=mask, is_causal=True))


def train(device: str, lengths: Iterator[int], width: int, layers: int, batch: int = 8) -> None:
    """Optimizer steps of fused AdamW under bf16 autocast, one for each length."""
    vocabulary = 8192
    model = Decoder(width, layers, vocabulary).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for length in lengths:
        tokens = torch.randint(vocabulary, (batch, length + 1), device=device)
        with torch.autocast(device, torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def fuzz_log(seed: int, count: int, live: Callable[[int], int]) -> Iterator[tuple[int, int]]:
    """(name, bytes) allocates and (name, -1) frees, with about live(i) bytes live at event i."""
    rng = random.Random(seed)
    sizes: dict[int, int] = {}
    total = 0
    for index in range(count):
        if total < live(index) and (not sizes or rng.random() < 0.6):
            kind = rng.random()
            if kind < 0.4:
                size = rng.choice(EDGES)
            elif kind < 0.65:
                size = int(2 ** rng.uniform(0, 20))
            else:
                size = int(2 ** rng.uniform(20, 28.16))
            sizes[index] = size
            total += size
            yield index, size
        elif sizes:
            name = rng.choice(list(sizes))
            total -= sizes.pop(name)
            yield name, -1


def fuzz(device: str, log: Iterator[tuple[int, int]]) -> None:
    """Do what a log says with tensors of bytes."""
    tensors = {}
    for name, size in log:
        if size < 0:
            del tensors[name]
        else:
            tensors[name] = torch.empty(size, dtype=torch.uint8, device=device)


def varied(seed: int, steps: int, growth: int = 0) -> Iterator[int]:
    """Lengths as unsorted text has them, rising by `growth` a step."""
    rng = random.Random(seed)
    for step in range(steps):
        yield rng.randrange(32, 640) + growth * step


WORKLOADS: dict[str, tuple[Callable[[str], None], int | None, bool]] = {
    "transformer": (lambda device: train(device, iter([512] * 3), 512, 4), None, False),
    "fuzz": (lambda device: fuzz(device, fuzz_log(1, 3000, lambda _: 8 << 30)), None, False),
    "lengths": (lambda device: train(device, varied(2, 10), 256, 2), None, False),
    "lengths_capped": (lambda device: train(device, varied(3, 60, 40), 256, 2), 1536 * MIB, False),
    "fuzz_capped": (
        lambda device: fuzz(device, fuzz_log(4, 9000, lambda i: (1500 + i // 3) * MIB)),
        4096 * MIB,
        False,
    ),
    "expandable": (lambda device: train(device, varied(5, 6), 256, 2), None, True),
    "expandable_fuzz": (
        lambda device: fuzz(device, fuzz_log(6, 2000, lambda _: 8 << 30)),
        None,
        True,
    ),
    "expandable_capped": (
        lambda device: fuzz(device, fuzz_log(7, 9000, lambda i: (2500 + i // 3) * MIB)),
        4096 * MIB,
        True,
    ),
}
"""Each with the bytes it is held to, if any, and whether segments are expandable."""


def record(name: str) -> dict[str, Any]:
    """Run one workload in this process and return what the allocator did."""
    work, cap, expandable = WORKLOADS[name]
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=1_000_000)
    memory = torch.cuda.get_device_properties(0).total_memory
    fraction = 1.0 if cap is None else cap / memory
    torch.cuda.set_per_process_memory_fraction(fraction)
    torch.manual_seed(0)
    try:
        work("cuda")
    except torch.cuda.OutOfMemoryError as error:
        print(f"{name}: {error}", flush=True)
    stats = torch.cuda.memory_stats()
    return {
        "workload": name,
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "capacity": None if cap is None else int(fraction * memory),
        "expandable": expandable,
        "peak_allocated": stats["allocated_bytes.all.peak"],
        "peak_reserved": stats["reserved_bytes.all.peak"],
        "segments": stats["segment.all.current"],
        "retries": stats["num_alloc_retries"],
        "ooms": stats["num_ooms"],
        "events": events(torch.cuda.memory._snapshot()["device_traces"][0]),
    }


def events(trace: list[dict[str, Any]]) -> list[list[Any]]:
    """The trace as plain rows, up to the first time that memory ran out."""
    kinds = {"segment_alloc": "segment", "segment_map": "segment"}
    kinds |= {"segment_free": "segment_free", "segment_unmap": "segment_free"}
    lowest = min(entry["addr"] for entry in trace if entry["action"] in kinds)
    names: dict[int, int] = {}
    rows: list[list[Any]] = []
    count = 0
    for entry in trace:
        action, size = entry["action"], entry["size"]
        if action not in ("snapshot", "oom") and entry["stream"] != 0:
            raise SystemExit(f"the replay knows one stream; {action} is on {entry['stream']}")
        if action == "oom":
            return [*rows, ["oom", size]]
        address = (entry["addr"] - lowest) // UNIT if "addr" in entry else None
        if action in kinds:
            rows.append([kinds[action], address, size])
        elif action == "alloc":
            names[address] = count
            rows.append(["alloc", count, size, address])
            count += 1
        elif action == "free_completed":
            rows.append(["free", names.pop(address)])
    return rows


def save(folder: Path, name: str) -> None:
    """Record one workload into its file."""
    text = json.dumps(record(name), separators=(",", ":"))
    (folder / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def main(folder: Path, names: list[str]) -> None:
    """Record the workloads side by side, since the time goes to starting CUDA."""
    if len(names) == 1:
        save(folder, names[0])
        return
    running = []
    for name in names or WORKLOADS:
        flag = str(WORKLOADS[name][2])
        env = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{flag}"}
        running.append(subprocess.Popen([sys.executable, __file__, str(folder), name], env=env))
    if sum(process.wait() != 0 for process in running):
        raise SystemExit("a workload failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
