"""The settings of a run, one row each; other lists of settings are made from these rows.

A new setting is one row here, one line in the schema (conf/schema.py), a field of the record that
carries it, and the code that does it. CONTRIBUTING.md describes the steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from trainfit.core.plan_records import Plan
    from trainfit.core.records import Scalar

ChosenBy = Literal["user", "planner", "tune", "tuned"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One setting: where it stands in a configuration, in a plan and in other tools."""

    name: str
    """Name in reasons, in a question's pins and in the trials of tune."""
    key: str = ""
    """Key in a configuration; empty: a configuration cannot set it."""
    aliases: tuple[str, ...] = ()
    """Other spellings of the key, in lower case."""
    flags: Mapping[str, Mapping[bool, str]] | None = None
    """Aliases that are true or false, and the value of the key that each stands for."""
    spellings: Mapping[str, str] | None = None
    """Other spellings of its values in a configuration, in lower case."""
    field: str = ""
    """Dotted place in a Plan; empty: the plan does not carry it."""
    in_plan: Mapping[Any, Scalar] | None = None
    """Values that are written differently in a plan: configuration's value to plan's value."""
    pinned: bool = True
    """A question may pin it before planning."""
    chosen_by: ChosenBy = "planner"
    """The last to choose its value. user: the plan copies it. planner: where the user leaves it
    open. tune: measured by tune. tuned: it follows from a setting that tune measures."""
    tries: tuple[Scalar, ...] = ()
    """Values that tune tries, where they are the same on every machine."""
    gpu_only: bool = False
    """Tune tries it on GPUs alone."""
    learns: bool = False
    """Another value trains another model; False: it changes speed and memory alone."""
    hf: str = ""
    """Keyword of transformers' TrainingArguments."""
    in_hf: Mapping[Any, Scalar] | None = None
    """Values that are written differently there: plan's value to the keyword's value."""
    loader: str = ""
    """Keyword of torch's DataLoader."""
    receipt: str = ""
    """Item of the receipt that requests the plan's value."""

    def of(self, plan: Plan) -> Any:
        """Value in a plan; None where the plan leaves it open."""
        return reduce(_part, self.field.split("."), plan) if self.field else None

    def to_plan(self, configured: Any) -> Any:
        """Convert a configuration's value to the plan's."""
        return (self.in_plan or {}).get(configured, configured)

    def to_configuration(self, planned: Any) -> Any:
        """Convert a plan's value to the configuration's."""
        known = {value: key for key, value in (self.in_plan or {}).items()}
        return known.get(planned, planned)


def _part(owner: Any, name: str) -> Any:
    return owner.get(name) if isinstance(owner, dict) else getattr(owner, name)


# One row may take several lines, which a formatter would make one for each word.
# fmt: off
SETTINGS = (
    Setting(
        name="precision", key="device.mixed_precision",
        aliases=("training.use_bf16", "use_bf16", "fp16", "bf16", "enable_amp", "amp_dtype"),
        flags={
            "fp16": {True: "fp16", False: "off"}, "bf16": {True: "bf16", False: "off"},
            "use_bf16": {True: "bf16", False: "off"}, "enable_amp": {True: "auto", False: "off"},
        },
        spellings={
            "true": "auto", "false": "off", "fp32": "off", "float32": "off", "no": "off",
            "none": "off", "bfloat16": "bf16", "float16": "fp16",
        },
        field="precision", in_plan={"off": "fp32"}, chosen_by="tune",
    ),
    Setting(
        name="tf32", key="device.tf32",
        aliases=("device.use_tf32", "reproducibility.tf32", "enable_tf32"), field="runtime.tf32",
        chosen_by="tune", tries=(True, False), hf="tf32", receipt="tf32",
    ),
    Setting(name="weights_dtype", field="weights_dtype", pinned=False),
    Setting(
        name="quantization", key="model.quantization", aliases=("load_in_4bit", "load_in_8bit"),
        flags={
            "load_in_4bit": {True: "nf4", False: "none"},
            "load_in_8bit": {True: "int8", False: "none"},
        },
        spellings={"false": "none", "4bit": "nf4", "8bit": "int8"}, field="quantization",
        learns=True, receipt="quantization",
    ),
    Setting(name="packed", field="packed", pinned=False, chosen_by="tune", receipt="packing"),
    Setting(
        name="attention", field="attention", pinned=False, chosen_by="tune", receipt="attention",
    ),
    Setting(
        name="attention_kernel", field="runtime.attention", pinned=False, chosen_by="tune",
        tries=(None, "flash", "efficient"),
    ),
    Setting(name="flash", key="model.use_flash_attention"),
    Setting(
        name="attention_dropout", key="model.attention_dropout",
        field="task.arguments.attention_dropout", pinned=False, chosen_by="user", learns=True,
        receipt="attention_dropout",
    ),
    Setting(
        name="compile", key="optimization.compile",
        aliases=(
            "model.use_torch_compile", "training.use_torch_compile", "use_torch_compile",
            "enable_compile",
        ),
        field="compile", chosen_by="tune", tries=(True, False), hf="torch_compile",
        receipt="compile",
    ),
    Setting(
        name="compile_mode", key="optimization.compile_mode", field="compile_mode",
        chosen_by="tune", tries=("reduce-overhead", "max-autotune-no-cudagraphs", "default"),
    ),
    Setting(
        name="cuda_graph", key="optimization.cuda_graph", field="cuda_graph", chosen_by="tune",
        tries=(True, False), gpu_only=True,
    ),
    Setting(
        name="activation_budget", key="optimization.activation_budget", field="activation_budget",
        chosen_by="tuned",
    ),
    Setting(
        name="offload_activations", key="optimization.offload_activations",
        field="offload_activations", receipt="offload_activations",
    ),
    Setting(
        name="liger", key="optimization.liger", field="liger", chosen_by="tune",
        tries=(False, True), hf="use_liger_kernel", receipt="liger",
    ),
    Setting(name="sharding", key="optimization.sharding", field="sharding", receipt="sharding"),
    Setting(
        name="reduce_dtype", key="optimization.reduce_dtype", field="reduce_dtype",
        chosen_by="user", learns=True,
    ),
    Setting(
        name="gradient_checkpointing", key="model.use_gradient_checkpointing",
        aliases=("gradient_checkpointing",), field="gradient_checkpointing",
        in_plan={True: "full", False: "none"}, chosen_by="tune",
        tries=("none", "selective", "full"), hf="gradient_checkpointing",
        in_hf={"none": False, "selective": True, "full": True}, receipt="gradient_checkpointing",
    ),
    Setting(name="micro_batch_tokens", field="micro_batch_tokens", chosen_by="tune"),
    Setting(
        name="optimizer", key="optimization.optimizer",
        aliases=("training.optimizer_type", "training.fused_adamw", "fused_adamw", "optim"),
        flags={"fused_adamw": {True: "adamw_fused", False: "adamw"}},
        spellings={
            "adamw_torch_fused": "adamw_fused", "adamw_torch": "adamw",
            "adamw_bnb_8bit": "adamw_8bit", "adamw_torch_8bit": "adamw_8bit",
        },
        field="optimizer", chosen_by="tune", tries=("adamw_fused", "adamw"), hf="optim",
        # transformers has neither bf16 moments nor Muon; a note of the export says so.
        in_hf={
            "adamw_fused": "adamw_torch_fused", "adamw": "adamw_torch",
            "adamw_bf16": "adamw_torch_fused", "adamw_8bit": "adamw_bnb_8bit",
            "muon": "adamw_torch_fused",
        },
        receipt="optimizer",
    ),
    Setting(
        name="offload_optimizer", key="optimization.offload_optimizer", field="offload_optimizer",
        receipt="offload_optimizer",
    ),
    Setting(name="data_on_gpu", key="training.data_on_gpu", field="data_on_gpu"),
    Setting(
        name="num_workers", key="training.num_workers",
        aliases=("data.num_workers", "dataloader_num_workers"), field="num_workers",
        chosen_by="tune", hf="dataloader_num_workers", loader="num_workers", receipt="workers",
    ),
    Setting(
        name="pin_memory", key="training.pin_memory",
        aliases=("data.pin_memory", "dataloader_pin_memory"), field="pin_memory", chosen_by="tune",
        tries=(True, False), gpu_only=True, hf="dataloader_pin_memory", loader="pin_memory",
        receipt="pinned_memory",
    ),
    Setting(
        name="persistent_workers", key="training.persistent_workers",
        aliases=("data.persistent_workers", "dataloader_persistent_workers"),
        field="persistent_workers", chosen_by="tuned", hf="dataloader_persistent_workers",
        loader="persistent_workers",
    ),
    Setting(
        name="prefetch_factor", key="training.prefetch_factor",
        aliases=("data.prefetch_factor", "dataloader_prefetch_factor"), field="prefetch_factor",
        chosen_by="tuned", hf="dataloader_prefetch_factor", loader="prefetch_factor",
    ),
    Setting(
        name="drop_last", key="training.drop_last",
        aliases=("data.drop_last", "dataloader_drop_last"), pinned=False, chosen_by="user",
        learns=True, hf="dataloader_drop_last", loader="drop_last",
    ),
    Setting(
        name="batch_size", key="training.batch_size",
        aliases=("batch_train", "per_device_train_batch_size"), field="batch_size",
        chosen_by="tuned",
    ),
    Setting(
        name="gradient_accumulation_steps", key="optimization.gradient_accumulation_steps",
        aliases=("grad_accum",), field="gradient_accumulation_steps", chosen_by="tuned",
        receipt="gradient_accumulation",
    ),
    Setting(
        name="effective_batch_size", key="training.effective_batch_size",
        aliases=("target_effective_batch_size",), field="effective_batch_size", learns=True,
        receipt="effective_batch",
    ),
    Setting(
        name="eval_batch_size", key="training.eval_batch_size", aliases=("batch_eval",),
        field="eval_batch_size", hf="per_device_eval_batch_size",
    ),
    Setting(name="num_threads", key="device.num_threads", field="runtime.num_threads"),
    Setting(
        name="cudnn_benchmark", key="device.cudnn_benchmark", field="runtime.cudnn_benchmark",
        chosen_by="user", receipt="cudnn_benchmark",
    ),
    Setting(
        name="deterministic", key="device.deterministic",
        aliases=("reproducibility.deterministic",), field="runtime.deterministic",
        chosen_by="user", receipt="deterministic",
    ),
    Setting(
        name="expandable_segments", key="device.expandable_segments",
        field="runtime.expandable_segments", chosen_by="user", receipt="expandable_segments",
    ),
    Setting(
        name="memory_gib", key="device.memory_gib", field="runtime.memory_gib", chosen_by="user",
    ),
    Setting(name="seed", key="seed", field="runtime.seed", chosen_by="user", learns=True),
    Setting(
        name="max_length", key="data.max_length", aliases=("block_size",),
        field="workload.max_length", pinned=False, learns=True,
    ),
    Setting(
        name="loss_chunk", key="model.loss_chunk", field="task.arguments.loss_chunk", pinned=False,
        learns=True,
    ),
    Setting(name="half_stream", key="model.half_stream", pinned=False, learns=True),
    Setting(
        name="max_grad_norm", key="training.max_grad_norm",
        aliases=("optimization.max_grad_norm",), pinned=False, chosen_by="user", learns=True,
    ),
)
# fmt: on

BY_NAME: Mapping[str, Setting] = {row.name: row for row in SETTINGS}


def chosen_by(*who: ChosenBy) -> tuple[Setting, ...]:
    """Rows that these choose, in the table's order."""
    return tuple(row for row in SETTINGS if row.chosen_by in who)


def with_values(plan: Plan, values: Mapping[str, Any]) -> Plan:
    """Replace settings of a plan, by their names."""
    fields = {BY_NAME[name].field: value for name, value in values.items()}
    runtime = {k.removeprefix("runtime."): v for k, v in fields.items() if k.startswith("runtime.")}
    top = {field: value for field, value in fields.items() if "." not in field}
    return replace(plan, runtime=replace(plan.runtime, **runtime), **top)


def unknown_pins(names: Iterable[str]) -> list[str]:
    """Names that no question can pin."""
    return [name for name in names if name not in BY_NAME or not BY_NAME[name].pinned]
