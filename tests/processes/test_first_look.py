"""What keeps a member out is said before it reads its weights.

The late ones have a model whose files are all there, the last byte of the weights apart: whoever
reads them ends with that.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from bus_stage import free_broker, live, member, started, until
from cluster import START_S
from crew import Crew, crew
from kvass.common import config, first_look
from kvass.common.errors import Incompatible, Invalid, Unauthorized
from kvass.common.event_loop import BACKEND, BACKEND_OPTIONS
from kvass.common.model.fetch import resolve_model
from kvass.common.model.identity import cluster_fields
from kvass.launch.broker import run_broker
from test_model_spec import write_model

pytestmark = [pytest.mark.anyio, pytest.mark.process]

SMALL = ("--set", "cluster.max_model_len=1024")
READ = "ends 1 bytes too early"
WEIGHTS = "model.safetensors"


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return BACKEND, dict(BACKEND_OPTIONS)


# --- the look -------------------------------------------------------------------------------------


def settings(broker: str, model_dir: Path, *more: str) -> config.Config:
    return config.load(
        None, [f"cluster.broker={broker!r}", f"cluster.model={str(model_dir)!r}", *more]
    )


async def test_a_look_finds_what_joining_would_refuse_and_is_seen_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, spec = free_broker(), write_model(tmp_path)
    fields = cluster_fields(tmp_path, spec, config.ClusterConfig())
    other = settings(broker, tmp_path, "cluster.kv_dtype='int8'")
    async with (
        run_broker(broker),
        member(broker, "gateway", "watcher", fields) as watcher,
        started(broker, "decode", "one", fields) as one,
    ):
        await live(watcher, "decode", [(await one.next())["start_id"]], within_s=2)
        version = watcher.table.version
        await first_look.look(settings(broker, tmp_path), "decode", "two")
        with pytest.raises(Invalid, match="decode one runs already"):
            await first_look.look(settings(broker, tmp_path), "decode", "one")
        with pytest.raises(Incompatible, match="kv_dtype differs: this process has 'int8'"):
            await first_look.look(other, "prefill", "two")
        monkeypatch.setenv("KVASS_CLUSTER_SECRET", "what nobody else knows")
        with pytest.raises(Unauthorized, match="another cluster secret than this process"):
            await first_look.look(settings(broker, tmp_path), "prefill", "two")
        assert watcher.table.version == version, "nobody came, and nobody went"


async def test_a_broker_that_is_away_is_named_and_waited_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broker = free_broker()
    write_model(tmp_path)
    monkeypatch.setattr(first_look, "BROKER_S", 0.3)
    with anyio.fail_after(5):
        await first_look.look(settings(broker, tmp_path), "decode", "one")
    assert f"broker {broker}: " in caplog.text and "trying again every second" in caplog.text


async def test_of_two_that_look_at_once_both_go_on(tmp_path: Path) -> None:
    """They load; which of them serves is said when they have."""
    broker = free_broker()
    write_model(tmp_path)
    async with run_broker(broker), anyio.create_task_group() as looks:
        for _ in range(2):
            looks.start_soon(first_look.look, settings(broker, tmp_path), "decode", "one")


# --- members --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Settings that name the default model, its weights a byte too short, and no digest kept."""
    source = resolve_model(config.DEFAULT_MODEL, progress=False)
    model_dir = tmp_path_factory.mktemp("models") / source.name
    shutil.copytree(source, model_dir, ignore=shutil.ignore_patterns(".*"))
    os.truncate(model_dir / WEIGHTS, (model_dir / WEIGHTS).stat().st_size - 1)
    return ("--set", f"cluster.model={str(model_dir)!r}")


@pytest.fixture(scope="module")
def members() -> Iterator[Crew]:
    """A worker of each kind and a gateway, with the model as it is."""
    with crew(*SMALL) as running:
        for member_id in ("decode-0", "prefill-0", "gateway-0"):
            running.add(member_id)
        running.until_whole()
        yield running


def refused(members: Crew, member_id: str, *arguments: str) -> tuple[int, str]:
    """Start a member that ends; return its exit code and what it said of its end."""
    there = members.seats.get(member_id)
    seat = members.add(member_id, *arguments)
    code = seat.wait(START_S)
    members.seats.pop(member_id)
    if there is not None:
        members.seats[member_id] = there
    (said,) = [line for line in seat.lines if line.startswith("kvass: ")]
    return code, said


@pytest.mark.model
@pytest.mark.parametrize("role", ["decode", "prefill", "gateway"])
async def test_a_member_is_refused_before_it_reads_its_weights(
    members: Crew, short: tuple[str, ...], role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, said = refused(members, f"{role}-1", *short)
    assert (code, READ in said) == (2, True), "nothing else is wrong with it"
    first = members.seats[f"{role}-0"].process
    code, said = refused(members, f"{role}-0", *short)
    assert (code, f"{role}-0 runs already: pid {first and first.pid}" in said) == (2, True)
    code, said = refused(members, f"{role}-1", *short, "--set", "cluster.kv_dtype=int8")
    assert (code, "kv_dtype differs: this process has 'int8', " in said) == (1, True), said
    monkeypatch.setenv("KVASS_CLUSTER_SECRET", "what nobody else knows")
    code, said = refused(members, f"{role}-1", *short)
    assert (code, "another cluster secret than this process" in said) == (1, True), said


@pytest.mark.model
async def test_of_two_that_load_at_once_one_serves() -> None:
    with crew(*SMALL) as members:
        seats = [members.add("decode-0"), members.add("decode-0")]
        await until(lambda: not all(seat.is_running for seat in seats), within_s=START_S)
        (served,) = [seat for seat in seats if seat.is_running]
        (left,) = [seat for seat in seats if seat is not served]
        served.until_ready()
        assert left.wait() == 2
        assert "give this one another --id" in "".join(left.lines)
        served.signal(signal.SIGTERM)
        assert served.wait() == 0
