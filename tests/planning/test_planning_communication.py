"""Links of the catalogue, and what the ways to share a job give by formula."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from plan_example import PLAN
from trainfit.cli.main import run
from trainfit.core.plan_records import MemoryEstimate, TimeEstimate
from trainfit.hardware.catalogue import find, gpus
from trainfit.planning.sharding import (
    GIB,
    ModelBytes,
    compare_ways,
    link_rate,
    sent_between,
    sent_inside,
)

MEMORY = MemoryEstimate(
    weights_gib=4.0,
    gradients_gib=4.0,
    optimizer_gib=8.0,
    activations_gib=2.0,
    workspace_gib=0.5,
    peak_allocated_gib=18.0,
    peak_reserved_gib=19.0,
    capacity_gib=79.0,
    fits=True,
    error_percent=2.0,
)
QUESTION: Any = SimpleNamespace(sizes=None, layers=16)


def time(seconds: float | None) -> TimeEstimate:
    names = ("tokens_per_second", "samples_per_second", "mfu", "epoch_seconds", "total_seconds")
    return TimeEstimate(step_seconds=seconds, error_percent=None, **dict.fromkeys(names))


@pytest.mark.parametrize(
    ("slug", "count", "rate", "name"),
    [
        ("h100-sxm-80gb", 8, 450e9, "NVLink 4"),
        ("a100-sxm4-80gb", 8, 300e9, "NVLink 3"),
        ("rtx-3090", 2, 56.25e9, "NVLink bridge"),
        ("rtx-3090", 4, 31.508e9, "PCIe 4.0 x16"),
        ("rtx-4090", 8, 31.508e9, "PCIe 4.0 x16"),
        ("t4", 2, 15.754e9, "PCIe 3.0 x16"),
        ("mi300x", 8, None, "Infinity Fabric 7 x 128 GB/s (896 GB/s), PCIe 5.0 x16"),
        ("apple-m1-max", 2, None, "none (SoC, unified memory)"),
    ],
)
def test_a_link_has_the_rate_of_one_direction(
    slug: str, count: int, rate: float | None, name: str
) -> None:
    found, called = link_rate(find(slug), count)
    assert found == (None if rate is None else pytest.approx(rate, rel=1e-3))
    assert called == name


def test_every_nvidia_card_with_a_slot_or_a_switch_has_a_rate() -> None:
    lacking = {
        gpu.slug for gpu in gpus() if link_rate(gpu, 8)[0] is None and gpu.vendor == "nvidia"
    }
    assert all("jetson" in slug or "spark" in slug for slug in lacking), lacking


def test_bytes_by_hand() -> None:
    model = ModelBytes(blocks=80.0, rest=20.0, gradients=100.0)
    assert sent_inside(model, "none", 1, 3) == 0
    assert sent_between(model, 1, 4) == 150  # a sum of 100 over four: 2 · 3/4
    assert sent_inside(model, "fsdp", 4, 2) == 0.75 * (2 * 180 + 100)
    assert sent_between(model, 4, 4) == 0
    assert sent_between(model, 4, 8) == 25  # two copies, a quarter each


def test_ways_on_one_machine_and_on_two() -> None:
    one = replace(PLAN, ranks=1, memory=MEMORY, time=time(0.8), gradient_accumulation_steps=1)
    many = replace(one, ranks=8, time=time(0.1))
    h100 = find("h100-sxm-80gb")
    none, fsdp = compare_ways(QUESTION, one, many, h100, 1)
    assert (none.sharding, fsdp.sharding) == ("none", "fsdp")
    assert none.sent_gib == pytest.approx(2 * 7 / 8 * 4)
    assert fsdp.sent_gib == pytest.approx(7 / 8 * (2 * 4 + 4))
    assert none.link_seconds == pytest.approx(7 * GIB / 450e9)
    assert none.efficiency == 1.0  # hidden behind the backward pass
    assert fsdp.memory_gib is not None
    assert none.memory_gib == 19.0 > fsdp.memory_gib
    assert none.largest_billions is not None
    assert fsdp.largest_billions is not None
    assert fsdp.largest_billions == pytest.approx(none.largest_billions * 16 / 6)  # 10 elsewhere
    rows = compare_ways(QUESTION, one, replace(many, ranks=16), h100, 2)
    assert [row.sharding for row in rows[:3]] == ["none", "fsdp", "hybrid"]
    slow = {row.sharding: row for row in rows if row.network_gbits == 10}
    assert slow["hybrid"].step_seconds < slow["none"].step_seconds  # type: ignore[operator]
    assert slow["none"].efficiency < 0.05  # type: ignore[operator]


def test_what_is_not_known_is_not_told() -> None:
    one = replace(PLAN, ranks=1, memory=MEMORY, time=time(None))
    rows = compare_ways(QUESTION, one, replace(one, ranks=8), find("mi300x"), 1)
    assert {(row.link_seconds, row.step_seconds, row.efficiency) for row in rows} == {(None,) * 3}


@pytest.mark.parametrize(
    "words", [["--gpus", "0"], ["--gpus", "2x"], ["--gpu", "all", "--gpus", "8"]]
)
def test_other_numbers_of_gpus_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "nli", *words]) == 2
    assert "--gpus" in capsys.readouterr().err
