"""Environment variables that torch and CUDA read once, when CUDA starts."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from trainfit.core.records import Change

# torch reads all three, and an older name wins over a newer one. So every variable that is set is
# changed, and the new name is used only where none is set.
_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_NEW_NAME = _NAMES[-1]
_PROFILER_LOG = "KINETO_LOG_LEVEL"
_NO_USAGE = {
    "ORT_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
_EXPANDABLE = re.compile(r"\bexpandable_segments\s*:\s*(\w+)")


def set_variable(name: str, value: str, restore: ExitStack) -> None:
    """Set an environment variable, and add the reset to `restore`."""
    restore.callback(_put_back, name, os.environ.get(name))
    os.environ[name] = value


def set_variables(variables: Mapping[str, str]) -> None:
    """Set environment variables of this process and its children, to its end."""
    os.environ.update(variables)


def quiet_profiler(restore: ExitStack) -> None:
    """Keep torch's profiler from printing when it starts and stops; it reads this at its start."""
    if _PROFILER_LOG not in os.environ:
        set_variable(_PROFILER_LOG, "99", restore)


def stay_offline() -> None:
    """Keep this process and its children from asking a model hub that gives nothing."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants = sys.modules.get("huggingface_hub.constants")
    if constants is not None:
        vars(constants)["HF_HUB_OFFLINE"] = True


def send_no_usage() -> None:
    """Keep libraries from telling their makers of this use, where the user did not allow it.

    onnxruntime sends names and hashes of models, from 1.29 on, and reads this as it is imported.
    """
    for name, value in _NO_USAGE.items():
        os.environ.setdefault(name, value)


def _put_back(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def cuda_started() -> bool:
    """Tell if CUDA runs in this process, without importing torch or starting it."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def has_segments() -> bool:
    """Tell if a started CUDA uses torch's allocator; cudaMallocAsync shows no segments."""
    return bool(sys.modules["torch"].cuda.get_allocator_backend() == "native")


def expandable_segments(on: bool, restore: ExitStack) -> Change:
    """Let the CUDA allocator grow its segments, which reduces fragmentation.

    Other settings in the variable stay. This neither imports torch nor starts CUDA. A CUDA that
    has started without an allocation, as after hardware detection, no longer reads the variable:
    its allocator is set directly.
    """
    before, obstacle = _reads(), _obstacle(on)
    if not obstacle and cuda_started():
        _tell_allocator(on, restore)
    elif not obstacle:
        for name in [name for name in _NAMES if name in os.environ] or [_NEW_NAME]:
            set_variable(name, _amended(os.environ.get(name, ""), on), restore)
    after = _reads()
    return Change(
        name="expandable_segments",
        requested=on,
        before=before,
        after=after,
        note="" if after == on else obstacle,
    )


def _obstacle(on: bool) -> str:
    """Reason why the setting would have no effect; empty: it would."""
    if not _has_cuda():
        return f"this torch has no CUDA: nothing reads {_NEW_NAME}"
    if cuda_started() and not _takes_settings():
        return (
            "CUDA had already started and its memory is in use, so that part of it would stay "
            f"as it is; set {_NEW_NAME}=expandable_segments:{on} before the process starts"
        )
    return ""


def _takes_settings() -> bool:
    """Tell if a started CUDA still takes the setting: torch's allocator, with nothing in it."""
    torch = sys.modules["torch"]
    devices = range(torch.cuda.device_count())
    unused = has_segments() and not any(torch.cuda.memory_reserved(d) for d in devices)
    return unused and hasattr(torch._C, "_accelerator_setAllocatorSettings")


def _tell_allocator(on: bool, restore: ExitStack) -> None:
    torch = sys.modules["torch"]
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    text = settings.get("PYTORCH_CUDA_ALLOC_CONF") or _variable()
    known = text if _EXPANDABLE.search(text) else _amended(text, bool(_reads()))
    restore.callback(torch._C._accelerator_setAllocatorSettings, known)
    torch._C._accelerator_setAllocatorSettings(_amended(text, on))


def _has_cuda() -> bool:
    """Tell if torch was built with CUDA; True where torch is not imported yet."""
    torch = sys.modules.get("torch")
    return torch is None or bool(torch.backends.cuda.is_built())


def _amended(text: str, on: bool) -> str:
    """Change this one of the allocator's settings in `text`."""
    setting = f"expandable_segments:{on}"
    if _EXPANDABLE.search(text):
        return _EXPANDABLE.sub(setting, text)
    return f"{text.rstrip(', ')},{setting}" if text.strip(", ") else setting


def _reads() -> bool | None:
    """Read the allocator's current setting, or that for CUDA's start; None: not set."""
    if not _has_cuda():
        return None
    if cuda_started():
        # The variable may have been set after CUDA read it.
        if not has_segments():
            return None
        settings = sys.modules["torch"].cuda.memory._snapshot()["allocator_settings"]
        return bool(settings["expandable_segments"])
    found = _EXPANDABLE.search(_variable())
    return found[1] == "True" if found else None


def _variable() -> str:
    """Return the text that the allocator reads when CUDA starts."""
    return next((os.environ[name] for name in _NAMES if name in os.environ), "")


# ── GPUs that whole folds of a job train on ──────────────────────────────────────────────────────


_OTHERS = "TRAINFIT_FOLD_GPUS"
"""Names of the GPUs besides the first, which this process trains on."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def give_folds(names: Sequence[str]) -> None:
    """Set the variables for folds on several GPUs: the first for this process, others for more."""
    set_variables({_VISIBLE: names[0], _OTHERS: ",".join(names[1:])})


def other_gpus() -> list[dict[str, str]]:
    """Variables of a process on each of the other GPUs; empty where there are none."""
    named = os.environ.get(_OTHERS, "")
    return [{_VISIBLE: name, _OTHERS: ""} for name in named.split(",") if name]
