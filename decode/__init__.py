"""The memory-bound pool: pulls prompts by prefix hash, decodes, samples, streams."""
