"""TLS between members: both certificates looked at, and every file that is wrong named."""

from __future__ import annotations

import datetime
import ssl
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest
import trustme
from anyio.streams.tls import TLSAttribute

from kvass.common import config, errors, wire
from kvass.common.event_loop import BACKEND, BACKEND_OPTIONS
from kvass.common.rpc import hello as handshake
from kvass.common.rpc.client import open_client
from kvass.common.rpc.credentials import Credentials
from kvass.common.rpc.tls import tls_of
from kvass.common.secret import Secret
from rpc_stage import REPLIES, connected, dialled, generate, hello, over, serving
from trust import CREDENTIALS

NOW = datetime.datetime.now(datetime.UTC)


@dataclass(frozen=True)
class Files:
    """One CA, and one member's certificate by it, as files."""

    ca: Path
    cert: Path
    key: Path

    def cluster(self, **other: Path) -> config.ClusterConfig:
        named = {"ca": self.ca, "cert": self.cert, "key": self.key} | other
        return config.load(
            None, [f"cluster.tls_{name}={str(path)!r}" for name, path in named.items()]
        ).cluster

    def credentials(self) -> Credentials:
        return Credentials(CREDENTIALS.secret, tls_of(self.cluster()))


def issued(
    folder: Path, ca: trustme.CA, name: str, until: datetime.datetime | None = None
) -> Files:
    cert = ca.issue_cert(f"{name}.example", not_after=until)
    files = Files(folder / f"{name}.ca", folder / f"{name}.cert", folder / f"{name}.key")
    ca.cert_pem.write_to_path(str(files.ca))
    cert.private_key_pem.write_to_path(str(files.key))
    for number, part in enumerate(cert.cert_chain_pems):
        part.write_to_path(str(files.cert), append=number > 0)
    return files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def ours(folder: Path, ca: trustme.CA) -> Files:
    return issued(folder, ca, "ours")


@pytest.fixture(scope="module")
def foreign(folder: Path) -> Files:
    return issued(folder, trustme.CA(), "foreign")


@pytest.fixture(params=[(BACKEND, dict(BACKEND_OPTIONS)), ("trio", {})], ids=["uvloop", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, object]]:
    backend: tuple[str, dict[str, object]] = request.param
    return backend


@pytest.mark.anyio
async def test_members_speak_tls(folder: Path, ca: trustme.CA, ours: Files) -> None:
    other = issued(folder, ca, "other").credentials()
    async with serving(credentials=ours.credentials()) as worker:
        async with connected(worker, credentials=other) as (client, _):
            async with client.stream(generate(100), deadline_s=5) as deltas:
                assert await over(client, "quick") == wire.Done()
                assert [delta.token_ids[0] async for delta in deltas] == list(range(100))
            large = "x" * (wire.ITEMS_MAX // 2)
            with pytest.raises(errors.Invalid, match="request_id"):
                await over(client, large)  # many of TLS's records
            assert await over(client, "quick") == wire.Done()
            assert client._frames.stream.extra(TLSAttribute.tls_version) in (
                "TLSv1.2",
                "TLSv1.3",
            )


@pytest.mark.anyio
async def test_another_secret_is_refused_inside_tls_too(ours: Files) -> None:
    theirs = Credentials(Secret("what others know", "elsewhere"), ours.credentials().tls)
    async with serving(credentials=ours.credentials()) as worker:
        with pytest.raises(errors.Unauthorized, match="another cluster secret"):
            await open_client(await dialled(worker), hello("gateway"), REPLIES, theirs)


@pytest.mark.anyio
async def test_a_certificate_of_another_ca_is_refused_whoever_dials(
    ours: Files, foreign: Files, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(credentials=foreign.credentials()) as worker:
        with pytest.raises(errors.Unauthorized, match=r"TLS.*certificate.*tls_ca"):
            await open_client(await dialled(worker), hello("gateway"), REPLIES, ours.credentials())
    half = Files(ours.ca, foreign.cert, foreign.key)  # takes ours, and shows another CA's
    tls = tls_of(foreign.cluster())
    assert tls is not None
    tls.asking.load_verify_locations(cafile=half.ca)
    async with serving(credentials=ours.credentials()) as worker:
        with pytest.raises(errors.KvassError, match=r"certificate|TLS"):
            await open_client(
                await dialled(worker),
                hello("gateway"),
                REPLIES,
                Credentials(CREDENTIALS.secret, tls),
            )
        assert not worker.left
    assert "TLS: self-signed certificate in certificate chain" in caplog.text


@pytest.mark.anyio
async def test_one_side_without_tls_is_told_what_to_do(
    ours: Files, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as worker:
        told = r"does not speak TLS, and this one does: set cluster\.tls_cert.* or for none$"
        with anyio.fail_after(5), pytest.raises(errors.Unauthorized, match=told):
            await open_client(await dialled(worker), hello("gateway"), REPLIES, ours.credentials())
    assert "speaks TLS, and this one does not: set cluster.tls_cert" in caplog.text
    caplog.clear()
    async with serving(credentials=ours.credentials()) as worker:
        told = r"speaks? TLS.*set cluster\.tls_cert"
        with anyio.fail_after(5), pytest.raises(errors.KvassError, match=told):
            await open_client(await dialled(worker), hello("gateway"), REPLIES, CREDENTIALS)
    assert "TLS: the other side does not speak TLS" in caplog.text


@pytest.mark.anyio
async def test_a_peer_that_never_ends_its_handshake_is_gone_soon(
    ours: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "HELLO_TIMEOUT_S", 0.2)
    async with serving(credentials=ours.credentials()) as worker, await dialled(worker) as stream:
        with anyio.fail_after(2), pytest.raises(anyio.EndOfStream):
            await stream.receive()


def test_tls_is_1_2_or_later_and_off_by_default(ours: Files) -> None:
    assert tls_of(config.ClusterConfig()) is None
    tls = tls_of(ours.cluster())
    assert tls is not None
    for context in (tls.asking, tls.answering):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2
        assert context.verify_mode == ssl.CERT_REQUIRED


def test_every_file_that_is_wrong_is_named(
    folder: Path, ca: trustme.CA, ours: Files, foreign: Files
) -> None:
    text = folder / "text"
    text.write_text("no certificate")
    expired = issued(folder, ca, "expired", NOW - datetime.timedelta(days=1))
    for cluster, reason in (
        (ours.cluster(cert=folder / "absent"), r"tls_cert is '.*absent': No such file"),
        (ours.cluster(key=folder), r"tls_key is '.*': Is a directory"),
        (ours.cluster(ca=text), r"tls_ca .*text holds no certificate in PEM"),
        (ours.cluster(cert=text), r"tls_cert .*text and cluster\.tls_key .* are no certificate"),
        (ours.cluster(key=foreign.key), r"are no certificate with its key.*mismatch"),
        (ours.cluster(ca=foreign.ca), r"would be refused by every member: unable to get local"),
        (expired.cluster(), r"expired\.cert would be refused.*: certificate has expired"),
    ):
        with pytest.raises(errors.Invalid, match=reason):
            tls_of(cluster)


def test_tls_takes_three_files_or_none() -> None:
    with pytest.raises(errors.Invalid, match=r"cluster\.tls_key, cluster\.tls_ca not set"):
        config.load(None, ["cluster.tls_cert=x"])
