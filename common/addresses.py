"""Where a process listens, and in one plain line why it cannot.

It refuses to know who listens there and what for.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from kvass.common.errors import Invalid


@contextmanager
def address_named(host: str, port: int, *, section: str = "") -> Iterator[None]:
    """Turn an error of listening into Invalid, with the address and `section`'s setting named."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        raise Invalid(_reason(error, host, port, section)) from None


def require_own(host: str, port: int = 0, *, section: str = "") -> None:
    """Raise Invalid unless this process can listen there now (port 0: on any port)."""
    with address_named(host, port, section=section), _tcp_socket(host) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        probe.listen(1)


def require_interface(interface: str) -> None:
    """Refuse an interface that this host lacks: UCX would say so at the first transfer, to nobody
    who waits, and every transfer would fail."""
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise Invalid(f"transport.interface is {interface!r}; this host has {', '.join(names)}")


def _tcp_socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)


def _reason(error: OSError | UnicodeError, host: str, port: int, section: str) -> str:
    if isinstance(error, UnicodeError | socket.gaierror):
        reason = "no host is named so" if isinstance(error, UnicodeError) else error.strerror
        return f"cannot listen on {host!r}: {reason} (setting {section}host)"
    if error.errno == errno.EADDRINUSE:
        by = "--port or KVASS_PORT" if section == "gateway." else "--port"
        return f"port {port} on {host} is in use: stop what uses it, or choose another with {by}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"cannot listen on {host}: it is no address of this host (setting {section}host)"
    return f"cannot listen on {host}, port {port}: {error.strerror or error}"
