"""Every preset against the documents, every override that a document shows, and every mistake."""

import csv
from pathlib import Path
from typing import Any

import pytest
import yaml
from conf_documents import SHOWN
from hypothesis import given
from hypothesis import strategies as st

from trainfit.conf import SCHEMAS, compose, keys, layer, options
from trainfit.conf.aliases import ALIASES
from trainfit.core.errors import BadConfig, BadInput
from trainfit.hardware.model_shapes import model_shape

TABLE = list(csv.DictReader((Path(__file__).parent / "presets.csv").open()))
TASKS = list(SCHEMAS)
SHARED = {"pairs": "textclass", "tokens": "textclass"}
"""Tasks that no document has, with the one whose presets they take."""
HARDWARE = [
    "a10",
    "a100",
    "a30",
    "a40",
    "auto",
    "conservative",
    "cpu",
    "gpu_3090",
    "gpu_4090",
    "gpu_low_mem",
    "h100",
    "h200",
    "rtx_4080",
    "rtx_5090",
    "t4",
    "v100",
]


def expected(task: str, name: str) -> dict[str, Any]:
    task = SHARED.get(task, task)
    rows = [row for row in TABLE if (row["task"], row["preset"]) == (task, name)]
    words = {"true": True, "false": False}
    return {
        row["key"]: words.get(row["value"], yaml.safe_load(row["value"]))
        if row["value"] != "off"
        else "off"
        for row in rows
    }


@pytest.mark.parametrize("task", TASKS)
def test_every_preset_of_the_documents_is_there(task: str):
    assert list(options(task, "hardware")) == HARDWARE


@pytest.mark.parametrize("name", HARDWARE)
@pytest.mark.parametrize("task", TASKS)
def test_a_preset_pins_what_its_document_says_and_nothing_else(task: str, name: str):
    composed = compose(task, [f"hardware={name}"])
    values = composed.values()
    pinned = {k: values[k] for k, origin in composed.origins.items() if origin == f"preset {name}"}
    assert pinned == expected(task, name) == layer(task, "hardware", name)
    assert composed.hardware == name


def test_the_table_cites_a_source_for_every_value():
    assert all(row["source"] for row in TABLE)
    assert {row["task"] for row in TABLE} == set(TASKS) - set(SHARED)


EXPERIMENTS = {
    ("nli", "nli_full_5fold"): {"cv.folds": 5, "model.freeze_encoder": True},
    ("nli", "nli_quick_test"): {"training.max_steps": 20},
    ("nli", "rtx3090_optimized"): {
        "device.tf32": True,
        "optimization.optimizer": "adamw_fused",
        "training.batch_size": 8,
        "training.num_workers": 4,
        "training.pin_memory": True,
        "training.prefetch_factor": 2,
        "model.use_flash_attention": True,
        "optimization.compile": False,
        "model.name": "gemma-3-1b-it",
    },
    ("textclass", "t4_textclass"): {
        "data.max_length": 192,
        "training.batch_size": 16,
        "training.eval_batch_size": 32,
        "optimization.gradient_accumulation_steps": 2,
        "training.num_epochs": 3.0,
        "device.mixed_precision": "fp16",
        "model.name": "phobert-base-v2",
    },
    ("gpt", "gpt_medium"): {"model.name": "gpt-medium"},
    # What trains where nobody names data or a model; found by experiment, not in a document.
    ("nli", "nli_embedded"): {"model.name": "modernbert-tiny", "data.data_dir": None},
    ("textclass", "textclass_embedded"): {"model.name": "modernbert-tiny", "data.train": None},
    ("pairs", "pairs_embedded"): {"model.name": "modernbert-tiny", "data.train": None},
    ("tokens", "tokens_embedded"): {"model.name": "modernbert-tiny", "data.train": None},
    ("gpt", "gpt_embedded"): {"model.name": "gpt-tiny", "data.data_dir": None},
}


@pytest.mark.parametrize(("task", "name"), EXPERIMENTS)
def test_an_experiment_sets_what_its_document_says(task: str, name: str):
    values = compose(task, [f"experiment={name}"]).values()
    assert {key: values[key] for key in EXPERIMENTS[task, name]} == EXPERIMENTS[task, name]


def test_every_shipped_experiment_is_in_the_table_above():
    shipped = {(task, name) for task in TASKS for name in options(task, "experiment")}
    assert shipped == set(EXPERIMENTS)


def test_an_experiment_brings_its_hardware_and_the_user_may_choose_another():
    assert compose("nli", ["experiment=rtx3090_optimized"]).hardware == "gpu_3090"
    chosen = compose("nli", ["experiment=rtx3090_optimized", "hardware=gpu_4090"])
    assert chosen.hardware == "gpu_4090"
    assert chosen.origins["training.batch_size"] == "experiment rtx3090_optimized"


def test_default_preset_experiment_and_override_are_told_apart():
    words = ["hardware=gpu_3090", "experiment=nli_full_5fold", "training.batch_size=20"]
    composed = compose("nli", words)
    assert composed.origins["training.batch_size"] == "override"
    assert composed.origins["training.num_workers"] == "preset gpu_3090"
    assert composed.origins["cv.folds"] == "experiment nli_full_5fold"
    assert composed.origins["seed"] == "default"
    assert composed.values()["training.batch_size"] == 20
    assert set(composed.origins) == set(composed.values()) == set(keys("nli"))


ROWS = [(document, *row) for document, rows in SHOWN.items() for row in rows]


@pytest.mark.parametrize(("document", "task", "word", "key", "value"), ROWS)
def test_an_override_of_a_document(document: str, task: str, word: str, key: str, value: Any):
    composed = compose(task, [word])
    assert composed.values()[key] == value
    assert type(composed.values()[key]) is type(value)
    assert composed.origins[key] == "override"
    written = word.split("=")[0].strip()
    assert [note for note in composed.notes if note.startswith(f"{written} is {key}")] == list(
        composed.notes
    )
    assert bool(composed.notes) == (written != key)


def test_every_alias_leads_to_a_key():
    assert set(ALIASES.values()) <= set(keys("nli"))
    assert {row[2].split("=")[0].strip().lower() for row in ROWS} >= set(ALIASES) - {
        "training.use_torch_compile",
        "load_in_4bit",
        "load_in_8bit",
        "data.drop_last",
        "data.persistent_workers",
        "dataloader_drop_last",
        "dataloader_prefetch_factor",
        "per_device_train_batch_size",
        *("lr", "training.lr", "epochs", "training.epochs"),
    }


def test_short_words_and_wrong_kinds_of_words():
    found = compose("textclass", ["lr=3e-5", "training.epochs=2"]).config.training
    assert (found.learning_rate, found.num_epochs) == (3e-5, 2)
    with pytest.raises(BadInput, match="is no text"):
        compose("textclass", [{"lr": 1}])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("words", "method", "quantization"),
    [
        (["model.method=qlora"], "lora", "nf4"),
        (["method=QDoRA"], "dora", "nf4"),
        (["model.method=lora", "load_in_4bit=true"], "lora", "nf4"),
        (["method=dora", "load_in_8bit=true", "load_in_4bit=false"], "dora", "int8"),
        (["model.quantization=int8", "model.method=lora"], "lora", "int8"),
        (["load_in_4bit=false"], "full", "none"),
    ],
)
def test_spellings_of_quantized_adapters(words: list[str], method: str, quantization: str):
    values = compose("textclass", words).values()
    assert (values["model.method"], values["model.quantization"]) == (method, quantization)


@pytest.mark.parametrize(
    "words",
    [["load_in_4bit=true", "load_in_8bit=true"], ["method=qlora", "model.quantization=int8"]],
)
def test_two_formats_of_weights_contradict_each_other(words: list[str]):
    with pytest.raises(BadInput, match=r"model\.quantization"):
        compose("textclass", words)


@pytest.mark.parametrize("word", ["model.quantization=nf4", "load_in_4bit=true"])
def test_a_gpt_has_no_frozen_weights_to_quantize(word: str):
    with pytest.raises(BadInput, match="unknown key"):
        compose("gpt", [word])


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["enable_amp=true", "amp_dtype=fp16"], "fp16"),
        (["amp_dtype=bf16", "enable_amp=true"], "bf16"),
        (["amp_dtype=bf16", "enable_amp=false"], "off"),
        (["enable_amp=false", "amp_dtype=fp16"], "off"),
        (["enable_amp=true", "fp16=true"], "fp16"),
        (["fp16=false", "bf16=true"], "bf16"),
        (["enable_amp=true", "bf16=false", "fp16=true"], "fp16"),
        (["use_bf16=false", "amp_dtype=fp16"], "fp16"),
        (["fp16=False", "bf16=False"], "off"),
        (["FP16=True", "BF16=False"], "fp16"),
        (["device.mixed_precision=off"], "off"),
        (["device.mixed_precision=fp32"], "off"),
        (["device.mixed_precision=none"], "off"),
        (["device.mixed_precision=null"], "off"),
        (["device.mixed_precision=no"], "off"),
        (["amp_dtype=torch.bfloat16"], "bf16"),
        (["DEVICE.MIXED_PRECISION=FP32"], "off"),
    ],
)
def test_amp_is_whether_and_which(words: list[str], value: str):
    assert compose("gpt", words).values()["device.mixed_precision"] == value


@pytest.mark.parametrize(
    "words",
    [
        ["fp16=true", "bf16=True"],
        ["bf16=true", "amp_dtype=fp16"],
        ["fp16=false", "amp_dtype=fp16"],
        ["enable_amp=false", "fp16=true"],
        ["enable_amp=true", "fp16=false"],
        ["fp16=true", "device.mixed_precision=off"],
    ],
)
def test_precisions_that_contradict_each_other_are_one_line(words: list[str]):
    with pytest.raises(BadInput) as caught:
        compose("nli", words)
    both = " and ".join(words)
    assert str(caught.value) == (
        f"{both} set the same key device.mixed_precision; give device.mixed_precision once"
    )


@pytest.mark.parametrize(
    ("task", "word", "message"),
    [
        ("nli", "training.batchsize=2", "unknown key training.batchsize for nli; did you mean tr"),
        ("nli", "model.use_flash_attenton=true", "did you mean model.use_flash_attention?"),
        ("nli", "learnig_rate=1", "did you mean training.learning_rate?"),
        ("nli", "training.batch_size=many", 'training.batch_size is "many"; use a whole number'),
        ("nli", "training.batch_size=0", "training.batch_size is 0; use a whole number (1 to"),
        ("nli", "training.batch_size=1.5", "training.batch_size is 1.5"),
        ("nli", "device.tf32=1", "device.tf32 is 1; use true or false or auto"),
        ("nli", "device.mixed_precision=bf61", "did you mean bf16?"),
        ("nli", "hardware=gpu_490", "unknown hardware=gpu_490 for nli; did you mean gpu_4090"),
        ("nli", "experiment=t4_textclass", "unknown experiment=t4_textclass for nli"),
        ("nli", "training.batch_size", "write it as key=value"),
        ("nli", "~training.batch_size", "write it as key=value"),
        ("nli", "+training.batch=3", "write it as key=value"),
        ("nli", "training.batch_size=1,2", "give one; `trainfit hpo` searches over several"),
        ("nli", "training.batch_size=[", "write it as key=value"),
        ("gpt", "cv.folds=5", "unknown key cv.folds for gpt"),
        ("nli", "fp16=bf16", "fp16 is bf16; use true or false"),
        ("nli", "enable_amp=1", "enable_amp is 1; use true or false"),
        ("nli", "device.mixed_precision=1", "device.mixed_precision is 1; use auto"),
        ("nli", "optim=adamw_troch", 'optimization.optimizer is "adamw_troch"'),
        ("nlu", "seed=1", "unknown task 'nlu'; did you mean nli?"),
        ("nli", "training.fp16=true", "for nli; did you mean device.mixed_precision?"),
        ("nli", "data.block_size=64", "for nli; did you mean data.max_length?"),
        ("nli", "hardware=rtx_3090", "hardware=rtx_3090 for nli; did you mean gpu_3090?"),
        ("nli", "hardware=gpu_5090", "hardware=gpu_5090 for nli; did you mean rtx_5090?"),
        ("nli", "hardware=GPU_T4", "hardware=GPU_T4 for nli; did you mean t4?"),
        ("nli", "hardware=rtx_3060", "hardware=rtx_3060 for nli; the choices are a10"),
    ],
)
def test_a_mistake_is_named_with_the_fix(task: str, word: str, message: str):
    with pytest.raises(BadInput) as caught:
        compose(task, [word])
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_several_mistakes_are_reported_at_once():
    words = ["hardware=gpu_409", "training.batchsize=1", "training.batch_size=x", "seed=-1"]
    with pytest.raises(BadConfig) as caught:
        compose("nli", words)
    assert len(caught.value.problems) == 4


def test_two_spellings_that_disagree_are_refused():
    with pytest.raises(BadInput, match=r"set the same key optimization\.optimizer"):
        compose("nli", ["training.optimizer_type=adamw", "training.fused_adamw=true"])
    agreed = compose("nli", ["training.optimizer_type=adamw_fused", "training.fused_adamw=true"])
    assert agreed.values()["optimization.optimizer"] == "adamw_fused"
    last = compose("nli", ["training.batch_size=4", "training.batch_size=8"])
    assert last.values()["training.batch_size"] == 8


@given(st.lists(st.text(max_size=25), max_size=3))
def test_whatever_is_typed_is_either_understood_or_one_line_per_mistake(words: list[str]):
    try:
        compose("nli", words)
    except BadInput as error:
        problems = getattr(error, "problems", (error,))
        assert 1 <= len(problems) <= len(words)


@pytest.mark.parametrize("task", TASKS)
def test_the_default_model_and_every_experiments_model_is_in_the_catalogue(task: str):
    for words in ([], *([f"experiment={name}"] for name in options(task, "experiment"))):
        model_shape(compose(task, words).values()["model.name"])


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (
            "model.name=https://huggingface.co/google-bert/bert-base-uncased/",
            "google-bert/bert-base-uncased",
        ),
        ("model.name=bert-base-uncased/", "bert-base-uncased"),
        ("model.name=/", "/"),
        ("data.train=~/a.csv", "/home/anna/a.csv"),
        ("runs_dir=~/runs", "/home/anna/runs"),
        ("data.train=~a.csv", "~a.csv"),
        ("data.train=Ü 数据/my reviews (1).csv", "Ü 数据/my reviews (1).csv"),
    ],
)
def test_places_are_taken_as_people_write_them(
    word: str, value: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", "/home/anna")
    values = compose("textclass", [word]).values()
    assert value in (values["model.name"], values["data.train"], values["runs_dir"])
