"""The compute-bound pool: makes the blocks of prompts exist in the store."""
