"""Callbacks for other training loops: MFU, memory, a receipt, and advice on running out of memory.

    Trainer(…, callbacks=[TrainfitCallback()])                transformers
    TrainfitCallback.watch(trainer)                           the same, with advice on errors
    lightning.Trainer(callbacks=[TrainfitLightningCallback()])
    with oom_advice(): …                                      any loop

Modules are imported on first use, and no setting of torch is changed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainfit.integrations.hf_trainer import TrainfitCallback
    from trainfit.integrations.lightning_callback import TrainfitLightningCallback
    from trainfit.integrations.meter import oom_advice

_PLACES = {
    "TrainfitCallback": "hf_trainer",
    "TrainfitLightningCallback": "lightning_callback",
    "oom_advice": "meter",
}

__all__ = ["TrainfitCallback", "TrainfitLightningCallback", "oom_advice"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
