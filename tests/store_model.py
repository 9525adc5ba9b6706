"""Small blocks for the tests of the store's index: three chains, two sizes, one tiny slab."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvass.common.block import BlockHeader
from kvass.kvstore.index.index import Index, Limits
from kvass.kvstore.index.leases import Lease
from kvass.kvstore.index.puts import Move, PutOrder

SPACE = b"n" * 32
GROUPS = 2
SIZES = {0: 128, 1: 128, 2: 320, 3: 128}  # by chain: two models share the slab
SLAB = 12 * 128
CLAIM_S, HOLD_S, PUT_S = 2.0, 30.0, 5.0
SESSIONS = ("s0", "s1", "s2")


@dataclass(eq=False)
class Moving:
    """A transfer in flight, and the tokens that it owns until it ends. `life`: the node's start
    that it belongs to."""

    move: Move
    places: list[int]
    life: int


def move_in(
    move: Move, memory: dict[int, object], expected: dict[int, object], life: int
) -> Moving:
    """The first byte of each place lands."""
    size = move.entry.group_size
    places = [move.entry.slot.offset + g * size for g in move.groups]
    assert not places or places[0] == move.offset
    moving = Moving(move, places, life)
    for place in places:
        memory[place] = expected[place] = moving
    return moving


def land(moving: Moving, memory: dict[int, object], expected: dict[int, object]) -> None:
    """The last byte of each place lands only now."""
    for place in moving.places:
        assert expected.pop(place) is moving
        assert memory[place] is moving, "a slot was reused while bytes moved into it"
        memory[place] = moving.move.entry.header.key


def key_of(chain: int, index: int) -> bytes:
    """Chains 0 and 1 share their first two blocks."""
    chain = 0 if chain == 1 and index < 2 else chain
    return bytes([chain, index]).ljust(32, b"k")


def space_of(chain: int) -> bytes:
    """Chain 2 is another model's."""
    return (b"m" if chain == 2 else b"n") * 32


def tenant_of(chain: int, index: int) -> str:
    """What chains 0 and 1 share is public; chain 2 is another tenant's than the rest."""
    if chain == 2:
        return "b"
    return "" if chain in (0, 1) and index < 2 else "a"


def header_of(chain: int, index: int, writer: str = "w") -> BlockHeader:
    return BlockHeader(
        key=key_of(chain, index),
        parent=key_of(chain, index - 1) if index else SPACE,
        segment_key=key_of(chain, 0),
        index=index,
        namespace=space_of(chain),
        tenant=tenant_of(chain, index),
        writer=writer,
        token_count=4,
        length=SIZES[chain],
        checksums=(),
    )


def order_of(
    chain: int,
    indices: Sequence[int],
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
        move = index.begin_moves("p", "s0", [header.key], now_s)[0]
        assert move is not None
        assert index.end_move(move, (1, 2))


def new_index(epoch: str = "e1", **limits: Any) -> Index:
    return Index(SLAB, Limits(epoch=epoch, claim_s=CLAIM_S, hold_s=HOLD_S, **limits))


def copier(
    memory: dict[int, object],
    expected: Mapping[int, object],
    held: Callable[[], Mapping[str, Lease]],
) -> Callable[[int, int, int], None]:
    """Return what moves a block in a model's slab: nobody may read it there, and nothing land where
    it goes."""

    def copy_bytes(source: int, target: int, size: int) -> None:
        leased = [entry for lease in held().values() for entry in lease.entries]
        read = {entry.slot.offset for entry in leased if entry.leases}
        assert source not in read, "a leased block was moved"
        assert not any(target <= place < target + size for place in expected)
        places = [place for place in memory if source <= place < source + size]
        memory.update({place - source + target: memory[place] for place in places})

    return copy_bytes
