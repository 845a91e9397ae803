"""The contenders of gpt.py: what each is made of, and its step.

All train the same shape with AdamW (fused unless it says otherwise), clip the gradient, take their
batch from pinned memory, and never wait for the device inside a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.compiler.config
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainfit.engine.loop_settings import OptimizerSettings
from trainfit.engine.optimizer import build_optimizer, parameter_groups
from trainfit.engine.step import plain_step
from trainfit.jobs.models.gpt_model import Gpt, GptShape
from trainfit.runtime import compile_blocks, compile_model

RATE, BETAS, DECAY, CLIP = 6e-4, (0.9, 0.95), 0.1, 1.0
Batch = tuple[Tensor, Tensor]
Step = Callable[[Batch], Tensor]
"""Takes inputs and targets on the CPU, trains on them, and gives the mean loss on the device."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Someone's way to train the shape."""

    name: str
    batch: int
    """Sequences of a step."""
    parts: int = 1
    """In how many parts they go through the model, one after the other."""
    kind: str = "trainfit"
    """trainfit, masters (its model in bf16 with float32 copies), nanogpt, transformers"""
    precision: Any = "bf16"
    compile: str = "model"
    """none, blocks, blocks+loss, model"""
    mode: str = "default"
    attention: str = "auto"
    """auto (torch decides), flash, math"""
    optimizer: Any = "adamw_fused"
    chunk: int | None = None
    """Of the loss, in tokens."""
    half_stream: bool = False
    gelu: str = "own"
    """own, torch"""


def attention(name: str) -> AbstractContextManager[Any]:
    """The kernel that attention takes first."""
    if name == "auto":
        return nullcontext()
    kinds = {
        "flash": [SDPBackend.FLASH_ATTENTION],
        "math": [SDPBackend.MATH],
    }
    return sdpa_kernel(kinds[name], set_priority=True)


def own_backend(device: str) -> Callable[..., Any]:
    """A compiler of a contender's own.

    torch keeps what it compiled by code and compiler, and does not ask which attention kernel is
    preferred: with one compiler for all, the second contender would run the first one's kernels.
    On a CPU nothing is generated, only traced.
    """
    if device == "cpu":
        from torch._dynamo.backends.debugging import aot_eager

        return lambda graph, inputs, **_: aot_eager(graph, inputs)

    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    def compiler(graph: Any, inputs: Any, mode: str = "default", **_: Any) -> Any:
        return compile_fx(graph, inputs, config_patches=dict(list_mode_options(mode)))

    return compiler


def make_step(who: Contender, shape: GptShape, device: str, *, seed: int) -> Step:
    """The contender, built, with weights from the seed."""
    torch.manual_seed(seed)
    backend = own_backend(device)
    make = {
        "trainfit": _trainfit,
        "masters": _masters,
        "nanogpt": _nanogpt,
        "transformers": _transformers,
    }
    step = make[who.kind](who, shape, device, backend)
    # What torch.compile keeps on disk is found by everything but the kernel that is preferred.
    torch.compiler.config.cache_key_tag = who.attention

    def run(batch: Batch) -> Tensor:
        with attention(who.attention):
            return step(batch)

    return run


def _on(device: str, batch: Batch) -> Batch:
    inputs, targets = (part.to(device, non_blocking=True) for part in batch)
    return inputs, targets


def _parts(who: Contender, device: str, batch: Batch) -> list[Batch]:
    inputs, targets = _on(device, batch)
    return list(zip(inputs.chunk(who.parts), targets.chunk(who.parts), strict=True))


# ── trainfit ──────────────────────────────────────────────────────────────────────────────────


def _model(who: Contender, shape: GptShape, device: str) -> Gpt:
    model = Gpt(shape, loss_chunk=who.chunk, half_stream=who.half_stream).to(device)
    if who.gelu == "torch":
        for block in model.blocks:
            block.feed_forward = PlainFeedForward(block.feed_forward)
    return model


class PlainFeedForward(nn.Module):
    """The same weights with torch's GELU between them."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.up, self.down = own.up, own.down

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(hidden)))


def _compile(model: Gpt, who: Contender, backend: Any) -> None:
    if who.compile == "model":
        compile_model(model, who.mode, backend=backend)
    elif who.compile != "none":
        compile_blocks(model, who.mode, backend=backend)
    if who.compile == "blocks+loss":
        compile_model(model.loss, who.mode, backend=backend)


def _trainfit(who: Contender, shape: GptShape, device: str, backend: Any) -> Step:
    """The engine's own step."""
    model = _model(who, shape, device)
    optimizer = build_optimizer(
        model,
        OptimizerSettings(kind=who.optimizer, learning_rate=RATE, weight_decay=DECAY, betas=BETAS),
    )
    _compile(model, who, backend)

    def step(batch: Batch) -> Tensor:
        def arriving() -> Iterator[dict[str, Tensor]]:
            for inputs, targets in _parts(who, device, batch):
                yield {"input_ids": inputs, "targets": targets}

        numbers = plain_step(
            model,
            optimizer,
            lambda net, one: net(one["input_ids"], one["targets"]),
            arriving(),
            float(batch[0].numel()),
            device_type=device,
            precision=who.precision,
            max_grad_norm=CLIP,
        )
        return numbers.loss

    return step


def _masters(who: Contender, shape: GptShape, device: str, backend: Any) -> Step:
    """16-bit weights, activations and gradients; AdamW on float32 copies of the weights."""
    model = _model(who, shape, device)
    masters = [weight.detach().clone() for weight in model.parameters()]
    if who.precision == "bf16":
        model.to(torch.bfloat16)
    weights = list(model.parameters())
    decayed = [m for m in masters if m.dim() >= 2]
    kept = [m for m in masters if m.dim() < 2]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": kept, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, fused=True)
    for master in masters:
        master.grad = torch.zeros_like(master)
    _compile(model, who, backend)

    def step(batch: Batch) -> Tensor:
        inputs, targets = _on(device, batch)
        loss = model(inputs, targets) / inputs.numel()
        loss.backward()
        gradients = [master.grad for master in masters]
        torch._foreach_copy_(gradients, [weight.grad for weight in weights])
        for weight in weights:
            weight.grad = None
        nn.utils.clip_grad_norm_(masters, CLIP, foreach=True)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        return loss.detach()

    return step


# ── the peers ─────────────────────────────────────────────────────────────────────────────────


class PlainGpt(nn.Module):
    """A GPT as a short script has it: the same sums as trainfit's, nothing arranged for speed."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab_size, shape.n_embd)
        self.positions = nn.Embedding(shape.block_size, shape.n_embd)
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape.n_layer))
        self.norm = nn.LayerNorm(shape.n_embd, bias=False)
        self.head = nn.Linear(shape.n_embd, shape.vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * shape.n_layer) ** 0.5 if last else 0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.tokens(inputs) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


class PlainBlock(nn.Module):
    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.heads, width = shape.n_head, shape.n_embd
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        split = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (part.view(rows, length, self.heads, -1).transpose(1, 2) for part in split)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


def _nanogpt(who: Contender, shape: GptShape, device: str, backend: Any) -> Step:
    model: Any = PlainGpt(shape).to(device)
    optimizer = torch.optim.AdamW(parameter_groups(model, DECAY), lr=RATE, betas=BETAS, fused=True)
    call = torch.compile(model, backend=backend, mode=who.mode)
    return _plain_loop(who, model, optimizer, call, device)


def hub_gpt2(shape: GptShape) -> nn.Module:
    """transformers' own GPT-2 of these sizes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape.vocab_size,
        n_positions=shape.block_size,
        n_embd=shape.n_embd,
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    return GPT2LMHeadModel(config)


def _transformers(who: Contender, shape: GptShape, device: str, backend: Any) -> Step:
    model = hub_gpt2(shape).to(device).train()
    optimizer = torch.optim.AdamW(parameter_groups(model, DECAY), lr=RATE, betas=BETAS, fused=True)
    compiled = torch.compile(model, backend=backend, mode=who.mode)

    def call(inputs: Tensor, targets: Tensor) -> Tensor:
        # It shifts its labels itself: the target of each token is put one place on.
        labels = torch.cat([inputs[:, :1], targets[:, :-1]], dim=1)
        return compiled(input_ids=inputs, labels=labels).loss

    return _plain_loop(who, model, optimizer, call, device)


def _plain_loop(who: Contender, model: nn.Module, optimizer: Any, call: Any, device: str) -> Step:
    def step(batch: Batch) -> Tensor:
        half = who.precision == "bf16"
        total = torch.zeros((), device=device)
        for inputs, targets in _parts(who, device, batch):
            with torch.autocast(device, dtype=torch.bfloat16) if half else nullcontext():
                loss = call(inputs, targets) / who.parts
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step
