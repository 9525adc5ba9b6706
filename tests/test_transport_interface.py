"""The interface of the TCP data ports is one that this host has, or the process doesn't start."""

from __future__ import annotations

import re
import socket

import pytest

from kvass.common.config import TransportConfig
from kvass.common.errors import Invalid
from kvass.common.event_loop import BACKEND, BACKEND_OPTIONS
from kvass.common.transport.identity import own_identity
from kvass.common.transport.nixl import open_endpoints

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return BACKEND, dict(BACKEND_OPTIONS)


async def test_an_interface_that_is_not_there_is_refused_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    told = "transport.interface is 'eth9'; this host has lo, eth0"
    with pytest.raises(Invalid, match=re.escape(told)):
        await open_endpoints(TransportConfig(interface="eth9"), own_identity(), [])


async def test_one_that_is_there_is_taken() -> None:
    endpoints = await open_endpoints(TransportConfig(interface="lo"), own_identity(), [])
    endpoints.close()
