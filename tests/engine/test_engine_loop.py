"""The loop: what it counts, when it evaluates, what it writes, and when it gives up."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from engine_toy import ToyTask, final_bits, final_weights, settings
from torch import Tensor, nn
from torch.nn import functional

from trainfit.core.errors import BadInput, RunFailed
from trainfit.core.records import Event, RunResult
from trainfit.engine import checkpoint
from trainfit.engine.captured import Readings
from trainfit.engine.loop import train
from trainfit.engine.loop_settings import LoaderSettings, LoopSettings, ScheduleSettings
from trainfit.engine.observers import Observer, TrainRow
from trainfit.runs import run_folder


def rows(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def by_hand(task: ToyTask, options: LoopSettings) -> dict[str, torch.Tensor]:
    """The same training in a few lines of plain torch: whole steps, padded, no micro-batches."""
    torch.manual_seed(options.seed)
    model = task.build_model()
    matrices = [p for p in model.parameters() if p.dim() > 1 and p.shape != (2, 2)]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    total, step = 15, 0
    for epoch in range(3):
        for sequences in task.steps(epoch):
            rate = (step + 1) / 3 if step < 2 else 0.5 + 0.5 * math.cos(math.pi * (step - 2) / 13)
            batch = task.collate(sequences, len(sequences), 12, None)
            logits = model(batch["ids"], batch["segments"], batch["count"])
            functional.cross_entropy(logits, batch["labels"]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = 0.02 * rate
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    assert step == total
    return model.state_dict()


@pytest.mark.parametrize("rung", [0, 1, 3])
def test_training_is_that_of_plain_torch_whatever_the_cut(tmp_path: Path, rung: int) -> None:
    """Also: the last, partial step of an epoch is a step, and rates count optimizer steps."""
    task = ToyTask(dtype=torch.float64, dropout=0.0)
    assert [len(step) for step in task.steps(0)] == [8, 8, 8, 8, 6]
    options = settings(task, cut_changes=((0, rung),))
    assert train(task, options, tmp_path / "run").steps == 15
    expected, found = by_hand(task, options), final_weights(tmp_path / "run")
    for name, weight in found.items():
        assert (weight - expected[name]).abs().max() < 1e-9, name
    rates = [row["learning_rate"] for row in rows(tmp_path / "run", "train")]
    assert rates[0] == pytest.approx(0.02)
    assert rates[-1] == pytest.approx(0.02 * (0.5 + 0.5 * math.cos(math.pi * 12 / 13)))


@pytest.mark.parametrize(("sequences", "full"), [(38, 4), (40, 5), (6, 1)])
def test_drop_last_leaves_out_a_step_that_is_not_full(
    tmp_path: Path, sequences: int, full: int
) -> None:
    task, seen = ToyTask(sequences=sequences), []
    weight = task.weight

    def weigh(step: Sequence[int]) -> float:
        seen.append(len(step))
        return weight(step)

    task.weight = weigh  # type: ignore[method-assign]
    options = settings(task, epochs=2, drop_last=True)
    assert train(task, options, tmp_path / "run").steps == 2 * full
    assert set(seen) == {min(8, sequences)}


@pytest.mark.parametrize("loader", [LoaderSettings(), LoaderSettings(num_workers=1)])
def test_evaluation_and_loading_do_not_change_the_training(
    tmp_path: Path, loader: LoaderSettings
) -> None:
    ends = []
    for eval_steps in (1, 100):
        task, run = ToyTask(), tmp_path / str(eval_steps)
        train(task, settings(task, eval_steps=eval_steps, loader=loader), run)
        ends.append(final_bits(run))
    assert ends[0] == ends[1]


def test_evaluation_is_never_at_step_0_and_always_at_the_end(tmp_path: Path) -> None:
    task = ToyTask()
    train(task, settings(task, eval_steps=None, epochs=1.6), tmp_path / "epochs")
    assert [row["step"] for row in rows(tmp_path / "epochs", "evaluation")] == [5, 8]
    train(task, settings(task, eval_steps=6, max_steps=13), tmp_path / "steps")
    assert [row["step"] for row in rows(tmp_path / "steps", "evaluation")] == [6, 12, 13]


def test_evaluation_runs_without_dropout_and_gradients(tmp_path: Path) -> None:
    task, seen = ToyTask(), []

    def evaluate(model: nn.Module, batch_size: int) -> dict[str, float]:
        seen.append((model.training, torch.is_grad_enabled(), batch_size))
        return {"loss": 1.0}

    task.evaluate = evaluate  # type: ignore[method-assign]
    train(task, settings(task), tmp_path / "run")
    assert set(seen) == {(False, False, 16)}


def test_early_stopping_counts_evaluations_without_a_better_one(tmp_path: Path) -> None:
    task = ToyTask()
    scores = [3.0, 2.0, 2.5, math.nan, 1.0]
    given = iter(scores)
    task.evaluate = lambda model, size: {"loss": next(given)}  # type: ignore[method-assign]
    options = settings(task, eval_steps=2, early_stopping_patience=2)
    result = train(task, options, tmp_path / "run")
    assert (result.status, result.steps, result.best_step) == ("finished", 8, 4)
    assert result.metrics == {"loss": 2.0}
    assert [event.kind for event in result.events] == ["early stop"]
    again = train(task, options, tmp_path / "run", resume=True)
    assert (again.status, again.steps) == ("finished", 8)


def test_a_metric_that_is_not_there_is_named(tmp_path: Path) -> None:
    task = ToyTask()
    with pytest.raises(BadInput, match=r"no metric 'los'; did you mean loss\?"):
        train(task, settings(task, metric="los"), tmp_path / "run")


def spoiled(*bad: int, value: float = math.nan) -> ToyTask:
    task = ToyTask()
    task.on_loss = lambda count, loss: loss * value if count in bad else loss
    return task


def test_a_loss_that_is_not_finite_is_skipped_and_counted(tmp_path: Path) -> None:
    task = spoiled(3, 7)
    result = train(task, settings(task), tmp_path / "run")
    assert [(event.kind, event.text.split(":")[0]) for event in result.events] == [
        ("skipped", "step 2"),
        ("skipped", "step 6"),
    ]
    assert all(torch.isfinite(w).all() for w in final_weights(tmp_path / "run").values())
    first = rows(tmp_path / "run", "train")[0]
    assert first["skipped"] == 1
    assert math.isfinite(first["loss"])


def test_the_policy_stop_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    task = spoiled(6, value=math.inf)
    with pytest.raises(RunFailed, match=r"step 5 is not finite \(loss inf"):
        train(task, settings(task, nonfinite="stop"), tmp_path / "run")
    saved = RunResult.load(tmp_path / "run" / "result.json")
    assert saved.status == "failed"
    assert [event.kind for event in saved.events] == ["skipped", "failed"]
    resumed = ToyTask()
    assert train(resumed, settings(resumed), tmp_path / "run", resume=True).status == "finished"


def test_too_many_skips_in_a_row_stop_the_run(tmp_path: Path) -> None:
    task = spoiled(2, 4, 5, 6)
    with pytest.raises(RunFailed, match="3 in a row"):
        train(task, settings(task, nonfinite_limit=3), tmp_path / "run")


class Recorder(Observer):
    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def on_start(self, step: int, total_steps: int) -> None:
        self.calls.append(("start", (step, total_steps)))

    def on_step(self, step: int) -> None:
        self.calls.append(("step", step))

    def on_log(self, row: TrainRow) -> None:
        self.calls.append(("log", row))

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(("evaluation", step))

    def on_event(self, event: Event) -> None:
        self.calls.append(("event", event.kind))

    def on_end(self, result: RunResult) -> None:
        self.calls.append(("end", result.status))


def test_observers_trackers_and_files_are_told_the_same(tmp_path: Path) -> None:
    task, watch = spoiled(3), Recorder()
    tracked: list[Mapping[str, Any]] = []
    lengths_seen: list[int] = []

    def ideal(lengths: Any) -> float:
        lengths_seen.extend(lengths)
        return 1e-5

    result = train(
        task,
        settings(task, epochs=1.0),
        tmp_path / "run",
        observers=[watch],
        trackers=[tracked.append],
        line=lambda row: f"iter {row.step}: loss {row.loss:.4f}",
        ideal_seconds=ideal,
    )
    kinds = [kind for kind, _ in watch.calls]
    assert kinds == ["start", "step", "step", "event", "step", "log", "step", "evaluation",
                     "step", "log", "evaluation", "end"]  # fmt: skip
    assert watch.calls[0] == ("start", (0, 5))
    row = next(value for kind, value in watch.calls if kind == "log")
    assert row.epoch == pytest.approx(3 / 5)
    steps = [sequence for step in task.steps(0) for sequence in step]
    assert lengths_seen == [task.lengths()[sequence] for sequence in steps]
    three = [task.lengths()[s] for step in task.steps(0)[:3] for s in step]
    assert row.tokens_per_second / row.samples_per_second == pytest.approx(sum(three) / 24)
    assert row.mfu == pytest.approx(1e-5 / row.compute_seconds)
    assert row.compute_seconds == pytest.approx(row.step_seconds * (1 - row.wait_share))
    log = (tmp_path / "run" / "train.log").read_text()
    assert f"iter 3: loss {row.loss:.4f}" in log
    assert [entry["kind"] for entry in tracked] == ["train", "evaluation", "train", "evaluation"]
    assert RunResult.load(tmp_path / "run" / "result.json") == result


def test_the_process_keeps_its_own_random_state(tmp_path: Path) -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    train(ToyTask(), settings(ToyTask(), epochs=1.0), tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_gives_the_same_bits_and_another_does_not(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(ToyTask(), settings(ToyTask(), seed=seed), tmp_path / name)
    a, b, c = (final_bits(tmp_path / name) for name in "abc")
    assert a == b != c


def test_a_compiled_model_trains_and_saves_plain_names(tmp_path: Path) -> None:
    task = ToyTask(dropout=0.0)
    with pytest.MonkeyPatch.context() as patch:
        from trainfit.engine import setup
        from trainfit.runtime import compile_blocks

        patch.setattr(setup, "compile_blocks", partial(compile_blocks, backend="eager"))
        train(task, settings(task, compile=True, epochs=1.0), tmp_path / "compiled")
    train(task, settings(task, epochs=1.0), tmp_path / "plain")
    compiled, plain = final_weights(tmp_path / "compiled"), final_weights(tmp_path / "plain")
    torch.testing.assert_close(compiled, plain)


def test_the_first_step_of_a_compiled_run_may_be_eager(tmp_path: Path) -> None:
    compiled_at: list[int] = []
    taken: list[int] = []

    class Count(Observer):
        def on_step(self, step: int) -> None:
            taken.append(step)

    def backend(graph: Any, _inputs: Any) -> Any:
        compiled_at.append(len(taken))
        return graph.forward

    task = ToyTask(dropout=0.0)
    with pytest.MonkeyPatch.context() as patch:
        from trainfit.engine import setup
        from trainfit.runtime import compile_blocks, forget_compiled

        def late(readings: Readings, *, wait: bool = False) -> list[Any]:
            return arrived(readings, wait=True) if wait else []  # as of a GPU that is still busy

        arrived, marked = Readings.arrived, list[int]()
        patch.setattr(Readings, "arrived", late)
        patch.setattr("trainfit.runs.timeline.mark", lambda _: marked.append(len(compiled_at)))
        patch.setattr(setup, "compile_blocks", partial(compile_blocks, backend=backend))
        for name, eager in (("later", True), ("at once", False)):
            forget_compiled()
            chosen = settings(task, compile=True, eager_first=eager, epochs=1.0)
            train(task, chosen, tmp_path / name, observers=[Count()])
            assert compiled_at[0] == int(eager)
            assert (marked[0] == 0) is eager  # the first loss does not wait for the compiler
            marked.clear()
            compiled_at.clear()
            taken.clear()
    torch.testing.assert_close(
        final_weights(tmp_path / "later"), final_weights(tmp_path / "at once")
    )


def test_an_epoch_of_another_length_is_refused(tmp_path: Path) -> None:
    task = ToyTask()
    steps = task.steps
    task.steps = lambda epoch: steps(epoch)[: 5 - epoch]  # type: ignore[method-assign]
    with pytest.raises(BadInput, match="epoch 1 has 4 steps, the first 5"):
        train(task, settings(task), tmp_path / "run")
    task.steps = lambda epoch: []  # type: ignore[method-assign]
    with pytest.raises(BadInput, match="no step"):
        train(task, settings(task), tmp_path / "none")


def test_a_step_without_weight_is_refused(tmp_path: Path) -> None:
    task = ToyTask()
    task.weight = lambda sequences: 0.0  # type: ignore[method-assign]
    with pytest.raises(BadInput, match=r"step 0 weigh 0\.0"):
        train(task, settings(task), tmp_path / "run")


def test_settings_survive_json_and_refuse_what_cannot_be(tmp_path: Path) -> None:
    for padded in (False, True):
        chosen = settings(ToyTask(), padded=padded, cut_changes=((3, 1),))
        assert LoopSettings.from_json(chosen.to_json()) == chosen
    chosen = settings(ToyTask())
    with pytest.raises(BadInput, match="no cut"):
        replace(chosen, cuts=())
    with pytest.raises(BadInput, match="without a metric"):
        replace(chosen, metric=None, early_stopping_patience=2)
    with pytest.raises(BadInput, match="ladder has 4"):
        replace(chosen, cut_changes=((0, 4),))
    assert replace(chosen, schedule=ScheduleSettings()).schedule.kind == "linear"


def test_run_folders_are_never_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder.time, "strftime", lambda _: "20260101-000000")
    made = [run_folder.create(tmp_path, "nli", config={"seed": 1}, plan=None) for _ in range(3)]
    assert [run.name[-2:] for run in made] == ["-1", "-2", "-3"]
    assert len({run_folder.identity(run) for run in made}) == 3
    assert json.loads((made[0] / "config.json").read_text()) == {"seed": 1}
    assert "torch" in json.loads((made[0] / "environment.json").read_text())["packages"]
    assert run_folder.find(made[1].name, tmp_path) == made[1]
    assert run_folder.find(str(made[1]), Path("elsewhere")) == made[1]
    with pytest.raises(BadInput, match=r"no run .* did you mean nli-20260101-000000-1"):
        run_folder.find("nli-20260101-000000-9", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFailed, match="cannot make a run folder"):
        run_folder.create(tmp_path / "file", "nli", config={}, plan=None)


class Replayed(torch.autograd.Function):
    """A weight whose gradient is written to the same memory each time, as a CUDA graph does."""

    memory: ClassVar[dict[int, Tensor]] = {}

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.place = weight.data_ptr()
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        memory = Replayed.memory.setdefault(ctx.place, torch.empty_like(gradient))
        return memory.copy_(gradient).detach()


class ReplayedLinear(nn.Linear):
    def forward(self, values: Tensor) -> Tensor:
        return functional.linear(values, Replayed.apply(self.weight), self.bias)


class ReplayedTask(ToyTask):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.hidden.__class__ = ReplayedLinear
        return model


def test_gradients_add_up_though_a_graph_writes_to_the_same_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainfit.engine.setup.compile_blocks", lambda *_, **__: None)
    plain = settings(ToyTask(), cut_changes=((0, 2),))
    train(ToyTask(), plain, tmp_path / "plain")
    expected = final_bits(tmp_path / "plain")
    for mode in ("reduce-overhead", "max-autotune"):
        train(ReplayedTask(), replace(plain, compile=True, compile_mode=mode), tmp_path / mode)
        assert final_bits(tmp_path / mode) == expected
    # Without it the sum is twice the last micro-batch's.
    other = replace(plain, compile=True, compile_mode="default")
    train(ReplayedTask(), other, tmp_path / "other")
    assert final_bits(tmp_path / "other") != expected


def test_weights_that_are_not_finite_end_the_run_and_get_no_checkpoint(tmp_path: Path) -> None:
    task = ToyTask()
    huge = {"learning_rate": 1e39}  # no float32 holds it
    with pytest.raises(RunFailed, match=r"the weight \S+ is not finite after step \d+; lower"):
        train(task, settings(task, optimizer=huge), tmp_path / "run")
    assert checkpoint.listed(tmp_path / "run") == []
    saved = RunResult.load(tmp_path / "run" / "result.json")
    assert (saved.status, saved.events[-1].kind) == ("failed", "failed")


def test_a_run_that_learned_nothing_finite_is_no_success(tmp_path: Path) -> None:
    task = spoiled(*range(100))
    with pytest.raises(RunFailed, match=r"none of \d+ steps had a finite loss"):
        train(task, settings(task, keep_checkpoints=0), tmp_path / "run")
    task = ToyTask()
    task.evaluate = lambda model, size: {"f1": 0.5, "loss": math.nan}  # type: ignore[method-assign]
    options = settings(task, metric="f1", greater_is_better=True)
    with pytest.raises(RunFailed, match="loss is nan in the evaluation after step"):
        train(task, options, tmp_path / "other")
    assert RunResult.load(tmp_path / "other" / "result.json").best_step is None
