"""Whoever connects to the metrics port and holds on costs the process little."""

from __future__ import annotations

import os
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvass.common import metrics, metrics_port
from kvass.common.metrics_port import CONNECTIONS_MAX, Endpoint

END_S = 0.4
SLACK_S = 2.0
HELD = 50


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setattr(metrics_port, "CONNECTION_S", END_S)
    monkeypatch.setattr(metrics_port, "LOOK_EVERY_S", 0.05)
    opened = metrics_port.serve("127.0.0.1", metrics.new_registry())
    yield opened
    opened._close()


def scrape(endpoint: Endpoint) -> str:
    with urllib.request.urlopen(f"http://{endpoint.address}/metrics", timeout=2) as answer:
        return str(answer.read(), "utf-8")


def scrape_in_time(endpoint: Endpoint) -> str:
    until_s = time.monotonic() + END_S + SLACK_S
    while True:
        try:
            return scrape(endpoint)
        except OSError:
            assert time.monotonic() < until_s, "no scrape is answered"
            time.sleep(0.02)


def connect(endpoint: Endpoint) -> socket.socket:
    host, _, port = endpoint.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=SLACK_S)


def settles(count: int) -> bool:
    """Whether this process has no more than `count` descriptors, soon."""
    until_s = time.monotonic() + END_S + SLACK_S
    while len(os.listdir("/proc/self/fd")) > count:
        if time.monotonic() > until_s:
            return False
        time.sleep(0.02)
    return True


def test_a_scrape_is_answered(endpoint: Endpoint) -> None:
    assert "process_open_fds" in scrape(endpoint)


def test_silent_connections_keep_no_scrape_away_and_are_few(endpoint: Endpoint) -> None:
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    with ExitStack() as held:
        for _ in range(HELD):
            held.enter_context(connect(endpoint))
        time.sleep(END_S / 2)
        assert threading.active_count() <= threads + CONNECTIONS_MAX
        assert len(os.listdir("/proc/self/fd")) <= descriptors + HELD + CONNECTIONS_MAX
        assert "process_open_fds" in scrape_in_time(endpoint)
        assert settles(descriptors + HELD), "connections are held that say nothing"
    assert settles(descriptors)


def test_one_that_sends_a_byte_now_and_then_ends_too(endpoint: Endpoint) -> None:
    """A time-out of the socket would begin anew with each."""
    began_s = time.monotonic()
    with connect(endpoint) as slow, pytest.raises(OSError):
        while time.monotonic() < began_s + END_S + SLACK_S:
            slow.sendall(b"G")
            time.sleep(END_S / 4)


def test_connections_end_with_the_endpoint(endpoint: Endpoint) -> None:
    with connect(endpoint) as held:
        time.sleep(0.1)
        endpoint._close()
        assert held.recv(1) == b""
