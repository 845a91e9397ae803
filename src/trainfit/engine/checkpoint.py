"""Checkpoints: safetensors and JSON, written whole or not at all, and checked before use.

    RUN/checkpoints/step-00000120/
        model.safetensors       the trained weights and the buffers
        optimizer.safetensors   the optimizer's state; AdamW's by the weights' names
        task.safetensors        the task's own state, where it has a state_dict
        state.json              everything else: place, random states, cut, best, events
        manifest.json           which run this belongs to, and a SHA-256 of each file

Where a model is sharded over ranks, each rank writes its shards of weights and optimizer state to
a file of its own (shard-00001-…) in place of the first two.

A checkpoint is written to a folder of another name, synced, and renamed, so a folder with this name
is complete. Frozen weights are not written: the task builds them again, and a checksum confirms
that they are the same. Names have no prefix of a wrapper such as torch.compile.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from trainfit.core import codec
from trainfit.core.errors import BadInput, RunFailed, TrainfitWarning, reason
from trainfit.core.files import check_regular, checksum, sync
from trainfit.engine import parallel
from trainfit.engine.distributed import World, first_writes, gather
from trainfit.engine.relaunch import disk_fix
from trainfit.engine.saved_state import load_model
from trainfit.hardware.host import memory_left
from trainfit.measuring.timing import synchronize
from trainfit.runs import timeline
from trainfit.runs.run_folder import identity

_FOLDER = "checkpoints"
_NAME = "step-{:08d}"
_UNFINISHED = ".unfinished-"
_FORMAT = "trainfit checkpoint 1"
_TASK = "task.safetensors"


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of a checkpoint in memory."""

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    state: Mapping[str, Any]
    """JSON data: the step, progress, random states and the rest of nested states."""
    task: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors of the task's own state."""


# ── writing ───────────────────────────────────────────────────────────────────────────────────


def save(run: Path, contents: Contents, *, keep: int, best_step: int | None) -> Path:
    """Write a checkpoint, then delete older ones except the best."""
    folder = _unfinished(run, contents.state)
    with _telling(run, folder):
        _begin(folder)
        _write_tensors(folder / "model.safetensors", contents.model)
        _write_tensors(folder / "optimizer.safetensors", contents.optimizer)
        if contents.task:
            _write_tensors(folder / _TASK, contents.task)
        place = _complete(run, folder, contents.state, _checksums(folder.iterdir()))
    with suppress(OSError):
        _prune(run, keep, best_step)
    return place


def save_sharded(
    run: Path, contents: Contents, world: World, *, keep: int, best_step: int | None
) -> None:
    """Write a checkpoint of a sharded model; every rank calls this.

    It is complete when the first rank sees every shard and renames the folder.
    """
    folder = _unfinished(run, contents.state)
    with first_writes(world) as writes, _telling(run, folder):
        if writes:
            _begin(folder)
    parallel.write(folder, {**contents.model, **contents.optimizer})
    own = _checksums(parallel.own_files(folder, world.rank))
    sums: dict[str, str] = {}
    for part in gather(world, json.dumps(own)):
        sums |= json.loads(part)
    with first_writes(world) as writes, _telling(run, folder):
        if writes:
            _check_seen(folder, sums)
            _complete(run, folder, contents.state, sums)
            with suppress(OSError):
                _prune(run, keep, best_step)


def _unfinished(run: Path, state: Mapping[str, Any]) -> Path:
    return run / _FOLDER / (_UNFINISHED + _NAME.format(int(state["step"])))


@contextmanager
def _telling(run: Path, folder: Path) -> Iterator[None]:
    """Turn write errors in a block into RunFailed and delete the unfinished `folder`."""
    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        place = folder.with_name(folder.name.removeprefix(_UNFINISHED))
        raise RunFailed(f"cannot write {place} ({reason(error)})", disk_fix(error, run)) from error


def _begin(folder: Path) -> None:
    _discard(folder)
    folder.parent.mkdir(exist_ok=True)  # a run's folder that was deleted is not created again
    folder.mkdir()


def _complete(run: Path, folder: Path, state: Mapping[str, Any], sums: Mapping[str, str]) -> Path:
    """Write state and manifest beside the tensors, then rename the folder."""
    _write_text(folder / "state.json", json.dumps(state, allow_nan=False))
    sums = {**sums, "state.json": checksum(folder / "state.json")}
    manifest = {"format": _FORMAT, "run": identity(run), "files": sums}
    _write_text(folder / "manifest.json", json.dumps(manifest, indent=2))
    sync(folder)
    place = folder.with_name(folder.name.removeprefix(_UNFINISHED))
    _discard(place)  # a damaged checkpoint of the same step
    folder.rename(place)
    sync(place.parent)
    return place


def _check_seen(folder: Path, names: Iterable[str]) -> None:
    if unseen := [name for name in names if not (folder / name).is_file()]:
        raise RunFailed(
            f"the first rank does not see {folder / unseen[0]}",
            "put the run on a disk that all machines share (runs_dir)",
        )


def clear_unfinished(run: Path) -> None:
    """Delete unfinished checkpoints of killed processes."""
    for folder in (run / _FOLDER).glob(_UNFINISHED + "*"):
        shutil.rmtree(folder, ignore_errors=True)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(plain, path)
    sync(path)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    sync(path)


def _discard(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _prune(run: Path, keep: int, best_step: int | None) -> None:
    best = None if best_step is None else _NAME.format(best_step)
    for folder in listed(run)[keep:]:
        if folder.name != best:
            # Renamed first: a half deleted folder must not look like a checkpoint.
            doomed = folder.with_name(_UNFINISHED + folder.name)
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


_ROOM = 3
"""Bytes of the host's memory that must be free for each byte that is copied there: pinned memory
is rounded up, and the best weights are copied once more."""


class CheckpointWriter:
    """Writes one checkpoint at a time in a thread, while the run goes on."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._under_way: Future[object] | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Begin to write, after the checkpoint before is done."""
        self.wait()
        self._under_way = self._pool.submit(work)

    @timeline.stage("checkpoint")
    def wait(self) -> None:
        """Wait until the checkpoint is written, and raise the writer's error."""
        begun, self._under_way = self._under_way, None
        if begun is not None:
            begun.result()

    def close(self) -> None:
        """Wait until the checkpoint is written, or could not be."""
        self._pool.shutdown()


def on_host(contents: Contents, pinned: dict[str, Tensor]) -> Contents | None:
    """Copy a checkpoint's contents to pinned memory, kept for the next; None without room."""
    named = {
        f"{part}/{name}": tensor.detach()
        for part in ("model", "optimizer", "task")
        for name, tensor in getattr(contents, part).items()
    }
    there = {name: (tensor.shape, tensor.dtype) for name, tensor in pinned.items()}
    new = {n: t for n, t in named.items() if there.get(n) != (t.shape, t.dtype)}
    if sum(t.nbytes for t in new.values()) * _ROOM > memory_left():
        return None
    for name, tensor in new.items():
        pinned[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    for name, tensor in named.items():
        pinned[name].copy_(tensor, non_blocking=True)
    synchronize()

    def part(which: str) -> dict[str, Tensor]:
        return {name: pinned[f"{which}/{name}"] for name in getattr(contents, which)}

    return Contents(part("model"), part("optimizer"), contents.state, part("task"))


# ── reading ───────────────────────────────────────────────────────────────────────────────────


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; raise BadInput where it is damaged."""
    check_regular(path, "give a folder trainfit wrote")
    try:
        return safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        what = f"{path} is damaged, or not a safetensors file ({reason(error)})"
        raise BadInput(what, "get another copy of it") from None


def listed(run: Path) -> list[Path]:
    """List the checkpoint folders of a run, newest first, unchecked."""
    return sorted((run / _FOLDER).glob("step-*"), reverse=True)


def latest_good(run: Path) -> tuple[Path | None, tuple[str, ...]]:
    """Find the newest undamaged checkpoint, and describe each newer damaged one."""
    faults: list[str] = []
    for folder in listed(run):
        fault = find_fault(folder, identity(run))
        if fault is None:
            return folder, tuple(faults)
        faults.append(f"{folder} is not used: {fault}; the checkpoint before it is")
    return None, tuple(faults)


def find_fault(folder: Path, run: str) -> str | None:
    """Describe what is wrong with a checkpoint folder; None where it is good."""
    try:
        manifest = codec.read_object(folder / "manifest.json")
        files: dict[str, str] = manifest["files"]
        if manifest["format"] != _FORMAT:
            return f"its format is {manifest['format']!r:.80}, not {_FORMAT!r}"
        if manifest["run"] != run:
            return f"it belongs to the run {manifest['run']!s:.80}"
        if "state.json" not in files or any(Path(name).name != name for name in files):
            return "its manifest does not list its files"
        for name, expected in files.items():
            if checksum(folder / name) != expected:
                return f"{name} does not match its checksum"
        _check_state(codec.read_object(folder / "state.json"))
    except OSError as error:
        name = Path(error.filename or "manifest.json").name
        return f"{name} cannot be read ({type(error).__name__}: {reason(error)})"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest or its state is damaged ({type(error).__name__}: {reason(error)})"
    return None


def _check_state(state: Mapping[str, Any]) -> None:
    """Raise where a key is missing or has a wrong type."""
    for name, kind in (("step", int), ("progress", dict), ("random", list)):
        if not isinstance(state[name], kind):
            raise TypeError(f"{name} is no {kind.__name__}")
    scale = [0.0, 0.0] if state["scale"] is None else state["scale"]
    if len(scale) != 2 or not all(isinstance(number, int | float) for number in scale):
        raise TypeError("scale is no pair of numbers")
    state["frozen"]


def read(folder: Path) -> Contents:
    """Read a checked checkpoint; shards are joined to whole tensors."""
    state = read_state(folder)
    if parallel.is_sharded(folder):
        tensors = parallel.read_whole(folder)
        optimizer = {n: t for n, t in tensors.items() if parallel.is_state(n, tensors)}
        model = {n: t for n, t in tensors.items() if n not in optimizer}
        return Contents(model, optimizer, state)
    return Contents(
        model=read_tensors(folder / "model.safetensors"),
        optimizer=read_tensors(folder / "optimizer.safetensors"),
        state=state,
        task=read_tensors(folder / _TASK) if (folder / _TASK).exists() else {},
    )


def read_state(folder: Path) -> dict[str, Any]:
    """Read state.json of a checkpoint."""
    return codec.read_object(folder / "state.json")


def _checksums(paths: Iterable[Path]) -> dict[str, str]:
    """Checksums by name, in parallel: those of a large model take as long as writing it."""
    found = sorted(paths)
    with ThreadPoolExecutor(max(1, len(found)), "checksum") as pool:
        return dict(zip((path.name for path in found), pool.map(checksum, found), strict=True))


def load_weights(run: Path, model: nn.Module, *, best: bool = True) -> int:
    """Load the best or the last weights of a run into a model; returns their step.

    Without a best evaluation the last weights are used.
    """
    latest, faults = latest_good(run)
    for text in faults:
        warnings.warn(text, TrainfitWarning, stacklevel=2)
    if latest is None:
        raise BadInput(f"{run} has no checkpoint that can be used", "give the folder of a run")
    contents = read(latest)
    best_step = contents.state["progress"]["best_step"] if best else None
    if best_step is not None and best_step != contents.state["step"]:
        folder = run / _FOLDER / _NAME.format(best_step)
        fault = find_fault(folder, identity(run))
        if fault is None:
            contents = read(folder)
        else:
            text = f"the best checkpoint {folder} is not used: {fault}; the last one is"
            warnings.warn(text, TrainfitWarning, stacklevel=2)
    load_model(model, contents.model)
    return int(contents.state["step"])
