"""The table of settings agrees with the schema, the plan and the tools that it names."""

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfit.conf import keys
from trainfit.conf.schema import SCHEMAS
from trainfit.core.errors import BadInput
from trainfit.core.plan_records import Plan, RuntimeSettings, Workload
from trainfit.core.settings import SETTINGS
from trainfit.hardware import as_if
from trainfit.hardware.catalogue import find
from trainfit.jobs.classification import model_decisions
from trainfit.planning import cuts
from trainfit.planning.question import Pin, Question


def question(lengths: tuple[int, ...] = (100,) * 64, **pins: object) -> Question:
    work = Workload(
        lengths=lengths,
        sequences=len(lengths),
        max_length=max(lengths),
        effective_batch_size=16,
        epochs=1,
    )
    made = {name: Pin(value=value, origin="override") for name, value in pins.items()}
    return Question(task="nli", factory="a:b", arguments={}, layers=1, workload=work, pins=made)


def test_every_key_is_in_a_schema_and_every_field_in_a_plan():
    known = {key for task in SCHEMAS for key in keys(task)}
    assert {row.key for row in SETTINGS if row.key} <= known
    places = {field.name for field in fields(Plan)}
    places |= {f"runtime.{field.name}" for field in fields(RuntimeSettings)}
    named = {row.field for row in SETTINGS if row.field}
    arguments = {f"task.arguments.{name}" for name in ("loss_chunk", "attention_dropout")}
    assert named <= places | arguments | {"workload.max_length"}


def test_names_keys_and_aliases_mean_one_setting_each():
    aliases = [alias for row in SETTINGS for alias in row.aliases]
    for spelled in (aliases, [row.name for row in SETTINGS], [r.key for r in SETTINGS if r.key]):
        assert len(spelled) == len(set(spelled))
    assert not {key for task in SCHEMAS for key in keys(task)} & set(aliases)


def test_transformers_and_torch_have_the_keywords():
    from transformers import TrainingArguments

    assert {row.hf for row in SETTINGS if row.hf} <= {f.name for f in fields(TrainingArguments)}
    for row in SETTINGS:
        if row.loader:
            assert row.loader in torch.utils.data.DataLoader.__init__.__annotations__


@pytest.mark.parametrize("row", [row for row in SETTINGS if row.in_plan], ids=lambda row: row.name)
def test_a_value_survives_the_way_to_the_plan_and_back(row):
    for value in row.in_plan:
        assert row.to_configuration(row.to_plan(value)) == value


@pytest.mark.parametrize("name", ["batch", "learning_rate", "attention_kernel", "packed"])
def test_a_pin_that_is_no_setting_is_refused(name: str):
    with pytest.raises(BadInput, match=f"cannot pin '{name}'"):
        question(**{name: 1})


def test_a_misspelled_pin_is_answered_with_the_nearest_name():
    with pytest.raises(BadInput, match="num_workers"):
        question(num_worker=2)


@settings(max_examples=20)
@given(st.integers(100, 2000), st.sampled_from(["h200", "mi300x"]))
def test_a_pinned_number_of_tokens_bounds_every_micro_batch(most: int, gpu: str):
    profile = as_if(find(gpu))  # packed rows on one, padded ones on the other
    asked = question((20, 40, 100) * 32, micro_batch_tokens=most)
    basis = cuts.fixed_settings(asked, profile, ranks=1)
    assert all(cutting.cut.tokens <= most for cutting in basis.cuttings)


def test_fewer_tokens_than_the_longest_sequence_are_refused():
    profile = as_if(find("h200"))
    with pytest.raises(BadInput, match="100 tokens does not fit a micro-batch of 64"):
        cuts.fixed_settings(question(micro_batch_tokens=64), profile, ranks=1)


@pytest.mark.parametrize(
    ("gpu", "asked", "planned"),
    [("h200", None, 0.0), ("h200", 0.2, 0.2), ("mi300x", None, None), ("mi300x", 0.2, 0.2)],
)
def test_packed_rows_have_attention_dropout_on_request(
    gpu: str, asked: float | None, planned: float | None
):
    """Without one, padded rows have the model's own, and packed ones none."""
    made = replace(question(), arguments={"attention_dropout": asked})
    basis = cuts.fixed_settings(made, as_if(find(gpu)), ranks=1)
    assert basis.arguments["attention_dropout"] == planned
    plan: Any = SimpleNamespace(
        packed=gpu == "h200",
        gpu=gpu,
        workload=SimpleNamespace(method="full"),
        gradient_checkpointing="none",
        weights_dtype="float32",
        quantization="none",
        liger=False,
    )
    model: Any = SimpleNamespace(attention_dropout=asked)
    assert ({"attention_dropout": asked} | model_decisions(plan, model))[
        "attention_dropout"
    ] == planned
