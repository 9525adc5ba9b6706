"""Bytes between the memories of two processes: one seam and its transports."""
