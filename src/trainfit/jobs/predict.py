"""Predictions of a trained classifier, on a part of a job's data or on new texts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch
import torch
from torch import nn

from trainfit.core import codec
from trainfit.core.errors import BadInput, OutOfMemory, RunFailed, TrainfitWarning, reason
from trainfit.core.libraries import import_peft, need
from trainfit.core.plan_records import Precision
from trainfit.data.model_files import weight_shapes
from trainfit.data.tokens import Tokens, tell_cut, tokenize_pairs, tokenize_texts, tokenize_words
from trainfit.engine.checkpoint import read_tensors
from trainfit.engine.memory_errors import give_back_memory, is_out_of_memory
from trainfit.engine.saved_state import find_nonfinite
from trainfit.engine.step import autocast
from trainfit.jobs import exports
from trainfit.jobs.classification import in_batches, predict
from trainfit.jobs.models.backbone import build_encoder
from trainfit.jobs.models.building import OwnHead
from trainfit.jobs.models.classifier import EncoderClassifier, build_classifier
from trainfit.jobs.models.classifier_settings import ClassifierSettings
from trainfit.jobs.standard_export import FACTS
from trainfit.jobs.targets import OneClass, Outputs, SeveralLabels, WordTags, target_of
from trainfit.runs import timeline

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trainfit.data.tokenizers import Tokenizer

_LORA = ("r", "lora_alpha", "lora_dropout", "target_modules", "use_dora", "fan_in_fan_out")
"""Fields of an adapter's config that training sets."""
_NEEDED = ("classes", "max_length", "pad_id", "eval_batch_size")
_NEEDED_APART = (*_NEEDED, "pooling", "pool_tokens", "dtype")
"""Facts of an export whose head is apart from its encoder."""


@timeline.stage("evaluation")
def predict_within(
    model: nn.Module,
    tokens: Tokens,
    batch_size: int,
    *,
    pad_id: int = 0,
    precision: Precision = "fp32",
    target: OneClass | None = None,
) -> tuple[Outputs, int]:
    """Predict with as many sequences at a time as fit into memory; return that number too."""
    return _within(
        batch_size, model, precision, lambda n: predict(model, tokens, n, pad_id, target)
    )


def pool_within(
    model: EncoderClassifier,
    tokens: Tokens,
    batch_size: int,
    *,
    pad_id: int = 0,
    precision: Precision = "fp32",
) -> Outputs:
    """Compute pooled outputs with as many sequences at a time as fit into memory."""

    def pool(size: int) -> Outputs:
        # Each part goes to the CPU: those of many sequences do not fit a small GPU.
        return in_batches(
            model, lambda **rows: model.pool(**rows).cpu(), tokens, size, pad_id
        ).numpy()

    return _within(batch_size, model, precision, pool)[0]


def _within(
    batch_size: int, model: nn.Module, precision: Precision, compute: Callable[[int], Outputs]
) -> tuple[Outputs, int]:
    """Call `compute`, halving the number of sequences whenever memory runs out."""
    device = next(model.parameters()).device.type
    while True:
        try:
            with autocast(device, precision):
                return _finite(compute(batch_size)), batch_size
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if batch_size == 1:
                raise OutOfMemory(
                    "memory ran out in a prediction of one sequence at a time",
                    "shorten the sequences or use a larger device",
                ) from None
        batch_size //= 2
        give_back_memory()


def _finite(found: Outputs) -> Outputs:
    if not np.isfinite(found).all():
        raise RunFailed(
            "the model's outputs are not finite", "train it again with a lower learning rate"
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Exported model, ready to use."""

    model: EncoderClassifier
    tokenizer: Tokenizer
    facts: dict[str, Any]
    """Content of trainfit.json or head.json."""


def load_export(folder: Path, device: str = "cpu") -> Exported:
    """Read what `exports.write_classifier` wrote, in either layout."""
    from trainfit.data.tokenizers import load_tokenizer, quiet_transformers

    exports.check_export(folder)
    facts = _facts(folder)
    with quiet_transformers():  # it reports a pooler that BERT has and the classifier has not
        model = _load_whole(folder, facts) if is_standard(folder) else _load_parts(folder, facts)
    if name := find_nonfinite(model):
        raise BadInput(f"the weight {name} of {folder} is not finite", "train it again")
    return Exported(
        model=model.to(device).eval(),
        tokenizer=load_tokenizer(str(folder), learned=facts.get("learned_tokenizer", False)),
        facts=facts,
    )


def is_standard(folder: Path) -> bool:
    """Tell an export in transformers' layout from one with the head apart."""
    return (folder / FACTS).is_file()


def _load_whole(folder: Path, facts: dict[str, Any]) -> EncoderClassifier:
    """Read a classifier in transformers' layout."""
    settings = ClassifierSettings(
        name=str(folder),
        classes=len(facts["classes"]),
        weights="pretrained",
        pooling="auto",
        words=isinstance(target_of(facts), WordTags),
    )
    model = build_classifier(settings)
    if not isinstance(model.head, OwnHead):
        raise BadInput(f"transformers has no classifier for {folder}", "export it again")
    own, saved = model.head.names(model.encoder), weight_shapes(str(folder))
    if wrong := sorted(name for name, shape in own.items() if saved.get(name) != shape):
        raise BadInput(f"model.safetensors in {folder} does not fit: {wrong[0]}", "export it again")
    return model


def _load_parts(folder: Path, facts: dict[str, Any]) -> EncoderClassifier:
    """Read a classifier whose head is apart from its encoder."""
    encoder = build_encoder(str(folder / "encoder"), weights="pretrained", dtype=facts["dtype"])
    if (folder / "adapter").is_dir():
        _load_adapter(encoder, folder / "adapter")
    settings = ClassifierSettings(
        name=str(folder),
        classes=len(facts["classes"]),
        pooling=facts["pooling"],
        pool_tokens=facts["pool_tokens"],
    )
    model = EncoderClassifier(encoder, settings)
    weights = read_tensors(folder / "head.safetensors")
    missing, unknown = model.load_state_dict(weights, strict=False)
    lacking = [name for name in missing if not name.startswith("encoder.")]
    if lacking or unknown:
        names = ", ".join([*lacking, *unknown])
        raise BadInput(f"head.safetensors in {folder} does not fit: {names}", "export it again")
    return model


def _facts(folder: Path) -> dict[str, Any]:
    """Read trainfit.json or head.json and check that it is complete."""
    name, needed = (FACTS, _NEEDED) if is_standard(folder) else ("head.json", _NEEDED_APART)
    try:
        facts = codec.read_object(folder / name)
        if missing := [one for one in needed if one not in facts]:
            raise ValueError(f"it has no {missing[0]}")
        codec.decode(tuple[str, ...], facts["classes"], "classes")
        for key, least in (("max_length", 1), ("eval_batch_size", 1), ("pad_id", 0)):
            if codec.decode(int, facts[key], key) < least:
                raise ValueError(f"{key} is {facts[key]}")
        thresholds = codec.decode(tuple[float, ...], facts.get("thresholds", []), "thresholds")
        several = isinstance(target_of(facts), SeveralLabels)
        if several and len(thresholds) != len(facts["classes"]):
            raise ValueError("it has not a threshold for each class")
    except (OSError, ValueError, TypeError, KeyError, BadInput) as error:
        raise BadInput(
            f"cannot read {name} in {folder} ({reason(error)})", "export the model again"
        ) from None
    return facts


def _load_adapter(encoder: PreTrainedModel, folder: Path) -> None:
    """Put the adapter into the encoder; transformers' own load_adapter leaves out DoRA's norms."""
    need("a model with adapters", "peft")
    import_peft()
    from peft import LoraConfig

    try:
        fields = codec.read_object(folder / "adapter_config.json")
        # Only these: others name modules to import, or other models.
        config = LoraConfig(**{name: fields[name] for name in _LORA})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"cannot read the adapter in {folder} ({reason(error)})", "export the model again"
        ) from None
    encoder.add_adapter(config)
    saved = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    for name, parameter in encoder.named_parameters():
        if "lora_" in name:
            key = f"base_model.model.{name.replace('.default', '')}"
            parameter.data.copy_(saved[key if key in saved else key.removesuffix(".weight")])


def predict_texts(
    folders: Sequence[Path],
    texts: Sequence[str],
    criteria: Sequence[str] | None = None,
    *,
    seconds: Sequence[str] | None = None,
    device: str = "cpu",
) -> tuple[Outputs, dict[str, Any]]:
    """Return the mean outputs over the exports for each text, and the exports' facts.

    `criteria` are the criteria's texts that the texts are paired with, `seconds` the second texts
    of pairs.
    """
    found, facts, tokens = _mean(
        folders, device, lambda exported: _tokenize(exported, texts, criteria, seconds)
    )
    tell_cut(tokens, facts["max_length"])
    return found, facts


def _mean(
    folders: Sequence[Path], device: str, tokenize: Callable[[Exported], Tokens]
) -> tuple[Outputs, dict[str, Any], Tokens]:
    """Mean outputs over the exports, the facts of the last with mean thresholds, and its tokens."""
    total: Outputs | None = None
    thresholds = []
    for folder in folders:
        exported = load_export(folder, device)
        facts, tokens = exported.facts, tokenize(exported)
        found, _ = predict_within(
            exported.model,
            tokens,
            facts["eval_batch_size"],
            pad_id=facts["pad_id"],
            target=target_of(facts),
        )
        total = found if total is None else total + found
        thresholds.append(facts.get("thresholds", ()))
    assert total is not None
    mean = np.mean(thresholds, axis=0).tolist()
    return total / len(folders), facts | {"thresholds": mean}, tokens


def answer(
    folders: Sequence[Path],
    texts: Sequence[str],
    criterion: str | None = None,
    seconds: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Return a row for each text and criterion: its number, and the class or labels found."""
    if not texts:
        raise BadInput("there is no text to classify", "give a file with a text per row")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    first = _facts(folders[0])
    _check_pairs(bool(first.get("pairs")), seconds)
    asked = _asked(first.get("criteria"), criterion)
    rows = [(at, code) for at in range(len(texts)) for code in asked or [None]]
    criteria = None if asked is None else [asked[str(code)] for _, code in rows]
    found, facts = predict_texts(
        folders, [texts[at] for at, _ in rows], criteria, seconds=seconds, device=device
    )
    answers = []
    for (at, code), chances in zip(rows, found.tolist(), strict=True):
        row: dict[str, Any] = {"row": at + 1} | ({} if code is None else {"criterion": code})
        answers.append(row | _worded(chances, facts))
    return answers


def answer_words(
    folders: Sequence[Path], sentences: Mapping[int, Sequence[str]]
) -> list[dict[str, Any]]:
    """Return a row for each word: its sentence's number, its tag, and the tag's probability.

    The probabilities are the mean over the exports. Words beyond the model's length have no tag.
    """
    numbers = [at for at, words in sentences.items() if any(word.strip() for word in words)]
    rows = [sentences[number] for number in numbers]
    if skipped := len(sentences) - len(rows):
        what = f"skipped {skipped:,} of {len(sentences):,} rows without words"
        warnings.warn(what, TrainfitWarning, stacklevel=2)
    if not rows:
        raise BadInput("there is no word to tag", "give a file with a sentence per row")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # The place of a word stands for its tag: it tells which words have an output.
    places = [np.arange(len(row)) for row in rows]
    chances, facts, tokens = _mean(
        folders,
        device,
        lambda exported: tokenize_words(
            exported.tokenizer, rows, places, max_length=exported.facts["max_length"]
        ),
    )
    names = facts["classes"]
    there = {(row, word): at for at, (row, word) in enumerate(tokens.truth.tolist())}
    if lost := sum(map(len, rows)) - len(there):
        what = f"{lost:,} words have no tag: they are beyond the {facts['max_length']} tokens of"
        warnings.warn(f"{what} a sentence, or without any token", TrainfitWarning, stacklevel=2)
    answers = []
    for row, words in enumerate(rows):
        for place, word in enumerate(words):
            at = there.get((row, place))
            best = None if at is None else int(chances[at].argmax())
            tag = {} if best is None else {"tag": names[best], "p": float(chances[at, best])}
            answers.append({"row": numbers[row], "word": word, "tag": None, "p": None} | tag)
    return answers


def _worded(found: list[float], facts: dict[str, Any]) -> dict[str, Any]:
    """Word the outputs of a text: a number, or classes with the probability of each."""
    names, kind = facts["classes"], target_of(facts).problem_type
    if kind == "regression":
        return {"value": found[0]}
    chances = {f"p({name})": chance for name, chance in zip(names, found, strict=True)}
    if kind == "single_label_classification":
        return {"class": names[int(np.argmax(found))], **chances}
    least = facts["thresholds"]
    given = [n for n, chance, low in zip(names, found, least, strict=True) if chance >= low]
    return {"labels": given, **chances}


def _check_pairs(wanted: bool, seconds: Sequence[str] | None) -> None:
    if wanted and seconds is None:
        raise BadInput("the model takes pairs of texts", "give the second with --second, or a file")
    if not wanted and seconds is not None:
        raise BadInput("the model takes one text at a time", "leave the second text out")


def _asked(known: dict[str, str] | None, criterion: str | None) -> dict[str, str] | None:
    """Return the criteria to ask about, by code."""
    if known is None:
        if criterion is not None:
            raise BadInput("the model takes no criterion", "leave --criterion out")
        return None
    if criterion is None:
        return known
    if not criterion.strip():
        raise BadInput("the criterion is empty", f"give one of {', '.join(known)}, or a text")
    return {criterion: known.get(criterion, criterion)}


def _tokenize(
    exported: Exported,
    texts: Sequence[str],
    criteria: Sequence[str] | None,
    seconds: Sequence[str] | None,
) -> Tokens:
    length = exported.facts["max_length"]
    nothing = np.zeros(len(texts), dtype=np.int64)
    if criteria is None:
        return tokenize_texts(
            exported.tokenizer, texts, nothing, seconds=seconds, max_length=length
        )
    own = np.arange(len(texts))
    return tokenize_pairs(exported.tokenizer, texts, criteria, own, own, nothing, max_length=length)
