"""Exports: trained models for use without trainfit.

A classifier with transformers' own head has transformers' layout (standard_export.py). Any other:

    export/encoder/           save_pretrained: AutoModel.from_pretrained loads it, bidirectional
    export/adapter/           LoRA or DoRA alone: peft loads it on top of the encoder
    export/head.safetensors   head.weight, head.bias, and the pooler's weights if it has any
    export/head.json          classes, pooling, max_length, criteria
    export/tokenizer…         AutoTokenizer.from_pretrained(export) loads it
    export/README.md          the model card
    export/checksums.json     of all but the card; predict checks them before it loads anything

A GPT is exported as transformers' GPT-2. An export is written under another name and renamed at the
end, so that it is complete or not there.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import safetensors.torch

from trainfit.core import codec
from trainfit.core.errors import BadInput, RunFailed, TrainfitWarning, reason
from trainfit.core.files import checksum, write_whole
from trainfit.data.corpus import END_OF_TEXT
from trainfit.data.model_files import plain_config, read_weights
from trainfit.data.token_files import TOKENIZER
from trainfit.data.tokenizers import is_learned, load_bpe
from trainfit.jobs import standard_export
from trainfit.jobs.models.building import OwnHead
from trainfit.jobs.models.classifier import EncoderClassifier
from trainfit.jobs.models.gpt_model import Gpt
from trainfit.jobs.models.sources import without_bars
from trainfit.kernels.quantized import widened_state

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from trainfit.data.tokenizers import Tokenizer

CHECKSUMS = "checksums.json"
_CHECKSUM_FIX = "export the model again, or get another copy of it"


def write_classifier(
    folder: Path,
    model: EncoderClassifier,
    tokenizer: Tokenizer,
    facts: dict[str, Any],
    *,
    weights: Mapping[str, Tensor] | None = None,
    base: Path | None = None,
    card: str | None = None,
) -> None:
    """Write `model` with its tokenizer; `facts` go into trainfit.json or head.json.

    `weights` replace those of the model with the same names. `base` is an export of a model with
    the same frozen weights: where adapters were trained, its files are linked.
    """
    state = {**widened_state(model), **(weights or {})}
    with written_whole(folder) as unfinished:
        if isinstance(model.head, OwnHead):
            if model.head.reads == "last":
                facts = facts | {"pad_id": _padding(tokenizer, facts["pad_id"])}
            known = facts | {"learned_tokenizer": is_learned(tokenizer)}
            standard_export.write_standard(unfinished, model, state, known)
            _write_tokenizer(unfinished, tokenizer, model, facts)
        else:
            _write_parts(unfinished, model, state, facts, base)
            _write_tokenizer(unfinished, tokenizer, model)
        if card is not None:
            write_whole(unfinished / "README.md", card)


def _padding(tokenizer: Tokenizer, pad: int) -> int:
    """Token to pad with where a head looks for the last token that is no padding.

    Some tokenizers, such as Qwen3-Embedding's, end each text with their padding token.
    """
    around = tokenizer("")["input_ids"]
    if pad not in around[-1:]:
        return pad
    return next((one for one in tokenizer.all_special_ids if one not in around), pad)


def _write_parts(
    folder: Path,
    model: EncoderClassifier,
    state: Mapping[str, Tensor],
    facts: dict[str, Any],
    base: Path | None,
) -> None:
    """Write the encoder and the head apart."""
    head = standard_export.plain_tensors(
        {n: t for n, t in state.items() if not n.startswith("encoder.")}
    )
    settings = model.settings
    known = {
        "format": "trainfit classifier 1",
        "pooling": settings.pooling,
        "pool_tokens": settings.pool_tokens,
        "dtype": settings.dtype if settings.method != "full" else "float32",
        **facts,
    }
    _write_encoder(folder, model.encoder, standard_export.part_of(state, "encoder."), base)
    safetensors.torch.save_file(head, folder / "head.safetensors")
    write_whole(folder / "head.json", json.dumps(known, indent=2) + "\n")


def write_gpt(folder: Path, model: Gpt, tokenizer: Path | None) -> None:
    """Write `model`, and its tokenizer where there is one."""
    with written_whole(folder) as unfinished:
        standard_export.to_gpt2(model).save_pretrained(unfinished)
        if tokenizer is not None:
            _write_gpt_tokenizer(unfinished, tokenizer, model.shape.block_size)


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """Give a folder to write to, which gets checksums and replaces `folder` at the end."""
    unfinished = folder.with_name(f".unfinished-{folder.name}")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        with without_bars():
            yield unfinished
        write_checksums(unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    except (OSError, safetensors.SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise RunFailed(
            f"cannot write {folder} ({getattr(error, 'strerror', None) or error})",
            f"free some space and continue with --resume {folder.parent}",
        ) from error


def _write_encoder(
    folder: Path, encoder: PreTrainedModel, state: dict[str, Tensor], base: Path | None
) -> None:
    if not getattr(encoder, "_hf_peft_config_loaded", False):
        encoder.save_pretrained(folder / "encoder", state_dict=state)
        standard_export.keep_soft_cap(folder / "encoder", encoder.config)
        return
    standard_export.save_adapter(folder / "adapter", encoder, state)
    if base is not None and _linked(base / "encoder", folder / "encoder"):
        return
    # With adapters, save_pretrained writes them alone: the base weights need a second call.
    weights = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in state.items()
        if "lora_" not in name
    }
    encoder._hf_peft_config_loaded = False
    try:
        encoder.save_pretrained(folder / "encoder", state_dict=weights)
    finally:
        encoder._hf_peft_config_loaded = True
    standard_export.keep_soft_cap(folder / "encoder", encoder.config)


def _linked(source: Path, target: Path) -> bool:
    """Give the files of `source` a second name in `target`; False where the disk has no links."""
    try:
        shutil.copytree(source, target, copy_function=os.link)
    except (OSError, shutil.Error):
        shutil.rmtree(target, ignore_errors=True)
        return False
    return True


def _write_tokenizer(
    folder: Path,
    tokenizer: Tokenizer,
    model: EncoderClassifier,
    facts: dict[str, Any] | None = None,
) -> None:
    """Write the tokenizer; it returns only inputs that the encoder takes.

    With `facts` it truncates and pads as in training.
    """
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    # transformers records where it read a vocabulary: a path of this machine.
    settings = {key: value for key, value in settings.items() if not key.endswith("_file")}
    names = settings.get("model_input_names", tokenizer.model_input_names)
    if not model.traits.token_types:
        names = [name for name in names if name != "token_type_ids"]
    settings["model_input_names"] = names
    if facts is not None:
        settings |= {"model_max_length": facts["max_length"], "padding_side": "right"}
        if tokenizer.pad_token_id != facts["pad_id"]:
            settings["pad_token"] = tokenizer.convert_ids_to_tokens(facts["pad_id"])
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def read_gpt(folder: Path) -> Gpt:
    """Read a GPT from its export, after a check of its files."""
    from transformers import GPT2Config, GPT2LMHeadModel

    check_export(folder)
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
    return standard_export.from_gpt2(other)


def _write_gpt_tokenizer(folder: Path, path: Path, longest: int) -> None:
    from transformers import PreTrainedTokenizerFast

    ends = END_OF_TEXT if load_bpe(path).token_to_id(END_OF_TEXT) is not None else None
    made = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(path), bos_token=ends, eos_token=ends, model_max_length=longest
    )
    made.save_pretrained(folder)
    shutil.copyfile(path, folder / TOKENIZER)  # byte by byte, so that its hash stays


def write_checksums(folder: Path) -> None:
    """Write the checksums of every file that is in a folder now."""
    found = {name: checksum(folder / name) for name in _exported_files(folder)}
    write_whole(folder / CHECKSUMS, json.dumps({"format": 1, "sha256": found}, indent=2) + "\n")


def check_export(folder: Path) -> None:
    """Raise BadInput for a file that is damaged, missing, or was not exported.

    An export of an earlier version has no checksums: it is used unchecked, with a warning.
    """
    path = folder / CHECKSUMS
    if not path.is_file():
        text = f"{folder} has no {CHECKSUMS}: its files are not checked"
        warnings.warn(text, TrainfitWarning, stacklevel=2)
        return
    try:
        wanted = codec.decode(dict[str, str], codec.read_object(path)["sha256"])
    except (OSError, ValueError, KeyError, BadInput) as error:
        raise BadInput(f"cannot read {path} ({reason(error)})", _CHECKSUM_FIX) from None
    there = _exported_files(folder)
    for name in sorted({*wanted, *there}):
        if name not in wanted:
            what = f"{folder / name} is not of this export"
            raise BadInput(what, f"move it away, or {_CHECKSUM_FIX}")
        if name not in there:
            raise BadInput(f"{folder} lacks a file that {CHECKSUMS} lists", _CHECKSUM_FIX)
        if checksum(folder / name) != wanted[name]:
            raise BadInput(
                f"{folder / name} is damaged: it does not match {CHECKSUMS}", _CHECKSUM_FIX
            )


def files_to_share(folder: Path) -> list[str]:
    """List the files of an export, as checked, and its card; nothing that someone put beside them.

    None of them holds a text of the data.
    """
    if not (folder / CHECKSUMS).is_file():
        raise BadInput(f"{folder} has no {CHECKSUMS}", "train the model again with this version")
    check_export(folder)
    card = ["README.md"] if (folder / "README.md").is_file() else []
    return [*_exported_files(folder), CHECKSUMS, *card]


def _exported_files(folder: Path) -> list[str]:
    """List every file in a folder except notes and hidden files, which nothing loads."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(
        str(PurePosixPath(path))
        for path in found
        if path.name != CHECKSUMS and path.suffix != ".md" and not path.name.startswith(".")
    )
