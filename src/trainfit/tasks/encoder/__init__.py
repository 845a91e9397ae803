"""An encoder with a pooler and a head: the model of NLI and of text classification."""
