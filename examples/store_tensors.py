"""Store tensors in one process, load them in another: `store_tensors.py put 127.0.0.1:7600`, then
`store_tensors.py get 127.0.0.1:7600`, while `kvass store --standalone --port 7600` runs."""

import sys

import anyio
import torch

from kvass.common.errors import KvassError
from kvass.kvstore.client.tensors import open_store


async def main(verb: str, address: str) -> None:
    blocks = {i: torch.full((2, 16, 64), float(i), dtype=torch.bfloat16) for i in range(4)}
    async with open_store([address], like=blocks[0], name="example v1", block_tokens=16) as store:
        chain = store.chain(range(64))  # 64 tokens name 4 blocks
        if verb == "put":
            result = await store.put(chain, blocks)
            print("stored", sorted(result.stored), "refused", result.refused)
        else:
            found = await store.get(chain)  # what is not there is not in it
            print("found", sorted(found))
            assert all(torch.equal(found[i], blocks[i]) for i in found)


if len(sys.argv) != 3 or sys.argv[1] not in ("put", "get"):
    sys.exit(__doc__)
try:
    anyio.run(main, sys.argv[1], sys.argv[2])
except KvassError as error:
    sys.exit(f"store_tensors: {error}")
