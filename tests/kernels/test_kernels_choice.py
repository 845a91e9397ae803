"""Which attention a batch gets: a table of what the kernel can do, and what is said otherwise."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kernels_tiny import packed, padded, tiny

from trainfit.core.errors import BadInput
from trainfit.kernels import attention, varlen
from trainfit.kernels.attention import MaskedAttention, lay_out
from trainfit.kernels.varlen import PackedRows, VarlenAttention, kernel_for

HALF = (torch.float16, torch.bfloat16)
CAN: dict[str, Any] = {"capability": (8, 0), "dtype": torch.bfloat16, "head": 64}
OLD: dict[str, Any] = {"capability": (7, 5), "dtype": torch.float16}
CANNOT: list[tuple[dict[str, Any], str]] = [
    ({"capability": (7, 5)}, "needs 8.0 in bfloat16"),
    ({"capability": (3, 7), "dtype": torch.float16}, "needs 5.0 in float16"),
    ({"dtype": torch.float64}, "does not compute in float64"),
    ({"head": 512}, "heads of 512"),
    ({"head": 60}, "heads of 60"),
    (OLD | {"window": 65, "longest": 66}, "no sliding window that reaches both ways"),
    (OLD | {"dropout": 0.1}, "no attention dropout 0.1"),
    (
        {"dropout": 0.1, "head": 256, "capability": (8, 9)},
        "takes no attention dropout 0.1 with heads of 256",
    ),
    (OLD | {"window": 65}, "no sliding window that reaches both ways"),
    ({"softcap": 50.0, "head": 96}, "soft-capped at 50.0, and it has heads of 96"),
    ({"softcap": 50.0, "causal": True}, "sees those before it alone"),
    ({"softcap": 50.0, "dtype": torch.float32}, "computed in float32"),
    ({"softcap": 50.0, "capability": (7, 5)}, "needs compute capability 8.0, not 7.5"),
    (OLD | {"softcap": 50.0}, "needs compute capability 8.0, not 7.5"),
]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dtype": torch.float16},
        {"capability": None},
        *({"capability": c} for c in ((8, 6), (9, 0), (12, 0))),
        *({"head": head} for head in (8, 96, 128, 192, 256)),
        {"dropout": 0.1, "capability": (8, 9)},
        {"dropout": 0.1, "head": 256},
        {"window": 5, "longest": 900},
    ],
)
def test_where_the_flash_kernel_is(change: dict[str, Any]) -> None:
    assert kernel_for(PackedRows(**CAN | change)) == ("varlen", "")


@pytest.mark.parametrize(
    "change",
    [
        OLD,
        OLD | {"capability": (7, 0), "head": 256},
        OLD | {"dtype": torch.float32},
        OLD | {"window": 66, "longest": 66},
        OLD | {"window": 5, "longest": 900, "causal": True},
        {"dtype": torch.float32},
        {"head": 208},
        {"flash": False},
    ],
)
def test_where_the_memory_efficient_kernel_stands_in(change: dict[str, Any]) -> None:
    assert kernel_for(PackedRows(**CAN | change)) == ("varlen_efficient", "")


@pytest.mark.parametrize("change", [{"head": 256, "capability": (8, 9)}, {"dropout": 0.0}])
def test_where_the_capped_kernel_is(change: dict[str, Any]) -> None:
    rows = PackedRows(**CAN | {"softcap": 50.0, "dropout": 0.1} | change)
    assert kernel_for(rows) == ("softcapped", "")


@pytest.mark.parametrize(("change", "said"), CANNOT)
def test_where_there_is_none(change: dict[str, Any], said: str) -> None:
    kernel, reason = kernel_for(PackedRows(**CAN | change))
    assert kernel is None
    assert said in reason


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@example("auto", True, "cuda", (8, 0), True, torch.bfloat16, 64, None, 0.0)
@given(
    st.sampled_from(["auto", "varlen", "varlen_efficient", "masked"]),
    st.booleans(),
    st.sampled_from(["cuda", "cpu"]),
    st.sampled_from([(7, 0), (7, 5), (8, 0), (8, 9), (9, 0)]),
    st.booleans(),
    st.sampled_from([torch.float32, *HALF]),
    st.sampled_from([12, 64, 256, 264]),
    st.sampled_from([None, 30.0]),
    st.sampled_from([0.0, 0.1]),
)
def test_a_path_is_taken_where_it_can_be_and_refused_where_it_cannot(
    path: attention.Path,
    is_packed: bool,
    device: str,
    capability: tuple[int, int],
    flash: bool,
    dtype: torch.dtype,
    head: int,
    softcap: float | None,
    dropout: float,
) -> None:
    layout: Any = SimpleNamespace(
        ids=SimpleNamespace(device=torch.device(device)),
        cu_seqlens=object() if is_packed else None,
        max_seqlen=99,
    )
    own = find_spec("triton") is not None and capability >= (8, 0) and dtype in HALF
    possible = is_packed and device == "cuda" and head in (64, 256)
    possible &= capability >= (8, 0) or dtype != torch.bfloat16
    possible &= softcap is None or own
    small = dropout and head == 256 and capability == (8, 9)  # its shared memory
    flashes = flash and path != "varlen_efficient" and capability >= (8, 0) and not small
    best = "varlen" if flashes and dtype in HALF else "varlen_efficient"
    best = best if softcap is None else "softcapped"
    possible &= not (dropout and best == "varlen_efficient")
    asked = {"dtype": dtype, "head": head, "softcap": softcap, "dropout": dropout}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "masked_attention", lambda *_, **__: "masked")
        patch.setattr(varlen, "varlen_attention", lambda *_, kernel, **__: kernel)
        patch.setattr(varlen, "capability", lambda _: capability)
        patch.setattr(varlen, "flash_exists", lambda: flash)
        if path not in ("auto", "masked") and not possible:
            with pytest.raises(BadInput, match="no variable-length attention here: "):
                attention.choose(layout, None, path=path, **asked)
            return
        taken: Any = attention.choose(layout, None, path=path, **asked)
    assert taken == (best if possible and path != "masked" else "masked")


def test_a_cpu_has_it_only_where_something_stands_in_and_it_is_demanded(
    request: pytest.FixtureRequest,
) -> None:
    layout = lay_out(**packed((3, 4)))
    asked: dict[str, Any] = {"dtype": torch.bfloat16, "head": 8}
    with pytest.raises(BadInput, match="on the device cpu"):
        attention.choose(layout, None, path="varlen", **asked)
    request.getfixturevalue("reference_kernel")
    assert isinstance(attention.choose(layout, None, path="varlen", **asked), VarlenAttention)
    assert isinstance(attention.choose(layout, None, **asked), MaskedAttention)


class Spy:
    """Stands in for `choose` and remembers what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[dict[str, Any]] = []
        self.original = attention.choose
        monkeypatch.setattr(attention, "choose", self)

    def __call__(self, *args: Any, path: str, **asked: Any) -> Any:
        self.asked.append(asked | {"path": path})
        return self.original(*args, path="masked", **asked)


def test_a_model_says_what_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch)
    model = tiny("bert-base", attention_dropout=0.2, attention="varlen")
    batch = packed((3, 4))
    model(**batch)
    model.eval()(**batch)
    tiny("gemma-3-1b-it", softcap=5.0)(**batch)
    tiny("bert-base", attention_dropout=0.2, method="frozen", dtype="float16").to(torch.float32)(
        **batch
    )
    bert = {"path": "varlen", "dtype": torch.float32, "head": 16, "softcap": None}
    bert |= {"causal": False}
    assert spy.asked == [
        bert | {"dropout": 0.2},
        bert | {"dropout": 0.0},
        bert | {"path": "auto", "head": 32, "softcap": 5.0, "dropout": 0.0},
        bert | {"path": "auto", "dropout": 0.0},
    ]


def test_a_demand_that_cannot_be_met_ends_in_one_line() -> None:
    model, batch = tiny("bert-base", attention="varlen"), packed((3, 4))
    with pytest.raises(BadInput, match="padded, not packed"):
        model(**padded(batch))
    with pytest.raises(BadInput, match="on the device cpu"):
        model(**batch)
