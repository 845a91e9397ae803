"""trainfit fits a training run to the hardware it is on."""

__version__ = "0.1.0"
