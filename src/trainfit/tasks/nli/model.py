"""The model of the NLI job: an encoder reads a post with a criterion, a head says yes or no."""

from __future__ import annotations

from typing import Any

from trainfit.conf.schema import EncoderModel
from trainfit.tasks.encoder.classifier import EncoderClassifier, build_classifier
from trainfit.tasks.encoder.settings import settings_from

CLASSES = 2
"""No evidence, evidence."""


def build_model(model: EncoderModel, **decided: Any) -> EncoderClassifier:
    """The classifier a configuration asks for, with what was `decided` for it.

    `decided` are fields of ClassifierSettings; those that the configuration leaves at auto must
    be among them.
    """
    return build_classifier(settings_from(model, classes=CLASSES, **decided))
