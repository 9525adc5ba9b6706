"""The gateway under leaving, slow and too many clients; probes, metrics, draining."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator

import anyio
import httpx
import pytest

from gateway_stage import ANSWER, MODEL, Stage, a_gateway, until
from kvass.common.config import GatewayConfig
from kvass.common.membership import ROLES, NodeTable, Peer, State
from kvass.gateway import overview
from kvass.launch.up import _wait_until_whole

pytestmark = pytest.mark.anyio
TOKENS = len(ANSWER.encode())
ASK = {"model": MODEL, "prompt": "x" * 30, "max_tokens": 100}


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with a_gateway(prefills=1) as made:
        yield made


async def post(stage: Stage, path: str, body: object) -> httpx.Response:
    async with httpx.AsyncClient(base_url=stage.url) as client:
        return await client.post(path, json=body)


async def test_no_decode_worker_is_503_and_unhealthy() -> None:
    async with a_gateway(decodes=0) as stage, httpx.AsyncClient(base_url=stage.url) as client:
        response = await client.post("/v1/completions", json=ASK)
        assert response.status_code == 503 and "retry-after" in response.headers
        health = await client.get("/health")
        assert health.status_code == 503 and health.json()["reason"] == {
            "code": "no_decode",
            "message": "no decode worker is ready",
        }


async def test_the_deadline_is_504() -> None:
    config = GatewayConfig(request_timeout_s=0.2)
    async with a_gateway(config=config) as stage:
        stage.decode.before_answer = anyio.sleep_forever
        response = await post(stage, "/v1/completions", ASK)
        assert response.status_code == 504
        assert response.json()["error"]["type"] == "timeout_error"


async def test_too_many_at_once_is_429_and_those_inside_go_on() -> None:
    async with a_gateway(choices_max=2) as stage:
        gate = anyio.Event()
        stage.decode.before_answer = gate.wait
        answers: list[httpx.Response] = []

        async def ask() -> None:
            answers.append(await post(stage, "/v1/completions", ASK | {"n": 2}))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(lambda: len(stage.decode.requests) == 1)
            refused = await post(stage, "/v1/completions", ASK)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            gate.set()
        assert answers[0].status_code == 200
        assert stage.fleet.admission.choices == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("boundary", ["in prefill", "before the first token", "in mid-stream"])
async def test_a_client_that_leaves(stage: Stage, boundary: str, stream: bool) -> None:
    async def stop(position: int) -> None:
        if position == (0 if boundary == "before the first token" else 4):
            await anyio.sleep_forever()

    worker = stage.prefill if boundary == "in prefill" else stage.decode
    worker.before_token = stop
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(post, stage, "/v1/completions", ASK | {"stream": stream})
        if boundary == "in prefill":
            await until(lambda: bool(stage.prefill.requests and stage.decode.requests))
        else:
            await until(lambda: bool(stage.prefill.finished))
        tasks.cancel_scope.cancel()
    await until(lambda: len(stage.decode.cancelled) == 1)
    await until(lambda: stage.fleet.admission.choices == 0)
    if boundary == "in prefill":
        await until(lambda: len(stage.prefill.cancelled) == 1)
    await until(lambda: len(stage.store.released) == 1)
    assert stage.fleet._calls == []


async def test_a_client_that_reads_slowly_holds_nobody(stage: Stage) -> None:
    stage.decode.answer = "y" * 200
    body = ASK | {"max_tokens": 200, "stream": True}
    async with (
        httpx.AsyncClient(base_url=stage.url) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        await until(lambda: len(stage.decode.finished) == 1)
        text = (await response.aread()).decode()
    parts = [json.loads(part[6:]) for part in text.split("\n\n")[:-2]]
    assert "".join(part["choices"][0]["text"] for part in parts) == "y" * 200


async def test_health_cluster_and_metrics(stage: Stage) -> None:
    stage.store.stored = {1, 2}
    await post(stage, "/v1/completions", ASK)
    await post(stage, "/v1/completions", ASK | {"temperature": 5})
    async with httpx.AsyncClient(base_url=stage.url) as client:
        health = await client.get("/health")
        assert health.status_code == 200
        assert health.json()["status"] == "ok"
        reason = health.json()["degraded"][0]
        assert reason["code"] == "no_store" and "no store node is ready" in reason["message"]
        cluster = (await client.get("/v1/cluster")).json()
        text = (await client.get("/metrics")).text
    assert [member["role"] for member in cluster["members"]] == ["prefill", "decode"]
    member = cluster["members"][1]
    assert member["id"] == "decode-0" and member["pid"] == 1 and member["state"] == "ready"
    assert member["address"] == stage.decode.address
    assert cluster["store"] == [{"id": f"store-{i}", "blocks": 2} for i in range(2)]
    assert cluster["model"] == MODEL and cluster["degraded"] == health.json()["degraded"]
    assert 'kvass_requests_total{outcome="ok"} 1.0' in text
    assert 'kvass_requests_total{outcome="invalid"} 1.0' in text
    assert "kvass_time_to_first_token_seconds_count 1.0" in text
    assert f"kvass_inter_token_latency_seconds_count {TOKENS - 1}.0" in text
    assert "kvass_e2e_request_latency_seconds_count 1.0" in text
    assert "kvass_request_prompt_tokens_total 30.0" in text


async def test_a_lost_member_is_shown_until_it_is_forgotten() -> None:
    async with a_gateway(prefills=1) as stage, httpx.AsyncClient(base_url=stage.url) as client:
        table, lost = stage.members.table, stage.prefill
        table.saw_gone(lost.hello.start_id)
        health = (await client.get("/health")).json()
        reasons = {each["code"]: each["message"] for each in health["degraded"]}
        said = reasons["prefill_lost"]
        assert health["status"] == "ok" and lost.address not in str(health)
        assert re.search(r"prefill-0 is lost since \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ: ", said)
        cluster = (await client.get("/v1/cluster")).json()
        shown = next(each for each in cluster["members"] if each["id"] == "prefill-0")
        assert shown["state"] == "lost" and shown["lost_since"] in said
        assert "lost_since" not in cluster["members"][0]
        unknown = await client.delete("/v1/cluster/lost/decode-0")
        assert unknown.status_code == 404 and "prefill-0" in unknown.text
        assert (await client.delete("/v1/cluster/lost/prefill-0")).status_code == 200
        assert "is lost" not in (await client.get("/health")).text


def test_fewer_nodes_than_copies_is_degraded() -> None:
    table = NodeTable(ROLES)
    table.link_up(-60.0)

    def short(now_s: float) -> list[str]:
        said = overview.degraded(table, now_s, 1e9)
        return [each.message for each in said if each.code == "few_copies"]

    def node(name: str, **details: int) -> None:
        state: State = "ready"
        peer = Peer("store", name, name, "h", 1, state, 1.0, "a:1", details=dict(details))
        table.saw_presence(peer, 0.0)

    node("a", replicas=2)
    assert "store.replicas is 2, and the store nodes that take blocks are 1" in short(0.0)[0]
    node("b", replicas=2)
    assert short(0.0) == []
    node("b", replicas=2, draining=1)
    assert len(short(0.0)) == 1
    node("b", replicas=2)
    table.saw_gone("b")
    assert len(short(0.0)) == 1
    assert any(
        e.code == "store_lost" and "store b is lost since 2001-09-09T01:46:40Z" in e.message
        for e in overview.degraded(table, 0.0, 1e9)
    )


def test_a_link_that_is_down_and_a_flash_that_is_gone_are_degraded() -> None:
    table = NodeTable(ROLES)
    table.link_up(-60.0)
    table.saw_presence(Peer("store", "a", "a", "h", 1, "ready", 1.0, "a:1"), 0.0)
    table.saw_load("a", {"flash_off": 1}, 0.0)
    said = dict(overview.degraded(table, 0.0, 1e9))
    assert "store a goes on without its flash" in said["flash_off"]
    assert "broker_down" not in said
    table.saw_load("a", {"visible_blocks": 1}, 1.0)
    table.link_down()
    said = dict(overview.degraded(table, 1.0, 1e9))
    assert "the link to the broker is down" in said["broker_down"]
    assert "flash_off" not in said


async def test_up_waits_for_codes_and_knows_no_sentence() -> None:
    """Of the roles that it started; what else is degraded holds it up no longer."""
    others = [{"code": "no_store", "message": "nobody started one"}]
    waiting = [{"code": "no_prefill", "message": "in other words"}, *others]
    answers = [waiting, waiting, others]

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/health"
        return httpx.Response(200, json={"status": "ok", "degraded": answers.pop(0)})

    transport = httpx.MockTransport(answer)
    with anyio.fail_after(5):
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            await _wait_until_whole(client, {overview.ABSENT["prefill"].code})
    assert answers == []


async def test_draining_lets_answers_end() -> None:
    async with a_gateway() as stage:
        gate = anyio.Event()
        stage.decode.before_answer = gate.wait
        answers: list[httpx.Response] = []

        async def ask() -> None:
            answers.append(await post(stage, "/v1/completions", ASK))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(lambda: len(stage.decode.requests) == 1)
            assert stage.server is not None
            stage.server.should_exit = True
            with anyio.fail_after(5):
                while await _accepts(stage.url):  # noqa: ASYNC110 - a socket has no event
                    await anyio.sleep(0.02)
            gate.set()
        assert answers[0].json()["choices"][0]["text"] == ANSWER


async def _accepts(url: str) -> bool:
    host, _, port = url.removeprefix("http://").rpartition(":")
    try:
        stream = await anyio.connect_tcp(host, int(port))
    except OSError:
        return False
    await stream.aclose()
    return True


def test_the_gateway_loads_neither_torch_nor_a_transport() -> None:
    code = (
        "import sys, kvass.gateway.app\n"
        "print([m for m in sys.modules if m.split('.')[0] in "
        "('torch', 'nixl', 'nixl_cu12', 'transformers')])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.strip() == "[]"
