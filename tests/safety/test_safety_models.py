"""A model's folder is data: nothing in it is imported, unpickled, downloaded or left."""

from __future__ import annotations

import json
import os
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel, BertConfig, BertModel
from transformers.integrations import hub_kernels

from trainfit.core.errors import BadInput
from trainfit.core.files import cache_folder
from trainfit.data import model_files, reading_child
from trainfit.data.model_files import plain_config, weight_files
from trainfit.data.tokenizers import learn_tokenizer, load_tokenizer
from trainfit.jobs.models.backbone import build_encoder

SMALL: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "max_position_embeddings": 32,
}


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a small BERT with safetensors."""
    torch.manual_seed(0)
    BertModel(BertConfig(**SMALL)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def weights_of(encoder: Any) -> torch.Tensor:
    """All weights of a model."""
    return torch.cat([weight.flatten() for weight in encoder.state_dict().values()])


def pickled(folder: Path, *, legacy: bool = False) -> dict[str, torch.Tensor]:
    """Turn the weights of a folder into pytorch_model.bin, and return them."""
    from safetensors.torch import load_file

    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    return state


class Exploit:
    """Runs a command where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


# ── config and tokenizer ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["bert", "marvin"])
def test_code_in_a_folder_is_never_run(kind: str, model: Path, tmp_path: Path):
    marker = tmp_path / "ran"
    (model / "modeling_trap.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    names = ("AutoConfig", "AutoModel", "AutoTokenizer", "AutoModelForCausalLM")
    trap = dict.fromkeys(names, "modeling_trap.Trap") | {
        "AutoTokenizer": [None, "modeling_trap.Trap"]
    }
    change(model / "config.json", auto_map=trap, model_type=kind, custom_pipelines=trap)
    learn_tokenizer(["some words to learn from " * 5]).save_pretrained(model)
    change(model / "tokenizer_config.json", auto_map=trap)
    with pytest.raises(BadInput) if kind == "marvin" else nullcontext():
        build_encoder(str(model))
    assert len(load_tokenizer(str(model))) > 200
    assert not marker.exists()


@pytest.mark.parametrize(
    "asked",
    [
        "kernels-community/flash-attn",
        "someone/kernels@main:attention",
        "flash_attention_2",
        "flash_attention_3",
        "flex_attention",
        "paged|sdpa",
    ],
)
@pytest.mark.parametrize("field", ["_attn_implementation", "attn_implementation"])
def test_a_config_chooses_no_attention(
    field: str, asked: str, model: Path, monkeypatch: pytest.MonkeyPatch
):
    def fetched(*_: Any, **__: Any) -> None:
        raise AssertionError("a kernel was asked for")

    monkeypatch.setattr(hub_kernels, "get_kernel", fetched)
    monkeypatch.setattr(hub_kernels, "load_and_register_attn_kernel", fetched)
    plain = weights_of(build_encoder(str(model)))
    change(model / "config.json", **{field: asked, "_experts_implementation": "megamoe"})
    encoder = build_encoder(str(model))
    assert encoder.config._attn_implementation == "trainfit"
    assert torch.equal(weights_of(encoder), plain)
    assert build_encoder(str(model), weights="random").config._attn_implementation == "trainfit"


def test_a_config_loses_what_loads_something_and_nothing_else():
    bad = {
        "auto_map": {},
        "_name_or_path": "x/y",
        "transformers_weights": "../w.safetensors",
        "fusion_config": {"a": True},
        "distributed_config": {},
        "backbone": "resnet50",
        "use_timm_backbone": True,
        "_attn_implementation_internal": "k/k",
    }
    good = {"model_type": "gemma3", "attention_dropout": 0.1, "rope_parameters": {"a": {"b": 1}}}
    fields = {**good, **bad, "text_config": {**good, **bad}}
    assert plain_config(fields, "x") == {**good, "text_config": good}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({"model_type": "timm_wrapper", "architecture": "hf-hub:x/y"}, "images"),
    ],
)
def test_models_that_need_other_code_are_refused(fields: dict[str, Any], says: str, model: Path):
    change(model / "config.json", **fields)
    with pytest.raises(BadInput, match=says):
        build_encoder(str(model))


def test_an_adapter_in_the_folder_does_not_lead_to_another_model(model: Path):
    plain = weights_of(build_encoder(str(model)))
    (model / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "someone/else", "peft_type": "LORA"})
    )
    assert torch.equal(weights_of(build_encoder(str(model))), plain)


@pytest.mark.parametrize(
    "fields",
    [
        {"tokenizer_class": "AutoModel"},
        {"tokenizer_class": "AutoTokenizer"},
        {"tokenizer_class": "pipeline"},
        {"vocab_file": "/etc/passwd"},
        {"tokenizer_file": "../../another.json"},
        {"fast_tokenizer_files": ["../tokenizer.4.0.0.json"]},
    ],
)
def test_a_tokenizer_names_no_other_class_and_no_file_elsewhere(
    fields: dict[str, Any], model: Path
):
    learn_tokenizer(["some words to learn from " * 5]).save_pretrained(model)
    assert load_tokenizer(str(model))
    change(model / "tokenizer_config.json", **fields)
    with pytest.raises(BadInput, match="names"):
        load_tokenizer(str(model))


# ── weights ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.soak
@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickled_model_is_converted_once_and_computes_the_same(
    legacy: bool, model: Path, monkeypatch: pytest.MonkeyPatch
):
    plain = weights_of(build_encoder(str(model)))
    pickled(model, legacy=legacy)
    assert torch.equal(weights_of(build_encoder(str(model))), plain)
    monkeypatch.setattr(model_files, "_convert", None)  # from the cache
    assert torch.equal(weights_of(build_encoder(str(model))), plain)
    [kept] = (cache_folder() / "weights").iterdir()
    assert [path.name for path in kept.iterdir()] == ["0.safetensors"]


def test_tied_and_sharded_weights_survive_a_conversion_that_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt2", n_embd=16, n_head=2, n_layer=2, vocab_size=60)
    whole = transformers.GPT2LMHeadModel(config)
    whole.save_pretrained(tmp_path / "gpt")
    state = whole.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    (tmp_path / "gpt" / "model.safetensors").unlink()
    names = sorted(state)
    map_: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({name: state[name] for name in part}, tmp_path / "gpt" / file)
        map_ |= dict.fromkeys(part, file)
    index = tmp_path / "gpt" / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": map_}))
    # The reference is what transformers makes of the pickled files.
    want = AutoModel.from_pretrained(tmp_path / "gpt", use_safetensors=False).state_dict()
    for _ in range(2):
        found = build_encoder(str(tmp_path / "gpt"), weights="pretrained").state_dict()
        assert want.keys() == found.keys()
        assert all(torch.equal(want[name], found[name]) for name in want)
        monkeypatch.setattr(model_files, "_convert", None)  # the second comes from the cache


def test_a_malicious_pickle_is_refused_in_one_line(model: Path, tmp_path: Path):
    marker = tmp_path / "ran"
    state = pickled(model)
    torch.save({**state, "x": Exploit(marker)}, model / "pytorch_model.bin")
    with pytest.raises(BadInput, match=r"not plain weights: it asks for posix\.system") as caught:
        weight_files(str(model))
    assert len(str(caught.value).splitlines()) == 1
    assert not list((cache_folder() / "weights").iterdir())
    bombs = {
        "plain": lambda path: path.write_bytes(pickle.dumps(Exploit(marker))),
        "expanded": lambda path: torch.save({"x": torch.zeros(1).expand(1 << 45)}, path),
        "list": lambda path: torch.save([torch.zeros(1)], path),
        "noise": lambda path: path.write_bytes(b"\x80\x02" + bytes(range(200))),
    }
    for write in bombs.values():
        write(model / "pytorch_model.bin")
        with pytest.raises((ValueError, pickle.UnpicklingError)):
            reading_child.convert(model / "pytorch_model.bin", tmp_path / "converted")
    assert not marker.exists()
    assert not (tmp_path / "converted").exists()


@pytest.mark.parametrize(
    "name", ["model.pt", "training_args.bin", "optimizer.pt", "x.ckpt", "a.pkl"]
)
def test_other_pickles_are_never_opened(name: str, model: Path, tmp_path: Path):
    (model / "model.safetensors").unlink()
    (model / name).write_bytes(pickle.dumps(Exploit(tmp_path / "ran")))
    with pytest.raises(BadInput, match=rf"{name} is a pickle.*not opened"):
        build_encoder(str(model))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("ending", [".safetensors", ".bin"])
@pytest.mark.parametrize("named", ["../other{}", "/{}", "sub/x{}", "..", 7, "link{}", "gone{}"])
def test_an_index_stays_in_its_folder(ending: str, named: Any, model: Path, tmp_path: Path):
    state = (model / "model.safetensors").rename(tmp_path / f"other{ending}")
    (model / f"link{ending}").symlink_to(state)
    file = named.format(ending) if isinstance(named, str) else named
    base = "model.safetensors" if ending == ".safetensors" else "pytorch_model.bin"
    (model / f"{base}.index.json").write_text(json.dumps({"weight_map": {"x": file}}))
    with pytest.raises(BadInput, match=r"outside of the folder|has no gone"):
        weight_files(str(model))


def test_the_hubs_own_cache_may_link(model: Path, tmp_path: Path):
    """A snapshot of the hub's cache is a folder of links to blobs beside it."""
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (model / "model.safetensors").rename(blobs / "f00")
    (snapshot / "part.safetensors").symlink_to("../../blobs/f00")
    index = {"weight_map": {"x": "part.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_files(str(snapshot)) == [snapshot / "part.safetensors"]
