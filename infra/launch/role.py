"""One role in this process: import it, serve until told to stop, leave in bounded time.

Roles are imported by name when they are run, so that a gateway or a store node never loads torch.
A process that `kvass up` started watches its standard input: when that ends, its supervisor is
gone, however it died, and so the process ends too.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import anyio
import anyio.abc
import psutil

from kvass.common import cpus, descriptors, event_loop
from kvass.common.addresses import require_own
from kvass.common.config import DEFAULT_MODEL, Config
from kvass.common.errors import Invalid, KvassError
from kvass.common.membership import Role
from kvass.common.native import library
from kvass.common.rpc.credentials import credentials_of

_log = logging.getLogger(__name__)

STOP_S = 30.0  # a gateway lets answers end for 20 s; what is still here after this is killed
# Then the seconds of imports and of set-up, and of parts of this as name=seconds; read by the
# supervisor.
READY_MARK = "\x02ready "

_MODULES: dict[Role, str] = {
    "gateway": "kvass.gateway.app",
    "prefill": "kvass.prefill.worker",
    "decode": "kvass.decode.worker",
    "store": "kvass.kvstore.node.service",
}


class Serve(Protocol):
    """A role's service: runs until cancelled; calls `task_status.started` when it is ready, a
    worker with the seconds of what it did until then, by name."""

    async def __call__(
        self, config: Config, *, member_id: str, task_status: anyio.abc.TaskStatus[Any]
    ) -> None: ...


def with_model(config: Config, *, progress: bool) -> Config:
    """Return the config with the model as a directory on this machine, fetched where needed."""
    fetch = importlib.import_module("kvass.common.model.fetch")
    model: Path = fetch.resolve_model(config.cluster.model, progress=progress)
    asked = config.cluster.model
    served = config.cluster.served_model_name or (
        asked if asked == DEFAULT_MODEL else model.resolve().name
    )
    cluster = replace(config.cluster, model=str(model), served_model_name=served)
    return replace(config, cluster=cluster)


def run_role(role: Role, config: Config, member_id: str, *, supervised: bool = False) -> int:
    """Serve a role until SIGTERM or SIGINT; return the process's exit code.

    `supervised`: by `kvass up`, which reads READY_MARK, and whose end is this process's.
    """
    configure_logging()
    if supervised:
        threading.Thread(target=_end_with_supervisor, name="supervisor", daemon=True).start()
    # Imports are counted from the start of the process: the command line's are among them.
    started_s = time.monotonic() - (time.time() - psutil.Process().create_time())
    # Prefill and decode share a machine's cores: threads that spin while they wait for each other
    # would take them from whoever has work (measured: a prefill is 5 times slower beside a busy
    # process).
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        descriptors.allow()
        if role != "gateway":  # before there are threads that compute, and memory
            cpus.pin(getattr(config, role).cpus, f"{role}.cpus")
            library.in_use()
        require_own(config.host)  # before the seconds that a model takes, as what follows
        credentials_of(config.cluster)
        if role != "store":
            config = with_model(config, progress=not supervised)
        serve: Serve = importlib.import_module(_MODULES[role]).serve
        imported_s = time.monotonic()
        event_loop.run(
            _serve_until_told, serve, config, member_id, started_s, imported_s, supervised
        )
    except KvassError as error:
        return _complain([error])
    except BaseExceptionGroup as group:
        ours, others = group.split(KvassError)
        if others is not None:
            raise others from None
        return _complain(_leaves(ours))
    return 0


async def _serve_until_told(
    serve: Serve,
    config: Config,
    member_id: str,
    started_s: float,
    imported_s: float,
    supervised: bool,
) -> None:
    async with anyio.create_task_group() as tasks:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            tasks.start_soon(_stop_on_signal, signals, tasks.cancel_scope)

            async def run(*, task_status: anyio.abc.TaskStatus[Any]) -> None:
                await serve(config, member_id=member_id, task_status=task_status)
                tasks.cancel_scope.cancel()

            told = await tasks.start(run)
            parts = told if isinstance(told, dict) else {}
            imports_s, setup_s = imported_s - started_s, time.monotonic() - imported_s
            if supervised:
                named = "".join(f" {name}={seconds:.2f}" for name, seconds in parts.items())
                print(f"{READY_MARK}{imports_s:.2f} {setup_s:.2f}{named}", flush=True)
            else:
                _log.info("%s is ready, after %.1f s", member_id, imports_s + setup_s)
            await anyio.sleep_forever()


async def _stop_on_signal(signals: Any, scope: anyio.CancelScope) -> None:
    async for number in signals:
        _log.info("%s: leaving", signal.Signals(number).name)
        # The default action of SIGALRM ends a process that hangs while it leaves.
        signal.setitimer(signal.ITIMER_REAL, STOP_S)
        scope.cancel()
        return


def _end_with_supervisor() -> None:
    try:
        while os.read(0, 64):
            pass
    except OSError:
        pass  # no standard input at all: nobody holds the other end
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_S)
    os.kill(os.getpid(), signal.SIGKILL)


def configure_logging() -> None:
    """Log our own lines from INFO on, everybody else's from WARNING on, to standard error.

    A line begins with the time in UTC: `2026-11-30T09:08:07.654Z INFO kvass.common.member: …`.
    """
    lines = logging.StreamHandler(sys.stderr)
    form = logging.Formatter(
        "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    form.converter = time.gmtime  # hosts of one cluster may be in different zones
    lines.setFormatter(form)
    logging.basicConfig(level=logging.WARNING, handlers=[lines])
    logging.getLogger("kvass").setLevel(logging.INFO)


def _leaves(group: BaseExceptionGroup[KvassError] | None) -> list[KvassError]:
    leaves: list[KvassError] = []
    waiting: list[BaseException] = [] if group is None else list(group.exceptions)
    while waiting:
        error = waiting.pop(0)
        if isinstance(error, BaseExceptionGroup):
            waiting[:0] = error.exceptions
        elif isinstance(error, KvassError):
            leaves.append(error)
    return leaves


def _complain(raised: Sequence[KvassError]) -> int:
    """Say what went wrong, a line each; return the exit code: 2 for what the caller got wrong."""
    for error in raised:
        print(f"kvass: {error}", file=sys.stderr, flush=True)
    return 2 if any(isinstance(error, Invalid) for error in raised) else 1
