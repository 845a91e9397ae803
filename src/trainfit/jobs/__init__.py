"""Jobs: the protocol, the registry, one run for all; nli, textclass, pairs, gpt, one's own."""
