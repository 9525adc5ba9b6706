"""An S3 server on this machine, as a process: moto's, which keeps everything in its memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import obstore
from obstore.store import S3Store

from ports import free_port

START_S = 60.0
SECRET = "a-secret-that-nobody-shall-see"
NAME = "kvass-test"


@dataclass
class BucketServer:
    """Mutable field: `process`. Its `environment` leads clients to it."""

    port: int
    process: subprocess.Popen[bytes]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": "kvass",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def names(self) -> list[str]:
        """Return the names of all objects."""
        return [each["path"] for page in obstore.list(self.store()) for each in page]

    def store(self) -> S3Store:
        """Return the bucket as this process sees it."""
        return S3Store(
            NAME, endpoint=self.address, access_key_id="kvass", secret_access_key=SECRET,
            region="us-east-1", client_options={"allow_http": True},
        )  # fmt: skip

    def kill(self) -> None:
        """Kill -9."""
        self.process.kill()
        self.process.wait()

    def start(self) -> None:
        """Run it anew, with an empty bucket."""
        self.process = _started(self.port)
        _make_bucket(self.address)


@contextmanager
def bucket_server() -> Iterator[BucketServer]:
    """Run a server that has one empty bucket."""
    port = free_port()
    server = BucketServer(port, _started(port))
    try:
        _make_bucket(server.address)
        yield server
    finally:
        server.kill()


def _started(port: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"AWS_ACCESS_KEY_ID": "moto", "AWS_SECRET_ACCESS_KEY": "moto"},
    )


def _make_bucket(address: str) -> None:
    ends_s = time.monotonic() + START_S
    while True:
        try:
            httpx.put(f"{address}/{NAME}", timeout=5).raise_for_status()
            return
        except httpx.TransportError:
            if time.monotonic() > ends_s:
                raise
            time.sleep(0.05)
