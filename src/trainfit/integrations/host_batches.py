"""Batches on their way to the GPU: sent without a wait, with the host's copy left beside them.

The lengths of a batch are needed on the host. Read from the GPU, they are there once it has done
all its work, and it then waits for the host in turn; so it does after a copy that is waited for.
Loaders of Accelerate, which Trainer has too, and sentence-transformers send batches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, MutableMapping
from copy import copy
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from trainfit.integrations.speedups import AROUND

_COPY = "_trainfit_host_copy"
_NAMES = ("attention_mask", "input_ids", "labels")
_SENDERS = {"accelerate": "send_to_device", "sentence_transformers": "batch_to_device"}
"""Function of each library that sends a batch and takes the device second."""
_SMALL = 2**24
"""Bytes of a tensor up to which it is copied into pinned memory, whatever holds it."""


def keep_host_batches() -> None:
    """Have the libraries that are imported send batches without a wait, and keep their copies."""
    for place, module in list(sys.modules.items()):
        # Accelerate has other uses of it than its loaders.
        ours = place == "accelerate.data_loader" or place.startswith("sentence_transformers.")
        name = _SENDERS.get(place.partition(".")[0], "")
        send = getattr(module, "__dict__", {}).get(name) if ours else None
        if send is not None and not hasattr(send, _COPY):
            setattr(module, name, _keeping(send, in_place=name == "batch_to_device"))


def _keeping(send: Any, *, in_place: bool) -> Any:
    @wraps(send)
    def sent(batch: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        # Before it is sent: some batches are changed in place.
        here = {n: batch.get(n) for n in _NAMES} if isinstance(batch, Mapping) else {}
        if not AROUND.off and not kwargs.get("skip_keys"):
            batch = _sent_soon(batch, device, in_place=in_place)
        found = send(batch, device, *args, **kwargs)
        if isinstance(found, Mapping):
            for name, value in here.items():
                _keep(found.get(name), value)
        return found

    setattr(sent, _COPY, True)
    return sent


def _sent_soon(batch: Any, device: Any, *, in_place: bool) -> Any:
    """Send the tensors of a batch to a GPU that may still be busy with the last one.

    Pinned memory is not used again before its copy is done.
    """
    if not isinstance(batch, MutableMapping) or torch.device(device).type != "cuda":
        return batch
    batch = batch if in_place else copy(batch)
    for name, value in batch.items():
        if type(value) is Tensor and value.is_cpu and value.layout == torch.strided:
            pinned = value.pin_memory() if value.nbytes <= _SMALL else value
            batch[name] = pinned.to(device, non_blocking=pinned.is_pinned())
    return batch


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
