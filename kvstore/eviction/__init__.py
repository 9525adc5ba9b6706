"""Which visible block goes first when the slab is full: the seam (`policy`) and two policies."""
