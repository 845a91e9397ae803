"""Each format against the library that reads it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from plan_example import make_plan
from trainfit.conf import compose
from trainfit.core.plan_records import Plan
from trainfit.integrations.plan_exports import FORMATS, accelerate, even_batch, hf, lightning

TRAINER = {
    "accelerator", "strategy", "devices", "num_nodes", "precision", "max_epochs", "min_epochs",
    "max_steps", "min_steps", "max_time", "limit_train_batches", "limit_val_batches",
    "val_check_interval", "check_val_every_n_epoch", "log_every_n_steps",
    "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "deterministic",
    "benchmark", "use_distributed_sampler", "plugins", "sync_batchnorm",
}  # fmt: skip
"""Keywords of Lightning 2.6's Trainer, since Lightning itself may not be installed."""


def with_load(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, workload=replace(plan.workload, **changes))


# ── the even split ────────────────────────────────────────────────────────────────────────────


@given(st.integers(1, 400), st.integers(1, 8), st.integers(1, 300), st.integers(1, 300))
def test_the_split_is_exact_the_largest_and_within_memory(effective, ranks, batch, rows):
    plan = make_plan(
        effective_batch_size=effective,
        ranks=ranks,
        batch_size=batch,
        micro_batch_tokens=rows * 512 + 511,  # `rows` of the longest, and not one more
    )
    split = even_batch(plan)
    share = split.size * split.accumulation
    assert share * ranks == effective or (effective % ranks and split.notes)
    assert abs(share - effective / ranks) <= max(0.5, 1 - effective / ranks)
    assert split.size <= min(batch, rows)
    larger = range(split.size + 1, min(batch, rows, share) + 1)
    assert all(share % size for size in larger)
    as_planned = split.size == min(batch, effective / ranks)
    assert as_planned or split.notes


def test_notes_say_what_an_uneven_cut_would_have_kept():
    plan = make_plan(effective_batch_size=64, batch_size=23, micro_batch_tokens=23 * 512)
    split = even_batch(plan)
    assert (split.size, split.accumulation) == (16, 4)
    assert "46 or 69 would keep 23" in split.notes[0]
    assert even_batch(make_plan()).notes == ()


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 8))
def test_another_accumulation_than_the_plans_is_said(effective, batch, planned):
    """Trainfit's own micro-batches may differ in size, so their number may be another."""
    plan = make_plan(
        effective_batch_size=effective,
        batch_size=batch,
        micro_batch_tokens=batch * 512,
        gradient_accumulation_steps=planned,
    )
    said = hf(plan, compose("nli"))
    found = json.loads(said.text)["gradient_accumulation_steps"]
    both = f"gradient accumulation is {found} here"
    explained = [n for n in said.notes if n.startswith(both) and f"into {planned} of" in n]
    assert len(explained) == (found != planned)


def test_the_longest_sequence_counts_not_the_longest_allowed():
    plan = with_load(make_plan(batch_size=16, micro_batch_tokens=16 * 300), lengths=(10, 300))
    assert even_batch(plan).size == 16
    assert even_batch(with_load(plan, lengths=(10, 512))).size == 8


# ── transformers ──────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def training_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Any]:
    """Build TrainingArguments as on a GPU with bf16 and TF32."""
    from transformers import TrainingArguments, training_args

    monkeypatch.setattr(training_args, "is_torch_bf16_gpu_available", lambda: True)
    monkeypatch.setattr(training_args, "is_torch_tf32_available", lambda: True)
    monkeypatch.setattr(training_args, "enable_tf32", lambda on: None)
    return lambda text: TrainingArguments(output_dir=str(tmp_path), **json.loads(text))


def test_transformers_takes_the_arguments(training_arguments):
    args = training_arguments(hf(make_plan(), compose("nli")).text)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 16
    assert (args.mixed_precision, args.tf32) == ("bf16", True)
    assert (args.torch_compile, args.torch_compile_mode) == (True, "max-autotune-no-cudagraphs")
    assert args.optim == "adamw_torch_fused"
    assert (args.dataloader_num_workers, args.dataloader_prefetch_factor) == (6, 2)
    assert args.dataloader_persistent_workers
    assert (args.num_train_epochs, args.max_steps) == (20, -1)
    assert args.eval_strategy == "epoch"
    assert args.get_warmup_steps(1000) == 100
    assert args.seed == 42


def test_a_setting_that_no_plan_carries_is_exported_too(training_arguments):
    composed = compose("nli", ["dataloader_drop_last=true"])
    assert training_arguments(hf(make_plan(), composed).text).dataloader_drop_last is True
    assert "drop_last=True" in "".join(lightning(make_plan(), composed).notes)


@pytest.mark.parametrize("task", ["nli", "textclass", "gpt"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_transformers_takes_every_kind_of_plan(
    training_arguments, task: str, checkpointing: str, precision: str
):
    plan = make_plan(
        precision=precision,
        gradient_checkpointing=checkpointing,
        compile=False,
        optimizer="adamw",
        num_workers=0,
        persistent_workers=False,
        prefetch_factor=None,
    )
    args = training_arguments(hf(plan, compose(task)).text)
    assert args.mixed_precision == {"fp32": "no"}.get(precision, precision)
    assert args.gradient_checkpointing is (checkpointing != "none")
    assert args.torch_compile is False
    if task == "gpt":
        assert args.get_warmup_steps(10_000) == 500
        assert (args.eval_strategy, args.eval_steps) == ("steps", 2000)


def test_warmup_and_clipping_at_their_ends(training_arguments):
    edge = ["training.warmup_ratio=1.0", "training.max_grad_norm=null", "training.max_steps=70"]
    args = training_arguments(hf(make_plan(), compose("nli", edge)).text)
    assert args.get_warmup_steps(70) == 70
    assert args.max_grad_norm == 0
    assert args.max_steps == 70
    flat = compose("nli", ["training.scheduler=constant"])
    assert training_arguments(hf(make_plan(), flat).text).lr_scheduler_type.value == (
        "constant_with_warmup"  # transformers' own "constant" would not warm up
    )


def test_a_plan_for_the_cpu_stays_on_it(tmp_path: Path):
    from transformers import TrainingArguments

    plan = make_plan(gpu=None, precision="fp32", runtime__tf32=None, pin_memory=False)
    arguments = json.loads(hf(plan, compose("nli", ["hardware=cpu"])).text)
    assert TrainingArguments(output_dir=str(tmp_path), **arguments).device.type == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_trainer_trains_by_a_plan_for_the_cpu(tmp_path: Path, precision: str):
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layer(x).float().square().mean()}

    plan = make_plan(
        gpu=None,
        device="cpu",
        precision=precision,
        runtime__tf32=False,
        pin_memory=False,
        compile=False,
        num_workers=0,
        persistent_workers=False,
        prefetch_factor=None,
    )
    arguments = json.loads(hf(plan, compose("nli", ["training.max_steps=1"])).text)
    arguments |= {"eval_strategy": "no", "report_to": "none", "save_strategy": "no"}
    args = TrainingArguments(output_dir=str(tmp_path), **arguments)
    rows = [{"x": torch.ones(2)} for _ in range(16)]
    assert Trainer(model=Model(), args=args, train_dataset=rows).train().global_step == 1


def test_savers_that_no_argument_says_are_notes(training_arguments):
    plan = make_plan(
        quantization="nf4",
        offload_activations=True,
        optimizer="adamw_8bit",
        runtime__memory_gib=8.0,
    )
    made = hf(plan, compose("nli", ["model.method=lora"]))
    assert training_arguments(made.text).optim == "adamw_bnb_8bit"
    notes = "\n".join(made.notes)
    for word in ("BitsAndBytesConfig", "save_on_cpu", "set_per_process_memory_fraction"):
        assert word in notes
        assert word not in made.text


def test_notes_tell_what_the_arguments_cannot():
    plan = make_plan(ranks=2, packed=True, gradient_checkpointing="selective", fits=False)
    notes = "\n".join(hf(plan, compose("nli")).notes)
    for part in ("does not fit", "peft", "padded", "only the whole", "torchrun", "EarlyStopping"):
        assert part in notes
    calm = with_load(make_plan(weights_dtype="float32", runtime__expandable_segments=None))
    calm = with_load(calm, method="full")
    assert hf(calm, compose("gpt")).notes == (
        "cut sequences at 512 tokens",
        "cut the validation data to 50 batches yourself",
    )


# ── Lightning ─────────────────────────────────────────────────────────────────────────────────


def test_lightning_has_these_keywords():
    plan = make_plan(effective_batch_size=32, ranks=2)
    for task in ("nli", "gpt"):
        arguments = json.loads(lightning(plan, compose(task)).text)
        assert set(arguments) <= TRAINER
        assert arguments["accumulate_grad_batches"] == 2
        assert (arguments["devices"], arguments["strategy"]) == (2, "ddp")
    assert arguments["val_check_interval"] == 2000 * 2  # Lightning counts batches
    assert arguments["limit_val_batches"] == 50


@pytest.mark.parametrize(("epochs", "expected"), [("3", (3, -1)), ("0.5", (-1, 417))])
def test_lightning_gets_part_of_an_epoch_in_steps(epochs: str, expected):
    composed = compose("nli", [f"training.num_epochs={epochs}"])
    arguments = json.loads(lightning(make_plan(), composed).text)
    assert (arguments["max_epochs"], arguments["max_steps"]) == expected  # 13,356 / 16 / 2


def test_lightning_notes_hold_the_loader():
    notes = "\n".join(lightning(make_plan(gradient_checkpointing="full"), compose("nli")).notes)
    for part in ("batch_size=8, num_workers=6", "fused=True", "torch.compile", "checkpointing_"):
        assert part in notes


@pytest.mark.parametrize("task", ["nli", "textclass", "gpt"])
def test_lightning_takes_the_arguments(task: str):
    trainers = pytest.importorskip("lightning.pytorch")
    arguments = json.loads(lightning(make_plan(), compose(task)).text)
    arguments |= {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    trainer = trainers.Trainer(**arguments)
    assert trainer.accumulate_grad_batches == 2
    assert trainer.precision == "bf16-mixed"


# ── accelerate ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ranks", [1, 2])
def test_accelerate_takes_the_file(tmp_path: Path, ranks: int):
    from accelerate.commands.config.config_args import load_config_from_file

    path = tmp_path / "accelerate.yaml"
    path.write_text(accelerate(make_plan(ranks=ranks), compose("nli")).text)
    loaded = load_config_from_file(str(path))
    assert loaded.distributed_type.value == ("NO" if ranks == 1 else "MULTI_GPU")
    assert (loaded.mixed_precision, loaded.num_processes) == ("bf16", ranks)
    assert loaded.dynamo_config["dynamo_mode"] == "max-autotune-no-cudagraphs"


def test_a_script_that_accelerate_launches_sees_the_plan(tmp_path: Path):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    path = tmp_path / "accelerate.yaml"
    path.write_text(accelerate(make_plan(), compose("nli", ["hardware=cpu"])).text)
    args = launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    _, seen = prepare_simple_launcher_cmd_env(_validate_launch_command(args)[0])
    assert seen["ACCELERATE_USE_CPU"].lower() == "true"
    assert seen["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert seen["ACCELERATE_DYNAMO_BACKEND"] == "INDUCTOR"
    assert seen["ACCELERATE_DYNAMO_MODE"] == "max-autotune-no-cudagraphs"


def test_without_compile_and_autocast_accelerate_has_neither():
    handover = accelerate(make_plan(compile=False, precision="fp32"), compose("nli"))
    launch = yaml.safe_load(handover.text)
    assert launch["mixed_precision"] == "no"
    assert "dynamo_config" not in launch
    assert "build Accelerator(gradient_accumulation_steps=2)" in handover.notes


@pytest.mark.parametrize("name", FORMATS)
def test_what_does_not_fit_is_said_first(name: str):
    handover = FORMATS[name](make_plan(fits=False, advice=("use LoRA",)), compose("nli"))
    assert handover.notes[0] == "this plan does not fit: use LoRA"
