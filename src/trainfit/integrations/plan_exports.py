"""Export a plan to transformers, Lightning, accelerate, Hydra or a shell.

Each format is a text that its tool reads, with notes on what the tool has no argument for and the
user does in their own script.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from trainfit.conf import Composed, Config, keys
from trainfit.conf.composition import as_word, flat_values
from trainfit.core.plan_records import Plan
from trainfit.core.settings import SETTINGS, chosen_by
from trainfit.jobs.plan_choices import stream_is_half
from trainfit.jobs.registry import Job, is_own, load


@dataclass(frozen=True, slots=True)
class EvenBatch:
    """Split of the effective batch into batches of one size."""

    size: int
    accumulation: int
    notes: tuple[str, ...]


def even_batch(plan: Plan) -> EvenBatch:
    """Largest even split of a rank's effective batch within the planned memory.

    A padded batch is as wide as its longest sequence, which limits its rows to the planned tokens.
    """
    share = max(1, round(plan.effective_batch_size / plan.ranks))
    longest = min(
        plan.workload.max_length, max(plan.workload.lengths, default=plan.workload.max_length)
    )
    wanted = min(plan.batch_size, share)
    rows = max(1, min(wanted, plan.micro_batch_tokens // longest))
    size = max(n for n in range(1, rows + 1) if share % n == 0)
    notes = []
    if share * plan.ranks != plan.effective_batch_size:
        notes.append(
            f"an effective batch of {plan.effective_batch_size} does not divide over {plan.ranks} "
            f"ranks: it becomes {share * plan.ranks} here"
        )
    if rows < wanted:
        notes.append(
            f"at most {rows} sequences of {longest} tokens fit the planned "
            f"{plan.micro_batch_tokens:,} tokens of a batch when padded"
            if longest > 1
            else f"at most {rows} samples were planned for a batch"
        )
    if size < rows:
        notes.append(
            f"batches of {size} instead of {rows} hold the effective batch of {share} per rank "
            f"exactly; {share // rows * rows} or {(share // rows + 1) * rows} would keep {rows}"
        )
    if share // size != plan.gradient_accumulation_steps:
        notes.append(
            f"gradient accumulation is {share // size} here, with batches of one size; trainfit's "
            f"own run cuts the same step into {plan.gradient_accumulation_steps} of unlike sizes"
        )
    return EvenBatch(size, share // size, tuple(notes))


def exported(plan: Plan, config: Config, tool: Literal["hf", "loader"]) -> dict[str, Any]:
    """Keywords of a tool that take one setting each, by the table of settings."""
    values = flat_values(config)
    found = {}
    for row in SETTINGS:
        if keyword := getattr(row, tool):
            value = row.of(plan) if row.field else values[row.key]
            found[keyword] = (row.in_hf or {}).get(value, value) if tool == "hf" else value
    return found


def training_arguments(plan: Plan, config: Config) -> dict[str, Any]:
    """Keywords of transformers' TrainingArguments."""
    training, batch = config.training, even_batch(plan)
    flat = training.scheduler == "constant" and _warmup(config)
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": batch.size,
        "gradient_accumulation_steps": batch.accumulation,
        "num_train_epochs": training.num_epochs,
        "max_steps": training.max_steps or -1,
        "learning_rate": training.learning_rate,
        "weight_decay": training.weight_decay,
        "warmup_steps": _warmup(config),
        "lr_scheduler_type": "constant_with_warmup" if flat else training.scheduler,
        "max_grad_norm": training.max_grad_norm or 0.0,
        "bf16": plan.precision == "bf16",
        "fp16": plan.precision == "fp16",
        "eval_strategy": "epoch" if training.eval_steps is None else "steps",
        "logging_steps": training.logging_steps,
        "seed": config.seed,
        "full_determinism": config.device.deterministic,
        **exported(plan, config, "hf"),
    }
    if plan.offload_optimizer:
        arguments["optim"] = "paged_adamw_32bit"
    if plan.gradient_checkpointing != "none":
        arguments["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if plan.compile:  # a mode without torch_compile would turn it on
        arguments["torch_compile_mode"] = plan.compile_mode
    if training.eval_steps is not None:
        arguments["eval_steps"] = training.eval_steps
    if _device(plan, config) == "cpu":
        arguments["use_cpu"] = True
    return arguments


def trainer_arguments(plan: Plan, config: Config) -> dict[str, Any]:
    """Keywords of Lightning's Trainer; loader and optimizer are in the user's code."""
    training, batch = config.training, even_batch(plan)
    steps, epochs = training.max_steps, training.num_epochs
    if steps is None and epochs != int(epochs):  # Lightning knows whole epochs only
        steps = max(1, round(epochs * plan.workload.sequences / plan.effective_batch_size))
    arguments: dict[str, Any] = {
        "accelerator": _device(plan, config),
        "devices": plan.ranks,
        "num_nodes": 1,
        "strategy": "auto" if plan.ranks == 1 else "ddp",
        "precision": {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32-true"}[plan.precision],
        "accumulate_grad_batches": batch.accumulation,
        "gradient_clip_val": training.max_grad_norm,
        "max_epochs": int(epochs) if steps is None else -1,
        "max_steps": steps or -1,
        "log_every_n_steps": training.logging_steps,
        "deterministic": config.device.deterministic,
        "benchmark": config.device.cudnn_benchmark and not config.device.deterministic,
    }
    if training.eval_steps is not None:  # counted there in batches, and across epochs
        arguments["val_check_interval"] = training.eval_steps * batch.accumulation
        arguments["check_val_every_n_epoch"] = None
    if training.eval_iters is not None:
        arguments["limit_val_batches"] = training.eval_iters
    return arguments


def launch_config(plan: Plan, config: Config) -> dict[str, Any]:
    """Content of the file for `accelerate launch --config_file`."""
    cpu = _device(plan, config) == "cpu"
    several = "MULTI_CPU" if cpu else "MULTI_GPU"
    launch: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "NO" if plan.ranks == 1 else several,
        "downcast_bf16": "no",
        "enable_cpu_affinity": False,
        "gpu_ids": "all",
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": "no" if plan.precision == "fp32" else plan.precision,
        "num_machines": 1,
        "num_processes": plan.ranks,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": cpu,
    }
    if plan.compile:
        launch["dynamo_config"] = {
            "dynamo_backend": "INDUCTOR",
            "dynamo_mode": plan.compile_mode,
            "dynamo_use_dynamic": False,
            "dynamo_use_fullgraph": False,
        }
    return launch


def _device(plan: Plan, config: Config) -> str:
    """Kind of device in Lightning's words; auto for an old plan that does not tell."""
    if config.device.use_cuda is False or plan.device == "cpu":
        return "cpu"
    known = plan.device == "cuda" or plan.gpu is not None or config.device.use_cuda is True
    return "gpu" if known else "auto"


def _warmup(config: Config) -> float:
    """Warm-up as transformers reads it: steps, or a share of them below 1."""
    ratio, steps = config.training.warmup_ratio, config.training.warmup_steps
    return min(ratio, math.nextafter(1, 0)) if ratio is not None else steps or 0


@dataclass(frozen=True, slots=True)
class Handover:
    """A plan in the format of another tool."""

    text: str
    """Text that the tool reads."""
    notes: tuple[str, ...] = ()
    """Sentences on what the text cannot express."""


def hf(plan: Plan, composed: Composed) -> Handover:
    """JSON object for `TrainingArguments(output_dir=…, **arguments)`."""
    training = composed.config.training
    notes = _unsaid(plan, composed)
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
    """JSON object for Lightning's `Trainer(**arguments)`."""
    config = composed.config
    notes = [*_unsaid(plan, composed), *_in_the_script(plan, config)]
    if plan.compile:
        notes.append(f"compile the model: torch.compile(model, mode={plan.compile_mode!r})")
    if config.training.early_stopping_patience is not None:
        patience = config.training.early_stopping_patience
        notes.append(f"add EarlyStopping(patience={patience}) on your validation metric")
    return Handover(json.dumps(trainer_arguments(plan, config), indent=2), tuple(notes))


def accelerate(plan: Plan, composed: Composed) -> Handover:
    """YAML file for `accelerate launch --config_file`."""
    config = composed.config
    notes = [*_unsaid(plan, composed), *_in_the_script(plan, config)]
    steps = even_batch(plan).accumulation
    notes.append(f"build Accelerator(gradient_accumulation_steps={steps})")
    if config.training.max_grad_norm:
        norm = config.training.max_grad_norm
        notes.append(f"clip: accelerator.clip_grad_norm_(model.parameters(), {norm:g})")
    text = yaml.safe_dump(launch_config(plan, config), sort_keys=False)
    return Handover(text.rstrip("\n"), tuple(notes))


FORMATS: Mapping[str, Callable[[Plan, Composed], Handover]] = {
    "hf": hf,
    "lightning": lightning,
    "accelerate": accelerate,
    # Overrides for trainfit itself, one per line; variables and the command that trains so.
    "hydra": lambda plan, made: Handover("\n".join(overrides(plan, made)), _unfit(plan)),
    "shell": lambda plan, made: Handover(command_line(plan, made), _unfit(plan)),
}


def _unfit(plan: Plan) -> tuple[str, ...]:
    if plan.fits:
        return ()
    return ("this plan does not fit" + (f": {plan.advice[0]}" if plan.advice else ""),)


def _unsaid(plan: Plan, composed: Composed) -> list[str]:
    """Notes on settings that none of the other tools has an argument for."""
    load, batch = plan.workload, even_batch(plan)
    notes = [*_unfit(plan), *batch.notes]
    notes += _of_own_job(composed.task, batch) if is_own(composed.task) else []
    if load.max_length > 1:
        notes.append(f"cut sequences at {load.max_length} tokens")
    if load.method == "frozen":
        notes.append("planned with a frozen encoder: set requires_grad=False on it")
    elif load.method != "full":
        notes.append(f"planned for {load.method}: give the trainer a model wrapped by peft")
    if plan.weights_dtype != "float32":
        notes.append(f"weights that are not trained are planned in {plan.weights_dtype}: cast them")
    notes += _of_savers(plan)
    if plan.packed:
        notes.append("planned with packed rows; batches here are padded, and slower for it")
    if plan.runtime.expandable_segments:
        notes.append("export PYTORCH_ALLOC_CONF=expandable_segments:True before Python starts")
    return notes


def _of_savers(plan: Plan) -> list[str]:
    """Notes on settings that save memory and are no argument of a trainer."""
    notes = []
    if plan.quantization != "none":
        bits = "load_in_4bit, nf4" if plan.quantization == "nf4" else "load_in_8bit"
        notes.append(
            f"planned on {plan.quantization} weights: give it a BitsAndBytesConfig ({bits})"
        )
    if plan.optimizer in ("adamw_bf16", "muon"):
        notes.append(f"{plan.optimizer} is trainfit's own: AdamW in its place keeps more state")
    if plan.offload_activations:
        notes.append(
            "planned with activations in the host's memory: run the forward pass under "
            "torch.autograd.graph.save_on_cpu(pin_memory=True)"
        )
    if plan.runtime.memory_gib is not None:
        notes.append(
            f"planned for {plan.runtime.memory_gib:g} GiB: limit torch with "
            "torch.cuda.set_per_process_memory_fraction"
        )
    return notes


def _of_own_job(task: str, batch: EvenBatch) -> list[str]:
    """Notes on parts of a user's own job, such as its optimizer, that no plan holds."""
    job = load(task)
    notes = []
    if job.optimizer is not Job.optimizer:
        notes.append(f"{job.__name__} has an optimizer of its own: use it instead of AdamW")
    if job.indivisible and batch.accumulation > 1:
        notes.append(
            f"{job.__name__} must not be cut: {batch.accumulation} batches to a step, as here, "
            "change its loss"
        )
    return notes


_CLASSES = {"adamw_8bit": "bitsandbytes.optim.AdamW8bit", "adafactor": "Adafactor"}
"""Optimizers that other tools have beside AdamW."""


def _in_the_script(plan: Plan, config: Config) -> list[str]:
    """Notes on loader, optimizer and schedule, for tools that leave them to the user."""
    loader = {"batch_size": even_batch(plan).size, **exported(plan, config, "loader")}
    training = config.training
    made = _CLASSES.get(plan.optimizer, "AdamW")
    fused = f", fused={plan.optimizer != 'adamw'}" if made == "AdamW" else ""
    warmup = training.warmup_steps if training.warmup_ratio is None else training.warmup_ratio
    notes = [
        f"loader: DataLoader(…, {', '.join(f'{key}={value}' for key, value in loader.items())}), "
        f"and batch_size={plan.eval_batch_size} for validation",
        f"optimizer: {made}(…, lr={training.learning_rate:g}, "
        f"weight_decay={training.weight_decay:g}{fused})",
        f"schedule: {training.scheduler}, warmup {warmup or 0:g}",
        f"seed: {config.seed}",
    ]
    if plan.gradient_checkpointing != "none":
        notes.append("checkpointing: model.gradient_checkpointing_enable()")
    if plan.runtime.tf32:
        notes.append('TF32: torch.set_float32_matmul_precision("high")')
    return notes


def overrides(plan: Plan, composed: Composed) -> list[str]:
    """Overrides that compose to the same configuration with every planned setting pinned."""
    pinned = pins(plan, composed)
    chosen = {
        key: value
        for key, value in composed.values().items()
        if composed.origins[key] == "override" and key not in pinned
    }
    groups = {"hardware": composed.hardware}
    if composed.experiment is not None:
        groups["experiment"] = composed.experiment
    return [as_word(key, value) for key, value in {**groups, **chosen, **pinned}.items()]


def pins(plan: Plan, composed: Composed) -> dict[str, Any]:
    """Planned settings by key; those that a configuration cannot express are left out."""
    method = plan.workload.method
    half = plan.task.arguments.get("half_stream")  # in plans of a GPT
    rows = chosen_by("planner", "tune", "tuned")
    values = {row.key: row.to_configuration(row.of(plan)) for row in rows}
    values |= {
        "device.use_cuda": True if plan.gpu is not None else None,
        "model.method": None if method == "frozen" else method,
        "model.freeze_encoder": method == "frozen",
        "model.half_stream": None if half is None else stream_is_half(half, plan.precision),
    }
    known = keys(composed.task)
    return {key: value for key, value in values.items() if value is not None and key in known}


def command_line(plan: Plan, composed: Composed) -> str:
    """Environment variables and the command, quoted for a POSIX shell."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in _variables(plan).items()]
    start = ["trainfit"]
    if plan.ranks > 1:
        start = ["torchrun", "--standalone", "--nproc-per-node", str(plan.ranks), "-m", "trainfit"]
    words = [*start, "train", composed.task]
    parts = [shlex.join(words), *(shlex.quote(word) for word in overrides(plan, composed))]
    return "\n".join([*lines, " \\\n    ".join(parts)])


def _variables(plan: Plan) -> dict[str, str]:
    """Environment variables that torch and CUDA read once, when they start."""
    runtime = plan.runtime
    variables = {}
    if runtime.expandable_segments is not None:
        variables["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{runtime.expandable_segments}"
    if runtime.deterministic:
        variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if runtime.num_threads is not None:
        variables["OMP_NUM_THREADS"] = str(runtime.num_threads)
    return variables
