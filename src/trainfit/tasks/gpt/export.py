"""A trained GPT for use without trainfit: transformers' GPT-2 with its tokenizer.

    export/config.json, model.safetensors    GPT2LMHeadModel.from_pretrained(export): same logits
    export/tokenizer.json …                  AutoTokenizer.from_pretrained(export)
    export/checksums.json                    of all of these; sample checks them first

It is written under another name and renamed, so that an export is whole or not there.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from trainfit import checksums, codec
from trainfit.data.bpe import load_bpe
from trainfit.data.corpus import END_OF_TEXT
from trainfit.data.model_files import plain_config, read_weights
from trainfit.data.token_files import TOKENIZER
from trainfit.errors import BadInput, RunFailed, reason
from trainfit.tasks.encoder.sources import without_bars
from trainfit.tasks.gpt.gpt2 import from_gpt2, to_gpt2
from trainfit.tasks.gpt.model import Gpt


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
        checksums.write(unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise RunFailed(
            f"cannot write {folder} ({error.strerror or error})",
            f"free some space and go on with --resume {folder.parent}",
        ) from error


def read(folder: Path) -> Gpt:
    """The model of an export; its files are checked first."""
    from transformers import GPT2Config, GPT2LMHeadModel

    checksums.check(folder)
    try:
        fields = codec.read_object(folder / "config.json")
        config = GPT2Config(**plain_config(fields, str(folder)))
        with without_bars():
            other: GPT2LMHeadModel = GPT2LMHeadModel.from_pretrained(
                None, config=config, state_dict=read_weights(str(folder))
            )
    except BadInput:
        raise
    except Exception as error:  # noqa: BLE001  libraries below raise plain ones for a bad file
        raise BadInput(
            f"cannot load a GPT from {folder} ({reason(error)})", "give a folder `train gpt` wrote"
        ) from None
    return from_gpt2(other)


def _write_tokenizer(folder: Path, path: Path, longest: int) -> None:
    from transformers import PreTrainedTokenizerFast

    ends = END_OF_TEXT if load_bpe(path).token_to_id(END_OF_TEXT) is not None else None
    made = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(path), bos_token=ends, eos_token=ends, model_max_length=longest
    )
    made.save_pretrained(folder)
    shutil.copyfile(path, folder / TOKENIZER)  # to the letter, so that its hash stays
