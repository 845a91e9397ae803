"""Model folders with the files of each kind of tokenizer, made from a few synthetic sentences."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TEXT = (
    "the quiet river runs past a small town where people walk and sleep and eat bread every day "
    "without much trouble at night tired sad happy alone work rest light"
)
WORDS = _TEXT.split(" ")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
_BERT = {
    "model_type": "bert",
    "vocab_size": 700,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 200,
}
_ROBERTA = _BERT | {"model_type": "roberta", "type_vocab_size": 1, "pad_token_id": 1}


def sentences(count: int = 300, seed: int = 0) -> list[str]:
    """Sentences of the words above, and every letter alone, so that no letter is unknown."""
    draw = random.Random(seed)
    made = [" ".join(draw.choices(WORDS, k=draw.randint(4, 16))) for _ in range(count)]
    return [*made, *(" ".join(LETTERS) for _ in range(20))]


def _sentencepiece(path: Path, **options: Any) -> None:
    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences()),
        model_writer=out,
        vocab_size=150,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    path.write_bytes(out.getvalue())


def _wordpiece(folder: Path) -> dict[str, Any]:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*dict.fromkeys(WORDS), *LETTERS[1:], *(f"##{letter}" for letter in LETTERS)]
    (folder / "vocab.txt").write_text("\n".join([*special, *pieces]) + "\n")
    return _BERT


def _byte_level(folder: Path) -> dict[str, Any]:
    from tokenizers import ByteLevelBPETokenizer

    made = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    made.train_from_iterator(
        sentences(), vocab_size=420, special_tokens=special, show_progress=False
    )
    made.save_model(str(folder))
    return _ROBERTA


def _json_alone(folder: Path) -> dict[str, Any]:
    """A byte-level BPE in tokenizer.json beside a config that would make WordPiece of it."""
    _byte_level(folder)
    from tokenizers import ByteLevelBPETokenizer

    parts = [folder / "vocab.json", folder / "merges.txt"]
    ByteLevelBPETokenizer.from_file(*map(str, parts)).save(str(folder / "tokenizer.json"))
    for part in parts:
        part.unlink()
    return _BERT


def _phobert(folder: Path) -> dict[str, Any]:
    pieces = [*(f"{letter}@@" for letter in LETTERS), *LETTERS, "qu@@", "zo@@", "zoo"]
    (folder / "vocab.txt").write_text("".join(f"{piece} 1\n" for piece in pieces))
    (folder / "bpe.codes").write_text("q u 9\nz o 8\nzo o</w> 7\n")
    return _ROBERTA | {"tokenizer_class": "PhobertTokenizer"}


def _phobert_unnamed(folder: Path) -> dict[str, Any]:
    """The same files beside a config that names no class for them."""
    _phobert(folder)
    return _ROBERTA


def _deberta(folder: Path) -> dict[str, Any]:
    _sentencepiece(
        folder / "spm.model",
        model_type="unigram",
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        pad_piece="[PAD]",
        bos_piece="[CLS]",
        eos_piece="[SEP]",
        unk_piece="[UNK]",
        user_defined_symbols=["[MASK]"],
    )
    settings = {"do_lower_case": False, "vocab_type": "spm"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return _BERT | {
        "model_type": "deberta-v2",
        "type_vocab_size": 0,
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "position_buckets": 16,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "position_biased_input": False,
    }


def _gemma(folder: Path) -> dict[str, Any]:
    _sentencepiece(
        folder / "tokenizer.model",
        model_type="bpe",
        add_dummy_prefix=False,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        unk_piece="<unk>",
        user_defined_symbols=["<start_of_turn>", "<end_of_turn>"],
    )
    settings = {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return _BERT | {
        "model_type": "gemma2",
        "head_dim": 8,
        "num_key_value_heads": 2,
        "sliding_window": 64,
    }


def _t5(folder: Path) -> dict[str, Any]:
    """T5's tokenizer in the folder of an encoder."""
    _sentencepiece(
        folder / "spiece.model", model_type="unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1
    )
    settings = {"tokenizer_class": "T5Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return _BERT


KINDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "wordpiece": _wordpiece,
    "byte_level": _byte_level,
    "json_alone": _json_alone,
    "phobert": _phobert,
    "phobert_unnamed": _phobert_unnamed,
    "deberta_v3": _deberta,
    "gemma": _gemma,
    "t5": _t5,
}


def tokenizer_folder(folder: Path, kind: str | None, *, weights: bool = False) -> Path:
    """A model's folder with the tokenizer files of this kind, or without any; all in a moment."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = _BERT if kind is None else KINDS[kind](folder)
    (folder / "config.json").write_text(json.dumps(fields))
    if weights:
        _save_weights(folder, fields)
    return folder


def _save_weights(folder: Path, fields: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModel.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(fields))  # as it was: the model names its class
