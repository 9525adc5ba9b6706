"""The program: its help, its messages, and the supervisor over members in real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvass.common import config
from kvass.launch.status import root_of
from kvass.launch.up import setting

pytestmark = pytest.mark.process  # on ports that were free a moment ago: one test at a time
FAKE = Path(__file__).parent / "fake_cluster.py"
KVASS = (sys.executable, "-m", "kvass.launch.cli")


def kvass(*arguments: str, code: int = 0, within_s: float = 30, **environment: str) -> str:
    """Run the program to its end; return all that it said."""
    done = subprocess.run(
        [*KVASS, *arguments], capture_output=True, text=True, timeout=within_s,
        env=os.environ | {"COLUMNS": "200", "NO_COLOR": "1"} | environment,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ((), ("up", "gateway", "prefill", "decode", "store", "status")),
        (("up",), ("--prefill", "--kv-dtype", "--max-model-len", "--port", "--no-prefix-reuse")),
        (("gateway",), ("--host", "--port", "--broker")),
        (("prefill",), ("--pool-share", "--chunk-tokens", "--id")),
        (("decode",), ("--pool-share", "--model", "--set")),
        (("store",), ("--slab-bytes", "--broker", "--config", "--standalone", "--port")),
        (("status",), ("--url", "--store", "--node", "--json")),
    ],
)
def test_help_names_what_can_be_set(command: tuple[str, ...], words: tuple[str, ...]) -> None:
    text = kvass(*command, "--help")
    assert all(word in text for word in words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("up", "--kv-dtype", "fp4"), "cluster.kv_dtype"),
        (
            ("store", "--set", "store.hold=1"),
            "no setting store.hold (did you mean store.hold_s?); store has slab_bytes, ",
        ),
        (("store", "--slab-bytes", "much"), "store.slab_bytes is 'much'; expected bytes"),
        (("store", "--host", "203.0.113.9"), "203.0.113.9: it is no address of this host"),
        (("prefill", "--host", "203.0.113.9"), "(setting host)"),
        (("prefill", "--set", "prefill.threads=-3"), "prefill.threads is -3"),
        (("gateway", "--set", "host=203.0.113.9"), "(setting host)"),
        (("up", "--set", "host=203.0.113.9"), "(setting host)"),
        (("up", "--host", "203.0.113.9"), "(setting gateway.host)"),
        (("store", "--set", "store.port=70000"), "store.port is 70000; expected 0 to 65535"),
        (("store", "--set", "store.scrub_s=-1"), "store.scrub_s is -1.0; expected 0 to"),
        (("store", "--broker", "mqtt://127.0.0.1:1"), "without a scheme"),
        (("store", "--broker", "nowhere"), "cluster.broker is 'nowhere'; expected host:port"),
        (("store", "--id", "a/b", "--broker", "127.0.0.1:1"), "member id is 'a/b'"),
        (("up", "--config", "/nonexistent.toml"), "/nonexistent.toml"),
        (("up", "--broker", "nowhere"), "cluster.broker is 'nowhere'; expected host:port"),
        (("up", "--broker", "127.0.0.1:1"), "the broker 127.0.0.1:1 cannot be reached"),
        (("up", "--model", "/nonexistent"), "/nonexistent"),
        (("up", "--set", "store.standalone=true"), "`kvass store --standalone` runs one by itself"),
        (("store", "--standalone", "--broker", "127.0.0.1:1"), "cluster.broker is '127.0.0.1:1'"),
        (("status", "--node", "127.0.0.1:1", "--url", "127.0.0.1:1"), "give --node"),
        (("status", "--node", "7600"), "a node's address is '7600'; expected host:port"),
        (("status", "--set", "gateway.prot=1"), "no setting gateway.prot"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(
    arguments: tuple[str, ...], words: str, port: int
) -> None:
    extra = ("--port", str(port)) if arguments[0] == "up" else ()
    text = kvass(*arguments, *extra, code=2)
    assert words in text and "Traceback" not in text
    assert len(text.strip().splitlines()) == 1


def test_a_port_that_is_taken_is_said_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = str(server.getsockname()[1])
        text = kvass("up", "--port", number, code=2)
    assert f"port {number} on 127.0.0.1" in text and "KVASS_PORT" in text
    assert "broker" not in text


def test_the_environment_names_the_port_and_settings_win_over_it(port: int) -> None:
    named = str(port)
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = str(server.getsockname()[1])
        assert f"port {taken} on" in kvass("up", code=2, KVASS_PORT=taken)
        for own in (("--port", taken), ("--set", f"gateway.port={taken}")):
            assert f"port {taken} on" in kvass("up", *own, code=2, KVASS_PORT=named)
    assert f"http://127.0.0.1:{named}." in kvass("status", code=1, KVASS_PORT=named)
    assert f"http://127.0.0.1:{named}." in kvass("status", "--set", f"gateway.port={named}", code=1)
    assert "KVASS_PORT" in kvass("gateway", "--help")


def test_log_lines_begin_with_the_time_in_utc() -> None:
    code = "import logging; from kvass.launch.role import configure_logging as configure; "
    code += "configure(); logging.getLogger('kvass.x').info('seen')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env=os.environ | {"TZ": "Asia/Tokyo"},
    )  # fmt: skip
    said_at, rest = done.stderr.split(" ", 1)
    assert rest == "INFO kvass.x: seen\n"
    said = datetime.strptime(said_at, "%Y-%m-%dT%H:%M:%S.%f%z")
    assert abs(datetime.now(UTC) - said) < timedelta(minutes=1) and len(said_at) == 24


@given(st.text(st.characters(exclude_categories=("Cs", "Cc"))))
def test_settings_survive_their_quoting(value: str) -> None:
    loaded = config.load(None, [setting("cluster.served_model_name", value)])
    assert loaded.cluster.served_model_name == value


CLUSTER = {
    "members": [
        {"role": "gateway", "id": "g-0", "pid": 7, "address": "127.0.0.1:8000", "state": "ready",
         "load": {"running": 2}},
        {"role": "decode", "id": "d-0", "pid": 8, "address": "127.0.0.1:9", "state": "lost",
         "load": {"prefill_tokens_s": 1234.5678}},
    ],
    "store": [{"id": "store-7", "visible_blocks": 12, "visible_bytes": 3 << 20}],
    "degraded": [{"code": "no_prefill", "message": "no prefill worker is ready"}],
}  # fmt: skip


@contextmanager
def answering(status: int, body: bytes, kind: str = "application/json") -> Iterator[str]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_status_is_a_table() -> None:
    with answering(200, json.dumps(CLUSTER).encode()) as url:
        text = kvass("status", "--url", url)
    for word in (
        "gateway",
        "g-0",
        "127.0.0.1:8000",
        "g-0       2",
        "lost",
        "1235",
        "store-7",
        " 12 ",
        "3 MiB",
        "no prefill worker is ready",
    ):
        assert word in text


def test_status_of_the_store_says_who_is_well_and_exits_by_it() -> None:
    with answering(200, json.dumps(CLUSTER).encode()) as url:
        text = kvass("status", "--store", "--url", url)
        assert "1 store node, 1 well" in text and "store-7" in text
        members = json.loads(kvass("status", "--json", "--url", url))["members"]
        assert [each["id"] for each in members] == ["g-0", "d-0"]
    silent = {"role": "store", "id": "store-9", "state": "ready"}
    ill = CLUSTER | {"members": [silent]}
    with answering(200, json.dumps(ill).encode()) as url:
        text = kvass("status", "--store", "--url", url, code=1)
        assert "store-9 does not answer" in text and "store-7 does" not in text
        nodes = json.loads(kvass("status", "--store", "--json", "--url", url, code=1))
        assert {each["id"]: each["is"] for each in nodes} == {
            "store-7": "well",
            "store-9": "silent",
        }


@pytest.mark.parametrize("text", ["127.0.0.1:9", "http://127.0.0.1:9/", "127.0.0.1:9/v1/"])
def test_a_gateway_may_be_named_as_people_do(text: str) -> None:
    assert root_of(text) == "http://127.0.0.1:9"


@pytest.mark.parametrize("asked", [(), ("--store",)])
def test_what_is_wrong_is_not_among_what_a_program_reads(asked: tuple[str, ...], port: int) -> None:
    command = [*KVASS, "status", *asked, "--json", "--port", str(port)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stdout) == (1, "") and "Nothing answers" in done.stderr


def test_status_says_when_nothing_runs(port: int) -> None:
    text = kvass("status", "--url", f"http://127.0.0.1:{port}", code=1)
    assert all(
        words in text for words in ("Nothing answers", "kvass up", "KVASS_PORT", "its broker")
    )
    with answering(200, b"<html>", "text/html") as url:
        text = kvass("status", "--url", url, code=1)
        words = "is not a Kvass gateway: it answers 200 to GET /v1/cluster (text/html)"
        assert words in text and "Expecting" not in text
    with answering(404, b"") as url:
        assert "is not a Kvass gateway: it answers 404" in kvass("status", "--url", url, code=1)


@dataclass
class Cluster:
    """A running fake cluster. Mutable: `said`."""

    process: subprocess.Popen[str]
    said: str = ""

    def until(self, words: str) -> str:
        """Read until a line has these words; return it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            if words in line:
                return line
        raise AssertionError(self.said)

    def members(self) -> dict[str, psutil.Process]:
        """Return the members by id."""
        children = psutil.Process(self.process.pid).children()
        return {child.cmdline()[child.cmdline().index("--id") + 1]: child for child in children}

    def end(self, number: signal.Signals, *, code: int, within_s: float) -> float:
        """Send a signal, read all, and return the seconds until the end."""
        started_s = time.monotonic()
        self.process.send_signal(number)
        self.said += self.process.communicate(timeout=within_s)[0]
        assert self.process.returncode == code, self.said
        return time.monotonic() - started_s


@contextmanager
def cluster(port: int, *arguments: str, wrong: str = "") -> Iterator[Cluster]:
    with subprocess.Popen(
        [sys.executable, "-W", "error", str(FAKE), "up", "--port", str(port), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"KVASS_FAKE": wrong},
    ) as process:  # fmt: skip
        try:
            yield Cluster(process)
        finally:
            process.kill()


def assert_gone(processes: list[psutil.Process], within_s: float) -> None:
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    assert not alive, alive


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_starts_everything_says_so_and_stops_it(port: int, number: signal.Signals) -> None:
    with cluster(port, "--prefill", "2", "--store", "0") as up:
        line = up.until("kvass ready")
        assert line == f"kvass ready: http://127.0.0.1:{port}\n"
        assert re.search(r"kvass: started in \d+\.\d s; seconds: model .*decode-0 \d", up.said)
        members = up.members()
        assert sorted(members) == ["decode-0", "gateway-0", "prefill-0", "prefill-1"]
        assert up.end(number, code=0, within_s=15) < 5
        assert_gone(list(members.values()), 0)
    assert "Traceback" not in up.said and "WARNING" not in up.said
    assert up.said.endswith("kvass: stopped\n")
    for member_id in members:
        assert re.search(rf"^{member_id} +\| here is {member_id}$", up.said, re.MULTILINE)


def test_a_broker_that_is_named_is_used_whatever_its_name(port: int) -> None:
    """Also where members look for one by default: whoever names it means it."""
    with ExitStack() as stack:
        try:
            stack.enter_context(socket.create_server(("127.0.0.1", 1883)))
        except OSError:
            pass  # somebody listens there already: as good
        up = stack.enter_context(cluster(port, "--broker", config.DEFAULT_BROKER))
        assert up.until("broker on") == f"kvass: broker on {config.DEFAULT_BROKER}\n"
        up.until("kvass ready")
        up.end(signal.SIGTERM, code=0, within_s=15)


def test_members_end_when_their_supervisor_is_killed(port: int) -> None:
    with cluster(port) as up:
        up.until("kvass ready")
        members = list(up.members().values())
        up.process.kill()
        assert_gone(members, 5)


def test_a_member_that_dies_is_told_and_the_rest_goes_on(port: int) -> None:
    with cluster(port) as up:
        up.until("kvass ready")
        members = up.members()
        members["prefill-0"].kill()
        told = up.until("ended with signal SIGKILL")
        assert "prefill-0" in told and "`kvass prefill --id prefill-0 --broker 127.0.0.1:" in told
        assert sorted(up.members()) == ["decode-0", "gateway-0", "store-0"]
        up.process.send_signal(signal.SIGTERM)
        up.until("kvass: stopped")
        assert up.process.wait(15) == 0
    assert up.said.count("here is prefill-0") == 1, "a line is said once, when it comes"


def test_the_cluster_ends_with_its_gateway(port: int) -> None:
    with cluster(port) as up:
        up.until("kvass ready")
        members = list(up.members().values())
        up.members()["gateway-0"].kill()
        assert up.process.wait(15) == 1
        assert_gone(members, 0)


def test_a_member_that_cannot_start_ends_the_start(port: int) -> None:
    with cluster(port, wrong="decode-0:refuse") as up:
        assert up.process.wait(30) == 1
        assert up.process.stdout is not None
        said = up.process.stdout.read()
    assert "kvass ready" not in said and "Traceback" not in said
    assert "decode-0" in said and "kvass: it may not start" in said


def test_a_member_that_hangs_is_killed(port: int) -> None:
    with cluster(port, wrong="decode-0:hang") as up:
        up.until("kvass ready")
        members = list(up.members().values())
        assert up.end(signal.SIGINT, code=0, within_s=20) < 12
        assert_gone(members, 0)
    assert "decode-0 did not leave in time: killed" in up.said


def test_a_second_signal_does_not_wait(port: int) -> None:
    with cluster(port, wrong="decode-0:hang") as up:
        up.until("kvass ready")
        up.process.send_signal(signal.SIGINT)
        up.until("stopping")
        up.process.send_signal(signal.SIGTERM)  # at once: the same wish, by another way
        time.sleep(1)
        assert up.process.poll() is None
        assert up.end(signal.SIGINT, code=0, within_s=20) < 3


def test_output_that_nobody_reads_holds_up_nothing(port: int) -> None:
    with cluster(port, wrong="store-0:chatter") as up:
        time.sleep(3)  # nobody reads the pipe, which is full after 64 KiB
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            assert b"200 OK" in client.recv(100)
        members = list(up.members().values())
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(15) == 0
        assert_gone(members, 0)
