"""Runs in processes of their own, forked from one that has torch and nothing running."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from engine_toy import ToyTask, settings

from trainfit.engine import checkpoint
from trainfit.engine.loop import train


def context() -> ForkServerContext:
    """A fork of a bare server takes milliseconds; importing torch anew takes seconds."""
    made = multiprocessing.get_context("forkserver")
    distributed = ["torch.distributed.fsdp", "torch.distributed.checkpoint"]
    made.set_forkserver_preload(["torch._dynamo", *distributed, "trainfit.engine.loop"])
    return made


def train_in_child(
    run: Path,
    options: dict[str, Any],
    ready: Connection | None = None,
    checkpoint_number: int | None = None,
    point: int | None = None,
) -> None:
    """Train; where told, exit abruptly at a call that a certain checkpoint makes to the disk."""
    torch.set_num_threads(1)
    if checkpoint_number is not None and point is not None:
        exit_at(checkpoint_number, point)
    if ready is not None:
        ready.send("ready")
    task = ToyTask()
    train(task, settings(task, **options), run)


def exit_at(checkpoint_number: int, point: int) -> None:
    """Die before the call number `point`, as a power cut would: half a file stays half."""
    state = {"saves": -1, "calls": -1}
    save = checkpoint.save

    def counted_save(*args: Any, **kwargs: Any) -> Any:
        state["saves"] += 1
        state["calls"] = -1
        return save(*args, **kwargs)

    def maybe_exit(spoil: Callable[..., None], *args: Any) -> None:
        if state["saves"] == checkpoint_number:
            state["calls"] += 1
            if state["calls"] == point:
                spoil(*args)
                os._exit(77)

    def wrap(owner: Any, name: str, spoil: Callable[..., None] = lambda *_: None) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            maybe_exit(spoil, *args)
            return real(*args, **kwargs)

        setattr(owner, name, call)

    checkpoint.save = counted_save
    wrap(Path, "mkdir")
    wrap(Path, "rename")
    wrap(Path, "write_text", lambda path, text: os.truncate(_written(path, text), len(text) // 2))
    wrap(os, "fsync")
    wrap(shutil, "rmtree")
    wrap(safetensors.torch, "save_file", lambda _, path: path.write_bytes(b"half a file"))


def _written(path: Path, text: str) -> Path:
    with path.open("w") as file:
        file.write(text)
    return path
