"""A plan for one model of each family of the catalogue, without a network."""

from __future__ import annotations

import pytest

import trainfit
from trainfit.hardware.model_shapes import OWN_GPT, ModelShape, model_shapes
from trainfit.planning.savers import count_savers

FAMILIES = {
    shape.config["model_type"]: shape
    for shape in reversed(model_shapes())
    if shape.config["model_type"] != OWN_GPT
}


@pytest.mark.soak
# OPT draws a number for every layer, to leave it out with a probability of 0: a note says so.
@pytest.mark.filterwarnings("default:the step asked for values that are not known")
@pytest.mark.parametrize("shape", FAMILIES.values(), ids=FAMILIES)
def test_a_model_of_every_family_is_planned(shape: ModelShape) -> None:
    plan = trainfit.plan("textclass", gpu="4090", model=shape.slug)
    assert plan.memory is not None
    weights = plan.memory.weights_gib * 2**30 / shape.parameters
    assert 1.9 < weights < 4.4  # bytes of a weight, with the head and without a pooler
    # In full training a weight has a gradient and two moments, all in float32; what does not fit
    # so may fit with moments elsewhere or rounded.
    plain = plan.fits and not count_savers(plan)
    assert plain == (16 * shape.parameters < plan.memory.capacity_gib * 2**30)


@pytest.mark.soak
def test_blocks_that_cannot_be_recomputed_are_not_where_memory_is_tight() -> None:
    plan = trainfit.plan(
        "textclass", "model.method=full", gpu="t4", model="albert-xlarge-v2", memory_gib=2.5
    )
    assert plan.gradient_checkpointing == "none"
    assert any("cannot compute the blocks" in reason.why for reason in plan.reasons)
