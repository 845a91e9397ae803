"""One call of a body as a pair of CUDA graphs: its fixed inputs, both passes, and its replays.

The graphs write gradients to fixed memory (`GradientMemory`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainfit.integrations.body_state import BodyBlocks, BodyState
from trainfit.kernels.unpadded_rows import UnpaddedRows

Run = Callable[[UnpaddedRows, dict[str, Any], BodyBlocks | None], Any]
"""Runs a body on a packed row, with its blocks compiled where they are given."""

_PER_TOKEN = ("input_ids", "token_type_ids", "position_ids")
_UNREAD = ("num_items_in_batch",)
FINE, COARSE = 16, 8
"""Sizes between a power of two and the next: of batches that come often, and of the first ones."""
SLACK, WIDE = 1 / FINE, 1 / 4
"""Share of filler up to which a larger graph serves for good, and until a size has come often."""


@dataclass(eq=False, repr=False)
class BodyCall:
    """One call of a body on a packed row, and the row filled up to its size."""

    batch: UnpaddedRows
    run: Run
    tensors: dict[str, Tensor]
    others: dict[str, Any]
    autocast: tuple[bool, torch.dtype]
    blocks: BodyBlocks | None = None
    """Blocks to run compiled; None: as they are."""
    bound: int = 0
    size: int = 0
    """Tokens with filler."""
    most: int = 0
    """Tokens of the largest pass so far."""

    @property
    def case(self) -> tuple[Any, ...]:
        """Facts besides the sizes that a graph holds for."""
        kinds = tuple((name, value.dtype) for name, value in sorted(self.tensors.items()))
        others = tuple(sorted(self.others.items()))
        return self.batch.rows, kinds, others, self.autocast, self.blocks is not None

    def code(self, body: Any, state: BodyState) -> str:
        """Facts that decide the compiled code of a body."""
        device = self.batch.starts.device
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        weights = [(name, tuple(one.shape), one.dtype) for _, name, one in state.places]
        return repr((body.config.to_json_string(), self.case[1:-1], weights, gpu))

    def rows(self, tokens: int, starts: Tensor) -> UnpaddedRows:
        """Rows with filler up to a number of tokens."""
        longest = min(self.bound, tokens)
        return replace(
            self.batch,
            mask=None,
            places=None,
            starts=starts,
            tokens=tokens,
            longest=longest,
            width=longest,
            filler=True,
        )

    def filled(self, tokens: int) -> dict[str, Tensor]:
        """Fill the inputs up with zeros, which are a token and a position of every model."""
        extra = tokens - self.batch.tokens
        return {name: functional.pad(value, (0, extra)) for name, value in self.tensors.items()}

    def passed(self, rows: UnpaddedRows, tensors: dict[str, Tensor]) -> Any:
        """Run the body with a cache of casts of its own: each weight is cast once in a pass.

        The script's may outlive a capture, and may hold casts from before the last update.
        """
        enabled, dtype = self.autocast
        device = rows.starts.device.type
        torch.clear_autocast_cache()
        try:
            with torch.autocast(device, dtype, enabled):
                return self.run(rows, tensors | self.others, self.blocks)
        finally:
            torch.clear_autocast_cache()

    def rehearse(self, state: BodyState) -> None:
        """Run both passes with compiled blocks, as they will be captured, for nothing but that.

        The script's own passes never meet compiled code, which allows no second backward pass.
        """
        generator = generator_of(self.batch.starts.device)
        before = generator.get_state()
        with _aliases(state) as leaves:
            rows = self.rows(self.size, self.batch.starts)
            hidden = self.passed(rows, self.filled(self.size)).last_hidden_state
            if leaves:
                nothing = torch.zeros_like(hidden)
                torch.autograd.grad(hidden, leaves, nothing, allow_unused=True)
        generator.set_state(before)

    def warm_up(self) -> Any:
        """Run eagerly, filled as the graph will be."""
        output = self.passed(self.rows(self.size, self.batch.starts), self.filled(self.size))
        output["last_hidden_state"] = output.last_hidden_state[:, : self.batch.tokens]
        return output


@dataclass(eq=False, repr=False)
class BodyGraph:
    """Both passes at one size, with their fixed inputs and outputs."""

    call: BodyCall
    state: BodyState
    targets: GradientMemory

    def __post_init__(self) -> None:
        self.case, self.tokens, self.longest = self.call.case, self.call.size, self.call.bound
        self.starts = self.call.batch.starts.clone()
        self.inputs = {name: one.clone() for name, one in self.call.filled(self.tokens).items()}
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
        pairs = [
            pair for pair in zip(self.targets.parts, found, strict=True) if pair[1] is not None
        ]
        torch._foreach_copy_([one for one, _ in pairs], [one for _, one in pairs])


class BodyReplay:
    """One replay of a graph: its backward pass must come before the next replay."""

    def __init__(
        self, graph: BodyGraph, call: BodyCall, weights: list[nn.Parameter], body: Any
    ) -> None:
        self.graph, self.call, self.weights = graph, call, weights
        self.body = body  # a call does not hold it, and the script may drop it
        call.bound = graph.longest  # should it run again, eagerly
        self.inputs = call.filled(graph.tokens)
        self.done = False
        self.generator = generator_of(call.batch.starts.device)
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
        """Return the gradients of the weights."""
        if self.done or torch.is_grad_enabled():
            return self._eagerly(gradient)
        self.done = True
        graph, tokens = self.graph, self.call.batch.tokens
        graph.gradient[:, :tokens].copy_(gradient)
        graph.gradient[:, tokens:].zero_()
        return graph.targets.run(graph.backward, graph.used, self.weights)

    def _eagerly(self, gradient: Tensor) -> list[Tensor | None]:
        """Run both passes again: a graph's memory serves one backward pass, with no other order."""
        if self.call.blocks is not None and torch.is_grad_enabled():
            self.call.blocks.stop("gradients of gradients are taken, which compiled code has not")
            self.call.blocks = None
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


class Replayed(torch.autograd.Function):
    """Hidden states of a replay, whose gradients come from the graph of the backward pass."""

    @staticmethod
    def forward(ctx: Any, replay: BodyReplay, *_weights: nn.Parameter) -> Tensor:
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


def sort_call(body: Any, batch: UnpaddedRows, inputs: dict[str, Any], run: Run) -> BodyCall | str:
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
    return BodyCall(batch, run, tensors, others, autocast)


def size_of(tokens: int, sizes: int) -> int:
    """Round a number of tokens up to one of so many sizes between powers of two."""
    step = max(32, (1 << (tokens - 1).bit_length()) // 2 // sizes)
    return -(-tokens // step) * step


def bound_of(longest: int, config: Any) -> int:
    """Round the longest sequence up, but not beyond the model's positions."""
    rounded: int = max(64, 1 << (longest - 1).bit_length())
    most = getattr(config, "max_position_embeddings", None) or rounded
    return max(longest, min(rounded, most))


def generator_of(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def random_state(device: torch.device) -> bytes:
    """State of the random generator."""
    state: bytes = generator_of(device).get_state().numpy().tobytes()
    return state


_ALIGNED = 64
"""Numbers to a multiple of which each gradient begins: kernels read several at once."""


class GradientMemory:
    """Memory for the gradients of some weights, one set for all graphs; the weights may have it.

    Copying them out would read and write every gradient once more in each step. So the memory
    itself is lent: it comes back when the script sets its gradients to None. Where gradients are
    accumulated, zeroed in place or kept, they are copied from then on.
    """

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self._flat = _flat(weights)
        self.parts = _parts(self._flat, weights)
        """One tensor for each weight."""
        self._storage = self._flat.untyped_storage() if self._flat is not None else None
        self._lends = self._flat is not None
        self._own = self._holders()

    def run(
        self, replay: Callable[[], None], used: Sequence[bool], weights: Sequence[nn.Parameter]
    ) -> list[Tensor | None]:
        """Replay a backward pass, and return the gradients that it wrote."""
        before = None
        if self._flat is not None and self._held():
            self._lends = False
            self._move_out(weights)
            before = self._flat.clone() if self._held() else None
        replay()
        taken = [part for part, is_used in zip(self.parts, used, strict=True) if is_used]
        if self._lends:
            given = [part.detach() for part in taken]
        else:
            given = [torch.empty_like(part) for part in taken]
            torch._foreach_copy_(given, taken)
        if before is not None and self._flat is not None:
            self._flat.copy_(before)
        found = iter(given)
        return [next(found) if is_used else None for is_used in used]

    def _holders(self) -> int:
        if self._storage is None:
            return 0
        count: int = torch._C._storage_Use_Count(self._storage._cdata)
        return count

    def _held(self) -> bool:
        """Tell if somebody else has a gradient in this memory."""
        return self._holders() > self._own

    def _move_out(self, weights: Sequence[nn.Parameter]) -> None:
        """Give gradients of the weights that are still here memory of their own."""
        here = {part.data_ptr() for part in self.parts}
        for weight in weights:
            gradient = weight.grad
            if gradient is not None and gradient.data_ptr() in here:
                gradient.data = gradient.clone()


def _flat(weights: Sequence[nn.Parameter]) -> Tensor | None:
    """Make memory for all weights in one piece; None where they are of several kinds."""
    kinds = {(weight.dtype, weight.device) for weight in weights}
    if len(kinds) != 1 or not all(weight.is_contiguous() for weight in weights):
        return None
    return weights[0].detach().new_empty(sum(map(_room, weights)))


def _parts(flat: Tensor | None, weights: Sequence[nn.Parameter]) -> list[Tensor]:
    if flat is None:
        return [torch.empty_like(weight, requires_grad=False) for weight in weights]
    rooms = torch.split(flat, [_room(weight) for weight in weights])
    return [
        room[: weight.numel()].view(weight.shape)
        for room, weight in zip(rooms, weights, strict=True)
    ]


def _room(weight: nn.Parameter) -> int:
    return -(-weight.numel() // _ALIGNED) * _ALIGNED


# ── memory beside the passes of the script ───────────────────────────────────────────────────────

_SHARE = 0.9
"""Share of the free memory that graphs, or a larger pass beside them, may take."""


def no_room(device: torch.device, weights: Sequence[Tensor], share: float) -> str | None:
    """Reason not to capture: the script's own passes and graphs both need memory.

    `share` is the size of the graph's pass by that of the script's largest one, whose padding was
    not dropped.
    """
    free, _ = torch.cuda.mem_get_info(device)
    peak, now = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    room = free + torch.cuda.memory_reserved(device) - peak
    needed = (peak - now) * share
    needed += sum(weight.numel() * weight.element_size() for weight in weights)
    if needed <= _SHARE * room:
        return None
    return f"graphs may need {needed / 2**30:.1f} GiB more, and {room / 2**30:.1f} GiB are free"


def crowded(device: torch.device, taken: int, growth: float) -> bool:
    """Tell if a pass so many times as large as all before may not fit beside `taken` bytes."""
    free, _ = torch.cuda.mem_get_info(device)
    peak, now = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    room = free + torch.cuda.memory_reserved(device) - now - taken
    return (peak - now) * growth > _SHARE * room
