"""Steps of users: conversions, devices, default optimizers, masks, torch.compile, convolutions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planning_models import write_bert
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from trainfit.core.errors import BadInput, TrainfitWarning
from trainfit.core.plan_records import TaskSpec
from trainfit.planning.estimator.estimate import Answer, Request, Target, ask, estimate, told
from trainfit.planning.estimator.kernel_buffers import Device, temporary_bytes

HERE = Path(__file__).stem
RECORDED = json.loads(
    (Path(__file__).parents[2] / "benchmarks/results/2026-11-16-convolutions-h200.json").read_text()
)
WIDTH, LAYERS, ROWS = 512, 6, 64
WEIGHTS = LAYERS * WIDTH**2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def step(  # noqa: C901
    change: str = "",
    optimizer: dict[str, Any] | None = None,
    mask: str = "",
    returns: str = "",
) -> Any:
    """Square layers without a bias; the arguments say what a user does with them."""
    built = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    if change == "built on cuda":
        built.cuda()
    if returns == "model":
        return built

    def make_step(model: nn.Module) -> Callable[[], None] | None:
        dtype, device = torch.float32, "cpu"
        called: nn.Module = model
        if change == "half":
            model.half()
            dtype = torch.float16
        elif change == "to dtype":
            model = model.to(torch.bfloat16)
            dtype = torch.bfloat16
        elif change in ("cuda", "built on cuda"):
            model.to("cuda:0")
            device = "cuda"
        elif change == "torch.cuda":
            torch.cuda.synchronize()
        elif change == "compile":
            called = torch.compile(model)
        elif change == "compile function":
            called = torch.compile(lambda x: model(x))
        elif change == "compile break":
            called = torch.compile(nn.Sequential(Breaking(), model))
        options = {"fused": True} if optimizer is None else optimizer
        adam = torch.optim.AdamW(model.parameters(), **options)
        x = torch.ones(ROWS, WIDTH, dtype=dtype, device=device)
        keep = torch.rand(ROWS) > 0.5 if mask == "unknown" else torch.arange(ROWS) < ROWS // 4

        def run() -> None:
            with torch.autocast(device, enabled=device == "cuda", dtype=torch.bfloat16):
                y = called(x)
            if mask:
                y = torch.cat([y[keep]] * 32)
            y.float().sum().backward()
            adam.step()
            adam.zero_grad()

        return None if returns == "no step" else run

    return built, make_step


class Breaking(nn.Module):
    """A module that looks at a value: nothing can trace it as one graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1.0 + x.sum().item())


def asked(**arguments: Any) -> Answer:
    return asked_of("step", **arguments)


def asked_of(factory: str, **arguments: Any) -> Answer:
    task = TaskSpec(factory=f"{HERE}:{factory}", arguments=arguments)
    hopper = Target(sm_count=132, compute_capability="9.0", capacity=1 << 40)
    return ask([Request(task=task, targets=(hopper,))])[0]


def peak(answer: Answer) -> int:
    assert answer.error is None
    assert answer.refused is None
    return answer.rooms[0].peak_allocated


@pytest.mark.parametrize("change", ["half", "to dtype"])
def test_a_model_that_the_step_converts_has_weights_of_half_the_size(change: str):
    plain, half = asked(), asked(change=change)
    assert (plain.weights, half.weights) == (4 * WEIGHTS, 2 * WEIGHTS)
    assert half.gradients == 2 * WEIGHTS
    assert half.optimizer == pytest.approx(2 * 2 * WEIGHTS, abs=1000)


@pytest.mark.parametrize("change", ["cuda", "built on cuda"])
def test_a_step_that_names_the_gpu_is_estimated(change: str):
    found = asked(change=change)
    assert (found.weights, found.refused) == (4 * WEIGHTS, None)


def test_the_default_optimizer_is_the_one_that_cuda_takes():
    default, foreach, single = (
        peak(asked(optimizer=options)) for options in ({}, {"foreach": True}, {"foreach": False})
    )
    assert default == foreach
    assert default - single > WEIGHTS  # foreach has temporaries as large as the model


def test_a_mask_of_known_values_has_its_size_and_another_one_is_taken_as_all_true():
    whole, quarter = asked(mask="unknown"), asked(mask="known")
    row = 4 * WIDTH
    assert (whole.masks > 0, quarter.masks) == (True, 0)
    assert peak(whole) - peak(quarter) >= 32 * row * ROWS * 3 // 4
    with pytest.warns(TrainfitWarning, match="taken as True everywhere"):
        told(whole)


def test_a_compiled_module_is_traced():
    assert (asked().compiled, asked(change="compile").compiled) == ({}, {"traced": 1})


@pytest.mark.filterwarnings("ignore:the step asked for values")
@pytest.mark.parametrize("change", ["compile function", "compile break"])
def test_what_cannot_be_traced_is_estimated_as_eager_and_told(change: str):
    found = asked(change=change)
    assert "eager" in (found.compiled or {})
    assert "traced" not in (found.compiled or {})
    with pytest.warns(TrainfitWarning, match="estimated as eager"):
        told(found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"returns": "model"}, r"step returned a Sequential, not a model and a function"),
        ({"returns": "no step"}, "make_step returned None"),
        ({"change": "torch.cuda"}, "calls torch.cuda"),
    ],
)
def test_a_wrong_factory_is_refused_with_what_to_return(arguments: dict[str, str], message: str):
    with pytest.raises(BadInput, match=message):
        estimate(f"{HERE}:step", "h200", **arguments)


def test_steps_that_were_recorded_on_a_gpu():
    """CNNs and default optimizers; no error bar of text models is stated for them."""
    for row in (RECORDED["steps"][at] for at in (1, 3, 4, 6, 8)):
        found = estimate("convolutions:step", "h200", **row["arguments"])
        error = found.peak_allocated_gib * 2**30 / row["peak_allocated"] - 1
        assert abs(error) < 0.02, row
        assert found.error_percent is None


def test_workspaces_of_convolutions_are_mostly_as_recorded():
    hopper = Device(132, "9.0")
    near = total = 0
    for row in RECORDED["convolutions"]:
        batch, channels, filters, side, kernel, stride, groups = row["shape"]
        form = torch.channels_last if row["channels_last"] else torch.contiguous_format
        like = {"dtype": DTYPES[row["dtype"]], "device": "meta"}
        x = torch.empty(batch, channels, side, side, **like).to(memory_format=form)
        weight = torch.empty(filters, channels // groups, kernel, kernel, **like)
        weight = weight.to(memory_format=form)
        common = ([stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], groups)
        aten = torch.ops.aten
        ahead = temporary_bytes(aten.convolution.default, (x, weight, None, *common), hopper)
        back = temporary_bytes(
            aten.convolution_backward.default, (x, x, weight, None, *common, [True] * 3), hopper
        )
        seen = {"forward": ahead, "grad_input": back, "grad_weight": back}
        near += sum(abs(v - row[k]) <= max(row[k] / 10, 8 << 20) for k, v in seen.items())
        total += len(seen)
    assert near >= 0.9 * total


def test_columns_norms_take_what_was_recorded() -> None:
    """Adafactor's norm of an embedding's columns took 132 MiB on an H200."""
    hopper = Device(sm_count=132, compute_capability="9.0")
    gradient = torch.empty(30522, 768, device="meta")
    norm = torch.ops.aten.linalg_vector_norm.default
    assert temporary_bytes(norm, (gradient, 2, [-2], True), hopper) == 132 << 20
    assert temporary_bytes(norm, (gradient, 2, [-1], True), hopper) == 0
    assert temporary_bytes(norm, (gradient, 2), hopper) == 0


def classifier(place: str, how: str, dtype: str | None = None) -> Any:
    """A classifier of transformers, by its pretrained weights or by its configuration."""
    import transformers

    given: dict[str, Any] = {"num_labels": 7, "output_loading_info": True}
    given |= {} if dtype is None else {"dtype": getattr(torch, dtype, dtype)}
    if how == "config":
        config = transformers.BertConfig.from_pretrained(place, num_labels=7)
        built: Any = transformers.BertForSequenceClassification(config)
    elif how == "quantized":
        told = transformers.BitsAndBytesConfig(load_in_4bit=True)
        built = transformers.AutoModel.from_pretrained(place, quantization_config=told)
    else:
        built, _ = getattr(transformers, how).from_pretrained(place, **given)
    assert how == "config" or not built.training  # as transformers leaves it

    def make_step(model: nn.Module) -> Callable[[], None]:
        adam = torch.optim.AdamW(model.train().parameters(), fused=True)
        ids = torch.ones(4, 32, dtype=torch.long)

        def run() -> None:
            model(input_ids=ids).logits.float().sum().backward()
            adam.step()
            adam.zero_grad()

        return run

    return built, make_step


@pytest.mark.soak
@pytest.mark.parametrize(
    "how", ["AutoModelForSequenceClassification", "BertForSequenceClassification"]
)
def test_a_pretrained_model_takes_what_its_configuration_does(tmp_path: Path, how: str):
    place = write_bert(tmp_path, layers=2, width=32)
    plain, loaded, half = (
        peak_and_weights(place=place, how=one, dtype=dtype)
        for one, dtype in (("config", None), (how, "auto"), (how, "bfloat16"))
    )
    assert loaded == plain
    parameters = BertForSequenceClassification(BertConfig.from_pretrained(place, num_labels=7))
    assert plain[1] - half[1] == 2 * sum(one.numel() for one in parameters.parameters())


def peak_and_weights(**arguments: Any) -> tuple[int, int]:
    found = asked_of("classifier", **arguments)
    return peak(found), found.weights


@pytest.mark.soak
def test_a_pretrained_model_that_is_quantized_is_refused(tmp_path: Path):
    found = asked_of("classifier", place=write_bert(tmp_path, layers=1, width=32), how="quantized")
    assert found.refused is not None
    assert "quantizes the weights" in found.refused[0]
