"""uvicorn on a socket of ours. It refuses to know what is served, and leaves signals alone."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import uvicorn
from fastapi import FastAPI

from kvass.common.addresses import address_named

BACKLOG = 1024  # connections that wait to be accepted: as many as choices may be in flight


class HttpServer(uvicorn.Server):
    """uvicorn on a socket of ours, without its signal handlers: the process's owner has its own.

    Mutable fields besides uvicorn's: none (`accepting` and `over` are set once).
    """

    def __init__(self, app: FastAPI, *, grace_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=max(1, round(grace_s)),
            )
        )
        self.accepting = anyio.Event()
        self.over = anyio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start accepting."""
        await super().startup(sockets)
        self.accepting.set()

    async def run_on(self, bound: socket.socket) -> None:
        """Serve until drained."""
        try:
            await self.serve(sockets=[bound])
        finally:
            self.over.set()

    async def drain(self) -> None:
        """Accept nothing more; return when all answers have ended or the grace has passed."""
        self.should_exit = True
        await self.over.wait()


def bind(host: str, port: int) -> socket.socket:
    """Bind the HTTP port; raises Invalid saying why it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's algorithm off only where the protocol is named: without it every
    # answer waits 40 ms for the client's delayed acknowledgement.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        with address_named(host, port, section="gateway."):
            bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound


def is_loopback(bound: socket.socket) -> bool:
    """Whether only processes of this host can connect."""
    return ipaddress.ip_address(bound.getsockname()[0]).is_loopback
