"""The batch-size finder."""
