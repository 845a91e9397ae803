"""Compile a model in place, and continue without the compiler when it fails."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Thread
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeVar

from trainfit.core.errors import BadInput, CompileFailed, in_one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    Model = TypeVar("Model", bound=torch.nn.Module)
    Arguments = tuple[Any, ...]
    Failed = Callable[[str], None]


def compile_model(
    model: Model,
    mode: str = "default",
    *,
    dynamic: bool | None = None,
    backend: str | Callable[..., Any] = "inductor",
    budget: float = 1.0,
) -> Model:
    """Compile `model` in place and return it; its state dict keeps its keys.

    torch compiles at the first call. If the compiler fails there, the model warns once and runs
    eagerly from then on; an error in the model's own forward is raised unchanged. `mode` is one of
    torch.compile's. With `dynamic` the code takes inputs of any size; None lets torch compile for
    the first sizes and again for others, at most eight times. With a `budget` below 1 the backward
    pass keeps that share of the activations, and computes the cheapest of the others again.
    """
    return _compiled(model, mode, dynamic, backend, _as_given, [model], _warn, budget)


def _compiled(
    model: Model,
    mode: str,
    dynamic: bool | None,
    backend: str | Callable[..., Any],
    take: Callable[[Arguments], Arguments],
    alike: Sequence[torch.nn.Module],
    failed: Failed,
    budget: float = 1.0,
) -> Model:
    """Compile a model, one of those `alike`, whose arguments by position pass through `take`."""
    import torch
    from torch._inductor import list_mode_options

    if mode not in (modes := list_mode_options()):
        raise BadInput(f"compile mode is {mode!r}", f"give one of {', '.join(modes)}")
    eager: Callable[..., Any] = model._call_impl

    def forward(*args: Any, **kwargs: Any) -> Any:
        return eager(*args, **kwargs)

    # nn.Module.compile with a frame of trainfit in between. The tracer skips frames of torch.nn:
    # without it a bare nn.Sequential is not compiled, and a hook breaks the graph.
    compiled = torch.compile(forward, mode=mode, dynamic=dynamic, backend=backend)
    model._compiled_call_impl = _guarded(alike, eager, compiled, take, failed, budget)
    return model


def compile_blocks(
    model: Model,
    mode: str = "default",
    *,
    dynamic: bool | None = None,
    backend: str | Callable[..., Any] = "inductor",
    budget: float = 1.0,
    failed: Failed | None = None,
) -> Model:
    """Compile each of the model's repeated blocks, whose code is the same and is compiled once.

    That takes seconds where the whole model takes minutes. A model without repeated blocks is
    compiled as a whole. If the compiler fails for one block, all run eagerly, and `failed` is
    called with the reason; without it, that is a warning.
    """
    blocks = repeated_blocks(model)
    alike, take = blocks or [model], _with_gradient if blocks else _as_given
    for block in alike:
        _compiled(block, mode, dynamic, backend, take, alike, failed or _warn, budget)
    return model


def start_gpu(device: torch.device, *, compilers: bool) -> None:
    """Start the GPU's context and torch's compiling processes, while something else is done.

    Both take seconds.
    """
    import torch

    def context() -> None:
        with suppress(RuntimeError):  # whatever is wrong with it, the model will say so
            torch.cuda.synchronize(device)

    Thread(target=context, daemon=True).start()
    if compilers:
        start_compilers()


def start_compilers() -> bool:
    """Start torch's compiling processes; True once they are ready, or where there are none.

    Until they have imported torch, kernels are compiled one by one in this one.
    """
    with suppress(Exception):  # without them it takes longer, and nothing else changes
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.warm_pool()
        return AsyncCompile.use_process_pool() or AsyncCompile._ready_future is None
    return True


def compiled_folder() -> tuple[str, int] | None:
    """Return the folder that torch keeps compiled code in and its inode; None: there is none."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()
    with suppress(OSError):  # a folder that was emptied and made anew has another inode
        return folder, Path(folder, "fxgraph").stat().st_ino
    return None


def compile_seconds() -> float:
    """Return the seconds that torch.compile has taken in this process, by its own clock."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # not imported: nothing was compiled
    return float(dynamo.calculate_time_spent()["total_wall_time"]) if dynamo else 0.0


def forget_compiled() -> None:
    """Drop all compiled code of this process, with the memory of its CUDA graphs.

    torch compiles a function only a few times, over all models that use it, and then runs it
    eagerly without a warning. A process that tries several models calls this between them.
    """
    dynamo = sys.modules.get("torch._dynamo")  # not imported: nothing was compiled
    if dynamo is not None:
        dynamo.reset()


def forget_if_full() -> None:
    """Drop compiled code where torch would soon run further models eagerly, without a warning.

    Models of the same shapes and settings share their code, so that nothing is dropped for them.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list as versions

    [forward] = (each for each in _compiled.__code__.co_consts if isinstance(each, CodeType))
    if len(versions(forward)) > dynamo.config.recompile_limit // 2:
        forget_compiled()


@contextmanager
def eagerly(model: torch.nn.Module) -> Iterator[None]:
    """Run `model` without its compiled code inside a block.

    For shapes that change from call to call, as in evaluation: each would be compiled again.
    """
    compiled = [
        (module, module._compiled_call_impl)
        for module in model.modules()
        if module._compiled_call_impl is not None
    ]
    for module, _ in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the list of equal modules with the most parameters; empty where there is none."""
    import torch

    rows = [
        list(module)
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList)
        and len(module) > 1
        and len({type(block) for block in module}) == 1
    ]
    sizes = [sum(p.numel() for block in row for p in block.parameters()) for row in rows]
    return rows[sizes.index(max(sizes))] if rows else []


def _as_given(args: Arguments) -> Arguments:
    return args


def _with_gradient(args: Arguments) -> Arguments:
    """Let the first argument have a gradient, while gradients are taken.

    Behind frozen embeddings the first block's input has none, the others' have one: torch would
    compile the block once for each.
    """
    import torch

    first = args[0] if args else None
    if (
        not isinstance(first, torch.Tensor)
        or first.requires_grad
        or not first.is_floating_point()
        or not torch.is_grad_enabled()
    ):
        return args
    return first.detach().requires_grad_(), *args[1:]


def _warn(cause: str) -> None:
    warnings.warn(
        f"torch.compile failed and the model runs eagerly from here on ({cause})",
        CompileFailed,
        stacklevel=4,
    )


def _guarded(
    alike: Sequence[torch.nn.Module],
    eager: Callable[..., Any],
    compiled: Callable[..., Any],
    take: Callable[[Arguments], Arguments],
    failed: Failed,
    budget: float,
) -> Callable[..., Any]:
    """Wrap a `compiled` call: if the compiler fails, it and those `alike` run eagerly."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._functorch import config

    # Compiles the backward pass in the call too: in the first backward(), torch's default, there
    # would be no fallback. Made once, since making it is slower than using it.
    both_passes = config.patch(force_non_lazy_backward_lowering=True)
    within = _keeping(budget) if budget < 1 else nullcontext()

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with both_passes, within:
                return compiled(*take(args), **kwargs)
        except TorchDynamoException as error:  # the base of Inductor's errors too
            cause = in_one_line(getattr(error, "inner_exception", error))
        # The tracer also wraps errors of the model's forward. If the eager call raises as well, the
        # error is the model's, and it is raised unchanged.
        outcome = eager(*args, **kwargs)
        for model in alike:
            model._compiled_call_impl = None
        failed(cause)
        return outcome

    return call


def _keeping(budget: float) -> AbstractContextManager[None]:
    """Return a context in which new graphs keep that share of the activations.

    Results of random operations are kept in any case.
    """
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor
    from torch._inductor.custom_graph_pass import CustomGraphPass

    from trainfit.kernels.saved_on_host import LEAST_BUDGET, keep_random

    class KeepRandom(CustomGraphPass):  # type: ignore[misc]
        def __call__(self, graph: torch.fx.Graph) -> None:
            keep_random(graph)

        def uuid(self) -> str:  # part of the key in the cache of compiled code
            return "trainfit.keep_random"

    share = functorch.patch(activation_memory_budget=max(budget, LEAST_BUDGET))
    marked = inductor.patch(joint_custom_pre_pass=KeepRandom())
    return _Both(share, marked)


class _Both:
    """Two contexts as one that can be entered again, unlike those of contextlib."""

    def __init__(self, first: AbstractContextManager[Any], second: AbstractContextManager[Any]):
        self._contexts = first, second

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*error)
