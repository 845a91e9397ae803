"""The run folder: how it is written and the one reader of it."""
