"""Each switch by itself: what torch does with it, and what is left as it was."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from trainfit.core.errors import BadInput
from trainfit.core.plan_records import RuntimeSettings
from trainfit.runtime import applied

Observe = Callable[[], dict[str, Any]]
BACKENDS: Any = torch.backends


def medium() -> None:
    torch.set_float32_matmul_precision("medium")


def all_tf32() -> None:
    BACKENDS.fp32_precision = "tf32"  # what transformers' enable_tf32 does


def all_ieee() -> None:
    BACKENDS.fp32_precision = "ieee"


def new_matmul_only() -> None:
    BACKENDS.cuda.matmul.fp32_precision = "tf32"


def old_cudnn_off() -> None:
    BACKENDS.cudnn.allow_tf32 = False


def conv_and_rnn_apart() -> None:
    BACKENDS.cudnn.conv.fp32_precision = "ieee"


def new_cudnn_off() -> None:
    BACKENDS.cudnn.conv.fp32_precision = BACKENDS.cudnn.rnn.fp32_precision = "ieee"


def new_cudnn_on() -> None:
    BACKENDS.cudnn.allow_tf32 = False
    BACKENDS.cudnn.conv.fp32_precision = BACKENDS.cudnn.rnn.fp32_precision = "tf32"


def cuda_tf32_under_ieee() -> None:
    BACKENDS.fp32_precision = "ieee"
    BACKENDS.cudnn.fp32_precision = "tf32"


PRIOR_STATES: list[Callable[[], None]] = [
    lambda: None,
    medium,
    all_tf32,
    all_ieee,
    new_matmul_only,
    old_cudnn_off,
    conv_and_rnn_apart,
    new_cudnn_off,
    new_cudnn_on,
    cuda_tf32_under_ieee,
]


@pytest.mark.usefixtures("any_tf32")
@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("prior", PRIOR_STATES, ids=lambda prior: prior.__name__)
def test_tf32_is_the_same_to_every_reader(
    observe: Observe, prior: Callable[[], None], on: bool
) -> None:
    prior()
    before = observe()
    with applied(RuntimeSettings(tf32=on)) as done:
        assert torch.backends.cuda.matmul.allow_tf32 is on
        assert torch.backends.cudnn.allow_tf32 is on
        assert torch.get_float32_matmul_precision() == ("high" if on else "highest")
        for part in (BACKENDS.cuda.matmul, BACKENDS.cudnn, BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn):
            assert part.fp32_precision == ("tf32" if on else "ieee")
        assert BACKENDS.mkldnn.matmul.fp32_precision == "ieee"
        assert done["tf32"].after is on
    assert observe() == before


@pytest.mark.usefixtures("any_tf32")
def test_tf32_off_stays_off_when_something_turns_everything_on() -> None:
    with applied(RuntimeSettings(tf32=False)):
        all_tf32()
        assert torch.backends.cuda.matmul.allow_tf32 is False
        assert torch.backends.cudnn.allow_tf32 is False
        BACKENDS.fp32_precision = "none"


@pytest.mark.usefixtures("any_tf32")
@pytest.mark.parametrize("own", ["tf32", "none"])
def test_undo_tells_a_value_from_an_inherited_one(own: str) -> None:
    all_tf32()
    BACKENDS.cuda.matmul.fp32_precision = own
    with applied(RuntimeSettings(tf32=False)):
        pass
    assert BACKENDS.cuda.matmul.fp32_precision == "tf32"
    all_ieee()
    assert BACKENDS.cuda.matmul.fp32_precision == ("tf32" if own == "tf32" else "ieee")


FROM_THE_START = """
import json, torch
from trainfit.core.plan_records import RuntimeSettings
from trainfit.runtime import applied
def reads():
    cudnn = torch.backends.cudnn
    return [cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision]
torch.backends.fp32_precision = {level!r}
before = reads()
with applied(RuntimeSettings(tf32={on})):
    pass
after = reads()
torch.backends.fp32_precision = "ieee"
print(json.dumps([before, after, reads()]))
"""


def test_undo_keeps_what_conv_and_rnn_inherit(afresh: Callable[..., Any]) -> None:
    before, after, _ = afresh(FROM_THE_START.format(level="ieee", on=False))
    assert after == before


@pytest.mark.soak
def test_undo_keeps_the_defaults_that_torch_starts_with(afresh: Callable[..., Any]) -> None:
    *_, later = afresh(FROM_THE_START.format(level="none", on=True))
    *_, untouched = afresh(FROM_THE_START.format(level="none", on=None))
    assert later == untouched


def test_before_says_where_tf32_was_on() -> None:
    with applied(RuntimeSettings(tf32=True)) as done:
        assert done["tf32"].before == "conv and rnn only"


def test_deterministic_sets_all_that_belongs_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    with applied(RuntimeSettings(deterministic=True)) as done:
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.backends.cudnn.deterministic is True
        assert torch.backends.cudnn.benchmark is False
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert done["deterministic"].done
    assert torch.backends.cudnn.benchmark is True
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    torch.backends.cudnn.benchmark = before


def test_deterministic_really_makes_torch_refuse() -> None:
    def nondeterministic() -> None:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)

    nondeterministic()
    with (
        applied(RuntimeSettings(deterministic=True)),
        pytest.raises(RuntimeError, match="deterministic"),
    ):
        nondeterministic()
    nondeterministic()


def test_deterministic_restores_a_warning_that_was_asked_for() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    with applied(RuntimeSettings(deterministic=False)):
        assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_deterministic_debug_mode() == 1
    torch.use_deterministic_algorithms(False)


def test_a_reproducible_workspace_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with applied(RuntimeSettings(deterministic=True)):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_started_cuda_gets_a_note_and_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with applied(RuntimeSettings(deterministic=True)) as done:
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    assert "already started" in done["deterministic"].note


def test_the_benchmark_gives_way_to_determinism() -> None:
    with applied(RuntimeSettings(deterministic=True, cudnn_benchmark=True)) as done:
        assert torch.backends.cudnn.benchmark is False
    assert not done["cudnn_benchmark"].done
    assert "deterministic" in done["cudnn_benchmark"].note
    with applied(RuntimeSettings(cudnn_benchmark=True)):
        assert torch.backends.cudnn.benchmark is True


ORDER = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@pytest.mark.parametrize("kernel", ORDER)
def test_attention_is_a_preference_and_every_fallback_stays(kernel: str) -> None:
    before = torch._C._get_sdp_priority_order()
    with applied(RuntimeSettings.from_json(f'{{"attention": "{kernel}"}}')) as done:
        order = torch._C._get_sdp_priority_order()
        assert order[0] == int(ORDER[kernel])
        rest = [backend for backend in before if backend != order[0]]
        assert order[1:] == rest
        assert torch.backends.cuda.math_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.mem_efficient_sdp_enabled()
        assert torch.backends.cuda.cudnn_sdp_enabled()
        assert done["attention"].after == kernel
        heads = torch.rand(1, 1, 4, 8)
        torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)


def test_what_was_compiled_for_another_kernel_is_not_taken_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own key leaves the preference out: the second program would run the first's."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    heads = torch.randn(1, 2, 32, 16)

    def attend(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    def found_on_disk(kernel: str) -> int:
        torch.compiler.reset()
        counters.clear()
        with applied(RuntimeSettings.from_json(f'{{"attention": "{kernel}"}}')):
            torch.compile(attend)(heads)
        return int(counters["aot_autograd"]["autograd_cache_hit"])

    assert [found_on_disk(kernel) for kernel in ("flash", "math", "math")] == [0, 0, 1]


def test_attention_leaves_what_the_user_disabled(observe: Observe) -> None:
    torch.backends.cuda.enable_flash_sdp(False)
    before = observe()
    with applied(RuntimeSettings(attention="math")):
        assert not torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.mem_efficient_sdp_enabled()
    assert observe() == before
    with applied(RuntimeSettings(attention="flash")):
        assert torch.backends.cuda.flash_sdp_enabled()
    assert observe() == before
    torch.backends.cuda.enable_flash_sdp(True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a torch that has not started CUDA")
def test_without_cuda_there_is_no_cache_to_empty() -> None:
    with applied(RuntimeSettings(empty_cache=True)) as done:
        pass
    assert "not started" in done["empty_cache"].note
    with applied(RuntimeSettings(empty_cache=False)) as done:
        assert done.changes == ()


def test_a_bound_of_memory_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with applied(RuntimeSettings(memory_gib=8)) as done:
        [change] = done.changes
    assert not change.done
    assert "no GPU" in change.note


def test_the_bound_is_a_share_of_the_gpu_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    share = [1.0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: share[-1])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", share.append)
    with applied(RuntimeSettings(memory_gib=8)) as done:
        [change] = done.changes
        assert share[-1] == pytest.approx(0.1)
        assert (change.before, change.after, change.done) == (80.0, 8, True)
    assert share[-1] == 1.0
    with pytest.raises(BadInput, match="memory_gib is 0"), applied(RuntimeSettings(memory_gib=0)):
        pass
