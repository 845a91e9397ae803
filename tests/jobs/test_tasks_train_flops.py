"""The operations of a step by formula, against torch counting them one by one."""

from pathlib import Path

import pytest
import torch
from tasks_tiny import TINY, rows, tiny
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trainfit.jobs.flops import encoder_work, step_flops
from trainfit.jobs.models.sources import find


@pytest.mark.parametrize("name", ["bert-base", "modernbert-base", "gemma-3-1b-it"])
@pytest.mark.parametrize("method", ["full", "frozen", "lora"])
def test_products_with_weights_and_attention_are_those_torch_counts(
    name: str, method: str, tmp_path: Path
):
    """On a row without padding the least work is all the work."""
    sizes = TINY[name] | {"sliding_window": 64} if "gemma" in name else TINY[name]
    if name == "modernbert-base":
        sizes = sizes | {"local_attention": 128}
    model = tiny(name, method=method, overrides=sizes, lora_rank=1)
    find(name, "random", sizes)[0].save_pretrained(tmp_path)
    work = encoder_work(str(tmp_path))
    lengths = (16, 16, 16, 16)
    batch = rows(lengths).padded
    # The math kernel is made of products that torch counts; the CPU's fused one is not.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = model(**batch)
        logits.sum().backward()
    expected = step_flops(work, lengths, method)  # type: ignore[arg-type]
    counted = counter.get_total_flops()
    # The head and adapters of rank one are left out; with adapters, so is that the first
    # layer's queries, keys and values hand no gradient on.
    assert expected == pytest.approx(counted, rel=0.1)
    assert expected <= counted or method == "lora"


def test_short_sequences_pay_for_no_window():
    work = encoder_work("modernbert-tiny")
    shape = work.attention
    assert (shape.full_layers, shape.windowed_layers, shape.width) == (1, 1, 64)
    weights = 2 * (4 * 64 * 64 + 3 * 64 * 128)
    assert work.weights == weights
    one = step_flops(work, [3], "full")
    assert one == 3 * (2 * weights * 3 + 4 * 64 * (9 + 9))
    assert torch.isfinite(torch.tensor(one))
