"""The allocator's variable: it counts only before CUDA starts, and it may be the user's already."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainfit.core.plan_records import RuntimeSettings
from trainfit.runtime import applied

Afresh = Callable[..., Any]
NEW, OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


WITHOUT_TORCH = """
import json, os, sys
from trainfit.core.plan_records import RuntimeSettings
from trainfit.runtime import apply, undo
done = apply(RuntimeSettings(expandable_segments=True))
during = os.environ.get("PYTORCH_ALLOC_CONF")
undo(done)
print(json.dumps([during, "PYTORCH_ALLOC_CONF" in os.environ, "torch" in sys.modules]))
"""


def test_it_is_set_without_importing_torch(afresh: Afresh) -> None:
    assert afresh(WITHOUT_TORCH) == ["expandable_segments:True", False, False]


@pytest.fixture
def cuda_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch with CUDA that has not started."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


@pytest.mark.usefixtures("cuda_to_come")
@pytest.mark.parametrize("name", [NEW, OLD])
@pytest.mark.parametrize(
    ("text", "on", "amended"),
    [
        ("", True, "expandable_segments:True"),
        ("max_split_size_mb:128", True, "max_split_size_mb:128,expandable_segments:True"),
        ("max_split_size_mb:128,", True, "max_split_size_mb:128,expandable_segments:True"),
        ("expandable_segments:False", True, "expandable_segments:True"),
        (
            "expandable_segments: True, backend:native",
            False,
            "expandable_segments:False, backend:native",
        ),
        (
            "roundup_power2_divisions:[256:1,512:2,>:4]",
            False,
            "roundup_power2_divisions:[256:1,512:2,>:4],expandable_segments:False",
        ),
    ],
)
def test_what_the_user_has_is_kept(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, on: bool, amended: str
) -> None:
    monkeypatch.setenv(name, text)
    with applied(RuntimeSettings(expandable_segments=on)) as done:
        assert os.environ[name] == amended
        assert done["expandable_segments"].after is on
    assert os.environ[name] == text


@pytest.mark.usefixtures("cuda_to_come")
def test_two_variables_never_contradict_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NEW, "expandable_segments:False")
    monkeypatch.setenv(OLD, "max_split_size_mb:64")
    with applied(RuntimeSettings(expandable_segments=True)):
        assert os.environ[NEW] == "expandable_segments:True"
        assert os.environ[OLD] == "max_split_size_mb:64,expandable_segments:True"


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="for a torch without CUDA")
def test_a_torch_without_cuda_says_so_and_leaves_the_environment() -> None:
    before = dict(os.environ)
    with applied(RuntimeSettings(expandable_segments=True)) as done:
        assert dict(os.environ) == before
    assert not done["expandable_segments"].done
    assert "no CUDA" in done["expandable_segments"].note


ON_A_GPU = """
import json, os, torch
from trainfit.core.plan_records import RuntimeSettings
from trainfit.runtime import apply
assert not torch.cuda.is_initialized()
if {started}:
    torch.cuda.get_device_properties(0)
if {used}:
    torch.ones(1, device="cuda")
before = dict(os.environ)
change = apply(RuntimeSettings(expandable_segments={on}))["expandable_segments"]
assert torch.cuda.is_initialized() is {started}
torch.cuda.empty_cache()
held = torch.ones(64 << 20, device="cuda")
kinds = {{segment["is_expandable"] for segment in torch.cuda.memory_snapshot()}}
untouched = dict(os.environ) == before
print(json.dumps([sorted(kinds), change.before, change.after, change.note, untouched]))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("name", [NEW, OLD])
@pytest.mark.parametrize("on", [True, False])
def test_before_cuda_starts_the_allocator_follows(afresh: Afresh, name: str, on: bool) -> None:
    code = ON_A_GPU.format(started=False, used=False, on=on)
    variables = {name: f"max_split_size_mb:512,expandable_segments:{not on}"}
    kinds, before, after, note, _ = afresh(code, **variables)
    assert (kinds, before, after, note) == ([on], not on, on, "")


@pytest.mark.gpu
def test_before_cuda_starts_the_new_name_is_enough(afresh: Afresh) -> None:
    kinds, *_ = afresh(ON_A_GPU.format(started=False, used=False, on=True))
    assert kinds == [True]


@pytest.mark.gpu
@pytest.mark.parametrize("on", [True, False])
def test_after_a_look_at_the_hardware_the_allocator_still_follows(afresh: Afresh, on: bool) -> None:
    code = ON_A_GPU.format(started=True, used=False, on=on)
    variables = {NEW: f"max_split_size_mb:512,expandable_segments:{not on}"}
    kinds, before, after, note, untouched = afresh(code, **variables)
    assert (kinds, before, after, note, untouched) == ([on], not on, on, "", True)


UNDONE = """
import json, torch
from trainfit.core.plan_records import RuntimeSettings
from trainfit.runtime import applied
torch.cuda.get_device_properties(0)
with applied(RuntimeSettings(expandable_segments=True)):
    during = torch.cuda.memory._snapshot()["allocator_settings"]
after = torch.cuda.memory._snapshot()["allocator_settings"]
names = ("expandable_segments", "max_split_size")
print(json.dumps([[settings[name] for name in names] for settings in (during, after)]))
"""


@pytest.mark.gpu
def test_the_allocator_is_set_back_and_keeps_its_other_settings(afresh: Afresh) -> None:
    during, after = afresh(UNDONE, **{NEW: "max_split_size_mb:512"})
    assert during == [True, 512 << 20]
    assert after == [False, 512 << 20]


@pytest.mark.gpu
@pytest.mark.parametrize("on", [True, False])
def test_once_memory_is_in_use_nothing_is_pretended(afresh: Afresh, on: bool) -> None:
    code = ON_A_GPU.format(started=True, used=True, on=on)
    variables = {NEW: f"expandable_segments:{not on}"}
    kinds, before, after, note, untouched = afresh(code, **variables)
    assert kinds == [not on]
    assert (before, after, untouched) == (not on, not on, True)
    assert "already started" in note


WITHOUT_SEGMENTS = """
import json, torch
from trainfit.core.plan_records import RuntimeSettings
from trainfit.runtime import apply
torch.ones(1 << 20, device="cuda")
done = apply(RuntimeSettings(expandable_segments=True, empty_cache=True))
print(json.dumps({change.name: [change.after, change.note] for change in done.changes}))
"""


@pytest.mark.gpu
def test_an_allocator_without_segments_is_not_asked_for_them(afresh: Afresh) -> None:
    seen = afresh(WITHOUT_SEGMENTS, **{NEW: "backend:cudaMallocAsync"})
    assert seen["expandable_segments"][0] is None
    assert "already started" in seen["expandable_segments"][1]
    assert seen["empty_cache"][0] is None
    assert "reserved" in seen["empty_cache"][1]
