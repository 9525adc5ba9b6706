"""The simulation's transport keeps what the real ones promise, on trio's virtual clock."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio
import anyio.abc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from kvass.common.errors import DeadlineExceeded, Invalid, TransferFailed, Unavailable
from kvass.common.transport.endpoints import Endpoints
from kvass.common.transport.identity import Identity
from kvass.common.transport.loans import BOUND_S
from kvass.common.transport.seam import Copies, Loan
from memory_transport import Attempt, Fabric, Fault, Outcome, region_of
from transport_peer import Bytes, address_of, whole

SIZE = 64 << 10


@dataclass
class Pair:
    """Two processes of one fabric: `holder` has sevens, `own` has fives."""

    fabric: Fabric
    own: Endpoints
    slots: Bytes
    holder: Endpoints
    stored: Bytes

    async def read(self, deadline_s: float = 1.0) -> None:
        reader = self.own.reader
        assert reader is not None
        await reader.attach(self.holder.card())
        copies = whole(address_of(self.slots), address_of(self.stored), SIZE, 5000)
        await reader.read("holder", copies, deadline_s=deadline_s)

    async def lend(self) -> Loan:
        loan = await self.own.landing.lend(SIZE)
        assert loan is not None
        return loan

    async def write(self, loan: Loan, deadline_s: float = 1.0) -> None:
        await self.holder.writer.attach(loan.card)
        copies = whole(address_of(self.stored), loan.address, SIZE, 5000)
        await self.holder.writer.write("own", copies, tag=loan.tag, deadline_s=deadline_s)

    def is_all_free(self) -> bool:
        counts = self.own.landing.counts()
        return counts["free"] == counts["total"]


def simulate(
    scenario: Callable[[Pair, anyio.abc.TaskGroup], Awaitable[None]],
    fault: Fault | None = None,
    *,
    own_host: str = "host",
) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            fabric = Fabric(tasks, lambda attempt: fault or Fault())
            slots, stored = np.full(SIZE, 5, np.uint8), np.full(SIZE, 7, np.uint8)
            own = fabric.endpoints(
                Identity(own_host, "own", 1), [region_of(slots)], landing_bytes=2 * SIZE
            )
            holder = fabric.endpoints(Identity("host", "holder", 2), [region_of(stored)])
            await scenario(Pair(fabric, own, slots, holder, stored), tasks)

    clock = MockClock(autojump_threshold=0)
    anyio.run(main, backend="trio", backend_options={"clock": clock})


def test_read_and_write_bring_the_right_bytes() -> None:
    async def scenario(pair: Pair, tasks: anyio.abc.TaskGroup) -> None:
        assert await pair.own.way_to(pair.holder.card()) == "read"
        await pair.read()
        assert (pair.slots == 7).all()
        loan = await pair.lend()
        await pair.write(loan)
        await loan.arrived(deadline_s=1)
        assert bytes(loan.view()) == b"\x07" * SIZE
        loan.settle()
        loan.abandon()  # it has ended: a no-op
        assert pair.is_all_free()

    simulate(scenario)


def test_the_way_falls_back_to_tcp() -> None:
    async def refused(pair: Pair, tasks: anyio.abc.TaskGroup) -> None:
        pair.fabric.no_attach.add("host")
        assert await pair.own.way_to(pair.holder.card()) == "write"

    async def elsewhere(pair: Pair, tasks: anyio.abc.TaskGroup) -> None:
        assert await pair.own.way_to(pair.holder.card()) == "write"

    async def gone(pair: Pair, tasks: anyio.abc.TaskGroup) -> None:
        pair.fabric.kill("holder")
        with pytest.raises(Unavailable):
            await pair.own.way_to(pair.holder.card())

    simulate(refused)
    simulate(elsewhere, own_host="another")
    simulate(gone)


@pytest.mark.parametrize(
    ("outcome", "error", "right"),
    [
        ("failed", TransferFailed, False),
        ("lost", DeadlineExceeded, False),
        ("partial", None, False),
        ("corrupt", None, False),
        ("whole", None, True),
    ],
)
def test_faults_of_a_read(outcome: Outcome, error: type[Exception] | None, right: bool) -> None:
    async def scenario(pair: Pair, tasks: anyio.abc.TaskGroup) -> None:
        began = anyio.current_time()
        if error is None:
            await pair.read()
        else:
            with pytest.raises(error):
                await pair.read()
        assert anyio.current_time() - began <= 1.0
        assert bool((pair.slots == 7).all()) == right

    simulate(scenario, Fault(outcome=outcome))


@pytest.mark.parametrize("outcome", ["partial", "corrupt"])
def test_wrong_bytes_are_announced_as_if_they_were_right(outcome: Outcome) -> None:
    async def scenario(pair: Pair, tasks: anyio.abc.TaskGroup) -> None:
        loan = await pair.lend()
        await pair.write(loan)
        await loan.arrived(deadline_s=1)
        assert bytes(loan.view()) != b"\x07" * SIZE
        loan.settle()

    simulate(scenario, Fault(outcome=outcome))


def test_late_bytes_land_only_until_the_rebuild() -> None:
    async def scenario(pair: Pair, tasks: anyio.abc.TaskGroup) -> None:
        clean = await pair.own.landing.lend(4096)  # keeps the agent alive
        assert clean is not None
        loan = await pair.lend()
        with pytest.raises(DeadlineExceeded):
            await pair.write(loan)
        loan.abandon()
        if pair.is_all_free():
            raise AssertionError("free while late bytes may land")
        with pytest.raises(TransferFailed):
            await clean.arrived(deadline_s=60)
        assert pair.own.landing.counts()["quarantined"] == 0
        clean.abandon()
        assert pair.is_all_free()
        again = await pair.lend()
        assert again.card.generation == loan.card.generation + 1
        np.frombuffer(again.view(), np.uint8)[:] = 9
        await anyio.sleep(60)
        assert bytes(again.view()) == b"\x09" * SIZE
        with pytest.raises((TransferFailed, Unavailable)):
            await pair.write(loan)

    simulate(scenario, Fault(outcome="late", late_s=20.0))


def test_late_bytes_do_land_in_a_buffer_that_was_settled_wrongly() -> None:
    """The model must be able to show the fault that quarantine is for."""

    async def scenario(pair: Pair, tasks: anyio.abc.TaskGroup) -> None:
        loan = await pair.lend()
        with pytest.raises(DeadlineExceeded):
            await pair.write(loan)
        loan.settle()
        again = await pair.lend()
        np.frombuffer(again.view(), np.uint8)[:] = 9
        await anyio.sleep(60)
        assert bytes(again.view()) == b"\x07" * SIZE

    simulate(scenario, Fault(outcome="late", late_s=20.0))


def test_a_hung_landing_holds_its_writer_until_the_deadline_only() -> None:
    async def scenario(pair: Pair, tasks: anyio.abc.TaskGroup) -> None:
        loan = await pair.lend()
        pair.fabric.hang("own")
        with pytest.raises(DeadlineExceeded):
            await pair.write(loan, deadline_s=2.0)
        loan.abandon()
        assert pair.is_all_free()
        pair.fabric.resume("own")
        again = await pair.lend()
        await pair.write(again)
        await again.arrived(deadline_s=1)

    simulate(scenario)


def test_dead_peers_and_strange_ranges_are_refused() -> None:
    async def scenario(pair: Pair, tasks: anyio.abc.TaskGroup) -> None:
        await pair.read()
        reader = pair.own.reader
        assert reader is not None
        inside, outside = address_of(pair.slots), address_of(pair.stored) + SIZE - 8
        one = [np.array([value], dtype=np.uint64) for value in (inside, outside, 16)]
        with pytest.raises(Invalid):
            await reader.read("holder", Copies(*one), deadline_s=1)
        with pytest.raises(Invalid):
            await reader.read("holder", Copies(one[1], one[0], one[2]), deadline_s=1)
        pair.fabric.kill("holder")
        with pytest.raises(Unavailable):
            await pair.read()

    simulate(scenario)


OUTCOMES: list[Outcome] = ["whole", "failed", "lost", "partial", "corrupt", "late"]


@given(
    st.lists(
        st.tuples(st.sampled_from(OUTCOMES), st.floats(0, 2), st.floats(0, 2 * BOUND_S)),
        max_size=12,
    ),
    st.lists(st.floats(0.01, 3), min_size=12, max_size=12),
)
def test_no_late_byte_reaches_a_buffer_in_use(
    plan: list[tuple[Outcome, float, float]], deadlines: list[float]
) -> None:
    """Whatever happens to the transfers, a buffer that its owner has filled keeps its bytes, and
    all of them are free within the bound."""
    faults = [Fault(outcome, delay, late) for outcome, delay, late in plan]

    async def one(pair: Pair, index: int) -> None:
        await anyio.sleep(index * 0.3)
        loan = await pair.own.landing.lend(SIZE // 2)
        if loan is None:
            return
        try:
            await pair.holder.writer.attach(loan.card)
            copies = whole(address_of(pair.stored), loan.address, SIZE // 2, 5000)
            await pair.holder.writer.write("own", copies, tag=loan.tag, deadline_s=deadlines[index])
            await loan.arrived(deadline_s=1)
        except (DeadlineExceeded, TransferFailed, Unavailable):
            loan.abandon()
            return
        np.frombuffer(loan.view(), np.uint8)[:] = 9  # as a slot would be
        await anyio.sleep(deadlines[-index])
        assert bytes(loan.view()) == b"\x09" * (SIZE // 2)
        loan.settle()

    async def scenario(pair: Pair, tasks: anyio.abc.TaskGroup) -> None:
        left = list(faults)
        pair.fabric.fault = lambda attempt: left.pop(0) if left else Fault()
        async with anyio.create_task_group() as loans:
            for index in range(len(faults)):
                loans.start_soon(one, pair, index)
        await anyio.sleep(BOUND_S)
        assert pair.is_all_free()

    simulate(scenario)


def test_the_fault_function_sees_who_moves_what() -> None:
    async def scenario(pair: Pair, tasks: anyio.abc.TaskGroup) -> None:
        seen: list[Attempt] = []

        def note(attempt: Attempt) -> Fault:
            seen.append(attempt)
            return Fault()

        pair.fabric.fault = note
        await pair.read()
        await pair.write(await pair.lend())
        assert seen == [
            Attempt("read", "holder", "own", SIZE),
            Attempt("write", "holder", "own", SIZE),
        ]

    simulate(scenario)
