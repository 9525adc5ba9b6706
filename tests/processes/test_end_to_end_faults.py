"""Members that are killed: answers come all the same, and are the same."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster import Cluster, cluster
from cluster_control import BLOCK, Control

pytestmark = [pytest.mark.process, pytest.mark.model]

LONG = 1504
LOST_S = 12.0  # 3 s of silence, on a machine that is busy


def until_lost(up: Cluster, member_id: str) -> None:
    """Wait until the gateway shows a member as lost, or not at all."""
    up.until(
        lambda: member_id not in [each["id"] for each in up.members()],
        f"{member_id} is lost",
        within_s=LOST_S,
    )


def resumed(up: Cluster) -> float:
    """Return how many streams the gateway had to resume on another decode worker."""
    found = re.search(r"^kvass_\w*resumed_total (\S+)$", up.http.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def status(up: Cluster) -> str:
    """Return what `kvass status` prints."""
    return subprocess.run(
        [sys.executable, "-m", "kvass.launch.cli", "status", "--url", up.url],
        check=True, capture_output=True, text=True, timeout=60,
    ).stdout  # fmt: skip


@pytest.mark.fault(number=29)
def test_a_prefill_worker_killed_in_mid_job_and_missed_after_that() -> None:
    with cluster() as up:
        control = Control(up)
        prompt = control.prompt(LONG, seed=1)
        cold = up.ask(prompt, cache_salt="cold")
        other = control.prompt(40, seed=3)
        undisturbed = up.ask(other, max_tokens=100)
        with ThreadPoolExecutor(2) as threads:
            beside = threads.submit(up.stream, other, max_tokens=100)
            asking = threads.submit(up.stream, prompt)
            up.until(lambda: bool(control.stored(prompt)), "the job's first blocks are stored")
            assert not beside.done()
            up.kill("prefill-0")
            answer = asking.result()
            assert beside.result().said == undisturbed.said
        assert answer.said == cold.said
        assert resumed(up) == 0, "the other stream never left its worker"
        # What the dead worker computed of the prompt cannot be known: all of it, at worst.
        assert answer.cached_tokens == 0
        until_lost(up, "prefill-0")
        assert not re.search(r"prefill-0.*ready", status(up))
        assert re.search(r"decode-0.*ready", status(up))
        health = up.http.get("/health").json()
        assert health["status"] == "ok" and health["degraded"][0]["code"] == "no_prefill"

        without = control.prompt(300, seed=2)
        assert up.ask(without).cached_tokens == 0
        assert up.ask(prompt).said == cold.said
        up.until_idle()


@pytest.mark.fault(number=29)
@pytest.mark.fault(number=30)
@pytest.mark.fault(number=31)
@pytest.mark.fault(number=33)
def test_members_of_a_bigger_cluster_are_killed_one_by_one() -> None:
    """Two prefill, two decode, three stores, over TCP: one of each goes, in mid-work."""
    counts = ("--prefill", "2", "--decode", "2", "--store", "3")
    with cluster(*counts, "--set", "transport.kind=tcp") as up:
        control = Control(up)
        assert len(up.members()) == 8
        prompts = [control.prompt(size, seed=size) for size in (1008, 700, 200)]
        cold = [up.ask(prompt, cache_salt="cold") for prompt in prompts]
        a_block_of_one_decode_worker_serves_the_other(up, control)
        a_prefill_worker_dies_and_the_other_takes_over(up, control, prompts[0], cold[0].said)
        a_store_node_dies_and_its_blocks_are_misses(up, control, prompts[1], cold[1].said)
        a_decode_worker_hangs_and_comes_back(up, prompts[2])
        a_decode_worker_dies_and_the_stream_goes_on(up, prompts[2])
        for prompt, answer in zip(prompts, cold, strict=True):
            assert up.ask(prompt).said == answer.said
        assert len(up.members()) == 5
        up.until_idle(within_s=30)


def test_workers_that_are_stopped_in_order_are_no_warning() -> None:
    with cluster("--decode", "2") as up:
        control = Control(up)
        stopped = a_stream_goes_on_after(up, control.prompt(40, seed=4), signal.SIGTERM)
        prompt = control.prompt(LONG, seed=5)
        with ThreadPoolExecutor(1) as threads:
            asking = threads.submit(up.stream, prompt)
            up.until(lambda: bool(control.stored(prompt)), "the job's first blocks are stored")
            up.kill("prefill-0", signal.SIGTERM)
            asking.result()
        said = [line for line in up.lines if line.startswith("gateway-0")]
        for name in (stopped, "prefill-0"):
            assert any(f" on {name}: {name} is leaving" in line for line in said)
        assert not [line for line in said if "WARNING" in line]


def a_block_of_one_decode_worker_serves_the_other(up: Cluster, control: Control) -> None:
    prompt = control.prompt(200, seed=3)
    first, computed = control.generate("decode-0", prompt, 40)
    assert computed == [(0, 200)]
    there = (len(prompt) + len(first) - 1) // BLOCK * BLOCK
    turn = [*prompt, *first, 5, 6, 7]
    control.until_stored(turn[:there])
    second, computed = control.generate("decode-1", turn, 16)
    assert computed == [(there, len(turn))]
    again = up.ask(turn, cache_salt="alone")
    assert control.tokenizer.decode(second) == again.text


def a_prefill_worker_dies_and_the_other_takes_over(
    up: Cluster, control: Control, prompt: list[int], said: tuple[str, str, int]
) -> None:
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(up.stream, prompt)
        killed = the_busy_one(up, "prefill")
        up.until(lambda: bool(control.stored(prompt)), "the job's first blocks are stored")
        up.kill(killed)
        assert asking.result().said == said
    until_lost(up, killed)


def a_store_node_dies_and_its_blocks_are_misses(
    up: Cluster, control: Control, prompt: list[int], said: tuple[str, str, int]
) -> None:
    assert up.ask(prompt).said == said
    control.forget()
    up.kill("store-1")
    unsure = up.ask(prompt)  # the dead node may not be known as such yet
    assert unsure.said == said
    until_lost(up, "store-1")
    control.forget()
    assert up.ask(prompt).said == said
    control.forget()
    # What was lost has new homes by now.
    control.until_stored(prompt)
    assert up.ask(prompt).cached_tokens == len(prompt) // BLOCK * BLOCK - (len(prompt) % BLOCK == 0)


def a_decode_worker_hangs_and_comes_back(up: Cluster, prompt: list[int]) -> None:
    """SIGSTOP looks like death to everybody else, and its victim goes on as if nothing was."""
    stopped = a_stream_goes_on_after(up, prompt, signal.SIGSTOP)
    up.kill(stopped, signal.SIGCONT)
    up.until(lambda: stopped in ids(up, "decode"), f"{stopped} is back", within_s=LOST_S)
    up.until_idle(within_s=30)


def a_decode_worker_dies_and_the_stream_goes_on(up: Cluster, prompt: list[int]) -> None:
    killed = a_stream_goes_on_after(up, prompt, signal.SIGKILL)
    until_lost(up, killed)
    assert f"kvass: {killed} (pid" in "".join(up.lines)


def a_stream_goes_on_after(up: Cluster, prompt: list[int], number: signal.Signals) -> str:
    """Signal the decode worker of a stream in its middle; return its id, once the stream is
    whole."""
    expected = up.ask(prompt, max_tokens=40, cache_salt=number.name)
    up.until_idle(within_s=30)
    hit: list[str] = []
    pieces: list[str] = []

    def hit_after_some(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 12:
            hit.append(the_busy_one(up, "decode"))
            up.kill(hit[0], number)

    resumed = up.stream(prompt, max_tokens=40, seen=hit_after_some)
    assert hit and resumed.said == expected.said
    return hit[0]


def the_busy_one(up: Cluster, role: str) -> str:
    """Return the worker of a role that has blocks in use, once there is exactly one."""
    busy: list[str] = []

    def is_found() -> bool:
        busy[:] = [each for each in ids(up, role) if up.used_blocks(each)]
        return len(busy) == 1

    up.until(is_found, f"one {role} worker is at work")
    return busy[0]


def ids(up: Cluster, role: str) -> Sequence[str]:
    return [each["id"] for each in up.members(role)]
