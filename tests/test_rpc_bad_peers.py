"""Bad peers of RPC: frames that are wrong, bugs in handlers, peers that hang."""

from __future__ import annotations

import struct

import anyio
import anyio.abc
import msgpack
import pytest

from kvass.common import errors, wire
from kvass.common.event_loop import BACKEND, BACKEND_OPTIONS
from kvass.common.rpc import frames
from kvass.common.rpc import hello as rpc_hello
from kvass.common.rpc import server as rpc_server
from kvass.common.rpc.dial import Dialer
from kvass.common.rpc.server import listen
from rpc_stage import (
    LATER,
    REPLIES,
    Worker,
    connected,
    dialled,
    generate,
    hello,
    over,
    serving,
    until,
)
from trust import CREDENTIALS

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[(BACKEND, dict(BACKEND_OPTIONS)), ("trio", {})], ids=["uvloop", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, object]]:
    backend: tuple[str, dict[str, object]] = request.param
    return backend


def framed(value: object) -> bytes:
    packed: bytes = msgpack.packb(value)
    return struct.pack("<I", len(packed)) + packed


CALL = framed([frames.CALL, 1, {"t": "prefill_over", "request_id": "hang" + LATER}])


async def proved(worker: Worker) -> anyio.abc.SocketStream:
    """Dial and prove who we are, as a member does; what comes then is the test's."""
    stream = await dialled(worker)
    await rpc_hello.ask(frames.Frames(stream), hello("gateway"), CREDENTIALS.secret)
    return stream


async def send_raw(worker: Worker, data: bytes, *, as_member: bool) -> bytes:
    """Send bytes, end the sending side, and return all that comes back."""
    answer = b""
    async with await (proved if as_member else dialled)(worker) as stream:
        try:
            await stream.send(data)
            await stream.send_eof()
            while True:
                answer += await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError, OSError):
            return answer


class Cut(anyio.abc.ByteStream):
    """A connection whose sending side ends after `left` bytes. Mutable: `left`."""

    def __init__(self, inner: anyio.abc.SocketStream, left: int) -> None:
        self.inner = inner
        self.left = left

    async def send(self, item: bytes) -> None:
        await self.inner.send(item[: self.left])
        self.left = max(self.left - len(item), 0)
        if not self.left:
            await self.inner.send_eof()
            raise anyio.BrokenResourceError

    async def send_eof(self) -> None:
        await self.inner.send_eof()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        return await self.inner.receive(max_bytes)

    async def aclose(self) -> None:
        await self.inner.aclose()


async def test_bytes_that_end_anywhere_leave_nothing_behind() -> None:
    async with serving() as worker:
        whole = Cut(await dialled(worker), 1 << 20)
        await rpc_hello.ask(frames.Frames(whole), hello("gateway"), CREDENTIALS.secret)
        handshake = (1 << 20) - whole.left
        await whole.aclose()
        for size in range(handshake + len(CALL) + 1):
            stream = Cut(await dialled(worker), size)
            try:
                await rpc_hello.ask(frames.Frames(stream), hello("gateway"), CREDENTIALS.secret)
                await stream.send(CALL)
            except frames.LOST:
                pass  # it was cut here
            await stream.aclose()
        await until(lambda: len(worker.left) == 1 + len(CALL) + 1)
        assert worker.cancelled in ([], ["hang"])
        async with connected(worker) as (client, _):
            assert await over(client, "quick") == wire.Done()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "over"),
        (struct.pack("<I", wire.FRAME_BYTES_MAX + 1), "over"),
        (struct.pack("<I", 3) + b"\xc1\xc1\xc1", "not a msgpack frame"),
        (framed([1, 2]), "array of three"),
        (framed(["x", 0, None]), "must be integers"),
        (framed([frames.CALL, 1, {}]), "first frame must be a hello"),
        (framed([frames.HELLO, 0, {"role": "x"}]), "hello:"),
        (framed([frames.HELLO, 0, {"protocol": 1}]), "protocol differs"),
        (b"\x16\x03\x01\x02\x00\x01\x00", "speaks TLS, and this one does not"),
    ],
)
async def test_what_is_no_handshake_is_refused_with_the_reason(data: bytes, reason: str) -> None:
    async with serving() as worker:
        answer = await send_raw(worker, data, as_member=False)
        assert reason in answer.decode("latin-1") and not worker.left
        async with connected(worker) as (client, _):  # the listener and others go on
            assert await over(client, "quick") == wire.Done()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (struct.pack("<I", wire.FRAME_BYTES_MAX + 1), "over"),
        (framed([True, 0, None]), "must be integers"),
        (framed([frames.REPLY, 1, {}]), "not expected"),
        (framed([frames.PROOF, 0, b"p" * 32]), "not expected"),
        (CALL + CALL, "not expected"),
        (framed([8, 1, None]), "not expected"),
    ],
)
async def test_bad_frames_end_their_connection_with_the_reason(data: bytes, reason: str) -> None:
    async with serving() as worker:
        answer = await send_raw(worker, data, as_member=True)
        assert reason in answer.decode("latin-1")
        async with connected(worker) as (client, _):  # the listener and others go on
            assert await over(client, "quick") == wire.Done()


async def test_a_message_that_is_wrong_costs_its_call_only() -> None:
    async with serving() as worker:
        bad = framed([frames.CALL, 1, {"t": "prefill_over", "request_id": 7}])
        good = framed([frames.CALL, 2, {"t": "prefill_over", "request_id": "quick"}])
        async with await proved(worker) as stream:
            await stream.send(bad + good)
            answer = b""
            with anyio.fail_after(5):
                while not (b"Invalid" in answer and b"done" in answer):
                    answer += await stream.receive()


@pytest.mark.parametrize("bug", ["bug", "bug" + LATER, "no disk"])
async def test_a_bug_costs_the_call_that_met_it_and_is_logged(
    caplog: pytest.LogCaptureFixture, bug: str
) -> None:
    async with serving() as worker, connected(worker) as (client, _):
        with pytest.raises(errors.Unavailable, match=r"PrefillOver met a bug.*nobody thought"):
            await over(client, bug)
        assert "Traceback" in caplog.text and "PrefillOver of gateway gateway-0" in caplog.text
        await over(client, "quick")


@pytest.mark.parametrize("later", ["", LATER])
async def test_a_bug_after_an_answer_costs_nobody_and_is_logged(
    caplog: pytest.LogCaptureFixture, later: str
) -> None:
    async with serving() as worker, connected(worker) as (client, _):
        assert await over(client, "bug after" + later) == wire.Done()
        assert await over(client, "quick") == wire.Done()
        await until(lambda: worker.noted == ["quick"])
        assert "what follows PrefillOver met a bug" in caplog.text


@pytest.mark.parametrize("later", ["", LATER])
async def test_a_broken_invariant_ends_the_server(later: str) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with serving() as worker, connected(worker) as (client, _):
            with pytest.raises(errors.Unavailable):
                await over(client, "broken" + later)
            await anyio.sleep(1.0)
    assert caught.group_contains(AssertionError, match="used != total")


async def test_too_many_calls_are_overload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_server, "CALLS_MAX", 2)
    async with serving() as worker, connected(worker) as (client, _):
        async with anyio.create_task_group() as callers:
            for _ in range(2):
                callers.start_soon(over, client, "hang" + LATER)
            await until(lambda: len(client._waiting) == 2)
            with pytest.raises(errors.Overloaded):
                await over(client, "quick")
            callers.cancel_scope.cancel()
        await until(lambda: len(worker.cancelled) == 2)
        assert await over(client, "quick") == wire.Done()


async def test_a_peer_that_hangs_does_not_hold_a_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "SEND_TIMEOUT_S", 0.2)
    async with serving() as worker:
        large = wire.unpack(wire.pack(generate(10**7, "large")))
        async with await proved(worker) as stream:
            await stream.send(framed([frames.CALL, 1, large]))
            await until(lambda: worker.left == ["gateway-0"])  # we never read


async def test_a_server_that_says_nothing_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_hello, "HELLO_TIMEOUT_S", 0.1)

    async def say_nothing(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await anyio.sleep_forever()

    listener, address = await listen("127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, say_nothing)
        with pytest.raises(errors.Unavailable, match="said nothing"):
            await Dialer(tasks, hello(), REPLIES, CREDENTIALS).client(address)
        tasks.cancel_scope.cancel()
