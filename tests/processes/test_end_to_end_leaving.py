"""Clients that leave at every boundary, and whole clusters that do: nothing is left anywhere."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from cluster import SHARED_MEMORY, STOP_S, Cluster, assert_gone, cluster, events, listening
from cluster_control import BLOCK, Control

pytestmark = [pytest.mark.process, pytest.mark.model]

LONG = 1504  # tokens: three chunks, so a job can be met in its middle
RELEASE_S = 8.0  # a chunk or step, a push, a round of calls; on a machine that is busy


@pytest.fixture(scope="module")
def up() -> Iterator[Cluster]:
    with cluster() as running:
        yield running


@pytest.fixture(scope="module")
def control(up: Cluster) -> Control:
    return Control(up)


@pytest.mark.fault(number=2)
@pytest.mark.fault(number=6)
@pytest.mark.parametrize("stored", [0, 1, LONG // BLOCK])
def test_a_client_that_leaves_before_the_first_token(
    up: Cluster, control: Control, stored: int
) -> None:
    """With so many blocks in the store: prefill has just begun, is at it, or has just ended."""
    prompt, other = control.prompt(LONG, seed=stored), control.prompt(50, seed=77)

    def is_met() -> bool:
        there = sum(stop - first for first, stop in control.stored(prompt))
        return there >= stored if stored else up.used_blocks("prefill-0") > 0

    with ThreadPoolExecutor(1) as threads:
        streaming = threads.submit(up.stream, other, max_tokens=50)
        with socket.create_connection(("127.0.0.1", up.port)) as client:
            send_request(client, up.body(prompt, max_tokens=400, stream=True))
            up.until(is_met, f"{stored} blocks of the prompt in the store")
        undisturbed = streaming.result()
    up.until_idle(within_s=RELEASE_S)
    assert up.ask(other, max_tokens=50, cache_salt="alone").said == undisturbed.said


def send_request(client: socket.socket, body: dict[str, object]) -> None:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    client.sendall(head.encode() + content)


@pytest.mark.fault(number=6)
def test_clients_that_leave_in_mid_stream(up: Cluster, control: Control) -> None:
    prompts = [control.prompt(100, seed=80 + i) for i in range(4)]

    def leave_after(tokens: int) -> str:
        body = up.body(prompts[tokens // 3], max_tokens=500, stream=True)
        with up.http.stream("POST", "/v1/completions", json=body) as response:
            pieces = events(response)
            return "".join(next(pieces)["choices"][0]["text"] for _ in range(tokens))

    with ThreadPoolExecutor(4) as threads:
        staying = threads.submit(up.stream, prompts[3], max_tokens=50)
        begun = list(threads.map(leave_after, [1, 4, 7]))
        stayed = staying.result()
    up.until_idle(within_s=RELEASE_S)
    assert up.ask(prompts[3], max_tokens=50, cache_salt="alone").said == stayed.said
    for prompt, text in zip(prompts, begun, strict=False):
        assert up.ask(prompt, max_tokens=30).text.startswith(text)


def test_a_cluster_that_is_interrupted_in_mid_stream_leaves_nothing() -> None:
    """By Ctrl-C; every other cluster of these tests is stopped by SIGTERM, and checked alike."""
    shared_memory = set(SHARED_MEMORY.iterdir())
    with cluster("--max-model-len", "2048") as up:
        processes, ports = up.processes(), listening(up)
        assert len(processes) == 4
        with ThreadPoolExecutor(1) as threads:
            broken = threads.submit(first_error, up, Control(up).prompt(300, seed=1))
            up.until(lambda: up.used_blocks("decode-0") > 0, "a stream")
            assert up.end(signal.SIGINT) == 0
            assert_gone(processes, ports, shared_memory, within_s=0)
            broken.result(timeout=STOP_S)
    assert "kvass: stopped\n" in up.lines
    # The gateway lets answers end; whoever stops a whole cluster does not wait for long ones.
    late = [line for line in up.lines if "did not leave in time" in line]
    assert late in ([], ["kvass: gateway-0 did not leave in time: killed\n"])
    assert "Traceback" not in "".join(up.lines)


def first_error(up: Cluster, prompt: list[int]) -> str:
    """Stream until the cluster breaks it off, and return how."""
    try:
        up.stream(prompt, max_tokens=1700)
    except Exception as error:
        return repr(error)
    raise AssertionError("the stream ended as if nothing had happened")


def test_members_of_a_cluster_that_is_killed_end_by_themselves() -> None:
    shared_memory = set(SHARED_MEMORY.iterdir())
    with cluster("--max-model-len", "2048") as up:
        processes, ports = up.processes(), listening(up)
        with ThreadPoolExecutor(1) as threads:
            broken = threads.submit(first_error, up, Control(up).prompt(300, seed=2))
            up.until(lambda: up.used_blocks("decode-0") > 0, "a stream")
            assert up.end(signal.SIGKILL) == -signal.SIGKILL
            _, alive = psutil.wait_procs(processes, timeout=STOP_S)
            assert not alive
            broken.result(timeout=STOP_S)
        assert_gone(processes, ports, shared_memory, within_s=0)
