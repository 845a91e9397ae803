"""The operations of a step: against torch counting them, closed formulas, and a foreign loop."""

from typing import Any

import pytest
import torch
from jobs_tiny import TINY, rows, tiny
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma3TextConfig,
    GPT2Config,
    MistralConfig,
    ModernBertConfig,
)

from trainfit.conf import compose
from trainfit.integrations.meter import LoopMeter
from trainfit.jobs.classification import ideal_seconds
from trainfit.jobs.models.gpt_model import GptShape
from trainfit.jobs.models.sources import find
from trainfit.measuring.flops import count_flops

WIDTH, INNER, LAYERS = 32, 48, 3


def on_meta(kind: Any, config: Any) -> torch.nn.Module:
    with torch.device("meta"):
        return kind.from_config(config)


@pytest.mark.parametrize("name", ["bert-base", "modernbert-base", "gemma-3-1b-it"])
@pytest.mark.parametrize("method", ["full", "frozen", "lora"])
def test_products_with_weights_and_attention_are_those_torch_counts(name: str, method: str):
    """On a row without padding, shorter than a window, the least work is all the work."""
    wide = {"gemma-3-1b-it": {"sliding_window": 64}, "modernbert-base": {"local_attention": 128}}
    sizes = TINY[name] | wide.get(name, {})
    model = tiny(name, method=method, overrides=sizes, lora_rank=1)
    lengths = (16, 16, 16, 16)
    # The math kernel is made of products that torch counts; the CPU's fused one is not.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(**rows(lengths).padded).sum().backward()
    # The head is left out and norms are counted.
    expected = count_flops(model.encoder).of_step(lengths)
    assert expected == pytest.approx(counter.get_total_flops(), rel=0.05)


def pairs(length: int, window: int) -> int:
    return sum(abs(i - j) < window for i in range(length) for j in range(length))


@pytest.mark.parametrize("length", [3, 8, 9, 40])
def test_windows_leave_out_the_pairs_out_of_sight(length: int):
    counted = count_flops(tiny("modernbert-base").encoder)
    weights = LAYERS * (4 * WIDTH**2 + 3 * WIDTH * INNER)
    norms = WIDTH * (2 * LAYERS + 1)  # none before the first attention, and a last one
    # local_attention=6: three tokens to each side; every third layer is global.
    seen = 1 * length**2 + 2 * pairs(length, 4)
    by_hand = 6 * (weights + norms) * length + 12 * WIDTH * seen
    assert counted.of_step([length]) == by_hand
    assert counted.of_step([length] * 5) == 5 * by_hand


def test_a_window_in_every_layer_needs_no_layer_types():
    sizes = {"hidden_size": WIDTH, "num_attention_heads": 4, "num_hidden_layers": LAYERS}
    config = MistralConfig(**sizes, intermediate_size=INNER, sliding_window=6, vocab_size=90)
    counted = count_flops(on_meta(AutoModel, config))
    assert (counted.full_layers, counted.windowed_layers, counted.window) == (0, LAYERS, 6)


def metered(model: torch.nn.Module, length: int) -> float:
    """Operations by the meter of a foreign loop: its MFU at a known peak in a known time."""
    clock = iter([0.0, 1.0, 1.0, 1.0, 1.0]).__next__
    meter = LoopMeter(peak_tflops=100.0, clock=clock)
    meter.attach(model, probe=False)
    meter.start()
    meter.count({"input_ids": torch.ones(2, length, dtype=torch.long)})
    return meter.window()["mfu"] * 100e12


@pytest.mark.parametrize("length", [16, 8192])
@pytest.mark.parametrize("name", ["modernbert-base", "gemma-3-1b-it"])
def test_a_job_and_a_foreign_loop_count_the_same(name: str, length: int, monkeypatch: Any):
    config, _ = find(name, "random", {})
    plain = ModernBertConfig if "bert" in name else Gemma3TextConfig
    fields = config.to_dict()
    fields.pop("is_causal", None)  # a config as it is published
    other = on_meta(AutoModelForSequenceClassification, plain(**fields, num_labels=2))
    model = compose("nli", [f"model.name={name}", "model.freeze_encoder=false"]).config.model
    monkeypatch.setattr("trainfit.measuring.flops.peak_of", lambda *_: 100.0)
    seconds = ideal_seconds(model, _Plan)  # type: ignore[arg-type]
    assert seconds is not None
    assert metered(other, length) == pytest.approx(seconds([length] * 2) * 100e12, rel=1e-12)


class _Plan:
    precision, gpu, ranks = "bf16", "h200", 1

    class runtime:
        tf32 = True

    class workload:
        method = "full"


@pytest.mark.parametrize("length", [16, 1024])
def test_a_gpt_and_transformers_gpt2_count_the_same(length: int):
    shape = GptShape(vocab_size=50304, block_size=1024, n_layer=12, n_head=12, n_embd=768)
    other = on_meta(AutoModelForCausalLM, GPT2Config(vocab_size=50304))
    per_token = 6 * 123_587_328 + 12 * 12 * 768 * length
    assert shape.flops.of_step([length] * 2) == per_token * 2 * length
    assert metered(other, length) == pytest.approx(per_token * 2 * length, rel=1e-12)


def test_modernbert_at_8192_tokens_is_not_charged_for_full_attention():
    model = on_meta(AutoModel, ModernBertConfig())
    counted = count_flops(model)
    assert (counted.full_layers, counted.windowed_layers, counted.window) == (8, 14, 65)
    products = 6 * counted.weights * 8192
    everywhere = products + 12 * 768 * 22 * 8192**2
    assert everywhere / counted.of_step([8192]) == pytest.approx(1.8, abs=0.1)
