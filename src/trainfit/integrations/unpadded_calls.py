"""Calls of a transformers model: which ones can go without padding, and their packed inputs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.modules import module as every
from torch.utils.hooks import RemovableHandle

from trainfit.integrations.body_graphs import BodyGraphs, Tally
from trainfit.integrations.body_state import HOOKS
from trainfit.integrations.host_batches import host_copies
from trainfit.jobs.models.backbone import Traits
from trainfit.kernels.attention import computed_in
from trainfit.kernels.fused_ops import IGNORED
from trainfit.kernels.unpadded_rows import (
    AttentionCase,
    UnpaddedRows,
    own_attention,
    takes_packed,
)

_LOG = logging.getLogger("trainfit")

HeadReads = Literal["outside", "columns", "first", "last", "unknown", "padding"]
"""Columns that a head reads: those that code outside of the model reads, the column of each result,
the first of a row, the last that is no padding id. Unknown ones are watched in a backward pass, and
found to be padding too, or not."""

PER_COLUMN = ("ForTokenClassification", "ForMaskedLM", "ForCausalLM", "LMHeadModel")
"""Ends of the names of classes whose head has a result per column."""
SETTLED = ("columns", "first", "last")
"""Columns that a head of transformers' own is known to read."""
_PER_TOKEN = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids", "labels")
_PASSED_ON = ("output_hidden_states", "num_items_in_batch")
_READ = ("attention_mask", "return_dict", "output_attentions", "use_cache", "past_key_values")
_KNOWN = {"torch", "transformers", "peft", "accelerate", "trainfit", "bitsandbytes", "torchao"}
"""Packages whose layers and hooks take a packed row."""
_LOOKS, _AGAIN = 16, 50
"""Batches without padding that are watched at first, and after how many others one is again."""
_WATCHED = 8
"""Batches in which heads of a script are watched: it may train several of them in turn."""
_NOISE = "transformers.integrations.neftune"
"""Module of the one hook among them that reads how wide rows are."""


@dataclass(kw_only=True, slots=True, eq=False, weakref_slot=True)
class Unpadding:
    """Facts of a model whose padding is dropped, and the reasons that were said."""

    traits: Traits
    family: str = ""
    """transformers' type of the model."""
    own: str | None
    """Attention implementation of transformers that was set; None for an attention of its own."""
    reads: HeadReads
    shifted: bool
    """True if the loss compares each token with the label of the next column."""
    caches: bool
    """True if a caller may go on from the keys and values that a call returns."""
    watched: set[str] = field(default_factory=set)
    """Sides of padding that nobody was seen to read."""
    strange: bool = False
    """True for a model of a script that is not known, which may read padding before it trains."""
    wait: int = 1
    """Batches that are watched with padding before one goes without."""
    looks: int = 0
    """Batches without padding that have come since: some are watched for heads that came later."""
    trusted: frozenset[str] | None = frozenset()
    """`watched` as it was before a backward pass: a checkpoint goes its first way again there.
    None: padding is read."""
    twice: bool = False
    """True once gradients of gradients were asked for, which kernels of attention do not have."""
    off: bool = False
    """True while all batches are to go the model's own way."""
    graphs: BodyGraphs | None = None
    """Captured passes; None: every pass is eager."""
    cases: set[AttentionCase] = field(default_factory=set)
    """Cases of attention that its layers came with."""
    insisted: bool = False
    """True if it is to go without padding also where that is known to be slower."""
    tally: Tally = field(default_factory=Tally)
    most: int = 0
    """Most tokens, with padding where it was not dropped, of a pass that has gradients."""
    looked: tuple[int, bool] | None = None
    """Hooks that there were in the process when nothing foreign was found in the model."""

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """Copy and pickle as one that is on: turns switch the script's own model alone."""
        return None, {one.name: getattr(self, one.name) for one in fields(self)} | {"off": False}

    def count(self, batch: UnpaddedRows | None) -> None:
        """Count a batch that goes without padding, or None for one that does not."""
        self.tally.aside += not torch.is_grad_enabled()
        if batch is None:
            self.tally.own_way += 1
        else:
            self.tally.packed += 1
            self.tally.real += batch.tokens
            self.tally.padded += batch.rows * batch.width

    def compute(self, body: Any, tokens: int) -> None:
        """Note the tokens of a pass that begins, by which the memory of others is estimated."""
        if tokens <= self.most or not torch.is_grad_enabled():
            return
        if self.graphs is not None and self.most:
            self.graphs.make_room(body.device, tokens / self.most)
        self.most = tokens

    def watch_anew(self) -> None:
        """Watch again who reads padded columns: another training may have another head."""
        self.watched.clear()
        self.wait, self.looks = _WATCHED if self.strange else 1, 0

    def looks_now(self) -> bool:
        """Count a batch that goes without padding, and tell if it is watched."""
        self.looks += 1
        return self.looks <= _LOOKS or self.looks % _AGAIN == 0

    def trusts(self, sides: frozenset[str], *, unsure: bool, training: bool) -> bool:
        """Tell if nobody reads the padding on these sides; if `unsure`, as far as was watched."""
        if torch._C._current_graph_task_id() == -1:  # outside of a backward pass
            self.trusted = None if self.reads == "padding" else frozenset(self.watched)
        if self.trusted is None or (self.wait > 0 and self.differentiable):
            return self.trusted is None and not sides
        if unsure and sides and self.strange and not (training or torch.is_grad_enabled()):
            self.say("an evaluation, which may read padded columns")
            return False
        return not unsure or self.looked_at(sides, training=training) <= self.trusted

    def looked_at(self, sides: frozenset[str], *, training: bool) -> frozenset[str]:
        """Name sides of padding for `watched`: in evaluation mode a script may read others."""
        mode = "" if training or not self.strange else " in evaluation"
        return frozenset(one + mode for one in sides)

    @property
    def differentiable(self) -> bool:
        """True if a script may differentiate its attention twice, which SDPA cannot."""
        return self.strange and self.own == "eager"

    def say(self, reason: str) -> None:
        """Log a reason for the model's own way, once."""
        if reason not in self.tally.said:
            self.tally.said.add(reason)
            _LOG.warning("unpadded: a batch goes the model's own way, with padding: %s", reason)


def foreign_part(runner: nn.Module) -> str | None:
    """Name a layer or a hook of the script's own inside of a model that packed rows go through.

    Such a one expects rows and columns, and would be given one packed row. So does a loss that was
    set in the place of transformers' own.
    """
    loss = runner.__dict__.get("_loss_function")
    if loss is not None and not _known(loss):
        return "a loss of the script, set as loss_function, would see packed rows"
    if not all(
        _known(hook) for kind in HOOKS for hook in getattr(every, f"_global{kind}").values()
    ):
        return "a hook on all modules would see packed rows"
    for module in runner.modules():
        name = type(module).__name__
        own = module.__dict__.get("forward", type(module).forward)
        if module is not runner and not _known(own):
            return f"{name}, a layer of the script, would see packed rows"
        if not all(_known(hook) for kind in HOOKS for hook in getattr(module, kind).values()):
            return f"a hook on {name} would see packed rows"
    return None


def own_forward(module: nn.Module) -> bool:
    """Tell if a script, or a library for it, has put a forward in the place of a model's own."""
    return "forward" in module.__dict__ or not _known(type(module).forward)


def _known(function: Any) -> bool:
    place: str = getattr(function, "__module__", None) or ""
    return place.partition(".")[0] in _KNOWN and place != _NOISE


def late_obstacle(unpadding: Unpadding, runner: Any, body: Any) -> str | None:
    """Reason that a script has brought into its model since it goes without padding."""
    if unpadding.own and not takes_packed(body.config._attn_implementation):
        return f"its attention implementation was set to {body.config._attn_implementation}"
    attentions = [functional.scaled_dot_product_attention]
    attentions += [own_attention(unpadding.own, body)] if unpadding.own else []
    if not all(_known(one) for one in attentions):
        return "its attention was replaced by one of the script"
    now = RemovableHandle.next_id, runner is body  # the number of all hooks so far
    if unpadding.looked != now:
        if (found := foreign_part(runner)) is not None:
            return found
        unpadding.looked = now
    return None


def call_obstacle(unpadding: Unpadding, body: Any, given: Mapping[str, Any]) -> str | None:
    """Reason why a call cannot go without padding, by its arguments alone; None: it can."""
    if unpadding.twice:
        return "gradients of gradients are asked for"
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "a transform of torch.func, or a forward derivative"
    if _on_gpu(body) and torch.cuda.is_current_stream_capturing():  # which allows no wait
        return "the script captures a graph of its own"
    if not unpadding.insisted and _slower(body):
        return "a DeBERTa in float32 has no kernel on a GPU, and is slower without padding"
    if given.get("output_attentions") or getattr(body.config, "output_attentions", False):
        return "output_attentions is asked for"
    cached = given.get("use_cache")
    if cached is None and unpadding.caches:
        # In training nobody goes on from the cache that transformers makes by default.
        cached = getattr(body.config, "use_cache", False) and not body.training
    if cached or given.get("past_key_values") is not None:
        return "a cache is asked for"
    known = {*_PER_TOKEN, *_PASSED_ON, *_READ}
    for name, value in given.items():
        zero = name == "logits_to_keep" and isinstance(value, int) and value == 0
        if name not in known and value is not None and not zero:
            return f"the argument {name}"
    return _shape_obstacle(unpadding, given)


def _slower(body: Any) -> bool:
    """Tell if packed rows are slower than padded ones: 1.6 times on an H200 without a kernel."""
    kind: str = body.config.model_type
    if not kind.startswith("deberta") or not _on_gpu(body):
        return False
    return computed_in(body.device.type, body.dtype) == torch.float32


def _on_gpu(body: Any) -> bool:
    return bool(body.device.type == "cuda")


def _shape_obstacle(unpadding: Unpadding, given: Mapping[str, Any]) -> str | None:
    ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
    if (ids is None) == (embeds is None):
        return "input_ids and inputs_embeds are both given, or neither"
    tokens: Any = embeds if ids is None else ids
    if type(tokens) not in (Tensor, torch.nn.Parameter) or tokens.is_meta:
        return "the inputs are no plain tensors"
    if tokens.dim() != (2 if embeds is None else 3) or not tokens.numel():
        return f"inputs of shape {tuple(tokens.shape)}"
    shape = tokens.shape[:2]
    mask = given.get("attention_mask")
    if mask is None and given.get("position_ids") is not None and unpadding.traits.causal:
        return "position_ids without a mask, which transformers takes for packed rows"
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        return "a mask that has not two dimensions"
    if mask is not None and mask.shape != shape:
        return f"a mask of shape {tuple(mask.shape)}"
    for name in ("token_type_ids", "position_ids", "labels"):
        value = given.get(name)
        if value is not None and (value.dim() != 2 or value.shape[1] != shape[1]):
            return f"{name} of shape {tuple(value.shape)}"
    return None


def find_rows(unpadding: Unpadding, body: Any, given: Mapping[str, Any]) -> UnpaddedRows | str:
    """Find the real tokens of a batch; return the reason where it cannot go without padding.

    The batch may be on a GPU, which is waited for once, unless the host has a copy.
    """
    tokens: Tensor = given["inputs_embeds" if given.get("input_ids") is None else "input_ids"]
    rows, width = tokens.shape[:2]
    if given.get("attention_mask") is None:
        starts = torch.arange(0, rows * width + 1, width, dtype=torch.int32, device=tokens.device)
        return UnpaddedRows(
            rows=rows,
            width=width,
            starts=starts,
            tokens=rows * width,
            longest=width,
        )
    seen = host_copies(given, _SEEN) or given
    mask = seen["attention_mask"].to(tokens.device if seen is given else "cpu")
    real = mask != 0
    lengths, first = real.sum(-1), real.int().argmax(-1)
    facts = torch.stack(
        [lengths, first, *(one.long() for one in _faults(unpadding, body, seen, mask, real))]
    ).tolist()
    for reason, found in zip(_FAULTS, facts[2:], strict=True):
        if any(found):
            return reason
    if seen is not given:
        real = given["attention_mask"].to(tokens.device) != 0
        lengths, first = real.sum(-1), real.int().argmax(-1)
    return _rows_of(real, lengths, first, facts[0], facts[1])


_SEEN = ("attention_mask", "input_ids", "labels")
_FAULTS = (
    "a mask of other values than 0 and 1",
    "a row of nothing but padding",
    "a mask with holes",
    "labels other than -100 on padding",
    "a label for the token after the padding on the left",
    "its head reads a column that is padding",
)


def _faults(
    unpadding: Unpadding, body: Any, given: Mapping[str, Any], mask: Tensor, real: Tensor
) -> tuple[Tensor, ...]:
    """For each of `_FAULTS`: True for the rows that have it, without waiting for the device."""
    lengths, first = real.sum(-1), real.int().argmax(-1)
    span = real.shape[1] - real.flip(-1).int().argmax(-1) - first
    none = torch.zeros_like(lengths, dtype=torch.bool)
    stray, late = none, none
    labels = given.get("labels")
    if labels is not None:
        stray = ((labels != IGNORED) & ~real).any(-1)
        if unpadding.shifted:
            late = (labels.gather(1, first[:, None])[:, 0] != IGNORED) & (first > 0)
    column = _read(unpadding, body, given, real)
    blind = none if column is None else ~real.gather(1, column)[:, 0]
    odd = (real & (mask != 1)).any(-1)
    return odd, lengths == 0, span != lengths, stray, late, blind


def _read(unpadding: Unpadding, body: Any, given: Mapping[str, Any], real: Tensor) -> Tensor | None:
    """Column that the head or the pooler reads in each row, as transformers finds it."""
    pooled = getattr(body, "pooler", None) is not None
    if unpadding.reads == "first" or (unpadding.reads == "outside" and pooled):
        return real.new_zeros(len(real), 1, dtype=torch.long)
    if unpadding.reads != "last":
        return None
    column = torch.arange(real.shape[1], device=real.device)
    ids, pad = given.get("input_ids"), body.config.pad_token_id
    if ids is None or pad is None:
        return column[-1:].expand(len(real), 1)
    last: Tensor = (column * (ids != pad)).argmax(-1, keepdim=True)
    return last


def _rows_of(
    real: Tensor, lengths: Tensor, first: Tensor, sizes: list[int], firsts: list[int]
) -> UnpaddedRows:
    rows, width = real.shape
    tokens = sum(sizes)
    starts = functional.pad(lengths.cumsum(0), (1, 0))
    row = torch.repeat_interleave(
        torch.arange(rows, device=real.device), lengths, output_size=tokens
    )
    column = torch.arange(tokens, device=real.device) - starts[row] + first[row]
    ends = [start + size for start, size in zip(firsts, sizes, strict=True)]
    sides = {"left"} if any(firsts) else set()
    sides |= {"right"} if min(ends) < width else set()
    return UnpaddedRows(
        rows=rows,
        width=width,
        mask=real if sides else None,
        places=row * width + column if sides else None,
        starts=starts.int(),
        tokens=tokens,
        longest=max(sizes),
        sides=frozenset(sides),
    )


def packed_inputs(
    unpadding: Unpadding, body: Any, given: Mapping[str, Any], batch: UnpaddedRows
) -> dict[str, Any]:
    """Pack the arguments of a call; positions are those that the padded model gives."""
    shape = (batch.rows, batch.width)
    inputs = {name: given[name] for name in _PASSED_ON if given.get(name) is not None}
    inputs |= {
        name: batch.pack(given[name].expand(*shape, *given[name].shape[2:]))
        for name in _PER_TOKEN
        if given.get(name) is not None
    }
    if "position_ids" not in inputs:
        inputs["position_ids"] = batch.pack(_positions(unpadding, body, given, batch))
    if unpadding.shifted and "labels" in inputs:
        # The loss would compare the last token of a sequence with the first of the next.
        inputs["labels"] = inputs["labels"].index_fill(1, batch.starts[:-1].long(), IGNORED)
    return inputs


def _positions(
    unpadding: Unpadding, body: Any, given: Mapping[str, Any], batch: UnpaddedRows
) -> Tensor:
    """Position of every column, as the padded model counts."""
    ids = given.get("input_ids")
    if unpadding.traits.first_position and ids is not None:  # RoBERTa and its kin
        pad = unpadding.traits.first_position - 1
        counted = ids != pad
        places: Tensor = counted.cumsum(-1) * counted + pad
        return places
    if body.config.model_type == "opt" and batch.mask is not None:
        return (batch.mask.cumsum(-1) - 1).clamp(min=0)
    column = torch.arange(batch.width, device=batch.starts.device)
    return (column + unpadding.traits.first_position).expand(batch.rows, batch.width)
