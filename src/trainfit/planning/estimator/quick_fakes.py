"""Fake tensors with a quick memory: an operation on shapes that were seen before is not run again.

A plan runs ten thousand operations and more, most of them in blocks that are alike. torch's own
cache of fake operations takes several times as long to find a result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_unflatten

VALUES = "_trainfit_values"
"""Attribute of a fake whose values are known."""
Shape = tuple[tuple[int, ...], tuple[int, ...], Any, torch.dtype]
"""Size, stride, offset and dtype of a tensor in its storage."""
_CPU = torch.device("cpu")
_PLAIN: frozenset[type] = frozenset(
    {int, float, bool, str, type(None)}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
)


class Call(NamedTuple):
    """Call of an operation: what decides its result, and the fakes among its arguments."""

    key: tuple[Any, ...]
    fakes: list[FakeTensor]


def describe(func: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> Call | None:
    """Describe a call on fakes; None where more than shapes and plain values may decide."""
    key: list[Any] = [func]
    fakes: list[FakeTensor] = []
    if _add(args, key, fakes) and _add(kwargs.items(), key, fakes) and fakes:
        return Call(tuple(key), fakes)
    return None


def _add(items: Iterable[Any], key: list[Any], fakes: list[FakeTensor]) -> bool:
    """Append arguments to the key; False where one of them does not belong into a key."""
    for item in items:
        kind = type(item)
        if kind is FakeTensor:
            if item.constant is not None or VALUES in item.__dict__ or item.fake_device != _CPU:
                return False
            fakes.append(item)
            key += item.shape, item.stride(), item.storage_offset(), item.dtype, item.requires_grad
        elif kind in _PLAIN:
            key += kind, item
        elif kind is list or kind is tuple:
            key.append(len(item))
            if not _add(item, key, fakes):
                return False
        else:
            return False
    return True


def shape_of(item: Tensor) -> Shape:
    """Layout of a tensor in its storage."""
    return tuple(item.shape), item.stride(), item.storage_offset(), item.dtype


class _Leaf(NamedTuple):
    """A tensor of a result."""

    of: int | None
    """Place among the fakes of the call of the one that it is or views; None for its own memory."""
    shape: Shape | None
    """None if it is that fake itself."""


class Recipe(NamedTuple):
    """How to make the result of an operation from the fakes of its call."""

    leaves: tuple[_Leaf | None, ...]
    """One for each leaf of the result; None for a leaf that is None."""
    spec: Any
    """Structure of the result; None for a single leaf."""

    def make(self, fakes: Sequence[FakeTensor], mode: QuickFakes) -> tuple[Any, list[FakeTensor]]:
        """Return the result, and the tensors in it."""
        made: list[FakeTensor | None] = []
        for leaf in self.leaves:
            if leaf is None:
                made.append(None)
            elif leaf.shape is None:
                made.append(fakes[leaf.of or 0])
            else:
                storage = None if leaf.of is None else fakes[leaf.of].untyped_storage()
                made.append(mode.make(leaf.shape, storage))
        out = made[0] if self.spec is None else tree_unflatten(made, self.spec)
        return out, [item for item in made if item is not None]


def learn(out: Any, call: Call, after: Call | None) -> Recipe | None:
    """Derive a recipe from the result of a call; None where it is not made of plain fakes.

    `after` describes the call again: an operation that reshaped its arguments has no recipe.
    """
    if after is None or call.key != after.key:
        return None
    flat, spec = tree_flatten(out)
    given = {fake.untyped_storage()._cdata: at for at, fake in enumerate(call.fakes)}
    new: set[int] = set()
    leaves: list[_Leaf | None] = []
    for item in flat:
        if item is None:
            leaves.append(None)
            continue
        if type(item) is not FakeTensor:
            return None
        at = next((at for at, fake in enumerate(call.fakes) if fake is item), None)
        leaf = _Leaf(at, None) if at is not None else _learn(item, given)
        address = item.untyped_storage()._cdata
        if leaf is None or (leaf.of is None and address in new):
            return None
        leaves.append(leaf)
        new.add(address)
    return Recipe(tuple(leaves), None if len(flat) == 1 and flat[0] is out else spec)


def _learn(item: FakeTensor, given: dict[int, int]) -> _Leaf | None:
    """Leaf for a new tensor; None if more than its shape would be needed to make it."""
    if item.is_conj() or item.is_neg() or item.constant is not None or item.fake_device != _CPU:
        return None
    storage, shape = item.untyped_storage(), shape_of(item)
    if storage._cdata in given:
        return _Leaf(given[storage._cdata], shape)
    with torch._C._DisableTorchDispatch():
        alike = torch.empty_strided(*shape[:2], dtype=item.dtype, device="meta")
    plain = shape_of(alike) == shape and alike.untyped_storage().nbytes() == storage.nbytes()
    return _Leaf(None, shape) if plain else None


class QuickFakes(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Mode of fake tensors that knows the results of operations by their shapes."""

    _recipes: ClassVar[dict[tuple[Any, ...], Recipe | None]] = {}
    """For all steps of the process, as torch's own cache is."""

    def __init__(self) -> None:
        """Take tensors that are no fakes too."""
        super().__init__(allow_non_fake_inputs=True)
        self._state: dict[str, Any] | None = None
        """Attributes of a fake without values."""

    def make(self, shape: Shape, storage: torch.UntypedStorage | None = None) -> FakeTensor:
        """Make a fake of a shape, in memory of its own or in that of another."""
        size, stride, offset, dtype = shape
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            empty = torch.empty_strided(size, stride, dtype=dtype, device="meta")
            if storage is not None:
                empty.set_(storage, offset, size, stride)
            if self._state is None:
                first = FakeTensor(self, empty, _CPU)
                self._state = dict(vars(first))
                return first
            # As the constructor does, which computes the same state every time.
            fake: FakeTensor = Tensor._make_subclass(
                FakeTensor, empty, False, dispatch_device=True, device_for_backend_keys=_CPU
            )
            torch._C._set_throw_on_mutable_data_ptr(fake)
            fake.__dict__.update(self._state)
            return fake

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to say so takes time in every operation

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, or make its result by its recipe."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            call = describe(func, args, kwargs)
            recipe = None if call is None else self._recipes.get(call.key)
            if call is not None and recipe is not None:
                return recipe.make(call.fakes, self)[0]
            out = super().__torch_dispatch__(func, types, args, kwargs)
            if call is not None and call.key not in self._recipes:
                self._recipes[call.key] = learn(out, call, describe(func, args, kwargs))
            return out
