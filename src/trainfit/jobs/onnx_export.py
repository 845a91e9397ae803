"""ONNX of an exported classifier, compared with the model itself before it is kept.

export/onnx/model.onnx    logits from what the tokenizer gives, for any number of rows and tokens
"""

from __future__ import annotations

import io
import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from trainfit.core.errors import RunFailed, reason
from trainfit.core.libraries import ONNX, need
from trainfit.jobs.exports import write_checksums
from trainfit.jobs.predict import Exported, load_export
from trainfit.runtime.environment import send_no_usage

if TYPE_CHECKING:
    from trainfit.jobs.models.classifier import EncoderClassifier

FILE = "onnx/model.onnx"
TOLERANCE = 1e-4
"""Largest difference of a logit, absolute or relative, between onnxruntime and torch."""
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_TRACED = 9
"""Tokens of the rows that the model is traced with."""
_LONGEST = 512
"""Most tokens of the rows that are compared."""
_FIX = "use the export as it is: trainfit predict, or transformers"


def write_onnx(folder: Path) -> Path:
    """Write onnx/model.onnx into an export, with adapters merged; return its path.

    RunFailed says why a model cannot be converted; the export is then as it was.
    """
    need("ONNX", *ONNX)
    send_no_usage()
    exported = load_export(folder)
    model = _Rows(_merged(exported.model.float()), _inputs(exported))
    unfinished = folder.with_name(".unfinished-onnx")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir()
        with _quietly():
            _convert(model, unfinished / Path(FILE).name, exported, str(folder))
            _compare(model, unfinished / Path(FILE).name, exported, str(folder))
        target = (folder / FILE).parent
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
        write_checksums(folder)
    except OSError as error:
        raise RunFailed(f"cannot write {folder / FILE} ({reason(error)})", "free some space") from (
            error
        )
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder / FILE


class _Rows(nn.Module):
    """A classifier that takes the tokenizer's outputs in their order."""

    def __init__(self, model: EncoderClassifier, names: list[str]) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *rows: Tensor) -> Tensor:
        logits: Tensor = self.model(**dict(zip(self.names, rows, strict=True)))
        return logits


def _inputs(exported: Exported) -> list[str]:
    """Names of the inputs: those that both the tokenizer gives and the model takes."""
    given = exported.tokenizer.model_input_names
    types = exported.model.traits.token_types
    return [n for n in _INPUTS if n in given and (n != "token_type_ids" or types)]


def _merged(model: EncoderClassifier) -> EncoderClassifier:
    """Add adapters to the weights, and take them out; an export in one piece has none."""
    if getattr(model.encoder, "_hf_peft_config_loaded", False):
        from peft.tuners.lora import LoraLayer

        layers = [(n, m) for n, m in model.encoder.named_modules() if isinstance(m, LoraLayer)]
        for name, layer in layers:
            layer.merge()
            model.encoder.set_submodule(name, layer.get_base_layer())
    return model


def _convert(model: _Rows, path: Path, exported: Exported, shown: str) -> None:
    width = max(2, min(_TRACED, exported.facts["max_length"]))
    rows = _example(model, 2, width, exported)
    axes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    try:
        with torch.no_grad():
            program = torch.onnx.export(
                model,
                rows,
                dynamo=True,
                dynamic_shapes=((axes,) * len(rows),),
                input_names=model.names,
                output_names=["logits"],
                verbose=False,
            )
        assert program is not None
        for node in program.model.graph.all_nodes():
            node.metadata_props.clear()  # lines of source, with paths of this machine
        program.save(path)
    except OSError:
        raise
    except Exception as error:
        why = reason(error.__cause__ or error)  # the exporter's own lines say how to report it
        raise RunFailed(f"{shown} cannot be converted to ONNX ({why})", _FIX) from error


def _compare(model: _Rows, path: Path, exported: Exported, shown: str) -> None:
    """Raise RunFailed unless onnxruntime gives the model's logits on batches of other shapes."""
    import onnxruntime

    longest = min(exported.facts["max_length"], _LONGEST)
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        for count, width in ((1, 1), (3, min(longest, 2 * _TRACED)), (2, longest)):
            rows = _example(model, count, width, exported)
            with torch.no_grad():
                wanted = model(*rows).numpy()
            given = {name: one.numpy() for name, one in zip(model.names, rows, strict=True)}
            [found] = session.run(["logits"], given)
            if wanted.ndim == 3 and "attention_mask" in given:
                real = given["attention_mask"].astype(bool)  # at padding any value is right
                found, wanted = found[real], wanted[real]
            if not np.allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE):
                far = np.abs(found - wanted).max()
                what = f"{shown}: logits of its ONNX are off by {far:.1g} on {count}×{width} tokens"
                raise RunFailed(what, _FIX)
    except RunFailed:
        raise
    except Exception as error:
        raise RunFailed(f"onnxruntime cannot run {shown} ({reason(error)})", _FIX) from error


def _example(model: _Rows, count: int, width: int, exported: Exported) -> tuple[Tensor, ...]:
    """Make rows of random tokens; all but the first are padded, each to another length."""
    drawn = torch.Generator().manual_seed(count * 1000 + width)
    words = exported.model.encoder.config.vocab_size
    ids = torch.randint(0, words, (count, width), generator=drawn)
    lengths = torch.tensor([max(1, width * (count - row) // count) for row in range(count)])
    mask = (torch.arange(width) < lengths[:, None]).long()
    ids = torch.where(mask.bool(), ids, exported.facts["pad_id"])
    made: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    made["token_type_ids"] = mask * (torch.arange(width) >= (lengths // 2)[:, None])
    return tuple(made[name] for name in model.names)


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence the exporter, which warns of operators that no model here has."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        unseen = io.StringIO()
        with warnings.catch_warnings(), redirect_stdout(unseen), redirect_stderr(unseen):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
