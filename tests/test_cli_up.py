"""What `kvass up` says of others: members that it did not start, and strangers at its broker."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from bus_stage import PROCESS
from ports import free_port
from test_cli import Cluster, cluster

pytestmark = pytest.mark.process  # on ports that were free a moment ago: one test at a time
ALONE = "kvass: nothing can be asked without the gateway: stopping\n"


def broker_of(up: Cluster) -> str:
    return up.until("kvass: broker on").split()[-1]


@pytest.mark.parametrize("ends_by", ["signal", "the gateway's death"])
def test_members_that_were_started_by_hand_are_named_at_the_end(ends_by: str) -> None:
    with ExitStack() as stack:
        up = stack.enter_context(cluster(free_port()))
        command = [sys.executable, str(PROCESS), broker_of(up)]
        by_hand = []
        for role, member_id in (("store", "gone"), ("prefill", "left"), ("decode", "decode-9")):
            member = stack.enter_context(
                subprocess.Popen([*command, role, member_id, "{}"], stdout=subprocess.PIPE)
            )
            stack.callback(member.kill)
            by_hand.append(member)
            assert member.stdout is not None and b"start_id" in member.stdout.readline()
        up.until("kvass ready")
        by_hand[0].kill()
        by_hand[1].send_signal(signal.SIGINT)  # its goodbye
        for member in by_hand[:2]:
            member.wait(10)
        if ends_by == "signal":
            assert up.end(signal.SIGINT, code=0, within_s=15) < 5
        else:
            up.members()["gateway-0"].kill()
            up.until("kvass: stopped")
            assert up.process.wait(15) == 1
        assert by_hand[2].poll() is None
    last = f"decode-9 (pid {by_hand[2].pid} on this host); stop them by hand\nkvass: stopped\n"
    assert up.said.endswith(f"kvass: started by hand and still running: {last}")
    assert (ALONE in up.said) == (ends_by != "signal")


def test_strangers_at_the_broker_are_nobodys_concern() -> None:
    with cluster(free_port()) as up:
        host, port = broker_of(up).split(":")
        up.until("kvass ready")
        words = (
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"",
            b"\x10\xff\xff\xff\xff\xff",
            b"\x16\x03\x01",
        )
        for said in words:
            for _ in range(5):
                with socket.create_connection((host, int(port)), timeout=5) as stranger:
                    stranger.sendall(said)
                    stranger.shutdown(socket.SHUT_WR)
                    while stranger.recv(100):
                        pass
        up.end(signal.SIGTERM, code=0, within_s=15)
    lines = [
        line for line in up.said.splitlines() if not line.startswith("kvass") and "|" not in line
    ]
    assert lines == []
    assert "by hand" not in up.said
