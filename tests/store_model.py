"""Small blocks for the tests of the store's index: three chains, two sizes, one tiny slab."""

from __future__ import annotations

from kvass.common.block import BlockHeader
from kvass.kvstore.index import Index, Limits
from kvass.kvstore.puts import PutOrder

SPACE = b"n" * 32
GROUPS = 2
SIZES = {0: 128, 1: 128, 2: 320, 3: 128}  # by chain: two models share the slab
SLAB = 12 * 128
CLAIM_S, HOLD_S, PUT_S = 2.0, 30.0, 5.0
SESSIONS = ("s0", "s1", "s2")


def key_of(chain: int, index: int) -> bytes:
    """Chains 0 and 1 share their first two blocks."""
    chain = 0 if chain == 1 and index < 2 else chain
    return bytes([chain, index]).ljust(32, b"k")


def space_of(chain: int) -> bytes:
    """Chain 2 is another model's."""
    return (b"m" if chain == 2 else b"n") * 32


def header_of(chain: int, index: int, writer: str = "w") -> BlockHeader:
    return BlockHeader(
        key=key_of(chain, index),
        parent=key_of(chain, index - 1) if index else SPACE,
        segment_key=key_of(chain, 0),
        index=index,
        namespace=space_of(chain),
        tenant=f"t{chain}",
        writer=writer,
        token_count=4,
        length=SIZES[chain],
        checksums=(),
    )


def order_of(
    chain: int,
    indices: range,
    *,
    put_id: str = "p",
    session: str = "s0",
    groups: range = range(GROUPS),
    now_s: float = 0.0,
    hold: str = "",
) -> PutOrder:
    return PutOrder(
        put_id=put_id,
        session=session,
        headers=[header_of(chain, index, session) for index in indices],
        head_groups=GROUPS,
        groups=groups,
        ends_s=now_s + PUT_S,
        hold_owner=hold,
        hold_ends_s=now_s + HOLD_S,
    )


def store(index: Index, chain: int, indices: range, *, now_s: float = 0.0, hold: str = "") -> None:
    """Put whole blocks; every one must be granted."""
    order = order_of(chain, indices, now_s=now_s, hold=hold)
    assert set(index.put_begin(order, now_s)) == {"granted"}
    for header in order.headers:
        move = index.begin_move("p", "s0", header.key, now_s)
        assert move is not None
        assert index.end_move(move, (1, 2), now_s)


def new_index(epoch: str = "e1", **limits: float) -> Index:
    return Index(SLAB, Limits(epoch=epoch, claim_s=CLAIM_S, hold_s=HOLD_S, **limits))
