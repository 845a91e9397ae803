"""Types of values in a configuration, with the range of each."""

from __future__ import annotations

from typing import Annotated, Literal

from trainfit.core.codec import Length, PathName, Range

Auto = Literal["auto"]
Switch = bool | Auto
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
Steps = Annotated[int, Range(1, 10**9)]
"""A count in a run, such as steps or epochs."""
MOST_SEQUENCES = 8192
Sequences = Annotated[int, Range(1, MOST_SEQUENCES)]
"""Sequences in a step; the search for the best cut takes time by their square."""
Tokens = Annotated[int, Range(1, 2**20)]
"""Tokens in a sequence."""
Workers = Annotated[int, Range(0, 1024)]
Small = Annotated[int, Range(1, 1024)]
"""Number of processes, threads or files."""
Layers = Annotated[int, Range(1, 512)]
Width = Annotated[int, Range(1, 65_536)]
Vocabulary = Annotated[int, Range(1, 2**24)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
Share = Annotated[float, Range(0, 1)]
Rate = Annotated[float, Range(0, 10)]
"""Learning rate or weight decay."""
Amount = Annotated[float, Range(0, 10**6)]
Gibibytes = Annotated[float, Range(0.1, 10**4)]
HeldOut = Annotated[float, Range(0.01, 0.5)]
Place = Annotated[str, PathName()]
Name = Annotated[str, Length(1, 500)]
Tracking = Literal["none", "tensorboard", "mlflow", "wandb"]
"""Service that numbers are sent to besides the run folder; never a text."""
Tuning = Literal["auto", "off", "force"]
"""Tuned settings. auto: those of the same job here; force: tune first, for three minutes; off."""
