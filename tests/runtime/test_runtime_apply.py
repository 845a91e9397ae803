"""Apply and undo, judged by what torch says and never by our own records alone."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainfit.core.errors import BadInput
from trainfit.core.plan_records import Plan, RuntimeSettings, TaskSpec, Workload
from trainfit.core.records import Applied
from trainfit.runtime import applied, apply, undo

Observe = Callable[[], dict[str, Any]]
maybe = st.none() | st.booleans()
SETTINGS = st.builds(
    RuntimeSettings,
    tf32=maybe,
    cudnn_benchmark=maybe,
    deterministic=maybe,
    num_threads=st.none() | st.integers(1, 3),
    attention=st.sampled_from([None, "flash", "efficient", "math"]),
    expandable_segments=maybe,
    empty_cache=maybe,
    seed=st.none() | st.integers(0, 2**32 - 1),
)


@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    old=st.sampled_from(["highest", "high", "medium"]),
    new=st.sampled_from(["none", "tf32", "ieee"]),
    cudnn=st.booleans(),
    first=SETTINGS,
    second=SETTINGS,
)
def test_undo_restores_everything_however_deep(
    observe: Observe,
    any_tf32: Callable[[], None],
    old: str,
    new: str,
    cudnn: bool,
    first: RuntimeSettings,
    second: RuntimeSettings,
) -> None:
    any_tf32()
    torch.set_float32_matmul_precision(old)
    torch.backends.cudnn.allow_tf32 = cudnn
    torch.backends.fp32_precision = new  # type: ignore[attr-defined]
    start = observe()
    outer = apply(first)
    between = observe()
    inner = apply(second)
    undo(inner)
    assert observe() == between
    undo(outer)
    assert observe() == start


def test_what_changed_is_what_torch_says(observe: Observe) -> None:
    wanted = RuntimeSettings(
        tf32=True, cudnn_benchmark=True, num_threads=1, attention="math", seed=11
    )
    with applied(wanted) as done:
        assert torch.backends.cuda.matmul.allow_tf32 is True
        assert torch.backends.cudnn.benchmark is True
        assert torch.get_num_threads() == 1
        assert torch.initial_seed() == 11
        assert {c.name: c.after for c in done.changes} == {
            "cudnn_benchmark": True,
            "tf32": True,
            "num_threads": 1,
            "attention": "math",
            "seed": 11,
        }
    assert all(change.done for change in done.changes)
    assert Applied.from_json(done.to_json()) == done


def test_settings_that_say_nothing_change_nothing(observe: Observe) -> None:
    before = observe()
    done = apply(RuntimeSettings())
    assert done.changes == ()
    assert observe() == before


def test_a_plan_brings_its_settings() -> None:
    plan = Plan(
        fits=True,
        task=TaskSpec(factory="tasks:make", arguments={}),
        workload=Workload(
            lengths=(1,), sequences=1, max_length=1, effective_batch_size=1, epochs=1.0
        ),
        gpu=None,
        precision="fp32",
        runtime=RuntimeSettings(num_threads=1),
        packed=False,
        attention="sdpa",
        batch_size=1,
        micro_batch_tokens=1,
        gradient_accumulation_steps=1,
        effective_batch_size=1,
        pin_memory=False,
        persistent_workers=False,
        prefetch_factor=None,
        cuts=(1,),
        gradient_checkpointing="none",
        compile=False,
        compile_mode="default",
        optimizer="adamw",
        num_workers=0,
        eval_batch_size=1,
        memory=None,
        time=None,
    )
    with applied(plan) as done:
        assert torch.get_num_threads() == 1
    assert [change.name for change in done.changes] == ["num_threads"]


def test_an_exception_in_the_block_still_undoes(observe: Observe) -> None:
    before = observe()
    with pytest.raises(KeyError, match="mine"), applied(RuntimeSettings(num_threads=1, seed=3)):
        raise KeyError("mine")
    assert observe() == before


def test_undoing_twice_is_harmless(observe: Observe) -> None:
    done = apply(RuntimeSettings(num_threads=1))
    undo(done)
    before = observe()
    undo(done)
    assert observe() == before


def test_undoing_the_first_undoes_the_later_ones_before_it(observe: Observe) -> None:
    before = observe()
    outer = apply(RuntimeSettings(tf32=True, num_threads=1))
    inner = apply(RuntimeSettings(tf32=False, num_threads=3))
    undo(outer)
    assert observe() == before
    undo(inner)
    assert observe() == before


def test_equal_results_are_still_different_things_to_undo() -> None:
    def threads(count: int) -> Applied:
        return apply(RuntimeSettings(num_threads=count))

    start = threads(2)
    first, back, again = threads(3), threads(2), threads(3)
    assert first == again
    undo(again)
    undo(back)
    undo(again)
    assert torch.get_num_threads() == 3
    back, again = threads(2), threads(3)
    undo(first)
    undo(back)
    assert torch.get_num_threads() == 2
    undo(start)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_threads", 0, "num_threads is 0"),
        ("seed", -1, "seed is -1"),
        ("seed", 2**32, "seed is 4294967296"),
        ("attention", "fast", "attention is 'fast'; give one of flash, efficient, math"),
    ],
)
def test_a_bad_value_is_named_and_nothing_stays_applied(
    observe: Observe, name: str, value: Any, message: str
) -> None:
    before = observe()
    good = RuntimeSettings(tf32=True, deterministic=True, num_threads=1)
    with pytest.raises(BadInput, match=message):
        apply(dataclasses.replace(good, **{name: value}))
    assert observe() == before


def test_the_same_seed_gives_the_same_draws_everywhere() -> None:
    def draws() -> tuple[float, float, list[float]]:
        return random.random(), float(numpy.random.rand()), torch.rand(3).tolist()

    with applied(RuntimeSettings(seed=7)):
        first = draws()
    with applied(RuntimeSettings(seed=7)):
        second = draws()
    with applied(RuntimeSettings(seed=8)):
        other = draws()
    assert first == second
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_undo_continues_the_draws_where_they_were() -> None:
    with applied(RuntimeSettings(seed=1)):
        torch.rand(5)
        expected = torch.get_rng_state()
        with applied(RuntimeSettings(seed=2)):
            torch.rand(5)
        assert torch.equal(torch.get_rng_state(), expected)
