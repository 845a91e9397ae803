from __future__ import annotations

import os
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.hardware.access import resolve

ONE, TWO, SLICE = "GPU-8932f937-d72c-4106", "GPU-8a00ffee-0000-1111", "MIG-90443af0-2fe6-57fb"
UUIDS = [[ONE, SLICE], [TWO]]


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        (None, None),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("0", (0,)),
        (" 1 , 0 ", (1, 0)),
        ("0,-1,1", (0,)),
        ("0,", (0,)),
        ("1gpu", (1,)),
        ("GPU-89", (ONE,)),
        ("GPU-8a,GPU-89", (TWO, ONE)),
        ("MIG-9044", (SLICE,)),
        ("MIG-GPU-8932f937-d72c-4106/1/0", ("MIG-GPU-8932f937-d72c-4106/1/0",)),
    ],
)
def test_well_formed(value: str | None, chosen: tuple[int | str, ...] | None) -> None:
    found = resolve(value, UUIDS)
    assert found.chosen == chosen
    assert found.problem is None
    assert found.hides_all is (chosen == ())


@pytest.mark.parametrize(
    ("value", "chosen", "problem"),
    [
        ("none", (), "'none' is neither"),
        ("0,x,1", (0,), "'x' is neither"),
        ("0,,1", (0,), "'' is neither"),
        ("0;1", (0,), None),  # read like strtoul: the rest is dropped
        ("0,7", (0,), "there is no GPU 7 among 2"),
        ("0,0", (), "'0' is there twice"),
        ("GPU-89,GPU-8932", (), "'GPU-8932' is there twice"),
        ("GPU-8", (), "'GPU-8' begins 2"),
        ("GPU-ff", (), "'GPU-ff' begins no"),
        ("GPU-89,1", (ONE,), "'1' is not of the first"),
        ("GPU-8a,MIG-9044", (TWO,), "'MIG-9044' is not of the first"),
    ],
)
def test_malformed(value: str, chosen: tuple[int | str, ...], problem: str | None) -> None:
    found = resolve(value, UUIDS)
    assert found.chosen == chosen
    assert (problem is None) is (found.problem is None)
    assert (problem or "") in (found.problem or "")


def test_without_the_drivers_list_well_formed_entries_count() -> None:
    assert resolve("7,3").chosen == (7, 3)
    assert resolve("GPU-ff").chosen == ("GPU-ff",)


ENTRIES = st.one_of(
    st.integers(-2, 9).map(str),
    st.sampled_from(["", " 1", "+2", "x", "3gpu", "GPU-1", "GPU-22", "MIG-1", "NoDevFiles"]),
)


@given(st.lists(ENTRIES, max_size=5).map(",".join))
def test_agrees_with_torchs_own_reading(value: str) -> None:
    torch = pytest.importorskip("torch")
    parse = getattr(torch.cuda, "_parse_visible_devices", None)
    if parse is None:
        pytest.skip("this torch keeps its reading elsewhere")
    with patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": value}):
        assert list(resolve(value).chosen or ()) == parse()


@given(value=st.text(alphabet="0123456789,-+ GPUMIaf", max_size=20), count=st.integers(0, 4))
def test_any_text_is_read_and_stays_within_the_machine(value: str, count: int) -> None:
    found = resolve(value, [[f"GPU-{index}a"] for index in range(count)])
    assert found.chosen is not None
    assert len(set(found.chosen)) == len(found.chosen)
    assert all(isinstance(one, str) or 0 <= one < count for one in found.chosen)
