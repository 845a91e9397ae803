"""`train gpt`: pretraining of a small GPT on a folder of tokens; and `sample`: text from it.

RUN/data.json, tokenizer.json    the tokens, and what turns them into text
RUN/export/, results.json        the model as transformers reads it; how the run ended
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trainfit.conf import Composed, GptConfig
from trainfit.core import codec
from trainfit.core.errors import BadInput
from trainfit.core.plan_records import Plan
from trainfit.core.records import HardwareProfile, RunResult
from trainfit.data.labels import check_characters
from trainfit.data.token_files import TOKENIZER, TokenFolder, open_tokens
from trainfit.data.token_preparation import Preparation, embedded_tokens, text_tokens
from trainfit.data.tokenizers import end_of_text, load_bpe
from trainfit.engine import checkpoint
from trainfit.engine.distributed import current_world, first_says
from trainfit.engine.loop_settings import LoopSettings, loop_settings
from trainfit.engine.recovery import Parts
from trainfit.engine.saved_state import find_nonfinite
from trainfit.engine.setup import describe
from trainfit.hardware.catalogue import find
from trainfit.hardware.host import check_room
from trainfit.jobs import exports, job_plan, plan_choices, pretraining, tuned_plans
from trainfit.jobs.configuration import configured_by
from trainfit.jobs.job_times import load_of, most_evaluated
from trainfit.jobs.models.building import birthplace, on_device
from trainfit.jobs.models.gpt_model import Gpt, GptShape, gpt_shape
from trainfit.jobs.plan_choices import stream_is_half
from trainfit.jobs.pretraining import (
    METRIC,
    GptResult,
    GptTask,
    Peaks,
    count_blocks,
    iter_line,
    read_meter,
)
from trainfit.jobs.run import Prepared, Run
from trainfit.jobs.run import train as train
from trainfit.measuring import flops
from trainfit.packing import ladder
from trainfit.runs import timeline
from trainfit.runs.opening import PretrainingSetup, RunSetup

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class PreparedGpt(Prepared):
    """A pretraining job: its configuration with the vocabulary settled, and its tokens."""

    data: TokenFolder

    @property
    def config(self) -> GptConfig:
        config = self.composed.config
        assert isinstance(config, GptConfig)
        return config

    metrics = (METRIC,)

    @property
    def sequences(self) -> int:
        """Number of blocks to train on."""
        return count_blocks(self.data.train, self.config.data.max_length, "training")

    def configured(self, composed: Composed) -> PreparedGpt:
        """Open the tokens again: they are mapped from files, which costs next to nothing."""
        return prepare(composed)

    def tuned_job(self, profile: HardwareProfile, ranks: int = 1) -> tuned_plans.JobQuestion:
        """Return the question of the planner and the tuner, about the blocks that there are."""
        config, block = self.config, self.config.data.max_length
        blocks = self.sequences
        batch = job_plan.effective_batch(self.composed) * ranks
        # They are all alike: those of some steps tell the planner as much as millions.
        asked = job_plan.question(self.composed, [block] * min(blocks, 4 * batch))
        steps = config.training.max_steps
        epochs = config.training.num_epochs if steps is None else steps * batch / blocks
        asked = replace(asked, workload=replace(asked.workload, sequences=blocks, epochs=epochs))
        return tuned_plans.JobQuestion(
            composed=self.composed,
            question=asked,
            profile=profile,
            ranks=ranks,
            load=load_of(config, asked, len(self.data.validation)),
        )

    def facts(self) -> dict[str, Any]:
        """Describe the tokens for data.json."""
        return {
            "checksum": self.data.checksum,
            "folder": str(self.data.folder),
            "header": codec.encode(self.data.header),
            "unigram_entropy": self.data.unigram_entropy,
        }

    def files(self) -> Mapping[str, Path]:
        """Name the tokenizer, which samples are decoded with."""
        return {} if self.data.tokenizer is None else {TOKENIZER: self.data.tokenizer}

    def task(self, _fold: int, plan: Plan, device: torch.device) -> GptTask:
        config = self.config
        return GptTask(
            on_device(birthplace(plan, device), partial(build, config, plan)),
            self.data.train,
            self.data.validation,
            block_size=config.data.max_length,
            effective_batch=plan.effective_batch_size,
            unigram_entropy=self.data.unigram_entropy,
            evaluated=most_evaluated(config.training),
            seed=config.seed,
        )

    def settings(self, _fold: int, plan: Plan, device: torch.device, ranks: int) -> LoopSettings:
        return gpt_settings(self.config, plan, device=device.type, ranks=ranks)

    def extras(self, run: Run) -> dict[str, Any]:
        """Return the lines of the log and the FLOP count."""
        peaks = Peaks.of(run.plan, run.profile, run.world, run.device)
        return {
            "line": iter_line,
            "ideal_seconds": flops.ideal_seconds(shape_of(self.config).flops, peaks.datasheet),
            "opening": lambda parts: opening(parts, run.plan, self.data),
        }

    def judge(self, run: Run, resume: bool) -> GptResult:
        """Train and export the weights of the best evaluation."""
        result = run.train(0, run.folder, "", resume=resume)
        if result.status == "finished" and run.world.first:
            model = run.best_model(partial(build, self.config, run.plan), run.folder, trained=Gpt)
            with run.show.busy("writing the model"), timeline.stage("export"):
                exports.write_gpt(run.folder / "export", model, self.data.tokenizer)
        return _ended(self, run, result)


def prepare(composed: Composed, *, nested: bool = True) -> PreparedGpt:
    """Open the tokens that are named, or those of a text, made by the first rank."""
    del nested  # there are no folds
    config = composed.config
    assert isinstance(config, GptConfig)
    world = current_world()
    folder = first_says(world, str(_token_folder(composed)) if world.first else "")
    data = open_tokens(Path(folder), survey=world.first)
    size = _vocabulary(config, data)
    settled = replace(config, model=replace(config.model, vocab_size=size))
    count_blocks(data.train, config.data.max_length, "training")
    return PreparedGpt(composed=replace(composed, config=settled), data=data)


def _token_folder(composed: Composed) -> Path:
    """Return the folder of tokens that is named, or that of a text or the standard library."""
    config, text = composed.config, plan_choices.text_of(composed)
    assert isinstance(config, GptConfig)
    if text is not None:
        return text_tokens(text, plan_choices.preparation(config))
    if config.data.data_dir is not None:
        return Path(config.data.data_dir)
    how = Preparation(vocab_size=config.data.vocab_size, seed=config.seed)
    return embedded_tokens(how)


def _vocabulary(config: GptConfig, data: TokenFolder) -> int:
    """Rows of the embedding: one for each token at least."""
    asked, needed = config.model.vocab_size, data.header.vocab_size
    if asked == "auto":
        return -(-needed // plan_choices.ROUND) * plan_choices.ROUND
    if asked < needed:
        raise BadInput(
            f"model.vocab_size is {asked}, and {data.folder} has a vocabulary of {needed}",
            "leave it to auto, or give at least as many",
        )
    return asked


def shape_of(config: GptConfig) -> GptShape:
    """The model's sizes; the vocabulary is settled, and the block size is the sequence length."""
    sizes = job_plan.gpt_sizes(config.model)
    for not_a_size in ("loss_chunk", "half_stream"):
        sizes.pop(not_a_size, None)
    return gpt_shape(config.model.name, block_size=config.data.max_length, **sizes)


def build(config: GptConfig, plan: Plan) -> Gpt:
    """Build a new model with the plan's settings."""
    shape = shape_of(config)
    check_room(4 * shape.parameters, config.model.name)
    return Gpt(
        shape,
        checkpointing=plan.gradient_checkpointing,
        loss_chunk=plan.task.arguments.get("loss_chunk"),
        half_stream=stream_is_half(config.model.half_stream, plan.precision),
    )


def gpt_settings(config: GptConfig, plan: Plan, *, device: str, ranks: int) -> LoopSettings:
    """Return the settings of the loop; all blocks are alike, so those of one step speak for all."""
    block = config.data.max_length
    cuts = ladder(
        np.full(plan.effective_batch_size, block),
        plan.effective_batch_size,
        min(plan.batch_size * block, max(block, plan.micro_batch_tokens)),
        padded=True,
        ranks=ranks,
        seed=config.seed,
        at_least=plan.gradient_accumulation_steps,
        at_most=plan.gradient_accumulation_steps,
    )
    return loop_settings(
        config,
        plan,
        cuts,
        device=device,
        metric=METRIC,
        greater_is_better=False,
        compile_scope="model",  # a long run pays the minute back: the loss is fused too
    )


def opening(parts: Parts, plan: Plan, data: TokenFolder) -> RunSetup:
    """Record the settings in effect, with the tokens and the batch."""
    return replace(
        describe(parts),
        alike=True,
        pretraining=PretrainingSetup(
            train_tokens=data.header.train.tokens,
            held_out_tokens=data.header.validation.tokens,
            vocabulary=data.header.vocab_size,
            unigram_entropy=data.unigram_entropy,
            effective_batch_size=plan.effective_batch_size,
            step_tokens=plan.effective_batch_size * plan.workload.max_length,
            batch_size=plan.batch_size,
            loss_chunk=plan.task.arguments.get("loss_chunk"),
        ),
    )


def _ended(prepared: PreparedGpt, run: Run, result: RunResult) -> GptResult:
    """Summarise the run, with its MFU and ways to raise it."""
    plan, peaks = run.plan, Peaks.of(run.plan, run.profile, run.world, run.device)
    meter = read_meter(run.folder)
    spec = None if plan.gpu is None else find(plan.gpu)
    standing: pretraining.Standing | None = None
    steps: tuple[str, ...] = ()
    if meter.mfu is not None and spec is not None:
        standing = pretraining.standing(meter.mfu, spec)
        if standing == "poor":
            share = (result.peak_memory_gib or 0.0) / spec.memory_gib
            config, wait = prepared.config, meter.wait_share
            steps = tuple(
                pretraining.next_steps(plan, config, spec, memory_share=share, wait_share=wait)
            )
    of_measured = None
    if meter.mfu is not None and peaks.measured and peaks.datasheet:
        of_measured = meter.mfu * peaks.datasheet / peaks.measured
    return GptResult(
        run=result.run,
        status="finished" if result.status == "finished" else "stopped",
        steps=result.steps,
        train_loss=meter.train_loss,
        val_loss=result.metrics.get(METRIC),
        unigram_entropy=prepared.data.unigram_entropy,
        tokens_per_second=meter.tokens_per_second,
        gpu=plan.gpu,
        mfu=meter.mfu,
        mfu_of_measured=of_measured,
        standing=standing,
        next_steps=steps,
        peak_memory_gib=result.peak_memory_gib,
        seconds=result.seconds,
        spent=meter.spent,
        events=result.events,
    )


# ── text from a trained GPT ───────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True, slots=True)
class TextWriter:
    """Model with its tokenizer."""

    model: Gpt
    tokenizer: Tokenizer

    def write(
        self,
        prompt: str = "",
        *,
        tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = 50,
        seed: int = 0,
    ) -> str:
        """Continue the prompt until the text ends or `tokens` are drawn."""
        ends = end_of_text(self.tokenizer)
        check_characters(prompt, "the prompt")
        given = self.tokenizer.encode(prompt, add_special_tokens=False).ids
        if not given and ends is None:
            raise BadInput("there is no prompt", "give one (--prompt): no token begins a text")
        # In training a text begins after the end of another.
        start = [*([] if ends is None else [ends]), *given]
        drawn = draw(
            self.model,
            start,
            known=self.tokenizer.get_vocab_size(),
            temperature=temperature,
            top_k=top_k,
            seed=seed,
        )
        found = takewhile(lambda token: token != ends, islice(drawn, tokens))
        return str(self.tokenizer.decode([*given, *found]))


def open_writer(run: Path) -> TextWriter:
    """Load a run's export, or the best checkpoint of a run that is not finished."""
    exported = run / "export" / TOKENIZER
    tokenizer = exported if exported.is_file() else run / TOKENIZER
    if not tokenizer.is_file():
        raise BadInput(
            f"{run} has no {TOKENIZER}: its tokens cannot be turned into text",
            "give a run of `trainfit train gpt` whose data had one",
        )
    if (run / "export").is_dir():
        model = exports.read_gpt(run / "export")
    else:
        config = configured_by(run, "gpt").config
        assert isinstance(config, GptConfig)
        model = build(config, Plan.load(run / "plan.json"))
        checkpoint.load_weights(run, model, best=True)
    if name := find_nonfinite(model):
        raise BadInput(f"the weight {name} of {run} is not finite", "train it again")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return TextWriter(model=model.to(device).eval(), tokenizer=load_bpe(tokenizer))


@torch.no_grad()
def draw(
    model: Gpt,
    start: list[int],
    *,
    known: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
) -> Iterator[int]:
    """Draw tokens after `start` from the first `known`, which the tokenizer can decode.

    A temperature of 0 always takes the most likely token.
    """
    random = torch.Generator().manual_seed(seed)
    device = model.token_embedding.weight.device
    ids = list(start)
    while True:
        recent = torch.tensor([ids[-model.shape.block_size :]], device=device)
        last = model.encode(recent)[0, -1]
        logits = (model.token_embedding.weight[:known] @ last).float().cpu()
        ids.append(_choose(logits, temperature, top_k, random))
        yield ids[-1]


def _choose(logits: Tensor, temperature: float, top_k: int | None, random: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < logits.numel():
        least = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    chances = (logits / temperature).softmax(-1)
    return int(torch.multinomial(chances, 1, generator=random))
