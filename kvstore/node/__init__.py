"""A store node as a process: its calls, its slab, its tiers, its copies on other nodes."""
