"""`kvass status --store`: one glance tells whether each node is well, and what to do if not."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvass.launch import store_status
from kvass.launch.brief import percent, share
from kvass.launch.store_status import NodeView, findings, views_of

MIB = 1 << 20
WELL: dict[str, Any] = {
    "id": "store-0", "total_bytes": 64 * MIB, "free_bytes": 16 * MIB, "visible_blocks": 250,
    "visible_bytes": 48 * MIB, "held_bytes": MIB, "guarded_bytes": MIB, "guard_cap_bytes": 32 * MIB,
    "quarantined_bytes": 0, "quarantine_cap_bytes": 8 * MIB, "hits": 900, "misses": 100,
    "evictions": 40, "leases": 3, "copies_waiting": 5, "fill_queued_blocks": 2, "draining": 0,
}  # fmt: skip


def node(before: Mapping[str, int] | None = None, /, **counts: int) -> NodeView:
    """Return a node that is well but for `counts`."""
    now = WELL | counts
    return NodeView("store-0", "ready", now, now | dict(before or {}), 2.0)


def printed(nodes: list[NodeView], width: int) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None)
    console.print(store_status.summary(nodes))
    console.print(store_status.table(nodes))
    for line in store_status.lines(nodes):
        console.print(line)
    return out.getvalue()


def test_a_node_that_is_well_says_so_in_one_row() -> None:
    text = printed([node({"evictions": 37})], 80)
    assert "1 store node, 1 well; 48 MiB of 64 MiB used, 90 % of lookups hit" in text
    row = next(line for line in text.splitlines() if "store-0" in line)
    assert row.split() == [
        "store-0", "64", "MiB", "75", "%", "90", "%", "1.5", "1", "MiB", "0", "B", "3", "7",
        "well",
    ]  # fmt: skip
    assert text.count("store-0") == 1


@pytest.mark.parametrize(
    ("counts", "before", "words"),
    [
        ({"corrupt": 2, "scrub_found": 1}, {}, ("2 blocks corrupt", "1 by the scrub", "memory")),
        ({"put_corrupt": 1}, {}, ("1 blocks came", "wrong bytes")),
        ({"get_failed": 9}, {"get_failed": 2}, ("7 blocks could not be moved", "last 2 s")),
        ({"leases_lost": 4}, {"leases_lost": 3}, ("1 leases ran out",)),
        ({"guarded_bytes": 31 * MIB}, {}, ("31 MiB of the 32 MiB", "store.hold_share")),
        ({"quarantined_bytes": 8 * MIB}, {}, ("8 MiB wait", "restart the node")),
        ({"evictions": 100}, {"evictions": 0}, ("within 5 s", "store.slab_bytes")),
        ({"fill_dropped": 5}, {"fill_dropped": 1}, ("4 dropped", "replicas")),
        ({"draining": 1, "handover_left": 12}, {}, ("drains: 12 copies", "wait")),
        ({"draining": 1, "drained": 1}, {}, ("is drained", "stop it")),
        ({"draining": 1, "drained": 1, "handover_left": 3}, {}, ("3 blocks go with it",)),
        (
            {"draining": 1, "drain_held": 1, "handover_left": 9, "handover_refused": 4},
            {},
            ("9 blocks are nowhere else", "4 of them", "drain store-0 --force", "--cancel"),
        ),
        ({"replicas": 3, "takers": 2}, {}, ("3 copies", "only 2 store nodes", "store.replicas")),
        ({"flash_off": 1}, {}, ("stepped aside", "tries again")),
        ({"flash_read_faults": 2, "flash_corrupt": 1}, {}, ("2 faults", "1 corrupt")),
        ({"flash_full": 1}, {}, ("takes nothing more", "make room")),
        ({"flash_closed": 1, "erasures_owed": 2}, {}, ("2 erasures", "mend it")),
        ({"flash_closed": 1}, {}, ("what was erased", "reaches them")),
        ({"flash_unopened_files": 9}, {}, ("9 files could not be opened", "ulimit -n")),
        ({"bugs": 2}, {}, ("2 bugs", "its log")),
        (
            {"too_large_bytes": 99 * MIB, "too_large_room_bytes": 32 * MIB},
            {},
            ("64 MiB, of which 32 MiB", "no block of 99 MiB", "raise store.slab_bytes"),
        ),
        ({"bucket_off": 1}, {}, ("does not answer", "every minute")),
        ({"bucket_off": 1, "bucket_full": 1}, {}, ("neither read nor written", "every minute")),
        ({"bucket_full": 1}, {}, ("takes nothing", "permissions")),
        ({"bucket_unerased": 2}, {}, ("2 drops", "drop again")),
        ({"bucket_corrupt": 3}, {}, ("3 blocks were corrupt", "who else writes")),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(
    counts: dict[str, int], before: dict[str, int], words: tuple[str, ...]
) -> None:
    found = findings(node(before, **counts))
    assert len(found) == 1
    assert all(each in found[0] for each in words), found
    assert "store-0 " in printed([node(before, **counts)], 400).splitlines()[-1]


@pytest.mark.parametrize(
    "name", ["put_failed", "get_failed", "leases_lost", "fill_dropped", "evictions"]
)
def test_what_is_over_is_no_finding(name: str) -> None:
    assert not findings(node(**{name: 10_000}))


def test_a_restart_between_the_looks_gives_no_rate_below_zero() -> None:
    assert node({"evictions": 1000}).rate("evictions") == 0
    assert NodeView("n", "ready", WELL, None, 2.0).rate("evictions") is None
    assert "-" in printed([NodeView("n", "ready", WELL, None, 2.0)], 80)


def test_nodes_without_counts_are_shown_and_those_that_leave_speak_for_themselves() -> None:
    members = [
        {"role": "store", "id": "store-0", "state": "ready", "load": WELL},
        {"role": "store", "id": "store-1", "state": "lost", "load": WELL},
        {"role": "store", "id": "store-2", "state": "ready", "load": WELL},
        {"role": "store", "id": "store-3", "state": "draining", "load": WELL | {"draining": 1,
         "drained": 1}},
        {"role": "decode", "id": "decode-0", "state": "ready", "load": {}},
    ]  # fmt: skip
    cluster = {"members": members, "store": [WELL]}
    nodes = views_of(cluster, cluster, 1.0)
    assert [store_status.word_of(each) for each in nodes] == [
        "well",
        "lost",
        "silent",
        "drained",
    ]
    assert "does not answer" in findings(nodes[1])[0]
    assert "4 store nodes, 1 well; 96 MiB of 128 MiB used" in printed(nodes, 80)
    as_json = store_status.as_json(nodes)
    assert [each["answers"] for each in as_json] == [True, False, False, True]
    assert as_json[0]["free_bytes"] == 16 * MIB and as_json[0]["findings"] == []


def test_who_is_lost_is_said_with_since_when_and_how_to_forget_it() -> None:
    since = "2026-11-30T01:12:47Z"
    member = {"role": "store", "id": "store-1", "state": "lost", "lost_since": since}
    cluster = {"members": [member], "store": [WELL]}
    well, lost = views_of(cluster, cluster, 1.0)
    assert findings(well) == [] and store_status.word_of(lost) == "lost"
    text = findings(lost)[0]
    assert since in text and "kvass forget store-1" in text and "start it again" in text


def test_a_node_by_itself_is_given_no_advice_for_clusters() -> None:
    ill = WELL | {"corrupt": 1, "scrub_found": 1, "replicas": 2, "takers": 1}
    for clustered in (True, False):
        cluster = {"members": [], "store": [ill]}
        node = views_of(cluster, cluster, 1.0, clustered=clustered)[0]
        assert ("kvass drain" in " ".join(findings(node))) == clustered
        silent = views_of(
            {}, {"members": [{"role": "store", "id": "s"}]}, 1.0, clustered=clustered
        )[0]
        assert ("computed again" in findings(silent)[0]) == clustered, "tensors are by nobody here"
        assert len(findings(node)) == 1 + clustered


def test_a_command_that_is_not_let_in_does_not_say_that_the_node_is_gone() -> None:
    member = {"role": "store", "id": "a:1", "state": "refuses", "reason": "another cluster secret"}
    cluster = {"members": [member], "store": []}
    node = views_of(cluster, cluster, 1.0)[0]
    assert "another cluster secret" in findings(node)[0] and "start it" not in findings(node)[0]
    assert store_status.word_of(node) == "refuses"


def test_it_fits_80_columns_whatever_the_numbers() -> None:
    huge = {name: 987 << 30 for name in ("total_bytes", "held_bytes", "quarantined_bytes")} | {
        "leases": 16_384,
        "copies_waiting": 1 << 20,
        "flash_total_bytes": 3,
        "flash_used_bytes": 1,
        "bucket_total_bytes": 3,
        "bucket_used_bytes": 3,
    }
    lines = printed([node({"evictions": 0}, **huge, evictions=246_913)], 80).splitlines()
    assert max(map(len, lines)) <= 80
    row = next(line for line in lines if line.startswith(" store-0"))
    assert row.rstrip().endswith("unwell") and "…" not in row and " 123k " in row


@given(st.integers(1, 10**12), st.integers(0, 10**12))
def test_all_is_said_of_the_whole_alone_and_none_of_nothing_alone(whole: int, part: int) -> None:
    part = min(part, whole)
    text = percent(share(part, whole))
    assert (text == "100 %") == (part == whole)
    assert (text == "0 %") == (part == 0)
