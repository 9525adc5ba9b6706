"""Who is at each end of a connection, said first by both, and proved.

    asking     HELLO(who I am, a random number)  ─────────────────────────>  answering
               <──  HELLO(who I am, a random number, proof that I know the secret)
               PROOF(that I know it too)  ────────────────────────────────>

A proof signs everything that both have said, with the side that signs: so it holds for this
connection only, and none can be sent back to who made it. Until it has proved itself a peer may
send little, and is told nothing but this member's Hello. Members that disagree on the cluster are
then refused with the field named.
"""

from __future__ import annotations

import secrets
from typing import Annotated

import msgspec
from msgspec import Meta

from kvass.common import config, errors, wire
from kvass.common.rpc.frames import ERROR, HELLO, PROOF, Frames, unpack_error
from kvass.common.secret import MAC_BYTES, REMEDY, Secret

HELLO_TIMEOUT_S = 5.0
_NONCE_BYTES = 32
_ASKING, _ANSWERING = b"kvass rpc 2, asking", b"kvass rpc 2, answering"

ClusterFields = Annotated[dict[wire.Name, wire.Integer | wire.Text], Meta(max_length=64)]


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who is at one end of a connection. `cluster` is empty for members that serve any model."""

    role: wire.Id
    member_id: wire.Id
    host_id: wire.Id
    start_id: wire.Id
    pid: wire.Natural
    cluster: ClusterFields
    protocol: wire.Natural = wire.PROTOCOL_VERSION


class _Greeting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hello: Hello
    nonce: Annotated[bytes, Meta(min_length=_NONCE_BYTES, max_length=_NONCE_BYTES)]
    proof: Annotated[bytes, Meta(max_length=MAC_BYTES)] = b""


async def ask(frames: Frames, ours: Hello, secret: Secret) -> Hello:
    """Shake hands on a connection that this process opened; returns who answered.

    Raises Unauthorized for another secret, Incompatible with the first field that differs, Invalid
    for what is no handshake, and what the peer refuses us with.
    """
    opening = _Greeting(ours, secrets.token_bytes(_NONCE_BYTES))
    await frames.send(HELLO, 0, opening)
    answer = _greeting(*await frames.receive())
    _check_protocol(ours, answer.hello)
    said = _transcript(opening, answer)
    if not secret.signed(answer.proof, _ANSWERING, said):
        raise _another_secret(answer.hello, secret)
    _check_cluster(ours, answer.hello)
    await frames.send(PROOF, 0, secret.mac(_ASKING, said))
    frames.bytes_max = wire.FRAME_BYTES_MAX
    return answer.hello


async def answer(frames: Frames, ours: Hello, secret: Secret) -> Hello:
    """Shake hands on a connection that a peer opened; returns who it is. Raises as `ask`."""
    opening = _greeting(*await frames.receive())
    bare = _Greeting(ours, secrets.token_bytes(_NONCE_BYTES))
    said = _transcript(opening, bare)
    proof = secret.mac(_ANSWERING, said)
    await frames.send(HELLO, 0, msgspec.structs.replace(bare, proof=proof))
    _check_protocol(ours, opening.hello)
    kind, _, body = await frames.receive()
    if kind == ERROR:
        raise _refused(unpack_error(body), opening.hello, secret)
    if kind != PROOF or not isinstance(body, bytes):
        raise errors.Invalid(f"the second frame must be a proof; got kind {kind}")
    if not secret.signed(body, _ASKING, said):
        raise _another_secret(opening.hello, secret)
    _check_cluster(ours, opening.hello)
    frames.bytes_max = wire.FRAME_BYTES_MAX
    return opening.hello


def _greeting(kind: int, _: int, body: object) -> _Greeting:
    if kind == ERROR:
        raise unpack_error(body)
    if kind != HELLO:
        raise errors.Invalid(f"the first frame must be a hello; got kind {kind}")
    if isinstance(body, dict) and body.get("protocol") == 1:
        raise errors.Incompatible("protocol", wire.PROTOCOL_VERSION, 1, who="the peer")
    try:
        return msgspec.convert(body, _Greeting, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise errors.Invalid(f"hello: {error}") from None


def _transcript(asking: _Greeting, answering: _Greeting) -> bytes:
    return wire.pack([asking.hello, asking.nonce, answering.hello, answering.nonce])


def _check_protocol(ours: Hello, theirs: Hello) -> None:
    if theirs.protocol != ours.protocol:
        raise errors.Incompatible("protocol", ours.protocol, theirs.protocol, who=_name(theirs))


def _check_cluster(ours: Hello, theirs: Hello) -> None:
    if ours.cluster and theirs.cluster:
        name = config.difference(ours.cluster, theirs.cluster)
        if name is not None:
            raise errors.Incompatible(
                name, ours.cluster.get(name), theirs.cluster.get(name), who=_name(theirs)
            )


class AnotherSecret(errors.Unauthorized):
    """The peer's proof is wrong; the message names where our secret is kept, so it is for us."""


def _another_secret(theirs: Hello, secret: Secret) -> AnotherSecret:
    return AnotherSecret(
        f"{_name(theirs)} has another cluster secret than this process, whose is from "
        f"{secret.source}: {REMEDY}"
    )


def _refused(error: errors.KvassError, theirs: Hello, secret: Secret) -> errors.KvassError:
    """Say in our own words what a peer, which has proved nothing, refuses us with."""
    if isinstance(error, errors.Unauthorized):
        return _another_secret(theirs, secret)
    return errors.Unavailable(f"{_name(theirs)} refuses this process: {error}")


def _name(theirs: Hello) -> str:
    return f"{theirs.role} {theirs.member_id}"
