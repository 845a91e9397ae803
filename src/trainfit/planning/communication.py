"""Bytes that ranks send in a step, by formula, and how long that takes on a link of the catalogue.

Sums, gatherings and scatterings are counted as rings send them: of n ranks each sends (n-1)/n of
the bytes of a gathering or a scattering, and twice that for a sum.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainfit.core.plan_records import MemoryEstimate, Plan, Sharding
from trainfit.core.records import Record
from trainfit.hardware.catalogue import GpuSpec
from trainfit.planning.question import Question
from trainfit.planning.sharding import room_gained, shards_of

GIB = 2**30
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
        sizes, width = question.sizes, 4 if plan.weights_dtype == "float32" else 2
        rest = 0.0 if sizes is None else float(width * sizes.vocabulary * sizes.hidden)
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
    spared = 0.0 if way == "none" else room_gained(memory, question.layers, shards) / GIB
    held = memory.peak_reserved_gib - spared
    first = alone.time.step_seconds if alone.time else None
    return ClusterRow(
        sharding=way,
        network_gbits=network,
        memory_gib=held,
        fits=held <= memory.capacity_gib,
        largest_billions=_largest(alone, memory, spared),
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
    """Time of a step: what is sent hides behind what is computed meanwhile."""
    computed = many.time.step_seconds if many.time else None
    if computed is None or seconds is None:
        return None
    hiding = computed
    if way == "none":  # sums begin in the backward pass of the last micro-batch
        hiding *= _BACKWARD / many.gradient_accumulation_steps
    return computed + max(0.0, seconds - hiding)


def _largest(alone: Plan, memory: MemoryEstimate, spared: float) -> float | None:
    """Scale the model until it fills the GPU: weights, gradients and state grow, nothing else."""
    kept = memory.weights_gib + memory.adapters_gib + memory.optimizer_gib + memory.gradients_gib
    other = memory.peak_reserved_gib - kept
    width = 4 if alone.weights_dtype == "float32" else 2
    billions = (memory.weights_gib * GIB / width + memory.adapters_gib * GIB / 4) / 1e9
    room = memory.capacity_gib - other
    return billions * room / (kept - spared) if room > 0 and kept > spared else None
