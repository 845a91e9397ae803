"""The first lines of a run: the 3090 document's five, each where its setting is active."""

from __future__ import annotations

import json
import warnings
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs_tiny import tiny
from torch.utils.data import DataLoader

from trainfit.core.plan_records import RuntimeSettings
from trainfit.engine.distributed import World
from trainfit.engine.setup import describe
from trainfit.jobs import classification
from trainfit.packing import PackedCut, PaddedCut, ladder
from trainfit.reports.run_report import report
from trainfit.runs.opening import DataSetup, RunSetup
from trainfit.runs.run_folder import Journal
from trainfit.runtime import applied

DOCUMENT = (
    "Device: cuda",
    "TF32 enabled for matmul and cuDNN operations (GPU compute capability (8, 6))",
    "SDPA Flash Attention backend enabled",
    "Using fused AdamW optimizer (lr=2e-05, wd=0.01)",
    "DataLoader settings: num_workers=4, pin_memory=True, prefetch_factor=2",
)
FLASH = DOCUMENT[2]


def parts(
    monkeypatch: pytest.MonkeyPatch,
    model: torch.nn.Module,
    *,
    packed: bool = True,
    capability: tuple[int, int] = (8, 6),
    precision: str = "bf16",
    fused: bool = True,
    kernel: str = "varlen",
    obstacle: str = "",
) -> Any:
    """A run on a GPU that is not here."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA GeForce RTX 3090")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(
        classification, "packed_path", lambda *_: (None if obstacle else kernel, obstacle)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.01, fused=fused)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more workers than this machine has cores
        loader: DataLoader[int] = DataLoader([0], num_workers=4, pin_memory=True, prefetch_factor=2)
    cut = ladder([8] * 16, 8, 64, padded=not packed)[0]
    assert isinstance(cut, PackedCut if packed else PaddedCut)
    return SimpleNamespace(
        device=torch.device("cuda"),
        world=World(rank=0, size=1, local_rank=0),
        settings=SimpleNamespace(
            cuts=(cut,),
            precision=precision,
        ),
        scale=None,
        model=model,
        optimizer=optimizer,
        rates=(2e-5,),
        indivisible=None,
        loader=SimpleNamespace(workers=lambda: loader, on_device=False),
        sharded=False,
        task=SimpleNamespace(steps=lambda _epoch: [tuple(range(8))]),
    )


def opened(*args: Any, tf32: bool = True, **options: Any) -> RunSetup:
    plan: Any = SimpleNamespace(
        workload=SimpleNamespace(method="full", max_length=512), measurements=()
    )
    with applied(RuntimeSettings(tf32=tf32)):
        return classification.opening(parts(*args, **options), plan)


def lines(*args: Any, **options: Any) -> str:
    return "\n".join(opened(*args, **options).lines())


@pytest.mark.parametrize("packed", [True, False])
def test_the_five_lines_are_there(packed: bool, monkeypatch: pytest.MonkeyPatch):
    shown = lines(monkeypatch, tiny("gemma-3-1b-it"), packed=packed)
    for line in DOCUMENT:
        assert line in shown


def test_they_are_not_where_their_setting_is_off(monkeypatch: pytest.MonkeyPatch):
    model = tiny("bert-base")
    shown = lines(monkeypatch, model, packed=False, precision="fp32", fused=False, tf32=False)
    assert "TF32 off (GPU compute capability (8, 6))" in shown
    assert "Using AdamW optimizer (lr=2e-05, wd=0.01)" in shown
    assert FLASH not in shown
    old = lines(monkeypatch, model, packed=False, precision="fp16", capability=(7, 5), tf32=False)
    assert FLASH not in old
    assert "SDPA memory-efficient Attention backend enabled" in old


@pytest.mark.parametrize(
    ("name", "kernel", "named"),
    [
        ("bert-base", "varlen_efficient", "torch's memory-efficient kernel with lengths on packed"),
        ("gemma-2-2b", "softcapped", "trainfit's Triton kernel for soft-capped logits on packed"),
        ("gemma-2-2b", None, "soft-capped logits, which SDPA has no kernel for"),
        ("deberta-v3-base", "disentangled", "trainfit's Triton kernel for disentangled attention"),
        ("deberta-v3-base", None, "the model's own, on padded rows"),
    ],
)
def test_another_kernel_is_named_as_what_it_is(
    name: str, kernel: str | None, named: str, monkeypatch: pytest.MonkeyPatch
):
    shown = lines(monkeypatch, tiny(name), packed=kernel is not None, kernel=kernel)
    assert f"Attention: {named}" in shown
    assert "SDPA Flash" not in shown


def test_a_mask_on_packed_rows_says_why(monkeypatch: pytest.MonkeyPatch):
    shown = lines(monkeypatch, tiny("bert-base"), obstacle="heads of 8")
    assert "Attention: a mask on packed rows, attention dropout" in shown
    assert "(heads of 8)" in shown
    assert FLASH not in shown


def test_a_job_without_a_line_of_its_own_reads_torchs_switches(monkeypatch: pytest.MonkeyPatch):
    plain = parts(monkeypatch, tiny("bert-base"))
    assert any(line.startswith(FLASH) for line in describe(plain).lines())
    with applied(RuntimeSettings(attention="efficient")):
        shown = list(describe(plain).lines())
    assert "SDPA memory-efficient Attention backend enabled (fallbacks: Flash, math)" in shown


@pytest.mark.parametrize("name", ["gemma-3-1b-it", "gemma-2-2b", "deberta-v3-base"])
@pytest.mark.parametrize("packed", [True, False])
def test_the_report_names_the_attention_of_a_run(
    name: str, packed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    setup = opened(monkeypatch, tiny(name), packed=packed)
    (tmp_path / "run.json").write_text('{"id": "x"}')
    with closing(Journal(tmp_path)) as journal:
        shown = list(journal.setup(setup, 0))
    page = report(tmp_path).to_json()
    assert sum("ttention" in line for line in shown) == 1
    assert all(json.dumps(line)[1:-1] in page for line in shown)
    assert "NVIDIA GeForce RTX 3090" in report(tmp_path).chapters[0].subtitle


def test_the_log_for_people_is_never_read_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "run.json").write_text('{"id": "x"}')
    with closing(Journal(tmp_path)) as journal:
        list(journal.setup(opened(monkeypatch, tiny("bert-base")), 0))
    before = report(tmp_path).chapters
    (tmp_path / "train.log").write_text("2026-11-15 06:19:00 oom at step 3: it is said\n")
    assert report(tmp_path).chapters == before


# ── the model and the data ────────────────────────────────────────────────────────────────────


def test_the_model_and_its_method_come_first(monkeypatch: pytest.MonkeyPatch):
    setup = opened(monkeypatch, tiny("bert-base"))
    count = sum(p.numel() for p in tiny("bert-base").parameters())
    [first, *_] = replace(setup, model="bert-base", method="lora", trained_weights=10).lines()
    assert first == f"Model: bert-base, {count:,} weights, 10 trained, method lora"
    frozen = replace(setup, model="bert-base", method="frozen", trained_weights=10)
    assert next(frozen.lines()) == "Model: bert-base, frozen; the 10 weights of its head train"
    own = replace(setup, model="Digits", method=None, trained_weights=10)
    assert next(own.lines()) == f"Model: Digits, {count:,} weights, 10 trained"


def test_rows_split_and_classes_are_counted():
    data = DataSetup(train=700, validation=100, test=200, classes={"a": 400, "b": 300})
    assert list(data.lines()) == [
        "Data: 1,000 rows: 700 to train on, 100 for validation, 200 for the test",
        "Classes to train on: a: 400, b: 300",
    ]
    fold = replace(data, fold=2, folds=5, synthetic=True, classes={})
    assert list(fold.lines()) == [
        "Data: 1,000 rows of synthetic data: fold 2 of 5, 700 to train on, 100 for validation,"
        " 200 for the test",
    ]
    [alone] = replace(data, test=0, classes={}).lines()
    assert alone.endswith("100 for validation, which are the test too")
    many = replace(data, classes={str(n): n for n in range(30)})
    assert list(many.lines())[1].endswith("19: 19, and 10 more classes")
