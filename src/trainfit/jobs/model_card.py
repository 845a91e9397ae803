"""Model card of an export: data as counts, scores with intervals, settings, hardware, and use.

It is written from records and holds no text of the data; names of classes are in the model too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trainfit.conf import Composed
from trainfit.core import codec
from trainfit.core.errors import printable
from trainfit.core.plan_records import Plan
from trainfit.core.records import HardwareProfile
from trainfit.data.tokens import Dataset, separates
from trainfit.jobs.configuration import Chosen
from trainfit.jobs.metrics import DRAWS, Metrics, ends_of, has_spans
from trainfit.jobs.models.building import OwnHead
from trainfit.jobs.models.classifier import EncoderClassifier
from trainfit.jobs.scores import FoldScores
from trainfit.jobs.standard_export import hub_name

_TRAINING = ("num_epochs", "learning_rate", "weight_decay", "scheduler", "warmup_ratio")
_PARTS = ("train", "validation", "test")
_POOLED = {
    "none": "hidden",
    "mean": "hidden.mean(1)",
    "first": "hidden[:, :{k}].mean(1)",
    "last": "hidden[:, -{k}:].mean(1)",
    "max": "hidden.amax(1)",
}
"""Poolings without weights, as code."""
_STANDARD = """from transformers import pipeline

classify = pipeline("text-classification", ".", top_k=None)
print(classify({text}, truncation=True))
"""
_NUMBER = """from transformers import pipeline

number = pipeline("text-classification", ".", function_to_apply="none")
print(number([{text}], truncation=True)[0]["score"] * {std!r} + {mean!r})
"""
_TAGS = """from transformers import pipeline

tag = pipeline("token-classification", "."{joined})
print(tag("a text"))
"""
_APART = """import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
encoder = AutoModel.from_pretrained("./encoder").eval()
{adapter}head = load_file("head.safetensors")
tokens = tokenizer({texts}, truncation=True, max_length={length}, return_tensors="pt")
with torch.no_grad():
    hidden = encoder(**tokens).last_hidden_state.float()
logits = {pooled} @ head["head.weight"].T + head["head.bias"]
print({shown})
"""


def fold_card(
    composed: Composed,
    chosen: Chosen,
    dataset: Dataset,
    model: EncoderClassifier,
    judged: FoldScores,
    facts: Mapping[str, Any],
    plan: Plan,
    profile: HardwareProfile,
) -> str:
    """Return the card of the model of a fold, or of the only one, as Markdown."""
    config: Any = composed.config
    how, data = model.settings, dataset.metadata
    trained = {name: getattr(config.training, name) for name in _TRAINING}
    rounded = {} if how.quantization == "none" else {"quantization": how.quantization}
    settings = {"method": how.method, **rounded, "pooling": how.pooling, "seed": config.seed}
    settings |= trained
    base = None if chosen.weights == "random" else hub_name(config.model.name)
    code = code_for(
        facts,
        standard=isinstance(model.head, OwnHead),
        how=codec.encode(how),
        separated=separates(chosen.tokenizer),
    )
    kind = "token" if facts.get("problem_type") == "token_classification" else "text"
    known = {"library_name": "transformers", "pipeline_tag": f"{kind}-classification"}
    known |= {} if base is None else {"base_model": base}
    head = "\n".join(f"{name}: {json.dumps(value)}" for name, value in known.items())
    started = f" from [{base}](https://huggingface.co/{base})" if base else ""
    counts = [(part, data[part]) for part in _PARTS if part in data]
    parts = [
        f"---\n{head}\ntags: [trainfit]\n---\n",
        f"# {composed.task}\n\nTrained{started} by trainfit {codec.own_version()}.\n",
        f"## Use\n\nFrom this folder:\n\n```python\n{code}```\n",
        f"## Data\n\n{_table(*_data(counts, facts))}",
        f"## Scores\n\nOn {judged.overall.count:,} held-out items.\n\n{_table(*_scores(judged))}",
        f"## Training\n\n{_table(('setting', 'value'), _settings(settings, plan))}",
        f"## Hardware\n\n{_machine(profile, plan)}, {judged.seconds:,.0f} s of training.\n",
        "## Licence\n\nNot stated: choose one that those of the model it was made from and of the "
        "data allow.\n",
    ]
    return "\n".join(parts)


def code_for(
    facts: Mapping[str, Any], *, standard: bool, how: Mapping[str, Any], separated: bool = True
) -> str:
    """Return Python code that uses an export, from its folder, without trainfit.

    `how` are the fields of ClassifierSettings. A pooling with weights of its own needs trainfit.
    Two texts that the tokenizer does not keep `separated` have a new line between them.
    """
    first, second = '"a text"', f'"{"" if separated else chr(92) + "n"}another text"'
    paired = bool(facts.get("pairs"))
    text = f'{{"text": {first}, "text_pair": {second}}}' if paired else first
    if standard and facts.get("problem_type") == "regression":
        return _NUMBER.format(text=text, std=facts["target_std"], mean=facts["target_mean"])
    if standard and facts.get("problem_type") == "token_classification":
        joined = ', aggregation_strategy="first"' if has_spans(facts["classes"]) else ""
        return _TAGS.format(joined=joined)
    if standard:
        return _STANDARD.format(text=text)
    pooled = _POOLED.get(how["pooling"])
    if pooled is None:
        return (
            f'# trainfit predict RUN --text "a text"  # the pooling {how["pooling"]} is its own\n'
        )
    adapter = 'encoder = peft.PeftModel.from_pretrained(encoder, "./adapter").eval()\n'
    shown = "logits"
    if facts.get("problem_type") == "regression":
        shown = f"logits * {facts['target_std']!r} + {facts['target_mean']!r}"
    code = _APART.format(
        adapter=adapter if how["method"] in ("lora", "dora") else "",
        texts=f"{first}, {second}" if paired or "criteria" in facts else first,
        length=facts["max_length"],
        pooled=pooled.format(k=how["pool_tokens"]),
        shown=shown,
    )
    return f"import peft\n{code}" if how["method"] in ("lora", "dora") else code


def intervals(confusion: Sequence[Sequence[int]]) -> dict[str, tuple[float, float]]:
    """Bootstrap the accuracy and the F1, 95%, by resampling the table of counts.

    F1 is that of the second of two classes, or the mean over more, as in the scores.
    """
    table = np.asarray(confusion, dtype=np.float64)
    total, classes = table.sum(), len(table)
    draws = np.random.default_rng(0).multinomial(int(total), table.ravel() / total, DRAWS)
    drawn = draws.reshape(DRAWS, classes, classes)
    right = np.einsum("dkk->dk", drawn)
    both = drawn.sum(1) + drawn.sum(2)
    f1 = 2 * right / np.maximum(both, 1)
    seen = np.maximum((both > 0).sum(1), 1)  # no class that is neither there nor predicted
    mean = f1[:, 1] if classes == 2 else f1.sum(1) / seen
    return {"accuracy": ends_of(right.sum(1) / total), "f1": ends_of(mean)}


Rows = Iterable[Sequence[str]]


def _table(columns: Sequence[str], rows: Rows) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(_cell(cell) for cell in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(printable(text).replace("|", "\\|").replace("<", "\\<").split())


def _data(
    counts: Sequence[tuple[str, Mapping[str, Any]]], facts: Mapping[str, Any]
) -> tuple[Sequence[str], Rows]:
    """Count the items of each part, in all and by class."""
    names = [str(name) for name in facts["classes"]]
    by_class = all(len(one.get("by_class", ())) == len(names) for _, one in counts)
    items = "sentences" if any("words" in one for _, one in counts) else "items"
    columns = ["part", items, "longest, in tokens", *(names if by_class else [])]
    rows = [
        [
            part,
            f"{one.get('texts', one.get('pairs', 0)):,}",
            f"{one.get('longest', 0):,}",
            *(f"{count:,}" for count in (one["by_class"] if by_class else ())),
        ]
        for part, one in counts
    ]
    return columns, rows


def _scores(judged: FoldScores) -> tuple[Sequence[str], Rows]:
    overall = judged.overall
    # Answers about one post are not independent, and a table of counts does not tell them apart.
    alone = isinstance(overall, Metrics) and overall.confusion and not judged.by_criterion
    ends = judged.ci95
    if alone and not ends and isinstance(overall, Metrics):
        ends = intervals(overall.confusion)
    rows = [
        [name, f"{value:.4f}", "–".join(f"{end:.4f}" for end in ends.get(name, ()))]
        for name, value in overall.scalars().items()
    ]
    return ("metric", "value", "95% interval"), rows


def _settings(settings: Mapping[str, Any], plan: Plan) -> Rows:
    planned = {
        "effective batch size": plan.effective_batch_size,
        "precision": plan.precision,
        "optimizer": plan.optimizer,
        "rows": "packed" if plan.packed else "padded",
    }
    return [[name, str(value)] for name, value in {**settings, **planned}.items()]


def _machine(profile: HardwareProfile, plan: Plan) -> str:
    if plan.device == "cuda" and profile.gpu is not None:
        return f"{plan.ranks} × {profile.gpu.name}"
    return f"{profile.cpu.name}, {profile.cpu.cores} cores"
