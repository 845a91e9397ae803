"""Apply settings to this process, and take them back in the reverse order."""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from trainfit.core.errors import BadInput, brief
from trainfit.core.libraries import warn_of_newer
from trainfit.core.plan_records import Plan, RuntimeSettings
from trainfit.core.records import Applied, Change
from trainfit.runtime import environment
from trainfit.runtime.environment import cuda_started, has_segments, set_variable

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_REPRODUCIBLE = (":4096:8", ":16:8")  # the values that torch accepts as deterministic
_KERNELS = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}
_GIB = 2**30
_MAX_SEED = 2**32 - 1  # numpy takes no larger one


def _assign(owner: Any, name: str, value: object, restore: ExitStack) -> None:
    """Set an attribute, and add the reset to `restore`."""
    restore.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def num_threads(count: int, restore: ExitStack) -> Change:
    """Set the threads of torch's CPU operations."""
    import torch

    if count < 1:
        raise BadInput(f"num_threads is {count}", "give 1 or more, or leave it out")
    before = torch.get_num_threads()
    restore.callback(torch.set_num_threads, before)
    torch.set_num_threads(count)
    return Change(name="num_threads", requested=count, before=before, after=torch.get_num_threads())


def cudnn_benchmark(on: bool, restore: ExitStack) -> Change:
    """Let cuDNN time its kernels and use the fastest for each shape."""
    import torch

    cudnn = torch.backends.cudnn
    before, note = cudnn.benchmark, ""
    if on and torch.are_deterministic_algorithms_enabled():
        note = "left as it was: the fastest kernel differs from run to run, and deterministic is on"
    else:
        _assign(cudnn, "benchmark", on, restore)
    return Change(
        name="cudnn_benchmark", requested=on, before=before, after=cudnn.benchmark, note=note
    )


def deterministic(on: bool, restore: ExitStack) -> Change:
    """Use only operations with bit-identical results; those without one will raise."""
    import torch

    cudnn = torch.backends.cudnn
    before = _is_deterministic()
    restore.callback(
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(on)
    _assign(cudnn, "deterministic", on, restore)
    note = ""
    if on:
        _assign(cudnn, "benchmark", False, restore)
        note = _reproducible_cublas(restore)
    return Change(
        name="deterministic", requested=on, before=before, after=_is_deterministic(), note=note
    )


def _is_deterministic() -> bool:
    import torch

    cudnn = torch.backends.cudnn
    chosen = torch.are_deterministic_algorithms_enabled() and cudnn.deterministic
    return bool(chosen and not cudnn.benchmark)


def _reproducible_cublas(restore: ExitStack) -> str:
    """Give cuBLAS a workspace that makes it reproducible; a note where that comes too late."""
    if os.environ.get(_CUBLAS) in _REPRODUCIBLE:
        return ""
    if cuda_started():
        return (
            "CUDA had already started, so matrix products may still differ from run to run; "
            f"set {_CUBLAS}={_REPRODUCIBLE[0]} before the process starts"
        )
    set_variable(_CUBLAS, _REPRODUCIBLE[0], restore)
    return ""


def attention(kernel: str, restore: ExitStack) -> Change:
    """Prefer an attention `kernel`; the others stay enabled as fallbacks."""
    import torch
    import torch.compiler.config
    from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel

    if kernel not in _KERNELS:
        fix = f"give one of {', '.join(_KERNELS)}, or leave it out"
        raise BadInput(f"attention is {kernel!r}", fix)
    before = attention_order()
    # sdpa_kernel restores the order of the enabled kernels only, and puts the others last.
    restore.callback(torch._C._set_sdp_priority_order, torch._C._get_sdp_priority_order())
    wanted = [getattr(SDPBackend, _KERNELS[kernel]), *_cur_sdpa_kernel_backends(with_priority=True)]
    restore.enter_context(sdpa_kernel(wanted, set_priority=True))
    # The key of torch.compile's cache on disk leaves out this preference.
    tag = torch.compiler.config.cache_key_tag
    _assign(torch.compiler.config, "cache_key_tag", f"{tag} attention={kernel}", restore)
    after = attention_order()
    return Change(
        name="attention",
        requested=kernel,
        before=before[0] if before else None,
        after=after[0],
        note=f"then {', '.join(after[1:])}",
    )


def attention_order() -> list[str]:
    """List the attention kernels that torch may use, in the order of preference."""
    from torch.nn.attention import _cur_sdpa_kernel_backends

    enabled = _cur_sdpa_kernel_backends(with_priority=True)
    return [kernel.name.lower().removesuffix("_attention") for kernel in enabled]


def seed(value: int, restore: ExitStack) -> Change:
    """Seed Python, numpy where it is installed, and torch on every device."""
    import torch

    if not 0 <= value <= _MAX_SEED:
        raise BadInput(f"seed is {value}", f"give a number from 0 to {_MAX_SEED}")
    before = torch.initial_seed()
    restore.callback(random.setstate, random.getstate())
    random.seed(value)
    if importlib.util.find_spec("numpy") is not None:
        import numpy

        restore.callback(numpy.random.set_state, numpy.random.get_state())
        numpy.random.seed(value)
    restore.callback(torch.set_rng_state, torch.get_rng_state())
    # A CUDA that has not started has no random state yet; torch keeps the seed for its start.
    if cuda_started():
        restore.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
    torch.manual_seed(value)
    return Change(name="seed", requested=value, before=before, after=torch.initial_seed())


def memory_gib(most: float, restore: ExitStack) -> Change:
    """Bound the memory that torch reserves on the current GPU; this starts CUDA."""
    import torch

    if not most > 0:
        raise BadInput(f"memory_gib is {most}", "give what may be used, above 0")
    if not torch.cuda.is_available():
        note = "there is no GPU whose memory could be bounded"
        return Change(name="memory_gib", requested=most, before=None, after=None, note=note)
    cuda: Any = torch.cuda
    _, total = cuda.mem_get_info()
    before = cuda.get_per_process_memory_fraction()
    restore.callback(cuda.set_per_process_memory_fraction, before)
    cuda.set_per_process_memory_fraction(min(1.0, most * _GIB / total))
    reads = round(cuda.get_per_process_memory_fraction() * total / _GIB, 3)
    return Change(
        name="memory_gib",
        requested=most,
        before=round(before * total / _GIB, 3),
        after=most if reads == round(most, 3) else reads,
        note="" if most * _GIB <= total else "the GPU has no more",
    )


def empty_cache(on: bool, _restore: ExitStack) -> Change:
    """Return unused cached memory to the GPU; there is nothing to undo."""
    import torch

    if not cuda_started():
        note = "CUDA has not started: nothing is cached"
        return Change(name="empty_cache", requested=on, before=True, after=True, note=note)
    held, before = _cached()
    torch.cuda.empty_cache()
    left, after = _cached()
    note = f"reserved {held:,} bytes before, {left:,} after"
    return Change(name="empty_cache", requested=on, before=before, after=after, note=note)


def _cached() -> tuple[int, bool | None]:
    """Return the allocator's reserved bytes, and True if every segment is in use."""
    import torch

    cuda: Any = torch.cuda
    if not has_segments():
        return cuda.memory_reserved(), None
    segments = cuda.memory_snapshot()
    return sum(s["total_size"] for s in segments), all(s["active_size"] for s in segments)


_LEVEL = "fp32_precision"


def tf32(on: bool, restore: ExitStack) -> Change:
    """Let float32 matrix products and convolutions run in TF32 on the GPUs that have it."""
    before = _reads()
    _write_matmul(on, restore)
    _write_cudnn(on, restore)
    return Change(name="tf32", requested=on, before=before, after=_reads())


def _reads() -> bool | str:
    """Read TF32: True, False, or the only parts that use it."""
    import torch

    cudnn: Any = torch.backends.cudnn
    parts = {"matmul": torch.backends.cuda.matmul, "conv": cudnn.conv, "rnn": cudnn.rnn}
    on = [name for name, part in parts.items() if part.fp32_precision == "tf32"]
    return bool(on) if len(on) in (0, len(parts)) else f"{' and '.join(on)} only"


def _write_matmul(on: bool, restore: ExitStack) -> None:
    import torch

    backends: Any = torch.backends
    above = {backends.cuda.matmul: (backends, backends.cudnn), backends.mkldnn.matmul: (backends,)}
    for part, levels in above.items():
        restore.callback(setattr, part, _LEVEL, _own(part, *levels))
    for part in above:
        part.fp32_precision = "ieee"  # torch refuses to read the old flag while it contradicts
    restore.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    # Not by set_float32_matmul_precision: its "high" would also lower the CPU's precision.
    backends.cuda.matmul.allow_tf32 = on


def _write_cudnn(on: bool, restore: ExitStack) -> None:
    import torch

    backends: Any = torch.backends
    cudnn = backends.cudnn
    value = "tf32" if on else "ieee"
    flag = _cudnn_flag()
    own = {part: _own(part, backends, cudnn) for part in (cudnn.conv, cudnn.rnn)}
    # With the old setter off, conv and rnn follow this level; so do Inductor's convolutions.
    restore.callback(setattr, cudnn, _LEVEL, _own(cudnn, backends))
    cudnn.fp32_precision = value
    # No setter can restore the initial default of conv and rnn, so they are written only where
    # they differ.
    if flag == on and all(part.fp32_precision == value for part in own):
        return
    for part, before in own.items():
        restore.callback(setattr, part, _LEVEL, before)
    restore.callback(setattr, cudnn, "allow_tf32", flag)
    cudnn.allow_tf32 = on


def _cudnn_flag() -> bool:
    """Read cuDNN's old flag, also where it contradicts the newer settings."""
    import torch

    cudnn: Any = torch.backends.cudnn
    try:
        return bool(cudnn.allow_tf32)
    except RuntimeError:  # raised where the flag contradicts conv and rnn
        return bool(cudnn.conv.fp32_precision != "tf32")


def _own(part: Any, *above: Any) -> str:
    """Read the own setting of `part`; "none" where it follows the levels `above`."""
    seen = part.fp32_precision
    with ExitStack() as probe:
        for level in above:
            probe.callback(setattr, level, _LEVEL, level.fp32_precision)
            level.fp32_precision = "none"
        own = part.fp32_precision
    return str(own) if own == seen else "none"


# A switch sets its value, adds the reset to the stack, and returns the value read back. The order
# matters: the allocator is set before anything could start CUDA, and determinism comes before the
# choice of cuDNN's kernels by time.
_SWITCHES: dict[str, Callable[[Any, ExitStack], Change]] = {
    "expandable_segments": environment.expandable_segments,
    "deterministic": deterministic,
    "cudnn_benchmark": cudnn_benchmark,
    "tf32": tf32,
    "num_threads": num_threads,
    "attention": attention,
    "seed": seed,
    "memory_gib": memory_gib,
    "empty_cache": empty_cache,
}

# The stacks that restore the old state of this process, the latest last; records are plain data.
_in_force: list[tuple[Applied, ExitStack]] = []


def apply(settings: RuntimeSettings | Plan) -> Applied:
    """Set every switch that `settings` names; on an error, none of them.

    `Applied.changes` has the value of each switch as read back, and a note where it could not be
    set. `undo` takes the result and restores everything.
    """
    warn_of_newer()
    wanted = settings.runtime if isinstance(settings, Plan) else settings
    if not isinstance(wanted, RuntimeSettings):
        raise BadInput(f"the settings are {brief(repr(wanted))}", "give RuntimeSettings or a Plan")
    with ExitStack() as restore:
        asked = {name: getattr(wanted, name) for name in _SWITCHES}
        asked["empty_cache"] = asked["empty_cache"] or None  # False asks for nothing
        wanted_now = ((name, value) for name, value in asked.items() if value is not None)
        done = Applied(changes=tuple(_SWITCHES[name](value, restore) for name, value in wanted_now))
        _in_force.append((done, restore.pop_all()))
    return done


def undo(done: Applied) -> None:
    """Restore everything that `done` changed, and first everything applied since.

    It does nothing for changes that are undone already or belong to another process.
    """
    if not any(done is entry for entry, _ in _in_force):
        return
    latest = None
    while latest is not done:
        latest, restore = _in_force.pop()
        restore.close()


@contextmanager
def applied(settings: RuntimeSettings | Plan) -> Iterator[Applied]:
    """Apply `settings` inside a block, and undo them however the block ends."""
    done = apply(settings)
    try:
        yield done
    finally:
        undo(done)
