"""The planner's question about a job, from its configuration, and the plan that answers it.

Nothing here imports torch: the planner builds the model in a process of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainfit.conf import Composed, compose
from trainfit.conf.aliases import MOST_SEQUENCES
from trainfit.conf.composition import as_word
from trainfit.conf.schema import Config, EncoderModel, GptConfig, GptModel
from trainfit.core import codec
from trainfit.core.errors import BadInput
from trainfit.core.plan_records import Plan, RuntimeSettings, Workload
from trainfit.core.records import HardwareProfile
from trainfit.core.settings import SETTINGS, chosen_by, with_values
from trainfit.hardware import as_if, detect
from trainfit.hardware.catalogue import GpuSpec, find, gpus
from trainfit.hardware.model_shapes import model_shape, sizes_of
from trainfit.jobs.known_data import KnownData, assumed_lengths, assumption, known_data
from trainfit.jobs.models.classifier_settings import (
    ModelFacts,
    model_facts,
    model_fields,
    settings_from,
)
from trainfit.jobs.plan_choices import choose_freezing, choose_gpt
from trainfit.kernels import supported
from trainfit.measuring import remembered
from trainfit.planning import planner
from trainfit.planning.cpu_choice import start_ahead
from trainfit.planning.execution import compile_cost
from trainfit.planning.question import Pin, Question, lacks
from trainfit.planning.savers import saver_settings
from trainfit.runs import run_folder
from trainfit.tuning import tuned_cache

if TYPE_CHECKING:
    from trainfit.jobs.tuned_plans import JobQuestion

_BATCHES = {"nli": 16, "textclass": 32, "pairs": 32, "tokens": 32, "gpt": 64}
"""The documents' effective batches: 16 × 1 and 4 × 4 for NLI, 16 × 2 on the T4."""
_OWN_BATCH = 32
"""Samples per optimizer step of a job of the user's own that says nothing about it."""
_ANYWHERE = ("auto", "cpu", "conservative")
"""Presets that do not ask for a GPU."""
_FACTORIES = {
    **dict.fromkeys(("nli", "textclass", "pairs", "tokens"), "trainfit.jobs.probes:encoder_step"),
    "gpt": "trainfit.jobs.probes:gpt_step",
}
_MEASURED = ("task", "cuts", "memory", "time", "reasons", "measurements")
"""Fields of a tuned plan, besides its settings, that a run takes over."""
_FEW_TOKENS = {"vocab_size": 1024, "pad_token_id": 0}
"""Small vocabulary of a model that is timed: looking tokens up costs next to nothing."""


def plan(
    task: str | type,
    *overrides: str,
    gpu: str | None = None,
    model: str | None = None,
    memory_gib: float | None = None,
    lengths: Sequence[int] | None = None,
    watts: float | None = None,
    price_per_hour: float | None = None,
) -> Plan:
    """The plan of a built-in job on this machine, or on a GPU of the catalogue.

    `overrides` are key=value words as on the command line. `lengths` are the tokens of each
    training sequence, where they are known; else the documents' data is assumed.
    """
    from trainfit.jobs.configuration import fit_to_data
    from trainfit.jobs.registry import check_job, name_of

    name = name_of(task)
    check_job(name)
    named = () if model is None else (as_word("model.name", model),)
    composed = compose(name, (*overrides, *named))
    composed = fit_to_data(composed, None if gpu is None else find(gpu))
    if name in _FACTORIES:
        asked = question(composed, lengths, watts, price_per_hour)
    else:
        asked = asked_question(composed, watts, price_per_hour)
    profile = machine(composed, gpu)
    return answer(composed, asked, profile, memory_gib=memory_gib)


def answer(
    composed: Composed,
    asked: Question,
    profile: HardwareProfile,
    *,
    memory_gib: float | None = None,
    ranks: int = 1,
    machines: int = 1,
    here: bool = False,
) -> Plan:
    """Plan the job, with the rates that were measured on this machine.

    `here`: the job is about to run on it, so nothing is simulated where there is plenty of room.
    """
    if asked.pinned("liger"):
        _check_liger(asked, profile)
    measured = None if profile.simulated else remembered(profile)

    def make(one: Question) -> Plan:
        how: Any = {"ranks": ranks, "machines": machines, "here": here}
        return planner.plan(one, profile, memory_gib=memory_gib, measured=measured, **how)

    if composed.task not in _FACTORIES:  # a job of the user's own
        return make(asked)
    if composed.task == "gpt":
        return choose_gpt(composed, asked, make, gpu=bool(profile.gpus))
    return choose_freezing(composed, asked, lambda one, _: {"here": make(one)}, ["here"])["here"]


def plan_ahead(composed: Composed, *, trains: bool = False) -> None:
    """Start the process that times steps on a CPU, if the plan of this job or its folds need it."""
    folds = trains and getattr(getattr(composed.config, "cv", None), "folds", None) is not None
    timed = composed.config.device.mixed_precision == "auto"
    if (folds or timed) and run_folder.is_first_rank():
        start_ahead(models=_FACTORIES.get(composed.task) == _FACTORIES["nli"], folds=folds)


def _check_liger(asked: Question, profile: HardwareProfile) -> None:
    reason, fix = asked.no_liger, "leave it false"
    if reason is None and not profile.gpus:
        reason = "Liger's kernels are for GPUs"
    elif reason is None and not profile.simulated and not supported.is_installed():
        reason, fix = "liger-kernel is not installed", f"pip install liger-kernel, or {fix}"
    if reason is not None:
        raise BadInput(f"optimization.liger is true, and {reason}", fix)


def plan_all(
    composed: Composed,
    watts: float | None = None,
    price_per_hour: float | None = None,
    among: Sequence[GpuSpec] | None = None,
) -> list[tuple[str, Plan]]:
    """The plans for the GPUs of the catalogue."""
    specs = {spec.slug: spec for spec in among or gpus()}

    def make(one: Question, slugs: list[str]) -> dict[str, Plan]:
        return dict(planner.compare(one, [specs[slug] for slug in slugs]))

    asked = asked_question(composed, watts, price_per_hour)
    if composed.task not in _FACTORIES:
        return list(make(asked, list(specs)).items())
    return list(choose_freezing(composed, asked, make, list(specs)).items())


def machine(composed: Composed, gpu: str | None = None) -> HardwareProfile:
    """Find this machine, or one with this GPU; raise BadInput where more is asked of it."""
    profile, device = detect() if gpu is None else as_if(gpu), composed.config.device
    if device.use_cuda is False:
        profile = replace(profile, gpus=())
    elif not profile.gpus and device.use_cuda is True:
        raise BadInput("device.use_cuda is true, but there is no GPU here", "set it to auto")
    elif not profile.gpus and device.memory_gib is not None:
        raise BadInput(
            f"device.memory_gib={device.memory_gib:g} bounds a GPU, and there is none here",
            f"leave it out, or name a GPU: `trainfit plan {composed.task} --gpu 4090 --memory 8`",
        )
    elif not profile.gpus and composed.hardware not in _ANYWHERE:
        raise BadInput(
            f"hardware={composed.hardware}, but there is no GPU here",
            "use hardware=auto or cpu; "
            f"`trainfit plan {composed.task} --gpu NAME` plans for any GPU",
        )
    asked = device.mixed_precision
    own = composed.origins["device.mixed_precision"] == "override"
    if own and not profile.gpus and asked in ("bf16", "fp16") and lacks(asked, profile.cpu, None):
        raise BadInput(
            f"device.mixed_precision is {asked}, which this CPU does not multiply",
            "set it to auto or off",
        )
    return profile


def question(
    composed: Composed,
    lengths: Sequence[int] | None = None,
    watts: float | None = None,
    price_per_hour: float | None = None,
    *,
    folds: Sequence[Sequence[int]] = (),
) -> Question:
    """The planner's question; `folds` are the lengths of folds after the first."""
    config = composed.config
    facts = check_model(composed)
    causal = isinstance(config, GptConfig)
    if isinstance(config.model, GptModel):
        arguments = {"name": config.model.name, **gpt_sizes(config.model)}
    else:
        decided = {"method": _method(config.model), "checkpointing": "none", "weights": "random"}
        arguments = codec.encode(settings_from(config.model, **decided))
    data = _looked_at(composed, lengths)
    _positive("watts", watts)
    _positive("a price per hour", price_per_hour)
    return Question(
        task=composed.task,
        factory=_FACTORIES[composed.task],
        arguments=arguments,
        layers=arguments.get("n_layer", facts.layers) if causal else facts.layers,
        sizes=sizes_of(model_fields(config.model.name) | (arguments if causal else {})),
        workload=replace(_workload(composed, data), trainings=1 + len(folds)),
        data=data.about or None,
        assumed=data.assumed,
        more_folds=tuple(_cut_off(each, config.data.max_length) for each in folds),
        quick={} if causal else {"overrides": _FEW_TOKENS},
        pins=configured_pins(composed),
        default_batch=_BATCHES[composed.task],
        unpackable=facts.unpackable,
        own_attention=facts.own_attention,
        packed_attention=facts.packed_attention,
        window=facts.window,
        fp16_overflows=facts.fp16_overflows,
        not_recomputed=facts.not_recomputed,
        no_liger=facts.no_liger,
        uncapturable=None,
        gathers=not causal,
        causal=causal,
        savers=saver_settings(adapters=not causal),
        watts=watts,
        price_per_hour=price_per_hour,
    )


def check_model(composed: Composed) -> ModelFacts:
    """Return the facts of a job's model; raise BadInput for an unknown one or another job's."""
    name, causal = composed.config.model.name, isinstance(composed.config, GptConfig)
    if causal and not Path(name).is_dir():
        model_shape(name)  # the hub has no GPT of trainfit's own
    pooling = getattr(composed.config.model, "pooling", "mean")
    facts = model_facts(name, pooling, composed.config.data.max_length)
    if causal != facts.own_gpt:
        need = "a GPT of the catalogue, such as gpt-small" if causal else "an encoder or a decoder"
        raise BadInput(f"{name} is no model for {composed.task}", f"give {need}")
    return facts


def asked_question(
    composed: Composed, watts: float | None = None, price_per_hour: float | None = None
) -> Question:
    """Return the planner's question of any job; the data of one of the user's own is read."""
    if composed.task in _FACTORIES:
        return question(composed, None, watts, price_per_hour)
    from trainfit.jobs.registry import job_module

    made: Question = job_module(composed.task).prepare(composed).question()
    return replace(made, watts=watts, price_per_hour=price_per_hour)


def effective_batch(composed: Composed) -> int:
    """Return the sequences per optimizer step, without reading the data of a job."""
    if composed.task in _FACTORIES:
        return _effective(composed)
    pin = configured_pins(composed).get("effective_batch_size")
    return _OWN_BATCH if pin is None else int(str(pin.value))


def runtime_settings(config: Config, plan: Plan) -> RuntimeSettings:
    """The process-wide switches of a run: the plan's, and the threads that were asked for."""
    threads = config.device.num_threads
    return plan.runtime if threads == "auto" else replace(plan.runtime, num_threads=threads)


def gpt_sizes(model: GptModel) -> dict[str, Any]:
    """Return the sizes of a GPT that are set, and not left to its name, the data or the plan."""
    names = ("n_layer", "n_head", "n_embd", "vocab_size", "loss_chunk")
    found = {name: getattr(model, name) for name in names}
    sizes = {name: value for name, value in found.items() if value not in (None, "auto")}
    sizes["half_stream"] = model.half_stream
    return sizes | ({"dropout": model.dropout} if model.dropout else {})


def _positive(name: str, value: float | None) -> None:
    if value is not None and not value > 0:
        raise BadInput(f"{name} is {value}", "give a number above 0")


def _method(model: Any) -> Any:
    assert isinstance(model, EncoderModel)
    return "frozen" if model.freeze_encoder is True else model.method


_CUT = ("gradient_accumulation_steps", "batch_size")


def configured_pins(composed: Composed) -> dict[str, Pin]:
    """Return the settings that the configuration decides, with where each value came from."""
    values = composed.values()
    pins = {
        row.name: Pin(value=row.to_plan(values[row.key]), origin=composed.origins[row.key])
        for row in SETTINGS
        if row.pinned and values.get(row.key) not in ("auto", None)
    }
    effective = pins.get("effective_batch_size")
    asked = effective is not None and effective.origin == "override"
    if asked and pins.keys() >= set(_CUT):
        sizes: dict[str, Any] = {name: pin.value for name, pin in pins.items()}
        if math.prod(sizes[name] for name in _CUT) < sizes["effective_batch_size"]:
            # The user's effective batch beats the cut of a preset, which was made for another.
            pins.pop(next((name for name in _CUT if pins[name].origin != "override"), ""), None)
    return pins


def _looked_at(composed: Composed, lengths: Sequence[int] | None) -> KnownData:
    """Return the given lengths, or those of the data that is named, or assumed ones."""
    if lengths is not None:
        return KnownData(lengths=tuple(lengths), sequences=len(lengths), about="")
    found = known_data(composed)
    if found is not None:
        return found
    assumed = assumed_lengths(composed.task, composed.config.data.max_length).tolist()
    said = (assumption(composed),)
    return KnownData(lengths=tuple(assumed), sequences=len(assumed), about="", assumed=said)


def _workload(composed: Composed, data: KnownData) -> Workload:
    config = composed.config
    longest = config.data.max_length
    training = config.training
    steps = training.max_steps
    effective = _effective(composed)
    epochs = training.num_epochs if steps is None else steps * effective / max(1, data.sequences)
    return Workload(
        lengths=_cut_off(data.lengths, longest),
        sequences=data.sequences,
        max_length=longest,
        effective_batch_size=effective,
        epochs=epochs,
        method="full" if isinstance(config, GptConfig) else _method(config.model),
    )


def _cut_off(lengths: Sequence[int], longest: int) -> tuple[int, ...]:
    """Return the lengths of sequences that are truncated to `longest` tokens."""
    if not len(lengths) or min(lengths) < 1:
        raise BadInput(
            f"{len(lengths)} lengths, the least of them {min(lengths, default=None)}",
            "give the tokens of each training sequence, 1 or more",
        )
    return tuple(min(int(length), longest) for length in lengths)


def _effective(composed: Composed) -> int:
    training, optimization = composed.config.training, composed.config.optimization
    if training.effective_batch_size != "auto":
        return training.effective_batch_size
    if training.batch_size == "auto":
        return _BATCHES[composed.task]
    steps = optimization.gradient_accumulation_steps
    product = training.batch_size * (1 if steps == "auto" else steps)
    if product > MOST_SEQUENCES:
        raise BadInput(
            f"training.batch_size {training.batch_size} × gradient_accumulation_steps {steps} "
            f"is a step of {product:,} sequences",
            f"use at most {MOST_SEQUENCES:,}",
        )
    return product


def with_tuned(job: JobQuestion, plan: Plan) -> Plan:
    """Return the plan with settings that `tune` found for this job before, if any."""
    if job.composed.config.tune == "off" or plan.workload.method == "frozen":
        return plan
    found = tuned_cache.read(job.question, job.profile, job.ranks)
    if found is None:
        return plan
    return adopt(plan, found.best, compile_cost(job.question, job.profile.cpu.cores))


def adopt(plan: Plan, tuned: Plan, cost: float) -> Plan:
    """A run's own plan with the tuned settings, where compiling takes `cost` seconds.

    In a short run compiling does not pay, and what was tuned with it, the budget above all, is not
    for a run without: that one goes as it was planned.
    """
    if tuned.compile and not plan.compile and _is_short(plan, tuned, cost):
        return plan
    settings = {row.name: row.of(tuned) for row in chosen_by("tune", "tuned")}
    measured = {name: getattr(tuned, name) for name in _MEASURED}
    return replace(with_values(plan, settings), **measured)


def _is_short(plan: Plan, tuned: Plan, cost: float) -> bool:
    workload = plan.workload
    if tuned.time is None or tuned.time.samples_per_second is None:
        return False
    seconds = workload.sequences * workload.epochs / tuned.time.samples_per_second
    return seconds / 2 < cost  # no recorded step became twice as fast
