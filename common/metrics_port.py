"""The port where a process's metrics are read: few connections at once, none for long.

Anybody who reaches the port may connect, and says nothing of who they are. So whoever connects and
is silent, or reads the answer a byte at a time, must cost the process little: prometheus_client's
own server gives each connection a thread and a descriptor for as long as it likes, and 500 held
connections leave a member none for its peers. It refuses to know what the metrics are.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import anyio.to_thread
from prometheus_client import CollectorRegistry, make_wsgi_app

_log = logging.getLogger(__name__)

CONNECTIONS_MAX = 16  # a scrape takes ms: room for two Prometheus servers and a person, many times
CONNECTION_S = 5.0  # in all, from accept to the answer's end; Prometheus itself waits for 10 s
LOOK_EVERY_S = 0.5  # how late the end of CONNECTION_S is noticed at most
ACCEPT_PAUSE_S = 0.1  # when descriptors have run out


class Endpoint:
    """A process's `/metrics`, on a port of its own and in a thread of its own."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread
        host, port = server.server_address[:2]
        self.address = f"{host!s}:{port}"

    async def close(self) -> None:
        """Stop answering; returns when the thread has ended."""
        await anyio.to_thread.run_sync(self._close)

    def _close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(host: str, registry: CollectorRegistry) -> Endpoint:
    """Serve a registry on a free port of `host`."""
    server = _Server(host)
    server.set_app(make_wsgi_app(registry))
    thread = threading.Thread(
        target=server.serve_forever, args=(LOOK_EVERY_S,), name="kvass-metrics", daemon=True
    )
    thread.start()
    return Endpoint(server, thread)


class _Request(WSGIRequestHandler):
    """One scrape. No access log: each scrape would be a line."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each of at most CONNECTIONS_MAX connections; more are closed at once.

    A time-out of the socket would begin anew with each byte, so whole connections are counted.
    Mutable field, under `_lock`: `_ends_s`, when each connection's time is over.
    """

    daemon_threads = True

    def __init__(self, host: str) -> None:
        self._lock = threading.Lock()
        self._ends_s: dict[socket.socket, float] = {}
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        super().__init__((str(found[0][4][0]), 0), _Request)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(ACCEPT_PAUSE_S)  # whoever waits still does: this would be called on and on
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if admitted := len(self._ends_s) < CONNECTIONS_MAX:
                self._ends_s[request] = time.monotonic() + CONNECTION_S
        if admitted:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def close_request(self, request: Any) -> None:
        with self._lock:  # so that nobody ends a descriptor that is another's by then
            self._ends_s.pop(request, None)
            super().close_request(request)

    def service_actions(self) -> None:
        """End connections whose time is over; called between any two that are accepted, and every
        LOOK_EVERY_S."""
        self._end_those(time.monotonic())

    def server_close(self) -> None:
        super().server_close()
        self._end_those(float("inf"))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that was reset is no news; what else there may be is."""
        if isinstance(sys.exception(), OSError):
            _log.debug("a scrape from %s ended early", client_address, exc_info=True)
        else:
            _log.error("a scrape from %s met a bug", client_address, exc_info=True)

    def _end_those(self, until_s: float) -> None:
        """Wake the threads of connections that end until then: they close them."""
        with self._lock:
            for connection, ends_s in self._ends_s.items():
                if ends_s <= until_s:
                    with suppress(OSError):  # the peer was faster
                        connection.shutdown(socket.SHUT_RDWR)
