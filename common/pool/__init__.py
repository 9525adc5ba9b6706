"""A worker's paged KV pool: its memory, which slot holds which block, and what to evict."""
