"""Liger's kernels in a model's layers, and nowhere else."""

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.gemma3 import modeling_gemma3

from trainfit.conf import compose
from trainfit.core.errors import BadInput
from trainfit.hardware import as_if
from trainfit.hardware.catalogue import find
from trainfit.jobs import job_plan
from trainfit.jobs.models.classifier import EncoderClassifier, build_classifier
from trainfit.jobs.models.classifier_settings import ClassifierSettings
from trainfit.kernels import supported
from trainfit.measuring.receipt import make_receipt
from trainfit.measuring.trace import Evidence

SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 99,
}


def build(family: str = "gemma3_text", **settings: Any) -> EncoderClassifier:
    config = AutoConfig.for_model(family, **SMALL)
    return build_classifier(ClassifierSettings(name=family, **settings), config=config)


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, nn.Module, dict[str, Any]]]:
    """Stands for Liger, which needs a GPU: notes which layers it was given."""
    found: list[tuple[str, nn.Module, dict[str, Any]]] = []
    patches: Any = ModuleType("liger_kernel.transformers.monkey_patch")
    patches.LigerSwiGLUMLP = nn.Identity
    patches._patch_rms_norm_module = lambda m, **options: found.append(("norm", m, options))
    patches._patch_geglu_module = lambda m: found.append(("geglu", m, {}))
    patches._patch_swiglu_module = lambda m, kind: found.append(("swiglu", m, {"kind": kind}))
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", ModuleType("transformers"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", patches)
    return found


@pytest.mark.parametrize(
    ("family", "norms", "gated"), [("gemma3_text", 6, "geglu"), ("qwen3", 4, "swiglu")]
)
def test_every_norm_and_feed_forward_of_the_model_is_exchanged(
    patched: list[Any], family: str, norms: int, gated: str
):
    model = build(family, liger=True)
    kinds = [kind for kind, _, _ in patched]
    assert kinds.count("norm") == 2 * norms + 1  # of each layer, and the last one
    assert kinds.count(gated) == 2
    assert len(kinds) == 2 * norms + 3
    inside = set(map(id, model.encoder.modules()))
    assert all(id(module) in inside for _, module, _ in patched)
    offset = 1.0 if family.startswith("gemma") else None
    assert {options.get("offset") for kind, _, options in patched if kind == "norm"} == {offset}


def test_without_it_no_layer_is_touched(patched: list[Any]):
    build()
    assert patched == []


def test_a_family_without_its_layers_says_so():
    assert supported.obstacle("gemma3_text") is None
    with pytest.raises(BadInput, match="no layers for bert"):
        build("bert", liger=True)


def test_where_it_is_not_installed_one_line_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(BadInput, match="cannot be imported"):
        build(liger=True)


@pytest.mark.parametrize(
    ("name", "gpu", "reason"),
    [
        ("gemma-3-1b-it", None, "for GPUs"),
        ("bert-base", "h200", "no layers for bert"),
        ("deberta-v3-base", "h200", "no layers for deberta-v2"),
    ],
)
def test_a_plan_with_it_where_it_cannot_run_is_refused(name: str, gpu: str | None, reason: str):
    composed = compose("nli", [f"model.name={name}", "optimization.liger=true"])
    profile = job_plan.machine(composed, gpu)
    if gpu is None:
        assert not profile.gpus
    with pytest.raises(BadInput, match=reason):
        job_plan.answer(composed, job_plan.question(composed), profile)


def test_it_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    composed = compose("nli", ["model.name=gemma-3-1b-it", "optimization.liger=true"])
    here = replace(as_if(find("h200")), simulated=False)
    monkeypatch.setattr(supported, "is_installed", lambda: False)
    with pytest.raises(BadInput, match="not installed") as caught:
        job_plan.answer(composed, job_plan.question(composed), here)
    assert "pip install liger-kernel" in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "launches", "status"),
    [(True, 12, "active"), (True, 0, "not_active"), (False, 0, "off")],
)
def test_the_receipt_goes_by_its_kernels(asked: bool, launches: int, status: str):
    seen = Evidence(step=1, device="cuda", liger=launches)
    [item] = [i for i in make_receipt("run", seen, {"liger": asked}).items if i.name == "liger"]
    assert item.status == status


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3"])
def test_it_computes_the_same_on_a_gpu(family: str):
    pytest.importorskip("liger_kernel")
    norm = modeling_gemma3.Gemma3RMSNorm
    found = []
    for with_it in (False, True):
        torch.manual_seed(0)
        model = build(family, liger=with_it, head_dropout=0.0).cuda()
        ids = torch.arange(5, 69, device="cuda")[None]
        ends = torch.tensor([0, 20, 64], device="cuda", dtype=torch.int32)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, cu_seqlens=ends, max_seqlen=64).square().sum()
        loss.backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        found.append((loss.detach(), torch.cat(gradients)))
    (plain, one), (quick, other) = found
    torch.testing.assert_close(quick, plain, rtol=0.03, atol=0.03)
    assert float((one - other).norm()) < 0.05 * float(one.norm())
    assert modeling_gemma3.Gemma3RMSNorm is norm
