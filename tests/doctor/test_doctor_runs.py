"""Run folders: one that went well, and one for each thing that can go wrong."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainfit.cli.main import run
from trainfit.core.errors import BadInput
from trainfit.core.plan_records import MemoryEstimate, Plan, RuntimeSettings, TaskSpec, Workload
from trainfit.core.records import Event, RunResult
from trainfit.doctor import examine_run
from trainfit.doctor.run_checks import CHECKS
from trainfit.runs.run_folder import Journal

PLAN = Plan(
    fits=True,
    task=TaskSpec(factory="a:b", arguments={}),
    workload=Workload(
        lengths=(10,), sequences=100, max_length=512, effective_batch_size=16, epochs=1.0
    ),
    gpu="rtx-3090",
    precision="bf16",
    runtime=RuntimeSettings(tf32=True),
    packed=True,
    attention="varlen",
    batch_size=8,
    micro_batch_tokens=4096,
    gradient_accumulation_steps=2,
    effective_batch_size=16,
    cuts=(2, 4),
    gradient_checkpointing="none",
    compile=False,
    compile_mode="default",
    optimizer="adamw_fused",
    num_workers=2,
    pin_memory=True,
    persistent_workers=True,
    prefetch_factor=2,
    eval_batch_size=32,
    memory=MemoryEstimate(
        weights_gib=2.0,
        gradients_gib=2.0,
        optimizer_gib=4.0,
        activations_gib=10.0,
        workspace_gib=0.5,
        peak_allocated_gib=20.0,
        peak_reserved_gib=21.0,
        capacity_gib=23.5,
        fits=True,
        error_percent=2.0,
    ),
    time=None,
)


def rows(**changed: Any) -> list[dict[str, Any]]:
    """Forty rows of ten steps; a list gives each row its value."""
    usual = {
        "loss": 0.5,
        "mfu": 0.25,
        "memory_gib": 20.0,
        "wait_share": 0.01,
        "step_seconds": 1.0,
        "tokens_per_second": 9000.0,
        "micro_batches": 2,
    }
    made = []
    for n in range(40):
        values = {
            name: value[n] if isinstance(value, list) else value
            for name, value in {**usual, **changed}.items()
        }
        made.append({"kind": "train", "step": 10 * (n + 1), **values})
    return made


def write(
    folder: Path,
    *,
    plan: Plan = PLAN,
    train: list[dict[str, Any]] | None = None,
    evaluations: list[dict[str, Any]] | None = None,
    gpus: list[int] | None = None,
    events: tuple[tuple[str, str], ...] = (),
    log: str = "",
    ended: bool = True,
) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"id": "x"}\n')
    plan.save(folder / "plan.json")
    metrics = [*(rows() if train is None else train), *(evaluations or [])]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in metrics) + '{"kind": "tra'  # cut off by a kill
    )
    told = [Event(kind=kind, step=12, seconds=1.0, text=text) for kind, text in events]
    with closing(Journal(folder)) as journal:
        journal.line("Device cuda")
        for event in told:
            journal.event(event, {"micro_batches": 4} if event.text == AGAIN else {})
    with (folder / "train.log").open("a") as file:
        file.write(log)
    if gpus is not None:
        samples = [{"step": 1, "gpus": [{"index": 0, "utilisation_percent": n}]} for n in gpus]
        (folder / "gpus.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    if ended:
        RunResult(
            run=str(folder),
            status="finished",
            steps=400,
            seconds=400.0,
            metrics={},
            peak_memory_gib=20.0,
            events=tuple(told),
        ).save(folder / "result.json")
    return folder


AGAIN = "memory ran out again: steps are cut into 4 from here"
ONCE = "memory ran out: the cache was given back and the step is taken again"
T4 = replace(PLAN, gpu="t4", precision="bf16")
FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "failed": ("run_failed", {"events": (("failed", "memory ran out with the finest cut"),)}),
    "out of memory": ("run_out_of_memory", {"events": (("oom", ONCE), ("oom", AGAIN))}),
    "out of memory, not ended": (
        "run_out_of_memory",
        {"events": (("oom", ONCE),), "ended": False},
    ),
    "not finite": (
        "run_not_finite",
        {"events": (("skipped", "step 12: loss nan, gradient norm nan; no update"),)},
    ),
    "overflows": (
        "run_overflows",
        {
            "plan": replace(PLAN, precision="fp16"),
            "events": (("overflow", "step 1: loss 1, gradient norm inf; no update"),) * 30,
        },
    ),
    "low MFU": ("run_low_mfu", {"train": rows(mfu=0.05)}),
    "waits": ("run_waits", {"train": rows(wait_share=0.3)}),
    "idle": ("run_underused", {"gpus": [30, 40, 50]}),
    "memory over the plan": ("run_over_plan", {"train": rows(memory_gib=22.0)}),
    "evaluation takes memory": (
        "run_evaluation_memory",
        {
            "train": rows(memory_gib=[16.0] * 10 + [20.0] * 30),
            "evaluations": [{"kind": "evaluation", "step": 100, "f1": 0.5}],
        },
    ),
    "evaluation takes time": (
        "run_evaluation_time",
        {
            "evaluations": [
                {"kind": "evaluation", "step": step, "seconds": 200.0} for step in (200, 400)
            ]
        },
    ),
    "slows down": ("run_slowing", {"train": rows(tokens_per_second=[9e3] * 20 + [5e3] * 20)}),
    "bf16 on a T4": ("run_bf16_emulated", {"plan": T4}),
    "fp32": ("run_full_precision", {"plan": replace(PLAN, precision="fp32")}),
    "a line in its log": (
        "loader_worker_killed",
        {"log": "DataLoader worker (pid 5) is killed by signal: Killed.\n"},
    ),
}


def test_a_run_that_went_well(tmp_path: Path):
    assert examine_run(write(tmp_path / "run")) == ()


def test_an_evaluation_that_leaves_most_of_the_memory_free_is_no_fault(tmp_path: Path):
    memory = rows(memory_gib=[0.9] * 10 + [1.1] * 30)
    evaluations = [{"kind": "evaluation", "step": 100, "f1": 0.5}]
    found = examine_run(write(tmp_path / "run", train=memory, evaluations=evaluations))
    assert "run_evaluation_memory" not in {one.id for one in found}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_of_a_run_is_found(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    expected, changed = FAULTS[name]
    folder = write(tmp_path / "run", **changed)
    assert [f.id for f in examine_run(folder) if f.severity != "info"] == [expected]
    assert run(["doctor", "--run", str(folder), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    [found] = [one for one in data["findings"] if one["id"] == expected]
    assert set(found) == {"id", "severity", "title", "evidence", "why", "mend"}
    assert all(found.values())


def test_every_check_of_runs_has_a_fault_here():
    simulated = {expected for expected, _ in FAULTS.values()} | {"run_memory_unused"}
    assert {check.fault.id for check in CHECKS} <= simulated


def test_unused_memory_is_a_warning_only_where_the_gpu_is_slow_too(tmp_path: Path):
    [good] = examine_run(write(tmp_path / "a", train=rows(memory_gib=9.0)))
    slow = examine_run(write(tmp_path / "b", train=rows(memory_gib=9.0, mfu=0.03)))
    assert (good.id, good.severity) == ("run_memory_unused", "info")
    assert {f.id: f.severity for f in slow} == {
        "run_low_mfu": "warning",
        "run_memory_unused": "warning",
    }


def test_the_target_is_that_of_the_gpu(tmp_path: Path):
    # 16% is good on an A30 and not on a 3090, says the tuning guide's table.
    on_a30 = write(tmp_path / "a", plan=replace(PLAN, gpu="a30"), train=rows(mfu=0.16))
    on_3090 = write(tmp_path / "b", train=rows(mfu=0.16))
    assert examine_run(on_a30) == ()
    [finding] = examine_run(on_3090)
    assert "18%" in finding.evidence


def test_advice_on_speed_leaves_out_what_is_done_already(tmp_path: Path):
    compiled = replace(PLAN, compile=True)
    [finding] = examine_run(write(tmp_path / "a", plan=compiled, train=rows(mfu=0.05)))
    assert "optimization.compile" not in finding.mend
    assert "mixed_precision" not in finding.mend
    assert finding.mend.startswith("1. Raise training.batch_size")
    waiting = write(tmp_path / "b", train=rows(mfu=0.05, wait_share=0.4))
    mfu = next(f for f in examine_run(waiting) if f.id == "run_low_mfu")
    assert mfu.mend.startswith("1. training.num_workers")


def test_a_retry_that_went_through_was_fragmentation(tmp_path: Path):
    [finding] = examine_run(write(tmp_path / "a", events=(("oom", ONCE),)))
    assert "device.expandable_segments=true" in finding.mend
    assert "training.batch_size" not in finding.mend


def test_nans_lead_out_of_fp16_and_not_into_it(tmp_path: Path):
    event = (("skipped", "step 12: loss nan, gradient norm nan; no update"),)
    half = write(tmp_path / "a", plan=replace(PLAN, precision="fp16"), events=event)
    wide = write(tmp_path / "b", events=event)
    [fp16] = examine_run(half)
    [bf16] = examine_run(wide)
    assert "device.mixed_precision=bf16" in fp16.mend.splitlines()[0]
    assert "mixed_precision=fp16" not in bf16.mend


def test_a_few_overflows_are_how_fp16_finds_its_scale(tmp_path: Path):
    event = (("overflow", "step 1: loss 1, gradient norm inf; no update"),) * 4
    plan = replace(PLAN, precision="fp16")
    assert examine_run(write(tmp_path / "a", plan=plan, events=event)) == ()


def test_folds_are_read_one_by_one_and_told_apart(tmp_path: Path):
    folder = write(tmp_path / "run")
    write(folder / "fold-1")
    write(folder / "fold-2", train=rows(mfu=0.02))
    [finding] = examine_run(folder)
    assert finding.evidence.startswith("fold-2: MFU 2.0%")


def test_short_runs_are_not_told_off_for_seconds(tmp_path: Path):
    few = [row | {"step_seconds": 0.01, "wait_share": 0.5} for row in rows()[:3]]
    late = [{"kind": "evaluation", "step": 10, "seconds": 3.0}]
    assert examine_run(write(tmp_path / "a", train=few, evaluations=late)) == ()


def test_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(["doctor", "--run", str(tmp_path)]) == 2
    assert "there is no run" in capsys.readouterr().err
    (tmp_path / "run.json").write_text('{"id": "x"}')
    with pytest.raises(BadInput, match="holds no training"):
        examine_run(tmp_path)
