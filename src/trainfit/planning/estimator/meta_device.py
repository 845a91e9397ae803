"""Building a model without memory: on the meta device, beside the values that constructors read.

A constructor may ask for numbers that it computed with tensors, such as the rates of dropped paths
(`torch.linspace(0, 0.1, depth).tolist()`). So small tensors of known values are computed on the CPU
beside those on the meta device.
"""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.nn.modules.module import _IncompatibleKeys
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map

from trainfit.core.errors import BadInput
from trainfit.planning.estimator.step_work import attach, known

aten = torch.ops.aten
_MAX_VALUES = 1 << 12
"""Largest tensor whose values are computed."""
_MADE = (torch.tensor, torch.as_tensor)
"""Functions whose result is on the meta device before any operation is seen."""
_FIXED = (
    *(aten.arange, aten.linspace, aten.logspace, aten.eye),
    *(aten.full, aten.zeros, aten.ones, aten.scalar_tensor),
)
"""Operations that make tensors of fixed values."""
_CPU = torch.device("cpu")
_MODELS = "transformers.modeling_utils"


@contextmanager
def on_meta() -> Iterator[None]:
    """Build models on the meta device, uninitialised."""
    values = _Values()  # type: ignore[no-untyped-call]
    counting = {} if hasattr(torch, "meta") else {"meta": SimpleNamespace(device_count=int)}
    vars(torch).update(counting)  # fork_rng counts devices
    try:
        with torch.device("meta"), _Made(), values, _no_initialisation():
            yield
    finally:
        for name in counting:
            vars(torch).pop(name, None)


@contextmanager
def _no_initialisation() -> Iterator[None]:
    """Skip initialisation: weights need no values, and some initialisations fail on fakes."""
    plain = {
        name: each for name, each in vars(init).items() if name.endswith("_") and callable(each)
    }
    vars(init).update({name: _on_values(each) for name, each in plain.items()})
    try:
        yield
    finally:
        vars(init).update(plain)


def _on_values(initialise: Callable[..., Any]) -> Callable[..., Any]:
    """Skip meta tensors alone: a module that is imported meanwhile keeps the function."""

    def initialised(tensor: Tensor, *args: Any, **options: Any) -> Any:
        return tensor if tensor.is_meta else initialise(tensor, *args, **options)

    return initialised


@contextmanager
def pretrained_by_config() -> Iterator[None]:
    """Have transformers' from_pretrained read configurations alone, and torch.hub fetch nothing."""
    imports = _Imports()
    sys.meta_path.insert(0, imports)
    imports.put(torch.hub, "urlopen", _unopened)
    imports.put(nn.Module, "load_state_dict", _loaded)
    for module in list(sys.modules.values()):
        imports.look(module)
    try:
        yield
    finally:
        sys.meta_path.remove(imports)
        for owner, name, plain in imports.replaced:
            setattr(owner, name, plain)


_FETCH, _LOAD = torch.hub.load_state_dict_from_url, nn.Module.load_state_dict


def _unfetched(*_: Any, **_options: Any) -> dict[str, Any]:
    """Stand in for weights of an address, as torchvision's are."""
    return defaultdict(dict)


def _unopened(*_: Any, **_options: Any) -> Any:
    raise URLError("nothing is fetched for a plan")


def _loaded(module: nn.Module, state: Any, *args: Any, **options: Any) -> Any:
    return _LOAD(module, state, *args, **options) if state else _IncompatibleKeys([], [])


class _Imports:
    """Import hook for modules that a constructor imports: they outlive the meta device.

    Their own tensors have values, and from_pretrained is replaced as soon as there is one.
    """

    def __init__(self) -> None:
        self.replaced: list[tuple[Any, str, Any]] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.startswith("torch."):  # leaving the modes imports some of them
            return None
        spec = PathFinder.find_spec(name, path, target)
        loader: Any = spec and spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                with _disable_current_modes(), torch._C.DisableTorchFunction():
                    execute(module)
                self.look(module)

            loader.exec_module = exec_module
        return spec

    def put(self, owner: Any, name: str, new: Any) -> None:
        self.replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, new)

    def look(self, module: Any) -> None:
        """Replace what a module has of functions that fetch weights."""
        names: dict[str, Any] = getattr(module, "__dict__", {})
        if names.get("__name__") == _MODELS:
            self.put(module.PreTrainedModel, "from_pretrained", classmethod(_by_config))
        for name in ("load_state_dict_from_url", "load_url"):
            found = names.get(name)
            if found is _FETCH or found is _unfetched:  # the latter where it was imported here
                self.replaced.append((module, name, _FETCH))
                setattr(module, name, _unfetched)


def _by_config(kind: Any, place: Any, /, *_: Any, config: Any = None, **given: Any) -> Any:
    """Build a model of transformers by its configuration, with from_pretrained's arguments."""
    if given.pop("quantization_config", None):
        fix = "plan a built-in job with model.quantization, or measure a real step"
        raise BadInput("from_pretrained quantizes the weights, which needs their values", fix)
    loaded = given.pop("output_loading_info", False)
    dtypes = [given.pop(name, None) for name in ("dtype", "torch_dtype")]
    kernel = {key: given.pop(key) for key in ("attn_implementation",) if key in given}
    if config is None or isinstance(config, str):
        where = place if config is None else config
        config, given = kind.config_class.from_pretrained(where, return_unused_kwargs=True, **given)
    stored = config.dtype or torch.float32
    dtype = next((one for one in dtypes if one not in (None, "auto")), stored)
    built = kind._from_config(copy.deepcopy(config), dtype=dtype, **kernel).eval()
    return (built, {}) if loaded else built


class _Made(TorchFunctionMode):
    """Note the values that torch.tensor is given."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in _MADE and out.is_meta and not isinstance(args[0], Tensor):
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                attach(out, func(*args, **kwargs | {"device": _CPU}), out.numel())
        return out


class _Values(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Compute small tensors of known values beside those on the meta device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default or kwargs.get("device") == _CPU:
            values = _computed(func, args, kwargs)
            return func(*args, **kwargs) if values is None else values
        out = func(*args, **kwargs)
        made = [t for t in tree_iter(out) if isinstance(t, Tensor)]
        if any(t.is_meta for t in made):  # what is written to on the CPU must be so once
            few = all(t.numel() <= _MAX_VALUES for t in made)
            attach(made, _computed(func, args, kwargs) if few else None, _MAX_VALUES)
        return out


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Result of an operation on known values; None where they are not."""
    given = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
    fixed = bool(given) or func._overloadpacket in _FIXED
    if not fixed or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    if any(known(t) is None for t in given):
        return None
    args, kwargs = tree_map(known, (args, kwargs))
    if "device" in kwargs:
        kwargs = kwargs | {"device": _CPU}
    elif not given:
        return None
    with _disable_current_modes():
        return func(*args, **kwargs)
