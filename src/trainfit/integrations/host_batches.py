"""Batches of Accelerate's loaders, which Trainer has too: the host's copy stays with the GPU's.

The lengths of a batch are needed on the host. Read from the GPU, they are there once it has done
all its work, and it then waits for the host in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import wraps
from importlib import import_module
from typing import Any

from torch import Tensor

_COPY = "_trainfit_host_copy"
_NAMES = ("attention_mask", "input_ids", "labels")


def keep_host_batches() -> None:
    """Have Accelerate's loaders leave the host's copies with the batches that they send."""
    data_loader: Any = import_module("accelerate.data_loader")
    send = data_loader.send_to_device
    if hasattr(send, _COPY):
        return

    @wraps(send)
    def sent(batch: Any, *args: Any, **kwargs: Any) -> Any:
        # Before it is sent: a BatchEncoding is changed in place.
        here = {n: batch.get(n) for n in _NAMES} if isinstance(batch, Mapping) else {}
        found = send(batch, *args, **kwargs)
        if isinstance(found, Mapping):
            for name, value in here.items():
                _keep(found.get(name), value)
        return found

    setattr(sent, _COPY, True)
    data_loader.send_to_device = sent


def _keep(there: Any, here: Any) -> None:
    if isinstance(there, Tensor) and isinstance(here, Tensor) and not there.is_cpu and here.is_cpu:
        setattr(there, _COPY, (here, here._version, there._version))


def host_copies(given: Mapping[str, Any], names: Iterable[str]) -> dict[str, Tensor] | None:
    """Return the host's copies of tensors; None where one is missing or was written to since."""
    found = {}
    for name in names:
        if (value := given.get(name)) is None:
            continue
        here, version, version_there = getattr(value, _COPY, (None, 0, 0))
        if here is None or (here._version, value._version) != (version, version_there):
            return None
        found[name] = here
    return found
