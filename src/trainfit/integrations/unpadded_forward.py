"""Forward passes of a transformers model without padding: its body's, and its head's.

`unpadding` puts them in the place of a model's own ones.
"""

from __future__ import annotations

import inspect
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from trainfit.integrations.body_state import BodyBlocks
from trainfit.integrations.unpadded_calls import (
    PER_COLUMN,
    SETTLED,
    Unpadding,
    call_obstacle,
    find_rows,
    late_obstacle,
    packed_inputs,
)
from trainfit.jobs.models.backbone import own_obstacle
from trainfit.kernels import disentangled
from trainfit.kernels.attention import ARGUMENT, computed_in
from trainfit.kernels.unpadded_rows import UnpaddedRows, unpadded_attention

FACTS = "_trainfit_unpadding"
"""Attribute of a body that holds its `Unpadding`."""
_PASSING, _BY_HEAD = "_trainfit_passing", "_trainfit_by_head"

FunctionT = TypeVar("FunctionT")


def uncompiled(function: FunctionT, *, recursive: bool = True) -> FunctionT:
    """Keep a function out of compiled graphs; with `recursive`, also what it calls."""
    kept: FunctionT = torch.compiler.disable(function, recursive=recursive)  # type: ignore[no-untyped-call]
    return kept


class _Passing(NamedTuple):
    """Tells the body that its head has decided: a packed row, or the own way without a batch."""

    batch: UnpaddedRows | None
    positions: Tensor | None = None


@cache
def _signature(kind: Any) -> inspect.Signature:
    return inspect.signature(kind.forward)


@uncompiled
def _bind(self: Any, kind: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Name the arguments of a call of the model's own forward."""
    signature = _signature(kind)
    given = signature.bind(self, *args, **kwargs).arguments
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    given.pop("self", None)
    return given


# ── the forward passes ────────────────────────────────────────────────────────────────────────


@uncompiled
def _rows(facts: Unpadding, runner: Any, body: Any, given: dict[str, Any]) -> UnpaddedRows | None:
    """Find the rows of a call that can go without padding; say the reason where it cannot."""
    if torch._C._get_tracing_state() is not None:
        return None
    found: UnpaddedRows | str | None = late_obstacle(facts, runner, body)
    found = found or call_obstacle(facts, body, given)
    if found is None:
        found = find_rows(facts, body, given)
    if isinstance(found, str):
        facts.say(found)
        return None
    return found


def body_of(model: Any) -> Any:
    """Return the part of a model that has its layers and no head; OPT's head calls the decoder."""
    base = model.base_model
    return base.decoder if model.config.model_type == "opt" and hasattr(base, "decoder") else base


_packed_inputs, _trusts = uncompiled(packed_inputs), uncompiled(Unpadding.trusts)


@partial(uncompiled, recursive=False)
def run_head(self: Any, kind: Any, args: Any, kwargs: Any) -> Any:
    """Run a model with a head: one with a result per column sees no padding either.

    Others call the body, which must know that no code of a script does.
    """
    body = body_of(self)
    facts: Unpadding | None = body.__dict__.get(FACTS)
    if facts is None or facts.off:
        return kind.forward(self, *args, **kwargs)
    if not kind.__name__.endswith(PER_COLUMN):
        body.__dict__[_BY_HEAD] = True
        try:
            return kind.forward(self, *args, **kwargs)
        finally:
            body.__dict__.pop(_BY_HEAD, None)
    given = _bind(self, kind, args, kwargs)
    batch = _rows(facts, self, body, given)
    unsure = facts.strange or self.training  # a loss of the script may read padded columns
    try:
        if batch is not None and _trusts(facts, batch.sides, unsure=unsure, training=self.training):
            inputs = _packed_inputs(facts, body, given, batch)
            body.__dict__[_PASSING] = _Passing(batch, inputs["position_ids"])
            output = kind.forward(self, **inputs, return_dict=True)
            if _PASSING not in body.__dict__:
                facts.count(batch)
                output = _restore(batch, output)
                if unsure:
                    _watch_on(facts, batch, output, training=self.training)
                return _as_asked(self, given, output)
            facts.say("its head goes past the body")
        facts.count(None)
        body.__dict__[_PASSING] = _Passing(None)
        output = kind.forward(self, *args, **kwargs)
        return _watch(facts, batch if unsure else None, output, training=self.training)
    finally:
        body.__dict__.pop(_PASSING, None)


@partial(uncompiled, recursive=False)
def run_body(self: Any, kind: Any, args: Any, kwargs: Any) -> Any:
    """Run an encoder or a decoder without padding."""
    facts: Unpadding | None = self.__dict__.get(FACTS)
    passing: _Passing | None = self.__dict__.pop(_PASSING, None)
    if facts is None:
        return kind.forward(self, *args, **kwargs)
    if facts.off:
        facts.count(None)
    if facts.off or (passing is not None and passing.batch is None):
        facts.compute(self, _tokens(args, kwargs))
        return kind.forward(self, *args, **kwargs)
    given = _bind(self, kind, args, kwargs)
    if passing is not None and passing.batch is not None:
        inputs = {name: value for name, value in given.items() if value is not None}
        inputs |= {"position_ids": passing.positions}
        return _run_rows(self, kind, facts, passing.batch, inputs)
    batch = _rows(facts, self, self, given)
    if batch is None:
        facts.count(None)
        facts.compute(self, _tokens(args, kwargs))
        return kind.forward(self, *args, **kwargs)
    asked = given.get("output_hidden_states")
    shown = self.config.output_hidden_states if asked is None else asked
    direct = facts.reads in SETTLED and _BY_HEAD not in self.__dict__  # past the head
    outside = (facts.reads == "outside" or shown or direct) and (facts.strange or self.training)
    unsure = outside or facts.reads in ("unknown", "padding")
    if not _trusts(facts, batch.sides, unsure=unsure, training=self.training):
        facts.count(None)
        facts.compute(self, batch.rows * batch.width)
        output = kind.forward(self, *args, **kwargs)
        return _watch(facts, batch, output, training=self.training)
    facts.count(batch)
    inputs = _packed_inputs(facts, self, given, batch)
    output = _restore(batch, _run_rows(self, kind, facts, batch, inputs))
    if output.get("pooler_output") is not None:
        output["pooler_output"] = _pool(self, output.last_hidden_state)
    if unsure:
        _watch_on(facts, batch, output, training=self.training)
    return _as_asked(self, given, output)


def _tokens(args: Any, kwargs: Any) -> int:
    """Count the tokens of a call of a body, with padding."""
    given = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
    return next((one.shape[:2].numel() for one in given if isinstance(one, Tensor)), 0)


@partial(uncompiled, recursive=False)
def _run_rows(
    self: Any, kind: Any, facts: Unpadding, batch: UnpaddedRows, inputs: dict[str, Any]
) -> Any:
    """Run a body on a packed row, by a graph if it was captured and nobody compiles the model."""
    facts.compute(self, batch.tokens)
    graphs = facts.graphs
    if graphs is None or get_eval_frame_callback() not in (None, False):
        return _run_packed(self, kind, facts, batch, inputs)

    held = ref(self)  # graphs keep this function, and a cycle would keep the memory of the body

    def run(rows: UnpaddedRows, given: dict[str, Any], blocks: BodyBlocks | None) -> Any:
        body: Any = held()
        facts: Unpadding = body.__dict__[FACTS]
        attention = unpadded_attention(rows, facts.traits.window, causal=facts.traits.causal)
        if blocks is None:
            output = _run_packed(body, kind, facts, rows, given, attention)
            facts.cases.update(attention.found)
            return output
        with blocks.inside(body):
            return _run_packed(body, kind, facts, rows, given, attention.settled(facts.cases))

    settled = facts.own is None or bool(facts.cases)
    output = graphs.run(self, batch, inputs, run, settled=settled, most=facts.most)
    return run(batch, inputs, None) if output is None else output


def _run_packed(
    self: Any,
    kind: Any,
    facts: Unpadding,
    batch: UnpaddedRows,
    inputs: dict[str, Any],
    attention: Any = None,
) -> Any:
    if facts.own is None:
        mpnet = self.config.model_type == "mpnet"
        return (_run_mpnet if mpnet else _run_deberta)(self, batch, inputs)
    if attention is None:
        attention = unpadded_attention(batch, facts.traits.window, causal=facts.traits.causal)
    tokens = inputs["input_ids" if "input_ids" in inputs else "inputs_embeds"]
    inputs |= {
        # transformers makes no mask of one that has four dimensions, and trainfit reads none.
        "attention_mask": torch.ones(1, 1, 1, 1, device=tokens.device),
        ARGUMENT: attention,
        "return_dict": True,
    }
    if facts.traits.causal:
        inputs["use_cache"] = False
    return kind.forward(self, **inputs)


def _run_deberta(body: Any, batch: UnpaddedRows, inputs: dict[str, Any]) -> Any:
    """Run DeBERTa through its parts: its forward would make distances of the whole packed row."""
    names = ("input_ids", "token_type_ids", "position_ids", "inputs_embeds")
    embedded = body.embeddings(**{name: inputs.get(name) for name in names})
    layout = batch.packed_layout()
    if own_obstacle(body, layout) is None:
        device = embedded.device.type
        attention: Any = disentangled.packed_attention(
            layout, body.config, computed_in(device, embedded.dtype)
        )
    else:
        from trainfit.kernels.disentangled_layers import padded_disentangled

        attention = padded_disentangled(batch, body.encoder)
    wanted = inputs.get("output_hidden_states")
    return body.encoder(
        embedded,
        torch.ones_like(layout.ids)[:, None],  # three dimensions, else it is expanded to T×T
        output_hidden_states=body.config.output_hidden_states if wanted is None else wanted,
        relative_pos=attention,
    )


def _run_mpnet(body: Any, batch: UnpaddedRows, inputs: dict[str, Any]) -> Any:
    """Run MPNet through its parts: its encoder would make a bias of the whole packed row."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    from trainfit.kernels.disentangled_layers import padded_bias

    names = ("input_ids", "position_ids", "inputs_embeds")
    hidden = body.embeddings(**{name: inputs.get(name) for name in names})
    attention = padded_bias(batch, body.encoder, hidden.dtype)
    states = [hidden]
    for layer in body.encoder.layer:
        states.append(layer(states[-1], None, attention)[0])
    wanted = inputs.get("output_hidden_states")
    wanted = body.config.output_hidden_states if wanted is None else wanted
    return BaseModelOutputWithPooling(
        last_hidden_state=states[-1],
        pooler_output=None if body.pooler is None else body.pooler(states[-1]),
        hidden_states=tuple(states) if wanted else None,
    )


@uncompiled
def _restore(batch: UnpaddedRows, output: Any) -> Any:
    """Put the padding back into all outputs per token, as zeros."""

    def restored(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(restored(one) for one in value)
        per_token = isinstance(value, Tensor) and value.shape[:2] == (1, batch.tokens)
        return batch.restore(value) if per_token else value

    for name in list(output):
        if name != "pooler_output":
            output[name] = restored(output[name])
    return output


def _pool(body: Any, hidden: Tensor) -> Tensor:
    """Compute the pooled outputs again: the packed row had only one first token."""
    activation = getattr(body, "pooler_activation", None)  # ALBERT's pooler is a matrix
    pooled: Tensor = (
        body.pooler(hidden) if activation is None else activation(body.pooler(hidden[:, 0]))
    )
    return pooled


def _as_asked(self: Any, given: dict[str, Any], output: Any) -> Any:
    """Return the output as a tuple where the caller or the config asks for one."""
    asked = given.get("return_dict")
    named = getattr(self.config, "return_dict", True) if asked is None else asked
    return output if named else output.to_tuple()


def _per_token(batch: UnpaddedRows, output: Any) -> list[Any]:
    """Return the outputs of each column: logits, hidden states."""
    values = output.values() if isinstance(output, dict) else output
    every = [one for value in values for one in (value if isinstance(value, tuple) else (value,))]
    tensors = [one for one in every if isinstance(one, Tensor) and one.dim() == 3]
    return [one for one in tensors if one.shape[:2] == (batch.rows, batch.width)]


@uncompiled
def _watch_on(facts: Unpadding, batch: UnpaddedRows, output: Any, *, training: bool) -> None:
    """Look at the gradients of a few batches without padding too, which other heads may read."""
    if any(one.requires_grad for one in _per_token(batch, output)) and facts.looks_now():
        _watch(facts, batch, output, training=training, packed=True)


@uncompiled
def _watch(
    facts: Unpadding,
    batch: UnpaddedRows | None,
    output: Any,
    *,
    training: bool = False,
    packed: bool = False,
) -> Any:
    """Find out by the gradients if any code reads padded columns."""
    if batch is None or (facts.reads == "padding" and facts.wait <= 0):
        return output

    def look(gradient: Tensor) -> None:
        if gradient.requires_grad and facts.differentiable:
            facts.twice = True
        if batch.mask is None or facts.twice or facts.reads == "padding":
            return
        empty = ~batch.mask
        finite = gradient.isfinite().all()
        found = torch.stack([finite, gradient[empty].any(), gradient[~empty].any()]).tolist()
        if not found[0]:  # a step that overflowed says nothing, nor does a head of zeros
            return
        if found[1]:
            facts.reads = "padding"
            late = ", which it began to in a later step: some had zeros there" if packed else ""
            facts.say(f"what stands on top of it reads padded columns{late}")
        elif found[2] and facts.wait <= 0:
            facts.watched |= facts.looked_at(batch.sides, training=training)

    learnt = [one for one in _per_token(batch, output) if one.requires_grad]
    facts.wait -= bool(learnt)
    for one in learnt:
        one.register_hook(look)
    if training and not learnt and torch.is_grad_enabled():  # else a second pass may have one
        facts.say("no gradient reaches it, which would show if padded columns are read")
    return output
