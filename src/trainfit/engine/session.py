"""A run in this process: its progress, log, events, evaluations and checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trainfit.core import codec
from trainfit.core.records import Event, RunResult
from trainfit.data.batches import LoadedStep
from trainfit.engine import checkpoint, saved_state
from trainfit.engine.captured import Reading, Readings, Waits
from trainfit.engine.distributed import first_writes, gather
from trainfit.engine.evaluation import is_better, nonfinite_loss
from trainfit.engine.loop_settings import rate_factor
from trainfit.engine.memory_errors import retried
from trainfit.engine.observers import Observer, Progress, TrainRow, Window, as_scalars, make_row
from trainfit.engine.recovery import NONFINITE_FIX, CannotGoOn, NotFinite, Parts, StepOutcome
from trainfit.engine.relaunch import RestartChanges
from trainfit.measuring.profiled_step import is_due, profiled
from trainfit.measuring.receipt import EVIDENCE
from trainfit.measuring.timing import GIB, MemoryTracker
from trainfit.runs import timeline
from trainfit.runs.opening import RunSetup
from trainfit.runs.run_folder import Journal
from trainfit.runtime import compile_seconds

if TYPE_CHECKING:
    from trainfit.engine.loop import Shared


@dataclass
class Session:
    """State and outputs of a run in this process."""

    parts: Parts
    run: Path
    progress: Progress
    steps_per_epoch: int
    journal: Journal
    line: Callable[[TrainRow], str]
    observers: Sequence[Observer]
    ideal_seconds: Callable[[Sequence[int]], float] | None
    frozen: Future[str | None]
    """Checksum of the frozen weights."""
    shared: Shared
    saved_step: int | None = None
    readings: Readings = field(default_factory=Readings)
    memory: MemoryTracker = field(default_factory=MemoryTracker)
    writer: checkpoint.CheckpointWriter = field(default_factory=checkpoint.CheckpointWriter)
    started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        """Start the clock of the first window."""
        self.go_on()
        self.waits = Waits(self.parts.device)
        self.earlier_seconds = self.progress.seconds
        self.first_step, self.most_sequences = self.progress.step, 0
        self.checked_step, self.lost_steps = -1, 0

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        settings = self.parts.settings
        if settings.max_steps is not None:
            return settings.max_steps
        return math.ceil(settings.epochs * self.steps_per_epoch)

    @property
    def seconds(self) -> float:
        """Training time since the first start, without interruptions."""
        return self.earlier_seconds + time.perf_counter() - self.started

    @property
    def rates(self) -> list[float]:
        """Learning rate of each parameter group in the step to come."""
        schedule = self.parts.settings.schedule
        factor = rate_factor(self.progress.step, self.total_steps, schedule)
        return [rate * factor for rate in self.parts.rates]

    def tell(self, kind: str, text: str, figures: Mapping[str, int] | None = None) -> None:
        """Record an event; programs read the `figures` and never the text."""
        event = Event(kind=kind, step=self.progress.step, seconds=self.seconds, text=text)
        self.progress.events = (*self.progress.events, event)
        self.journal.event(event, figures or {})
        for observer in self.observers:
            observer.on_event(event)

    def open(self, setup: RunSetup) -> None:
        """Record the settings in effect at the first step of this process."""
        for text in self.journal.setup(setup, self.progress.step):
            for observer in self.observers:
                observer.on_line(text)

    # ── the clock and the log ──

    def pause(self) -> None:
        """Wait for the device, and add the time so far to the window."""
        self.read(wait=True)
        window = self.progress.window
        window.seconds += time.perf_counter() - self.mark
        compiled, captured = self._preparing()
        compiling, capturing = compiled - self.compiled, captured - self.captured
        window.compiling += max(0.0, compiling + capturing)
        timeline.took("compile", max(0.0, compiling))
        timeline.took("capture", capturing)
        window.waited += self.waits.take()
        self.go_on()

    def go_on(self) -> None:
        """Start the clock of the window again, after a pause."""
        self.mark = time.perf_counter()
        self.compiled, self.captured = self._preparing()

    def _preparing(self) -> tuple[float, float]:
        """Seconds that torch.compile and capturing have taken in this process."""
        return compile_seconds(), self.parts.captured.seconds

    def read(self, *, wait: bool) -> None:
        """Read losses and norms of past steps; skipped steps are recorded or end the run."""
        for reading in self.readings.arrived(wait=wait):
            if reading.step == self.first_step:
                timeline.mark(timeline.FIRST_UPDATE)
            finite = math.isfinite(reading.loss) and math.isfinite(reading.grad_norm)
            self.progress.window.grad_norm = reading.grad_norm
            if finite:
                self.progress.window.losses += (reading.loss,)
                self.progress.skipped_in_row = 0
            else:
                self._skipped(reading)

    def _skipped(self, reading: Reading) -> None:
        settings = self.parts.settings
        # In fp16 overflows are normal: they are how the loss scale is found.
        overflow = self.parts.scale is not None and math.isfinite(reading.loss)
        what = f"loss {reading.loss:g}, gradient norm {reading.grad_norm:g}"
        self.progress.skipped_in_row += 1
        self.lost_steps += not overflow
        self.tell("overflow" if overflow else "skipped", f"step {reading.step}: {what}; no update")
        in_row = self.progress.skipped_in_row
        if in_row >= settings.nonfinite_limit or (settings.nonfinite == "stop" and not overflow):
            self.progress.skipped_in_row = 0  # a resumed run tries again
            raise CannotGoOn(
                f"step {reading.step} is not finite ({what}), {in_row} in a row", NONFINITE_FIX
            )

    def check_weights(self) -> None:
        """Raise NotFinite on all ranks where a weight is not finite; no checkpoint is written."""
        if self.checked_step == self.progress.step:
            return
        found = gather(self.parts.world, saved_state.find_nonfinite(self.parts.model) or "")
        if name := next(filter(None, found), None):
            what = f"the weight {name} is not finite after step {self.progress.step}"
            raise NotFinite(what, NONFINITE_FIX)
        self.checked_step = self.progress.step

    def check_losses(self) -> None:
        """Raise NotFinite where no step, or the deciding evaluation, had a finite loss."""
        self.read(wait=True)
        progress = self.progress
        if self.lost_steps and self.lost_steps == progress.step - self.first_step:
            raise NotFinite(f"none of {self.lost_steps} steps had a finite loss", NONFINITE_FIX)
        if progress.best_step is None and (name := nonfinite_loss(progress.metrics)) is not None:
            at, value = progress.evaluated_step, progress.metrics[name]
            raise NotFinite(f"{name} is {value:g} in the evaluation after step {at}", NONFINITE_FIX)

    def log(self) -> None:
        """Write a row about the window, and begin a new one."""
        self.pause()
        progress = self.progress
        progress.peak_memory = self._peak()
        row = make_row(
            progress,
            total_steps=self.total_steps,
            steps_per_epoch=self.steps_per_epoch,
            learning_rate=float(self.parts.optimizer.param_groups[0]["lr"]),
            micro_batches=self.parts.settings.cuts[progress.rung].micro_batches,
        )
        self.journal.row("train", as_scalars(row))
        self.journal.line(self.line(row))
        for observer in self.observers:
            observer.on_log(row)
        progress.window = Window()
        self.go_on()

    def _peak(self) -> int:
        """Most bytes in use so far; those of a replayed step were counted when it was captured."""
        return max(self.progress.peak_memory, self.memory.update().peak, self.parts.captured.peak)

    @contextmanager
    def profiled(self, loaded: LoadedStep) -> Iterator[None]:
        """Profile this step for the receipt, if it is due, on the first rank."""
        sequences, captured = len(loaded.sequences), self.parts.captured
        most = self.most_sequences = max(self.most_sequences, sequences)
        taken, total = self.progress.step - self.first_step, self.total_steps - self.first_step
        wanted = self.parts.settings.profile_step and not self.shared.profiled
        if not (wanted and is_due(taken, total, sequences, most, captured.replays(loaded.batches))):
            yield
            return
        self.shared.profiled = True
        self.pause()  # on every rank: all must have read the same readings
        if not self.parts.world.first:
            yield
            return
        with (
            captured.renewed(),
            timeline.stage("receipt"),
            profiled(
                self.progress.step,
                loaded.batches,
                sequences,
                optimizer=self.parts.optimizer,
                begins=self.go_on,
                ends=self.pause,
            ) as look,
        ):
            yield
        with suppress(OSError):  # a run does not fail for its receipt
            if look.evidence is not None:
                look.evidence.save(self.run / EVIDENCE, parents=False)
        self.go_on()

    # ── the end of a step ──

    def took(self, loaded: LoadedStep, taken: StepOutcome) -> None:
        """Update the progress after a step."""
        progress, window = self.progress, self.progress.window
        for text in self.parts.captured.take_news():
            self.tell("capture", text)
        progress.use_rung(taken.rung)
        retried(lambda: self.readings.add(progress.step, taken.numbers))
        progress.step += 1
        progress.step_in_epoch += 1
        lengths = self.parts.loader.lengths[list(loaded.sequences)].tolist()
        window.steps += 1
        window.sequences += len(lengths)
        window.tokens += sum(lengths)
        self.waits.end()
        if self.ideal_seconds is not None:
            window.ideal_seconds += self.ideal_seconds(lengths)
        # Ranks must agree on when to stop, so several ranks read only after waiting together.
        if self.parts.world.size == 1:
            self.read(wait=False)
        for observer in self.observers:
            observer.on_step(progress.step)

    def use_replayed_rung(self) -> int:
        """Cut of the next step: from the run that is replayed, or the last one used."""
        for step, rung in self.parts.settings.cut_changes:
            if step == self.progress.step:
                self.progress.use_rung(rung)
        return self.progress.rung

    @property
    def evaluation_is_due(self) -> bool:
        """True after `eval_steps` or an epoch, and at the end."""
        progress, every = self.progress, self.parts.settings.eval_steps
        if progress.step == self.total_steps:
            return True
        if every is None:
            return progress.step_in_epoch == self.steps_per_epoch
        return progress.step % every == 0

    @property
    def save_is_due(self) -> bool:
        """True after `checkpoint_steps`, or after each evaluation."""
        every = self.parts.settings.checkpoint_steps
        if every is None:
            return self.progress.evaluated_step == self.progress.step
        return self.progress.step % every == 0

    @property
    def out_of_patience(self) -> bool:
        """True after too many evaluations without a better one."""
        patience = self.parts.settings.early_stopping_patience
        return patience is not None and self.progress.evaluations_without_better >= patience

    def evaluated(self, metrics: Mapping[str, float], seconds: float) -> bool:
        """Record an evaluation that took `seconds`; returns True for the best so far."""
        progress, settings = self.progress, self.parts.settings
        progress.metrics, progress.evaluated_step = dict(metrics), progress.step
        better = settings.metric is not None and is_better(
            metrics, progress.best_metrics, settings.metric, settings.greater_is_better
        )
        # With a loss that is not finite, other metrics mean nothing.
        better = better and nonfinite_loss(metrics) is None
        progress.evaluations_without_better += 1
        if better:
            progress.best_step, progress.best_metrics = progress.step, dict(metrics)
            progress.evaluations_without_better = 0
        self.journal.row("evaluation", {"step": progress.step, "seconds": seconds, **metrics})
        shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.journal.line(f"evaluation at step {progress.step}: {shown} ({seconds:.1f} s)")
        for observer in self.observers:
            observer.on_evaluation(progress.step, metrics)
        if self.out_of_patience:
            waited = progress.evaluations_without_better
            self.tell("early stop", f"{waited} evaluations without a better {settings.metric}")
        return better

    @timeline.stage("checkpoint")
    def save(self) -> None:
        """Write a checkpoint with every rank's random state."""
        self.check_weights()
        if not self.parts.settings.keep_checkpoints:
            self.saved_step = self.progress.step
            return
        self.pause()
        self.writer.wait()
        parts, progress = self.parts, self.progress
        progress.seconds = self.seconds
        states = gather(parts.world, saved_state.take(parts.device).to_json(indent=None))
        keep, best = parts.settings.keep_checkpoints, progress.best_step
        contents = self._contents(states)
        copied = checkpoint.on_host(contents, self.shared.host) if self.writes_alongside else None
        if copied is not None:
            self.writer.start(partial(checkpoint.save, self.run, copied, keep=keep, best_step=best))
        elif parts.sharded:
            checkpoint.save_sharded(self.run, contents, parts.world, keep=keep, best_step=best)
        else:
            with first_writes(parts.world) as writes:
                if writes:
                    checkpoint.save(self.run, contents, keep=keep, best_step=best)
        self.saved_step = progress.step
        self.go_on()

    def keep_best(self) -> None:
        """Copy the weights, which are the best so far, to host memory if it has room."""
        self.shared.best = None  # its memory is written to, and may be half written
        best = self.parts.whole and checkpoint.Contents(self.parts.saved_weights(), {}, {})
        if best and (copied := checkpoint.on_host(best, self.shared.best_host)):
            self.shared.best = copied.model

    @property
    def ends_in_memory(self) -> bool:
        """True after the last step where nothing is left to write: the best weights are kept."""
        return self.over and not self.parts.settings.save_last and self.shared.best is not None

    @property
    def over(self) -> bool:
        """True after the last step."""
        return self.progress.step >= self.total_steps or self.out_of_patience

    @property
    def writes_alongside(self) -> bool:
        """True where checkpoints are written while the GPU works: on one rank only."""
        return self.parts.device.type == "cuda" and self.parts.whole

    def _contents(self, random_states: list[str]) -> checkpoint.Contents:
        parts, scale = self.parts, self.parts.scale
        optimizer, optimizer_rest = saved_state.optimizer_state(parts.model, parts.optimizer)
        task, task_rest = saved_state.task_state(parts.task)
        return checkpoint.Contents(
            model=parts.saved_weights(),
            optimizer=optimizer,
            task=task,
            state={
                "step": self.progress.step,
                "progress": codec.encode(self.progress),
                "random": random_states,
                "scale": scale and [scale.factor.item(), scale.quiet_steps.item()],
                "frozen": self.frozen.result(),
                "optimizer": optimizer_rest,
                "task": task_rest,
            },
        )

    def leave(self, change: RestartChanges) -> None:
        """Save changes for the next start, together with earlier ones."""
        progress = self.progress
        size = change.eval_batch_size or progress.eval_batch_size
        RestartChanges(rung=max(change.rung, progress.rung), eval_batch_size=size).leave(self.run)

    def finish(self, status: Literal["finished", "stopped", "failed"]) -> RunResult:
        """End the run: write result.json on the first rank, and inform observers."""
        progress = self.progress
        result = RunResult(
            run=str(self.run),
            status=status,
            steps=progress.step,
            seconds=self.seconds,
            metrics=progress.metrics if progress.best_step is None else progress.best_metrics,
            peak_memory_gib=self._peak() / GIB,
            events=progress.events,
            best_step=progress.best_step,
            cuts=progress.cuts,
        )
        if self.parts.world.first:
            result.save(self.run / "result.json", parents=False)
        self.journal.line(f"{status} after {progress.step} steps")
        for observer in self.observers:
            observer.on_end(result)
        return result
