"""The one thread of a process that touches NIXL: it owns all agents, and runs all their transfers.

NIXL's agents are not thread-safe and have no descriptor to wait on, so somebody must poll them. The
mover blocks on its command queue while nothing is in flight (an idle process uses no CPU), and
polls while transfers are in flight or landing buffers are lent, at first without a pause, then with
longer ones. Idle agents make progress once a second: UCX accepts whatever connects to their ports
by itself, but closes what has left only then. It refuses to know what a transfer does: it only
steps, stops and reports.

    event loop ── bounded queue ──> mover thread ── call_soon_threadsafe ──> event loop

Every transfer has a deadline, checked between its steps. A cancelled caller waits, shielded, until
its transfer has been stopped: what `stop` promises holds when `transfer` returns or raises.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar

import anyio

from kvass.common.errors import (
    DeadlineExceeded,
    KvassError,
    Overloaded,
    TransferFailed,
    Unavailable,
)

_log = logging.getLogger(__name__)
T = TypeVar("T")

Progress = Literal["idle", "moved", "done"]

COMMANDS_MAX = 4096  # four times the calls that one RPC connection may have open
SPINS = 64  # empty polls before the first pause: milliseconds where the event loop works meanwhile
PAUSE_MIN_S = 50e-6  # about what the kernel's timer slack makes of anything shorter
PAUSE_DOUBLINGS = (
    4  # to 0.8 ms: bounds the delay of a completion; costs 2-3 % of a core while it lasts
)
CLOSE_TIMEOUT_S = 5.0
# Of idle agents: MEASURED: one poll closes 16 connections that have ended; it takes about 1 µs.
TEND_EVERY_S = 1.0
TEND_TURNS = 256  # while something moves: a look at the clock takes a tenth of a poll


class Transfer(Protocol):
    """A transfer as the mover sees it; both methods run on the mover's thread."""

    def step(self) -> Progress:
        """Do a bounded piece of work. Raises a KvassError when the transfer has failed, after which
        nothing of it is in flight."""
        ...

    def stop(self) -> None:
        """End the transfer for sure: nothing of it is in flight afterwards."""
        ...


class Watcher(Protocol):
    """Something that needs polling though this process started no transfer: lent memory."""

    def active(self) -> bool: ...

    def poll(self) -> Progress: ...


class Tended(Protocol):
    """Something that owns agents, also while nothing is to be moved."""

    def has_agents(self) -> bool: ...

    def tend(self) -> None:
        """Let each agent make progress, on the mover's thread."""
        ...


class _Job:
    """A transfer under way. Mutable field: `cancelled`, set by the event loop, read by the
    mover."""

    __slots__ = ("cancelled", "deadline", "ended", "transfer")

    def __init__(
        self, transfer: Transfer, deadline: float, ended: Callable[[BaseException | None], None]
    ) -> None:
        self.transfer = transfer
        self.deadline = deadline
        self.ended = ended
        self.cancelled = False


class Mover:
    """The mover thread. Start it once a process; `close` it on the event loop's way out.

    Mutable fields: `_thread`, `_closing` (event loop); `_jobs`, `_watchers`, `_tended`, `_closers`,
    `_tend_due_s` (the thread's).
    """

    def __init__(self) -> None:
        # The C implementation halves the cost of a hop; `post` keeps the bound.
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._jobs: list[_Job] = []
        self._watchers: list[Watcher] = []
        self._tended: list[Tended] = []
        self._tend_due_s = 0.0
        self._closers: list[Callable[[], None]] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvass-mover", daemon=True)
        self._thread.start()
        # Agents must not be destroyed by the interpreter's tear-down, in any order, in any thread.
        atexit.register(self.close)

    def watch(self, watcher: Watcher) -> None:
        """Poll `watcher` whenever it is active. Call it on the mover's thread."""
        self._watchers.append(watcher)

    def tend(self, tended: Tended) -> None:
        """Let the agents of `tended` make progress now and then, whenever it has some. Call it on
        the mover's thread."""
        self._tended.append(tended)

    def on_close(self, closer: Callable[[], None]) -> None:
        """Run `closer` on the mover's thread when the mover is closed."""
        self._closers.append(closer)

    def post(self, command: Callable[[], None]) -> None:
        """Run `command` on the mover's thread, soon; nobody waits. Raises Overloaded,
        Unavailable."""
        if self._closing.is_set():
            raise Unavailable("the transport of this process is closed")
        if self._commands.qsize() >= COMMANDS_MAX:
            raise Overloaded(f"{COMMANDS_MAX} transfers wait for this process's mover")
        self._commands.put(command)

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the mover's thread and return its result.

        Shielded: a result that stands for a resource always reaches the caller.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def command() -> None:
            try:
                result = function()
            except BaseException as error:
                _deliver(loop, future, error, None)
            else:
                _deliver(loop, future, None, result)

        self.post(command)
        with anyio.CancelScope(shield=True):
            await asyncio.wait([future])
        return future.result()

    async def transfer(self, transfer: Transfer, *, deadline_s: float) -> None:
        """Run `transfer` to its end. Raises what it raises, or DeadlineExceeded."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        job = _Job(
            transfer,
            time.monotonic() + deadline_s,
            lambda error: _deliver(loop, future, error, None),
        )
        self.post(lambda: self._jobs.append(job))
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError:
            job.cancelled = True
            with anyio.CancelScope(shield=True):
                await asyncio.wait([future])
            if not future.cancelled():
                future.exception()  # the cancellation is what the caller is told
            raise

    def close(self) -> None:
        """Stop the thread: transfers in flight fail, agents are destroyed. Safe to call twice."""
        atexit.unregister(self.close)
        if not self._closing.is_set():
            self._closing.set()
            self._commands.put(lambda: None)  # wakes it
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _log.error("mover: still inside a NIXL call after %g s", CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        empty = turns = 0
        try:
            while not self._closing.is_set():
                waits_s = self._pause(empty)
                commanded = self._run_commands(waits_s)
                turns += 1
                if waits_s or turns % TEND_TURNS == 0:
                    self._tend()
                moved = self._poll()
                if 0 < empty < SPINS:
                    time.sleep(0)  # lets the event loop have the interpreter lock between two polls
                empty = 0 if commanded or moved else empty + 1
        finally:
            self._closing.set()
            self._shut_down()

    def _pause(self, empty: int) -> float | None:
        if not self._jobs and not any(watcher.active() for watcher in self._watchers):
            return TEND_EVERY_S if any(each.has_agents() for each in self._tended) else None
        return pause_s(empty)

    def _run_commands(self, pause_s: float | None) -> bool:
        """Run what is queued; wait up to `pause_s` (None: for ever) when nothing is."""
        try:
            if pause_s == 0.0:
                command = self._commands.get_nowait()
            else:
                command = self._commands.get(timeout=pause_s)
            for _ in range(COMMANDS_MAX):
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return False
        return True

    def _tend(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._tend_due_s:
            self._tend_due_s = now_s + TEND_EVERY_S
            for each in self._tended:
                each.tend()

    def _poll(self) -> bool:
        moved = False
        for job in list(self._jobs):
            progress = self._step(job)
            moved |= progress != "idle"
            if progress == "done":
                self._jobs.remove(job)
        for watcher in self._watchers:
            if watcher.active():
                moved |= watcher.poll() != "idle"
        return moved

    def _step(self, job: _Job) -> Progress:
        """Step a job, or stop it when its time is over. A fault ends the job, never the mover."""
        try:
            if job.cancelled or time.monotonic() >= job.deadline:
                job.transfer.stop()
                raise DeadlineExceeded("the transfer did not end before its deadline")
            progress = job.transfer.step()
        except KvassError as error:
            job.ended(error)
            return "done"
        except Exception as error:
            _log.exception("mover: a transfer failed in a way that is not mapped")
            job.ended(TransferFailed(repr(error)))
            return "done"
        if progress == "done":
            job.ended(None)
        return progress

    def _shut_down(self) -> None:
        """Fail what is queued or in flight, then destroy the agents, newest first."""
        error = Unavailable("the transport of this process was closed")
        while True:
            try:
                self._commands.get_nowait()()
            except queue.Empty:
                break
        for job in self._jobs:
            try:
                job.transfer.stop()
            except KvassError as failed:
                _log.warning("mover: stopping a transfer at close: %s", failed)
            job.ended(error)
        self._jobs.clear()
        for closer in reversed(self._closers):
            closer()
        self._closers.clear()


def pause_s(empty: int) -> float:
    """Return how long to pause after so many polls in a row that found nothing."""
    if empty < SPINS:
        return 0.0
    return PAUSE_MIN_S * float(1 << min((empty - SPINS) // 8, PAUSE_DOUBLINGS))


def _deliver(
    loop: asyncio.AbstractEventLoop,
    future: asyncio.Future[Any],
    error: BaseException | None,
    result: object,
) -> None:
    """Settle `future` in its loop, from the mover's thread."""

    def settle() -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:
        _log.debug("mover: the event loop has closed; nobody waits for this result")
