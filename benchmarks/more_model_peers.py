"""trainfit beside peft and bitsandbytes under transformers' Trainer, inside the same memory.

Both train adapters on weights in 4 bits: the same model shape with random weights, bf16, 16
sequences of 512 tokens a step, the same cap by set_per_process_memory_fraction. Trainer pads (there
is nothing to pad), and gets a declared list of batches with and without gradient checkpointing, of
which the fastest that fits counts. Every round is a process of its own, and contenders take turns:
all of them in the first round, trainfit and the two fastest peers in the others.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from more_model import CUDA, GIB, equal_tokens, guarded, over, run_case
from record_jobs import alone

CASES = ("7b qlora", "gemma-4b qdora")
SETTINGS = ((16, True), (8, True), (4, True), (4, False), (1, False))
"""Sequences of a micro-batch, and checkpointing."""
STEPS, FASTEST = 8, 2


def compare(asked: argparse.Namespace, record: dict[str, Any], keep: Callable[[], None]) -> None:
    """Rounds of all contenders in turns."""
    names = asked.case or CASES
    for case in json.loads(asked.peers.read_text())["plans"]:
        if case["name"] not in names:
            continue
        row = next((one for one in record["peers"] if one["name"] == case["name"]), None)
        if row is None:
            row = {"name": case["name"], "cap_gib": case["cap_gib"], "contenders": {}}
            record["peers"].append(row)
        ways = contenders(case, asked)
        for number in range(asked.rounds):
            for name in due(row, ways, number):
                if over(asked):
                    return
                rounds = row["contenders"].setdefault(name, {"rounds": []})["rounds"]
                rounds.append(ways[name]())
                print(f"{case['name']}, {name}: {shown(rounds[-1])}", flush=True)
                summarise(row)
                keep()
        said = {key: row[key] for key in ("peers_best", "times_peers_best") if key in row}
        print(f"{case['name']}: {said}", flush=True)


def contenders(
    case: dict[str, Any], asked: argparse.Namespace
) -> dict[str, Callable[[], dict[str, Any]]]:
    """What runs a round of each, in a process of its own."""
    steps = 4 if asked.tiny else asked.steps
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "trainfit": partial(alone, run_case, case, steps)
    }
    for batch, again in SETTINGS:
        name = f"trainer, batch {batch}{', checkpointing' if again else ''}"
        ways[name] = partial(alone, guarded, trainer, case, batch, again, asked.tiny)
    return ways


def due(row: dict[str, Any], names: Iterable[str], number: int) -> list[str]:
    """Contenders that have not run in this round; after the first the slower peers rest."""
    found = {name: row["contenders"].get(name, {}).get("rounds", []) for name in names}
    rates = row.get("samples_per_second", {})
    fastest = sorted((n for n in rates if n != "trainfit"), key=lambda n: -rates[n])[:FASTEST]
    return [
        name
        for name, rounds in found.items()
        if len(rounds) <= number
        and not any("error" in one for one in rounds)
        and (number == 0 or name in ("trainfit", *fastest))
    ]


def shown(found: dict[str, Any]) -> dict[str, Any]:
    """The figures of a round that are printed."""
    keys = ("samples_per_second", "peak_gib", "peak_allocated", "events", "error")
    return {key: found[key] for key in keys if found.get(key)}


def summarise(row: dict[str, Any]) -> None:
    """Median speed of each contender, and of trainfit over the fastest peer."""
    rates = {
        name: statistics.median(r["samples_per_second"] for r in found["rounds"])
        for name, found in row["contenders"].items()
        if not any("error" in r for r in found["rounds"])
    }
    row["samples_per_second"] = rates
    peers = {name: rate for name, rate in rates.items() if name != "trainfit"}
    if peers and "trainfit" in rates:
        row["peers_best"] = max(peers, key=lambda name: peers[name])
        row["times_peers_best"] = rates["trainfit"] / max(peers.values())


def trainer(case: dict[str, Any], batch: int, again: bool, tiny: bool) -> dict[str, Any]:
    """Run steps of 16 sequences under Trainer."""
    from contenders import Sequences, Setting, trainer_round  # they start CUDA

    arguments = case["plan"]["task"]["arguments"]
    length = case["plan"]["workload"]["max_length"]
    if CUDA:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(case["cap_gib"] * GIB / total)
    setting = Setting(name="trainer", batch=batch, workers=0 if tiny else 2)
    more = {
        "gradient_accumulation_steps": 16 // batch,
        "gradient_checkpointing": again,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "optim": "adamw_torch_fused",
    }
    steps = 2 if tiny else STEPS
    data = Sequences(equal_tokens(16 * (steps + 4), length))
    found = trainer_round(partial(peer, arguments), data, setting, steps, **more)
    found["samples_per_second"] *= 16 // batch
    return found


def peer(arguments: dict[str, Any]) -> nn.Module:
    """transformers' classifier with its linear layers in 4 bits, and peft's adapters on them."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    from nli import build_config

    config = build_config(arguments["name"])
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16)
    filled(model, "cuda" if CUDA else "cpu")
    wanted = LoraConfig(
        task_type="SEQ_CLS",
        r=arguments["lora_rank"],
        lora_alpha=arguments["lora_alpha"],
        lora_dropout=arguments["lora_dropout"],
        use_dora=arguments["method"] == "dora",
        target_modules=adapted(model),
    )
    made = get_peft_model(model, wanted)
    made.enable_input_require_grads()
    return made.train()


def adapted(model: nn.Module) -> list[str]:
    """Names of the projections of attention, which trainfit adapts as well."""
    known = {"q_proj", "k_proj", "v_proj", "o_proj", "query", "key", "value"}
    return sorted({name.rpartition(".")[2] for name, _ in model.named_modules()} & known)


def filled(model: nn.Module, device: str) -> None:
    """Give a model without values random ones, a layer at a time, and round its linear layers."""
    import bitsandbytes as bnb

    setattr(model, "is_loaded_in_4bit", True)  # noqa: B010 - as peft asks
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and "score" not in name and "classifier" not in name:
            owner = model.get_submodule(name.rpartition(".")[0])
            setattr(owner, name.rpartition(".")[2], rounded(bnb, layer, device))
    for owner in model.modules():
        for name, weight in list(owner.named_parameters(recurse=False)):
            if weight.is_meta:
                value = torch.empty(weight.shape, dtype=weight.dtype, device=device)
                value = value.normal_(0, 0.02) if weight.dim() > 1 else value.fill_(1.0)
                setattr(owner, name, nn.Parameter(value, requires_grad=False))
        for name, buffer in list(owner.named_buffers(recurse=False)):
            if buffer is not None and buffer.is_meta:
                owner.register_buffer(name, whole_buffer(owner, name, buffer, device), False)


def whole_buffer(owner: nn.Module, name: str, buffer: torch.Tensor, device: str) -> torch.Tensor:
    """Values of a buffer: frequencies of rotations, or positions."""
    if "inv_freq" in name:
        half = buffer.numel()
        return 10_000.0 ** -(torch.arange(half, device=device) / half)
    if "token_type" in name:
        return torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
    if buffer.dtype in (torch.long, torch.int32):
        return torch.arange(buffer.numel(), device=device).view(buffer.shape)
    return torch.full(buffer.shape, float(getattr(owner, "scalar_embed_scale", 1.0)), device=device)


def rounded(bnb: Any, layer: nn.Linear, device: str) -> nn.Module:
    made = bnb.nn.Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        compute_dtype=torch.bfloat16,
        quant_type="nf4",
        device="meta",
    )
    shape = (layer.out_features, layer.in_features)
    value = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
    made.weight = bnb.nn.Params4bit(value, requires_grad=False, quant_type="nf4").to(device)
    return made
