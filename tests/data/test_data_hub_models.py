"""Models on a hub: by any name that it knows, and in one line where it does not answer."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel

from hub_server import closed, environment, hub, silent
from trainfit.data.hub import PATIENCE, may_be_on_hub
from trainfit.data.tokenizers import learn_tokenizer

SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}
CONFIG = """
import json, sys
from trainfit.jobs.models.classifier_settings import model_facts, model_fields
facts = [model_fields(sys.argv[1])["hidden_size"], model_facts(sys.argv[1]).layers]
print(json.dumps([*facts, "torch" in sys.modules or "transformers" in sys.modules]))
"""
WEIGHTS = """
import json, sys
from trainfit.data.tokenizers import load_tokenizer
from trainfit.jobs.models.backbone import build_encoder
model = build_encoder(sys.argv[1], weights="pretrained")
total = model.embeddings.word_embeddings.weight.detach().sum()
print(json.dumps([len(load_tokenizer(sys.argv[1])), float(total)]))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one small BERT, with an owner and without."""
    root = tmp_path_factory.mktemp("hub")
    tokenizer = learn_tokenizer(["some words and others, again and again"] * 20, vocabulary=300)
    torch.manual_seed(0)
    model = BertModel(BertConfig(**SIZES, vocab_size=len(tokenizer)))
    for name in ("tiny-bert-of-old", "someone/Tiny.BERT_2"):
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


def child(*words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], env=env, capture_output=True, text=True, check=False, timeout=100
    )


def test_a_config_is_read_by_short_and_long_names_before_torch(
    models: Path, tmp_path: Path
) -> None:
    with hub(models) as (endpoint, _):
        env = environment(endpoint, tmp_path)
        short, long = (
            child("-c", CONFIG, name, env=env)
            for name in ("tiny-bert-of-old", "someone/Tiny.BERT_2")
        )
    assert json.loads(short.stdout) == [32, 2, False], short.stderr
    assert json.loads(long.stdout) == [32, 2, False], long.stderr
    again = child("-c", CONFIG, "tiny-bert-of-old", env=env)  # gone, it comes from the cache
    assert again.stdout == short.stdout, again.stderr


@pytest.mark.soak
def test_weights_and_tokenizer_come_from_the_hub_and_then_from_its_cache(
    models: Path, tmp_path: Path
) -> None:
    name = "tiny-bert-of-old"
    model = BertModel.from_pretrained(models / name)
    with hub(models) as (endpoint, asked):
        env = environment(endpoint, tmp_path)
        found = child("-c", WEIGHTS, name, env=env)
        assert found.returncode == 0, found.stderr
        tokens, total = json.loads(found.stdout.splitlines()[-1])
        assert tokens == model.config.vocab_size
        assert total == pytest.approx(model.embeddings.word_embeddings.weight.detach().sum().item())
        assert any(line.endswith("/resolve/main/model.safetensors") for line in asked)
    offline = child("-c", WEIGHTS, name, env=env | {"HF_HUB_OFFLINE": "1"})
    assert offline.stdout == found.stdout, offline.stderr
    with silent() as endpoint:  # the hub is asked once, and not for half a minute for each file
        started = time.monotonic()
        again = child("-c", WEIGHTS, name, env=env | {"HF_ENDPOINT": endpoint})
        assert again.stdout == found.stdout, again.stderr
        assert time.monotonic() - started < PATIENCE + 40


def plan(name: str, env: dict[str, str]) -> tuple[int, list[str], float]:
    started = time.monotonic()
    done = child("-m", "trainfit", "plan", "textclass", "--gpu", "4090", "--model", name, env=env)
    assert done.stdout == ""
    return done.returncode, done.stderr.splitlines(), time.monotonic() - started


def test_a_name_that_the_hub_does_not_know_is_one_line(models: Path, tmp_path: Path) -> None:
    with hub(models) as (endpoint, asked):
        code, lines, _ = plan("bert-base-uncassed", environment(endpoint, tmp_path))
    assert code == 2
    assert len(lines) == 1
    assert "unknown model 'bert-base-uncassed', and the hub gave none: it has no such" in lines[0]
    assert "did you mean bert-base-uncased" in lines[0]
    files = [line for line in asked if "/resolve/" in line]
    assert files == ["HEAD /bert-base-uncassed/resolve/main/config.json"]


@pytest.mark.soak
def test_a_hub_out_of_reach_is_one_line_at_once(tmp_path: Path) -> None:
    code, lines, seconds = plan("someone/some-model", environment(closed(), tmp_path))
    assert code == 2
    assert len(lines) == 1
    assert "does not answer" in lines[0]
    with silent() as endpoint:
        code, lines, longer = plan("some-model", environment(endpoint, tmp_path))
    assert code == 2
    assert len(lines) == 1
    assert f"{endpoint} does not answer" in lines[0]
    assert longer < seconds + PATIENCE + 10  # retries would take half a minute


@pytest.mark.soak
def test_pretrained_weights_of_a_known_model_need_the_hub_and_say_so(tmp_path: Path) -> None:
    rows = "text,label\n" + "".join(f"some text {n},{n % 2}\n" for n in range(40))
    (tmp_path / "data.csv").write_text(rows)
    words = ("train", "textclass", f"data.train={tmp_path}/data.csv", "model.name=roberta-base")
    done = child("-m", "trainfit", *words, env=environment(closed(), tmp_path))
    assert done.returncode == 2
    assert "no tokenizer of FacebookAI/roberta-base" in done.stderr.splitlines()[-1]
    assert "does not answer" in done.stderr.splitlines()[-1]


def test_offline_nothing_is_asked(models: Path, tmp_path: Path) -> None:
    with hub(models) as (endpoint, asked):
        env = environment(endpoint, tmp_path, HF_HUB_OFFLINE="1")
        code, lines, _ = plan("tiny-bert-of-old", env)
    assert (code, asked) == (2, [])
    assert "HF_HUB_OFFLINE is set" in lines[0]


@pytest.mark.parametrize(
    ("name", "possible"),
    [
        ("roberta-base", True),
        ("FacebookAI/roberta-base", True),
        ("scibert_scivocab_uncased", True),
        ("Qwen/Qwen2.5-0.5B", True),
        ("", False),
        ("a b", False),
        ("../up", False),
        ("/models/bert", False),
        ("./model", False),
        ("a/b/c", False),
        ("a--b", False),
        ("a..b", False),
        ("model.", False),
        ("é", False),
        ("x" * 200, False),
    ],
)
def test_names_that_the_hub_could_know(name: str, possible: bool) -> None:
    assert may_be_on_hub(name) == possible
