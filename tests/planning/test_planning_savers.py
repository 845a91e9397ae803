"""Savers of memory: which are taken, in which order, and what the plan says of them."""

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_models import write_bert

from plan_example import MEMORY, PLAN, TIME
from trainfit.core.plan_records import MemoryEstimate, Plan, Reason, Workload
from trainfit.core.records import HardwareProfile
from trainfit.core.settings import BY_NAME, with_values
from trainfit.hardware import as_if
from trainfit.hardware.catalogue import find
from trainfit.jobs.job_plan import plan
from trainfit.planning import planner
from trainfit.planning.question import Pin, Question
from trainfit.planning.savers import (
    SAVERS,
    WORTH_TRYING,
    Saver,
    able,
    cheapest,
    count_savers,
    groups,
    savings,
)

NAMES = tuple(dict.fromkeys(saver.setting for saver in SAVERS))
HERE = as_if(find("h200"))
FULL = {"weights": 4.0, "gradients": 4.0, "optimizer": 8.0, "activations": 2.0}
LORA = {"weights": 13.0, "gradients": 0.1, "optimizer": 0.2, "activations": 1.0}


def asked(method: Any = "full", **pins: Any) -> Question:
    work = Workload(
        lengths=(64,), sequences=1, max_length=64, effective_batch_size=1, epochs=1, method=method
    )
    made = {name: Pin(value=value, origin="override") for name, value in pins.items()}
    more: dict[str, Any] = {"factory": "a:b", "arguments": {}, "layers": 1, "savers": NAMES}
    return Question(task="nli", workload=work, pins=made, **more)


class World:
    """A planner whose memory and time follow from the pins of the question alone."""

    def __init__(self, parts: dict[str, float], cap: float, **slower: float) -> None:
        self.parts, self.cap, self.slower = parts, cap, slower
        self.asked: list[dict[str, Any]] = []

    def plan(self, question: Question) -> Plan:
        chosen = {name: pin.value for name, pin in question.pins.items()}
        taken = [s for s in SAVERS if chosen.get(s.setting, 0) == s.value]
        self.asked.append({s.setting: s.value for s in taken})
        parts = dict(self.parts)
        for saver in taken:
            parts[saver.part] *= 1 - saver.share
        peak, seconds = sum(parts.values()), 1.0
        for saver in taken:
            seconds *= self.slower.get(saver.setting, 1.0)
        memory = replace(
            MEMORY,
            **{f"{name}_gib": size for name, size in parts.items()},
            workspace_gib=0.0,
            peak_allocated_gib=peak,
            capacity_gib=self.cap,
        )
        return replace(
            with_values(PLAN, {s.setting: s.value for s in taken}),
            fits=peak <= self.cap,
            device="cuda",
            memory=memory,
            time=replace(TIME, step_seconds=seconds),
            reasons=tuple(Reason(setting=s.setting, value=s.value, why=s.price) for s in taken),
        )


def taken(plan: Plan) -> dict[str, Any]:
    return {s.setting: s.value for s in SAVERS if BY_NAME[s.setting].of(plan) == s.value}


def test_nothing_is_taken_and_nothing_else_asked_where_the_step_fits():
    world = World(FULL, 18.0)
    made = cheapest(asked(), HERE, world.plan)
    assert made.fits
    assert count_savers(made) == 0
    assert world.asked == [{}]


@pytest.mark.parametrize(
    ("cap", "method", "pins", "expected"),
    [
        (16.5, "full", {}, {"offload_activations": True}),
        (12.0, "full", {}, {"offload_optimizer": True}),
        (9.0, "full", {}, {"offload_activations": True, "offload_optimizer": True}),
        (14.5, "full", {"offload_optimizer": False}, {"optimizer": "adamw_bf16"}),
        (
            12.5,
            "full",
            {"offload_optimizer": False},
            {"offload_activations": True, "optimizer": "adamw_bf16"},
        ),
        (
            12.5,
            "full",
            {"offload_optimizer": False, "offload_activations": False},
            {"optimizer": "adamw_8bit"},
        ),
        (8.0, "lora", {}, {"quantization": "int8"}),
        (5.0, "lora", {}, {"quantization": "nf4"}),
        (4.0, "lora", {}, {"offload_activations": True, "quantization": "nf4"}),
    ],
)
def test_savers_come_in_the_order_of_their_price(
    cap: float, method: str, pins: dict[str, Any], expected: dict[str, Any]
):
    parts = FULL if method == "full" else LORA
    world = World(parts, cap, offload_activations=1.1, offload_optimizer=2.0)
    made = cheapest(asked(method, **pins), HERE, world.plan)
    assert made.fits
    assert made.memory is not None
    assert made.memory.peak_allocated_gib <= cap
    assert taken(made) == expected


@pytest.mark.parametrize(("slower", "faster"), [(1.1, "activations"), (4.0, "optimizer")])
def test_of_two_that_would_do_the_faster_is_taken(slower: float, faster: str):
    world = World(FULL, 17.0, offload_activations=slower, offload_optimizer=2.0)
    made = cheapest(asked(), HERE, world.plan)
    assert taken(made) == {f"offload_{faster}": True}


@given(st.floats(1, 30), st.sampled_from(["full", "lora"]), st.sets(st.sampled_from(NAMES)))
def test_what_is_pinned_stays_and_what_fits_somehow_is_found(
    cap: float, method: str, kept: set[str]
):
    """By trying every combination of open savers."""
    default = {"optimizer": "adamw_fused", "quantization": "none"}
    pins = {name: default.get(name, False) for name in kept}
    parts = FULL if method == "full" else LORA
    made = cheapest(asked(method, **pins), HERE, World(parts, cap).plan)
    assert not set(taken(made)) & kept
    possible = sum(parts.values())
    for part in ("activations", "optimizer", "weights"):
        shares = [
            s.share
            for s in SAVERS
            if s.part == part
            and s.setting not in kept
            and not (s.adapters_only and method == "full")
            and parts[part] >= WORTH_TRYING * cap
        ]
        possible -= parts[part] * max(shares, default=0.0)
    assert made.fits == (possible <= cap + 1e-9) or abs(possible - cap) < 1e-6


def test_the_plan_says_what_a_saver_saves_and_how_the_others_did():
    world = World(FULL, 12.0, offload_optimizer=2.0)
    made = cheapest(asked(), HERE, world.plan)
    [reason] = made.reasons
    assert reason.setting == "offload_optimizer"
    assert reason.why.startswith("does not fit otherwise: saves 8.0 GiB; ")
    said = " | ".join(reason.alternatives)
    assert "false: needs 18.0 GiB" in said
    assert "offload_activations=true: needs 16.0 GiB" not in said  # 2 GiB cannot be enough
    rival = "offload_activations=true optimizer=adamw_bf16: 12.0 GiB, -50% time, moments are"
    assert rival in said


def test_what_the_host_has_no_room_for_is_not_moved_there():
    memory = World(FULL, 12.0).plan(asked()).memory
    assert memory is not None
    small = replace(HERE, simulated=False, memory_available_gib=4.0)
    names = {saver.setting for saver in able(asked(), small, memory)}
    assert "offload_activations" in names
    assert "offload_optimizer" not in names
    assert "offload_activations" not in {s.setting for s in able(asked(), small, memory, 2)}


@pytest.mark.parametrize(("free", "ranks", "fits"), [(13, 1, True), (11, 1, False), (13, 2, False)])
def test_what_waits_on_the_host_is_counted_together_and_for_all_ranks(
    free: float, ranks: int, fits: bool
):
    """10 GiB of activations and moments: each alone has room in 80% of what is free."""
    here = replace(HERE, simulated=False, memory_available_gib=free)
    pins = {"optimizer": "adamw_fused"}
    made = cheapest(asked(**pins), here, World(FULL, 9.0).plan, ranks)
    assert made.fits is fits


def test_a_plan_is_not_taken_over_by_a_host_with_less_memory(monkeypatch: pytest.MonkeyPatch):
    """Machines of a cluster share a home folder, and jobs on them have limits of their own."""
    asked_with = list[float]()

    def made(question: Question, profile: HardwareProfile, *_: Any) -> Plan:
        asked_with.append(profile.memory_available_gib)
        return World(FULL, 99.0).plan(question)

    monkeypatch.setattr(planner, "start", lambda _children: None)
    monkeypatch.setattr(planner, "cheapest", made)
    for free in (256.0, 257.0, 32.0):
        planner.plan(asked(), replace(HERE, simulated=False, memory_available_gib=free))
    assert asked_with == [256.0, 32.0]


def test_what_does_not_go_with_sharding_is_no_saver_beside_it():
    memory = World(FULL | {"weights": 9.0}, 12.0).plan(asked()).memory
    assert memory is not None
    shared = {saver.word for saver in able(asked(sharding="fsdp"), HERE, memory)}
    assert shared == {"offload_activations=true", "optimizer=adamw_bf16"}
    whole = {saver.word for saver in able(asked(sharding="none"), HERE, memory)}
    assert shared < whole


def test_no_saver_of_activations_is_tried_where_an_update_does_not_fit():
    """Weights, gradients and states are 16 GiB; the peak is in the backward pass, without some."""
    memory = World(FULL | {"activations": 4.0}, 15.5).plan(asked()).memory
    assert memory is not None
    short = replace(memory, peak_allocated_gib=17.0)
    tried = [one for group in groups(able(asked(), HERE, short), short) for one in group]
    assert tried
    assert all(any(saver.part == "optimizer" for saver in one) for one in tried)


def test_groups_never_save_one_part_twice_and_change_learning_last():
    memory: MemoryEstimate = replace(MEMORY, capacity_gib=10.0)
    found = list(groups(SAVERS, memory))
    for group in found:
        for one in group:
            parts = [saver.part for saver in one]
            assert len(parts) == len(set(parts))
    learned = [sum(s.learns for s in group[0]) > 0 for group in found]
    assert all(before <= after for before, after in pairwise(learned))


def test_savings_are_named_where_they_are_large():
    memory = World(FULL, 20.0).plan(asked()).memory
    assert memory is not None
    moved, bf16, small = savings(asked(), "optimizer", memory)
    assert moved.startswith("offload_optimizer=true: would save about 8.0 GiB; ")
    assert bf16.startswith("adamw_bf16: would save about 4.0 GiB; ")
    assert small.startswith("adamw_8bit: would save about 6.0 GiB; ")
    assert savings(asked(), "quantization", memory) == ()  # trained weights are not rounded
    assert savings(asked(optimizer="adamw"), "optimizer", memory) == ()
    assert savings(asked(), "optimizer", replace(memory, capacity_gib=200.0)) == ()


@pytest.mark.parametrize("saver", SAVERS, ids=lambda saver: saver.word)
def test_every_saver_is_a_value_of_a_setting(saver: Saver):
    row = BY_NAME[saver.setting]
    assert row.pinned
    assert row.field
    assert 0 < saver.share <= 1


# ── with the estimator ────────────────────────────────────────────────────────────────────────

PRICES = (
    {},
    {"offload_activations": True},
    {"offload_optimizer": True},
    {"offload_activations": True, "offload_optimizer": True},
)
"""What is taken under ever smaller caps; the first two to offload are weighed by their time."""


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINFIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A BERT of 100 million weights, whose states take the most memory."""
    folder = write_bert(tmp_path_factory.mktemp("model"), layers=8, width=1024)
    named = [f"model.name={json.dumps(folder)}", "data.max_length=64", "optimization.compile=false"]
    return ["nli", *named]


def capped(words: list[str], cap: float, *more: str) -> Plan:
    return plan(*words, *more, gpu="h200", memory_gib=cap, lengths=[64] * 64)


@pytest.mark.soak
def test_shrinking_caps_take_savers_in_their_order(words: list[str]):
    caps = (20, 2.2, 1.4, 1.1, 0.95, 0.5)
    made = [capped(words, cap, "model.method=full") for cap in caps]
    for cap, one in zip(caps, made, strict=True):
        assert one.memory is not None
        assert one.memory.fits == (one.memory.peak_allocated_gib <= cap)
    ranks = [PRICES.index(taken(one)) for one in made if one.fits]
    assert ranks == sorted(ranks)
    assert max(ranks) > 0
    assert ranks[:2] == [0, 0]
    assert not made[-1].fits
    assert taken(made[-1]) == {}
    assert made[-1].advice


@pytest.mark.soak
def test_pinned_moments_leave_rounded_ones(words: list[str]):
    pins = ["optimization.offload_optimizer=false", "optimization.offload_activations=false"]
    made = capped(words, 1.4, "model.method=full", *pins)
    assert made.fits
    assert set(taken(made)) == {"optimizer"}
    assert not made.offload_optimizer
    [reason] = [reason for reason in made.reasons if reason.setting == "optimizer"]
    assert reason.why.startswith("does not fit otherwise: saves 0.")
    assert made.workload.method == "full"


@pytest.mark.soak
def test_a_7b_decoder_is_adapted_within_8_gib_by_rounding_its_weights():
    words = ["nli", "model.name=qwen2.5-7b", "model.method=lora"]
    made = plan(*words, gpu="4090", memory_gib=8, lengths=[512] * 64)
    assert made.fits
    assert made.quantization == "nf4"
    assert made.task.arguments["quantization"] == "nf4"
    assert made.workload.method == "lora"
    assert made.memory is not None
    assert made.memory.peak_allocated_gib <= 8
    [reason] = [reason for reason in made.reasons if reason.setting == "quantization"]
    assert reason.why.startswith("does not fit otherwise: saves ")
    assert any(line.startswith("int8: needs ") for line in reason.alternatives)
    kept = plan(*words, "model.quantization=none", gpu="4090", memory_gib=8, lengths=[512] * 64)
    assert not kept.fits
    assert kept.quantization == "none"
