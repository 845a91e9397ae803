"""A model spread over ranks takes the step of one, and its checkpoints load under any number."""

from __future__ import annotations

import json
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_children import context
from engine_ranks import DeepTask, on_ranks, train_deep
from engine_toy import settings

from trainfit.core.errors import BadInput
from trainfit.engine import checkpoint
from trainfit.engine.checkpoint import latest_good, listed, load_weights
from trainfit.engine.distributed import joined
from trainfit.engine.loop_settings import ScheduleSettings

DOUBLE: dict[str, Any] = {"dtype": torch.float64, "dropout": 0.0, "sequences": 33}
FSDP: dict[str, Any] = {"sharding": "fsdp"}
LEVEL: dict[str, Any] = {"schedule": ScheduleSettings(kind="constant"), "checkpoint_steps": 7}
HALF, WHOLE = LEVEL | {"max_steps": 7}, LEVEL | {"max_steps": 15}


@pytest.fixture(scope="module")
def children() -> ForkServerContext:
    return context()


def contents(run: Path) -> dict[str, torch.Tensor]:
    """The weights and the optimizer's state at the end of a run, whoever wrote them."""
    folder, faults = latest_good(run)
    assert folder is not None
    assert not faults
    read = checkpoint.read(folder)
    return {**read.model, **read.optimizer}


def same(one: Path, other: Path) -> None:
    expected, found = contents(one), contents(other)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape
        assert (found[name] - tensor).abs().max() < 1e-10, name


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one rank that all others are held against."""
    run = tmp_path_factory.mktemp("one") / "run"
    train_deep(0, run, DOUBLE, WHOLE)
    return run


def gradients_of_rank(rank: int, folder: Path, micro_batches: int, once: bool) -> None:
    from trainfit.data.batches import StepLoader
    from trainfit.engine.loop_settings import LoaderSettings
    from trainfit.engine.parallel import shard, synchronised
    from trainfit.engine.step import accumulate

    with joined("cpu") as (_, device):
        task = DeepTask(**DOUBLE)
        torch.manual_seed(0)
        model = task.build_model()
        shard(model, device)
        loader = StepLoader(task, LoaderSettings(), device, rank=rank, ranks=2, in_step=True)
        step = task.steps(0)[0]
        cut = {c.micro_batches: c for c in settings(task, ranks=2).cuts}[micro_batches]
        batches = loader.load(step, cut)
        assert len(batches) == micro_batches
        paced = synchronised(model, batches, len(batches), once=once)
        accumulate(model, task.loss, paced, task.weight(step), device_type="cpu")
        whole = {
            name: parameter.grad.full_tensor()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        torch.save(whole, folder / f"{rank}.pt")


@pytest.mark.parametrize(
    ("micro_batches", "once"),
    [pytest.param(1, True, marks=pytest.mark.soak), (4, True), (4, False)],
)
def test_two_ranks_sum_to_the_gradient_of_one(
    tmp_path: Path, children: ForkServerContext, micro_batches: int, once: bool
) -> None:
    ran = on_ranks(children, 2, gradients_of_rank, tmp_path, micro_batches, once)
    assert ran == [0, 0]
    task = DeepTask(**DOUBLE)
    torch.manual_seed(0)
    model, step = task.build_model(), task.steps(0)[0]
    (task.loss(model, task.collate(step, len(step), 12, None)) / len(step)).backward()
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert found.keys() == {n for n, p in model.named_parameters() if p.grad is not None}
        for name, gradient in found.items():
            expected = model.get_parameter(name).grad
            assert (gradient - expected).abs().max() < 1e-10, name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer": {"kind": "adamw", "max_grad_norm": 0.01}},
        pytest.param({"padded": True}, marks=pytest.mark.soak),
    ],
)
def test_a_run_of_two_ranks_ends_as_that_of_one(
    tmp_path: Path, children: ForkServerContext, options: dict[str, Any]
) -> None:
    """A last step of one sequence leaves the second rank with filler alone."""
    ran = on_ranks(children, 2, train_deep, tmp_path / "two", DOUBLE, FSDP | options)
    assert ran == [0, 0]
    train_deep(0, tmp_path / "one", DOUBLE, options)
    same(tmp_path / "one", tmp_path / "two")
    shown = [
        [
            {k: v for k, v in json.loads(line).items() if k in ("loss", "grad_norm", "step")}
            for line in (tmp_path / n / "metrics.jsonl").read_text().splitlines()
        ]
        for n in ("one", "two")
    ]
    for mine, theirs in zip(*shown, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert "2 ranks" in (tmp_path / "two" / "train.log").read_text()


def test_one_rank_that_is_asked_to_shards_its_model(
    tmp_path: Path, one: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody shares it: what is gathered is its own, and the run ends as one without shards."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    gathered, wait = [], FSDPParamGroup.wait_for_unshard
    monkeypatch.setattr(
        FSDPParamGroup, "wait_for_unshard", lambda group: (gathered.append(1), wait(group))[1]
    )
    run = tmp_path / "run"
    train_deep(0, run, DOUBLE, WHOLE | FSDP)
    assert len(gathered) >= 2 * 15  # in each step, before both passes
    assert list(listed(run)[0].glob("shard-*"))
    same(one, run)
    assert not torch.distributed.is_initialized()
    seen = json.loads((run / "evidence.json").read_text())["gathered"]
    assert seen == 4  # three blocks, and the rest


@pytest.mark.soak
def test_two_machines_of_two_ranks_with_a_copy_each_end_as_one_rank(
    tmp_path: Path, children: ForkServerContext
) -> None:
    """Hybrid sharding: clipped by the norm of one copy, saved once, and read by one rank."""
    options = {"optimizer": {"kind": "adamw", "max_grad_norm": 0.01}}
    env = {"LOCAL_WORLD_SIZE": "2"}
    hybrid = options | {"sharding": "hybrid"}
    ran = on_ranks(children, 4, train_deep, tmp_path / "four", DOUBLE, hybrid, env=env)
    assert ran == [0] * 4
    train_deep(0, tmp_path / "one", DOUBLE, options)
    same(tmp_path / "one", tmp_path / "four")


@pytest.mark.soak
@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_gradients_summed_in_bf16_end_near_those_in_full(
    tmp_path: Path, children: ForkServerContext, sharding: str
) -> None:
    options = {"sharding": sharding, "reduce_dtype": "bf16"}
    task = {"dropout": 0.0, "sequences": 33}
    assert on_ranks(children, 2, train_deep, tmp_path / "two", task, options) == [0, 0]
    train_deep(0, tmp_path / "one", task, {})
    expected, found = contents(tmp_path / "one"), contents(tmp_path / "two")
    far = max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items())
    assert 1e-7 < far < 0.05  # rounded, and no more than that


@pytest.mark.parametrize(
    ("before", "ranks", "after"),
    [
        ("none", 1, "none"),
        ("none", 4, "none"),
        ("fsdp", 1, "none"),
        pytest.param("fsdp", 4, "fsdp", marks=pytest.mark.soak),
        pytest.param("none", 4, "fsdp", marks=pytest.mark.soak),
        pytest.param("fsdp", 4, "none", marks=pytest.mark.soak),
    ],
)
def test_a_checkpoint_of_two_ranks_loads_under_any_number(
    tmp_path: Path, children: ForkServerContext, one: Path, before: str, ranks: int, after: str
) -> None:
    run = tmp_path / "run"
    half = HALF | {"sharding": before}
    assert on_ranks(children, 2, train_deep, run, DOUBLE, half) == [0, 0]
    assert bool(list(listed(run)[0].glob("shard-*"))) == (before == "fsdp")
    rest = WHOLE | {"sharding": after}
    ran = on_ranks(children, ranks, train_deep, run, DOUBLE, rest, True)
    assert ran == [0] * ranks
    same(one, run)


def test_a_checkpoint_of_one_rank_loads_sharded(
    tmp_path: Path, children: ForkServerContext, one: Path
) -> None:
    run = tmp_path / "run"
    train_deep(0, run, DOUBLE, HALF)
    ran = on_ranks(children, 2, train_deep, run, DOUBLE, WHOLE | FSDP, True)
    assert ran == [0, 0]
    same(one, run)


@pytest.mark.soak
def test_going_on_with_as_many_ranks_changes_no_bit(
    tmp_path: Path, children: ForkServerContext
) -> None:
    task = {"dropout": 0.1}
    assert on_ranks(children, 2, train_deep, tmp_path / "w", task, FSDP | WHOLE) == [0, 0]
    run = tmp_path / "run"
    assert on_ranks(children, 2, train_deep, run, task, FSDP | HALF) == [0, 0]
    assert on_ranks(children, 2, train_deep, run, task, FSDP | WHOLE, True) == [0, 0]
    expected, found = contents(tmp_path / "w"), contents(run)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_weights_load_into_a_whole_model_and_no_pickle_is_written(
    tmp_path: Path, children: ForkServerContext
) -> None:
    run = tmp_path / "run"
    assert on_ranks(children, 2, train_deep, run, {"frozen": True}, FSDP | HALF) == [0, 0]
    task = DeepTask(frozen=True)
    model = task.build_model()
    assert load_weights(run, model, best=False) == 7
    saved = contents(run)
    assert "blocks.1.weight" not in saved
    assert torch.equal(model.get_parameter("hidden.weight"), saved["hidden.weight"])
    assert model.tied.weight is model.embedding.weight
    folder = listed(run)[0]
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    other = DeepTask(norm=True)
    with pytest.raises(BadInput, match=r"such as "):
        load_weights(run, other.build_model(), best=False)


@pytest.mark.parametrize("damage", [pytest.param("missing", marks=pytest.mark.soak), "cut"])
def test_a_checkpoint_without_every_part_does_not_count(
    tmp_path: Path, children: ForkServerContext, damage: str
) -> None:
    run = tmp_path / "run"
    options = FSDP | {"max_steps": 6, "checkpoint_steps": 3}
    assert on_ranks(children, 2, train_deep, run, {}, options) == [0, 0]
    newest, before = listed(run)
    part = next(newest.glob("shard-00002-*"))
    if damage == "missing":
        part.unlink()
    else:
        part.write_bytes(part.read_bytes()[:-8])
    good, faults = latest_good(run)
    assert good == before
    assert "shard-00002" in faults[0]


@pytest.mark.soak
def test_small_moments_are_sharded_like_their_weights(
    tmp_path: Path, children: ForkServerContext
) -> None:
    """A run of two ranks that breaks off goes on with the same bits, as shards of bfloat16."""
    single = {"dropout": 0.0, "sequences": 33}
    small = FSDP | {"optimizer": {"kind": "adamw_bf16"}}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert on_ranks(children, 2, train_deep, whole, single, WHOLE | small) == [0, 0]
    assert on_ranks(children, 2, train_deep, broken, single, HALF | small) == [0, 0]
    assert on_ranks(children, 2, train_deep, broken, single, WHOLE | small, True) == [0, 0]
    expected, found = contents(whole), contents(broken)
    assert any(tensor.dtype == torch.bfloat16 for tensor in expected.values())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    train_deep(0, tmp_path / "one", single, WHOLE | {"optimizer": {"kind": "adamw_bf16"}})
    for name, tensor in contents(tmp_path / "one").items():
        torch.testing.assert_close(expected[name], tensor, rtol=0.1, atol=2e-3)


@pytest.mark.parametrize(
    "optimizer",
    [{"kind": "adamw_8bit"}, {"kind": "adamw_bf16", "offload": True}, {"kind": "muon"}],
    ids=lambda options: options["kind"],
)
def test_two_ranks_with_a_copy_each_end_near_one(
    tmp_path: Path, children: ForkServerContext, optimizer: dict[str, Any]
) -> None:
    single = {"dropout": 0.0, "sequences": 33}
    options = HALF | {"optimizer": optimizer}
    assert on_ranks(children, 2, train_deep, tmp_path / "two", single, options) == [0, 0]
    train_deep(0, tmp_path / "one", single, options)
    one, two = (checkpoint.read(latest_good(tmp_path / n)[0]).model for n in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0.02, atol=2e-3)
