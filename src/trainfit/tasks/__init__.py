"""The jobs: what is trained, one folder each, with the encoder that NLI and textclass share.

The public names are loaded when they are first used: `import trainfit.tasks` imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainfit.tasks.encoder.backbone import build_encoder as build_encoder
    from trainfit.tasks.encoder.classifier import EncoderClassifier as EncoderClassifier
    from trainfit.tasks.encoder.classifier import build_classifier as build_classifier
    from trainfit.tasks.encoder.loss import classification_loss as classification_loss
    from trainfit.tasks.encoder.loss import label_weight as label_weight
    from trainfit.tasks.encoder.settings import ClassifierSettings as ClassifierSettings
    from trainfit.tasks.gpt.model import Gpt as Gpt
    from trainfit.tasks.gpt.model import GptShape as GptShape
    from trainfit.tasks.gpt.model import build_gpt as build_gpt

_HOMES = {
    "ClassifierSettings": "trainfit.tasks.encoder.settings",
    "EncoderClassifier": "trainfit.tasks.encoder.classifier",
    "Gpt": "trainfit.tasks.gpt.model",
    "GptShape": "trainfit.tasks.gpt.model",
    "build_classifier": "trainfit.tasks.encoder.classifier",
    "build_encoder": "trainfit.tasks.encoder.backbone",
    "build_gpt": "trainfit.tasks.gpt.model",
    "classification_loss": "trainfit.tasks.encoder.loss",
    "label_weight": "trainfit.tasks.encoder.loss",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trainfit.tasks' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
