"""Graphs of compiled blocks on fakes: only buffers are allocated, and recorded.

Blocks that are alike share their graphs. A graph runs once, and its log is repeated for the others.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from trainfit.planning.estimator import kernel_buffers
from trainfit.planning.estimator.quick_fakes import Shape, shape_of
from trainfit.planning.estimator.recorder import Entry, Recorder, recorders
from trainfit.planning.estimator.step_time import Work
from trainfit.planning.estimator.step_work import in_backward, known, tensor_bytes

_Values = dict[fx.Node, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tape:
    """Log of a graph that ran; inputs of the same layout and values make the same."""

    spans: list[list[Entry]]
    """Entries of the recorder's log for each node that ran and each value that ended."""
    works: Counter[Work]
    outputs: dict[fx.Node, tuple[int | fx.Node, Shape]]
    """Storage of each output that was made, by its name in the log or as an input's; its shape."""
    others: _Values
    """Outputs that are no tensors."""

    @property
    def held(self) -> set[int | fx.Node]:
        """Storages that the outputs hold."""
        return {storage for storage, _ in self.outputs.values()}


class FusedGraph:
    """One of the two graphs of a block, run node by node.

    Fused nodes have no value, since only fused nodes read them.
    """

    _boxed_call = True  # the caller gives its arguments away, so that they can be freed

    def __init__(self, graph: fx.GraphModule) -> None:
        """Find the buffers of a graph, and the places where they end."""
        self._module = graph
        self._nodes = list(graph.graph.nodes)
        buffers = kernel_buffers.find_buffers(self._nodes)
        self._made = buffers | kernel_buffers.views_in_use(self._nodes)
        self._ends = kernel_buffers.last_uses(self._nodes, buffers)
        self._reads = kernel_buffers.kernel_reads(self._nodes, buffers)
        self._overwritten = kernel_buffers.overwritten(self._nodes, buffers, self._ends)
        self._tapes: dict[Any, _Tape | None] = {}

    def __call__(self, args: list[Any]) -> Any:
        """Run the graph, or repeat the log of its first run."""
        recorder = next(iter(recorders()), None)
        inputs = deque(args)
        args.clear()
        if recorder is None:
            plain = partial(self._run, recorder=None)
            return self._output(self._walk(inputs, plain, lambda: None))
        key = (in_backward(), *map(_layout, inputs))
        tape = self._tapes.get(key)
        if tape is None:
            values, self._tapes[key] = self._record(inputs, recorder)
        else:
            values = self._repeat(inputs, recorder, tape)
        return self._output(values)

    def _output(self, values: _Values) -> Any:
        return fx.node.map_arg(self._nodes[-1].args[0], values.__getitem__)

    def _walk(
        self, inputs: deque[Any], run: Callable[[fx.Node, _Values], None], ended: Callable[[], None]
    ) -> _Values:
        """Go through the nodes up to the output, and return the values that are left."""
        values: _Values = {}
        for at, node in enumerate(self._nodes):
            if node.op == "placeholder":
                values[node] = inputs.popleft()
            elif node.op == "output":
                break
            elif node.op == "get_attr":
                values[node] = getattr(self._module, str(node.target))
            elif node in self._made:
                run(node, values)
            for each in self._ends.get(at, ()):
                values.pop(each, None)
                ended()
        return values

    def _record(self, inputs: deque[Any], recorder: Recorder) -> tuple[_Values, _Tape | None]:
        """Run the graph; return its values, and its tape where it can be repeated."""
        given = {
            recorder.name_of(item): node
            for node, item in zip(self._nodes, inputs, strict=False)
            if isinstance(item, torch.Tensor)
        }
        ends = [recorder.length]
        guesses = recorder.guesses

        def run(node: fx.Node, values: _Values) -> None:
            self._run(node, values, recorder)
            ends.append(recorder.length)

        with recorder.listening() as heard:
            recorder.note(_work("call", 0))
            values = self._walk(inputs, run, lambda: ends.append(recorder.length))
        if recorder.guesses != guesses:
            return values, None
        spans, left = _repeatable([recorder.entries(*span) for span in pairwise(ends)])
        outputs: dict[fx.Node, tuple[int | fx.Node, Shape]] = {}
        others: _Values = {}
        for node in self._nodes[-1].all_input_nodes:
            value = values[node]
            if not isinstance(value, torch.Tensor):
                others[node] = value
            elif node.op == "call_function":
                name = recorder.name_of(value)
                if name is None or known(value) is not None or type(value) is not FakeTensor:
                    return values, None
                outputs[node] = given.get(name, name), shape_of(value)
        tape = _Tape(spans=spans, works=Counter(heard), outputs=outputs, others=others)
        return values, tape if left == {n for n in tape.held if isinstance(n, int)} else None

    def _repeat(self, inputs: deque[Any], recorder: Recorder, tape: _Tape) -> _Values:
        """Log operations and allocations of the graph's first run again; make its outputs."""
        held = tape.held
        storages: dict[int | fx.Node, Any] = {
            node: item.untyped_storage()
            for node, item in zip(self._nodes, inputs, strict=False)
            if node in held
        }
        taken: dict[int, tuple[int, int]] = {}
        spans = iter(tape.spans)

        def play() -> None:
            for name, size in next(spans):
                if isinstance(size, tuple):
                    recorder.pass_through(size)
                elif size < 0:
                    recorder.free(taken.pop(name))
                elif name in held:
                    storages[name] = recorder.hold(size)
                else:
                    taken[name] = recorder.take(size)

        recorder.work.update(tape.works)
        values = self._walk(inputs, lambda _node, _values: play(), play)
        made = {
            node: recorder.mode.make(shape, storages[storage])
            for node, (storage, shape) in tape.outputs.items()
        }
        return values | made | tape.others

    def _run(self, node: fx.Node, values: _Values, recorder: Recorder | None) -> None:
        if kernel_buffers.is_library(node) or kernel_buffers.is_view(node):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            seen = recorder if kernel_buffers.is_library(node) else None
            with _unseen() if seen is None else seen.compiled():
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            return
        with _unseen():
            values[node] = self._write(node, values)
        if recorder is not None:
            made = [t for t in pytree.tree_leaves(values[node]) if isinstance(t, torch.Tensor)]
            recorder.follow(made)
            leaves = [values.get(leaf) for leaf in self._reads[node]]
            read = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            recorder.note(_work("copy", sum(map(tensor_bytes, [*made, *read]))))

    def _write(self, node: fx.Node, values: _Values) -> Any:
        made = node.meta["val"]
        if node in self._overwritten:
            return values[self._overwritten[node]].as_strided(made.shape, made.stride())
        return pytree.tree_map_only(torch.Tensor, like, made)


def _layout(item: Any) -> Any:
    """Everything of an input that a graph's log depends on: its shape and its known values."""
    if not isinstance(item, torch.Tensor):
        return type(item), item
    values = known(item)
    if not isinstance(values, torch.Tensor):
        return shape_of(item)
    with _disable_current_modes():
        return *shape_of(item), values.reshape(-1).view(torch.uint8).numpy().tobytes()


def _repeatable(spans: list[list[Entry]]) -> tuple[list[list[Entry]], set[int]]:
    """Keep the entries about storages of the graph; name those that are left at its end.

    A kernel's buffers are one entry. Inputs are freed by whoever holds them last, and cuBLAS takes
    its workspaces once.
    """
    own = {name for span in spans for name, size in span if isinstance(size, int) and size >= 0}
    freed = {name for span in spans for name, size in span if isinstance(size, int) and size < 0}
    kept = [
        [(name, size) for name, size in span if name in own or (name in freed and size != -1)]
        for span in spans
    ]
    return kept, own - freed


@contextmanager
def _unseen() -> Iterator[None]:
    """Run a block unrecorded; its fake tensors keep the fake mode of the current step."""
    modes = _get_current_dispatch_mode_stack()
    fakes = next((mode for mode in modes if isinstance(mode, FakeTensorMode)), None)
    with _disable_current_modes(), fakes or nullcontext():
        yield


def _work(kind: Literal["copy", "call"], nbytes: int) -> Work:
    return Work(kind=kind, nbytes=nbytes, half=True, backward=in_backward(), compiled=True)


def like(value: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor of the same layout."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
