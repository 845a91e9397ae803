"""The end of a fold on a GPU: its best weights, and its export beside the next fold."""

from __future__ import annotations

import copy
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_toy import Toy, ToyTask, settings
from jobs_tiny import TINY
from transformers import AutoConfig, AutoModel

from trainfit.core.plan_records import RuntimeSettings
from trainfit.engine.distributed import World
from trainfit.engine.loop import Shared, train
from trainfit.engine.saved_state import model_tensors
from trainfit.jobs import encoder, job_plan
from trainfit.jobs.models import sources
from trainfit.jobs.models.classifier import EncoderClassifier, build_classifier
from trainfit.jobs.models.classifier_settings import ClassifierSettings
from trainfit.jobs.run import Run, Show, opened
from trainfit.reports import training_lines


def run_on(device: str, tmp_path: Path, **options: Any) -> Run:
    unused: Any = SimpleNamespace(settings=lambda *_: settings(ToyTask()))
    return Run(
        prepared=unused,
        plan=unused,
        folder=tmp_path,
        profile=unused,
        world=World(),
        device=torch.device(device),
        show=Show(),
        export_pool=ThreadPoolExecutor(1),
        **options,
    )


@pytest.mark.parametrize("method", ["full", "frozen"])
def test_best_weights_are_not_written_to_the_memory_that_folds_are_built_from(
    tmp_path: Path, method: Any
) -> None:
    config = AutoConfig.for_model("bert", **TINY["bert-base"])
    AutoModel.from_config(config).save_pretrained(tmp_path)
    chosen = ClassifierSettings(
        name=str(tmp_path), weights="pretrained", pooling="auto", method=method
    )

    def build() -> EncoderClassifier:
        torch.manual_seed(0)
        model: Any = build_classifier(chosen)
        model.to = lambda _device: copy.deepcopy(model)  # as to a GPU: to other memory
        return model  # type: ignore[no-any-return]

    with sources.kept_in_memory(borrowed=True):
        first = {name: weight.clone() for name, weight in model_tensors(build()).items()}
        best = {name: weight + 1 for name, weight in first.items()}
        found = run_on("cpu", tmp_path, shared=Shared(best=best)).best_model(build, tmp_path)
        again = model_tensors(build())
    assert any("pooler" in name for name in first)
    for name, weight in model_tensors(found).items():
        assert torch.equal(weight, best[name]), name
        assert torch.equal(again[name], first[name]), name


def test_an_export_beside_the_next_fold_has_the_frozen_weights_of_its_own(tmp_path: Path) -> None:
    shared, read = Shared(), list[torch.Tensor]()
    task = ToyTask(frozen=True)
    train(task, settings(task, epochs=1.0, seed=0), tmp_path / "1", shared=shared)
    assert shared.parts is not None
    table = shared.parts.model.get_parameter("embedding.weight")
    own = table.detach().clone()
    run = run_on("cuda", tmp_path, shared=shared)
    shared.best = {}

    def write(_weights: Any) -> None:
        time.sleep(0.3)
        read.append(table.detach().clone())

    run.later(write)
    train(task, settings(task, epochs=1.0, seed=1), tmp_path / "2", shared=shared)
    run.settle()
    assert torch.equal(read[0], own)
    assert not torch.equal(table, own)


def test_what_follows_is_imported_once_the_model_is_written(tmp_path: Path) -> None:
    done: list[str] = []
    run = run_on("cuda", tmp_path, shared=Shared(best={}))
    run.show = Show(prepare=lambda: done.append("imported"))
    run.later(lambda _: done.append("written"))
    run.settle()
    run.export_pool.shutdown()
    assert done == ["written", "imported"]
    training_lines._import_report()
    assert {"sklearn.metrics", "trainfit.reports.writers"} <= set(sys.modules)


def test_no_thread_writes_to_the_folder_of_a_run_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_plan, "runtime_settings", lambda *_: RuntimeSettings(seed=0))
    unused: Any = SimpleNamespace(config=None, device="cpu")
    written = list[str]()

    def write(_weights: Any) -> None:
        time.sleep(0.3)
        written.append("whole")

    def interrupted() -> None:
        with opened(unused, unused, unused, tmp_path, show=Show()) as run:
            run.device, run.shared.best = torch.device("cuda"), {}
            run.later(write)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert written == ["whole"]
    assert not any(thread.name.startswith("export") for thread in threading.enumerate())


def test_the_best_weights_of_a_checkpoint_need_no_second_model(tmp_path: Path) -> None:
    shared, task = Shared(), ToyTask()
    train(task, settings(task), tmp_path / "run", shared=shared)
    assert shared.parts is not None
    in_memory, shared.best = shared.best, None  # as after --resume, or with several GPUs
    assert in_memory is not None

    def build() -> Toy:
        raise AssertionError("there is no room for it")

    run = run_on("cpu", tmp_path, shared=shared)
    model = run.best_model(build, tmp_path / "run", trained=Toy)
    assert model is shared.parts.model
    assert not model.training
    for name, weight in model_tensors(model).items():
        assert torch.equal(weight, in_memory[name]), name


def test_shards_and_moments_are_freed_before_the_whole_model_is_built(tmp_path: Path) -> None:
    sharded: Any = SimpleNamespace(sharded=True, model=torch.nn.Linear(2, 2))
    gone = weakref.ref(sharded.model)
    shared = Shared(parts=sharded, best={"weight": torch.ones(1, 1), "bias": torch.ones(1)})
    del sharded

    def build() -> torch.nn.Linear:
        assert gone() is None
        return torch.nn.Linear(1, 1)

    model = run_on("cpu", tmp_path, shared=shared).best_model(
        build, tmp_path, trained=torch.nn.Linear
    )
    assert model.weight.item() == 1


@pytest.mark.parametrize(("free", "crowded"), [(50, False), (20, True)])
def test_an_export_beside_leaves_room_for_the_next_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, crowded: bool
) -> None:
    model: Any = torch.nn.Linear(2, 2)  # 24 bytes
    judged, written = SimpleNamespace(), list[str]()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 40)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 30)
    monkeypatch.setattr(encoder, "predict_within", lambda *_, **__: (None, 1))
    monkeypatch.setattr(encoder.scores, "judge", lambda *_: judged)
    run = run_on("cuda", tmp_path, shared=Shared(best={}))
    monkeypatch.setattr(run, "best_model", lambda *_, **__: model)
    goes_on = Event()

    def write(*_: Any) -> None:
        assert goes_on.wait(0.3) is not crowded
        written.append("all")

    data = SimpleNamespace(test=SimpleNamespace(labels=torch.zeros(1)))
    job: Any = SimpleNamespace(
        datasets=[data], target=lambda _: None, chosen=SimpleNamespace(pad_id=0), _write=write
    )
    run.plan = SimpleNamespace(precision="fp32", eval_batch_size=1)  # type: ignore[assignment]
    assert encoder.PreparedEncoder._judge(job, run, 0, tmp_path, job) is judged
    assert bool(written) is crowded
    goes_on.set()
    run.settle()
    assert written == ["all"]
    assert not encoder._crowds(model, run_on("cpu", tmp_path))
