"""What is kept: found again by the same job, and by no other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tuning_toy as toy
from hypothesis import given
from hypothesis import strategies as st

from trainfit.core import caches
from trainfit.core.errors import TrainfitWarning
from trainfit.core.plan_records import Workload
from trainfit.core.records import HardwareProfile
from trainfit.hardware import as_if
from trainfit.hardware.catalogue import find
from trainfit.planning.question import Pin, Question
from trainfit.tuning import tuned_cache
from trainfit.tuning.tuned_cache import TuneResult

SECRET_LENGTHS = (7, 11, 13, 500)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path))
    return tmp_path


def question(**changes: Any) -> Question:
    workload = Workload(
        lengths=SECRET_LENGTHS, sequences=4, max_length=512, effective_batch_size=16, epochs=3
    )
    made = Question(
        task="nli",
        factory="x:y",
        arguments={"name": "bert-base"},
        layers=2,
        workload=workload,
        pins={"compile_mode": Pin(value="default", origin="default")},
    )
    return replace(made, **changes)


def machine(name: str = "rtx-4090", **changes: Any) -> HardwareProfile:
    return replace(as_if(find(name)), **({"driver": "580.1"} | changes))


RESULT = TuneResult(best=toy.plan(num_workers=3), trials=(), seconds=4.0)


def test_the_same_job_finds_it(folder: Path) -> None:
    path = tuned_cache.write(question(), machine(), RESULT)
    assert path is not None
    assert path.is_relative_to(folder)
    assert tuned_cache.read(question(), machine()) == RESULT


OTHERS: dict[str, dict[str, Any]] = {
    "effective batch": {"workload": {"effective_batch_size": 32}},
    "max_length": {"workload": {"max_length": 600}},
    "method": {"workload": {"method": "lora"}},
    "lengths": {"workload": {"lengths": (400, 410, 420, 500)}},
    "model": {"arguments": {"name": "bert-large"}},
    "task": {"task": "textclass"},
    "a pin": {"pins": {"compile": Pin(value=False, origin="override")}},
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_job_does_not(what: str) -> None:
    tuned_cache.write(question(), machine(), RESULT)
    changes = dict(OTHERS[what])
    if "workload" in changes:
        changes["workload"] = replace(question().workload, **changes["workload"])
    assert tuned_cache.read(question(**changes), machine()) is None


def test_nor_another_machine_or_number_of_ranks() -> None:
    tuned_cache.write(question(), machine(), RESULT)
    assert tuned_cache.read(question(), machine("t4")) is None
    assert tuned_cache.read(question(), machine(), ranks=2) is None


def test_what_does_not_matter_for_speed_does_not_matter() -> None:
    tuned_cache.write(question(), machine(), RESULT)
    longer = replace(question().workload, epochs=30)
    seeded = {"seed": Pin(value=3, origin="override")}
    assert tuned_cache.read(question(workload=longer, pins=seeded), machine()) == RESULT


def test_another_driver_makes_it_stale_and_says_so() -> None:
    tuned_cache.write(question(), machine(), RESULT)
    with pytest.warns(TrainfitWarning, match=r"stale and was ignored \(changed since: driver\)"):
        assert tuned_cache.read(question(), machine(driver="590.2")) is None


def test_so_do_other_libraries_and_our_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned_cache.write(question(), machine(), RESULT)
    monkeypatch.setattr(caches, "version_of", lambda name: "9.9" if name == "torch" else None)
    monkeypatch.setattr(caches, "sources", lambda: "other")
    with pytest.warns(TrainfitWarning, match="changed since: libraries, sources"):
        assert tuned_cache.read(question(), machine()) is None


def test_and_a_model_folder_that_was_changed(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    named = question(arguments={"name": str(model)})
    tuned_cache.write(named, machine(), RESULT)
    assert tuned_cache.read(named, machine()) == RESULT
    (model / "config.json").write_text('{"hidden_size": 3}')
    with pytest.warns(TrainfitWarning, match="changed since: config"):
        assert tuned_cache.read(named, machine()) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"identity": 3}', "\xff\x00"])
def test_a_damaged_file_is_thrown_away_with_a_line(content: str) -> None:
    path = tuned_cache.write(question(), machine(), RESULT)
    assert path is not None
    path.write_text(content)
    with pytest.warns(TrainfitWarning, match="is damaged and was thrown away") as caught:
        assert tuned_cache.read(question(), machine()) is None
    assert len(caught) == 1
    assert len(str(caught[0].message).splitlines()) == 1
    assert not path.exists()


def test_a_file_that_was_swapped_is_stale() -> None:
    path = tuned_cache.write(question(), machine(), RESULT)
    assert path is not None
    named = tuned_cache.identity(question(task="textclass"), machine(), 1)
    other = tuned_cache.place(named, tuned_cache.histogram(SECRET_LENGTHS, 512))
    other.write_text(path.read_text())
    with pytest.warns(TrainfitWarning, match="stale"):
        assert tuned_cache.read(question(task="textclass"), machine()) is None


def test_a_cache_that_cannot_be_written_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "file"))
    with pytest.warns(TrainfitWarning, match="nothing is kept"):
        tuned_cache.write(question(), machine(), RESULT)
    assert (tmp_path / "file").read_text() == ""


def test_another_fold_of_the_same_data_finds_it() -> None:
    draws = np.random.default_rng(0)
    whole = np.minimum(512, draws.lognormal(5.0, 0.9, 2000).astype(int) + 1)

    def fold(data: Any) -> Question:
        lengths = tuple(draws.permutation(data)[:1500].tolist())
        return question(workload=replace(question().workload, lengths=lengths))

    tuned_cache.write(fold(whole), machine(), RESULT)
    assert tuned_cache.read(fold(whole), machine()) == RESULT
    assert tuned_cache.read(fold(whole // 4 + 1), machine()) is None
    tuned_cache.write(fold(whole // 4 + 1), machine(), replace(RESULT, seconds=9.0))
    assert tuned_cache.read(fold(whole), machine()) == RESULT


@given(st.lists(st.integers(1, 512), min_size=1, max_size=50))
def test_a_distance_is_a_share(lengths: list[int]) -> None:
    one = tuned_cache.histogram(lengths, 512)
    assert tuned_cache.distance(one, one) == 0
    other = tuned_cache.histogram([1], 512)
    expected = 1 - sum(length <= 16 for length in lengths) / len(lengths)
    assert tuned_cache.distance(one, other) == pytest.approx(expected, abs=0.01)


def test_lengths_are_kept_as_shares_alone() -> None:
    path = tuned_cache.write(question(), machine(), RESULT)
    assert path is not None
    kept = json.loads(path.read_text())["content"]["lengths"]
    assert len(kept) == 32
    assert sum(kept) == pytest.approx(1.0)
    assert kept[0] == 0.75  # three of four below 16
