"""The gateway's whole process, over a real broker: joins, serves, is refused, drains."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gateway_stage import ANSWER, ScriptedWorker, until
from kvass.common import config, secret
from kvass.common.errors import Invalid
from kvass.common.member import Member
from kvass.common.model.identity import worker_fields
from kvass.common.model.spec import load_spec, tensor_shapes
from kvass.gateway.app import serve, served_name
from kvass.gateway.server import bind, is_loopback
from kvass.launch.broker import run_broker
from ports import free_port
from trust import SECRET

pytestmark = [pytest.mark.anyio, pytest.mark.process]  # on ports that were free just now
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
DEVICE = "cpu of another kind than this one"
ASK = {"model": "tiny", "prompt": "hello", "max_tokens": 60}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 16 numbers a token whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    facts = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 16,
        "vocab_size": len(BYTES),
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(facts))
    shapes = tensor_shapes(load_spec(folder))
    save_file(
        {name: np.zeros(shape, np.float32) for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    inner = Tokenizer(models.BPE(vocab={each: i for i, each in enumerate(BYTES)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.save(str(folder / "tokenizer.json"))
    return folder


@asynccontextmanager
async def a_worker(made: config.Config, model_dir: Path) -> AsyncIterator[ScriptedWorker]:
    """A scripted decode worker, announced by a real member."""
    worker = ScriptedWorker("decode", 0)
    fields = worker_fields(model_dir, load_spec(model_dir), made.cluster, DEVICE)
    async with Member(
        made,
        role="decode",
        member_id="decode-0",
        cluster_fields=fields,
        load=lambda: {"running": 0},
    ) as member:
        worker.own_hello = member.hello
        async with anyio.create_task_group() as tasks:
            await tasks.start(worker.serve)
            await member.announce(worker.address)
            yield worker
            tasks.cancel_scope.cancel()


async def test_a_gateway_serves_and_drains(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(secret.VARIABLE, SECRET)
    broker, port = f"127.0.0.1:{free_port()}", free_port()
    made = config.load(
        None,
        [
            f"cluster.broker={broker!r}",
            f"cluster.model={str(model_dir)!r}",
            f"gateway.port={port}",
        ],
    )
    gate = anyio.Event()
    async with (
        run_broker(broker),
        a_worker(made, model_dir) as worker,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
        anyio.create_task_group() as tasks,
    ):
        with anyio.fail_after(20):
            address = await tasks.start(partial(serve, made, member_id="gateway-0"))
            assert address == f"127.0.0.1:{port}"
            with anyio.fail_after(10):
                while (await client.get("/health")).status_code != 200:  # noqa: ASYNC110
                    await anyio.sleep(0.05)
        answer = (await client.post("/v1/completions", json=ASK)).json()
        assert answer["choices"][0]["text"] == ANSWER
        overview = (await client.get("/v1/cluster")).json()
        members = overview["members"]
        known = worker_fields(model_dir, load_spec(model_dir), made.cluster, DEVICE)
        assert overview["namespace"] == known["namespace"], "its own device is none of its business"
        assert {member["id"] for member in members} >= {"decode-0", "gateway-0"}
        worker.before_answer = gate.wait
        late: list[httpx.Response] = []

        async def ask() -> None:
            late.append(await client.post("/v1/completions", json=ASK))

        async with anyio.create_task_group() as asking:
            asking.start_soon(ask)
            await until(lambda: len(worker.requests) == 2)
            tasks.cancel_scope.cancel()  # as the command line does on SIGTERM
            gate.set()
        assert late[0].json()["choices"][0]["text"] == ANSWER


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", 0), ("0.0.0.0", 1)])
async def test_a_gateway_without_a_broker_can_be_stopped(
    model_dir: Path, host: str, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Before that it says who may ask, if that is everybody."""
    made = config.load(
        None,
        [
            f"cluster.broker='127.0.0.1:{free_port()}'",
            f"cluster.model={str(model_dir)!r}",
            "gateway.port=0",
            f"gateway.host={host!r}",
        ],
    )
    with anyio.fail_after(10), anyio.move_on_after(0.5) as scope:
        await serve(made, member_id="gateway-0")
    assert scope.cancel_called
    assert caplog.text.count(f"HTTP is served on {host} and no API key") == warned
    assert caplog.text.count("gateway.api_keys_file") == warned


@pytest.mark.parametrize(("host", "is_so"), [("localhost", True), ("0.0.0.0", False)])
def test_what_other_hosts_cannot_reach_is_told_by_the_socket(host: str, is_so: bool) -> None:
    with bind(host, 0) as bound:
        assert is_loopback(bound) == is_so


def test_a_port_that_is_taken_is_named() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Invalid, match=f"port {port} on 127.0.0.1 is in use"):
            bind("127.0.0.1", port)
        assert taken.proto == socket.IPPROTO_TCP, "else each answer waits for Nagle's algorithm"


def test_an_address_of_another_host_is_named_with_its_setting() -> None:
    with pytest.raises(Invalid, match=r"203\.0\.113\.9: it is no address of .*gateway\.host"):
        bind("203.0.113.9", 0)


def test_the_name_clients_ask_for(model_dir: Path) -> None:
    assert served_name(config.load().cluster) == "smollm2-135m-instruct"
    assert served_name(config.load(None, [f"cluster.model={str(model_dir)!r}"]).cluster) == "tiny"
    named = config.load(None, ["cluster.served_model_name='x'"])
    assert served_name(named.cluster) == "x"
