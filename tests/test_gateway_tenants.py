"""API keys: who is let in, whose tenant a request is, and that tenants never share private KV."""

from __future__ import annotations

from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import httpx
import openai
import pytest

from gateway_stage import MODEL, Stage, a_gateway
from kvass.common.errors import Invalid
from kvass.gateway.api_keys import ApiKeys, load_keys

pytestmark = pytest.mark.anyio
ALICE, BOB, BOB_TOO = "sk-alice-0123456789abcdef", "sk-bob-0123456789abcdef", "sk-bob-fedcba987654"
ASK = {"model": MODEL, "prompt": "x" * 30, "max_tokens": 100}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello, whoever you are"}]}


def keys_file(tmp_path: Path, text: str) -> str:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    file.chmod(0o600)
    return str(file)


def three_keys(tmp_path: Path) -> ApiKeys:
    digest = sha256(BOB_TOO.encode()).hexdigest()
    return load_keys(keys_file(tmp_path, f'alice=["{ALICE}"]\nbob=["{BOB}", "sha256:{digest}"]'))


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with a_gateway(prefills=1, keys=three_keys(tmp_path)) as made:
        yield made


async def post(stage: Stage, path: str, body: object, key: str | None) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=stage.url, headers=headers) as client:
        return await client.post(path, json=body)


@pytest.mark.parametrize("key", [None, "sk-wrong-0123456789abcdef", ALICE[:-1], "alice"])
async def test_without_a_right_key_nothing_is_answered(stage: Stage, key: str | None) -> None:
    for path, body in (("/v1/completions", ASK), ("/v1/chat/completions", CHAT)):
        response = await post(stage, path, body, key)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        error = response.json()["error"]
        assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
        assert not key or key not in response.text
    assert stage.decode.requests == stage.prefill.requests == []
    async with httpx.AsyncClient(base_url=stage.url) as client:
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get(f"/v1/models/{MODEL}")).status_code == 401
        assert (await client.get("/health")).status_code == 200


async def test_the_official_client_is_let_in_and_told(stage: Stage) -> None:
    url = f"{stage.url}/v1"
    async with openai.AsyncOpenAI(api_key=ALICE, base_url=url, max_retries=0) as client:
        assert (await client.models.list()).data[0].id == MODEL
    async with openai.AsyncOpenAI(api_key="sk-wrong", base_url=url, max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError, match="Incorrect API key"):
            await client.models.list()


async def test_the_tenant_of_the_key_reaches_workers_and_names(stage: Stage) -> None:
    for path, body in (("/v1/completions", ASK), ("/v1/chat/completions", CHAT)):
        for key in (ALICE, BOB, BOB_TOO):
            assert (await post(stage, path, body, key)).status_code == 200
    generates, prefills = stage.decode.generates(), stage.prefill.prefills()
    whose = ["alice", "bob", "bob"] * 2
    assert [each.tenant for each in generates] == whose
    assert [each.tenant for each in prefills] == ["alice", "bob"] * 2  # his other key found it
    assert [each.salt for each in prefills[:2]] == [each.salt for each in generates[:2]]
    assert generates[0].salt != generates[1].salt == generates[2].salt != b""
    # What the gateway looks up: not one name in common between tenants, all between bob's keys.
    alice, bob, bob_too = (set(chain.keys) for chain in stage.store.lookups[:3])
    assert not alice & bob and bob == bob_too


async def test_a_clients_own_salt_never_makes_it_another_tenant(stage: Stage) -> None:
    for salt in ("", "bob", "x"):
        await post(stage, "/v1/completions", ASK | {"cache_salt": salt}, ALICE)
    await post(stage, "/v1/completions", ASK | {"user": "alice", "tenant": "alice"}, BOB)
    await post(stage, "/v1/completions", ASK, BOB)
    requests = stage.decode.generates()
    assert [each.tenant for each in requests[:3]] == ["alice"] * 3
    assert {each.tenant for each in requests[3:]} == {"bob"}
    assert len({each.salt for each in requests}) == 4


async def test_the_cluster_is_shown_to_operators_alone(tmp_path: Path) -> None:
    text = f'alice=["{ALICE}"]\n[operators]\non_call=["{BOB}"]'
    async with a_gateway(keys=load_keys(keys_file(tmp_path, text))) as stage:

        async def status(path: str, key: str, method: str = "GET") -> int:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            async with httpx.AsyncClient(base_url=stage.url, headers=headers) as client:
                return (await client.request(method, path)).status_code

        for path, method in (("/v1/cluster", "GET"), ("/v1/cluster/lost/d", "DELETE")):
            assert await status(path, "", method) == 401
            assert await status(path, "sk-wrong-0123456789abcdef", method) == 401
            assert await status(path, ALICE, method) == 403
        assert await status("/v1/cluster", BOB) == 200
        assert await status("/v1/cluster/lost/d", BOB, "DELETE") == 404
        assert (await post(stage, "/v1/completions", ASK, BOB)).status_code == 403
        assert await status("/health", "") == await status("/metrics", "") == 200


async def test_where_no_operator_is_named_the_cluster_is_shown_to_nobody(stage: Stage) -> None:
    headers = {"authorization": f"Bearer {ALICE}"}
    async with httpx.AsyncClient(base_url=stage.url, headers=headers) as client:
        response = await client.get("/v1/cluster")
    assert response.status_code == 403 and "[operators]" in response.json()["error"]["message"]


async def test_without_a_file_no_key_is_asked_for() -> None:
    async with a_gateway(keys=load_keys("")) as stage:
        assert (await post(stage, "/v1/completions", ASK, "anything")).status_code == 200
        assert stage.decode.generates()[0].tenant == ""


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "0 keys"),
        ("alice = 3", "a list of its keys"),
        ('alice = ["short"]', "16 characters"),
        ('alice = ["sha256:abc"]', "64 hex digits"),
        (f'alice = ["{ALICE}"]\nbob = ["{ALICE}"]', "the same key"),
        ("alice = [", "is no TOML"),
        (f'x = ["{ALICE}"]\ny ? 3', "is no TOML in line 2"),
        (f'alice = ["{ALICE}"]\n"alice" = ["{BOB}"]', 'names "alice" twice, in lines 1 and 2'),
        (f'a = ["{ALICE}"]\n[operators]\na = [\n"{BOB}"]\na = ["x"]', "in lines 3 and 5"),
        (f'operators = ["{ALICE}"]', "operators is no tenant's name"),
        (f'a = ["{ALICE}"]\n[operators]\nb = ["{ALICE}"]', "the operator 'b' have the same key"),
        (f'[operators]\nb = ["{ALICE}"]', "0 keys"),
    ],
)
def test_a_bad_file_is_refused_and_no_key_is_shown(
    tmp_path: Path, text: str, complaint: str
) -> None:
    with pytest.raises(Invalid, match=complaint) as refused:
        load_keys(keys_file(tmp_path, text))
    assert ALICE not in str(refused.value)


def test_a_file_that_others_can_read_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = Path(keys_file(tmp_path, f'alice = ["{ALICE}"]'))
    file.chmod(0o644)
    load_keys(str(file))
    assert "chmod 600" in caplog.text and ALICE not in caplog.text
