"""compile_model: in place, and alive when the compiler is not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config as inductor

from trainfit.core.errors import BadInput, TrainfitWarning
from trainfit.runtime import (
    compile_blocks,
    compile_model,
    eagerly,
    forget_if_full,
    start_compilers,
)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(4, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.inside(x).relu())


class Counting:
    """A compiler that runs the graph as it is, and counts the graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        self.graphs += 1
        return graph.forward


def fails(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    raise ValueError("\nno such instruction\nand a long story")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "make", [Small, lambda: nn.Sequential(Small(), nn.ReLU()), lambda: nn.Linear(4, 2)]
)
def test_it_compiles_in_place_into_one_graph(make: Any) -> None:
    model, x, compiler = make(), torch.rand(3, 4), Counting()
    keys, expected = list(model.state_dict()), model(x)
    assert compile_model(model, backend=compiler) is model
    torch.testing.assert_close(model(x), expected)
    assert compiler.graphs == 1
    assert list(model.state_dict()) == keys


def test_a_hook_stays_in_the_graph() -> None:
    model, compiler = Small(), Counting()
    model.register_forward_hook(lambda module, args, output: output + 1)
    expected = model(x := torch.rand(3, 4))
    torch.testing.assert_close(compile_model(model, backend=compiler)(x), expected)
    assert compiler.graphs == 1


def test_two_models_keep_their_own_weights() -> None:
    x, one, two = torch.rand(3, 4), Small(), Small()
    expected = one(x), two(x)
    compile_model(one, backend="aot_eager")
    compile_model(two, backend="aot_eager")
    torch.testing.assert_close((one(x), two(x)), expected)


def test_gradients_equal_those_without_the_compiler() -> None:
    model, x = Small(), torch.rand(3, 4)
    other = copy.deepcopy(model)
    compile_model(model, backend="aot_eager")(x).sum().backward()
    other(x).sum().backward()
    for mine, plain in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, plain.grad)


def test_a_compiler_that_fails_is_named_once_and_never_asked_again() -> None:
    model, x = Small(), torch.rand(3, 4)
    expected = model(x)
    compile_model(model, backend=fails)
    with pytest.warns(
        TrainfitWarning, match=r"eagerly.*ValueError: no such instruction\)$"
    ) as seen:
        torch.testing.assert_close(model(x), expected)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(model(torch.rand(5, 4)).shape, torch.Size([5, 2]))
    assert list(model.state_dict()) == list(Small().state_dict())


def test_a_compiler_that_fails_in_the_backward_pass_is_survived_too() -> None:
    backend = aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=fails)
    model, x = Small(), torch.rand(3, 4)
    other = copy.deepcopy(model)
    compile_model(model, backend=backend)
    with pytest.warns(TrainfitWarning, match="no such instruction"):
        loss = model(x).sum()
    loss.backward()
    other(x).sum().backward()
    torch.testing.assert_close(model.inside.weight.grad, other.inside.weight.grad)


def test_a_machine_without_a_compiler_runs_eagerly() -> None:
    model, x = Small(), torch.rand(3, 4)
    expected = model(x)
    compile_model(model)
    with (
        inductor.patch({"cpp.cxx": ("/no/such/c++",)}),
        pytest.warns(TrainfitWarning, match="C\\+\\+"),
    ):
        torch.testing.assert_close(model(x), expected)


def test_a_mistake_in_forward_is_raised_as_itself_and_the_compiler_stays() -> None:
    model, compiler = Small(), Counting()
    compile_model(model, backend=compiler)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        model(torch.rand(3, 5))
    assert raised.type is RuntimeError
    assert raised.value.__context__ is None
    assert model(torch.rand(3, 4)).shape == (3, 2)
    assert compiler.graphs == 1


class Refuses(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            raise KeyError("one is too few")
        return x + 1


def test_an_error_that_the_model_raises_is_not_the_compilers() -> None:
    model = compile_model(Refuses(), backend="aot_eager")
    with pytest.raises(KeyError, match="one is too few"):
        model(torch.rand(1))
    assert model(torch.zeros(2)).tolist() == [1, 1]


def test_a_copy_and_a_pickle_carry_no_compiler() -> None:
    model = compile_model(Small(), backend=fails)
    assert copy.deepcopy(model)(torch.rand(3, 4)).shape == (3, 2)


def test_an_unknown_mode_is_named_with_the_valid_ones() -> None:
    with pytest.raises(BadInput, match=r"'fastest'.*default.*reduce-overhead.*max-autotune"):
        compile_model(Small(), "fastest")


def test_eagerly_sets_the_compiled_blocks_aside_and_brings_them_back():
    shapes = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        shapes.append(inputs)
        return graph.forward

    model = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
    compile_blocks(model, backend=backend)
    with eagerly(model):
        for rows in range(2, 6):
            model[0](torch.zeros(rows, 4))
    assert not shapes
    model[0](torch.zeros(2, 4))
    assert len(shapes) == 1


def test_code_for_any_size_is_made_once() -> None:
    model, any_size = Small(), Counting()
    compile_model(model, dynamic=True, backend=any_size)
    for rows in range(2, 14):
        assert model(torch.rand(rows, 4)).shape == (rows, 2)
    assert any_size.graphs == 1
    for_each = Counting()
    compile_model(model := Small(), dynamic=False, backend=for_each)
    for rows in range(2, 6):
        model(torch.rand(rows, 4))
    assert for_each.graphs == 4


class Dropping(nn.Module):
    def __init__(self, share: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(share)) for _ in "ab")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_many_models_after_another_stay_compiled_and_equal_ones_share_their_code() -> None:
    def graphs_of(share: float, compiler: Counting) -> int:
        forget_if_full()
        compile_blocks(Dropping(share), backend=compiler)(torch.rand(3, 4)).sum().backward()
        return compiler.graphs

    one = Counting()
    first = graphs_of(0.1, one)
    assert first > 0
    assert [graphs_of(0.1, one) for _ in range(5)] == [first] * 5
    # More versions than torch compiles of one function.
    assert [graphs_of(0.3 + n / 20, Counting()) for n in range(12)] == [first] * 12


def test_blocks_behind_frozen_embeddings_are_compiled_once() -> None:
    model, compiler, x = Dropping(0.0), Counting(), torch.rand(3, 4)
    model(x).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    compile_blocks(model, backend=compiler)(x).sum().backward()
    assert compiler.graphs == 1
    assert x.grad is None
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)


@pytest.mark.parametrize(
    ("ready", "threads", "expected"), [(False, 4, False), (True, 4, True), (False, 1, True)]
)
def test_compilers_are_ready_once_torch_says_so(
    ready: bool, threads: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import async_compile

    future = SimpleNamespace(done=lambda: ready)
    pool = SimpleNamespace(submit=lambda _: future)
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: threads)
    monkeypatch.setattr(async_compile.AsyncCompile, "process_pool", lambda: pool)
    monkeypatch.setattr(async_compile.AsyncCompile, "_ready_future", None)
    assert start_compilers() is expected


def test_without_compiling_processes_steps_do_not_wait_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor import async_compile

    monkeypatch.delattr(async_compile.AsyncCompile, "warm_pool")
    assert start_compilers()
