"""Adapters on quantized encoders: what is learned, the memory while building, whole jobs."""

from __future__ import annotations

import csv
import gc
import math
import os
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from engine_toy import final_bits
from jobs_tiny import CONFIGS, NO_DROPOUT, OTHERS, TINY, rows, tiny
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
    Gemma3TextConfig,
)

from job_tiny import TINY_BERT, be_quick, packed_bytes, words, write_texts
from trainfit.cli.main import run as cli
from trainfit.conf import compose
from trainfit.core.errors import BadInput
from trainfit.core.plan_records import Plan, TaskSpec
from trainfit.data import learn_tokenizer
from trainfit.engine.observers import Observer
from trainfit.hardware import as_if
from trainfit.hardware.catalogue import find
from trainfit.jobs import job_plan, textclass
from trainfit.jobs.configuration import configure, configured_by
from trainfit.jobs.models import sources
from trainfit.jobs.models.building import on_device
from trainfit.jobs.models.classifier import EncoderClassifier, build_classifier
from trainfit.jobs.models.classifier_settings import ClassifierSettings
from trainfit.jobs.predict import predict_texts
from trainfit.jobs.run import Show
from trainfit.kernels.quantized import QuantizedLinear, widened_state
from trainfit.measuring.flops import count_flops
from trainfit.planning.estimator.estimate import estimate
from trainfit.runtime import compile_blocks

LABELS = torch.tensor([0, 2, 1, 1])
FAMILIES = ("bert-base", "gemma-3-1b-it", "qwen2.5-0.5b", "modernbert-base", "deberta-v3-base")


def quantized(model: nn.Module) -> list[QuantizedLinear]:
    return [module for module in model.modules() if isinstance(module, QuantizedLinear)]


def twin(name: str, model: EncoderClassifier, **settings: Any) -> EncoderClassifier:
    """The same classifier by peft on plain layers, which hold the widened weights."""
    plain = tiny(name, **settings)
    plain.load_state_dict(widened_state(model))
    assert not quantized(plain)
    return plain


def gradients(model: EncoderClassifier, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    functional.cross_entropy(model(**batch), LABELS, reduction="sum").backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# ── what is learned ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_is_that_of_peft_on_the_widened_weights(name: str, method: str, kind: str) -> None:
    model = tiny(name, method=method, quantization=kind)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    plain = twin(name, model, method=method)
    batch = rows().padded
    found, wanted = gradients(model, batch), gradients(plain, batch)
    assert found.keys() == wanted.keys()
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_with_dropout_nothing_wide_is_kept_for_the_backward_pass(
    method: str, checkpointing: str
) -> None:
    """Dropout makes DoRA multiply by the weight itself."""
    sizes = OTHERS["qwen2.5-0.5b"] | {"hidden_size": 96, "intermediate_size": 160}
    more: Any = {"overrides": sizes, "lora_dropout": 0.1, "checkpointing": checkpointing}
    model = tiny("qwen2.5-0.5b", method=method, quantization="nf4", **more)
    wide = {tuple(module.shape) for module in quantized(model)}
    wide |= {(columns, rows) for rows, columns in wide}
    kept: list[Tensor] = []
    batch = rows((3, 2)).padded

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(**batch).sum()
    assert not [t.shape for t in kept if t.is_floating_point() and tuple(t.shape) in wide]
    loss.backward()


@pytest.mark.parametrize("name", [*TINY, *OTHERS, *CONFIGS])
def test_every_family_is_quantized_in_its_blocks_alone(name: str) -> None:
    if name == "gpt2":
        with pytest.raises(BadInput, match="gpt2 has no linear layers"):
            tiny(name, method="lora", quantization="nf4")
        return
    model = tiny(name, method="frozen", quantization="nf4").eval()
    inside = quantized(model.encoder)
    assert inside
    assert not [m for m in inside if m.in_features == 90 or m.out_features == 90]
    assert not quantized(model.head)
    plain = twin(name, model, method="frozen").eval()
    batch = rows().padded
    torch.testing.assert_close(model(**batch), plain(**batch), rtol=1e-4, atol=1e-5)
    with torch.device("meta"):
        pairs = [build_classifier(one.settings, config=CONFIGS.get(name)) for one in (model, plain)]
    assert count_flops(pairs[0].encoder) == count_flops(pairs[1].encoder)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_autocast_computes_as_plain_layers_in_half_precision_do(precision: torch.dtype) -> None:
    half: Any = {"dtype": str(precision).removeprefix("torch."), "method": "dora"}
    model = tiny("gemma-3-1b-it", quantization="nf4", **half)
    plain = twin("gemma-3-1b-it", model, **half)
    batch = rows().padded
    with torch.autocast("cpu", precision):
        found, wanted = model(**batch), plain(**batch)
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_compiled_blocks_learn_the_same_without_a_break(method: str) -> None:
    model = tiny("qwen2.5-0.5b", method=method, quantization="nf4", lora_dropout=0.0)
    batch = rows().padded
    wanted = gradients(model, batch)
    model.zero_grad()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_blocks(model, backend="aot_eager")
    found = gradients(model, batch)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[key], rtol=1e-4, atol=1e-5)


def test_weights_that_are_trained_are_not_quantized() -> None:
    with pytest.raises(BadInput, match="quantization is nf4, and method=full"):
        ClassifierSettings(name="bert-base", quantization="nf4")
    with pytest.raises(BadInput, match="quantization is int8, and method=full"):
        job_plan.question(compose("textclass", ["model.quantization=int8"]))


@pytest.mark.parametrize(
    ("words_", "fix"),
    [
        (["plan", "textclass", "--gpu", "t4", "model.quantization=nf4"], "model.method to lora"),
        (["plan", "gpt", "--gpu", "t4", "model.quantization=nf4"], "unknown key"),
        (["plan", "nli", "--gpu", "t4", "method=lora", "quantization=fp8"], "quantization"),
    ],
)
def test_bad_combinations_are_one_line(words_: list[str], fix: str, capsys: Any) -> None:
    assert cli(words_) == 2
    said = capsys.readouterr().err.strip()
    assert fix in said
    assert len(said.splitlines()) == 1


def test_quantized_weights_are_not_shared_among_ranks() -> None:
    asked = "model.name=modernbert-tiny", "model.method=qlora"
    here: Any = {"ranks": 2, "here": True}

    def made(*more: str) -> Plan:
        composed = compose("textclass", [*asked, *more])
        return job_plan.answer(composed, job_plan.question(composed), as_if(find("h200")), **here)

    assert made().sharding == "none"
    with pytest.raises(BadInput, match="quantized weights are not shared among ranks"):
        made("optimization.sharding=fsdp")


# ── memory while a model is built ─────────────────────────────────────────────────────────────


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that operations made and nobody freed yet."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self._follow(tensor.untyped_storage())
        return out

    def _follow(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

        def gone() -> None:
            self._known.discard(key)
            self.bytes -= size

        weakref.finalize(storage, gone)


_BIG = {
    "vocab_size": 200,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
}
_MATRIX = 256 * 1024


def test_random_weights_are_drawn_and_quantized_one_matrix_at_a_time() -> None:
    chosen: Any = {"name": "qwen2.5-0.5b", "overrides": _BIG, "method": "frozen"}
    with Live() as live:
        model = build_classifier(ClassifierSettings(**chosen, quantization="nf4"))
    stored = sum(p.nbytes for p in model.parameters())
    plain = build_classifier(ClassifierSettings(**chosen))
    assert sum(p.nbytes for p in plain.parameters()) > 4 * stored
    # Beside what stays: one matrix in float32, and what finding its codes takes.
    assert live.peak < stored + 6 * 4 * _MATRIX
    assert live.peak < 0.6 * sum(p.nbytes for p in plain.parameters())


def test_read_weights_are_those_of_the_file_and_are_given_back(tmp_path: Path) -> None:
    sizes = {key: value for key, value in _BIG.items() if key != "num_key_value_heads"}
    torch.manual_seed(3)
    BertModel(BertConfig(**sizes)).save_pretrained(tmp_path)
    chosen: Any = NO_DROPOUT | {"name": str(tmp_path), "weights": "pretrained", "method": "frozen"}
    plain = build_classifier(ClassifierSettings(**chosen))
    model = build_classifier(ClassifierSettings(**chosen, quantization="int8"))
    assert len(quantized(model)) == 12 * 6
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            near = plain.get_submodule(name).weight
            assert (module.weight - near).abs().max() <= near.abs().max() / 200
    kept = {id(module): module for module in quantized(model)}
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and id(m) not in kept]
    assert [m.out_features for m in linears] == [2]  # the head; the pooler is gone


@pytest.mark.parametrize("family", [BertConfig, Gemma3TextConfig])
def test_read_weights_are_quantized_from_the_mapped_file(
    tmp_path: Path, family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is a model that is read whole in bf16, and then quantized."""
    torch.manual_seed(3)
    AutoModel.from_config(family(**_BIG)).save_pretrained(tmp_path)
    half: Any = {"name": str(tmp_path), "weights": "pretrained", "method": "frozen"}
    half |= {"dtype": "bfloat16"}
    mapped: list[bool] = []
    quantize = sources.quantize_blocks

    def watched(model: Any, *given: Any) -> None:
        lines = Path("/proc/self/maps").read_text().splitlines()
        ends = [line.split()[0].split("-") for line in lines if str(tmp_path) in line]
        ranges = [range(int(low, 16), int(high, 16)) for low, high in ends]
        weights = [layer.weight.data_ptr() for layer in sources._linears(model)]
        mapped.extend(any(at in one for one in ranges) for at in weights)
        quantize(model, *given)

    monkeypatch.setattr(sources, "quantize_blocks", watched)
    model = build_classifier(ClassifierSettings(**half, quantization="nf4"))
    assert len(mapped) == len(quantized(model))
    assert all(mapped)
    plain = build_classifier(ClassifierSettings(**half))
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            parent, _, last = name.rpartition(".")
            linear: Any = plain.get_submodule(name)
            made = QuantizedLinear.of(linear, "nf4", torch.device("cpu"))
            setattr(plain.get_submodule(parent), last, made)
    ours, theirs = (
        dict(each.named_parameters()) | dict(each.named_buffers()) for each in (model, plain)
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        if "head" not in name:  # drawn
            assert torch.equal(tensor, theirs[name]), name
            assert tensor.dtype == theirs[name].dtype, name


def test_folds_share_the_codes_in_the_hosts_memory(tmp_path: Path) -> None:
    BertModel(BertConfig(**TINY_BERT | {"num_hidden_layers": 2})).save_pretrained(tmp_path)
    settings = ClassifierSettings(
        name=str(tmp_path), weights="pretrained", method="lora", quantization="nf4"
    )
    with sources.kept_in_memory(borrowed=True):
        first, second = (build_classifier(settings) for _ in range(2))
    pairs = list(zip(quantized(first), quantized(second), strict=True))
    assert pairs
    assert all(a.codes.data_ptr() == b.codes.data_ptr() for a, b in pairs)


@pytest.mark.gpu
def test_a_gpu_never_holds_the_whole_model_in_half_precision() -> None:
    sizes = _BIG | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    settings = ClassifierSettings(
        name="qwen2.5-0.5b",
        overrides=sizes,
        method="lora",
        dtype="bfloat16",
        quantization="nf4",
    )
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = on_device("cuda", lambda: build_classifier(settings))()
    stored = sum(p.nbytes for p in model.parameters())
    peak = torch.cuda.max_memory_allocated() - before
    layer = 2 * (2 * 1024 * 1024 + 3 * 1024 * 4096)
    assert all(p.is_cuda for p in model.parameters())
    assert stored < 0.4 * 24 * layer
    assert peak < 1.02 * stored + 3 * layer  # of 24, and what finding codes takes


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_a_gpu_quantizes_what_the_host_then_keeps(tmp_path: Path, method: str) -> None:
    BertModel(BertConfig(**TINY_BERT | {"num_hidden_layers": 2})).save_pretrained(tmp_path)
    chosen: Any = NO_DROPOUT | {"name": str(tmp_path), "weights": "pretrained", "classes": 3}
    settings = ClassifierSettings(**chosen, method=method, quantization="nf4")
    model = on_device("cuda", lambda: build_classifier(settings))()
    assert not any(module.codes.is_cuda for module in quantized(model))
    here = build_classifier(settings)
    same = [a.codes == b.codes for a, b in zip(quantized(model), quantized(here), strict=True)]
    assert torch.cat(same).float().mean() > 0.999
    batch = {name: tensor.cuda() for name, tensor in rows().padded.items()}
    model.cuda()(**batch).sum().backward()


# ── whole jobs ────────────────────────────────────────────────────────────────────────────────


class At(Observer):
    """Ask the run to stop at the n-th step."""

    def __init__(self, step: int) -> None:
        self.left = step

    def on_step(self, step: int) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def job(tmp_path: Path, *more: str, show: Show | None = None) -> Any:
    data = tmp_path / "train.csv"
    if not data.is_file():
        write_texts(data, 160)
        folder = tmp_path / "pretrained"
        torch.manual_seed(4)
        BertModel(BertConfig(**TINY_BERT | {"num_hidden_layers": 2})).save_pretrained(folder)
        learn_tokenizer(data.read_text().splitlines(), vocabulary=320).save_pretrained(folder)
    own = words(
        tmp_path,
        f"data.train={data}",
        "data.max_length=32",
        "training.learning_rate=0.01",
        "training.num_epochs=4",
        "training.checkpoint_steps=3",
        *more,
    )
    return textclass.train(configure("textclass", own), **({} if show is None else {"show": show}))


SAVING = (
    "optimization.optimizer=adamw_8bit",
    "model.use_gradient_checkpointing=true",
    "model.lora_rank=128",  # 8-bit moments are for weights of 4,096 elements and more
    "device.mixed_precision=off",
)


@pytest.mark.parametrize(("method", "more"), [("qlora", ()), ("qdora", ()), ("qdora", SAVING)])
def test_an_interrupted_run_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, more: tuple[str, ...]
) -> None:
    if not more:
        be_quick(monkeypatch)
    asked = (f"model.method={method}", *more)
    whole = job(tmp_path, *asked)
    left = job(tmp_path, *asked, show=Show(watch=lambda _title: (At(7),)))
    assert left.status == "stopped"
    ended = textclass.train(configured_by(Path(left.run), "textclass"), resume=Path(left.run))
    assert final_bits(Path(ended.run)) == final_bits(Path(whole.run))
    assert ended.metrics == whole.metrics
    saved = load_file(next(Path(whole.run).glob("checkpoints/*/model.safetensors")))
    assert not [name for name in saved if name.endswith(("codes", "scales", "coarse"))]
    if more:
        states = load_file(next(Path(whole.run).glob("checkpoints/*/optimizer.safetensors")))
        assert any(state.dtype == torch.uint8 for state in states.values())


@pytest.mark.parametrize("pooling", ["auto", "mean"])
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_the_export_is_a_plain_model_with_the_same_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, pooling: str
) -> None:
    be_quick(monkeypatch)
    result = job(
        tmp_path, f"model.method={method}", "load_in_4bit=true", f"model.pooling={pooling}"
    )
    assert result.metrics["f1"] > 0.9  # its first word decides
    folder = Path(result.run)
    with (folder / "predictions.csv").open() as file:
        chosen = list(csv.DictReader(file))[:8]
    with (tmp_path / "train.csv").open() as file:
        texts = [row["text"] for row in csv.DictReader(file)]
    asked = [texts[int(row["id"]) - 1] for row in chosen]
    found, _ = predict_texts([folder / "export"], asked, None, device="cpu")
    scores = [float(row["score"]) for row in chosen]
    assert found[:, 1].tolist() == pytest.approx(scores, abs=2e-5)
    export = folder / "export"
    stored = load_file(next(export.rglob("*model.safetensors"), export))
    assert all(tensor.is_floating_point() for tensor in stored.values())
    assert (export / "adapter" / "adapter_model.safetensors").is_file()
    assert "nf4" in (export / "README.md").read_text()
    if pooling == "auto":
        plain = AutoModelForSequenceClassification.from_pretrained(export).eval()
        tokenizer = AutoTokenizer.from_pretrained(export)
        with torch.no_grad():
            logits = plain(**tokenizer(asked, return_tensors="pt", padding=True)).logits
        assert logits.softmax(-1)[:, 1].tolist() == pytest.approx(scores, abs=2e-5)


def test_folds_of_a_quantized_model_begin_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fold that takes over the last one's memory scores as one in a process of its own."""
    be_quick(monkeypatch)
    job(tmp_path, "training.max_steps=1")
    own = (
        f"model.name={tmp_path / 'pretrained'}",
        "model.weights=pretrained",
        "model.method=qlora",
        "cv.folds=2",
    )
    whole = job(tmp_path, *own)
    left = job(tmp_path, *own, show=Show(watch=lambda _title: (At(14),)))  # in the second fold
    assert (Path(left.run) / "fold-1" / "scores.json").is_file()
    ended = textclass.train(configured_by(Path(left.run), "textclass"), resume=Path(left.run))
    assert ended.metrics == whole.metrics


@pytest.mark.parametrize("frozen", [False, True])
def test_planned_trained_verified_and_predicted_from_the_command_line(
    tmp_path: Path, capsys: Any, frozen: bool
) -> None:
    write_texts(tmp_path / "train.csv", 80)
    how = ["model.freeze_encoder=true", "quantization=int8"] if frozen else ["method=qlora"]
    words_ = [
        "model.name=modernbert-tiny",
        f"data.train={tmp_path / 'train.csv'}",
        f"runs_dir={tmp_path / 'runs'}",
        "training.max_steps=4",
        "device.use_cuda=false",
        "baselines=false",
        *how,
    ]
    assert cli(["train", "textclass", *words_]) == 0
    [folder] = (tmp_path / "runs").iterdir()
    plan = Plan.load(folder / "plan.json")
    assert plan.quantization == ("int8" if frozen else "nf4")
    assert "quantization" in [reason.setting for reason in plan.reasons]
    capsys.readouterr()
    assert cli(["verify", str(folder), "--strict", "--json"]) == 0
    assert cli(["predict", str(folder), "--text", "alder"]) == 0
    shown = capsys.readouterr().out
    assert ('"nf4"' in shown) is not frozen


# ── the estimate ──────────────────────────────────────────────────────────────────────────────

_SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
}


def probe(kind: str, method: str = "lora", **more: Any) -> dict[str, Any]:
    return {
        "name": "qwen2.5-0.5b",
        "overrides": _SHAPE,
        "method": method,
        "quantization": kind,
        "dtype": "bfloat16",
        "precision": "bf16",
        "pooling": "mean",
        "checkpointing": "none",
        "rows": 8,
        "width": 256,
        "slots": None,
        "lengths": None,
        "micro_batches": 1,
    } | more


def _blocks(kind: Any) -> int:
    """Bytes of the matrices of all blocks."""
    keys = 512 // 8 * 4
    shapes = [(512, 512), (keys, 512), (keys, 512), (512, 512)]
    shapes += [(1536, 512), (1536, 512), (512, 1536)]
    if kind == "none":
        return 4 * sum(2 * math.prod(shape) for shape in shapes)
    return 4 * sum(packed_bytes(math.prod(shape), shape[0], kind) for shape in shapes)


FACTORY = "trainfit.jobs.probes:encoder_step"


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_the_estimate_counts_codes_and_scales(kind: str) -> None:
    wide, narrow = (estimate(FACTORY, "t4", **probe(each)) for each in ("none", kind))
    saved = (wide.weights_gib - narrow.weights_gib) * 2**30
    assert saved == _blocks("none") - _blocks(kind)
    assert narrow.adapters_gib == wide.adapters_gib
    fewer = (wide.peak_allocated_gib - narrow.peak_allocated_gib) * 2**30
    # One matrix at a time is wide; autocast keeps another copy of a plain layer's input.
    assert saved - 2 * 512 * 1536 * 1.05 <= fewer <= saved + 2 * 8 * 256 * 512 * 1.05


def test_a_compiled_step_keeps_no_wide_weight_either() -> None:
    eager, compiled = (
        estimate(FACTORY, "h200", **probe("nf4", compile=compile)) for compile in (False, True)
    )
    assert compiled.weights_gib == eager.weights_gib
    assert compiled.activations_gib < eager.activations_gib + 2 * 512 * 1536 / 2**30


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_predicted_memory_is_what_a_step_takes(kind: str, method: str) -> None:
    sizes = _SHAPE | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8}
    asked = probe(kind, method, overrides=sizes, rows=16, width=512)
    predicted = estimate(FACTORY, "h200", **asked).peak_allocated_gib
    make = TaskSpec(factory=FACTORY, arguments=asked).function()
    gc.collect()
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model, make_step = make(**asked, device="cuda")
        step = make_step(model)
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
    torch.cuda.synchronize()
    measured = (torch.cuda.max_memory_allocated() - before) / 2**30
    assert predicted == pytest.approx(measured, rel=0.03)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_eager_and_compiled_steps_have_the_same_loss(method: str) -> None:
    settings = ClassifierSettings(
        **NO_DROPOUT,
        name="qwen2.5-0.5b",
        overrides=_SHAPE | {"vocab_size": 90},
        method=method,
        dtype="bfloat16",
        quantization="nf4",
    )
    torch.manual_seed(0)
    model = on_device("cuda", lambda: build_classifier(settings))()
    batch = {name: tensor.cuda() for name, tensor in rows().padded.items()}

    def loss() -> float:
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            found = functional.cross_entropy(model(**batch).float(), LABELS.cuda() % 2)
        found.backward()
        return float(found)

    eager = loss()
    compile_blocks(model)
    assert loss() == pytest.approx(eager, rel=2e-2)
