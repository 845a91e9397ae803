"""What the documents write: overrides, commands and YAML blocks."""

from typing import Any

# What the documents show, as they spell it; then the canonical key and value that it must become.
SHOWN: dict[str, list[tuple[str, str, str, Any]]] = {
    "hardware guide": [
        ("nli", "training.batch_size=20", "training.batch_size", 20),
        ("nli", "optimization.compile=true", "optimization.compile", True),
        ("nli", "optimization.compile=false", "optimization.compile", False),
        ("nli", "optimization.compile_mode=default", "optimization.compile_mode", "default"),
        (
            "nli",
            "optimization.compile_mode=reduce-overhead",
            "optimization.compile_mode",
            "reduce-overhead",
        ),
        (
            "nli",
            "optimization.compile_mode=max-autotune",
            "optimization.compile_mode",
            "max-autotune",
        ),
        ("nli", "training.batch_size=4", "training.batch_size", 4),
        (
            "nli",
            "model.use_gradient_checkpointing=true",
            "model.use_gradient_checkpointing",
            True,
        ),
        (
            "nli",
            "optimization.gradient_accumulation_steps=8",
            "optimization.gradient_accumulation_steps",
            8,
        ),
        ("nli", "model.freeze_encoder=true", "model.freeze_encoder", True),
        ("nli", "training.num_workers=8", "training.num_workers", 8),
        ("nli", "training.pin_memory=true", "training.pin_memory", True),
        ("nli", "training.prefetch_factor=2", "training.prefetch_factor", 2),
        ("nli", "device.mixed_precision=true", "device.mixed_precision", "auto"),
        ("nli", "device.mixed_precision=false", "device.mixed_precision", "off"),
        ("nli", "device.use_cuda=false", "device.use_cuda", False),
        ("nli", "device.tf32=false", "device.tf32", False),
        ("nli", "cudnn_benchmark=true", "device.cudnn_benchmark", True),
        ("nli", "gradient_checkpointing=true", "model.use_gradient_checkpointing", True),
    ],
    "3090 document": [
        ("nli", "device.use_tf32=false", "device.tf32", False),
        ("nli", "use_tf32=false", "device.tf32", False),
        ("nli", "training.optimizer_type=adamw", "optimization.optimizer", "adamw"),
        ("nli", "optimizer_type=adamw", "optimization.optimizer", "adamw"),
        ("nli", "training.optimizer_type=adamw_fused", "optimization.optimizer", "adamw_fused"),
        ("nli", "model.use_flash_attention=false", "model.use_flash_attention", False),
        ("nli", "model.use_torch_compile=false", "optimization.compile", False),
        ("nli", "data.num_workers=0", "training.num_workers", 0),
        ("nli", "data.num_workers=2", "training.num_workers", 2),
        ("nli", "data.pin_memory=true", "training.pin_memory", True),
        ("nli", "data.prefetch_factor=2", "training.prefetch_factor", 2),
        ("nli", "training.batch_size=6", "training.batch_size", 6),
        ("nli", "training.learning_rate=2e-5", "training.learning_rate", 2e-5),
        ("nli", "training.weight_decay=0.01", "training.weight_decay", 0.01),
    ],
    "status report": [
        ("nli", "training.use_bf16=true", "device.mixed_precision", "bf16"),
        ("nli", "training.use_bf16=false", "device.mixed_precision", "off"),
        ("nli", "use_bf16=true", "device.mixed_precision", "bf16"),
        ("nli", "reproducibility.tf32=true", "device.tf32", True),
        ("nli", "reproducibility.deterministic=true", "device.deterministic", True),
        ("nli", "training.fused_adamw=true", "optimization.optimizer", "adamw_fused"),
        ("nli", "fused_adamw=false", "optimization.optimizer", "adamw"),
        ("nli", "max_grad_norm=1.0", "training.max_grad_norm", 1.0),
        ("nli", "optimization.max_grad_norm=1.0", "training.max_grad_norm", 1.0),
        ("nli", "pin_memory=true", "training.pin_memory", True),
        ("nli", "num_workers=auto", "training.num_workers", "auto"),
        ("nli", "persistent_workers=true", "training.persistent_workers", True),
        ("nli", "use_torch_compile=false", "optimization.compile", False),
        ("nli", "target_effective_batch_size=128", "training.effective_batch_size", 128),
    ],
    "tuning guide": [
        ("gpt", "enable_tf32=true", "device.tf32", True),
        ("gpt", "enable_amp=true", "device.mixed_precision", "auto"),
        ("gpt", "enable_amp=false", "device.mixed_precision", "off"),
        ("gpt", "amp_dtype=bf16", "device.mixed_precision", "bf16"),
        ("gpt", "amp_dtype=fp16", "device.mixed_precision", "fp16"),
        ("gpt", "enable_compile=false", "optimization.compile", False),
        ("gpt", "max_length=768", "data.max_length", 768),
        ("gpt", "block_size=1024", "data.max_length", 1024),
        ("gpt", "batch_size=16", "training.batch_size", 16),
        ("gpt", "eval_steps=2000", "training.eval_steps", 2000),
        ("gpt", "logging_steps=100", "training.logging_steps", 100),
        ("gpt", "eval_iters=50", "training.eval_iters", 50),
        ("gpt", "dataloader_num_workers=4", "training.num_workers", 4),
        ("gpt", "dataloader_pin_memory=true", "training.pin_memory", True),
        ("gpt", "dataloader_persistent_workers=true", "training.persistent_workers", True),
    ],
    "T4 guide": [
        ("textclass", "BATCH_TRAIN=12", "training.batch_size", 12),
        ("textclass", "BATCH_EVAL=24", "training.eval_batch_size", 24),
        (
            "textclass",
            "USE_GRADIENT_CHECKPOINTING=false",
            "model.use_gradient_checkpointing",
            False,
        ),
        ("textclass", "MAX_LENGTH=128", "data.max_length", 128),
        ("textclass", "USE_TORCH_COMPILE=true", "optimization.compile", True),
        ("textclass", "GRAD_ACCUM=4", "optimization.gradient_accumulation_steps", 4),
        ("textclass", "BATCH_TRAIN = 8", "training.batch_size", 8),
        (
            "textclass",
            "USE_GRADIENT_CHECKPOINTING = True",
            "model.use_gradient_checkpointing",
            True,
        ),
        ("textclass", "USE_TORCH_COMPILE = False", "optimization.compile", False),
        ("textclass", "fp16=True", "device.mixed_precision", "fp16"),
        ("textclass", "bf16=True", "device.mixed_precision", "bf16"),
        ("textclass", "fp16=false", "device.mixed_precision", "off"),
        ("textclass", 'optim="adamw_torch_fused"', "optimization.optimizer", "adamw_fused"),
        ("textclass", "optim=adamw_torch_fused", "optimization.optimizer", "adamw_fused"),
        ("textclass", "optim=adamw_torch", "optimization.optimizer", "adamw"),
        ("textclass", "dataloader_num_workers=2", "training.num_workers", 2),
        ("textclass", "dataloader_pin_memory=true", "training.pin_memory", True),
        ("textclass", "tf32=true", "device.tf32", True),
    ],
}

COMMANDS: dict[str, list[tuple[str, ...]]] = {
    "nli": [
        ("hardware=gpu_4090", "training.batch_size=20", "optimization.compile=true"),
        ("hardware=gpu_4090", "training.batch_size=20"),
        ("experiment=nli_full_5fold", "hardware=gpu_3090"),
        ("training.batch_size=2", "optimization.gradient_accumulation_steps=8"),
        ("training.batch_size=4", "optimization.gradient_accumulation_steps=4"),
        ("experiment=rtx3090_optimized", "training.batch_size=2", "model.name=gemma-3-4b-it"),
        ("training.batch_size=6", "data.num_workers=2"),
        ("hardware=t4", "training.batch_size=4"),
        ("hardware=conservative", "data.max_length=128"),
        ("model.name=gemma-2-2b", "training.batch_size=8", "training.num_workers=4"),
        ("model.name=deberta-v3-base", "training.batch_size=23"),
        ("target_effective_batch_size=128", "training.batch_size=23", "use_bf16=True"),
        ("hardware=gpu_4090", "target_effective_batch_size=64"),
        ("hardware=gpu_low_mem", "training.effective_batch_size=64"),
    ],
    "textclass": [
        ("experiment=t4_textclass", "BATCH_TRAIN=12", "BATCH_EVAL=24"),
        ("experiment=t4_textclass", "BATCH_TRAIN = 12"),
        ("experiment=t4_textclass", "USE_GRADIENT_CHECKPOINTING = False", "BATCH_TRAIN = 8"),
        ("experiment=t4_textclass", "MAX_LENGTH=128"),
        ("experiment=t4_textclass", "BATCH_TRAIN=8", "GRAD_ACCUM=4"),
        ("experiment=t4_textclass", "USE_TORCH_COMPILE=True", "optim=adamw_torch"),
        ("experiment=t4_textclass", "hardware=cpu"),
        ("hardware=t4", "BATCH_TRAIN=12"),
        ("hardware=t4", "MAX_LENGTH=128"),
        ("hardware=v100", "BATCH_TRAIN=12"),
        ("hardware=v100", "MAX_LENGTH=128"),
        ("hardware=a100", "fp16=False", "bf16=True", "tf32=True"),
        ("hardware=t4", "target_effective_batch_size=128"),
    ],
    "gpt": [
        (
            "enable_tf32=True",
            "enable_amp=True",
            "amp_dtype=bf16",
            "enable_compile=False",
            "max_length=1024",
            "batch_size=16",
            "eval_steps=2000",
            "logging_steps=100",
            "eval_iters=50",
        ),
        ("hardware=gpu_3090", "batch_size=12"),
        ("hardware=gpu_3090", "max_length=768", "batch_size=12"),
        ("hardware=a100", "batch_size=64"),
        ("hardware=t4", "batch_size=12"),
        ("hardware=a30", "batch_size=16", "enable_compile=False", "eval_iters=50"),
        ("batch_size=20", "max_length=512"),
        ("hardware=gpu_3090", "training.effective_batch_size=64"),
    ],
}
"""Words that a document has in one command, in one recipe, or as a remedy on top of a preset."""

BLOCKS = [
    """
model:
  use_gradient_checkpointing: false  # Plenty of memory
training:
  batch_size: 16                     # Large batches
  num_workers: 8
device:
  mixed_precision: true              # bfloat16
  tf32: true                         # TF32 for matmul
optimization:
  gradient_accumulation_steps: 1     # No need
  compile: true                      # torch.compile enabled
""",
    """
model:
  use_gradient_checkpointing: true   # Essential for memory
  freeze_encoder: true               # Must freeze
training:
  batch_size: 4                      # Conservative
  num_workers: 4
device:
  mixed_precision: true              # Critical for memory
optimization:
  gradient_accumulation_steps: 4     # Simulates batch_size=16
  compile: false
""",
    """
training:
  batch_size: 2                      # Very small
  num_workers: 4
device:
  use_cuda: false
  mixed_precision: false
optimization:
  gradient_accumulation_steps: 8
""",
    """
training:
  num_workers: 8
  pin_memory: true           # Faster CPU→GPU transfer
  prefetch_factor: 2         # Prefetch 2 batches
optimization:
  compile: true
  compile_mode: reduce-overhead  # instead of 'default'
""",
]
"""YAML of the hardware guide, to be given as a file."""
