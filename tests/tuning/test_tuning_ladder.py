"""The ladder: what each optimization gives, against what it is known to give."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ladder_toy as toy
import numpy as np
import pytest
from rich.console import Console

from trainfit.cli.pages import ladder_page, write_ladder
from trainfit.core.errors import BadInput
from trainfit.core.plan_records import Plan
from trainfit.measuring import timing
from trainfit.measuring.timing import median_interval, ratio_interval, rounds_interval
from trainfit.reports.plots import ladder_plot
from trainfit.reports.study_sections import ladder_section
from trainfit.runs.reader import read_run
from trainfit.tuning import trial
from trainfit.tuning.climb import Ladder, LadderStep, climb
from trainfit.tuning.trial import run_trial
from trainfit.tuning.tuned_cache import Trial, TrialCandidate

BEST = toy.plan(
    packed=True,
    attention="varlen",
    num_workers=4,
    prefetch_factor=2,
    pin_memory=True,
    persistent_workers=True,
    effective_batch_size=64,
    batch_size=32,
    micro_batch_tokens=32 * toy.LONGEST,
    gradient_accumulation_steps=2,
    compile=True,
)
EPOCH = 63
"""Steps: 4,000 sequences by 64."""


def cost(candidate: TrialCandidate) -> float:
    """Seconds of a step, by a formula of the test's own."""
    plan, naive = candidate.plan, habits(candidate)
    seconds = 0.10
    seconds += (0.40 if plan.runtime.tf32 else 0.80) * (plan.precision == "fp32")
    seconds += 0.05 * (plan.optimizer == "adamw")
    seconds += 0.02 * naive["zeroed"] + 0.03 * naive["eager"] + 0.06 * naive["shuffled"]
    seconds += 0.04 * (plan.num_workers == 0) + 0.01 * (not plan.pin_memory)
    seconds += 0.07 * (plan.batch_size < 32)
    seconds += 0.05 * (not plan.packed) + 0.05 * (not plan.compile)
    seconds += 0.08 * (plan.gradient_checkpointing == "full")
    if naive["epoch_steps"]:
        seconds += 0.02 if plan.persistent_workers else 1.30
    return seconds


SECONDS = {
    "baseline": 1.28,
    "TF32": 0.88,
    "mixed precision": 0.48,
    "fused AdamW": 0.43,
    "set_to_none": 0.41,
    "loader workers": 0.37,
    "pinned memory": 0.36,
    "persistent workers": 0.36 + 0.02 / EPOCH,
    "cuDNN benchmark": 0.36,
    "attention kernel": 0.33,
    "batch size": 0.26,
    "grouping by length": 0.20,
    "packing": 0.15,
    "torch.compile": 0.10,
    "gradient checkpointing": 0.18,
    "fp16 instead of bf16": 0.10,
    "CUDA graphs": 0.10,
}
"""The formula, with one thing after another switched on."""
WITHOUT = {
    "TF32": 0.10,
    "mixed precision": 0.55,  # and without packing, which needs it
    "fused AdamW": 0.15,
    "set_to_none": 0.12,
    "loader workers": 0.14,
    "pinned memory": 0.11,
    "persistent workers": 0.10 + 1.28 / EPOCH,
    "cuDNN benchmark": 0.10,
    "batch size": 0.17,
    "packing": 0.15,
    "torch.compile": 0.15,
}
"""And with one thing switched off. Packing does the work of grouping and of the kernel."""


def habits(candidate: TrialCandidate) -> dict[str, Any]:
    none = {"eager": False, "shuffled": False, "zeroed": False, "epoch_steps": None}
    return none | candidate.task.arguments.get("naive", {})


class Machine:
    """Runs no trial: its steps take what the formula says, give or take 2%."""

    def __init__(self, fails: dict[str, Any] | None = None) -> None:
        self.random, self.ran = np.random.default_rng(1), list[TrialCandidate]()
        self.fails = fails or {}

    def __call__(self, candidate: TrialCandidate, *, steps: int, **_rest: Any) -> Trial:
        self.ran.append(candidate)
        plan = candidate.plan
        if self.fails and all(getattr(plan, name) == want for name, want in self.fails.items()):
            return Trial(settings=candidate.settings, status="oom", note="CUDA out of memory")
        seconds = cost(candidate) * (1 + 0.02 * self.random.standard_normal(steps))
        return Trial(
            settings=candidate.settings,
            status="ok",
            step_seconds=tuple(seconds),
            step_samples=(plan.effective_batch_size,) * steps,
            peak_memory_gib=1.0 + plan.batch_size / 10,
        )


def climbed(machine: Machine | None = None, best: Plan = BEST, **options: Any) -> Ladder:
    run = machine or Machine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "_RESAMPLES", 300)  # enough to know the ends of an interval by 1%
        return climb(best, toy.SPEC, toy.machine(compiler=True), run=run, **options)


def named(steps: tuple[LadderStep, ...]) -> dict[str, LadderStep]:
    return {step.name: step for step in steps}


@pytest.fixture(scope="module")
def whole() -> Ladder:
    return climbed(title="a toy")


# ── numbers ───────────────────────────────────────────────────────────────────────────────────


def holds(found: Any, truth: float) -> bool:
    """The interval has the truth in it, or next to it: one in twenty has not."""
    return found is not None and found.low * 0.99 <= truth <= found.high * 1.01


def test_each_step_gives_what_the_formula_says(whole: Ladder):
    assert [step.name for step in whole.steps] == list(SECONDS)
    for step in whole.steps:
        seconds = SECONDS[step.name]
        assert holds(step.samples_per_second, 64 / seconds), step.name
        assert holds(step.speedup, 1.28 / seconds), step.name


def test_each_step_is_compared_with_the_one_before_it(whole: Ladder):
    steps = named(whole.steps)
    assert steps["baseline"].gain is None
    assert holds(steps["TF32"].gain, 1.28 / 0.88)
    assert holds(steps["torch.compile"].gain, 0.15 / 0.10)
    assert holds(steps["gradient checkpointing"].gain, 0.10 / 0.18)
    # What nothing is built on is not what the next one is compared with.
    assert holds(steps["fp16 instead of bf16"].gain, 1.0)
    assert not steps["gradient checkpointing"].kept
    assert whole.best.name == "torch.compile"


def test_the_start_of_an_epoch_is_spread_over_the_jobs_epochs(whole: Ladder):
    step = named(whole.steps)["persistent workers"]
    assert holds(step.gain, (0.36 + 1.30 / EPOCH) / (0.36 + 0.02 / EPOCH))
    assert f"{EPOCH} steps" in step.note


FIRST = ["mixed precision", "torch.compile", "TF32", "packing", "batch size"]
"""What gave most in the climb is removed first, since the time may run out: 1.83, 1.5, 1.45, …"""


def test_the_best_is_measured_without_each(whole: Ladder):
    assert [step.name for step in whole.without[:5]] == FIRST
    assert {step.name for step in whole.without} == set(WITHOUT)
    for step in whole.without:
        before = 0.10 + 0.02 / EPOCH if step.name == "persistent workers" else 0.10
        own = WITHOUT[step.name] + (before - 0.10)
        assert holds(step.gain, before / own), step.name
    assert "and packing" in named(whole.without)["mixed precision"].what


def test_every_row_is_measured_in_every_round_and_the_baseline_again_at_the_end(whole: Ladder):
    assert whole.rounds == 3
    assert {len(step.step_seconds) for step in (*whole.steps[1:], *whole.without)} == {3}
    assert len(whole.steps[0].step_seconds) == 6
    assert holds(whole.drift, 1.0)


@pytest.mark.parametrize("disturbed", [0.0, 0.1], ids=["quiet", "rounds differ"])
def test_a_ratio_has_the_interval_of_its_kind(disturbed: float):
    """Nearly all intervals of many experiments have the truth in them, drift or not."""
    random = np.random.default_rng(0)

    def measured(median: float) -> list[list[float]]:
        rounds = median * np.exp(disturbed * random.standard_normal(6))
        return [list(random.lognormal(np.log(each), 0.05, 20)) for each in rounds]

    found = [ratio_interval(measured(1.5), measured(1.0)) for _ in range(100)]
    assert 85 <= sum(one.low <= 1.5 <= one.high for one in found) <= 100
    widths = [one.high - one.low for one in found]
    assert (np.median(widths) > 0.15) == (disturbed > 0)


def test_one_round_has_the_usual_interval():
    samples = list(np.random.default_rng(3).normal(10.0, 1.0, 200))
    ours, plain = rounds_interval([samples]), median_interval(samples)
    assert ours.value == plain.value
    assert (ours.low, ours.high) == pytest.approx((plain.low, plain.high), rel=0.01)


# ── what goes wrong ───────────────────────────────────────────────────────────────────────────


def test_a_row_that_fails_leaves_a_record_and_nothing_is_built_on_it():
    machine = Machine(fails={"batch_size": 32})
    found = climbed(machine)
    steps = named(found.steps)
    failed = steps["batch size"]
    assert (failed.status, failed.kept, failed.note) == ("oom", False, "CUDA out of memory")
    assert failed.samples_per_second is None
    assert holds(steps["grouping by length"].gain, 0.33 / 0.27)
    assert "batch size" not in named(found.without)


def test_a_baseline_that_does_not_fit_is_passed_over():
    found = climbed(Machine(fails={"precision": "fp32"}))
    steps = named(found.steps)
    assert [steps[name].status for name in ("baseline", "TF32")] == ["oom", "oom"]
    assert steps["TF32"].kept  # it may be part of what makes it fit
    assert holds(steps["fused AdamW"].speedup, 0.48 / 0.43)


class Slower(Machine):
    """One thing costs time, at first or always."""

    def __init__(self, name: str, value: Any, trials: int | None = None) -> None:
        super().__init__()
        self.name, self.value, self.left = name, value, trials

    def __call__(self, candidate: TrialCandidate, **rest: Any) -> Trial:
        trial = super().__call__(candidate, **rest)
        if getattr(candidate.plan, self.name) != self.value or self.left == 0:
            return trial
        self.left = None if self.left is None else self.left - 1
        return replace(trial, step_seconds=tuple(each + 0.5 for each in trial.step_seconds))


def test_what_the_plan_has_is_built_on_though_it_is_slower_alone():
    """Packing needs half precision: an unlucky start must not end the climb below the plan."""
    found = climbed(Slower("precision", "bf16", trials=1), rounds=1)
    steps = named(found.steps)
    assert steps["mixed precision"].gain.high < 1
    assert steps["mixed precision"].kept
    assert steps["mixed precision"].note == ""  # a single trial may be an accident
    assert len(steps["mixed precision"].step_seconds) == 1
    assert holds(steps["torch.compile"].samples_per_second, 64 / SECONDS["torch.compile"])
    assert found.best.name == "torch.compile"


def test_what_is_slower_in_every_round_is_said_to_be():
    found = named(climbed(Slower("num_workers", 4)).steps)["loader workers"]
    assert found.kept
    assert "slower on its own" in found.note


def test_what_the_plan_has_not_is_left_out_where_it_is_slower():
    found = climbed(Slower("compile", True), replace(BEST, compile=False))
    steps = named(found.steps)
    assert not steps["torch.compile"].kept
    assert "slower here" in steps["torch.compile"].note
    assert found.best.name == "packing"
    assert "torch.compile" not in named(found.without)


def test_what_was_slow_by_accident_is_kept():
    found = climbed(Slower("compile", True, trials=1), replace(BEST, compile=False), rounds=1)
    step = named(found.steps)["torch.compile"]
    assert step.kept
    assert len(step.step_seconds) == 2


def test_the_removals_can_be_measured_alone():
    machine = Machine()
    found = climbed(machine, removals_only=True, rounds=1)
    assert [step.name for step in found.steps] == ["the best"]
    assert all(step.speedup is None for step in found.without)
    assert holds(found.steps[0].samples_per_second, 64 / 0.10)
    assert {step.name for step in found.without} == set(WITHOUT)
    for step in found.without:
        if step.name != "persistent workers":
            assert holds(step.gain, 0.10 / WITHOUT[step.name]), step.name
    assert not any(one.plan.precision == "fp16" for one in machine.ran)


def test_some_rows_can_be_measured_alone_where_they_stand():
    chosen = ("batch size", "grouping by length", "torch.compile", "gradient checkpointing")
    found = climbed(only=chosen, rounds=1)
    assert tuple(step.name for step in found.steps) == chosen
    assert not found.without
    steps = named(found.steps)
    for name, step in steps.items():
        assert step.speedup is None
        assert holds(step.samples_per_second, 64 / SECONDS[name]), name
    assert steps["batch size"].gain is None
    grouped = SECONDS["batch size"] / SECONDS["grouping by length"]
    assert holds(steps["grouping by length"].gain, grouped)
    assert steps["torch.compile"].gain is None  # packing, before it, was not asked for
    again = SECONDS["torch.compile"] / SECONDS["gradient checkpointing"]
    assert holds(steps["gradient checkpointing"].gain, again)
    assert [step.kept for step in found.steps] == [True, True, True, False]


def test_a_row_that_does_not_exist_is_told():
    with pytest.raises(BadInput, match=r"no row 'grouping'.*grouping by length"):
        climbed(only=["grouping"])


def test_the_time_is_kept(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr("trainfit.tuning.climb.time.monotonic", lambda: now[0])

    class Slow(Machine):
        def __call__(self, candidate: TrialCandidate, **rest: Any) -> Trial:
            assert rest["limit"] <= 60 - now[0]
            now[0] += 9.0
            return super().__call__(candidate, **rest)

    machine = Slow()
    found = climbed(machine, minutes=1.0)
    assert len(machine.ran) == 6  # a seventh would take longer than there is time
    assert found.ended == "time is up"
    last = found.steps[-1]
    assert (last.status, last.kept) == ("skipped", False)
    assert "there was no time left" in last.note
    assert found.rounds == 1


def test_an_interrupt_keeps_what_was_measured():
    class Interrupted(Machine):
        def __call__(self, candidate: TrialCandidate, **rest: Any) -> Trial:
            if len(self.ran) == 3:
                raise KeyboardInterrupt
            return super().__call__(candidate, **rest)

    found = climbed(Interrupted())
    assert found.ended == "interrupted"
    assert [step.status for step in found.steps] == ["ok", "ok", "ok", "skipped"]


# ── every row of the documents ────────────────────────────────────────────────────────────────

DOCUMENTS = {
    "TF32",
    "mixed precision",
    "fused AdamW",
    "set_to_none",
    "loader workers",
    "pinned memory",
    "persistent workers",
    "cuDNN benchmark",
    "attention kernel",
    "batch size",
    "grouping by length",
    "packing",
    "torch.compile",
    "gradient checkpointing",
    "CUDA graphs",
    "channels-last",
    "Liger kernels",
    "evaluation batch size",
}


@pytest.mark.parametrize(
    "best",
    [BEST, toy.plan(), toy.plan(precision="fp32", optimizer="adamw", runtime=BEST.runtime)],
    ids=["all of it", "padded", "fp32"],
)
def test_every_row_is_there_or_says_why_not(best: Plan):
    found = climbed(best=best, rounds=1)
    listed = {step.name for step in found.steps[1:]}
    reasons = {one.name: one.reason for one in found.not_applicable}
    assert not listed & reasons.keys()
    assert listed | reasons.keys() >= DOCUMENTS
    assert all(reasons.values())
    assert "images" in reasons["channels-last"]
    if not best.packed:
        assert reasons["packing"] == "nobody packs a toy"


def test_a_plan_that_needs_checkpointing_has_it_as_a_step():
    found = climbed(best=replace(BEST, gradient_checkpointing="selective"), rounds=1)
    [step] = [step for step in found.steps if step.name == "gradient checkpointing"]
    assert step.kept
    assert found.steps.index(step) < [s.name for s in found.steps].index("batch size")


# ── pages ─────────────────────────────────────────────────────────────────────────────────────


def test_json_and_back(whole: Ladder, tmp_path: Path):
    data, picture = write_ladder(whole, tmp_path)
    assert Ladder.load(data) == whole
    assert picture.read_text().startswith("<svg")
    assert write_ladder(whole, tmp_path / "a" / "b.json")[1] == tmp_path / "a" / "b.svg"
    first = json.loads(data.read_text())["steps"][0]
    assert {"name", "samples_per_second", "peak_memory_gib", "note"} <= first.keys()
    assert first["samples_per_second"].keys() == {"value", "low", "high"}


def test_the_picture_has_a_bar_for_each_row():
    found = climbed(Machine(fails={"batch_size": 32}))
    svg = ladder_plot(found)
    kept = [step for step in found.steps if step.kept and step.speedup]
    aside = [step for step in found.steps if not step.kept and step.speedup]
    assert svg.count('class="speed"') == len(kept)
    assert svg.count('class="aside"') == len(aside)
    assert svg.count('class="without"') == len(found.without)
    measured = len(kept) + len(aside) + len(found.without)
    assert svg.count('class="whisker"') == svg.count('class="memory"') == measured
    assert ">oom</text>" in svg
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    assert "prefers-color-scheme: dark" in svg


def test_the_table_has_a_line_for_each_row(whole: Ladder):
    console = Console(width=200, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115
    console.print(ladder_page(whole))
    text = console.export_text()
    for step in whole.steps:
        assert f"\n{step.name} " in text
    assert "channels-last: it is a layout of images" in text
    assert "95% intervals over 3 rounds" in text


def test_the_report_of_a_run_shows_it(whole: Ladder, tmp_path: Path):
    write_ladder(whole, tmp_path)
    section = ladder_section(read_run(tmp_path))
    assert section is not None
    bars, steps, without, unfit, remark = json.loads(section.to_json())["blocks"]
    assert [row["label"] for row in bars["rows"]] == list(SECONDS)
    assert [row[0] for row in steps["rows"]] == list(SECONDS)
    assert steps["rows"][1][3].startswith("1.4")  # over the last
    assert len(without["rows"]) == len(WITHOUT)
    assert ["channels-last", "it is a layout of images, and text has none"] in unfit["rows"]
    assert "as fast as at first" in remark["text"]


# ── the engine's own loop ─────────────────────────────────────────────────────────────────────


def in_process(candidate: TrialCandidate, *, limit: float, **rest: Any) -> Trial:
    return run_trial(candidate, **rest)


def test_sleeps_that_are_saved_are_found(monkeypatch: pytest.MonkeyPatch):
    """To the last digit, by a clock that nothing but the sleeps moves."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(toy, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(trial, "time", SimpleNamespace(perf_counter=lambda: now))
    found = climb(toy.plan(), toy.SPEC, toy.machine(), run=in_process, steps=8, rounds=1)
    steps = named(found.steps)
    slowest = before = toy.FAST + sum(toy.COSTS.values())
    for name, saved in (
        ("TF32", "tf32"),
        ("mixed precision", "precision"),
        ("fused AdamW", "optimizer"),
    ):
        after = before - toy.COSTS[saved]
        step = steps[name]
        assert step.gain is not None
        assert step.speedup is not None
        assert step.gain.low == pytest.approx(before / after)
        assert step.gain.high == pytest.approx(before / after)
        assert step.speedup.value == pytest.approx(slowest / after)
        before = after


@pytest.mark.soak
def test_a_trial_that_kills_its_process_is_a_row():
    spec = replace(toy.SPEC, arguments={"crash_in": "bf16"})
    found = climb(toy.plan(), spec, toy.machine(), steps=3, rounds=1)
    steps = named(found.steps)
    assert (steps["mixed precision"].status, steps["mixed precision"].kept) == ("crashed", False)
    assert "exit code 7" in steps["mixed precision"].note
    assert steps["fused AdamW"].status == "ok"


def test_liger_has_no_place_where_it_has_no_layers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trainfit.kernels.supported.is_installed", lambda: True)
    for obstacle in (None, "Liger has no layers for bert"):
        found = climbed(best=BEST, rounds=1, no_liger=obstacle)
        reasons = {one.name: one.reason for one in found.not_applicable}
        assert reasons.get("Liger kernels") == obstacle
        tried = [step.name for step in found.steps]
        assert tried.count("Liger kernels") == (obstacle is None)
