"""Text from a trained GPT, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainfit.conf import GptConfig
from trainfit.core.errors import BadInput
from trainfit.core.plan_records import Plan
from trainfit.data.token_files import TOKENIZER
from trainfit.data.tokenizers import end_of_text, load_bpe
from trainfit.engine import checkpoint
from trainfit.engine.saved_state import find_nonfinite
from trainfit.jobs import exports
from trainfit.jobs.configuration import configured_by
from trainfit.jobs.gpt import build
from trainfit.jobs.models.gpt_model import Gpt

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class TextWriter:
    """Model with its tokenizer."""

    model: Gpt
    tokenizer: Tokenizer

    def write(
        self,
        prompt: str = "",
        *,
        tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = 50,
        seed: int = 0,
    ) -> str:
        """Continue the prompt until the text ends or `tokens` are drawn."""
        ends = end_of_text(self.tokenizer)
        given = self.tokenizer.encode(prompt, add_special_tokens=False).ids
        if not given and ends is None:
            raise BadInput("there is no prompt", "give one (--prompt): no token begins a text")
        # In training a text begins after the end of another.
        start = [*([] if ends is None else [ends]), *given]
        drawn = draw(
            self.model,
            start,
            known=self.tokenizer.get_vocab_size(),
            temperature=temperature,
            top_k=top_k,
            seed=seed,
        )
        found = takewhile(lambda token: token != ends, islice(drawn, tokens))
        text: str = self.tokenizer.decode([*given, *found])
        return text


def open_writer(run: Path) -> TextWriter:
    """Load a run's export, or the best checkpoint of a run that is not finished."""
    exported = run / "export" / TOKENIZER
    tokenizer = exported if exported.is_file() else run / TOKENIZER
    if not tokenizer.is_file():
        raise BadInput(
            f"{run} has no {TOKENIZER}: its tokens cannot be turned into text",
            "give a run of `trainfit train gpt` whose data had one",
        )
    if (run / "export").is_dir():
        model = exports.read_gpt(run / "export")
    else:
        config = configured_by(run, "gpt").config
        assert isinstance(config, GptConfig)
        model = build(config, Plan.load(run / "plan.json"))
        checkpoint.load_weights(run, model, best=True)
    if name := find_nonfinite(model):
        raise BadInput(f"the weight {name} of {run} is not finite", "train it again")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return TextWriter(model=model.to(device).eval(), tokenizer=load_bpe(tokenizer))


@torch.no_grad()
def draw(
    model: Gpt,
    start: list[int],
    *,
    known: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
) -> Iterator[int]:
    """Draw tokens after `start` from the first `known`, which the tokenizer can decode.

    A temperature of 0 always takes the most likely token.
    """
    random = torch.Generator().manual_seed(seed)
    device = model.token_embedding.weight.device
    ids = list(start)
    while True:
        recent = torch.tensor([ids[-model.shape.block_size :]], device=device)
        last = model.encode(recent)[0, -1]
        logits = (model.token_embedding.weight[:known] @ last).float().cpu()
        ids.append(_choose(logits, temperature, top_k, random))
        yield ids[-1]


def _choose(logits: Tensor, temperature: float, top_k: int | None, random: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < logits.numel():
        least = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    chances = (logits / temperature).softmax(-1)
    return int(torch.multinomial(chances, 1, generator=random))
