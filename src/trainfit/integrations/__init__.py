"""For training loops that are not trainfit's: MFU, memory, what was really set, OOM advice.

    Trainer(…, callbacks=[TrainfitCallback()])                transformers
    TrainfitCallback.watch(trainer)                           the same, and advice on an OOM
    lightning.Trainer(callbacks=[TrainfitLightningCallback()])
    with oom_advice(): …                                      any loop

Nothing is imported until it is used, and nothing of torch's settings is changed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainfit.integrations.hf_trainer import TrainfitCallback
    from trainfit.integrations.lightning_callback import TrainfitLightningCallback
    from trainfit.integrations.memory_advice import oom_advice

_PLACES = {
    "TrainfitCallback": "hf_trainer",
    "TrainfitLightningCallback": "lightning_callback",
    "oom_advice": "memory_advice",
}

__all__ = ["TrainfitCallback", "TrainfitLightningCallback", "oom_advice"]


def __getattr__(name: str) -> Any:
    """Import what is asked for, now that it is."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
