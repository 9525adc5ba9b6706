"""Bytes between the memories of two processes: one seam, its transports, the simulation's."""
