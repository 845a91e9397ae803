"""Batches on their way to the GPU: fetched ahead, and sent without a wait.

The lengths of a batch are needed on the host. Read from the GPU, they are there once it has done
all its work, and it then waits for the host in turn; so it does after a copy that is waited for.
So the host's copy is left beside a batch. Loaders of Accelerate, which Trainer has too, and
sentence-transformers send batches.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import dataloader

_COPY = "_trainfit_host_copy"
_NAMES = ("attention_mask", "input_ids", "labels")
_SENDERS = {"accelerate": "send_to_device", "sentence_transformers": "batch_to_device"}
"""Function of each library that sends a batch and takes the device second."""
_SMALL = 2**24
"""Bytes of a tensor up to which it is copied into pinned memory, whatever holds it."""


@dataclass
class Switch:
    """Turns changes off while a script's own steps are timed."""

    off: bool = False


AROUND = Switch()
"""Switch of all changes around the models: batches ahead, copies and checks without a wait."""


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


_WAITING = "_trainfit_ahead"
_CALM = "_trainfit_calm"
"""Attribute of an iterator: True if its second batch drew no number from a global generator."""
_PATCHED = "_trainfit_fetched"


class _Batch(NamedTuple):
    """A batch that is being fetched; without indices, the sampler had no more."""

    indices: Any = None
    data: Future[Any] | None = None


@dataclass(eq=False)
class BatchesAhead:
    """Record of the batches that were fetched ahead."""

    failed: bool = False
    """A batch could not be fetched in the thread; later ones are not tried there."""
    fetched: int = 0
    """Batches that were fetched in the thread."""
    process: int = field(default_factory=os.getpid)
    """Process of the thread: one that is forked off it has none."""


def fetch_ahead() -> BatchesAhead:
    """Have torch's loaders without worker processes fetch a batch ahead, while `AROUND` is on.

    A thread gets one batch, of the indices that the sampler gives next: the same batches in the
    same order. One that cannot be fetched there is fetched in the script's own thread, which then
    raises what it would have raised. Where samplers, datasets or collators draw from a global
    generator, as for masks of tokens, nothing is fetched ahead: others may draw in between, such
    as an evaluation, and a checkpoint holds the state of that generator.
    """
    kind: Any = dataloader._SingleProcessDataLoaderIter
    found: BatchesAhead | None = getattr(kind, _PATCHED, None)
    if found is not None:
        return found
    pinned: Any = import_module("torch.utils.data._utils.pin_memory").pin_memory
    # One thread: collators may draw random numbers, and tokenizers are not shared among threads.
    ahead, pool, plainly = BatchesAhead(), ThreadPoolExecutor(1, "trainfit-ahead"), kind._next_data

    def next_data(self: Any) -> Any:
        waiting: _Batch | None = vars(self).pop(_WAITING, None)
        here = ahead.process == os.getpid()
        on = here and not (AROUND.off or ahead.failed) and _can_be_ahead(self)
        if waiting is None and not (on and vars(self).get(_CALM)):
            return _watched(self, plainly, pool) if on else plainly(self)
        if waiting is None:
            waiting = _Batch(self._next_index())
        if waiting.indices is None:
            vars(self)[_WAITING] = waiting
            raise StopIteration
        data = _fetched(self, waiting, ahead)
        if on:
            vars(self)[_WAITING] = _begun(self, pool)
        if self._pin_memory:
            data = pinned(data, self._pin_memory_device)
        return data

    kind._next_data = next_data
    setattr(kind, _PATCHED, ahead)
    return ahead


def _can_be_ahead(loader: Any) -> bool:
    """True for a dataset with indices; a default device of the script is its thread's alone."""
    mapped = loader._dataset_kind == dataloader._DatasetKind.Map
    return bool(mapped and torch.get_default_device().type == "cpu")


def _watched(loader: Any, plainly: Callable[[Any], Any], pool: ThreadPoolExecutor) -> Any:
    """Fetch one of the first batches; after the second, begin with the next one if it is calm.

    The first one is not judged: torch's sampler draws its seed in it.
    """
    if _CALM in vars(loader) or loader._num_yielded == 0:
        return plainly(loader)
    before = _random_states()
    data = plainly(loader)
    vars(loader)[_CALM] = calm = _random_states() == before
    if calm:
        vars(loader)[_WAITING] = _begun(loader, pool)
    return data


def _random_states() -> tuple[Any, ...]:
    """State of every global generator of random numbers."""
    found = [torch.get_rng_state().numpy().tobytes(), random.getstate()]
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state()
        found += [name, keys.tobytes(), *rest]
    if _gpu_in_use():
        found.append(torch.cuda.get_rng_state().numpy().tobytes())
    return tuple(found)


def _gpu_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _begun(loader: Any, pool: ThreadPoolExecutor) -> _Batch:
    try:
        indices = loader._next_index()
    except StopIteration:
        return _Batch()
    gpu = torch.cuda.current_device() if _gpu_in_use() else None
    return _Batch(indices, pool.submit(_fetch, loader, indices, gpu, torch.is_grad_enabled()))


def _fetch(loader: Any, indices: Any, gpu: int | None, gradients: bool) -> Any:
    """Fetch in the thread, with the script's GPU and gradients: a model may make the batches."""
    device = nullcontext() if gpu is None else torch.cuda.device(gpu)
    with device, torch.set_grad_enabled(gradients):
        return loader._dataset_fetcher.fetch(indices)


def _fetched(loader: Any, waiting: _Batch, ahead: BatchesAhead) -> Any:
    if waiting.data is not None and ahead.process == os.getpid():
        try:
            data = waiting.data.result()
        except Exception:  # noqa: BLE001 what is bound to the script's thread works there
            ahead.failed = True
        else:
            ahead.fetched += 1
            return data
    return loader._dataset_fetcher.fetch(waiting.indices)
