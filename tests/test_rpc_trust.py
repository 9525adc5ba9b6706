"""Only members are listened to: proofs that are wrong, sent back, recorded or late, and crowds."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.abc
import msgspec
import pytest

from kvass.common import errors, wire
from kvass.common.event_loop import BACKEND, BACKEND_OPTIONS
from kvass.common.rpc import door, frames
from kvass.common.rpc import hello as handshake
from kvass.common.rpc.client import open_client
from kvass.common.rpc.credentials import Credentials
from kvass.common.rpc.server import listen
from kvass.common.secret import Secret
from rpc_stage import LATER, REPLIES, connected, dialled, hello, over, serving, until
from trust import CREDENTIALS

pytestmark = pytest.mark.anyio
STRANGE = Credentials(Secret("what somebody else knows", "KVASS_CLUSTER_SECRET"))
NONCE = b"n" * 32


@pytest.fixture(params=[(BACKEND, dict(BACKEND_OPTIONS)), ("trio", {})], ids=["uvloop", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, object]]:
    backend: tuple[str, dict[str, object]] = request.param
    return backend


def greeting(**changes: object) -> dict[str, object]:
    return {"hello": wire.unpack(wire.pack(hello("gateway"))), "nonce": NONCE} | changes


async def refused(stream: anyio.abc.ByteStream) -> str:
    """Return the reason that an answering side gives for the end of a connection."""
    talk = frames.Frames(stream)
    with anyio.fail_after(5):
        while True:
            kind, _, body = await talk.receive()
            if kind == frames.ERROR:
                return str(frames.unpack_error(body))


async def test_another_secret_is_refused_by_both_sides_with_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as worker:
        for theirs, source in ((STRANGE, "KVASS_CLUSTER_SECRET"),) * 2:
            with pytest.raises(errors.Unauthorized) as caught:
                await open_client(await dialled(worker), hello("gateway"), REPLIES, theirs)
            assert str(caught.value) == (
                "decode decode-0 has another cluster secret than this process, whose is from "
                f"{source}: give every member the same by KVASS_CLUSTER_SECRET or "
                "cluster.secret_file"
            )
        await until(lambda: "gateway gateway-0 has another cluster secret" in caplog.text)
        assert "whose is from the test: give every member the same" in caplog.text
        assert caplog.text.count("refused a connection from 127.0.0.1:") == 1, "now and then"
        async with connected(worker) as (client, _):
            assert await over(client, "quick") == wire.Done()
    assert worker.left == ["gateway-0"], "handlers hear of members only"


@asynccontextmanager
async def answering(
    answer: Callable[[dict[str, object]], list[tuple[int, object]]],
) -> AsyncIterator[tuple[str, list[tuple[int, object]]]]:
    """Run a false member that answers a greeting with frames; yields its address and what it then
    hears."""
    heard: list[tuple[int, object]] = []

    async def serve(stream: anyio.abc.SocketStream) -> None:
        talk = frames.Frames(stream)
        async with stream:
            try:
                _, _, body = await talk.receive()
                assert isinstance(body, dict)
                for kind, said in answer(body):
                    await talk.send(kind, 0, said)
                while True:
                    kind, _, body = await talk.receive()
                    heard.append((kind, body))
            except frames.LOST:
                pass

    listener, address = await listen("127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield address, heard
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("answer", "kind", "reason"),
    [
        (lambda theirs: [(frames.HELLO, greeting())], errors.Unauthorized, "another"),
        (
            lambda theirs: [(frames.HELLO, greeting(proof=b"p" * 32))],
            errors.Unauthorized,
            "another cluster secret",
        ),
        # What we said, as if it had said it.
        (lambda theirs: [(frames.HELLO, theirs)], errors.Unauthorized, "another cluster secret"),
        (lambda theirs: [(frames.HELLO, greeting(nonce=b""))], errors.Invalid, "hello: .*nonce"),
        (lambda theirs: [(frames.REPLY, None)], errors.Invalid, "must be a hello; got kind 1"),
        (
            lambda theirs: [(frames.ERROR, frames.pack_error(errors.Overloaded("full")))],
            errors.Overloaded,
            "full",
        ),
    ],
)
async def test_a_false_member_gets_no_proof(
    answer: Callable[[dict[str, object]], list[tuple[int, object]]],
    kind: type[errors.KvassError],
    reason: str,
) -> None:
    async with answering(answer) as (address, heard):
        host, _, port = address.rpartition(":")
        stream = await anyio.connect_tcp(host, int(port))
        with pytest.raises(kind, match=reason):
            await open_client(stream, hello("gateway"), REPLIES, CREDENTIALS)
        await until(lambda: heard)
        assert [kind for kind, _ in heard] == [frames.ERROR], "told why, and nothing else"


async def test_an_answers_own_proof_sent_back_proves_nothing() -> None:
    async with serving() as worker, await dialled(worker) as stream:
        talk = frames.Frames(stream)
        await talk.send(frames.HELLO, 0, greeting())
        _, _, theirs = await talk.receive()
        assert isinstance(theirs, dict)
        await talk.send(frames.PROOF, 0, theirs["proof"])
        said = await refused(stream)
        assert "another cluster secret" in said
        assert CREDENTIALS.secret.source not in said, "a stranger is told where the secret is kept"
        assert not worker.left


class Tape(anyio.abc.ByteStream):
    """A connection whose sent bytes are kept, and may be changed. Mutable: `sent`."""

    def __init__(
        self, inner: anyio.abc.SocketStream, change: Callable[[bytes], bytes] = bytes
    ) -> None:
        self.inner = inner
        self.sent: list[bytes] = []
        self._change = change

    async def send(self, item: bytes) -> None:
        self.sent.append(self._change(item))
        await self.inner.send(self.sent[-1])

    async def send_eof(self) -> None:
        await self.inner.send_eof()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        return await self.inner.receive(max_bytes)

    async def aclose(self) -> None:
        await self.inner.aclose()


async def test_a_recorded_handshake_opens_nothing() -> None:
    async with serving() as worker:
        tape = Tape(await dialled(worker))
        await handshake.ask(frames.Frames(tape), hello("gateway"), CREDENTIALS.secret)
        await until(lambda: not worker.left)
        await tape.aclose()
        async with await dialled(worker) as stream:
            for sent in tape.sent:
                await stream.send(sent)
            assert "another cluster secret" in await refused(stream)


async def test_what_is_changed_on_the_way_is_not_proved() -> None:
    async with serving() as worker:
        changed = Tape(await dialled(worker), lambda item: item.replace(b"gateway-0", b"gateway-9"))
        with pytest.raises(errors.Unauthorized):
            await open_client(changed, hello("gateway"), REPLIES, CREDENTIALS)
        assert any(b"gateway-9" in item for item in changed.sent) and not worker.left


@pytest.mark.parametrize("first", [True, False])
async def test_nothing_is_called_before_the_proof(first: bool) -> None:
    async with serving() as worker, await dialled(worker) as stream:
        talk = frames.Frames(stream)
        if not first:
            await talk.send(frames.HELLO, 0, greeting())
        await talk.send(frames.CALL, 1, wire.PrefillOver(request_id="hang" + LATER))
        assert ("must be a hello" if first else "must be a proof") in await refused(stream)
        assert not worker.cancelled and not worker.left


async def test_a_stranger_may_send_little() -> None:
    async with serving() as worker, await dialled(worker) as stream:
        await stream.send((frames.HELLO_BYTES_MAX + 1).to_bytes(4, "little"))
        assert f"is over {frames.HELLO_BYTES_MAX}" in await refused(stream)


@pytest.mark.parametrize("says_hello", [True, False])
async def test_a_stranger_that_says_nothing_is_gone_soon(
    monkeypatch: pytest.MonkeyPatch, says_hello: bool
) -> None:
    monkeypatch.setattr(handshake, "HELLO_TIMEOUT_S", 0.2)
    async with serving() as worker, await dialled(worker) as stream:
        if says_hello:
            await frames.Frames(stream).send(frames.HELLO, 0, greeting())
            await stream.receive()
        with anyio.fail_after(2), pytest.raises(anyio.EndOfStream):
            await stream.receive()


async def test_a_crowd_of_strangers_keeps_no_member_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "STRANGERS_MAX", 8)
    async with serving() as worker:
        crowd = [await dialled(worker) for _ in range(40)]
        async with connected(worker) as (client, _):
            assert await over(client, "quick") == wire.Done()
        ended = 0
        for stream in crowd:
            with anyio.move_on_after(0.05):
                try:
                    await stream.receive()
                except anyio.EndOfStream:
                    ended += 1
            await stream.aclose()
        assert ended >= 32, "the oldest made room"


async def test_a_listener_has_so_many_connections_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door, "PEERS_MAX", 2)
    async with serving() as worker, connected(worker) as (first, _):
        async with connected(worker) as (second, _), connected(worker) as (third, _):
            await until(lambda: third.closed_because is not None)
            assert third.closed_because == "2 connections are open here"
            for client in (first, second):
                assert await over(client, "quick") == wire.Done()
        await until(lambda: len(worker.left) == 2)
        async with connected(worker) as (client, _):
            assert await over(client, "quick") == wire.Done()


async def test_names_that_would_forge_a_log_line_are_no_hello(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    forged = msgspec.structs.replace(hello("gateway"), member_id="a\n2026 ERROR all is lost")
    async with serving() as worker:
        with pytest.raises(errors.Invalid, match="member_id"):
            await open_client(await dialled(worker), forged, REPLIES, CREDENTIALS)
    assert "all is lost" not in caplog.text
