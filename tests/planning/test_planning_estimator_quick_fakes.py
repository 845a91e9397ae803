"""Fakes made by recipe, against torch's own fakes."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from trainfit.planning.estimator.quick_fakes import QuickFakes

STEPS = {
    "a product": lambda x, y: x @ y.T,
    "a view": lambda x, _: x.view(2, 3, 4).transpose(0, 1),
    "views that share memory": lambda x, _: x.unbind(0),
    "written in place": lambda x, y: x.add_(y),
    "several results": lambda x, y: torch.native_layer_norm(x, (4,), y[0], None, 1e-5),
    "an integer and a float": lambda x, _: (x * 1, x.bool() * 1, x.int() * 1, x.int() * 1.0),
    "not contiguous": lambda x, _: x.t().sum(0),
    "an expanded one": lambda x, _: x[:, :1].expand(6, 8) + 1,
    "reshaped in place": lambda x, _: x.clone().t_(),
}


def layouts(step: Any, mode: FakeTensorMode) -> list[Any]:
    """Layout of results, and which of the inputs they share memory with."""
    with mode:
        x, y = torch.empty(6, 4), torch.empty(6, 4)
        made = tree_leaves(step(x, y))
    shared = [
        [t.untyped_storage()._cdata == i.untyped_storage()._cdata for i in (x, y)] for t in made
    ]
    assert all(type(t) is FakeTensor for t in made)
    return [
        (
            t.shape,
            t.stride(),
            t.storage_offset(),
            t.dtype,
            t.untyped_storage().nbytes(),
            t.device,
            s,
        )
        for t, s in zip(made, shared, strict=True)
    ]


@pytest.mark.parametrize("name", STEPS)
def test_a_recipe_gives_the_same_as_the_operation(name: str):
    plain = layouts(STEPS[name], FakeTensorMode())
    mode = QuickFakes()
    assert layouts(STEPS[name], mode) == plain
    assert layouts(STEPS[name], mode) == plain  # now by recipe


def test_repeated_operations_are_not_run(monkeypatch: pytest.MonkeyPatch):
    ran = []
    plain = FakeTensorMode.dispatch
    monkeypatch.setattr(
        FakeTensorMode,
        "dispatch",
        lambda self, func, *rest: (ran.append(func), plain(self, func, *rest))[1],
    )
    with QuickFakes():
        x = torch.empty(11, 13)
        for _ in range(3):
            x @ x.T
    assert ran.count(torch.ops.aten.mm.default) == 1
