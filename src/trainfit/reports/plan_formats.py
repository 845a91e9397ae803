"""A plan in the words of other tools: transformers, Lightning, accelerate, Hydra, a shell.

Each format is a text that its tool takes as it is, with notes on what the tool has no argument
for and a person does in their own script.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import yaml

from trainfit.conf import Composed, Config
from trainfit.records import Plan
from trainfit.reports.plan_arguments import (
    even_batch,
    launch_config,
    trainer_arguments,
    training_arguments,
)
from trainfit.reports.plan_overrides import command_line, overrides


@dataclass(frozen=True, slots=True)
class Handover:
    """A plan for another tool."""

    text: str
    """What the tool reads; nothing else belongs on standard output."""
    notes: tuple[str, ...] = ()
    """What the text cannot say, a sentence each."""


def hf(plan: Plan, composed: Composed) -> Handover:
    """A JSON object for `TrainingArguments(output_dir=…, **arguments)`."""
    training = composed.config.training
    notes = [*_unfit(plan), *_unsaid(plan)]
    if plan.gradient_checkpointing == "selective":
        notes.append(
            "selective checkpointing was planned, and TrainingArguments has only the whole: "
            "less memory, and slower"
        )
    if training.eval_iters is not None:
        notes.append(f"cut the validation data to {training.eval_iters} batches yourself")
    if training.early_stopping_patience is not None:
        patience = training.early_stopping_patience
        notes.append(f"add EarlyStoppingCallback(early_stopping_patience={patience})")
    if plan.ranks > 1:
        notes.append(f"start the script with torchrun --nproc-per-node {plan.ranks}")
    arguments = training_arguments(plan, composed.config)
    return Handover(json.dumps(arguments, indent=2), tuple(notes))


def lightning(plan: Plan, composed: Composed) -> Handover:
    """A JSON object for `Trainer(**arguments)`."""
    config = composed.config
    notes = [*_unfit(plan), *_unsaid(plan), *_in_the_script(plan, config)]
    if plan.compile:
        notes.append(f"compile the model: torch.compile(model, mode={plan.compile_mode!r})")
    if config.training.early_stopping_patience is not None:
        patience = config.training.early_stopping_patience
        notes.append(f"add EarlyStopping(patience={patience}) on your validation metric")
    return Handover(json.dumps(trainer_arguments(plan, config), indent=2), tuple(notes))


def accelerate(plan: Plan, composed: Composed) -> Handover:
    """The YAML file that `accelerate launch --config_file` takes."""
    config = composed.config
    notes = [*_unfit(plan), *_unsaid(plan), *_in_the_script(plan, config)]
    steps = even_batch(plan).accumulation
    notes.append(f"build Accelerator(gradient_accumulation_steps={steps})")
    if config.training.max_grad_norm:
        norm = config.training.max_grad_norm
        notes.append(f"clip: accelerator.clip_grad_norm_(model.parameters(), {norm:g})")
    text = yaml.safe_dump(launch_config(plan, config), sort_keys=False)
    return Handover(text.rstrip("\n"), tuple(notes))


def hydra(plan: Plan, composed: Composed) -> Handover:
    """Overrides for trainfit itself, one in a line."""
    return Handover("\n".join(overrides(plan, composed)), _unfit(plan))


def shell(plan: Plan, composed: Composed) -> Handover:
    """Environment variables, and the command that trains with this plan."""
    return Handover(command_line(plan, composed), _unfit(plan))


FORMATS: Mapping[str, Callable[[Plan, Composed], Handover]] = {
    "hf": hf,
    "lightning": lightning,
    "accelerate": accelerate,
    "hydra": hydra,
    "shell": shell,
}


def _unfit(plan: Plan) -> tuple[str, ...]:
    if plan.fits:
        return ()
    return ("this plan does not fit" + (f": {plan.advice[0]}" if plan.advice else ""),)


def _unsaid(plan: Plan) -> list[str]:
    """What none of the other tools has an argument for."""
    load = plan.workload
    notes = [*even_batch(plan).notes, f"cut sequences at {load.max_length} tokens"]
    if load.method == "frozen":
        notes.append("planned with a frozen encoder: set requires_grad=False on it")
    elif load.method != "full":
        notes.append(f"planned for {load.method}: give the trainer a model wrapped by peft")
    if plan.weights_dtype != "float32":
        notes.append(f"weights that are not trained are planned in {plan.weights_dtype}: cast them")
    if plan.packed:
        notes.append("planned with packed rows; batches here are padded, and slower for it")
    if plan.runtime.expandable_segments:
        notes.append("export PYTORCH_ALLOC_CONF=expandable_segments:True before Python starts")
    return notes


def _in_the_script(plan: Plan, config: Config) -> list[str]:
    """What is code, not an argument, for tools that leave loader and optimizer to the user."""
    loader = {
        "batch_size": even_batch(plan).size,
        "num_workers": plan.num_workers,
        "pin_memory": plan.pin_memory,
        "persistent_workers": plan.persistent_workers,
        "prefetch_factor": plan.prefetch_factor,
    }
    training = config.training
    fused = plan.optimizer == "adamw_fused"
    warmup = training.warmup_steps if training.warmup_ratio is None else training.warmup_ratio
    notes = [
        f"loader: DataLoader(…, {', '.join(f'{key}={value}' for key, value in loader.items())}), "
        f"and batch_size={plan.eval_batch_size} for validation",
        f"optimizer: AdamW(…, lr={training.learning_rate:g}, "
        f"weight_decay={training.weight_decay:g}, fused={fused})",
        f"schedule: {training.scheduler}, warmup {warmup or 0:g}",
        f"seed: {config.seed}",
    ]
    if plan.gradient_checkpointing != "none":
        notes.append("checkpointing: model.gradient_checkpointing_enable()")
    if plan.runtime.tf32:
        notes.append('TF32: torch.set_float32_matmul_precision("high")')
    return notes
