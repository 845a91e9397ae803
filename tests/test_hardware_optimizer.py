"""The hardware guide's API, with the guide's own calls."""

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch

from job_tiny import quick_plan
from trainfit import hardware_optimizer as ho
from trainfit.conf import compose
from trainfit.core.errors import BadInput
from trainfit.hardware import as_if
from trainfit.hardware.catalogue import find
from trainfit.planning import planner
from trainfit.runtime import undo


def put(monkeypatch: pytest.MonkeyPatch, *slugs: str) -> None:
    """Make detect() find these GPUs."""
    base = as_if(find(slugs[0] if slugs else "t4"))
    gpus = tuple(replace(as_if(find(s)).gpus[0], index=i) for i, s in enumerate(slugs))
    profile = replace(base, gpus=gpus, simulated=False)
    monkeypatch.setattr(ho, "detect", lambda: profile)


SIGNATURES = {
    "detect_gpu_info": [],
    "get_recommended_config": ["gpu_memory_gb"],
    "print_hardware_info": [],
    "optimize_pytorch_settings": ["config"],
    "enable_memory_efficient_mode": [],
    "get_optimal_num_workers": [],
    "compile_model": ["model", "mode"],
    "benchmark_dataloader": ["dataloader", "num_batches"],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_the_guides(name: str):
    parameters = inspect.signature(getattr(ho, name)).parameters
    assert list(parameters)[: len(SIGNATURES[name])] == SIGNATURES[name]
    extra = list(parameters.values())[len(SIGNATURES[name]) :]
    assert all(p.default is not inspect.Parameter.empty for p in extra)


INFO_KEYS = {
    "has_gpu",
    "gpu_count",
    "gpu_name",
    "gpu_memory_gb",
    "compute_capability",
    "supports_bfloat16",
    "supports_tf32",
}
CONFIG_KEYS = {
    "batch_size",
    "num_workers",
    "gradient_checkpointing",
    "gradient_accumulation_steps",
    "mixed_precision",
    "compile",
}


def test_gpu_info_of_a_3090(monkeypatch: pytest.MonkeyPatch):
    put(monkeypatch, "rtx-3090")
    info = ho.detect_gpu_info()
    assert set(info) == INFO_KEYS
    assert (info["has_gpu"], info["gpu_count"]) == (True, 1)
    assert info["gpu_name"] == "NVIDIA GeForce RTX 3090"
    assert f"{info['gpu_memory_gb']:.2f}" == "23.56"
    assert info["compute_capability"] == "8.6"
    assert info["supports_bfloat16"] is info["supports_tf32"] is True


def test_gpu_info_of_a_t4_and_of_nothing(monkeypatch: pytest.MonkeyPatch):
    put(monkeypatch, "t4", "t4")
    info = ho.detect_gpu_info()
    assert info["gpu_count"] == 2
    assert info["supports_bfloat16"] is info["supports_tf32"] is False
    put(monkeypatch)
    info = ho.detect_gpu_info()
    assert set(info) == INFO_KEYS
    assert (info["has_gpu"], info["gpu_count"]) == (False, 0)


def row(config: dict[str, Any]) -> tuple[Any, ...]:
    assert set(config) == CONFIG_KEYS
    names = ("batch_size", "num_workers", "gradient_checkpointing")
    return (*(config[n] for n in names), config["gradient_accumulation_steps"], config["compile"])


def test_what_is_here_gets_the_plan_of_a_model_that_is_named(monkeypatch: pytest.MonkeyPatch):
    put(monkeypatch, "t4")
    monkeypatch.setattr(planner, "plan", quick_plan)
    config = ho.get_recommended_config()
    assert set(config) == {*CONFIG_KEYS, "model"}
    assert config["model"] == compose("nli").config.model.name
    # As the planner says, whatever the guide's row has: 8, 2, True, 2, False and fp16.
    assert (config["batch_size"], config["num_workers"]) == (16, 0)
    assert config["gradient_checkpointing"] is config["compile"] is False
    assert config["mixed_precision"] is False


def test_memory_alone_gets_the_cautious_row(monkeypatch: pytest.MonkeyPatch):
    put(monkeypatch, "rtx-4090")  # what is here does not matter then
    assert row(ho.get_recommended_config(24)) == (12, 6, False, 1, False)
    assert row(ho.get_recommended_config(gpu_memory_gb=25.4)) == (12, 6, False, 1, False)
    assert row(ho.get_recommended_config(12)) == (4, 4, True, 4, False)
    assert ho.get_recommended_config(16)["mixed_precision"] == "fp16"


def test_no_memory_is_the_cpu_row(monkeypatch: pytest.MonkeyPatch):
    put(monkeypatch)
    config = ho.get_recommended_config(0)
    assert (config["batch_size"], config["gradient_accumulation_steps"]) == (2, 8)
    assert config["mixed_precision"] is False


@pytest.mark.parametrize("memory", [-1, float("nan")])
def test_a_memory_that_cannot_be_is_refused(memory: float):
    with pytest.raises(BadInput, match="gpu_memory_gb is"):
        ho.get_recommended_config(memory)


def test_workers(monkeypatch: pytest.MonkeyPatch):
    put(monkeypatch, "rtx-3090")
    profile = ho.detect()
    many = replace(profile, cpu=replace(profile.cpu, cores=64))
    monkeypatch.setattr(ho, "detect", lambda: many)
    assert ho.get_optimal_num_workers() == 8  # a 24 GB card at one per 3
    few = replace(profile, cpu=replace(profile.cpu, cores=1))
    monkeypatch.setattr(ho, "detect", lambda: few)
    assert ho.get_optimal_num_workers() == 0


def test_the_printed_page_tells_the_guides_fields(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    put(monkeypatch, "rtx-3090")
    monkeypatch.setattr(planner, "plan", quick_plan)
    ho.print_hardware_info()
    page = capsys.readouterr().out
    words = ("NVIDIA GeForce RTX 3090", "23.56 GiB", "8.6", "BFloat16", "TF32", "gpu_3090")
    for word in (*words, f"For nli with {compose('nli').config.model.name}"):
        assert word in page


def test_pytorch_is_really_set_and_undone(monkeypatch: pytest.MonkeyPatch):
    put(monkeypatch, "rtx-3090")
    before = (torch.backends.cudnn.benchmark, torch.get_num_threads())
    done = ho.optimize_pytorch_settings({"num_threads": 1, "seed": 3})
    drawn = torch.rand(1)
    assert torch.backends.cudnn.benchmark is True
    assert torch.backends.cuda.matmul.allow_tf32 is True
    assert torch.get_num_threads() == 1
    assert drawn == torch.rand(1, generator=torch.Generator().manual_seed(3))
    assert {change.name for change in done.changes} >= {"tf32", "cudnn_benchmark", "num_threads"}
    undo(done)
    assert (torch.backends.cudnn.benchmark, torch.get_num_threads()) == before
    assert torch.backends.cuda.matmul.allow_tf32 is False


def test_a_t4_gets_no_tf32(monkeypatch: pytest.MonkeyPatch):
    put(monkeypatch, "t4")
    done = ho.optimize_pytorch_settings()
    assert torch.backends.cuda.matmul.allow_tf32 is False
    undo(done)


def test_the_recommended_config_can_be_handed_on(monkeypatch: pytest.MonkeyPatch):
    put(monkeypatch, "t4")
    monkeypatch.setattr(planner, "plan", quick_plan)
    config = ho.get_recommended_config()
    undo(ho.optimize_pytorch_settings(config))


def test_a_mistyped_setting_is_named():
    with pytest.raises(BadInput, match="unknown setting 'tf23'; did you mean tf32"):
        ho.optimize_pytorch_settings({"tf23": True})


def test_memory_efficient_mode_keeps_the_fallback_and_the_model_cache(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("HF_HOME", "/somewhere")
    done = ho.enable_memory_efficient_mode()
    assert torch.backends.cuda.mem_efficient_sdp_enabled()
    assert torch.backends.cuda.math_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
    assert done["attention"].after == "efficient"
    import os

    assert os.environ["HF_HOME"] == "/somewhere"
    undo(done)
