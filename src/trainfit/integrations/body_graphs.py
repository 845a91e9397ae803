"""Forward and backward passes of an unpadded model as CUDA graphs, under a script's own loop.

A small step waits for Python, which starts hundreds of kernels one by one; a graph starts them all
at once. The packed tokens of a batch are filled up to one of a few sizes. The first batch of a size
runs eagerly, because kernels are chosen and compiled in it; at the second one both passes are
captured. A graph serves smaller batches too, until their size has come often. Head, loss, clipping
and optimizer are the script's own, and gradients reach the weights through autograd as they do
without graphs.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from trainfit.core import caches
from trainfit.core.errors import TrainfitWarning, reason
from trainfit.engine.captured import capturing
from trainfit.engine.memory_errors import give_back_cache, give_back_memory, is_out_of_memory
from trainfit.integrations.body_state import BodyBlocks, BodyState, body_state
from trainfit.integrations.captured_passes import (
    COARSE,
    FINE,
    SLACK,
    WIDE,
    BodyCall,
    BodyGraph,
    BodyReplay,
    GradientMemory,
    Replayed,
    Run,
    bound_of,
    crowded,
    generator_of,
    no_room,
    random_state,
    size_of,
    sort_call,
)
from trainfit.kernels.unpadded_rows import UnpaddedRows

_LOG = logging.getLogger("trainfit")

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Captures what a function does on the device, and returns what does it again."""
_OUTPUTS = {"last_hidden_state", "pooler_output"}
_OFTEN = 32
"""Batches of a size, in larger graphs, after which the filler costs more than another capture."""
_MOST = 24
"""Sizes that are captured; batches of further ones run eagerly."""
_LANES = 4
"""Forward passes that may come before their backward passes, as of sentences that are compared."""
_RENEWALS = 3
_SOON = 20
"""Replays within which changes of the weights may come that often one after the other."""
_NOTED = 4096
"""States of the random generator that are noted at the most."""


@dataclass(slots=True)
class Tally:
    """Counts of a model's batches, which outlive the model."""

    packed: int = 0
    """Batches that went without padding; `own_way` ones went the model's own way."""
    own_way: int = 0
    real: int = 0
    """Tokens of the packed batches; `padded` with their padding."""
    padded: int = 0
    replayed: int = 0
    """Batches that were replayed as CUDA graphs."""
    aside: int = 0
    """Batches of evaluations: those that had no gradient."""
    reasons: set[str] = field(default_factory=set)
    """Reasons for passes that were not replayed."""
    said: set[str] = field(default_factory=set)
    """Reasons for batches that kept their padding."""
    seconds: float = 0.0
    """Time that captures and compiling took."""


@dataclass(eq=False, repr=False)
class _Lane:
    """Graphs that share memory, of which one at a time is between its two passes."""

    graphs: list[BodyGraph] = field(default_factory=list)
    pool: Any = None
    last: Callable[[], BodyReplay | None] = lambda: None

    @property
    def free(self) -> bool:
        last = self.last()
        return last is None or last.done


@dataclass(eq=False, repr=False)
class BodyGraphs:
    """The captured passes of one body, by the sizes of its packed rows."""

    record: Record | None = None
    """Stands in for CUDA's graphs where there is no GPU."""
    off: bool = False
    """True while all batches are to run eagerly."""
    blocks: BodyBlocks | None = None
    """Compiled blocks of the passes; None: they are captured as they are."""
    obstacle: str | None = None
    """Reason why nothing is captured from here on."""
    replayed: int = 0
    """Batches that were replayed; `eager` ones in training were not."""
    eager: int = 0
    captured: int = 0
    """Sizes that were captured."""
    tally: Tally = field(default_factory=Tally)
    _lanes: list[_Lane] = field(default_factory=list)
    _seen: set[Any] = field(default_factory=set)
    _met: Counter[Any] = field(default_factory=Counter)
    """Batches of a size that went by a larger graph."""
    _state: BodyState | None = None
    _renewals: int = 0
    _replayed_before: int = 0
    """Batches that were replayed before the last change of the weights."""
    _longest: int = 0
    _full: bool = False
    """True if there is no memory for further graphs."""
    _drawn: set[bytes] = field(default_factory=set)
    """States of the random generator before passes that had no gradients."""
    _taken: int = 0
    """Bytes that the graphs hold."""
    _targets: GradientMemory | None = None
    """Gradients as the last replay wrote them, one set for all graphs."""

    def __reduce__(self) -> Any:
        """Copy and pickle as an empty one: a copy has weights of its own."""
        return BodyGraphs, (self.record, False, copy(self.blocks))

    def run(
        self,
        body: Any,
        batch: UnpaddedRows,
        inputs: dict[str, Any],
        run: Run,
        *,
        settled: bool = True,
        most: int = 0,
    ) -> Any:
        """Run a body on a packed row by its graph; None: it is to run eagerly.

        Its blocks are compiled only once it is `settled` how they attend. `most` is the number of
        tokens of the largest pass so far, with padding where it was not dropped.
        """
        here = self.record is not None or batch.starts.is_cuda
        if self.off or not here or not body.training:
            return None
        if not torch.is_grad_enabled():
            return self._without_gradients(batch, inputs, run)
        if self._drawn and random_state(batch.starts.device) in self._drawn:
            self._say("the random numbers of an earlier pass are drawn again")
            self.eager += 1
            return None
        call = sort_call(body, batch, inputs, run)
        output = None
        if isinstance(call, str):
            self._say(call)
        else:
            call.most = most
            call.blocks = self.blocks if settled and self.blocks and self.blocks.on else None
            output = self._take(body, call)
        self.eager += output is None
        return output

    def _without_gradients(self, batch: UnpaddedRows, inputs: dict[str, Any], run: Run) -> Any:
        """Run eagerly; note the random numbers, which a later pass may be to draw again.

        Gradient caching does so: filled or compiled, that pass would drop others.
        """
        before = random_state(batch.starts.device)
        output = run(batch, inputs, None)
        if random_state(batch.starts.device) != before:
            if len(self._drawn) == _NOTED:
                self._drawn.clear()
            self._drawn.add(before)
        return output

    def _take(self, body: Any, call: BodyCall) -> Any:
        if self.obstacle is not None:
            return None
        state = body_state(body, self._state)
        if isinstance(state, str):
            self._say(state)
            return None
        if not self._same(state):
            return None
        lane = self._free_lane()
        if lane is None:
            self._say(f"more than {_LANES} forward passes come before the backward pass")
            return None
        call.bound = self._longest = max(self._longest, bound_of(call.batch.longest, body.config))
        graph = _fitting(lane, call, SLACK) or self._wide(lane, call)
        if graph is None:
            if self._no_more(lane, call):
                return None
            if self.blocks is not None:
                self.blocks.code = self.blocks.code or call.code(body, state)
            key = (call.case, call.size, call.bound)
            if key not in self._seen:
                self._seen.add(key)
                self.eager += 1
                if call.blocks is not None:
                    self._rehearse(call, call.blocks, state)
                return replace(call, blocks=None).warm_up()
            graph = self._captured(lane, call, state)
        return None if graph is None else self._replay(lane, graph, call, state, body)

    def _wide(self, lane: _Lane, call: BodyCall) -> BodyGraph | None:
        """Find a larger graph for a size that has not come often, or choose the size to capture."""
        wide = _fitting(lane, call, WIDE)
        call.size = size_of(call.batch.tokens, COARSE if wide is None else FINE)
        if wide is None:
            return None
        key = (call.case, call.size)
        self._met[key] += 1
        return wide if self._met[key] <= _OFTEN or self._no_more(lane, call) else None

    def _no_more(self, lane: _Lane, call: BodyCall) -> bool:
        alike = [one for one in lane.graphs if one.call.blocks is call.blocks]
        return self._full or len(alike) >= _MOST

    def _free_lane(self) -> _Lane | None:
        for lane in self._lanes:
            if lane.free:
                return lane
        if len(self._lanes) == _LANES:
            return None
        self._lanes.append(_Lane())
        return self._lanes[-1]

    def _say(self, why: str) -> None:
        """Log a reason for an eager pass, once."""
        if why not in self.tally.reasons:
            self.tally.reasons.add(why)
            _LOG.warning("graphs: a batch is not replayed as a CUDA graph: %s", why)

    def stop(self, why: str) -> None:
        """Free all graphs, and capture none from here on."""
        self.obstacle = why
        self.free()
        self._say(why)

    def make_room(self, device: torch.device, growth: float) -> None:
        """Stop where a pass of the script that is larger than all before may need the memory."""
        if self._taken and crowded(device, self._taken, growth):
            self.stop("a batch that is larger than all before may need the memory of graphs")

    def free(self) -> None:
        """Free the memory of all graphs; batches that come again are captured again."""
        self._lanes.clear()
        self._seen.clear()
        self._met.clear()
        self._targets = None
        self._full, self._taken = False, 0

    def keep(self, *, compiled: bool) -> None:
        """Free the graphs of the other kind, which are not replayed from here on."""
        for lane in self._lanes:
            kept = [graph for graph in lane.graphs if (graph.call.blocks is not None) is compiled]
            lane.graphs = kept or lane.graphs  # torch takes none into a pool whose last was freed

    def _same(self, state: BodyState) -> bool:
        """True if the weights and switches of a pass are those captured; else drop all graphs."""
        known, self._state = self._state, state
        if known is not None and state.key == known.key:
            return True
        if any(lane.graphs for lane in self._lanes):
            soon = self.replayed - self._replayed_before < _SOON
            self._renewals = self._renewals + 1 if soon else 0
            self.free()
        self._replayed_before = self.replayed
        if self._renewals > _RENEWALS:
            self.stop("its weights or settings change again and again")
        return self.obstacle is None

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.tally.seconds += time.perf_counter() - began

    def _rehearse(self, call: BodyCall, blocks: BodyBlocks, state: BodyState) -> None:
        """Compile and try what will be captured; a failure leaves graphs of plain blocks."""
        try:
            with self._timed():
                call.rehearse(state)
            if blocks.on and (place := blocks.place) is not None:
                with suppress(TrainfitWarning):
                    caches.write(place, True)
        except Exception as error:  # noqa: BLE001 whatever it was, steps without it go on
            blocks.stop(_why(error))
            give_back_memory()

    # ── capture and replay ────────────────────────────────────────────────────────────────────

    def _captured(self, lane: _Lane, call: BodyCall, state: BodyState) -> BodyGraph | None:
        device = call.batch.starts.device
        generator = generator_of(device)
        before = generator.clone_state() if device.type == "cuda" else None
        try:
            with self._timed():
                return self._capture(lane, call, state)
        except Exception as error:  # noqa: BLE001 whatever it was, eager steps go on
            (self if call.blocks is None else call.blocks).stop(_why(error))
            if before is not None:  # a capture that broke off leaves the generator in it
                generator.graphsafe_set_state(before)
        give_back_memory()
        return None

    def _capture(self, lane: _Lane, call: BodyCall, state: BodyState) -> BodyGraph | None:
        device = call.batch.starts.device
        on_gpu, share = device.type == "cuda", call.size / max(call.size, call.most)
        if on_gpu and (why := no_room(device, state.weights, share)):
            if any(one.graphs for one in self._lanes):
                self._full = True
                self._say(why)
            else:
                self.stop(why)
            return None
        if self._targets is None:
            self._targets = GradientMemory(state.weights)
        if not lane.graphs and self.record is None:
            lane.pool = torch.cuda.graph_pool_handle()
        if on_gpu:  # a capture does so too; what is reserved then is the graph's
            give_back_cache()
        before = torch.cuda.memory_reserved(device) if on_gpu else 0
        record = self.record or partial(_record, lane.pool, device)
        graph = BodyGraph(call, state, self._targets)
        graph.forward = record(graph.run_forward)
        if more := set(graph.names) - _OUTPUTS:
            self.stop(f"it returns {', '.join(sorted(more))}")
            return None
        if state.weights:
            graph.gradient = torch.zeros_like(graph.hidden)
            graph.backward = record(graph.run_backward)
        self._taken += torch.cuda.memory_reserved(device) - before if on_gpu else 0
        lane.graphs.append(graph)
        self.captured += 1
        return graph

    def _replay(
        self, lane: _Lane, graph: BodyGraph, call: BodyCall, state: BodyState, body: Any
    ) -> Any:
        replay = BodyReplay(graph, call, state.weights, body)
        if state.weights:
            lane.last = weakref.ref(replay)
        replay.forward()
        hidden: Any = Replayed.apply(replay, *state.weights)  # type: ignore[no-untyped-call]
        self.replayed += 1
        self.tally.replayed += 1
        # The pooled output is computed by the caller: a packed row has but one first token.
        return graph.kind(**dict.fromkeys(graph.names, hidden))


def _fitting(lane: _Lane, call: BodyCall, slack: float) -> BodyGraph | None:
    """Find the smallest graph that a batch fits into, with a share of filler at the most."""
    least = call.batch.tokens
    most = max(size_of(least, FINE), least * (1 + slack))
    fitting = [
        graph
        for graph in lane.graphs
        if graph.case == call.case
        and least <= graph.tokens <= most
        and call.batch.longest <= graph.longest
    ]
    return min(fitting, key=lambda graph: graph.tokens, default=None)


def _why(error: Exception) -> str:
    return "memory ran out while capturing" if is_out_of_memory(error) else reason(error)


def _record(pool: Any, device: torch.device, work: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, pool, device):
        work()
    replay: Callable[[], None] = graph.replay
    return replay
