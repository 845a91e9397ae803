"""A trained classifier for use without trainfit.

    export/encoder/           save_pretrained: AutoModel.from_pretrained loads it, bidirectional
    export/adapter/           LoRA or DoRA alone: peft loads it on top of the encoder
    export/head.safetensors   head.weight, head.bias, and the pooler's weights if it has any
    export/head.json          classes, pooling, max_length, criteria
    export/tokenizer…         AutoTokenizer.from_pretrained(export) loads it
    export/checksums.json     of all of these; predict checks them before it loads anything

It is written under another name and renamed, so that an export is whole or not there.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
from torch import Tensor

from trainfit import checksums
from trainfit.errors import RunFailed
from trainfit.files import write_whole
from trainfit.tasks.encoder.classifier import EncoderClassifier
from trainfit.tasks.encoder.sources import without_bars

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trainfit.data.tokenizers import Tokenizer

_ADAPTER = "lora_"
_BASE = ".base_layer."


def write(
    folder: Path,
    model: EncoderClassifier,
    tokenizer: Tokenizer,
    facts: dict[str, Any],
) -> None:
    """Write `model` with its tokenizer; `facts` go into head.json."""
    unfinished = folder.with_name(f".unfinished-{folder.name}")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        with without_bars():
            _write_encoder(unfinished, model.encoder)
        head = {
            name: tensor.detach().cpu().contiguous()
            for name, tensor in model.state_dict().items()
            if not name.startswith("encoder.")
        }
        safetensors.torch.save_file(head, unfinished / "head.safetensors")
        _write_tokenizer(unfinished, tokenizer, model)
        write_whole(unfinished / "head.json", json.dumps(_facts(model, facts), indent=2) + "\n")
        checksums.write(unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    except (OSError, safetensors.SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise RunFailed(
            f"cannot write {folder} ({getattr(error, 'strerror', None) or error})",
            f"free some space and go on with --resume {folder.parent}",
        ) from error


def _facts(model: EncoderClassifier, facts: dict[str, Any]) -> dict[str, Any]:
    settings = model.settings
    return {
        "format": "trainfit classifier 1",
        "pooling": settings.pooling,
        "pool_tokens": settings.pool_tokens,
        "dtype": settings.dtype if settings.method != "full" else "float32",
        **facts,
    }


def _write_encoder(folder: Path, encoder: PreTrainedModel) -> None:
    if not getattr(encoder, "_hf_peft_config_loaded", False):
        encoder.save_pretrained(folder / "encoder")
        return
    encoder.save_pretrained(folder / "adapter")
    # With adapters in it, save_pretrained writes them alone; the rest is written as it was.
    encoder._hf_peft_config_loaded = False
    try:
        encoder.save_pretrained(folder / "encoder", state_dict=_without_adapters(encoder))
    finally:
        encoder._hf_peft_config_loaded = True


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, model: EncoderClassifier) -> None:
    """The tokenizer, giving what the encoder takes and nothing that it would refuse."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    # transformers writes down where it had read a vocabulary: a path of this machine.
    settings = {key: value for key, value in settings.items() if not key.endswith("_file")}
    names = settings.get("model_input_names", tokenizer.model_input_names)
    if not model.traits.token_types:
        names = [name for name in names if name != "token_type_ids"]
    path.write_text(json.dumps(settings | {"model_input_names": names}, indent=2) + "\n")


def _without_adapters(encoder: PreTrainedModel) -> dict[str, Tensor]:
    return {
        name.replace(_BASE, "."): tensor
        for name, tensor in encoder.state_dict().items()
        if _ADAPTER not in name
    }
