"""The model of the text-classification job: an encoder and a head with a logit per class."""

from __future__ import annotations

from typing import Any

from trainfit.conf.schema import EncoderModel
from trainfit.tasks.encoder.classifier import EncoderClassifier, build_classifier
from trainfit.tasks.encoder.settings import settings_from


def build_model(model: EncoderModel, *, classes: int, **decided: Any) -> EncoderClassifier:
    """The classifier a configuration asks for, with what was `decided` for it.

    `decided` are fields of ClassifierSettings; those that the configuration leaves at auto must
    be among them.
    """
    return build_classifier(settings_from(model, classes=classes, **decided))
