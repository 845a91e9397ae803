"""One trial in this process: what it times, and how it fails."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import tuning_toy as toy

from trainfit.core.errors import BadInput
from trainfit.core.plan_records import TaskSpec
from trainfit.measuring.timing import median_interval
from trainfit.runtime import compile_model, forget_compiled
from trainfit.tuning.trial import run_trial
from trainfit.tuning.tuned_cache import Trial, TrialCandidate

SLEEP = 0.02


def test_a_step_takes_what_it_sleeps() -> None:
    found = run_trial(toy.candidate(sleep=SLEEP), steps=8, warm_up=2)
    assert found.status == "ok"
    assert len(found.step_seconds) == 8
    assert min(found.step_seconds) >= SLEEP
    assert float(np.median(found.step_seconds)) < 2 * SLEEP
    rates = [toy.BATCH / seconds for seconds in found.step_seconds]
    assert found.samples_per_second == median_interval(rates)
    assert found.tokens_per_second is not None
    value = found.tokens_per_second.value
    assert value == pytest.approx(toy.LENGTH * found.samples_per_second.value)
    assert found.first_steps_seconds is not None
    assert found.first_steps_seconds >= 2 * SLEEP
    assert found.seconds > 10 * SLEEP
    assert found.peak_memory_gib is not None
    assert found.peak_reserved_gib is None


def test_more_steps_than_an_epoch_has() -> None:
    found = run_trial(toy.candidate(), steps=2 * toy.STEPS + 3, warm_up=1)
    assert found.step_samples == (toy.BATCH,) * (2 * toy.STEPS + 3)


def test_time_that_is_up_ends_the_timed_steps_after_three() -> None:
    found = run_trial(toy.candidate(sleep=SLEEP), steps=500, warm_up=0, most_seconds=0.001)
    assert len(found.step_seconds) == 3
    longer = run_trial(toy.candidate(sleep=SLEEP), steps=500, warm_up=0, most_seconds=0.3)
    assert 3 < len(longer.step_seconds) <= 0.3 / SLEEP + 2


def test_memory_that_runs_out_is_an_outcome() -> None:
    found = run_trial(toy.candidate(how="oom"), steps=3, warm_up=1)
    assert (found.status, found.samples_per_second) == ("oom", None)
    assert "memory ran out" in found.note


def test_a_factory_that_runs_out_is_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_args: object, **_kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(toy.ToyTask, "build_model", out_of_memory)
    assert run_trial(toy.candidate(), steps=3, warm_up=1).status == "oom"


def test_an_error_is_a_record_in_one_line() -> None:
    found = run_trial(toy.candidate({"optimizer": "adamw"}, how="error"), steps=3, warm_up=1)
    assert found.status == "failed"
    assert found.settings == {"optimizer": "adamw"}
    assert found.note == "ValueError: this cannot work"


@pytest.mark.parametrize("factory", ["nowhere:trial", "tuning_toy:nothing", "no colon"])
def test_a_factory_that_is_not_there_is_a_failure(factory: str) -> None:
    lost = TrialCandidate(
        settings={}, plan=toy.plan(), task=TaskSpec(factory=factory, arguments={})
    )
    found = run_trial(lost, steps=1, warm_up=0)
    assert found.status == "failed"
    assert repr(factory) in found.note


def test_a_compiler_that_fails_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainfit.core.errors import CompileFailed

    plain = toy.ToyTask.loss

    def loss(self: toy.ToyTask, model: torch.nn.Module, batch: object) -> torch.Tensor:
        warnings.warn("the kind of the warning decides, not its words", CompileFailed, stacklevel=2)
        return plain(self, model, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(toy.ToyTask, "loss", loss)
    found = run_trial(toy.candidate(), steps=3, warm_up=1)
    assert found.status == "failed"
    assert found.samples_per_second is None
    assert found.note.count("decides") == 1


def test_batches_fetched_in_the_warm_up_do_not_flatter_a_slow_loader() -> None:
    slow = toy.candidate(sleep=0.05, how="slow loader", workers=1)
    found = run_trial(slow, steps=4, warm_up=1)
    assert float(np.median(found.step_seconds)) > 0.04


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = (torch.get_num_threads(), random.getstate(), torch.get_rng_state().tolist())
    run_trial(toy.candidate(), steps=2, warm_up=1)
    run_trial(toy.candidate(how="error"), steps=2, warm_up=1)
    assert (torch.get_num_threads(), random.getstate(), torch.get_rng_state().tolist()) == before
    assert list(tmp_path.glob("trainfit*")) == []  # torch keeps a cache of its own there


def test_a_trial_survives_json() -> None:
    found = run_trial(toy.candidate({"num_workers": 0}), steps=3, warm_up=1)
    assert Trial.from_json(found.to_json()) == found


@pytest.mark.parametrize("asked", [{"steps": 0, "warm_up": 1}, {"steps": 1, "warm_up": -1}])
def test_no_step_is_bad_input(asked: dict[str, int]) -> None:
    with pytest.raises(BadInput, match=r"steps is"):
        run_trial(toy.candidate(), **asked)


def test_every_compiled_model_of_a_process_is_compiled() -> None:
    """torch would reuse or give up compiling one function after some models."""
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    for width in range(2, 13):
        model = compile_model(torch.nn.Linear(width, 3), backend=backend)
        model(torch.ones(1, width))
        forget_compiled()
    assert len(graphs) == 11
