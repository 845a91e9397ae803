"""Imports every generator, so that its kinds are registered."""

import fuzz_commands
import fuzz_data
import fuzz_models
import fuzz_runs
import fuzz_words

__all__ = ["fuzz_commands", "fuzz_data", "fuzz_models", "fuzz_runs", "fuzz_words"]
