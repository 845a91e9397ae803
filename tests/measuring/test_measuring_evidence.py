"""Evidence cannot be fooled: what was asked for and silently fails is told, with its cause."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from receipt_steps import Model, evidence, items, train
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trainfit import kernels
from trainfit.core.errors import TrainfitWarning
from trainfit.kernels.disentangled import disentangled_attention
from trainfit.kernels.quantized import QuantizedLinear
from trainfit.kernels.varlen import softcapped_attention
from trainfit.measuring.trace import Profiling
from trainfit.runtime import compile_blocks
from trainfit.runtime.environment import quiet_profiler


@pytest.fixture
def _fresh_compiler():
    from torch._dynamo import utils

    def clear() -> None:
        torch._dynamo.reset()
        utils.counters.clear()
        utils.clear_compilation_metrics()

    clear()
    yield
    clear()


def parts(**options):
    model = Model(**options)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def test_what_a_plain_step_does_is_seen():
    model, optimizer = parts()
    seen = evidence(lambda: train(model, optimizer, micro_batches=3, clip=True))
    found = items(
        seen,
        mixed_precision="off",
        fused_optimizer=True,
        compile=False,
        gradient_clipping=True,
        set_to_none=True,
    )
    assert {name: item.status for name, item in found.items()} == {
        "mixed_precision": "off",
        "tf32": "not_applicable",
        "quantization": "not_applicable",
        "fused_optimizer": "active",
        "optimizer": "active",
        "offload_optimizer": "not_applicable",
        "attention": "not_applicable",
        "attention_dropout": "not_applicable",
        "flash_attention": "not_applicable",
        "compile": "off",
        "cuda_graphs": "not_applicable",
        "liger": "not_applicable",
        "sharding": "not_applicable",
        "gradient_checkpointing": "off",
        "offload_activations": "not_applicable",
        "packing": "not_applicable",
        "effective_batch": "not_applicable",
        "gradient_accumulation": "not_applicable",
        "gradient_clipping": "active",
        "set_to_none": "active",
        "workers": "off",
        "pinned_memory": "not_applicable",
        "cudnn_benchmark": "not_applicable",
        "channels_last": "not_applicable",
        "expandable_segments": "not_applicable",
        "deterministic": "off",
    }
    # Twice forward; backward, as many again for the weights, and for the inputs but the first.
    assert seen.products.shares == {"fp32": 1.0}
    assert seen.gradients == 3 * len(list(model.parameters()))
    assert 0 < seen.seconds < 30


@pytest.mark.parametrize("on", [True, False])
def test_autocast_that_is_off_is_noticed(on: bool):
    model, optimizer = parts()

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.float16, enabled=on):
            loss = model(torch.randn(4, 16)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    found = items(evidence(step), mixed_precision="fp16")["mixed_precision"]
    if on:
        assert (found.status, found.observed, found.mend) == ("active", "fp16", "")
    else:
        assert (found.status, found.observed) == ("not_active", "off")
        assert "autocast was off" in found.evidence
        assert "torch.autocast" in found.mend


def test_autocast_around_a_small_part_is_told_apart():
    model, optimizer = parts(blocks=3)
    small = nn.Linear(16, 2)

    def step() -> None:
        hidden = model(torch.randn(4, 16))
        with torch.autocast("cpu", dtype=torch.float16):
            loss = small(hidden).float().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    found = items(evidence(step), mixed_precision="fp16")["mixed_precision"]
    assert found.status == "not_active"
    assert "around most of the model" in found.evidence


def test_the_dtype_that_multiplies_most_counts():
    def step() -> None:
        torch.ones(64, 64, dtype=torch.float64) @ torch.ones(64, 64, dtype=torch.float64)
        for _ in range(10):
            torch.ones(4, 4) @ torch.ones(4, 4)

    shares = evidence(step).products.shares
    assert shares["fp64"] == pytest.approx(64**3 / (64**3 + 10 * 4**3))


@pytest.mark.parametrize("kind", ["fused", "foreach", "single"])
def test_an_optimizer_that_is_not_fused_is_noticed(kind: str):
    model = Model()
    optimizer = torch.optim.AdamW(
        model.parameters(), fused=kind == "fused", foreach=kind == "foreach"
    )
    seen = evidence(lambda: train(model, optimizer))
    assert set(seen.updates) == {kind}
    found = items(seen, fused_optimizer=True)["fused_optimizer"]
    assert found.status == ("active" if kind == "fused" else "not_active")
    if kind != "fused":
        assert "the fused kernel was not called" in found.evidence
        assert "fused=True" in found.mend


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("SGD", {"momentum": 0.9, "fused": True}, "fused"),
        ("SGD", {"momentum": 0.9, "foreach": True}, "foreach"),
        ("SGD", {"foreach": False}, "single"),
        ("RMSprop", {"foreach": True}, "foreach"),
        ("Rprop", {"foreach": False}, "single"),
        ("Adafactor", {"foreach": False}, "single"),
    ],
)
def test_any_optimizer_of_torch_is_recognised(name: str, options: dict[str, Any], kind: str):
    model = Model()
    optimizer = getattr(torch.optim, name)(model.parameters(), **options)
    seen = evidence(lambda: train(model, optimizer, clip=True))
    assert seen.optimizers == {name: kind}
    assert set(seen.updates) == {kind}


@pytest.mark.parametrize("half", [False, True])
def test_the_precision_of_convolutions_is_seen(half: bool):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 2))
    optimizer = torch.optim.SGD(model.parameters())

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            features = model[:2](torch.randn(2, 3, 8, 8))
        model[2](features.float()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = items(evidence(step), mixed_precision="bf16")["mixed_precision"]
    assert found.status == ("active" if half else "not_active")


def test_a_fused_optimizer_that_does_not_exist_falls_back_and_is_noticed():
    """The graceful fallback that hides in many training scripts."""
    model = Model()
    try:
        optimizer: torch.optim.Optimizer = torch.optim.Adamax(model.parameters(), fused=True)
    except TypeError:
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    found = items(evidence(lambda: train(model, optimizer)), fused_optimizer=True)
    assert found["fused_optimizer"].status == "not_active"


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_graph_break_in_every_block_is_noticed():
    def between(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x

    model, optimizer = parts(blocks=3, between=between)
    compile_blocks(model, backend="eager")
    seen = evidence(lambda: train(model, optimizer))
    assert seen.compiler.resumed == 3
    found = items(seen, compile=True)["compile"]
    assert (found.status, found.observed) == ("not_active", "in pieces")
    assert "graph break" in found.evidence
    assert "graph_breaks" in found.mend


@pytest.mark.usefixtures("_fresh_compiler")
def test_whole_blocks_are_seen_as_compiled():
    model, optimizer = parts(blocks=3)
    compile_blocks(model, backend="eager")
    seen = evidence(lambda: train(model, optimizer))
    assert (seen.compiler.regions, seen.compiler.resumed) == (3, 0)
    assert items(seen, compile=True)["compile"].status == "active"


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiler_that_failed_is_noticed_with_its_failure():
    def broken(*_: object) -> None:
        raise RuntimeError("no C compiler here")

    model, optimizer = parts()
    compile_blocks(model, backend=broken)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainfitWarning)
        seen = evidence(lambda: train(model, optimizer))
    found = items(seen, compile=True)["compile"]
    assert (found.status, found.observed) == ("not_active", False)
    assert "the compiler failed" in found.evidence
    assert "no C compiler here" in found.evidence


@pytest.mark.usefixtures("_fresh_compiler")
def test_compile_that_was_never_called_is_noticed():
    model, optimizer = parts()
    compile_blocks(Model())  # another one
    found = items(evidence(lambda: train(model, optimizer)), compile=True)["compile"]
    assert found.status == "not_active"
    assert "nothing compiled was called" in found.evidence


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_seen_and_its_absence_too(reentrant: bool):
    model, optimizer = parts()

    def step(recompute: bool) -> None:
        x = torch.randn(4, 16, requires_grad=True)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant) if recompute else block(x)
        x.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    active = items(evidence(lambda: step(True)), gradient_checkpointing="full")
    assert active["gradient_checkpointing"].status == "active"
    silent = items(evidence(lambda: step(False)), gradient_checkpointing="full")
    assert silent["gradient_checkpointing"].status == "not_active"


def test_gradients_that_are_zeroed_or_not_clipped_are_noticed():
    model, optimizer = parts()
    seen = evidence(lambda: train(model, optimizer, set_to_none=False))
    found = items(seen, set_to_none=True, gradient_clipping=True)
    assert found["set_to_none"].status == "not_active"
    assert "zeros" in found["set_to_none"].evidence
    assert found["gradient_clipping"].status == "not_active"


@pytest.mark.parametrize(("dropout", "kernel"), [(0.0, "cpu"), (0.5, "math")])
def test_the_attention_kernel_that_ran_is_named(dropout: float, kernel: str):
    def step() -> None:
        q = torch.randn(1, 2, 8, 4, requires_grad=True)
        mask = torch.ones(8, 8, dtype=torch.bool)
        functional.scaled_dot_product_attention(q, q, q, mask, dropout).sum().backward()

    seen = evidence(step)
    assert seen.attention.calls == {kernel: 1}
    assert seen.attention.masked
    assert (seen.attention.head, seen.attention.dtype) == (4, "fp32")
    assert seen.attention.dropout == dropout
    assert items(seen, attention="sdpa")["attention"].status == "active"
    assert items(seen, attention="varlen")["attention"].status == "not_active"


@pytest.mark.parametrize(
    ("operator", "more"),
    [
        (softcapped_attention, (None, 6, 0.5, 5.0, 8, 0.2)),
        (disentangled_attention, (None, 6, 0.5, 0.2)),
    ],
)
def test_trainfits_own_attention_is_named_as_plans_name_it(
    operator: Any, more: tuple[float | None, ...], monkeypatch: pytest.MonkeyPatch
):
    """The operator is the one of a GPU; only the Triton kernel in it does nothing here."""
    name = operator._name.removeprefix("trainfit::").removesuffix("_attention")
    row = torch.zeros(6, 2, 16)
    nothing = SimpleNamespace(forward=lambda *_given: (row.clone(), row.new_zeros(2, 6)))
    monkeypatch.setattr(kernels, f"{name}_triton", nothing, raising=False)
    positions = [torch.zeros(2, 12, 2, 16)] * (name == "disentangled")
    seen = evidence(lambda: operator(row, row, row, *positions, torch.tensor([0, 6]), *more))
    assert seen.attention.calls == {name: 1}
    assert seen.attention.dropout == 0.2
    assert items(seen, attention=name)["attention"].status == "active"
    assert items(seen, attention="varlen")["attention"].status == "not_active"


def test_attention_without_a_kernel_is_noticed():
    def step() -> None:
        q = torch.randn(2, 8, 4, requires_grad=True)
        ((q @ q.transpose(1, 2)).softmax(-1) @ q).sum().backward()

    found = items(evidence(step), attention="sdpa")["attention"]
    assert (found.status, found.observed) == ("not_active", "eager")


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_are_counted_alive(workers: int):
    loader = torch.utils.data.DataLoader(torch.arange(64), num_workers=workers)
    arriving = iter(loader)
    found = items(evidence(lambda: next(arriving)), workers=2)["workers"]
    assert found.observed == workers
    assert found.status == ("active" if workers else "not_active")
    assert "waiting for data" in found.evidence
    if not workers:
        assert "in the training process" in found.evidence


def test_padding_and_packing_are_read_off_the_batches():
    mask = torch.zeros(2, 10, dtype=torch.long)
    mask[0, :7], mask[1, :3] = 1, 1
    padded = evidence(lambda: None, [{"input_ids": torch.ones(2, 10), "attention_mask": mask}])
    assert padded.batches.padding_share == pytest.approx(0.5)
    assert items(padded, packing=True)["packing"].status == "not_active"
    row = {"input_ids": torch.ones(1, 10), "cu_seqlens": torch.tensor([0, 4, 9, 9])}
    packed = evidence(lambda: None, [row])
    assert packed.batches.padding_share == pytest.approx(0.1)
    assert items(packed, packing=True)["packing"].status == "active"


def test_a_switch_flipped_behind_its_back_is_noticed():
    """Nothing hands the evidence a setting: only torch itself can have told it."""
    step = lambda: None  # noqa: E731
    assert items(evidence(step), deterministic=True)["deterministic"].status == "not_active"
    torch.use_deterministic_algorithms(True)
    try:
        assert items(evidence(step), deterministic=True)["deterministic"].status == "active"
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_profiler_is_silent_and_leaves_the_results_alone(capfd: pytest.CaptureFixture[str]):
    torch.manual_seed(0)
    x = torch.randn(8, 8, requires_grad=True)
    (x @ x).sum().backward()
    plain, x.grad = x.grad, None
    profiling = Profiling()
    (x @ x).sum().backward()
    assert profiling.end().calls("aten::mm") == 3
    assert torch.equal(plain, x.grad)
    assert capfd.readouterr() == ("", "")


def test_another_profiler_is_left_alone():
    from trainfit.measuring.profiled_step import profiled

    with ExitStack() as quiet:  # its log level lasts, and another test wants silence
        quiet_profiler(quiet)
        with torch.profiler.profile() as own, profiled(0, []) as look:
            torch.ones(2) + 1
    assert look.evidence is None
    assert "another profiler" in look.obstacle
    assert any(event.key == "aten::add" for event in own.key_averages())


@pytest.mark.parametrize(("kind", "other"), [("nf4", "int8"), ("int8", "nf4")])
def test_products_with_quantized_weights_are_seen_by_their_codes(kind: Any, other: str):
    layer = QuantizedLinear.of(nn.Linear(32, 16), kind, torch.device("cpu"))
    x = torch.randn(4, 32, requires_grad=True)
    seen = evidence(lambda: layer(x).sum().backward())
    assert seen.quantized.products == {kind: 2}
    assert seen.quantized.nbytes == 2 * layer.codes.nbytes
    assert items(seen, quantization=kind)["quantization"].status == "active"
    failed = items(seen, quantization=other)["quantization"]
    assert (failed.status, failed.observed) == ("not_active", kind)
    assert failed.mend


def test_a_model_that_was_to_be_quantized_and_is_not_fails():
    layer = nn.Linear(32, 32)

    def step() -> None:
        x = layer(torch.randn(1, 2, 8, 32))
        functional.scaled_dot_product_attention(x, x, x).sum().backward()

    seen = evidence(step)
    assert items(seen, quantization="nf4")["quantization"].status == "not_active"
    assert items(seen, quantization="none")["quantization"].status == "off"
