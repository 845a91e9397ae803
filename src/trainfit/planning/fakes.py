"""Models of fake tensors, made from models on the meta device."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def make_fake(model: torch.nn.Module, mode: FakeTensorMode) -> None:
    """Give every tensor of a meta model a fake one on the default device; shared ones stay so.

    Models are not built under the fake mode itself: a truncated normal looks at what it drew, and
    peft moves modules in a way that fake tensors do not take. The meta device does both.
    """
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            with mode:
                empty = torch.empty(tensor.shape, dtype=tensor.dtype)
            if isinstance(tensor, torch.nn.Parameter):
                empty = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
            made[id(tensor)] = tensor, empty  # the original too, so that its id stays its own
        return made[id(tensor)][1]

    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = fake(tensor)  # type: ignore[assignment]
