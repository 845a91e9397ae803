import json
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.core import codec
from trainfit.core.errors import BadConfig, BadInput


@dataclass(frozen=True)
class Inner:
    size: Annotated[int, codec.Range(1, 9)]
    name: str = "x"


@dataclass(frozen=True)
class Outer:
    inner: Inner
    many: tuple[Inner, ...]
    pair: tuple[int, float]
    table: dict[str, float]
    mode: Literal["a", "b", 3]
    maybe: Inner | None
    number: int | float | Literal["auto"]
    anything: Any


GOOD: dict[str, Any] = {
    "inner": {"size": 3},
    "many": [{"size": 1, "name": "é"}],
    "pair": [1, 2],
    "table": {"x": 1},
    "mode": "a",
    "maybe": None,
    "number": "auto",
    "anything": {"k": [1, None]},
}


def test_a_value_comes_back_as_it_was():
    value = codec.decode(Outer, GOOD)
    assert value.inner == Inner(3)
    assert value.pair == (1, 2.0)
    assert isinstance(value.pair[1], float)
    assert codec.loads(Outer, codec.dumps(value)) == value


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inner": {"size": "3"}}, 'inner.size is "3"; use a whole number (1 to 9)'),
        ({"inner": {"size": 10}}, "inner.size is 10; use a whole number (1 to 9)"),
        ({"inner": {"size": True}}, "inner.size is true"),
        ({"inner": {"siz": 3}}, "unknown key inner.siz; did you mean size?"),
        ({"inner": {}}, "inner.size is missing"),
        ({"many": [{"size": 1}, {"size": 0}]}, "many[1].size is 0"),
        ({"pair": [1]}, "pair has 1 items; give 2"),
        ({"table": {"x": "1"}}, 'table.x is "1"; use a number'),
        ({"mode": "c"}, 'mode is "c"; use a, b, 3'),
        ({"mode": True}, "mode is true"),
        ({"maybe": {"size": 0}}, "maybe.size is 0"),
        ({"number": "aut"}, "(did you mean auto?)"),
        ({"number": [1]}, "number is [1]"),
    ],
)
def test_a_wrong_value_is_named_with_the_fix(change: dict[str, Any], words: str):
    with pytest.raises(BadInput) as caught:
        codec.decode(Outer, GOOD | change)
    assert words in str(caught.value)


def test_every_problem_is_reported_at_once():
    with pytest.raises(BadConfig) as caught:
        codec.decode(Outer, GOOD | {"mode": 1, "pair": 3, "tabel": {}}, "file.json")
    assert len(caught.value.problems) == 3
    assert all(line.startswith("file.json: ") for line in str(caught.value).splitlines())


def test_a_mistake_inside_a_member_of_a_union_is_found_there():
    @dataclass(frozen=True)
    class Holder:
        value: float | Inner

    with pytest.raises(BadInput, match=r"value\.size is 0"):
        codec.decode(Holder, {"value": {"size": 0}})


def test_text_that_is_no_json_is_one_line():
    with pytest.raises(BadInput, match=r"plan\.json is not JSON"):
        codec.loads(Outer, "{", "plan.json")


@given(st.floats(), st.recursive(st.floats() | st.text() | st.booleans(), st.lists))
def test_non_finite_numbers_survive_in_strict_json(number: float, anything: Any):
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    value = codec.decode(Outer, GOOD | {"number": number, "anything": anything})
    text = codec.dumps(value)
    json.loads(text, parse_constant=refuse)
    back = codec.loads(Outer, text)
    assert repr(back.number) == repr(value.number)
    assert repr(back.anything) == repr(value.anything)
    assert math.isnan(back.number) == math.isnan(number)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[" * 300 + "]" * 300,
        '{"a":' * 300 + "1" + "}" * 300,
        "NaN",
        "[-Infinity]",
        "1" * 5000,
        str(2**64),
        str(-(2**63) - 1),
        "",
        "{",
    ],
)
def test_json_out_of_all_bounds_is_a_value_error(text: str):
    with pytest.raises(ValueError, match=r"."):
        codec.parse(text)
    with pytest.raises(BadInput):
        codec.loads(float, text)


def test_the_largest_whole_numbers_pass():
    assert codec.parse(f"[{2**64 - 1}, {-(2**63)}, 0.1234567890123456789]") == [
        2**64 - 1,
        -(2**63),
        0.1234567890123456789,
    ]
    with pytest.raises(BadInput):
        codec.decode(float, 10**400)
