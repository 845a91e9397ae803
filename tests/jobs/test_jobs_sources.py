"""Where models come from: names, folders, configs; and what is refused."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jobs_tiny import CONFIGS, TINY, rows, tiny
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    Gemma3Config,
    Gemma3Model,
    MambaConfig,
    MobileBertConfig,
    PretrainedConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    T5Config,
)

from trainfit.conf import compose
from trainfit.conf.schema import EncoderModel
from trainfit.core.codec import decode, encode
from trainfit.core.errors import BadConfig, BadInput, TrainfitWarning
from trainfit.jobs.models import sources
from trainfit.jobs.models.backbone import build_encoder
from trainfit.jobs.models.classifier import build_classifier
from trainfit.jobs.models.classifier_settings import ClassifierSettings, settings_from


def test_importing_the_tasks_imports_no_torch() -> None:
    code = "import sys, trainfit.jobs; dir(trainfit.jobs); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_a_folder_gives_its_weights_in_float32(tmp_path: Path) -> None:
    original = tiny("bert-base").encoder.to(torch.bfloat16)
    original.save_pretrained(tmp_path)
    loaded = build_encoder(str(tmp_path))
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    for name, weight in original.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight.float())
    random = build_encoder(str(tmp_path), weights="random")
    name = "embeddings.word_embeddings.weight"
    assert not torch.equal(random.state_dict()[name], loaded.state_dict()[name])


def test_a_model_that_is_kept_is_read_once_and_only_the_last_ones_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny("bert-base").encoder.save_pretrained(tmp_path)
    read: list[float] = []
    really = sources._read

    def counted(config: PretrainedConfig, *rest: object, **more: object) -> object:
        read.append(config.hidden_dropout_prob)
        return really(config, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(sources, "_read", counted)
    first = build_encoder(str(tmp_path))
    read.clear()
    with sources.kept_in_memory():
        for share in (0.1, 0.1, 0.2, 0.1, 0.3, 0.2, 0.1):
            model = build_encoder(str(tmp_path), overrides={"hidden_dropout_prob": share})
            assert model.config.hidden_dropout_prob == share
            for weight, other in zip(model.parameters(), first.parameters(), strict=True):
                assert torch.equal(weight, other)
            model.get_input_embeddings().weight.data.zero_()  # of this copy alone
        assert read == [0.1, 0.2, 0.3, 0.1]
    build_encoder(str(tmp_path))
    assert len(read) == 5


def test_borrowed_weights_are_in_the_same_memory_until_a_model_is_moved(tmp_path: Path) -> None:
    tiny("bert-base").encoder.save_pretrained(tmp_path)
    with sources.kept_in_memory(borrowed=True):
        one, two = build_encoder(str(tmp_path)), build_encoder(str(tmp_path))
        pairs = list(zip(one.parameters(), two.parameters(), strict=True))
        assert all(a.data_ptr() == b.data_ptr() for a, b in pairs)
        assert all(a is not b for a, b in pairs)
        before = [parameter.clone() for parameter in two.parameters()]
        one.requires_grad_(False).to(torch.float64)
        for parameter in one.parameters():
            parameter.zero_()
        again = build_encoder(str(tmp_path))
    for parameter, other, value in zip(two.parameters(), again.parameters(), before, strict=True):
        assert parameter.requires_grad
        assert torch.equal(parameter, value)
        assert torch.equal(other, value)


@pytest.mark.parametrize("borrowed", [False, True])
def test_a_pooler_that_is_drawn_is_not_that_of_the_model_before(
    tmp_path: Path, borrowed: bool
) -> None:
    tiny("bert-base").encoder.save_pretrained(tmp_path)  # without a pooler, as of masked words
    settings = ClassifierSettings(name=str(tmp_path), weights="pretrained", pooling="auto")

    def drawn(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        pooler: torch.Tensor = build_classifier(settings).head.model.bert.pooler.dense.weight  # type: ignore[union-attr, assignment]
        return pooler.clone()

    alone = [drawn(seed) for seed in (0, 1)]
    assert not torch.equal(*alone)
    with sources.kept_in_memory(borrowed=borrowed):
        build_classifier(replace(settings, pooling="mean"))  # another trial of a study
        for seed in (0, 1):
            assert torch.equal(drawn(seed), alone[seed])


def test_a_causal_folder_becomes_bidirectional_and_halves_its_window_once(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gemma3_text", **TINY["gemma-3-1b-it"])
    config.save_pretrained(tmp_path)
    first = build_encoder(str(tmp_path), weights="random")
    assert first.config.use_bidirectional_attention
    assert first.config.sliding_window == 6 // 2 + 1
    first.save_pretrained(tmp_path / "again")
    again = build_encoder(str(tmp_path / "again"))
    assert again.config.sliding_window == 6 // 2 + 1
    assert build_encoder(again.config).config.sliding_window == 6 // 2 + 1


def test_of_text_and_images_the_text_part_is_taken(tmp_path: Path) -> None:
    text = TINY["gemma-3-1b-it"] | {"num_hidden_layers": 2}
    vision = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    vision |= {"intermediate_size": 16, "image_size": 8, "patch_size": 4}
    whole = Gemma3Model(Gemma3Config(text_config=text, vision_config=vision))
    whole.save_pretrained(tmp_path)
    encoder = build_encoder(str(tmp_path), attention_dropout=0.25)
    assert type(encoder).__name__ == "Gemma3TextModel"
    assert encoder.config.use_bidirectional_attention
    assert encoder.layers[0].self_attn.attention_dropout == 0.25
    wanted = whole.language_model.embed_tokens.weight
    assert torch.equal(encoder.embed_tokens.weight, wanted)


def test_a_config_is_taken_and_left_as_it_was() -> None:
    before = CONFIGS["llama"].to_dict()
    model = tiny("llama", attention_dropout=0.5)
    assert model.encoder.config.attention_dropout == 0.5
    assert CONFIGS["llama"].to_dict() == before


def test_fewer_layers_keep_the_pattern_of_the_first() -> None:
    encoder = build_encoder("gemma-3-1b-it", overrides=TINY["gemma-3-1b-it"])
    assert encoder.config.layer_types == ["sliding_attention"] * 5 + ["full_attention"]


REFUSED = (MambaConfig, T5Config, Qwen3NextConfig, MobileBertConfig, RecurrentGemmaConfig)


@pytest.mark.parametrize("config", [kind() for kind in REFUSED], ids=str)
def test_what_cannot_look_both_ways_is_refused(config: PretrainedConfig) -> None:
    with torch.device("meta"), pytest.raises(BadInput, match="bidirectional"):
        build_encoder(config)


def test_an_unknown_name_says_what_is_near() -> None:
    with pytest.raises(BadInput, match=r"gemma-3-1b-it") as caught:
        build_encoder("gemma-3-1b-itt")
    assert "\n" not in str(caught.value)


def test_a_hub_id_asks_the_hub() -> None:
    for name, weights in (("google/gemma-3-1b-it", "auto"), ("gemma-3-1b-it", "pretrained")):
        with pytest.raises(BadInput, match=r"from the hub.*local folder"):
            build_encoder(name, weights=weights)  # type: ignore[arg-type]


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"config\.json"):
        build_encoder(str(tmp_path))


def test_a_config_without_its_weights_is_refused(tmp_path: Path) -> None:
    CONFIGS["llama"].save_pretrained(tmp_path)
    with pytest.raises(BadInput, match=r"no model\.safetensors"):
        build_encoder(str(tmp_path))
    with pytest.raises(BadInput, match="no pretrained weights"):
        build_encoder(CONFIGS["llama"], weights="pretrained")


def test_the_own_gpt_is_no_encoder() -> None:
    with pytest.raises(BadInput, match="gpt task"):
        build_encoder("gpt-tiny")


# ── settings ──────────────────────────────────────────────────────────────────────────────────


def test_settings_survive_json() -> None:
    settings = ClassifierSettings(name="bert-base", overrides={"num_hidden_layers": 2})
    assert decode(ClassifierSettings, encode(settings)) == settings
    with pytest.raises(BadInput, match="pooling"):
        decode(ClassifierSettings, {"name": "bert-base", "pooling": "media"})


def configured(**changes: object) -> EncoderModel:
    return dataclasses.replace(compose("nli", []).config.model, **changes)


def test_a_configuration_s_auto_must_be_decided() -> None:
    with pytest.raises(BadConfig) as caught:
        settings_from(configured(), classes=2)
    assert len(caught.value.problems) == 2
    decided = settings_from(configured(), classes=2, method="frozen", checkpointing="selective")
    assert (decided.method, decided.checkpointing) == ("frozen", "selective")


@pytest.mark.parametrize("freeze", [True, False])
def test_the_jobs_build_what_their_configuration_says(freeze: bool) -> None:
    model = configured(
        name="bert-base",
        method="lora",
        freeze_encoder=freeze,
        use_gradient_checkpointing=True,
    )
    tiny = TINY["bert-base"]
    nli = build_classifier(settings_from(model, classes=2, overrides=tiny))
    assert nli(**rows().padded).shape == (4, 2)
    assert nli.settings.method == ("frozen" if freeze else "lora")
    assert nli.encoder.is_gradient_checkpointing
    texts = build_classifier(settings_from(model, classes=5, overrides=tiny))
    assert texts(**rows().packed).shape == (4, 5)


def _changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> str:
    """Save a small model with other tensors; returns its folder."""
    tiny("bert-base").encoder.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


WORD = "embeddings.word_embeddings.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors: tensors.clear(), "has none of the weights that its config describes"),
        (
            lambda tensors: tensors.update({WORD: torch.zeros(7, 32)}),
            rf"the weight {WORD} of .* is \(7, 32\), and \(90, 32\) by its config",
        ),
    ],
)
def test_weights_of_another_model_are_one_line(
    change: Callable[[dict[str, torch.Tensor]], None], says: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=says):
        build_encoder(_changed(tmp_path, change))


def test_a_missing_weight_is_told_and_no_name_of_a_file_reaches_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["\x1b[2J"] = tensors.pop(WORD)

    with pytest.warns(TrainfitWarning, match=f"^1 weights? of .* at random, such as {WORD}$"):
        build_encoder(_changed(tmp_path, change))
    assert "\x1b" not in "".join(capfd.readouterr())
