"""Several ranks: a plan sharded over them, and the bytes that they send in a step, by formula.

A plan is sharded as asked for, or where a replica does not fit one GPU. Sums, gatherings and
scatterings are counted as rings send them: of n ranks each sends (n-1)/n of the bytes of a
gathering or a scattering, and twice that for a sum.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

from trainfit.core.errors import BadInput
from trainfit.core.plan_records import MemoryEstimate, Plan, Reason, Sharding
from trainfit.core.records import Record
from trainfit.hardware.catalogue import GpuSpec
from trainfit.planning.decide import pinned
from trainfit.planning.estimator.estimate import GIB
from trainfit.planning.question import Question

_GATHERED = 2
"""Layers whose weights a rank holds whole at a time."""


_SHARDED = ("adamw_fused", "adamw", "adamw_bf16")
"""Optimizers whose state is sharded like the weights."""


def shards_of(sharding: str, ranks: int, machines: int) -> int:
    """Number of ranks that share one copy of the model."""
    return {"none": 1, "fsdp": ranks, "hybrid": ranks // machines}[sharding]


def sharded(
    question: Question, plan: Plan, machines: int, replan: Callable[[int], Plan] | None
) -> Plan:
    """Shard a plan, as the question pins it or where one GPU is too small and several are enough.

    `replan` plans with the given number of bytes more; None where memory is plenty.
    """
    pin = pinned(question, "sharding")
    if pin is not None and pin.value == "none":
        return plan
    obstacle = _obstacle(plan)
    if pin is None:
        if not _is_short(plan) or obstacle is not None or replan is None:
            return plan
        kind, why = "fsdp", "the model with its optimizer does not fit one GPU"
    else:
        kind, why = str(pin.value), pin.why
        if obstacle is not None:
            raise BadInput(f"sharding is {kind}, {obstacle[0]}", obstacle[1])
    if kind == "hybrid" and plan.ranks % machines:
        raise BadInput(
            f"sharding is hybrid, and {plan.ranks} ranks are not divided evenly by machines",
            "start as many ranks on each machine, or use optimization.sharding=fsdp",
        )
    shards = shards_of(kind, plan.ranks, machines)
    sharers = f"{shards} ranks share it" if shards > 1 else "one rank shares it with nobody"
    reason = Reason(setting="sharding", value=kind, why=f"{why}; {sharers}")
    asked = replace(plan, sharding=cast(Sharding, kind), reasons=(*plan.reasons, reason))
    if plan.memory is None or replan is None:
        return asked
    gained = room_gained(plan.memory, question.layers, shards, _rest(question, plan) / GIB)
    roomy = replan(gained)
    if not roomy.fits and pin is None:
        return plan
    memory = roomy.memory
    assert memory is not None
    return replace(
        roomy,
        sharding=asked.sharding,
        reasons=(*roomy.reasons, reason),
        memory=_spread(memory, gained / GIB, shards),
    )


def is_asked(question: Question) -> bool:
    """Tell if the question pins weights and states to be shared among ranks."""
    return question.pinned("sharding") not in (None, "none")


def is_shared(setting: str, value: object) -> bool:
    """Tell if a setting that saves memory goes with sharding."""
    return setting == "offload_activations" or (setting == "optimizer" and value in _SHARDED)


def _is_short(plan: Plan) -> bool:
    """Tell a plan of several GPUs of which one does not hold the model."""
    return plan.ranks > 1 and not plan.fits and plan.memory is not None and plan.device == "cuda"


def _obstacle(plan: Plan) -> tuple[str, str] | None:
    """Setting of a plan that does not go with sharding, and the fix."""
    if plan.quantization != "none":
        fix = "set optimization.sharding=none, or model.quantization=none"
        return "and quantized weights are not shared among ranks", fix
    if plan.optimizer in _SHARDED and not plan.offload_optimizer:
        return None
    asked = "offload_optimizer" if plan.offload_optimizer else plan.optimizer
    fix = f"use {', '.join(_SHARDED)} on the GPU, or optimization.sharding=none"
    return f"which does not go with {asked}", fix


def room_gained(memory: MemoryEstimate, layers: int, ranks: int, rest_gib: float = 0.0) -> int:
    """Bytes that sharding over `ranks` saves on each of them; below 0 where copies take more.

    Blocks are gathered one after another; the rest of the weights stays gathered through a step.
    """
    weights = memory.weights_gib + memory.adapters_gib
    kept_away = (weights + memory.optimizer_gib) * (1 - 1 / ranks)
    rest = min(rest_gib, weights)
    gathered = rest + (weights - rest) * min(1.0, _GATHERED / max(1, layers))
    return int((kept_away - gathered) * GIB)


def _rest(question: Question, plan: Plan) -> float:
    """Bytes of the weights outside of the blocks, by the embedding of the tokens."""
    sizes, width = question.sizes, 4 if plan.weights_dtype == "float32" else 2
    return 0.0 if sizes is None else float(width * sizes.vocabulary * sizes.hidden)


def _spread(memory: MemoryEstimate, less: float, shards: int) -> MemoryEstimate:
    """Convert memory planned with `less` GiB more than a GPU has to that of each rank."""
    return replace(
        memory,
        weights_gib=memory.weights_gib / shards,
        adapters_gib=memory.adapters_gib / shards,
        optimizer_gib=memory.optimizer_gib / shards,
        peak_allocated_gib=memory.peak_allocated_gib - less,
        peak_reserved_gib=memory.peak_reserved_gib - less,
        capacity_gib=memory.capacity_gib - less,
        error_percent=None,  # nothing was recorded of sharded steps
    )


# ── bytes that ranks send, and how long that takes on a link of the catalogue ───────────────────

_PCIE = {"3.0": 8.0, "4.0": 16.0, "5.0": 32.0}
"""GT/s of a lane, PCI-SIG; 128 of 130 bits are data."""
_BACKWARD = 2 / 3
"""Share of a micro-batch that its backward pass takes: twice the products of the forward pass."""
ETHERNET = (10, 100, 400)
"""Gbit/s between machines that a plan is told for; the catalogue knows no machine's network."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelBytes:
    """Sizes of a model that ranks communicate."""

    blocks: float
    """Weights of the repeated blocks, as they are stored."""
    rest: float
    """Other weights, which stay gathered from the forward to the backward pass."""
    gradients: float
    """Gradients of the trained weights, in the dtype of their sum."""

    @classmethod
    def of(cls, question: Question, plan: Plan, memory: MemoryEstimate) -> ModelBytes:
        """Derive them from the memory of whole copies; AdamW's state is twice the gradient."""
        weights = (memory.weights_gib + memory.adapters_gib) * GIB
        rest = _rest(question, plan)
        half = 2 if plan.reduce_dtype == "bf16" else 1
        return cls(
            blocks=max(0.0, weights - rest),
            rest=min(rest, weights),
            gradients=memory.optimizer_gib * GIB / 2 / half,
        )


def sent_inside(model: ModelBytes, sharding: Sharding, shards: int, micro_batches: int) -> float:
    """Bytes that a rank sends per step to those it shares a copy of the model with.

    Blocks are gathered for the forward and for the backward pass of every micro-batch, the rest
    once; gradients are scattered after the last micro-batch.
    """
    if sharding == "none":
        return 0.0
    gathered = micro_batches * (2 * model.blocks + model.rest)
    return (shards - 1) / shards * (gathered + model.gradients)


def sent_between(model: ModelBytes, shards: int, ranks: int) -> float:
    """Bytes that a rank sends per step to sum its gradients with those of other copies."""
    copies = ranks // shards
    return 2 * (copies - 1) / copies * model.gradients / shards


def link_rate(gpu: GpuSpec | None, count: int) -> tuple[float | None, str]:
    """Bytes per second and direction between the GPUs of a machine, and the link's name.

    A bridge joins two GPUs alone. None where the catalogue does not say.
    """
    if gpu is None:
        return None, "unknown"
    bridge, pcie = "bridge" in gpu.link, re.search(r"PCIe (\d\.0) x(\d+)", gpu.link)
    nvlink = re.search(r"NVLink(?: bridge| \d)? ([\d.]+) GB/s", gpu.link)
    if nvlink and (not bridge or count == 2):
        return float(nvlink[1]) / 2 * 1e9, nvlink[0].partition(" GB/s")[0].rsplit(" ", 1)[0]
    if pcie and "Infinity" not in gpu.link:
        rate = _PCIE[pcie[1]] * int(pcie[2]) / 8 * 128 / 130
        return rate * 1e9, pcie[0]
    return None, gpu.link


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterRow(Record):
    """One way to train on several GPUs."""

    sharding: Sharding
    network_gbits: int | None
    """Network between machines; None on one machine."""
    memory_gib: float | None
    """Predicted peak of each GPU."""
    fits: bool | None
    largest_billions: float | None
    """Billions of weights of the largest model that fits, with the activations of this one."""
    sent_gib: float
    """GiB that each rank sends per step."""
    link_seconds: float | None
    """Time that this takes at the full rate of the links; None where a rate is not known."""
    step_seconds: float | None
    efficiency: float | None
    """Speed by that of as many GPUs alone."""


def compare_ways(
    question: Question, alone: Plan, many: Plan, gpu: GpuSpec | None, machines: int
) -> list[ClusterRow]:
    """Compare replicas, shards over all ranks, and (on several machines) a copy for each machine.

    `alone` is the plan for one GPU, `many` that for all of them.
    """
    ways: list[Sharding] = ["none", "fsdp", *(["hybrid"] if machines > 1 else [])]  # type: ignore[list-item]
    networks = ETHERNET if machines > 1 else (None,)
    return [
        _row(question, alone, many, gpu, machines, way, network)
        for network in networks
        for way in ways
    ]


def _row(
    question: Question,
    alone: Plan,
    many: Plan,
    gpu: GpuSpec | None,
    machines: int,
    way: Sharding,
    network: int | None,
) -> ClusterRow:
    # A plan that is sharded has the memory of shares; the one for a single GPU has not.
    memory, ranks = (many if many.sharding == "none" else alone).memory, many.ranks
    assert memory is not None
    shards = shards_of(way, ranks, machines)
    model = ModelBytes.of(question, many, memory)
    inside = sent_inside(model, way, shards, many.gradient_accumulation_steps)
    between = sent_between(model, shards, ranks)
    seconds = _link_seconds(way, inside, between, gpu, ranks // machines, network)
    step = _step_seconds(many, way, seconds)
    rest = _rest(question, many) / GIB
    spared = 0.0 if way == "none" else room_gained(memory, question.layers, shards, rest) / GIB
    held = memory.peak_reserved_gib - spared
    first = alone.time.step_seconds if alone.time else None
    return ClusterRow(
        sharding=way,
        network_gbits=network,
        memory_gib=held,
        fits=held <= memory.capacity_gib,
        largest_billions=_largest(memory, spared),
        sent_gib=(inside + between) / GIB,
        link_seconds=seconds,
        step_seconds=step,
        efficiency=None if step is None or first is None else first / (ranks * step),
    )


def _link_seconds(
    way: Sharding,
    inside: float,
    between: float,
    gpu: GpuSpec | None,
    each: int,
    network: int | None,
) -> float | None:
    """Time of the slowest link; a ring over machines crosses each machine's network once."""
    rate, _ = link_rate(gpu, each)
    if network is None:
        return None if rate is None else (inside + between) / rate
    wire = network / 8 * 1e9
    if way != "hybrid":
        return (inside + between) / min(wire, rate or wire)
    return None if rate is None else inside / rate + between * each / wire


def _step_seconds(many: Plan, way: Sharding, seconds: float | None) -> float | None:
    """Time of a step: communication hides behind the computation that runs meanwhile."""
    computed = many.time.step_seconds if many.time else None
    if computed is None or seconds is None:
        return None
    hiding = computed
    if way == "none":  # sums begin in the backward pass of the last micro-batch
        hiding *= _BACKWARD / many.gradient_accumulation_steps
    return computed + max(0.0, seconds - hiding)


def _largest(memory: MemoryEstimate, spared: float) -> float | None:
    """Scale the model until it fills the GPU: weights, gradients and state grow, nothing else."""
    kept = memory.weights_gib + memory.adapters_gib + memory.optimizer_gib + memory.gradients_gib
    other = memory.peak_reserved_gib - kept
    billions = ((memory.parameters or 0) + memory.adapters_gib * GIB / 4) / 1e9
    room = memory.capacity_gib - other
    return billions * room / (kept - spared) if room > 0 and kept > spared else None
