"""Steps of real models as CUDA graphs: the same bits as eager steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_toy import final_bits

from trainfit.core.plan_records import RuntimeSettings
from trainfit.core.records import TrainTask
from trainfit.data.tokens import from_lists
from trainfit.engine.loop import train
from trainfit.engine.loop_settings import LoaderSettings, LoopSettings, OptimizerSettings
from trainfit.jobs.classification import ClassifierTask
from trainfit.jobs.models.classifier import build_classifier
from trainfit.jobs.models.classifier_settings import ClassifierSettings
from trainfit.jobs.models.gpt_model import Gpt, GptShape
from trainfit.jobs.pretraining import GptTask
from trainfit.jobs.targets import WordTags
from trainfit.measuring.receipt import EVIDENCE
from trainfit.measuring.trace import Evidence
from trainfit.packing import ladder
from trainfit.runtime import applied

pytestmark = pytest.mark.gpu

_IDS = {"pad_token_id": 0, "bos_token_id": 0, "cls_token_id": 0, "eos_token_id": 1}
_SIZE = {"vocab_size": 90, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
_HEADS = _SIZE | {"num_attention_heads": 2}
_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
_GEMMA = {"num_key_value_heads": 1, "head_dim": 64, "query_pre_attn_scalar": 64}
MODELS: dict[str, dict[str, Any]] = {
    "bert-base": {"overrides": _HEADS},
    "deberta-v3-base": {"overrides": _HEADS},
    "modernbert-base": {"overrides": _HEADS | _IDS | {"sep_token_id": 1, "local_attention": 32}},
    "gemma-3-1b-it": {
        "overrides": _HEADS | _GEMMA | _KINDS | {"sliding_window": 32},
        "method": "dora",
        "lora_dropout": 0.1,
        "dtype": "bfloat16",
    },
}
for _kind in ("nf4", "int8"):
    MODELS[_kind] = MODELS["gemma-3-1b-it"] | {"name": "gemma-3-1b-it", "quantization": _kind}


def classifier(name: str) -> TrainTask:
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 60, 72)
    tokens = from_lists(
        [rng.integers(2, 80, n).tolist() for n in lengths], rng.integers(0, 2, lengths.size)
    )
    chosen = {"attention_dropout": 0.0, "feed_forward_dropout": 0.1, "head_dropout": 0.1}
    settings = ClassifierSettings(**({"name": name, "classes": 2} | chosen | MODELS[name]))
    return ClassifierTask(
        lambda: build_classifier(settings),
        tokens,
        tokens.subset(range(16)),
        effective_batch=16,
        class_weights=(0.7, 1.9),
    )


def tagged() -> TrainTask:
    """Every second token has a tag."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 60, 72)
    counts = (lengths + 1) // 2
    tokens = from_lists([rng.integers(2, 80, n).tolist() for n in lengths], counts)
    parts = [
        rng.integers(0, 5, n) * (1 - np.arange(n) % 2) - 100 * (np.arange(n) % 2) for n in lengths
    ]
    tokens = replace(tokens, tags=np.concatenate(parts).astype(np.int32))
    settings = ClassifierSettings(
        name="bert-base",
        classes=5,
        words=True,
        pooling="auto",
        attention_dropout=0.0,
        **MODELS["bert-base"],
    )
    return ClassifierTask(
        lambda: build_classifier(settings),
        tokens,
        tokens.subset(range(16)),
        effective_batch=16,
        target=WordTags(("O", "B-A", "I-A", "B-B", "I-B")),
    )


def gpt() -> TrainTask:
    shape = GptShape(vocab_size=96, block_size=32, n_layer=2, n_head=2, n_embd=64, dropout=0.1)
    tokens = np.random.default_rng(0).integers(0, 90, 32 * 72 + 1).astype(np.uint16)
    return GptTask(
        lambda: Gpt(shape),
        tokens,
        tokens,
        block_size=32,
        effective_batch=16,
        evaluated=8,
    )


TASKS: dict[str, Callable[[], TrainTask]] = {name: lambda n=name: classifier(n) for name in MODELS}
TASKS["gpt"] = gpt
TASKS["tokens"] = tagged


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", TASKS)
def test_captured_steps_have_the_bits_of_eager_ones(
    tmp_path: Path, name: str, micro_batches: int
) -> None:
    task = TASKS[name]()
    settings = LoopSettings(
        epochs=3.0,
        device="cuda",
        precision="bf16",
        cuts=ladder(task.lengths(), 16, 16 * 64, padded=name == "gpt", at_least=micro_batches),
        optimizer=OptimizerSettings(learning_rate=1e-3),
        eval_batch_size=16,
        keep_checkpoints=1,
        profile_step=False,
        cuda_graph=True,
    )
    with applied(RuntimeSettings(deterministic=True)):
        result = train(task, settings, tmp_path / "graph")
        train(TASKS[name](), replace(settings, cuda_graph=False), tmp_path / "eager")
    assert [e.text for e in result.events if "replayed as one CUDA graph" in e.text]
    assert not [e.text for e in result.events if "not captured" in e.text]
    assert final_bits(tmp_path / "graph") == final_bits(tmp_path / "eager")
    torch.cuda.empty_cache()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["bert-base", "tokens"])
def test_data_on_the_gpu_gives_the_bits_of_loader_processes(
    tmp_path: Path, name: str, padded: bool
) -> None:
    task = TASKS[name]()
    settings = LoopSettings(
        epochs=3.0,
        device="cuda",
        precision="bf16",
        cuts=ladder(task.lengths(), 16, 16 * 64, padded=padded),
        optimizer=OptimizerSettings(learning_rate=1e-3),
        loader=LoaderSettings(on_gpu=True, num_workers=2, pin_memory=True),
        eval_batch_size=16,
        keep_checkpoints=1,
        cuda_graph=True,
    )
    host = replace(settings, loader=replace(settings.loader, on_gpu=False))
    with applied(RuntimeSettings(deterministic=True)):
        train(task, settings, tmp_path / "gpu")
        train(TASKS[name](), host, tmp_path / "host")
    assert final_bits(tmp_path / "gpu") == final_bits(tmp_path / "host")
    there, here = (Evidence.load(tmp_path / n / EVIDENCE).batches for n in ("gpu", "host"))
    assert (there.workers, there.tensors) == (0, 0)
    assert there.on_gpu > 0
    assert (here.workers, here.on_gpu) == (2, 0)
    assert there.tokens == here.tokens
