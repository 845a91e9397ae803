"""Memory and time of a training step, found without the GPU."""
