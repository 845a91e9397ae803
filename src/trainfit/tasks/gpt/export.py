"""A trained GPT for use without trainfit: transformers' GPT-2 with its tokenizer.

    export/config.json, model.safetensors    GPT2LMHeadModel.from_pretrained(export): same logits
    export/tokenizer.json …                  AutoTokenizer.from_pretrained(export)

It is written under another name and renamed, so that an export is whole or not there.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, cast

from trainfit.data.bpe import load_bpe
from trainfit.data.corpus import END_OF_TEXT
from trainfit.data.token_files import TOKENIZER
from trainfit.errors import RunFailed
from trainfit.tasks.encoder.sources import without_bars
from trainfit.tasks.gpt.gpt2 import from_gpt2, to_gpt2
from trainfit.tasks.gpt.model import Gpt

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel


def write(folder: Path, model: Gpt, tokenizer: Path | None) -> None:
    """Write `model`, and its tokenizer where there is one."""
    unfinished = folder.with_name(f".unfinished-{folder.name}")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        with without_bars():
            to_gpt2(model).save_pretrained(unfinished)
        if tokenizer is not None:
            _write_tokenizer(unfinished, tokenizer, model.shape.block_size)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise RunFailed(
            f"cannot write {folder} ({error.strerror or error})",
            f"free some space and go on with --resume {folder.parent}",
        ) from error


def read(folder: Path) -> Gpt:
    """The model of an export."""
    from transformers import AutoModelForCausalLM

    with without_bars():
        other = AutoModelForCausalLM.from_pretrained(folder)
    return from_gpt2(cast("GPT2LMHeadModel", other))


def _write_tokenizer(folder: Path, path: Path, longest: int) -> None:
    from transformers import PreTrainedTokenizerFast

    ends = END_OF_TEXT if load_bpe(path).token_to_id(END_OF_TEXT) is not None else None
    made = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(path), bos_token=ends, eos_token=ends, model_max_length=longest
    )
    made.save_pretrained(folder)
    shutil.copyfile(path, folder / TOKENIZER)  # to the letter, so that its hash stays
