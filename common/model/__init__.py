"""Models: fetching, identity, tokenisation (all without torch) and the forward pass."""
