"""Forward and backward passes of an unpadded model as CUDA graphs, under a script's own loop.

A small step waits for Python, which starts hundreds of kernels one by one; a graph starts them all
at once. The packed tokens of a batch are filled up to one of a few sizes. The first batch of a size
runs eagerly, because kernels are chosen and compiled in it; at the second one both passes are
captured. Head, loss, clipping and optimizer are the script's own, and gradients reach the weights
through autograd as they do without graphs.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainfit.core.errors import reason
from trainfit.engine.memory_errors import give_back_memory, is_out_of_memory
from trainfit.integrations.body_state import BodyState, body_state
from trainfit.kernels.unpadded_rows import UnpaddedRows

_LOG = logging.getLogger("trainfit")

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Captures what a function does on the device, and returns what does it again."""
Run = Callable[[UnpaddedRows, dict[str, Any]], Any]
"""Runs a body on a packed row."""

_PER_TOKEN = ("input_ids", "token_type_ids", "position_ids")
_UNREAD = ("num_items_in_batch",)
_OUTPUTS = {"last_hidden_state", "pooler_output"}
_MOST = 16
"""Sizes that are captured; batches of further ones run eagerly."""
_STEPS = 8
"""Sizes between a power of two and the next."""
_SLACK = 1 / _STEPS
"""Share of filler up to which the graph of a larger size is taken."""
_RENEWALS = 3
_SHARE = 0.9
"""Share of the free memory that graphs may take."""


@dataclass(eq=False, repr=False)
class BodyGraphs:
    """The captured passes of one body, by the sizes of its packed rows."""

    record: Record | None = None
    """Stands in for CUDA's graphs where there is no GPU."""
    off: bool = False
    """True while all batches are to run eagerly."""
    obstacle: str | None = None
    """Reason why nothing is captured from here on."""
    replayed: int = 0
    """Batches that were replayed; `eager` ones in training were not."""
    eager: int = 0
    captured: int = 0
    """Sizes that were captured."""
    _graphs: list[_Graph] = field(default_factory=list)
    _seen: set[Any] = field(default_factory=set)
    _said: set[str] = field(default_factory=set)
    _state: list[Any] = field(default_factory=list)
    _renewals: int = 0
    _longest: int = 0
    _targets: list[Tensor] = field(default_factory=list)
    """Gradients as the last replay wrote them, one set for all graphs."""
    _pool: Any = None
    _last: Callable[[], _Replay | None] = lambda: None

    def __reduce__(self) -> Any:
        """Copy and pickle as an empty one: a copy has weights of its own."""
        return BodyGraphs, (self.record, self.off)

    def run(self, body: Any, batch: UnpaddedRows, inputs: dict[str, Any], run: Run) -> Any:
        """Run a body on a packed row by its graph; None: it is to run eagerly."""
        here = self.record is not None or batch.starts.is_cuda
        if self.off or not here or not body.training or not torch.is_grad_enabled():
            return None
        call = _call(body, batch, inputs, run)
        output = None
        if isinstance(call, str):
            self._say(call)
        else:
            output = self._take(body, call)
        self.eager += output is None
        return output

    def _take(self, body: Any, call: _Call) -> Any:
        if self.obstacle is not None:
            return None
        state = body_state(body)
        last = self._last()
        if last is not None and not last.done:
            state = "a second forward pass comes before the backward pass"
        if isinstance(state, str):
            self._say(state)
            return None
        if not self._same(state):
            return None
        call.bound = self._longest = max(self._longest, _bound(call.batch.longest, body.config))
        graph = self._fitting(call)
        if graph is None:
            key = (call.case, call.size, call.bound)
            if len(self._graphs) >= _MOST:
                return None
            if key not in self._seen:
                self._seen.add(key)
                self.eager += 1
                return call.warm_up()
            graph = self._captured(call, state)
        return None if graph is None else self._replay(graph, call, state)

    def _say(self, why: str) -> None:
        """Log a reason for an eager pass, once."""
        if why not in self._said:
            self._said.add(why)
            _LOG.warning("graphs: a batch is not replayed as a CUDA graph: %s", why)

    def stop(self, why: str) -> None:
        """Free all graphs, and capture none from here on."""
        self.obstacle = why
        self._clear()
        self._say(why)

    def _clear(self) -> None:
        self._graphs.clear()
        self._seen.clear()
        self._targets = []
        self._pool = None

    def _same(self, state: BodyState) -> bool:
        """Forget all graphs if weights, or what else a pass reads, are not those captured."""
        if state.key == self._state:
            return True
        if self._graphs:
            self._renewals += 1
            self._clear()
        self._state = state.key
        if self._renewals > _RENEWALS:
            self.stop("its weights or settings change again and again")
        return self.obstacle is None

    def _fitting(self, call: _Call) -> _Graph | None:
        """Find the smallest graph that a batch fits into."""
        least, most = call.batch.tokens, max(call.size, call.batch.tokens * (1 + _SLACK))
        fitting = [
            graph
            for graph in self._graphs
            if graph.case == call.case
            and least <= graph.tokens <= most
            and call.batch.longest <= graph.longest
        ]
        return min(fitting, key=lambda graph: graph.tokens, default=None)

    # ── capture and replay ────────────────────────────────────────────────────────────────────

    def _captured(self, call: _Call, state: BodyState) -> _Graph | None:
        device = call.batch.starts.device
        generator = _generator(device)
        before = generator.clone_state() if device.type == "cuda" else None
        try:
            return self._capture(call, state)
        except Exception as error:  # noqa: BLE001 whatever it was, eager steps go on
            memory = is_out_of_memory(error)
            self.stop("memory ran out while capturing" if memory else reason(error))
            if before is not None:  # a capture that broke off leaves the generator in it
                generator.graphsafe_set_state(before)
        give_back_memory()
        return None

    def _capture(self, call: _Call, state: BodyState) -> _Graph | None:
        device = call.batch.starts.device
        if device.type == "cuda" and (why := _no_room(device, state.weights)):
            self.stop(why)
            return None
        if not self._targets:
            self._targets = [torch.empty_like(weight) for weight in state.weights]
        if not self._graphs and self.record is None:
            self._pool = torch.cuda.graph_pool_handle()
        record = self.record or self._record
        graph = _Graph(call, state, self._targets)
        graph.forward = record(graph.run_forward)
        if more := set(graph.names) - _OUTPUTS:
            self.stop(f"it returns {', '.join(sorted(more))}")
            return None
        if state.weights:
            graph.gradient = torch.zeros_like(graph.hidden)
            graph.backward = record(graph.run_backward)
        self._graphs.append(graph)
        self.captured += 1
        return graph

    def _record(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # A capture that fails would leave its own stream the current one. Thread-local: batches may
        # be copied to the GPU in another thread meanwhile.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            work()
        replay: Callable[[], None] = graph.replay
        return replay

    def _replay(self, graph: _Graph, call: _Call, state: BodyState) -> Any:
        replay = _Replay(graph, call, state.weights)
        if state.weights:
            self._last = weakref.ref(replay)
        replay.forward()
        hidden: Any = _Replayed.apply(replay, *state.weights)  # type: ignore[no-untyped-call]
        self.replayed += 1
        # The pooled output is computed by the caller: a packed row has but one first token.
        return graph.kind(**dict.fromkeys(graph.names, hidden))


@dataclass(eq=False, repr=False)
class _Call:
    """One call of a body on a packed row, and the row filled up to its size."""

    batch: UnpaddedRows
    run: Run
    tensors: dict[str, Tensor]
    others: dict[str, Any]
    autocast: tuple[bool, torch.dtype]
    bound: int = 0

    @property
    def size(self) -> int:
        return _size(self.batch.tokens)

    @property
    def case(self) -> tuple[Any, ...]:
        """Facts besides the sizes that a graph holds for."""
        kinds = tuple((name, value.dtype) for name, value in sorted(self.tensors.items()))
        return self.batch.rows, kinds, tuple(sorted(self.others.items())), self.autocast

    def rows(self, tokens: int, starts: Tensor) -> UnpaddedRows:
        """Rows with filler up to a number of tokens."""
        longest = min(self.bound, tokens)
        return replace(
            *(self.batch,), starts=starts, tokens=tokens, longest=longest, mask=None, places=None,
            width=longest, filler=True,
        )  # fmt: skip

    def filled(self, tokens: int) -> dict[str, Tensor]:
        """Fill the inputs up with zeros, which are a token and a position of every model."""
        extra = tokens - self.batch.tokens
        return {name: functional.pad(value, (0, extra)) for name, value in self.tensors.items()}

    def passed(self, rows: UnpaddedRows, tensors: dict[str, Tensor]) -> Any:
        """Run the body with nothing in or from the cache of casts, which outlives a capture."""
        enabled, dtype = self.autocast
        device = rows.starts.device.type
        with torch.autocast(device, dtype, enabled, cache_enabled=False):
            return self.run(rows, tensors | self.others)

    def warm_up(self) -> Any:
        """Run eagerly, filled as the graph will be."""
        output = self.passed(self.rows(self.size, self.batch.starts), self.filled(self.size))
        output["last_hidden_state"] = output.last_hidden_state[:, : self.batch.tokens]
        return output


@dataclass(eq=False, repr=False)
class _Graph:
    """Both passes at one size, with their fixed inputs and outputs."""

    call: _Call
    state: BodyState
    targets: list[Tensor]

    def __post_init__(self) -> None:
        self.case, self.tokens, self.longest = self.call.case, self.call.size, self.call.bound
        self.starts = self.call.batch.starts.clone()
        self.inputs = self.call.filled(self.tokens)
        self.rows = self.call.rows(self.tokens, self.starts)
        self.forward: Callable[[], None]
        self.backward: Callable[[], None]
        self.kind: Any = None
        self.names: tuple[str, ...] = ()
        self.hidden: Tensor
        self.gradient: Tensor
        self.used: list[bool] = []
        self._leaves: list[nn.Parameter] = []

    def run_forward(self) -> None:
        with _aliases(self.state) as self._leaves:
            output = self.call.passed(self.rows, dict(self.inputs))
        self.kind, self.names = type(output), tuple(output)
        self.hidden = output["last_hidden_state"]

    def run_backward(self) -> None:
        found = torch.autograd.grad(self.hidden, self._leaves, self.gradient, allow_unused=True)
        self.hidden = self.hidden.detach()
        self._leaves = []
        self.used = [one is not None for one in found]
        pairs = [pair for pair in zip(self.targets, found, strict=True) if pair[1] is not None]
        torch._foreach_copy_([one for one, _ in pairs], [one for _, one in pairs])


class _Replay:
    """One replay of a graph: its backward pass must come before the next replay."""

    def __init__(self, graph: _Graph, call: _Call, weights: list[nn.Parameter]) -> None:
        self.graph, self.call, self.weights = graph, call, weights
        self.inputs = call.filled(graph.tokens)
        self.done = False
        self.generator = _generator(call.batch.starts.device)
        self.random = self.generator.get_state()

    def forward(self) -> None:
        graph = self.graph
        graph.starts.copy_(self.call.batch.starts)
        for name, value in self.inputs.items():
            graph.inputs[name].copy_(value)
        graph.forward()

    def hidden(self) -> Tensor:
        """Copy the hidden states: the next replay overwrites them."""
        return self.graph.hidden[:, : self.call.batch.tokens].detach().clone()

    def gradients(self, gradient: Tensor) -> list[Tensor | None]:
        """Return the gradients of the weights, in memory of their own."""
        if self.done or torch.is_grad_enabled():
            return self._eagerly(gradient)
        self.done = True
        graph, tokens = self.graph, self.call.batch.tokens
        graph.gradient[:, :tokens].copy_(gradient)
        graph.gradient[:, tokens:].zero_()
        graph.backward()
        taken = [one for one, used in zip(graph.targets, graph.used, strict=True) if used]
        fresh = [torch.empty_like(one) for one in taken]
        torch._foreach_copy_(fresh, taken)
        made = iter(fresh)
        return [next(made) if used else None for used in graph.used]

    def _eagerly(self, gradient: Tensor) -> list[Tensor | None]:
        """Run both passes again: a graph's memory serves one backward pass, with no other order."""
        now = self.generator.get_state()
        self.generator.set_state(self.random)
        rows = self.call.rows(self.graph.tokens, self.call.batch.starts)
        with torch.enable_grad():
            hidden = self.call.passed(rows, self.inputs).last_hidden_state
            hidden = hidden[:, : self.call.batch.tokens]
        self.generator.set_state(now)
        found = torch.autograd.grad(
            hidden,
            self.weights,
            gradient,
            allow_unused=True,
            create_graph=torch.is_grad_enabled(),
        )
        return list(found)


class _Replayed(torch.autograd.Function):
    """Hidden states of a replay, whose gradients come from the graph of the backward pass."""

    @staticmethod
    def forward(ctx: Any, replay: _Replay, *_weights: nn.Parameter) -> Tensor:
        ctx.replay = replay
        return replay.hidden()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.replay.gradients(gradient)


@contextmanager
def _aliases(state: BodyState) -> Iterator[list[nn.Parameter]]:
    """Put other leaves of the same memory in the place of the weights.

    Autograd's nodes of the weights may be alive since an earlier step, with the stream that they
    were made on, which a capture must not wait for.
    """
    leaves = {id(weight): nn.Parameter(weight.detach()) for weight in state.weights}
    for table, name, weight in state.places:
        table[name] = leaves[id(weight)]
    try:
        yield list(leaves.values())
    finally:
        for table, name, weight in state.places:
            table[name] = weight


def _call(body: Any, batch: UnpaddedRows, inputs: dict[str, Any], run: Run) -> _Call | str:
    """Sort the inputs of a call; return the reason where it cannot be replayed."""
    if inputs.get("output_hidden_states") or body.config.output_hidden_states:
        return "hidden states are asked for"
    tensors, others = {}, {}
    for name, value in inputs.items():
        if name in _PER_TOKEN and isinstance(value, Tensor) and not value.is_floating_point():
            tensors[name] = value
        elif value is None or isinstance(value, bool):
            others[name] = value
        elif name not in _UNREAD:
            return f"the argument {name}"
    device = batch.starts.device.type
    autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
    return _Call(batch, run, tensors, others, autocast)


def _size(tokens: int) -> int:
    """Round a number of tokens up to one of a few sizes."""
    step = max(32, (1 << (tokens - 1).bit_length()) // 2 // _STEPS)
    return -(-tokens // step) * step


def _bound(longest: int, config: Any) -> int:
    """Round the longest sequence up, but not beyond the model's positions."""
    rounded: int = max(64, 1 << (longest - 1).bit_length())
    most = getattr(config, "max_position_embeddings", None) or rounded
    return max(longest, min(rounded, most))


def _generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def _no_room(device: torch.device, weights: list[nn.Parameter]) -> str | None:
    """Reason not to capture: eager passes, which stay possible, and graphs both need memory."""
    free, _ = torch.cuda.mem_get_info(device)
    peak, now = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    room = free + torch.cuda.memory_reserved(device) - peak
    needed = peak - now + sum(weight.numel() * weight.element_size() for weight in weights)
    if needed <= _SHARE * room:
        return None
    return f"graphs may need {needed / 2**30:.1f} GiB more, and {room / 2**30:.1f} GiB are free"
