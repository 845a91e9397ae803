"""Pretraining a small GPT."""
