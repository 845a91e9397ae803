"""Tensors that are spread over the ranks, in safetensors files: each rank writes its own shards.

torch.distributed.checkpoint plans who writes and reads what, so that any number of ranks can read
what any other number wrote. Its safetensors storage keeps the place of a shard in the header of its
file; the `.metadata` of its default storage is pickled, and never written or read here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainfit.errors import BadInput, RunFailed

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

_SHARD = "shard-{:05d}-*.safetensors"


def write(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the shards of all ranks; what all have whole is written once, by the first of them."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    with _one_line(f"cannot write {folder}"):
        save(dict(tensors), storage_writer=writer, planner=planner)


def own_files(folder: Path, rank: int) -> list[Path]:
    """The files that `write` made for this rank."""
    return sorted(folder.glob(_SHARD.format(rank + 1)))


def is_sharded(folder: Path) -> bool:
    """Whether `write` made what is in there."""
    return any(folder.glob("shard-*.safetensors"))


@torch.no_grad()
def read_into(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill these, whole or sharded, with what is in `folder`, which must hold just the same ones.

    Whoever has a process group calls it on every rank. The files may have been written by any
    number of ranks, also by one that did not shard.
    """
    _check_same(_saved(folder), tensors)
    _load(folder, tensors, alone=False)


def read_whole(folder: Path) -> dict[str, Tensor]:
    """What is in `folder`, put together on this rank."""
    saved = _saved(folder)
    tensors = {n: torch.empty(s.size, dtype=s.properties.dtype) for n, s in saved.items()}
    _load(folder, tensors, alone=True)
    return tensors


def is_state(name: str, saved: Mapping[str, object]) -> bool:
    """Whether this names optimizer state: that of another tensor which is there."""
    return name.rpartition("/")[0] in saved


def _saved(folder: Path) -> dict[str, TensorStorageMetadata]:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return dict(found)  # type: ignore[arg-type]


def _load(folder: Path, tensors: Mapping[str, Tensor], *, alone: bool) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder))
    with _one_line(f"cannot read {folder}"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(dict(tensors), storage_reader=reader, no_dist=alone)


def _check_same(saved: Mapping[str, TensorStorageMetadata], own: Mapping[str, Tensor]) -> None:
    if missing := sorted(own.keys() ^ saved.keys()):
        raise BadInput(
            f"the checkpoint and the model differ in {len(missing)} tensors, such as {missing[0]}",
            "use the configuration of the run",
        )
    for name, tensor in own.items():
        if saved[name].size != tensor.shape:
            shapes = f"{tuple(saved[name].size)} in the checkpoint, {tuple(tensor.shape)} here"
            raise BadInput(f"{name} is {shapes}", "use the configuration of the run")


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """What fails on any rank fails on all, with the first cause in a line."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:  # no Exception, and of many lines
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        text = (str(cause).splitlines() or [type(cause).__name__])[0]
        raise RunFailed(
            f"{what} on rank {rank} ({text})",
            "free some space or make it writable, and go on with --resume",
        ) from None
