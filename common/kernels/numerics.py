"""What decides the bits of stored KV besides model and format. Torch-free, since keys need it too.

Both enter the namespace: workers whose arithmetic differs must not share blocks.
"""

from __future__ import annotations

# Bump it whenever an implementation changes a bit of what is stored.
NUMERICS = "torch-1"
# The kind of device whose arithmetic computed the blocks of this version.
DEVICE_KIND = "cpu"
