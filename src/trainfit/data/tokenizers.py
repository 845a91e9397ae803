"""Tokenizers: the model's own, or one learned from the data for a model with random weights."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from trainfit.errors import BadInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Tokenizer: TypeAlias = PreTrainedTokenizerBase

_SPECIAL = ["[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def load_tokenizer(place: str) -> Tokenizer:
    """The tokenizer of a hub id or a local folder."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadInput(
            f"no tokenizer in {place}: {reason}",
            "give a folder of the model, or set model.weights=random to learn one from the data",
        ) from None
    return tokenizer


def learn_tokenizer(
    texts: Iterable[str], *, vocabulary: int = 8192, pad_id: int = 0, least: int = 2
) -> Tokenizer:
    """A byte-level BPE tokenizer of these texts, for pairs too. It knows every text there is.

    Only pieces that occur `least` times become tokens: the vocabulary is saved with the model, and
    a rare one may be a name. `pad_id` is where the model's config has its padding: that row of an
    embedding is not trained.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = [*_SPECIAL]
    special.insert(min(pad_id, len(special)), "[PAD]")
    backend = Backend(models.BPE(unk_token="[UNK]"))
    # With a space before the first word it is the same token there as anywhere else.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=least,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, backend.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        pad_token="[PAD]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def pad_id(tokenizer: Tokenizer) -> int:
    """The id that fills up rows. Filler is masked, so any will do where a model has none."""
    for name in ("pad_token_id", "eos_token_id"):
        value = getattr(tokenizer, name, None)
        if isinstance(value, int):
            return value
    return 0


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """The same for tokenizers that make the same tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    digest = hashlib.sha256(type(tokenizer).__name__.encode())
    digest.update(json.dumps(tokenizer.model_input_names).encode())
    if backend is not None:
        fields = json.loads(backend.to_str())
        # What the last call asked for stays in there, and is no property of the tokenizer.
        digest.update(json.dumps({**fields, "truncation": None, "padding": None}).encode())
        return digest.hexdigest()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                digest.update(path.read_bytes())
    return digest.hexdigest()
