"""TLS for RPC, both sides showing a certificate that the cluster's CA has signed.

Names in certificates are not compared with addresses: members move, and any certificate of the CA
is a member's. A TLS connection is one only between members that prove the cluster's secret inside
it. Off unless the config names the files.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from anyio.streams.tls import TLSStream

from kvass.common.config import ClusterConfig
from kvass.common.errors import Invalid
from kvass.common.rpc.frames import TLS_REMEDY
from kvass.common.rpc.sockets import Connection

_STEPS_MAX = 16  # of a rehearsal; a handshake takes four


@dataclass(frozen=True, slots=True)
class Tls:
    """What a member shows when it asks, and when it answers."""

    asking: ssl.SSLContext
    answering: ssl.SSLContext

    async def dialled(self, stream: Connection) -> Connection:
        """Speak TLS on a connection that this process opened; raises ssl.SSLError and LOST."""
        return await _wrapped(stream, self.asking, server_side=False)

    async def accepted(self, stream: Connection) -> Connection:
        """Speak TLS on a connection that a peer opened; raises ssl.SSLError and LOST."""
        return await _wrapped(stream, self.answering, server_side=True)


async def _wrapped(stream: Connection, context: ssl.SSLContext, *, server_side: bool) -> Connection:
    # Frames have lengths, so that a connection that is cut short is seen without TLS's own goodbye.
    return await TLSStream.wrap(
        stream, server_side=server_side, ssl_context=context, standard_compatible=False
    )


def tls_of(cluster: ClusterConfig) -> Tls | None:
    """Return what the config names, tried out; None when it names nothing.

    Raises Invalid with the file that is missing, wrong or expired.
    """
    if not cluster.tls_cert:
        return None
    for name in ("tls_cert", "tls_key", "tls_ca"):
        path = Path(getattr(cluster, name))
        try:
            path.open("rb").close()
        except OSError as error:
            raise Invalid(f"cluster.{name} is {str(path)!r}: {error.strerror or error}") from None
    tls = Tls(
        asking=_context(cluster, ssl.PROTOCOL_TLS_CLIENT),
        answering=_context(cluster, ssl.PROTOCOL_TLS_SERVER),
    )
    try:
        _rehearse(tls)
    except ssl.SSLError as error:
        raise Invalid(
            f"cluster.tls_cert {cluster.tls_cert} would be refused by every member: "
            f"{reason_of(error)}; expected one that cluster.tls_ca {cluster.tls_ca} has signed, "
            "for clients and servers, and that is valid today"
        ) from None
    return tls


def reason_of(error: ssl.SSLError) -> str:
    """Return why TLS failed, without OpenSSL's file names and numbers."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if error.reason == "WRONG_VERSION_NUMBER":  # what came was no version at all
        return f"the other side does not speak TLS, and this one does: {TLS_REMEDY}"
    return (error.reason or str(error)).replace("_", " ").lower()


def _context(cluster: ClusterConfig, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        # A key with a passphrase is refused: nobody is there to be asked for it.
        context.load_cert_chain(cluster.tls_cert, cluster.tls_key, password="")
    except (ssl.SSLError, ValueError) as error:
        reason = reason_of(error) if isinstance(error, ssl.SSLError) else str(error)
        raise Invalid(
            f"cluster.tls_cert {cluster.tls_cert} and cluster.tls_key {cluster.tls_key} are no "
            f"certificate with its key, in PEM and without a passphrase: {reason}"
        ) from None
    try:
        context.load_verify_locations(cafile=cluster.tls_ca)
    except ssl.SSLError as error:
        raise Invalid(
            f"cluster.tls_ca {cluster.tls_ca} holds no certificate in PEM: {reason_of(error)}"
        ) from None
    return context


def _rehearse(tls: Tls) -> None:
    """Shake hands with oneself, in memory; raises ssl.SSLError for what peers would refuse."""
    to_answering, to_asking = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        tls.asking.wrap_bio(to_asking, to_answering),
        tls.answering.wrap_bio(to_answering, to_asking, server_side=True),
    ]
    for _ in range(_STEPS_MAX):
        for side in list(sides):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            sides.remove(side)
        if not sides:
            return
    raise ssl.SSLError("the handshake does not end")
