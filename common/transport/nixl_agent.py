"""One NIXL agent with one UCX backend: create, register, post, poll, destroy.

Everything here runs on the mover's thread. NIXL's exceptions become ours here and nowhere else. It
refuses to know which side owns what, and never takes serialised descriptors (NIXL's are pickle): a
peer sends NIXL metadata, and addresses as integers.

Found by trying, NIXL 1.5.1: the first backend of a process takes 0.4 s (UCX looks at the machine),
each further one 15 ms, 1 MB and four descriptors. UCX reads `UCX_TLS` and `UCX_NET_DEVICES` when a
backend is created, so agents of different transports live in one process.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import nixl_cu12._bindings as nixl
import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config

from kvass.common.errors import Invalid, TransferFailed, Unavailable
from kvass.common.transport.seam import Copies, Region

_log = logging.getLogger(__name__)
_environment_lock = threading.Lock()

# Debian's ibverbs providers crash at exit when UCX has loaded them; UCX's log goes to stdout unless
# told otherwise, and stdout belongs to the program.
_PROCESS_ENVIRONMENT = {"UCX_MODULES": "^ib", "UCX_LOG_FILE": "stderr"}

State = Literal["DONE", "PROC"]


def tcp_environment(interface: str) -> dict[str, str]:
    """Return UCX's settings for TCP with the data ports bound to one interface."""
    return {"UCX_TLS": "tcp", "UCX_NET_DEVICES": interface}


class Agent:
    """A NIXL agent. `close` destroys it, after which no byte of its transfers moves.

    Mutable fields: `_agent` (None once closed), `_handles` (of transfers not yet released).
    """

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        self.name = name
        logging.getLogger("nixl").setLevel(logging.WARNING)
        with _environment(environment), _mapped(f"create agent {name}"):
            agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
            # So that a transfer to a peer that dies fails, instead of never ending.
            agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
        self._agent: Any = agent
        self._handles: set[int] = set()

    def register(self, regions: list[Region]) -> None:
        """Register memory for transfers; it stays registered until `close`."""
        with _mapped("register memory"):
            self._agent.register_memory([(r.address, r.size, 0, "") for r in regions], "DRAM")

    def metadata(self) -> bytes:
        """Return what a peer's `add` takes."""
        return bytes(self._agent.get_agent_metadata())

    def add(self, metadata: bytes) -> str:
        """Make a peer's agent known; returns its name."""
        with _mapped("load a peer's metadata"):
            name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove(self, name: str) -> None:
        """Forget a peer's agent. Stops nothing."""
        try:
            with _mapped(f"remove {name}"):
                self._agent.remove_remote_agent(name)
        except (Invalid, TransferFailed, Unavailable) as error:
            _log.debug("nixl: %s", error)  # it was gone already

    def write(self, copies: Copies, name: str, tag: bytes) -> tuple[int, State]:
        """Start writing into a peer's memory; returns a handle, to be released, and the state.

        Raises Invalid for ranges that are not registered, Unavailable when the peer is gone.
        """
        with _mapped(f"a write to {name}"):
            raw = self._agent.agent
            handle = raw.createXferReq(
                nixl.NIXL_WRITE,
                _descriptors(copies.local, copies.sizes),
                _descriptors(copies.remote, copies.sizes),
                name,
                tag,
                [],
            )
        self._handles.add(handle)
        try:
            with _mapped(f"a write to {name}"):
                state = _state(raw.postXferReq(handle, tag))
        except BaseException:
            self.release(handle)
            raise
        return handle, state

    def state(self, handle: int) -> State:
        """Drive progress and return a transfer's state. Raises when it has failed."""
        with _mapped("a transfer"):
            return _state(self._agent.agent.getXferStatus(handle))

    def release(self, handle: int) -> None:
        """Free a handle. One that is still in progress is only let go of (`close` ends it)."""
        try:
            with _mapped("release a transfer"):
                self._agent.agent.releaseXferReq(handle)
        except (Invalid, TransferFailed, Unavailable) as error:
            _log.debug("nixl: %s", error)
            return  # it stays in `_handles` until `close`
        self._handles.discard(handle)

    def notifications(self) -> list[bytes]:
        """Drive progress and return the tags of writes that have arrived since the last call."""
        with _mapped("notifications"):
            arrived = self._agent.agent.getNotifs({}, [])
        return [bytes(tag) for tags in arrived.values() for tag in tags]

    def close(self) -> None:
        """Destroy the agent and its sockets. Safe to call twice."""
        if self._agent is None:
            return
        for handle in list(self._handles):
            self.release(handle)
        self._handles.clear()
        self._agent.agent = None  # the binding's only reference: destroys the agent here and now
        self._agent = None


def _descriptors(addresses: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any]) -> Any:
    rows = np.zeros((len(addresses), 3), dtype=np.uint64)
    rows[:, 0] = addresses
    rows[:, 1] = sizes
    return nixl.nixlXferDList(nixl.DRAM_SEG, rows)


def _state(status: Any) -> State:
    if status == nixl.NIXL_SUCCESS:
        return "DONE"
    if status == nixl.NIXL_IN_PROG:
        return "PROC"
    raise TransferFailed(f"NIXL answered {status}")


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set UCX's variables while a backend is created; UCX takes its options from nowhere else."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in values}
        for name, value in _PROCESS_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        os.environ.update(values)
        try:
            yield
        finally:
            for name, old in before.items():
                if old is None:
                    del os.environ[name]
                else:
                    os.environ[name] = old


_GONE = (nixl.nixlRemoteDisconnectError,)
_WRONG = (nixl.nixlInvalidParamError, nixl.nixlNotFoundError, nixl.nixlMismatchError)
_FAILED = (
    nixl.nixlBackendError,
    nixl.nixlCancelledError,
    nixl.nixlNotAllowedError,
    nixl.nixlNotPostedError,
    nixl.nixlNotSupportedError,
    nixl.nixlRepostActiveError,
    nixl.nixlUnknownError,
)


@contextmanager
def _mapped(what: str) -> Iterator[None]:
    """Map NIXL's exceptions to the taxonomy."""
    try:
        yield
    except _GONE as error:
        raise Unavailable(f"{what}: the peer is gone ({error})") from None
    except _WRONG as error:
        raise Invalid(f"{what}: NIXL refuses ({error}); a range is not registered") from None
    except _FAILED as error:
        raise TransferFailed(f"{what}: {error}") from None
