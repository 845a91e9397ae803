import dataclasses
import inspect
import types
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import plan_example
from trainfit.core import plan_records, records
from trainfit.core.codec import hints
from trainfit.core.errors import BadInput
from trainfit.core.records import Record

KINDS = [
    kind
    for module in (records, plan_records)
    for _, kind in inspect.getmembers(module, inspect.isclass)
    if issubclass(kind, Record) and kind is not Record and kind.__module__ == module.__name__
]
FLOW = {"HardwareProfile", "Plan", "Measurements", "Applied", "RunResult", "Receipt", "Workload"}


def strategy(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type, built from the type itself."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(strategy(arg) for arg in args))
    if origin is tuple and args[-1] is not Ellipsis:
        return st.tuples(*map(strategy, args))
    if origin is tuple:
        return st.lists(strategy(args[0]), max_size=2).map(tuple)
    if origin is dict:
        return st.dictionaries(st.text(max_size=5), strategy(args[1]), max_size=2)
    if dataclasses.is_dataclass(kind):
        return st.builds(kind, **{name: strategy(hint) for name, hint in hints(kind).items()})
    whole = st.integers(-(2**63), 2**64 - 1)  # all that any reader takes
    scalars = {
        bool: st.booleans(),
        int: whole,
        float: st.floats(),
        str: st.text(max_size=8),
        type(None): st.none(),
        Any: st.none() | whole | st.text(max_size=5) | st.lists(st.booleans(), max_size=2),
    }
    return scalars[kind]


def test_the_flow_has_its_records():
    assert {kind.__name__ for kind in KINDS} >= FLOW


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=settings().max_examples // 4)
@given(data=st.data())
def test_json_loses_nothing(kind: type[Record], data: st.DataObject):
    record = data.draw(strategy(kind))
    back = kind.from_json(record.to_json())
    assert repr(dataclasses.asdict(back)) == repr(
        dataclasses.asdict(record)
    )  # since nan is not equal to itself


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_records_are_frozen(kind: type[Record]):
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_a_saved_record_loads_and_a_damaged_one_is_named(tmp_path: Path):
    path = tmp_path / "deep" / "note.json"
    note = records.Note(code="c", text="t")
    note.save(path)
    assert records.Note.load(path) == note
    assert [p.name for p in path.parent.iterdir()] == ["note.json"]
    path.write_text(path.read_text()[:-5])
    with pytest.raises(BadInput, match=r"note\.json is not JSON"):
        records.Note.load(path)
    with pytest.raises(BadInput, match="cannot read"):
        records.Note.load(tmp_path / "none.json")


def test_a_missing_compiler_is_named():
    bare = records.CompileSupport(c_compiler=None, python_headers=False, triton=None)
    assert bare.missing(gpu=True) == ("a C compiler", "Python headers", "Triton")
    assert bare.missing(gpu=False) == ("a C compiler", "Python headers")


def test_a_time_is_told_for_steps_of_another_length():
    work = plan_example.PLAN.workload
    told = replace(plan_example.TIME, energy_kwh=1.0, cost=4.0)
    found = told.at(2 * told.step_seconds, 16, work)
    assert (found.mfu, found.energy_kwh, found.cost) == (pytest.approx(0.206), 2.0, 8.0)
    assert found.total_seconds == pytest.approx(835 * 0.332 * 20)  # 13,356 in batches of 16
    assert found.samples_per_second == pytest.approx(16 / 0.332)
    assert told.at(told.step_seconds / 3, 16, work).mfu is None  # no GPU is faster than its peak
    assert replace(told, mfu=None, energy_kwh=None).at(1.0, 16, work).energy_kwh is None
