"""Shared memory of a peer, mapped to be read: what is mapped, and what is not."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading

import msgspec
import numpy as np
import pytest

from kvass.common import checksum
from kvass.common.checksum import Sums
from kvass.common.errors import Invalid, Unavailable
from kvass.common.pages import shared_pages
from kvass.common.transport import peer_process
from kvass.common.transport.identity import own_identity
from kvass.common.transport.local import LocalTransport
from kvass.common.transport.seam import AttachRefused, Copies, Region
from transport_peer import Bytes, address_of, memory

pytestmark = pytest.mark.anyio

PIECE = 100_000
COUNT = 120
SIZE = PIECE * COUNT


def copies_of(source: Bytes, target: Bytes) -> Copies:
    """Pieces in reverse order."""
    offsets = np.arange(COUNT, dtype=np.uint64) * np.uint64(PIECE)
    sizes = np.full(COUNT, PIECE, dtype=np.uint64)
    return Copies(
        offsets + np.uint64(address_of(target)),
        offsets[::-1] + np.uint64(address_of(source)),
        sizes,
    )


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_shared_memory_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the kernel refuses cross-memory attach."""
    target = memory(SIZE, 99)
    pages = shared_pages(SIZE)
    source = np.frombuffer(pages.view, dtype=np.uint8)
    source[:] = np.repeat(np.arange(COUNT, dtype=np.uint8), PIECE)
    monkeypatch.setattr(peer_process, "_read_vectors", lambda *_: OSError(errno.EPERM, "no"))
    monkeypatch.setattr(peer_process, "_read_sum", lambda: None)
    shared = LocalTransport(own_identity(), [pages.region])
    before = open_descriptors()
    shared._regions.append(Region(address_of(target), SIZE))  # as a reader
    sums = Sums.of(COUNT, 2)
    card = shared.card()
    await shared.attach(card)
    await shared.read(card.start_id, copies_of(source, target), deadline_s=5, sums=sums)
    expected = source.reshape(COUNT, PIECE)[::-1]
    assert np.array_equal(target.reshape(COUNT, PIECE), expected)
    for number in range(COUNT):
        assert tuple(sums.values[number]) == checksum.sums(expected[number], 0, PIECE // 2, 2)
    shared.detach(card.start_id)
    assert open_descriptors() == before
    shared.close()


@pytest.mark.parametrize("fault", ["pipe", "short", "unsealed", "none", "stranger"])
async def test_what_is_no_sealed_memory_is_not_mapped(fault: str) -> None:
    """A reader that mapped it could be made to wait, or be killed by a page that is gone."""
    pages = shared_pages(SIZE)
    region, stack = pages.region, contextlib.ExitStack()
    own = LocalTransport(own_identity(), [region])
    card = own.card()
    metadata = msgspec.msgpack.decode(card.metadata)
    page, (shown,) = metadata[1], metadata[2]
    if fault == "pipe":
        reads, writes = os.pipe()
        stack.callback(os.close, reads)
        stack.callback(os.close, writes)
        shown[2] = reads
    elif fault == "short":
        shown[1] = SIZE * 2
    elif fault == "unsealed":
        shown[2] = os.memfd_create("open")
        os.truncate(shown[2], 2 * SIZE)
        stack.callback(os.close, shown[2])
    elif fault == "none":
        shown[2] = (1 << 31) - 1
    else:
        pages.view[:32] = b"0" * 32
        page[:] = shown[0], 32, *shown[2:]
    changed = msgspec.structs.replace(card, metadata=msgspec.msgpack.encode(metadata))
    with stack, pytest.MonkeyPatch.context() as patched:
        refused = lambda *_: OSError(errno.EPERM, "no")  # noqa: E731
        patched.setattr(peer_process, "_read_vectors", refused)
        what = Unavailable if fault == "stranger" else AttachRefused
        match = "another one" if fault == "stranger" else "refuses cross-memory attach"
        before = open_descriptors()
        with pytest.raises(what, match=match):
            await own.attach(changed)
        assert open_descriptors() == before
    own.close()
    pages.close()


async def test_a_closed_transport_attaches_nobody_and_many_regions_are_refused() -> None:
    pages = shared_pages(SIZE)
    own = LocalTransport(own_identity(), [pages.region])
    card = own.card()
    metadata = msgspec.msgpack.decode(card.metadata)
    metadata[2] = metadata[2] * 9
    many = msgspec.structs.replace(card, metadata=msgspec.msgpack.encode(metadata))
    with pytest.raises(Invalid, match="length <= 8"):
        await own.attach(many)
    own.close()
    with pytest.raises(Unavailable, match="was closed"):
        await own.attach(card)
    pages.close()
    stranger = os.open(os.devnull, os.O_RDONLY)  # it has the number that the pages had
    pages.close()
    os.close(stranger)


async def test_beyond_1024_descriptors_peers_are_attached() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4_096:
        pytest.skip("this system gives too few descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4_096), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1_050):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        pages = shared_pages(SIZE)
        own = LocalTransport(own_identity(), [pages.region])
        await own.attach(own.card())
        own.close()
        pages.close()


def test_a_transport_without_threads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later it would be too late: what is queued for a thread that never starts runs some time."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(Unavailable, match="no thread can be started"):
        LocalTransport(own_identity(), [])
