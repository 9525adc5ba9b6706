"""Frames on a byte stream: their form, their bounds, and errors as they cross the wire.

A frame is a little-endian u32 length and one msgpack array [kind, call id, body]. It refuses to
know what a call is; `client.py` and `server.py` do.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Annotated

import anyio
import anyio.lowlevel
import msgspec
from msgspec import Meta

from kvass.common import errors, wire
from kvass.common.rpc.sockets import Connection, SocketStream

_LENGTH = struct.Struct("<I")
# A peer that takes nothing for so long hangs: its connection is given up, its callers go elsewhere.
SEND_TIMEOUT_S = 5.0
# Frames taken one after the other without the loop's turn in between, at most.
FRAMES_A_TURN = 16

# Of a peer that has proved nothing yet: a hello is under 1 KB.
HELLO_BYTES_MAX = 64 << 10
# Of an error's text: it may quote what was sent.
MESSAGE_CHARACTERS_MAX = 2_000
TLS_REMEDY = "set cluster.tls_cert, tls_key and tls_ca for all members or for none"
_TLS_RECORDS = (b"\x15\x03", b"\x16\x03")  # alert, handshake; then a version of SSL 3, as TLS is

CALL, REPLY, ITEM, END, ERROR, CANCEL, HELLO, PROOF = range(8)

# How a connection ends that nobody ended on purpose. (TimeoutError is an OSError.)
LOST = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)


class _ErrorBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An error on the wire, by the name of its class in the taxonomy."""

    name: wire.Name
    message: Annotated[str, Meta(max_length=MESSAGE_CHARACTERS_MAX)]
    parameter: wire.Name | None = None
    retry_after_s: Annotated[float, Meta(ge=0, le=86_400)] = 1.0
    http_status: Annotated[int, Meta(ge=400, le=599)] = 400


def pack_error(error: errors.KvassError) -> msgspec.Struct:
    """Return the body of an ERROR frame."""
    return _ErrorBody(
        name=next(c.__name__ for c in type(error).__mro__ if c.__module__ == errors.__name__),
        message=str(error)[:MESSAGE_CHARACTERS_MAX],
        parameter=getattr(error, "parameter", None),
        retry_after_s=getattr(error, "retry_after_s", 1.0),
        http_status=error.http_status,
    )


_ERRORS: Mapping[str, Callable[[str], errors.KvassError]] = {
    cls.__name__: cls
    for cls in (
        errors.Unavailable,
        errors.Leaving,
        errors.DeadlineExceeded,
        errors.TransferFailed,
        errors.Unauthorized,
    )
}


def unpack_error(body: object) -> errors.KvassError:
    """Return the error that the peer sent; Unavailable for one of no class that callers act on."""
    try:
        error = msgspec.convert(body, _ErrorBody)
    except msgspec.ValidationError as invalid:
        return errors.Unavailable(f"the peer sent an error that does not parse: {invalid}")
    if error.name == "Invalid":
        return errors.Invalid(
            error.message, parameter=error.parameter, http_status=error.http_status
        )
    if error.name == "Overloaded":
        return errors.Overloaded(error.message, retry_after_s=error.retry_after_s)
    return _ERRORS.get(error.name, errors.Unavailable)(error.message)


async def _receive_exactly(stream: Connection, size: int, rest: bytearray) -> bytes:
    while len(rest) < size:
        rest += await stream.receive(1 << 18)
    taken = bytes(memoryview(rest)[:size])
    del rest[:size]
    return taken


class Frames:
    """Frames over a byte stream; one writer at a time. Mutable fields: `_rest`, `_taken` (frames
    since this let the loop turn), and `bytes_max`, of a frame that comes: little until the peer has
    proved who it is (`hello.py`)."""

    def __init__(self, stream: Connection) -> None:
        self.stream = stream
        self.bytes_max = HELLO_BYTES_MAX
        self._rest = bytearray()
        self._taken = 0
        self._lock = anyio.Lock(fast_acquire=True)

    async def send(self, kind: int, call_id: int, body: object) -> None:
        """Send a frame; waits, and lets the loop turn, only where the connection must."""
        packed = wire.pack([kind, call_id, body])
        if len(packed) > wire.FRAME_BYTES_MAX:
            raise errors.Invalid(
                f"a frame of {len(packed)} bytes is over the limit of {wire.FRAME_BYTES_MAX}"
            )
        frame = _LENGTH.pack(len(packed)) + packed
        stream = self.stream
        rest: SocketStream | None = None  # that has the frame, and not all of it is sent
        if isinstance(stream, SocketStream) and not self._lock.locked() and stream.send_now(frame):
            if stream.is_drained:
                return
            rest = stream
        async with self._lock:
            # Shielded: half a frame would make the rest of the connection unreadable.
            with anyio.move_on_after(SEND_TIMEOUT_S, shield=True) as scope:
                await (stream.send(frame) if rest is None else rest.drain())
            if scope.cancelled_caught:
                await anyio.aclose_forcefully(stream)
                raise anyio.BrokenResourceError

    async def receive(self) -> tuple[int, int, object]:
        """Return the next frame's kind, call id and body."""
        self._taken += 1
        if self._taken >= FRAMES_A_TURN:
            self._taken = 0
            await anyio.lowlevel.checkpoint()
        head = await _receive_exactly(self.stream, 4, self._rest)
        (size,) = _LENGTH.unpack(head)
        if size > self.bytes_max:
            if head[:2] in _TLS_RECORDS:
                raise errors.Unauthorized(
                    f"the other side speaks TLS, and this one does not: {TLS_REMEDY}"
                )
            raise errors.Invalid(f"a frame of {size} bytes is over {self.bytes_max}")
        frame = wire.unpack(await _receive_exactly(self.stream, size, self._rest))
        if not (isinstance(frame, list) and len(frame) == 3):
            raise errors.Invalid("a frame must be an array of three")
        kind, call_id, body = frame
        if type(kind) is not int or type(call_id) is not int:
            raise errors.Invalid("a frame's kind and call id must be integers")
        return kind, call_id, body
