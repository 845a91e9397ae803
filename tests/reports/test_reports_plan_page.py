import io
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from trainfit.core.plan_records import Plan, Reason, TaskSpec, TimeEstimate
from trainfit.core.records import Measurement
from trainfit.reports.model import duration
from trainfit.reports.plan_page import (
    UNRECORDED,
    comparison,
    comparison_data,
    effective_batch,
    plan_page,
    ranked,
)

Make = Callable[..., Plan]
UNKNOWN = TimeEstimate(
    tokens_per_second=None,
    samples_per_second=None,
    mfu=None,
    step_seconds=None,
    epoch_seconds=None,
    total_seconds=None,
    error_percent=None,
)


def printed(page: RenderableType, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(page)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_first_line_says_whether_it_fits(make_plan: Make):
    first = printed(plan_page(make_plan())).splitlines()[0]
    assert first == "Fits rtx_4090: predicted peak 17.50 GiB ± 1.5% of 23.50 GiB (74%)"
    plan = make_plan(fits=False, memory__capacity_gib=14.0, memory__error_percent=None)
    first = printed(plan_page(plan)).splitlines()[0]
    assert first == "Does not fit rtx_4090: predicted peak 17.50 GiB of 14.00 GiB (125%)"


def test_every_setting_is_on_the_page_with_its_reason_and_what_lost(make_plan: Make):
    page = printed(plan_page(make_plan()), 500)  # no line is folded
    assert "the GPU has it in its matrix units" in page
    assert "not: fp16: needs loss scaling; fp32: half as fast" in page
    assert page.count("batch_size  8 ") == 1  # with a reason: not repeated below
    assert "batch_size 8" not in page
    for name in ("optimizer adamw_fused", "num_workers 6", "micro_batch_tokens 4,096"):
        assert name in page
    assert page.rstrip().endswith("Advice: an effective batch of 32 is the MFU table's choice")


def test_the_model_the_data_and_the_cut_are_named(make_plan: Make):
    plan = make_plan(
        task=TaskSpec(factory="trainfit.jobs.probes:encoder_step", arguments={"name": "bert-base"}),
        effective_batch_size=64,
        step_parts=(18, 23, 23),
        micro_batch_tokens=8192,
        data="reviews.csv: 500 rows, 3 classes",
        assumptions=("lengths as ReDSM5's",),
        memory__parameters=268_435_456,
    )
    page = printed(plan_page(plan), 200).splitlines()
    assert page[1] == "Model bert-base, 268M parameters, method dora"
    assert "tokens (reviews.csv: 500 rows, 3 classes), " in page[2]
    assert page[3] == "Effective batch: 64 = 23 + 23 + 18, at most 8,192 tokens each"
    assert page[4] == "Assumed: lengths as ReDSM5's"


@pytest.mark.parametrize(
    ("count", "epochs", "said"),
    [
        (999_885_952, 0.5, ("1B parameters", "0.5 epochs")),
        (999_400_000, 2.25, ("999M parameters", "2.25 epochs")),
        (999_900, 1500, ("1M parameters", "1,500 epochs")),
        (512, 1, ("512 parameters", "1 epoch")),
    ],
)
def test_large_counts_have_no_exponents(
    make_plan: Make, count: int, epochs: float, said: tuple[str, str]
):
    plan = make_plan(weights_dtype="float32", workload__epochs=epochs, memory__parameters=count)
    model, data = printed(plan_page(plan), 200).splitlines()[1:3]
    assert said[0] in model
    assert data.endswith(said[1])


@pytest.mark.parametrize(
    ("parts", "ranks", "said"),
    [
        ((64,), 1, "64 at once"),
        ((16, 16, 16, 16), 1, "64 = 4 × 16, at most 4,096 tokens each"),
        ((40, 24), 1, "64 = 40 + 24, at most 4,096 tokens each"),
        ((9, 8, 8, 8, 8, 8, 8, 4, 3), 1, "64 = 9 + 8 + 8 + … + 3, at most 4,096 tokens each"),
        ((20, 12), 2, "64 = 2 ranks × (20 + 12), at most 4,096 tokens each"),
        ((32,), 2, "64 = 2 ranks × 32"),
        ((), 1, "64 in 3 micro-batches"),  # a plan of an earlier version
    ],
)
def test_a_product_only_where_it_is_exact(
    make_plan: Make, parts: tuple[int, ...], ranks: int, said: str
):
    plan = make_plan(
        effective_batch_size=64, step_parts=parts, ranks=ranks, gradient_accumulation_steps=3
    )
    assert effective_batch(plan) == said


def rows(page: str) -> dict[str, float]:
    """The memory table read back."""
    table = page.split("Memory in GiB")[1].split("Time")[0].splitlines()[2:]
    cells = [line.split("  ") for line in table if line.strip()]
    return {line[0].strip(): float(next(c for c in line[1:] if c.strip())) for line in cells}


def test_the_memory_adds_up_to_the_capacity(make_plan: Make):
    found = rows(printed(plan_page(make_plan())))
    assert found["allocated at the peak"] + found["reserve"] == found["reserved at the peak"]
    assert found["reserved at the peak"] + found["headroom"] == 23.5
    over = rows(printed(plan_page(make_plan(memory__capacity_gib=14.0, memory__fits=False))))
    assert over["reserved at the peak"] - over["missing"] == 14.0


def test_adapters_are_on_the_page_where_there_are_any(make_plan: Make):
    assert "adapters" not in printed(plan_page(make_plan()))
    page = printed(plan_page(make_plan(memory__adapters_gib=0.25)))
    [row] = [line.split() for line in page.splitlines() if line.startswith("adapters ")]
    assert row[1] == "0.25"


def test_bars_are_in_proportion(make_plan: Make):
    page = printed(plan_page(make_plan(memory__optimizer_gib=8.0, memory__weights_gib=4.0)))
    halves = {
        line.split()[0]: line.count("━") * 2 + line.count("╸")
        for line in page.splitlines()
        if line.startswith(("weights ", "optimizer "))
    }
    assert abs(halves["optimizer"] - 2 * halves["weights"]) <= 1
    assert abs(halves["optimizer"] - 48 * 8.0 / 23.5) <= 1


def test_what_was_not_recorded_is_said(make_plan: Make):
    assert f"Time: {UNRECORDED}" in printed(plan_page(make_plan(time=UNKNOWN)))
    page = printed(plan_page(make_plan(time__mfu=None, memory__error_percent=None)))
    assert f"MFU        {UNRECORDED}" in page
    assert f"error {UNRECORDED}" in page


def test_energy_cost_and_measurements_only_where_given(make_plan: Make):
    page = printed(plan_page(make_plan()))
    assert "kWh" not in page
    assert "Measured" not in page
    item = Measurement(name="step", unit="s", value=0.1661, samples=(0.1, 0.2, 0.3))
    plan = make_plan(time__energy_kwh=1.234, time__cost=5.5, measurements=(item,))
    page = printed(plan_page(plan))
    for text in ("1.23 kWh", "5.50", "0.1661 s"):
        assert text in page


@pytest.mark.parametrize("width", [80, 110])
def test_no_line_is_wider_than_the_terminal(make_plan: Make, width: int):
    page = printed(plan_page(make_plan(ranks=2)), width)
    assert max(map(len, page.splitlines())) <= width
    assert "\x1b" not in page  # piped: plain


def test_a_plan_without_estimates_is_shown(make_plan: Make):
    page = printed(plan_page(make_plan(memory=None, time=None, gpu=None, reasons=(), advice=())))
    assert page.splitlines()[0] == "Fits this machine: memory not estimated"


@given(text=st.text(st.characters(exclude_categories=["C", "Z", "M"]), min_size=1, max_size=20))
def test_no_text_of_a_plan_is_read_as_markup(make_plan: Make, text: str):
    text = f"[red]{text}[/]"
    reason = Reason(setting=text, value=1, why="why")
    page = printed(plan_page(make_plan(reasons=(reason,), gpu=None)), 200)
    assert text in page
    assert text in make_plan(gpu=text).verdict()
    assert text in printed(comparison([(text, make_plan())]), 200)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.09, "90 ms"),
        (0.9996, "1.0 s"),
        (4.21, "4.2 s"),
        (59.99, "1 min 0 s"),
        (425, "7 min 5 s"),
        (3599.9, "1 h 0 min"),
        (12000, "3 h 20 min"),
        (86399, "1 d 0 h"),
        (187200, "2 d 4 h"),
    ],
)
def test_a_duration_as_a_person_says_it(seconds: float, said: str):
    assert duration(seconds) == said


def compared(make_plan: Make) -> list[tuple[str, Plan]]:
    return [
        ("fast_but_small", make_plan(fits=False, time__samples_per_second=900.0)),
        ("slow", make_plan(time__samples_per_second=10.0)),
        ("unknown", make_plan(time=UNKNOWN)),
        ("fast", make_plan(time__samples_per_second=100.0)),
        ("unestimated", make_plan(time=None, memory=None)),
    ]


def test_those_that_fit_come_first_then_the_fastest(make_plan: Make):
    names = [slug for slug, _ in ranked(compared(make_plan))]
    assert names == ["fast", "slow", "unestimated", "unknown", "fast_but_small"]
    lines = printed(comparison(compared(make_plan)), 100).splitlines()
    assert [line.split()[0] for line in lines[1:]] == names
    data = comparison_data(compared(make_plan))
    assert [row["gpu"] for row in data] == names
    assert data[0]["samples_per_second"] == 100.0
    assert data[2]["peak_reserved_gib"] is None


def test_a_row_of_the_comparison_has_what_one_chooses_by(make_plan: Make):
    line = printed(comparison([("rtx_4090", make_plan())]), 100).splitlines()[1]
    cells = "rtx_4090 yes bf16 8 × 2 – 17.5 of 23.5 96.2 46.2 min 20%"
    assert " ".join(line.split()) == cells


def test_a_narrow_terminal_cuts_no_number(make_plan: Make):
    plan = make_plan(
        batch_size=128,
        gradient_accumulation_steps=16,
        effective_batch_size=2048,
        gradient_checkpointing="selective",
        memory__peak_reserved_gib=101.25,
        memory__capacity_gib=139.81,
        time__samples_per_second=10_962.0,
        time__total_seconds=400_000.0,
    )
    lines = printed(comparison([("rtx-pro-6000-blackwell-workstation", plan)]), 80).splitlines()
    assert "…" not in "".join(lines)
    for part in ("128 × 16", "part", "101.2 of 139.8", "10,962.0", "4.6 d"):
        assert part in lines[1]
