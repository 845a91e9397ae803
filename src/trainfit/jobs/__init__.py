"""Jobs: the protocol, the registry, one run for all; nli, textclass, gpt and jobs of one's own."""
