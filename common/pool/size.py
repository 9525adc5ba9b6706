"""How many blocks a worker's pool holds. Torch-free: who starts workers checks it before them."""

from __future__ import annotations

from kvass.common import control_groups
from kvass.common.block import BlockLayout
from kvass.common.config import WorkerConfig
from kvass.common.errors import Invalid


def pool_slots(layout: BlockLayout, worker: WorkerConfig, role: str, max_model_len: int) -> int:
    """Return how many blocks the pool holds; raises Invalid if the longest request does not fit.

    One slot more than the longest request needs keeps it running when it is alone.
    """
    need = -(-max_model_len // layout.block_tokens) + 1
    if worker.pool_blocks:
        slots, source = worker.pool_blocks, f"{role}.pool_blocks"
    else:
        share = worker.pool_share * control_groups.total_bytes()
        slots, source = int(share // layout.block_size), f"{role}.pool_share {worker.pool_share:g}"
    if slots < need:
        blocks = f"{slots} block{'s' * (slots != 1)}"
        raise Invalid(
            f"{source} gives a pool of {blocks} ({slots * layout.block_tokens} tokens), but "
            f"one request of max_model_len {max_model_len} needs {need}: lower "
            "cluster.max_model_len or raise the pool"
        )
    return slots
