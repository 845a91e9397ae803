"""Published facts: GPUs with a source per row, and the shapes of the models the documents name."""

from trainfit.catalogue.gpus import GpuSpec, find, gpus, lookup
from trainfit.catalogue.models import ModelShape, model_shape, model_shapes, transformers_config

__all__ = [
    "GpuSpec",
    "ModelShape",
    "find",
    "gpus",
    "lookup",
    "model_shape",
    "model_shapes",
    "transformers_config",
]
