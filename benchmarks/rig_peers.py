"""Other stores on this machine, beside ours: Redis on a Unix socket, and Mooncake Store over TCP.

Both are optional: `pip install -e '.[bench]'` brings their clients (Mooncake's brings its master),
the system's package `redis-server` brings the other server. What is missing is named, not measured.
Each runs in processes of its own for the time of a measurement and listens on loopback.
"""

from __future__ import annotations

import contextlib
import importlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

START_S = 20.0
Bytes = NDArray[np.uint8]


class Missing(Exception):
    """A peer cannot be measured here; says what to install."""


class Peer(Protocol):
    """A store of named blocks; `mode` tells how they are asked for."""

    @property
    def modes(self) -> Sequence[str]: ...

    def put(self, mode: str, keys: Sequence[str], blocks: Bytes) -> None: ...

    def get(self, mode: str, keys: Sequence[str], blocks: Bytes) -> None:
        """Bring the bytes of `keys` into the caller's memory: `blocks`, or objects of its own."""
        ...


@contextlib.contextmanager
def _running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


# --- Redis ----------------------------------------------------------------------------------------


class _Redis:
    """One key a call, or all in one (`mget`, `mset`)."""

    modes = ("single calls", "one call")

    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, mode: str, keys: Sequence[str], blocks: Bytes) -> None:
        if mode == "one call":
            self._client.mset({k: memoryview(block) for k, block in zip(keys, blocks, strict=True)})
            return
        for key, block in zip(keys, blocks, strict=True):
            self._client.set(key, memoryview(block))

    def get(self, mode: str, keys: Sequence[str], blocks: Bytes) -> None:
        if mode == "one call":
            found = self._client.mget(keys)
        else:
            found = [self._client.get(key) for key in keys]
        assert all(value is not None and len(value) == blocks.shape[1] for value in found)


@contextlib.contextmanager
def redis() -> Iterator[Peer]:
    """Run a Redis without persistence; raises Missing."""
    program = shutil.which("redis-server")
    if program is None:
        raise Missing("Redis: install the system's package redis-server")
    try:
        library = importlib.import_module("redis")
    except ImportError:
        raise Missing("Redis: pip install -e '.[bench]'") from None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "redis.sock"
        options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no"]
        with _running([program, *options, "--dir", folder], Path(folder) / "log"):
            client = library.Redis(unix_socket_path=str(path))
            _until(lambda: path.exists() and client.ping(), "Redis")
            yield _Redis(client)
            client.close()


# --- Mooncake -------------------------------------------------------------------------------------

_HOLDER = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
where, master, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
failed = store.setup(where, "P2PHANDSHAKE", size, 64 << 20, "tcp", "", master)
print("holder", failed, flush=True)
time.sleep(1e6)
"""


class _Mooncake:
    """All keys in one call, from and into registered memory of the caller."""

    modes = ("one call",)

    def __init__(self, store: Any) -> None:
        self._store = store
        self._registered: dict[int, Bytes] = {}

    def _pointers(self, blocks: Bytes) -> list[int]:
        base = blocks.base if isinstance(blocks.base, np.ndarray) else blocks
        address = int(base.ctypes.data)
        if address not in self._registered:
            assert self._store.register_buffer(address, base.nbytes) == 0
            self._registered[address] = base
        return [int(block.ctypes.data) for block in blocks]

    def put(self, mode: str, keys: Sequence[str], blocks: Bytes) -> None:
        sizes = [blocks.shape[1]] * len(keys)
        assert set(self._store.batch_put_from(list(keys), self._pointers(blocks), sizes)) == {0}

    def get(self, mode: str, keys: Sequence[str], blocks: Bytes) -> None:
        sizes = [blocks.shape[1]] * len(keys)
        came = self._store.batch_get_into(list(keys), self._pointers(blocks), sizes)
        assert list(came) == sizes, came


@contextlib.contextmanager
def mooncake(size_bytes: int) -> Iterator[Peer]:
    """Run a master and a process that lends `size_bytes`; raises Missing."""
    try:
        library = importlib.import_module("mooncake.store")
    except ImportError:
        raise Missing("Mooncake: pip install -e '.[bench]'") from None
    master = Path(sys.executable).parent / "mooncake_master"
    ports = [_free_port() for _ in range(4)]
    where = f"127.0.0.1:{ports[0]}"
    command = [str(master), "--rpc_address", "127.0.0.1", "--rpc_port", str(ports[0])]
    command += ["--metrics_port", str(ports[3])]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(_running(command, folder / "master"))
        _until(lambda: _answers(ports[0]), "Mooncake's master")
        holder = [sys.executable, "-c", _HOLDER, f"127.0.0.1:{ports[1]}", where, str(size_bytes)]
        stack.enter_context(_running(holder, folder / "holder"))
        _until(lambda: b"holder 0" in (folder / "holder").read_bytes(), "Mooncake's holder")
        store = library.MooncakeDistributedStore()
        failed = store.setup(f"127.0.0.1:{ports[2]}", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", where)
        assert failed == 0, failed
        yield _Mooncake(store)
        store.close()


def _until(is_there: Any, what: str) -> None:
    ends_s = time.monotonic() + START_S
    while True:
        with contextlib.suppress(Exception):
            if is_there():
                return
        if time.monotonic() > ends_s:
            raise RuntimeError(f"{what} did not start in {START_S:g} s")
        time.sleep(0.05)


def _answers(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), timeout=1):
        return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
