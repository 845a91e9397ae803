"""The jobs' models in the memory estimator, which runs them without values."""

from pathlib import Path
from typing import Any

import pytest

from trainfit.core.plan_records import TaskSpec
from trainfit.planning.estimator.estimate import Answer, Request, Target, ask

pytestmark = pytest.mark.soak
LENGTH, ROWS = 128, 8


def classifier(packed: bool = False, **settings: Any) -> tuple[Any, Any]:
    import torch

    from trainfit.jobs.models.classifier import build_classifier, classification_loss
    from trainfit.jobs.models.classifier_settings import ClassifierSettings

    model = build_classifier(ClassifierSettings(**settings))

    def make_step(built: torch.nn.Module) -> Any:
        trained = [p for p in built.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, fused=True)
        labels = torch.zeros(ROWS, dtype=torch.long)
        if packed:
            ids = torch.full((1, ROWS * LENGTH), 5)
            ends = {"cu_seqlens": torch.arange(0, ROWS * LENGTH + 1, LENGTH, dtype=torch.int32)}
            inputs: dict[str, Any] = {"input_ids": ids, **ends, "max_seqlen": LENGTH}
        else:
            inputs = {"input_ids": torch.full((ROWS, LENGTH), 5)}

        def step() -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = built(**inputs)
            (classification_loss(logits, labels) / ROWS).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    return model, make_step


def gpt(name: str) -> tuple[Any, Any]:
    import torch

    from trainfit.engine.optimizer import parameter_groups
    from trainfit.jobs.models.gpt_model import build_gpt

    model = build_gpt(name)

    def make_step(built: Any) -> Any:
        optimizer = torch.optim.AdamW(parameter_groups(built, 0.1), fused=True)
        batch = {"input_ids": torch.ones(2, LENGTH, dtype=torch.long)}
        batch["targets"] = batch["input_ids"]

        def step() -> None:
            (built(**batch) / (2 * LENGTH)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    return model, make_step


BERT = {"name": "bert-base"}
LAYERS = 4
GEMMA = {
    "name": "gemma-3-1b-it",
    "method": "dora",
    "packed": True,
    "overrides": {"num_hidden_layers": LAYERS},
}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("classifier", BERT),
    "frozen": ("classifier", BERT | {"method": "frozen"}),
    "lora": ("classifier", BERT | {"method": "lora", "lora_rank": 8}),
    "selective": ("classifier", BERT | {"checkpointing": "selective"}),
    "checkpointed": ("classifier", BERT | {"checkpointing": "full"}),
    "packed": ("classifier", GEMMA),
    "gpt": ("gpt", {"name": "gpt-small"}),
}


@pytest.fixture(scope="module")
def answers() -> dict[str, Answer]:
    """All of them from one child process."""
    requests = [
        Request(
            task=TaskSpec(factory=f"{Path(__file__).stem}:{function}", arguments=arguments),
            targets=(Target(sm_count=40, compute_capability="7.5", capacity=16 << 30),),
        )
        for function, arguments in ASKED.values()
    ]
    return dict(zip(ASKED, ask(requests), strict=True))


BACKBONE = 109_482_240 - (768 * 768 + 768)  # bert-base without its pooler
HEAD = 2 * 768 + 2


def test_all_run_without_values_and_without_guesses(answers: dict[str, Answer]):
    assert {name: a.error for name, a in answers.items() if a.error} == {}
    assert all(answer.unknown == {} for answer in answers.values())


def test_a_classifier_has_the_memory_of_its_parts(answers: dict[str, Answer]):
    full, frozen = answers["full"], answers["frozen"]
    parameters = BACKBONE + HEAD
    assert full.gradients == 4 * parameters
    assert 0 <= full.weights - 4 * parameters < 64 * 1024  # its buffers
    assert full.rooms[0].fits
    assert frozen.gradients == 4 * HEAD
    assert frozen.rooms[0].activations < full.rooms[0].activations / 4


def test_checkpointing_keeps_less_and_adapters_train_less(answers: dict[str, Answer]):
    peaks = [
        answers[name].rooms[0].peak_allocated for name in ("checkpointed", "selective", "full")
    ]
    assert peaks == sorted(set(peaks))
    assert answers["lora"].gradients < answers["full"].gradients / 20


def test_a_packed_row_has_all_the_weights(answers: dict[str, Answer]):
    whole, embedding, norm = 999_885_952, 262_144 * 1152, 1152  # of all 26 layers
    layers = LAYERS * (whole - embedding - norm) // 26
    assert answers["packed"].weights > 4 * (embedding + norm + layers)


def test_the_gpt_has_one_embedding_for_both_ends(answers: dict[str, Answer]):
    assert answers["gpt"].gradients == answers["gpt"].weights == 4 * 108_780_288
