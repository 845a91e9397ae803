"""Scripts of other libraries have the same losses under `trainfit run`, without a change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MODEL = """
import sys
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, BertModel
from transformers import PreTrainedTokenizerFast

torch.manual_seed(0)
torch.set_num_threads(1)
OFF = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{at}" for at in range(60))]


def save(kind, folder, **more):
    config = BertConfig(vocab_size=len(WORDS), initializer_range=0.2, **SIZES, **OFF, **more)
    kind(config).save_pretrained(folder)
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = dict(pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")
    PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(folder)


def text(at, size):
    return " ".join(f"w{(at * 7 + one * 3) % 60}" for one in range(size))


def batches():
    for at in range(12):
        sizes = [(at * 5 + row * 3) % 11 + 1 for row in range(4)]
        mask = (torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]).long()
        ids = torch.randint(4, 60, mask.shape) * mask
        yield {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(4) % 2}
"""
TRAINED = """
columns = {"a": [text(at, at % 9 + 1) for at in range(24)]}
columns |= {"b": [text(at + 5, at % 4 + 1) for at in range(24)]}
arguments = dict(
    output_dir=sys.argv[1] + "/out", max_steps=12, per_device_train_batch_size=4, logging_steps=1,
    report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", seed=1, learning_rate=1e-3,
)
"""
CROSS_ENCODER = """
save(BertForSequenceClassification, sys.argv[1], num_labels=1)
from datasets import Dataset
from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer
from sentence_transformers.cross_encoder import CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

model = CrossEncoder(sys.argv[1], num_labels=1)
rows = Dataset.from_dict(columns | {"label": [float(at % 2) for at in range(24)]})
trainer = CrossEncoderTrainer(
    model=model, args=CrossEncoderTrainingArguments(**arguments), train_dataset=rows,
    loss=BinaryCrossEntropyLoss(model),
)
trainer.train()
print("losses", *(row["loss"] for row in trainer.state.log_history if "loss" in row))
"""
SENTENCES = """
save(BertModel, sys.argv[1])
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers import SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

model = SentenceTransformer(sys.argv[1])
trainer = SentenceTransformerTrainer(
    model=model, args=SentenceTransformerTrainingArguments(**arguments),
    train_dataset=Dataset.from_dict(columns), loss=MultipleNegativesRankingLoss(model),
)
trainer.train()
print("losses", *(row["loss"] for row in trainer.state.log_history if "loss" in row))
"""
ACCELERATE = """
from accelerate import Accelerator

config = BertConfig(vocab_size=60, num_labels=2, initializer_range=0.2, **SIZES, **OFF)
model = BertForSequenceClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
loader = torch.utils.data.DataLoader(list(batches()), batch_size=None)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
print("losses", *losses)
"""
LIGHTNING = """
import lightning


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        config = BertConfig(vocab_size=60, num_labels=2, initializer_range=0.2, **SIZES, **OFF)
        self.model = BertForSequenceClassification(config)
        self.losses = []

    def training_step(self, batch, _at):
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
module = Module()
loader = torch.utils.data.DataLoader(list(batches()), batch_size=None)
lightning.Trainer(max_epochs=1, accelerator="cpu", **quiet).fit(module, loader)
print("losses", *module.losses)
"""
SCRIPTS = {
    "cross-encoder": (TRAINED + CROSS_ENCODER, ("sentence_transformers", "datasets")),
    "sentences": (TRAINED + SENTENCES, ("sentence_transformers", "datasets")),
    "accelerate": (ACCELERATE, ("accelerate",)),
    "lightning": (LIGHTNING, ("lightning",)),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", SCRIPTS)
def test_losses_stay(name: str, tmp_path: Path) -> None:
    text, needed = SCRIPTS[name]
    for module in needed:
        pytest.importorskip(module)
    script = tmp_path / "train.py"
    script.write_text(MODEL + text)
    found = []
    for before in ([], [sys.executable, "-m", "trainfit", "run", "--"]):
        command = [*before, sys.executable, str(script), str(tmp_path / "model")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
        [line] = [line for line in done.stdout.splitlines() if line.startswith("losses")]
        found.append([float(word) for word in line.split()[1:]])
    assert len(found[0]) >= 4
    assert found[1] == pytest.approx(found[0], abs=1e-4)
    [said] = [line for line in done.stderr.splitlines() if line.startswith("trainfit:")]
    assert "without padding; " in said
    assert "were padding and were not computed" in said
