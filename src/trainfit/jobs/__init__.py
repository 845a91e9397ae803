"""The jobs: what is trained, one folder each, with the encoder that NLI and textclass share.

The public names are loaded when they are first used: `import trainfit.jobs` imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainfit.jobs.models.backbone import build_encoder as build_encoder
    from trainfit.jobs.models.classifier import EncoderClassifier as EncoderClassifier
    from trainfit.jobs.models.classifier import build_classifier as build_classifier
    from trainfit.jobs.models.classifier import classification_loss as classification_loss
    from trainfit.jobs.models.classifier_settings import ClassifierSettings as ClassifierSettings
    from trainfit.jobs.models.gpt_model import Gpt as Gpt
    from trainfit.jobs.models.gpt_model import GptShape as GptShape
    from trainfit.jobs.models.gpt_model import build_gpt as build_gpt

_HOMES = {
    "ClassifierSettings": "trainfit.jobs.models.classifier_settings",
    "EncoderClassifier": "trainfit.jobs.models.classifier",
    "Gpt": "trainfit.jobs.models.gpt_model",
    "GptShape": "trainfit.jobs.models.gpt_model",
    "build_classifier": "trainfit.jobs.models.classifier",
    "build_encoder": "trainfit.jobs.models.backbone",
    "build_gpt": "trainfit.jobs.models.gpt_model",
    "classification_loss": "trainfit.jobs.models.classifier",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trainfit.jobs' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
