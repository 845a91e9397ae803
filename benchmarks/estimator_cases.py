"""The training steps that the memory and time estimators are judged on.

One definition serves both sides: `record_estimator.py` runs a case on a GPU, the estimator runs the
same case on fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Case:
    model: str
    batch: int
    length: int
    precision: str = "bf16"
    method: str = "full"
    checkpointing: bool = False
    compile: bool = False
    padded: bool = False
    """A mask with real padding in it, so that attention cannot take the flash kernel."""
    task: str = "classify"

    @property
    def name(self) -> str:
        flags = [
            self.precision,
            self.method,
            *(["ckpt"] if self.checkpointing else []),
            *(["compiled"] if self.compile else []),
            *(["padded"] if self.padded else []),
        ]
        return f"{self.model} {self.batch}x{self.length} {' '.join(flags)}"


def _cases() -> list[Case]:
    bert, gemma, gpt = "bert-base", "gemma-3-1b-it", "gpt2"
    deberta, modern = "deberta-v3-base", "modernbert-base"
    lm = {"task": "lm"}
    return [
        Case(model=bert, batch=32, length=512),
        Case(model=bert, batch=128, length=128),
        Case(model=bert, batch=16, length=512, precision="fp32"),
        Case(model=bert, batch=32, length=512, precision="fp16"),
        Case(model=bert, batch=32, length=512, checkpointing=True),
        Case(model=bert, batch=32, length=512, padded=True),
        Case(model=bert, batch=64, length=512, method="frozen"),
        Case(model="phobert-base-v2", batch=64, length=192),
        Case(model=deberta, batch=16, length=512),
        Case(model=deberta, batch=32, length=256),
        Case(model=deberta, batch=8, length=512, precision="fp32"),
        Case(model=deberta, batch=16, length=512, checkpointing=True),
        Case(model=modern, batch=32, length=512),
        Case(model=modern, batch=16, length=512, precision="fp32"),
        Case(model=modern, batch=32, length=512, checkpointing=True),
        Case(model=gemma, batch=8, length=512),
        Case(model=gemma, batch=24, length=512),
        Case(model=gemma, batch=8, length=512, checkpointing=True),
        Case(model=gemma, batch=8, length=512, method="dora"),
        Case(model=gemma, batch=8, length=512, method="lora"),
        Case(model=gemma, batch=16, length=512, method="frozen"),
        Case(model=gemma, batch=2, length=512, precision="fp32"),
        Case(model=gpt, batch=8, length=1024, **lm),
        Case(model=gpt, batch=32, length=1024, **lm),
        Case(model=gpt, batch=8, length=1024, precision="fp32", **lm),
        Case(model=gpt, batch=8, length=1024, precision="fp16", **lm),
        Case(model=gpt, batch=8, length=1024, checkpointing=True, **lm),
        Case(model="llama-1b", batch=4, length=2048, **lm),
        Case(model="llama-1b", batch=4, length=2048, checkpointing=True, **lm),
        Case(model="qwen3-0.6b", batch=4, length=2048, **lm),
        Case(model="t5-base", batch=8, length=512, task="seq2seq"),
        Case(model=bert, batch=32, length=512, compile=True),
        Case(model=deberta, batch=16, length=512, compile=True),
        Case(model=modern, batch=32, length=512, compile=True),
        Case(model=gemma, batch=8, length=512, compile=True),
        Case(model=gpt, batch=16, length=1024, compile=True, **lm),
        Case(model="llama-1b", batch=4, length=2048, compile=True, **lm),
    ]


CASES = {case.name: case for case in _cases()}


def config_of(model: str) -> Any:
    """The transformers config: the catalogue's, or a shape that only these cases use."""
    from transformers import LlamaConfig, Qwen3Config, T5Config

    from trainfit.hardware.model_shapes import model_shape, transformers_config

    extra = {
        "llama-1b": lambda: LlamaConfig(
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            tie_word_embeddings=True,
            max_position_embeddings=8192,
        ),
        "qwen3-0.6b": lambda: Qwen3Config(
            vocab_size=151936,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=True,
        ),
        "t5-base": lambda: T5Config(
            d_model=768,
            d_ff=3072,
            num_layers=12,
            num_decoder_layers=12,
            num_heads=12,
            decoder_start_token_id=0,
            pad_token_id=0,
        ),
    }
    return extra[model]() if model in extra else transformers_config(model_shape(model))


def build_model(case: Case) -> torch.nn.Module:
    """The model with random weights on the current default device, in training mode."""
    import transformers as hf

    config = config_of(case.model)
    config.use_cache = False
    if case.task == "classify":
        config.num_labels = 2
        config.pad_token_id = config.pad_token_id or 0
    kinds = {
        "classify": hf.AutoModelForSequenceClassification,
        "lm": hf.AutoModelForCausalLM,
        "seq2seq": hf.AutoModelForSeq2SeqLM,
    }
    model = kinds[case.task].from_config(config, dtype=torch.float32)
    if case.method in ("lora", "dora"):
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(
            r=16,
            lora_alpha=32,
            lora_dropout=0.05,
            use_dora=case.method == "dora",
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            modules_to_save=["score"],
        )
        model = get_peft_model(model, adapters)
    if case.method == "frozen":
        head = [n for n in ("classifier", "score") if hasattr(model, n)]
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.split(".")[0] in head)
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if case.method in ("lora", "dora"):
            model.enable_input_require_grads()
    return model.train()


def build_batch(case: Case, device: str) -> dict[str, torch.Tensor]:
    shape = (case.batch, case.length)
    ids = torch.full(shape, 5, dtype=torch.long, device=device)
    batch = {"input_ids": ids}
    if case.task == "classify":
        batch["labels"] = torch.zeros(case.batch, dtype=torch.long, device=device)
    else:
        batch["labels"] = torch.full(shape, 5, dtype=torch.long, device=device)
    if case.padded:
        mask = torch.ones(shape, dtype=torch.long, device=device)
        mask[:, case.length // 2 :] = 0
        batch["attention_mask"] = mask
    return batch


def build_step(case: Case, model: torch.nn.Module, device: str) -> Callable[[], None]:
    """One optimizer step as the engine takes it: forward, backward, clip, update, forget."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    scaler = torch.amp.GradScaler(device, enabled=case.precision == "fp16" and device == "cuda")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case.precision)
    batch = build_batch(case, device)

    def step() -> None:
        with torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def as_json(case: Case) -> dict[str, Any]:
    return asdict(case)


def probe(**case: Any) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], Callable[[], None]]]:
    """A case in the form that the estimator takes."""
    chosen = Case(**case)
    return build_model(chosen), lambda model: build_step(chosen, model, "cpu")
