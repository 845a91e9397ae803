"""Variable-length attention, with the kernel's part played by its definition on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_reference import forward as reference_forward
from kernels_reference import install_efficient, install_reference
from kernels_tiny import FILLER, TINY, logits_and_gradients, packed, tiny

from trainfit.kernels import attention
from trainfit.kernels.attention import Layout, MaskedAttention, lay_out, masked_attention
from trainfit.kernels.efficient_packed import efficient_attention
from trainfit.kernels.varlen import VarlenAttention, varlen_attention
from trainfit.measuring.evidence import attention_of
from trainfit.measuring.trace import Profiling

CALL: dict[str, Any] = {"scaling": None, "dropout": 0.0, "windowed": False, "softcap": None}
LENGTHS = (5, 33, 1, 40, 9)


@pytest.fixture
def by_length(reference_kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models take the variable-length path in float32, which no real kernel does."""

    def choose(layout: Layout, window: int | None, *, dtype: torch.dtype, **_: Any) -> Any:
        return varlen_attention(layout, window, dtype)

    monkeypatch.setattr(attention, "choose", choose)


@st.composite
def rows(draw: st.DrawFn) -> tuple[Layout, int | None]:
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    filler = draw(st.integers(0, 25))
    width = max(1, sum(lengths) + filler)
    longest = max(1, *lengths, draw(st.integers(1, 30)))
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    layout = lay_out(torch.zeros(1, width, dtype=torch.long), cu_seqlens=starts, max_seqlen=longest)
    return layout, draw(st.none() | st.integers(1, 12))


KERNELS: dict[Any, Any] = {"varlen": install_reference, "varlen_efficient": install_efficient}


@settings(max_examples=100)
@given(
    rows(),
    st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(list(KERNELS)),
)
def test_every_real_token_is_attended_as_under_the_mask(
    row: tuple[Layout, int | None],
    heads: tuple[int, int],
    windowed: bool,
    causal: bool,
    kernel: Any,
) -> None:
    layout, window = row
    if kernel == "varlen_efficient" and not causal and window is not None:
        window = max(window, layout.max_seqlen)  # others are refused
    width, real = layout.ids.shape[1], int(layout.lengths.sum())
    generator = torch.Generator().manual_seed(width)
    parts = [
        torch.randn(1, count, width, 8, generator=generator, requires_grad=True)
        for count in (heads[0], heads[1], heads[1])
    ]
    library = KERNELS[kernel]()
    try:
        call = CALL | {"scaling": 0.7, "windowed": windowed}
        module = torch.nn.Module()
        module.num_key_value_groups = heads[0] // heads[1]
        by_length = varlen_attention(layout, window, torch.float32, causal=causal, kernel=kernel)
        fast = by_length(module, *parts, **call)
        slow = masked_attention(layout, window, causal=causal)(module, *parts, **call)
        assert fast.shape == slow.shape == (1, width, heads[0], 8)
        assert fast.isfinite().all()
        torch.testing.assert_close(fast[:, :real], slow[:, :real])
        weights = torch.randn(fast[:, :real].shape, generator=generator)
        gradients = [
            torch.autograd.grad((out[:, :real] * weights).sum(), parts) for out in (fast, slow)
        ]
        for quick, sure in zip(*gradients, strict=True):
            torch.testing.assert_close(quick, sure)
            assert (quick[:, :, real:] == 0).all()  # nothing from the filler, nor to it
    finally:
        library._destroy()


@given(rows())
def test_the_sequences_cover_the_row_and_none_is_longer_than_announced(
    row: tuple[Layout, int | None],
) -> None:
    layout, window = row
    made = varlen_attention(layout, window, torch.bfloat16)
    assert layout.cu_seqlens is not None
    sequences = made.starts.diff()
    assert (made.starts.dtype, made.starts[-1].item()) == (torch.int32, layout.ids.shape[1])
    assert torch.equal(made.starts[: layout.sequences + 1], layout.cu_seqlens)
    assert sequences.min() >= 0
    assert sequences.max() <= made.longest <= layout.max_seqlen


@pytest.mark.parametrize("name", TINY)
def test_models_are_those_of_the_masked_path(name: str, request: pytest.FixtureRequest) -> None:
    model, batch = tiny(name), packed(LENGTHS, filler=100)
    sure, slopes = logits_and_gradients(model, batch)
    request.getfixturevalue("by_length")
    quick, slants = logits_and_gradients(model, batch)
    torch.testing.assert_close(quick, sure, rtol=1e-4, atol=1e-4)
    assert slants.keys() == slopes.keys()
    for part in slopes:
        torch.testing.assert_close(slants[part], slopes[part], rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("by_length")
@pytest.mark.parametrize("name", TINY)
def test_no_gradient_from_the_filler(name: str) -> None:
    model = tiny(name)
    _, gradients = logits_and_gradients(model, packed(LENGTHS, filler=100))
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    embedding = model.encoder.get_input_embeddings().weight.grad
    assert (embedding[FILLER] == 0).all()
    assert (embedding[2:FILLER] != 0).any()


def test_dropout_takes_the_operator_that_has_it_with_the_same_rows() -> None:
    """A stand-in drops nothing and notes what it was asked; the gradient's state is torch's."""
    batch = packed(LENGTHS, filler=7)
    made = varlen_attention(lay_out(**batch), 9, torch.float32)
    part = torch.randn(1, 2, batch["input_ids"].shape[1], 8, requires_grad=True)
    asked: list[Any] = []

    def stand_in(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
        asked.append((rest[4], options))
        window = [options["window_size_left"], options["window_size_right"]]
        found = reference_forward(query, key, value, *rest[:4], rest[5], options["scale"], window)
        return *found, torch.zeros((), dtype=torch.uint64), query.new_empty(0)

    library: Any = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", stand_in, "CPU")
    reference = install_reference()
    try:
        call = CALL | {"scaling": 0.3, "windowed": True}
        sure = made(torch.nn.Module(), part, part, part, **call)
        found = made(torch.nn.Module(), part, part, part, **call | {"dropout": 0.25})
    finally:
        library._destroy()
        reference._destroy()
    assert torch.equal(found, sure)
    assert asked[0][0] == 0.25
    assert "FlashAttentionBackward" in found.grad_fn.next_functions[0][0].name()


def test_the_memory_efficient_kernel_is_seen_by_its_operator() -> None:
    batch = packed(LENGTHS, filler=7)
    made = varlen_attention(lay_out(**batch), None, torch.float32, kernel="varlen_efficient")
    part = torch.randn(1, 2, batch["input_ids"].shape[1], 8, requires_grad=True)
    library = install_efficient()
    try:
        profiling = Profiling()
        made(torch.nn.Module(), part, part, part, **CALL).sum().backward()
        seen = attention_of(profiling.end())
    finally:
        library._destroy()
    assert seen.calls == {"varlen_efficient": 1}


@pytest.mark.soak
def test_the_memory_efficient_operation_is_a_proper_one() -> None:
    """torch's own checks: its schema, its fake tensors and its gradient in a compiled graph."""
    starts = torch.tensor([0, 5, 12], dtype=torch.int32)
    parts = [torch.randn(12, 2, 8, requires_grad=True) for _ in range(3)]
    library = install_efficient()
    try:
        torch.library.opcheck(efficient_attention, (*parts, starts, 7, 0.3, 0, False))
        torch.library.opcheck(efficient_attention, (*parts, starts, 7, 0.3, 3, True))
    finally:
        library._destroy()


@pytest.mark.usefixtures("reference_kernel")
def test_autocast_decides_the_dtype_whatever_arrives() -> None:
    layout = lay_out(**packed(LENGTHS))
    part = torch.ones(1, 2, sum(LENGTHS), 8)
    with torch.autocast("cpu", torch.float16):
        made = attention.choose(layout, None, path="varlen", dtype=torch.float32, head=8)
        out = made(torch.nn.Module(), part, part.half(), part, **CALL)
    assert isinstance(made, VarlenAttention)
    assert out.dtype == torch.float16


@pytest.mark.usefixtures("by_length")
@pytest.mark.soak
@pytest.mark.parametrize("name", ["bert-base", "gemma-3-1b-it"])
def test_it_compiles_to_one_graph(name: str) -> None:
    torch.compiler.reset()
    model, batch = tiny(name), packed(LENGTHS, filler=7)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for quick, sure in zip(
        logits_and_gradients(compiled, batch)[1].values(),
        logits_and_gradients(model, batch)[1].values(),
        strict=True,
    ):
        torch.testing.assert_close(quick, sure)
    torch.compiler.reset()


@pytest.mark.usefixtures("reference_kernel")
def test_the_choice_itself_is_no_break_in_the_graph() -> None:
    seen: list[str] = []

    def stop(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        raise InterruptedError  # half precision is not to be computed here

    torch.compiler.reset()
    model = tiny("modernbert-base", attention="varlen")
    compiled = torch.compile(model, fullgraph=True, backend=stop)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(Exception, match="Interrupted"):
        compiled(**packed(LENGTHS, filler=7))
    assert sum("_varlen_attn" in name for name in seen) == 2
    torch.compiler.reset()


@pytest.mark.parametrize("made", [VarlenAttention, MaskedAttention])
def test_a_graph_can_hold_it_before_its_fields_are_there(made: type) -> None:
    assert hash(object.__new__(made)) is not None
