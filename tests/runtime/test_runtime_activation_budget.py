"""A budget for the activations of compiled blocks: fewer bytes saved, the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch._inductor import config as inductor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from trainfit.kernels.saved_on_host import keep_random
from trainfit.runtime import compile_blocks


class Block(nn.Module):
    """Attention's like: products, cheap functions between them, and dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.one, self.two = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = functional.gelu(self.one(hidden)).sin() * 2
        inner = functional.dropout(inner, self.dropout, self.training)
        return functional.layer_norm(hidden + self.two(inner), (32,))


class Model(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def step(budget: float | None, dropout: float = 0.0, device: str = "cpu") -> tuple[int, Tensor]:
    """Bytes that are saved beside weights, and all gradients."""
    torch.manual_seed(0)
    model = Model(dropout).to(device)
    if budget is not None:
        compile_blocks(model, budget=budget)
    inputs, weight = (torch.randn(16, 8, 32, device=device) for _ in range(2))
    saved: dict[int, int] = {}
    weights = {p.data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    torch.manual_seed(1)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        total = (model(inputs) * weight).sum()
    total.backward()
    return sum(saved.values()), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def check(budget: float, dropout: float, device: str) -> None:
    """Compiled code draws in another order than eager code, so it is compared with itself."""
    whole, sure = step(1.0, dropout, device)
    torch.compiler.reset()
    little, found = step(budget, dropout, device)
    assert little < 0.8 * whole
    torch.testing.assert_close(found, sure)
    if not dropout:
        torch.testing.assert_close(found, step(None, 0.0, device)[1], rtol=1e-3, atol=1e-3)


@pytest.mark.soak
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_less_is_saved_and_the_gradients_stay(budget: float, dropout: float) -> None:
    check(budget, dropout, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_less_is_saved_on_a_gpu(budget: float) -> None:
    check(budget, 0.3, "cuda")


def test_random_results_are_marked_and_others_are_not() -> None:
    def drawn(x: Tensor) -> Tensor:
        return functional.dropout(x.sin(), 0.5) + torch.rand_like(x)

    graph = make_fx(drawn)(torch.ones(4)).graph
    keep_random(graph)
    marked = [str(node.target) for node in graph.nodes if "recompute" in node.meta]
    assert len(marked) == 2
    assert not any("sin" in name for name in marked)


@pytest.mark.soak
def test_the_flags_are_put_back() -> None:
    step(0.5)
    assert functorch.activation_memory_budget == 1.0
    assert inductor.joint_custom_pre_pass is None
