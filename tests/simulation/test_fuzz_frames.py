"""The frame parser and the handshake, with any bytes in any pieces, from strangers and from
members; and what the worst frame may cost in memory."""

from __future__ import annotations

import os
import tracemalloc

import anyio
import hypothesis
import msgpack
import pytest
import trio.testing
from hypothesis import strategies as st

from kvass.common import wire
from kvass.common.errors import Invalid, KvassError
from kvass.common.rpc import frames, hello
from kvass.common.rpc.client import open_client
from kvass.common.rpc.hello import Hello
from kvass.common.rpc.server import Call, Server
from trust import CREDENTIALS
from wires import wire_pair

WHO = Hello("gateway", "gateway-0", "host-0", "gateway-start", 1, {})
GREETING = [frames.HELLO, 0, wire.unpack(wire.pack({"hello": WHO, "nonce": b"n" * 32}))]
EXAMPLES = 150 if "KVASS_FUZZ_S" not in os.environ else 100 * int(os.environ["KVASS_FUZZ_S"])
# Of a frame of numbers a byte becomes a pointer; of one of empty lists it would become 64 bytes.
WORST_BYTES = 16 * wire.FRAME_BYTES_MAX

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats()
    | st.text(max_size=8) | st.binary(max_size=40) | st.sampled_from(["t", "hello"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=12,
)  # fmt: skip
frame = st.one_of(
    values,
    st.tuples(st.integers(-1, 9), st.integers(-1, 3), values).map(list),
    st.just(GREETING),
    st.just([frames.PROOF, 0, b"p" * 32]),
    st.just([frames.CALL, 1, {"t": "prefill_over", "request_id": "r"}]),
)
lengths = st.sampled_from([None, 0, 1, -1, 1 << 16, (1 << 32) - 1])


def framed(value: object, length: int | None) -> bytes:
    packed: bytes = msgpack.packb(value)
    size = len(packed) if length is None else (len(packed) + length) % (1 << 32)
    return size.to_bytes(4, "little") + packed


pieces = st.lists(st.builds(framed, frame, lengths) | st.binary(max_size=60), max_size=6)


async def over(call: Call) -> wire.Done:
    return wire.Done()


def any_order(run_as_member: bool, sent: list[bytes], cut: int) -> None:
    """Send bytes in pieces of `cut`; then a member is served."""

    async def run() -> None:
        server = Server(WHO, {wire.PrefillOver: over}, CREDENTIALS)
        async with anyio.create_task_group() as tasks:
            near, far = wire_pair("bad", "server")
            tasks.start_soon(server.serve_connection, far)
            if run_as_member:
                await hello.ask(frames.Frames(near), WHO, CREDENTIALS.secret)
            data = b"".join(sent)
            try:
                for at in range(0, len(data), cut):
                    await near.send(data[at : at + cut])
            except frames.LOST:
                pass
            await anyio.sleep(2 * hello.HELLO_TIMEOUT_S)
            assert server._door.strangers == 0 and server._door.peers <= run_as_member
            await near.aclose()
            await anyio.sleep(1)
            assert server._door.peers == 0
            near, far = wire_pair("good", "server")
            tasks.start_soon(server.serve_connection, far)
            client = await open_client(near, WHO, wire.Tags([wire.Done]), CREDENTIALS)
            tasks.start_soon(client.run)
            assert await client.call(wire.PrefillOver("r"), deadline_s=5) == wire.Done()
            tasks.cancel_scope.cancel()

    clock = trio.testing.MockClock(autojump_threshold=0)
    anyio.run(run, backend="trio", backend_options={"clock": clock})


@pytest.mark.parametrize("run_as_member", [True, False], ids=["member", "stranger"])
def test_any_bytes_cost_their_connection_only(run_as_member: bool) -> None:
    @hypothesis.settings(max_examples=EXAMPLES, deadline=None)
    @hypothesis.given(pieces, st.integers(1, 40))
    def play(sent: list[bytes], cut: int) -> None:
        any_order(run_as_member, sent, cut)

    play()


@hypothesis.given(values)
def test_any_value_is_an_error_of_ours_or_none(value: object) -> None:
    assert isinstance(frames.unpack_error(value), KvassError)


@pytest.mark.parametrize(
    "unit",
    [b"\x90", b"\x80", b"\x91\x90", b"\x01", b"\xcb" + b"\x3f" * 8],
    ids=["lists", "maps", "nested", "numbers", "floats"],
)
def test_the_worst_frames_take_bounded_memory(unit: bytes) -> None:
    count = wire.FRAME_BYTES_MAX // len(unit)
    rows, row = count // (1 << 16), 1 << 16
    data = b"\xdd" + rows.to_bytes(4, "big")
    data += (b"\xdd" + row.to_bytes(4, "big") + unit * row) * rows
    tracemalloc.start()
    try:
        wire.unpack(data)
    except Invalid:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < WORST_BYTES, f"{peak >> 20} MiB"
