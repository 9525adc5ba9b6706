"""A real cluster whose secret and certificates come from a file: it serves over TLS, shows the
secret to nobody, and lets nobody in who has another one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import trustme

from cluster import Cluster, cluster

pytestmark = [pytest.mark.process, pytest.mark.model]
SECRET = "a secret that is only in one file"
OTHER = "a secret that is of no use here"
KVASS = (sys.executable, "-m", "kvass.launch.cli")


def write_config(folder: Path) -> Path:
    authority = trustme.CA()
    certificate = authority.issue_cert("member.example")
    authority.cert_pem.write_to_path(str(folder / "ca"))
    certificate.private_key_pem.write_to_path(str(folder / "key"))
    certificate.cert_chain_pems[0].write_to_path(str(folder / "cert"))
    lines = [f'tls_{name} = "{folder / name}"' for name in ("ca", "key", "cert")]
    file = folder / "kvass.toml"
    file.write_text("\n".join(["[cluster]", f'secret = "{SECRET}"', *lines, ""]))
    return file


def kvass(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KVASS, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"COLUMNS": "200"} | environment,
    )


def assert_not_shown(running: Cluster) -> None:
    """The secret is in no argument, no line that was printed, and no answer."""
    for process in running.processes():
        assert SECRET not in " ".join(psutil.Process(process.pid).cmdline())
    assert not any(SECRET in line for line in running.lines)
    assert SECRET not in running.http.get("/v1/cluster").text
    assert SECRET not in running.http.get("/metrics").text


@pytest.mark.fault(number=45)
def test_a_cluster_with_a_secret_and_certificates_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVASS_CLUSTER_SECRET", raising=False)
    file = write_config(tmp_path)
    with cluster("--config", str(file)) as running:
        assert running.ask("Once upon a time", max_tokens=8).tokens == 8
        broker = next(
            found[1] for line in running.lines if (found := re.search(r"broker on (\S+)", line))
        )
        shown = kvass("status", "--url", running.url)
        assert shown.returncode == 0 and "store-0" in shown.stdout
        refused = kvass("store", "--broker", broker, KVASS_CLUSTER_SECRET=OTHER)
        assert refused.returncode == 1
        assert "another cluster secret than this process, whose is from" in refused.stderr
        assert "KVASS_CLUSTER_SECRET: give every member the same" in refused.stderr
        assert "Traceback" not in refused.stderr and OTHER not in refused.stderr
        assert [each["id"] for each in running.members("store")] == ["store-0"]
        assert running.ask("Once upon a time", max_tokens=8).tokens == 8
        assert_not_shown(running)
