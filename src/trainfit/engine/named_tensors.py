"""A model and its optimizer as named tensors, and back.

Names carry no prefix of a wrapper, and weights that are tied appear once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from trainfit.engine.sharding import local
from trainfit.errors import BadInput, reason
from trainfit.files import check_regular


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Trained weights and buffers by name; weights that are tied appear once."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    kept = model.state_dict().keys()
    buffers = [(name, b) for name, b in model.named_buffers() if name in kept]
    return {plain_name(name): tensor for name, tensor in [*trained, *buffers]}


def plain_name(name: str) -> str:
    """The name of a weight without what torch.compile or a parallel wrapper puts before it."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or BadInput where its header lies or it is cut off."""
    check_regular(path, "give a folder trainfit wrote")
    try:
        return safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        what = f"{path} is damaged, or not a safetensors file ({reason(error)})"
        raise BadInput(what, "get another copy of it") from None


def frozen_checksum(model: nn.Module) -> str | None:
    """A checksum of the weights that are not trained; None where all are."""
    frozen = [(plain_name(n), p) for n, p in model.named_parameters() if not p.requires_grad]
    if not frozen:
        return None
    digest = hashlib.sha256()
    for name, parameter in sorted(frozen, key=lambda pair: pair[0]):
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        data = parameter.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(data.numpy().data)
    return digest.hexdigest()


@torch.no_grad()
def find_nonfinite(model: nn.Module) -> str | None:
    """Name of a weight or buffer with a value that is not finite; None where all are.

    The largest size of all of them says it, in one pass and with one wait for the device.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    floats = {name: local(t.detach()) for name, t in named if t.is_floating_point() and t.numel()}
    floats = {name: tensor for name, tensor in floats.items() if tensor.numel()}
    if not floats or nn.utils.get_total_norm(floats.values(), math.inf).isfinite():
        return None
    bad = (name for name, tensor in floats.items() if not tensor.abs().max().isfinite())
    return plain_name(next(bad, "of a buffer"))


@torch.no_grad()
def load_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put saved tensors into the model, which must have the same ones."""
    own = model_tensors(model)
    if missing := sorted(own.keys() ^ tensors.keys()):
        raise BadInput(
            f"the checkpoint and the model differ in {len(missing)} tensors, such as {missing[0]}",
            "use the configuration of the run",
        )
    for name, tensor in own.items():
        saved = tensors[name]
        if saved.shape != tensor.shape:
            raise BadInput(
                f"{name} is {tuple(saved.shape)} in the checkpoint, {tuple(tensor.shape)} here",
                "use the configuration of the run",
            )
        tensor.copy_(saved)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by the names of the weights."""
    return {
        f"{plain_name(name)}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


@torch.no_grad()
def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Put saved state into the optimizer's own."""
    for name, tensor in optimizer_tensors(model, optimizer).items():
        saved = tensors.get(name)
        if saved is None or saved.shape != tensor.shape:
            raise BadInput(
                f"the checkpoint's state of the optimizer does not fit, in {name}",
                "use the configuration of the run",
            )
        tensor.copy_(saved)
