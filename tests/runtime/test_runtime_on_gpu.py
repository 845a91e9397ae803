"""What only a GPU can show: the arithmetic, the cache, CUDA's random numbers, Inductor."""

from __future__ import annotations

import pytest
import torch

from trainfit.core.plan_records import RuntimeSettings
from trainfit.runtime import applied, compile_model

pytestmark = pytest.mark.gpu
needs_tf32 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0),
    reason="needs a GPU with TF32",
)


def matmul_error() -> float:
    """The relative error of a float32 product against float64."""
    a, b = torch.randn(2, 1024, 1024, device="cuda").unbind()
    exact = a.double() @ b.double()
    return float((a @ b - exact).norm() / exact.norm())


def conv_error() -> float:
    image, weight = (
        torch.randn(8, 64, 32, 32, device="cuda"),
        torch.randn(64, 64, 3, 3, device="cuda"),
    )
    conv = torch.nn.functional.conv2d
    exact = conv(image.double(), weight.double())
    return float((conv(image, weight) - exact).norm() / exact.norm())


@needs_tf32
@pytest.mark.usefixtures("any_tf32")
@pytest.mark.parametrize("error", [matmul_error, conv_error])
def test_tf32_shows_in_the_arithmetic(error: object) -> None:
    assert callable(error)
    torch.set_float32_matmul_precision("medium")
    with applied(RuntimeSettings(tf32=False)):
        assert error() < 1e-5
    with applied(RuntimeSettings(tf32=True)):
        assert 5e-5 < error() < 2e-3


@needs_tf32
@pytest.mark.usefixtures("any_tf32")
@pytest.mark.parametrize("on", [True, False])
def test_inductor_reads_it_without_complaint(on: bool) -> None:
    torch._dynamo.reset()
    torch.backends.fp32_precision = "tf32"  # type: ignore[attr-defined]
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()).cuda()
    x = torch.randn(64, 256, device="cuda")
    with applied(RuntimeSettings(tf32=on)):
        expected = model(x)
        torch.testing.assert_close(compile_model(model)(x), expected, atol=1e-2, rtol=1e-2)
        model(x).sum().backward()


def test_emptying_the_cache_gives_memory_back() -> None:
    torch.cuda.empty_cache()  # else a larger block, in use too, may be cut for it
    held = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    del held
    before = torch.cuda.memory_reserved()
    with applied(RuntimeSettings(empty_cache=True)) as done:
        assert torch.cuda.memory_reserved() <= before - (64 << 20)
    assert done["empty_cache"].after is True
    assert f"{torch.cuda.memory_reserved():,} after" in done["empty_cache"].note


def test_seeds_reach_the_gpu_and_undo_continues_its_draws() -> None:
    torch.rand(3, device="cuda")
    state = torch.cuda.get_rng_state()
    with applied(RuntimeSettings(seed=5)):
        first = torch.rand(3, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), state)
    with applied(RuntimeSettings(seed=5)):
        assert torch.equal(torch.rand(3, device="cuda"), first)


def test_the_preferred_attention_kernel_is_the_one_that_runs() -> None:
    heads = torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.float16)
    attend = torch.nn.functional.scaled_dot_product_attention
    expected = {
        "flash": "flash",
        "efficient": "efficient",
        "math": "_scaled_dot_product_attention_math",
    }
    for kernel, name in expected.items():
        wanted = RuntimeSettings.from_json(f'{{"attention": "{kernel}"}}')
        with applied(wanted), torch.profiler.profile() as seen:
            attend(heads, heads, heads)
        assert any(name in event.key for event in seen.key_averages()), kernel
    with applied(RuntimeSettings(attention="flash")):
        attend(heads.float(), heads.float(), heads.float())


@pytest.mark.alone
def test_memory_beyond_the_cap_is_refused_and_later_given() -> None:
    torch.cuda.empty_cache()
    most = torch.cuda.memory_reserved() / 2**30 + 0.5
    with applied(RuntimeSettings(memory_gib=most)) as done:
        [change] = done.changes
        assert change.done
        torch.empty(2**28, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**30, dtype=torch.uint8, device="cuda")
    torch.empty(2**30, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
