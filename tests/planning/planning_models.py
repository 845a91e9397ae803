"""Small models by their config alone, for the planner to read."""

import json
from pathlib import Path
from typing import Any


def write_bert(folder: Path, *, layers: int, width: int, **more: Any) -> str:
    """The folder of a BERT; `more` are further fields of its config."""
    config = {
        "model_type": "bert",
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": 4,
        "intermediate_size": 4 * width,
        "vocab_size": 1000,
    }
    (folder / "config.json").write_text(json.dumps(config | more))
    return str(folder)
