"""The models of the built-in jobs."""
