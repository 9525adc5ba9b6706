"""Kernels over a worker's paged pool: number formats, rotation, append and attention."""
