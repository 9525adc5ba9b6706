"""The transport seam: how bytes move between the memories of two processes.

The rule: *whoever owns memory either starts the transfer into it, or lends a landing
buffer*. So a transport has two verbs, and callers never write into anything but a landing buffer:

    same host   `read`   the reader copies a peer's registered memory into its own
    TCP         `write`  the holder copies its own memory into a landing buffer that the peer lent

A transport refuses to know about blocks, keys and leases. Every wait has a deadline; after an error
the bytes at the destination mean nothing. It sums what it copies; what the sums should be is the
caller's.

Cancellation: `read` and `write` return, also when cancelled, only after their transfer has ended as
this side sees it (bounded by one slice of a read; a write's agent is torn down). So memory handed
to them may be reused as soon as they have returned or raised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from kvass.common.checksum import Sums
from kvass.common.errors import Unavailable

METADATA_BYTES_MAX = 1 << 20  # an NIXL agent's, of one region and one interface, is under 2 KB
TransportKind = Literal["local", "tcp", "memory"]


class AttachRefused(Unavailable):
    """The peer may be well, but this transport cannot reach it; another one may."""


class EndpointCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a peer needs to reach one transport of a process; travels over RPC.

    A peer is `host_id` + `start_id`, never an address or a PID. `generation` counts rebuilds of the
    transport's agent: a card of an older generation reaches nothing any more. `metadata` is opaque
    to everything but the transport of the same kind.
    """

    kind: Annotated[str, Meta(max_length=64)]
    host_id: Annotated[str, Meta(max_length=64)]
    start_id: Annotated[str, Meta(max_length=64)]
    pid: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
    generation: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    metadata: Annotated[bytes, Meta(max_length=METADATA_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class Copies:
    """Byte ranges to move: three arrays of equal length, absolute addresses in bytes (uint64)."""

    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]
    sizes: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that takes part in transfers. The owner keeps it mapped until the transport is
    closed. `file` is the descriptor of the memory file that it is a mapping of, from `offset` on;
    -1 of private memory."""

    address: int
    size: int
    file: int = -1
    offset: int = 0


class Transport(Protocol):
    """One way to move bytes. Methods are safe to call from the event loop only."""

    kind: TransportKind

    def card(self) -> EndpointCard:
        """Return the card of the current generation. (A TCP transport's says who writes; it reaches
        nothing: what a TCP peer writes into is a `Loan`, and its card is the loan's.)"""
        ...

    async def attach(self, card: EndpointCard) -> None:
        """Make the peer of `card` reachable; replaces an older generation, and does nothing when
        the card is the one already attached. Raises Unavailable."""
        ...

    async def read(
        self,
        start_id: str,
        copies: Copies,
        *,
        deadline_s: float,
        sums: Sums | None = None,
    ) -> None:
        """Copy remote ranges into own registered memory; returns when all bytes are in place.

        `sums` (of as many ranges, which then have one size) takes the checksum of each range as it
        is in its place: bytes are summed fastest while they are copied. After an error it has those
        of the ranges that are whole. `deadline_s` is seconds from now. Raises TransferFailed,
        DeadlineExceeded, Unavailable when the peer is not attached or its process is gone, Invalid
        for ranges outside registered memory.
        """
        ...

    async def write(self, start_id: str, copies: Copies, *, tag: bytes, deadline_s: float) -> None:
        """Copy own registered ranges into landing buffers that the peer lent under `tag`.

        Returns when the transfer has ended as its initiator sees it; the peer learns of the arrival
        by `tag`. Raises as `read`.
        """
        ...

    def detach(self, start_id: str) -> None:
        """Forget a peer. Stops nothing that is in flight (MEASURED: nothing but its end does)."""
        ...


class Loan(Protocol):
    """A landing buffer, lent to one peer for one transfer. `card` is what the peer attaches before
    it writes. End each loan with exactly one `settle` or `abandon`; a second one is a no-op."""

    tag: bytes
    address: int
    size: int
    card: EndpointCard

    async def arrived(self, *, deadline_s: float) -> None:
        """Wait until the peer's write under this loan's tag is whole.

        Call it when the peer has said that its write has ended: once this has returned nobody
        tells the peer so any more. Raises DeadlineExceeded, or TransferFailed when the agent was
        rebuilt under the loan.
        """
        ...

    def view(self) -> memoryview:
        """Return the buffer's bytes. Copy first, check the copy: late bytes may still land here."""
        ...

    def settle(self) -> None:
        """Give the buffer back: the transfer has ended for sure (it arrived, or the peer said that
        it never started)."""
        ...

    def abandon(self) -> None:
        """Put the buffer into quarantine: bytes may still land in it. It comes back by itself once
        the agent that owns the memory has been rebuilt, within the stated bound."""
        ...


class Landing(Protocol):
    """Memory made for peers to write into; nothing else is ever a peer's target."""

    async def lend(self, size: int) -> Loan | None:
        """Lend `size` contiguous bytes, or return None when none are free now. The first call
        starts the agent, and with it the one listening socket. Raises Invalid when `size` can never
        fit."""
        ...

    def counts(self) -> dict[str, int]:
        """Return bytes by state: free, lent, quarantined, total (the first three sum to it)."""
        ...
