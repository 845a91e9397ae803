"""The model shapes: exact sizes, and fields that really arrive in the model transformers builds."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from functools import cache

import pytest
import torch
import transformers

from trainfit.core.codec import decode, encode
from trainfit.core.errors import BadInput
from trainfit.hardware.model_shapes import (
    _WELL_KNOWN,
    ModelShape,
    model_shape,
    model_shapes,
    transformers_config,
)

# As others report them for the released checkpoints, not as this package computes them.
PUBLISHED = {
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-1b-it": 999_885_952,
    "gemma-3-4b-it": 3_880_263_168,
    "deberta-v3-base": 183_831_552,
    "phobert-base-v2": 134_998_272,
    "bert-base": 109_482_240,
    "multilingual-e5-small": 117_653_760,
    "modernbert-base": 149_014_272,
    "gpt2": 124_439_808,
}
GPTS = ("gpt-tiny", "gpt-mini", "gpt-small", "gpt-medium", "gpt-124m")
OWN = (*GPTS, "modernbert-tiny")


@cache
def on_meta(slug: str) -> torch.nn.Module:
    """The full-size model without its memory."""
    with torch.device("meta"):
        return transformers.AutoModel.from_config(transformers_config(model_shape(slug)))


def count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# Sizes. The formulas take literal numbers: a wrong field in models.json cannot agree with itself.


def bert_layer(d: int, f: int) -> int:
    attention = 4 * (d * d + d)
    feed_forward = d * f + f + f * d + d
    two_norms = 4 * d
    return attention + feed_forward + two_norms


def bert(v: int, positions: int, types: int, d: int, layers: int, f: int) -> int:
    embeddings = (v + positions + types) * d + 2 * d
    pooler = d * d + d
    return embeddings + layers * bert_layer(d, f) + pooler


def deberta(v: int, buckets: int, d: int, layers: int, f: int) -> int:
    embeddings = v * d + 2 * d
    relative = 2 * buckets * d + 2 * d  # shared by all layers, with a norm
    return embeddings + relative + layers * bert_layer(d, f)


def gpt2(v: int, positions: int, d: int, layers: int) -> int:
    return (v + positions) * d + layers * (12 * d * d + 13 * d) + 2 * d


def own_gpt(v: int, block: int, d: int, layers: int) -> int:
    norms = (2 * layers + 1) * d
    return 12 * layers * d * d + norms + v * d + block * d


def gemma(v: int, d: int, f: int, layers: int, q: int, kv: int, qk_norm: bool) -> int:
    head = 256
    attention = d * (q + 2 * kv) * head + q * head * d + (2 * head if qk_norm else 0)
    return v * d + layers * (attention + 3 * d * f + 4 * d) + d


def modernbert(v: int, d: int, layers: int, f: int) -> int:
    embeddings = v * d + d
    blocks = layers * (4 * d * d + 3 * d * f + 2 * d) - d  # the first attention has no norm
    return embeddings + blocks + d


FORMULAS = {
    "gemma-2-2b": gemma(256_000, 2304, 9216, 26, 8, 4, qk_norm=False),
    "gemma-3-1b-it": gemma(262_144, 1152, 6912, 26, 4, 1, qk_norm=True),
    "gemma-3-4b-it": gemma(262_208, 2560, 10_240, 34, 8, 4, qk_norm=True),
    "deberta-v3-base": deberta(128_100, 256, 768, 12, 3072),
    "phobert-base-v2": bert(64_001, 258, 1, 768, 12, 3072),
    "bert-base": bert(30_522, 512, 2, 768, 12, 3072),
    "multilingual-e5-small": bert(250_037, 512, 2, 384, 12, 1536),
    "modernbert-base": modernbert(50_368, 768, 22, 1152),
    "modernbert-tiny": modernbert(1024, 64, 2, 128),
    "gpt2": gpt2(50_257, 1024, 768, 12),
    "gpt-tiny": own_gpt(2048, 128, 128, 4),
    "gpt-mini": own_gpt(8192, 256, 384, 6),
    "gpt-small": own_gpt(30_000, 1024, 768, 12),
    "gpt-medium": own_gpt(30_000, 1024, 1024, 24),
    "gpt-124m": own_gpt(50_304, 1024, 768, 12),
}


def test_trainfit_s_own_models_are_covered_by_these_tables() -> None:
    slugs = [shape.slug for shape in model_shapes()]
    assert set(FORMULAS) == {*PUBLISHED, *OWN} <= set(slugs)
    assert {shape.slug for shape in model_shapes() if shape.hub is None} == set(OWN)
    assert len(slugs) == len(set(slugs))


@pytest.mark.parametrize("slug", FORMULAS)
def test_parameters_equal_the_closed_formula(slug: str) -> None:
    assert model_shape(slug).parameters == FORMULAS[slug]


@pytest.mark.parametrize("slug", PUBLISHED)
def test_parameters_equal_the_published_number_and_the_built_model(slug: str) -> None:
    assert model_shape(slug).parameters == PUBLISHED[slug] == count(on_meta(slug))


def test_gemma_3_4b_and_its_vision_part_make_the_published_checkpoint() -> None:
    vision = transformers.SiglipVisionConfig(
        hidden_size=1152,
        intermediate_size=4304,
        num_hidden_layers=27,
        num_attention_heads=16,
        image_size=896,
        patch_size=14,
        vision_use_head=False,
    )
    text = transformers_config(model_shape("gemma-3-4b-it"))
    whole = transformers.Gemma3Config(text_config=text.to_dict(), vision_config=vision.to_dict())
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(whole)
    assert count(model) == 4_300_079_472


def test_guide_gpt_is_about_109m() -> None:
    assert round(model_shape("gpt-small").parameters / 1e6) == 109


@pytest.mark.parametrize("slug", GPTS)
def test_own_gpt_is_gpt2_without_biases(slug: str) -> None:
    config = model_shape(slug).config
    assert config.keys() == {
        *("model_type", "vocab_size", "block_size", "n_layer", "n_head", "n_embd", "bias", "tied")
    }
    assert config["bias"] is False
    assert config["tied"] is True
    assert config["n_embd"] % config["n_head"] == 0
    like = transformers.GPT2Config(
        n_positions=config["block_size"],
        **{key: config[key] for key in ("vocab_size", "n_layer", "n_head", "n_embd")},
    )
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(like)
    weights = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    assert sum(p.numel() for p in weights) == model_shape(slug).parameters


# Fields.


def test_editing_a_config_leaves_the_catalogue_alone() -> None:
    shape = model_shape("gemma-3-1b-it")
    before = deepcopy(shape.config)
    built = transformers_config(shape)
    built.rope_parameters["full_attention"]["rope_theta"] = 1.0
    built.layer_types.clear()
    assert shape.config == before


@pytest.mark.parametrize(
    ("slug", "pad", "bos", "eos", "positions"),
    [
        ("gemma-2-2b", 0, 2, 1, 8192),
        ("gemma-3-1b-it", 0, 2, [1, 106], 32_768),
        ("gemma-3-4b-it", 0, 2, [1, 106], 131_072),
        ("deberta-v3-base", 0, None, None, 512),
        ("phobert-base-v2", 1, 0, 2, 258),
        ("bert-base", 0, None, None, 512),
        ("modernbert-base", 50_283, 50_281, 50_282, 8192),
        ("gpt2", None, 50_256, 50_256, 1024),
    ],
)
def test_special_tokens_and_longest_input(
    slug: str, pad: int | None, bos: int | None, eos: int | list[int] | None, positions: int
) -> None:
    config = transformers_config(model_shape(slug))
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (pad, bos, eos)
    assert config.max_position_embeddings == positions


def windows(slug: str) -> list[int | None]:
    """The sliding window of each layer's attention, None for full attention."""
    model = on_meta(slug)
    attentions = [
        layer.attn if slug == "modernbert-base" else layer.self_attn for layer in model.layers
    ]
    return [attention.sliding_window for attention in attentions]


def test_gemma_2_alternates_sliding_and_full_attention() -> None:
    assert windows("gemma-2-2b") == [4096, None] * 13


@pytest.mark.parametrize(("slug", "window"), [("gemma-3-1b-it", 512), ("gemma-3-4b-it", 1024)])
def test_gemma_3_has_full_attention_in_every_sixth_layer(slug: str, window: int) -> None:
    found = windows(slug)
    full = [number for number, size in enumerate(found, start=1) if size is None]
    assert full == list(range(6, len(found) + 1, 6))
    assert set(found) == {window, None}


def test_modernbert_has_full_attention_in_every_third_layer_from_the_first() -> None:
    found = windows("modernbert-base")
    assert [index for index, size in enumerate(found) if size is None] == list(range(0, 22, 3))
    assert set(found) == {64 + 1, None}  # 64 to each side; transformers adds one for the kernel


def test_gemma_attention_scale_and_soft_caps() -> None:
    for slug, cap, final in (
        ("gemma-2-2b", 50.0, 30.0),
        ("gemma-3-1b-it", None, None),
        ("gemma-3-4b-it", None, None),
    ):
        attention = on_meta(slug).layers[0].self_attn
        assert attention.scaling == 256**-0.5
        assert attention.head_dim == 256
        assert attention.attn_logit_softcapping == cap
        assert on_meta(slug).config.final_logit_softcapping == final


def test_bidirectional_gemma_3_gets_the_window_of_both_sides() -> None:
    config = transformers_config(model_shape("gemma-3-1b-it"), use_bidirectional_attention=True)
    assert config.sliding_window == 512 // 2 + 1
    assert transformers_config(model_shape("gemma-3-1b-it")).sliding_window == 512


def test_deberta_reads_its_relative_positions() -> None:
    model = on_meta("deberta-v3-base")
    assert model.embeddings.position_embeddings is None
    assert tuple(model.encoder.rel_embeddings.weight.shape) == (512, 768)
    assert model.encoder.position_buckets == 256
    assert model.encoder.norm_rel_ebd == ["layer_norm"]
    attention = model.encoder.layer[0].attention.self
    assert attention.share_att_key
    assert attention.pos_att_type == ["p2c", "c2p"]
    assert attention.pos_ebd_size == 256
    assert model.embeddings.LayerNorm.eps == 1e-7


@pytest.mark.parametrize(
    ("slug", "eps"),
    [("bert-base", 1e-12), ("phobert-base-v2", 1e-5)],
)
def test_bert_norms_and_dropout(slug: str, eps: float) -> None:
    model = on_meta(slug)
    assert model.embeddings.LayerNorm.eps == eps
    assert model.embeddings.dropout.p == 0.1
    assert model.encoder.layer[0].attention.self.dropout.p == 0.1
    assert model.embeddings.word_embeddings.padding_idx == model_shape(slug).config["pad_token_id"]


# Small copies that really run.

SMALL = {
    **dict.fromkeys(("vocab_size",), 128),
    **dict.fromkeys(("hidden_size", "n_embd"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 7),  # one more than Gemma 3's pattern
    **dict.fromkeys(("num_attention_heads", "n_head"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 4,
    "local_attention": 8,
    "position_buckets": 8,
}


@cache
def small(slug: str) -> torch.nn.Module:
    """The same model with smaller sizes; what is no size stays as it is shipped."""
    shape = model_shape(slug)
    changed = {key: SMALL[key] for key in SMALL if key in shape.config}
    if "layer_types" in shape.config:
        changed["layer_types"] = shape.config["layer_types"][: SMALL["num_hidden_layers"]]
    ids = {key: value for key, value in shape.config.items() if key.endswith("_token_id")}
    changed |= {key: value % 128 for key, value in ids.items() if isinstance(value, int)}
    torch.manual_seed(0)
    return transformers.AutoModel.from_config(transformers_config(shape, **changed)).eval()


@pytest.mark.parametrize("slug", PUBLISHED)
def test_small_copy_runs_and_attends_as_its_kind_says(slug: str) -> None:
    tokens = torch.arange(10, 22).repeat(2, 1)
    tokens[1, -1] = 99  # the rows differ in the last token alone
    with torch.no_grad():
        out = small(slug)(input_ids=tokens).last_hidden_state
    assert out.shape == (2, 12, 32)
    assert out.isfinite().all()
    earlier_changed = not torch.allclose(out[0, :-1], out[1, :-1], atol=1e-6)
    assert earlier_changed == (model_shape(slug).kind == "encoder")


def frequencies(theta: float, head: int, factor: float = 1.0) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, head, 2) / head) / factor


@pytest.mark.parametrize(
    ("slug", "head", "full_theta", "factor"),
    [
        ("gemma-3-1b-it", 16, 1e6, 1.0),
        ("gemma-3-4b-it", 16, 1e6, 8.0),
        ("modernbert-base", 8, 160_000.0, 1.0),
    ],
)
def test_rope_of_full_and_sliding_layers(
    slug: str, head: int, full_theta: float, factor: float
) -> None:
    rope = small(slug).rotary_emb
    full, local = rope.full_attention_inv_freq, rope.sliding_attention_inv_freq
    torch.testing.assert_close(full, frequencies(full_theta, head, factor))
    torch.testing.assert_close(local, frequencies(10_000.0, head))


def test_rope_of_gemma_2_is_one_for_all_layers() -> None:
    torch.testing.assert_close(small("gemma-2-2b").rotary_emb.inv_freq, frequencies(10_000.0, 16))


# Names and records.


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("gemma-3-1b-it", "gemma-3-1b-it"),
        ("google/gemma-3-1b-it", "gemma-3-1b-it"),
        ("Google/Gemma-3-4B-it", "gemma-3-4b-it"),
        ("bert-base-uncased", "bert-base"),
        ("google-bert/bert-base-uncased", "bert-base"),
        ("answerdotai/ModernBERT-base", "modernbert-base"),
        ("vinai/phobert-base-v2", "phobert-base-v2"),
        ("microsoft/deberta-v3-base", "deberta-v3-base"),
        ("openai-community/gpt2", "gpt2"),
        (" GPT2 ", "gpt2"),
    ],
)
def test_a_model_is_found_by_any_of_its_names(name: str, slug: str) -> None:
    assert model_shape(name).slug == slug


def test_no_spelling_means_two_models() -> None:
    spellings = [name.lower() for shape in model_shapes() for name in shape.spellings]
    assert len(spellings) == len(set(spellings))


@pytest.mark.parametrize("shape", model_shapes(), ids=lambda shape: shape.slug)
def test_records_are_complete_and_survive_json(shape: ModelShape) -> None:
    assert shape.source
    assert shape.parameters_note
    assert (shape.hub is None) == (shape.slug in OWN)
    assert decode(ModelShape, encode(shape)) == shape
    hash(shape)


def test_unknown_name_says_the_value_the_nearest_and_the_way_out() -> None:
    with pytest.raises(BadInput) as caught:
        model_shape("gemma-3-1b-itt")
    message = str(caught.value)
    assert "'gemma-3-1b-itt'" in message
    assert "did you mean gemma-3-1b-it" in message
    assert "config.json" in message


def test_unknown_name_with_nothing_near_names_examples() -> None:
    known = r"catalogue has \d+ models, such as bert-base, .*gpt-small\. For any other"
    with pytest.raises(BadInput, match=known):
        model_shape("zzz")
    for name in _WELL_KNOWN:
        assert model_shape(name).slug == name


def test_own_gpt_has_no_transformers_config() -> None:
    with pytest.raises(BadInput, match="gpt-small is trainfit's own GPT architecture"):
        transformers_config(model_shape("gpt-small"))


def test_import_and_lookup_need_no_torch() -> None:
    code = (
        "import sys; from trainfit.hardware.model_shapes import model_shape; model_shape('gpt2'); "
        "sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
