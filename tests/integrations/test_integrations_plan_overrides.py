"""The overrides compose back to the plan, and the shell hands them over unchanged."""

import subprocess
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan_example import make_plan
from trainfit.conf import compose
from trainfit.conf.schema import SCHEMAS
from trainfit.core.plan_records import RuntimeSettings
from trainfit.integrations.plan_exports import FORMATS, command_line, overrides

PLANNED = {
    "device.use_cuda": True,
    "device.mixed_precision": "bf16",
    "device.tf32": True,
    "model.use_gradient_checkpointing": False,
    "data.max_length": 512,
    "training.batch_size": 8,
    "training.eval_batch_size": 32,
    "training.effective_batch_size": 16,
    "training.data_on_gpu": False,
    "training.num_workers": 6,
    "training.pin_memory": True,
    "training.persistent_workers": True,
    "training.prefetch_factor": 2,
    "optimization.optimizer": "adamw_fused",
    "optimization.compile": True,
    "optimization.cuda_graph": False,
    "optimization.sharding": "none",
    "optimization.offload_optimizer": False,
    "optimization.offload_activations": False,
    "optimization.activation_budget": 1.0,
    "optimization.compile_mode": "max-autotune-no-cudagraphs",
    "optimization.gradient_accumulation_steps": 2,
}
ENCODER = {"model.method": "dora", "model.freeze_encoder": False}


@pytest.mark.parametrize("task", SCHEMAS)
@pytest.mark.parametrize(
    "given_words",
    [(), ("hardware=gpu_3090", "training.learning_rate=1e-4", "training.batch_size=4", "seed=7")],
)
def test_they_compose_back_with_the_plan_pinned(task: str, given_words):
    composed = compose(task, given_words)
    lines = FORMATS["hydra"](make_plan(), composed).text.splitlines()
    again = compose(task, lines)
    pinned = PLANNED | (ENCODER if task != "gpt" else {})
    assert again.values() == composed.values() | pinned
    assert again.hardware == composed.hardware
    # Threads, weights and what follows from the data are no part of a plan.
    left = {key for key, value in again.values().items() if value == "auto"}
    assert left <= {
        "data.first_column",
        "data.label_column",
        "data.second_column",
        "data.split_column",
        "data.target",
        "data.text_column",
        "data.words_column",
        "device.num_threads",
        "model.pooling",
        "model.weights",
        "model.vocab_size",
        "model.loss_chunk",
        "model.half_stream",
        "tune",
    }
    assert again.notes == ()  # every key is the canonical one


def test_an_experiment_is_kept():
    composed = compose("nli", ["experiment=nli_full_5fold"])
    again = compose("nli", overrides(make_plan(), composed))
    assert again.experiment == "nli_full_5fold"
    assert again.values()["cv.folds"] == composed.values()["cv.folds"]


def test_what_a_configuration_cannot_say_is_left_to_the_planner():
    plan = make_plan(
        gradient_checkpointing="selective",
        num_workers=0,
        prefetch_factor=None,
        precision="fp32",
        runtime=RuntimeSettings(),
        gpu=None,
    )
    plan = replace(plan, workload=replace(plan.workload, method="frozen"))
    handover = FORMATS["hydra"](plan, compose("nli"))
    values = compose("nli", handover.text.splitlines()).values()
    assert values["model.use_gradient_checkpointing"] == "selective"
    assert values["training.prefetch_factor"] == "auto"
    assert values["device.tf32"] == "auto"
    assert values["device.use_cuda"] == "auto"
    assert values["device.mixed_precision"] == "off"
    assert values["model.freeze_encoder"] is True


# Names of blanks alone, and those too long for a file, are refused; slashes at the end are dropped.
letters = st.characters(exclude_categories=["Cs", "Cc"])
written = st.text(letters, min_size=1, max_size=60).filter(str.strip)
written = written.filter(lambda name: not name.endswith("/") and not name.startswith("~/"))
names = written | st.sampled_from(
    ["true", "null", "1e5", "12", "a b", "it's", 'say "no"', "C:\\x\\", "${oc.env:HOME}", "[a]"]
)


@pytest.mark.soak
@settings(max_examples=60)
@given(name=names)
def test_any_model_name_survives_hydra_and_the_shell(name: str):
    composed = compose("nli")
    config = replace(composed.config, model=replace(composed.config.model, name=name))
    composed = replace(
        composed, config=config, origins=composed.origins | {"model.name": "override"}
    )
    words = overrides(make_plan(), composed)
    assert compose("nli", words).config.model.name == name
    assert heard(command_line(make_plan(), composed)) == ["train", "nli", *words]


def heard(text: str, program: str = "trainfit") -> list[str]:
    """The words that the program gets when a shell runs the text."""
    script = f"{program}() {{ printf '%s\\0' \"$@\"; }}\n{text}"
    done = subprocess.run(["bash", "-euc", script], capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]


def test_several_ranks_start_with_torchrun():
    composed = compose("gpt")
    words = heard(FORMATS["shell"](make_plan(ranks=2), composed).text, "torchrun")
    start = ["--standalone", "--nproc-per-node", "2", "-m", "trainfit", "train", "gpt"]
    assert words == [*start, *overrides(make_plan(ranks=2), composed)]


def test_variables_that_torch_reads_when_it_starts():
    runtime = RuntimeSettings(expandable_segments=True, deterministic=True, num_threads=3)
    text = FORMATS["shell"](make_plan(runtime=runtime), compose("nli")).text
    exports = text.split("\ntrainfit")[0]
    done = subprocess.run(
        ["bash", "-euc", f"{exports}\nprintenv PYTORCH_ALLOC_CONF CUBLAS_WORKSPACE_CONFIG"],
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode().splitlines() == ["expandable_segments:True", ":4096:8"]
    assert "export OMP_NUM_THREADS=3" in exports
    assert (
        "export" not in FORMATS["shell"](make_plan(runtime=RuntimeSettings()), compose("nli")).text
    )
