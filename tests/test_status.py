"""`kvass status`: members, their loads and the store, as tables that people read."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from kvass.gateway import overview
from kvass.launch import status, store_status
from kvass.launch.brief import figure
from kvass.launch.status import load_table, members_table, show_status, store_table
from kvass.launch.store_status import views_of

BUSY: dict[str, Any] = {
    "running": 128, "waiting": 1024, "suspended": 12, "used_blocks": 131_640,
    "cached_blocks": 1_316_400, "total_blocks": 1_448_040, "prefill_tokens_s": 21_661.37,
    "step_ms": 159.957,
}  # fmt: skip
FILLED: dict[str, Any] = {
    "visible_blocks": 1_234_567, "visible_bytes": 999 << 30, "total_bytes": 999 << 30,
    "held_bytes": 123 << 20, "hits": 123_456_789, "misses": 23_456_789, "stored": 34_567_890,
    "evictions": 23_456_789, "corrupt": 0,
}  # fmt: skip


def printed(table: Table, width: int = 80) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(table)
    return out.getvalue().splitlines()


def a_member(role: str, **facts: object) -> dict[str, Any]:
    plain = {"role": role, "id": f"{role}-0", "pid": 4_194_304, "state": "ready"}
    return {**plain, "address": "127.0.0.1:42109", "load": {}, **facts}


@pytest.mark.parametrize(
    ("state", "load", "word"),
    [
        ("ready", {"draining": 1}, "drains"),
        ("ready", {"draining": 1, "drain_held": 1}, "held up"),
        ("draining", {"draining": 1, "drained": 1}, "drained"),
    ],
)
def test_a_store_node_that_leaves_has_one_word_in_both_tables(
    state: str, load: Mapping[str, int], word: str
) -> None:
    node = a_member("store", state=state, load=load)
    row = next(line for line in printed(members_table([node])) if "store-0" in line)
    assert row.rstrip().endswith(f" {word}")
    cluster = {"members": [node], "store": [{"id": "store-0", **load}]}
    assert [store_status.word_of(each) for each in views_of(cluster, cluster, 1.0)] == [word]


def test_the_state_of_others_is_what_the_gateway_says() -> None:
    lost = a_member("store", state="lost", load={"draining": 1, "drained": 1})
    others = [a_member("decode", state="draining"), a_member("store"), lost]
    rows = [line.split()[-1] for line in printed(members_table(others)) if "127.0.0.1" in line]
    assert rows == ["draining", "ready", "lost"]


def a_busy_cluster() -> dict[str, Any]:
    """Members of long ids and addresses, with all that they may have to do."""

    def named(role: str, **facts: object) -> dict[str, Any]:
        name = f"{role}-of-rack-000017"[:20].ljust(20, "7")
        return a_member(role, id=name, address="192.168.100.200:42109", **facts)

    return {
        "model": "smollm2-135m-instruct",
        "weights": "native",
        "kv_dtype": "fp8",
        "broker": "192.168.100.200:34819",
        "degraded": [overview.ABSENT["prefill"]._asdict()],
        "members": [
            named("gateway", load={"running": 512}),
            named("prefill", state="lost", load=BUSY),
            named("decode", state="draining", load=BUSY),
            named("store", load=FILLED),
        ],
        "store": [FILLED | {"id": "store-of-rack-000017"}],
    }


def test_every_line_fits_80_columns_and_no_cell_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = a_busy_cluster()
    monkeypatch.setattr(status, "cluster_at", lambda url, console: cluster)
    out = io.StringIO()
    assert show_status("http://gateway", Console(file=out, width=80, color_system=None)) == 0
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and "\N{HORIZONTAL ELLIPSIS}" not in out.getvalue()
    ids = [line.split()[:2] for line in lines if "-of-rack-" in line]
    # Members, loads, store: a row is a line.
    assert len(ids) == 4 + 3 + 1 and all(any(len(cell) == 20 for cell in row) for row in ids)
    decode = [line.split()[1:] for line in lines if line.lstrip().startswith("decode-of")]
    assert decode == [["128", "1024", "12", "132k", "1.32M", "1.45M", "21.7k", "160"]]


def test_ids_and_addresses_that_are_longer_still_are_folded_not_cut() -> None:
    address = "[2001:0db8:85a3:0000:0000:8a2e:0370:7334]:42109"
    node = {**FILLED, "id": "n" * 64, "corrupt": 3}
    tables = (
        members_table([a_member("decode", id="n" * 64, address=address)]),
        load_table([a_member("decode", id="n" * 64, load=BUSY)]),
        store_table([node]),
    )
    for table in tables:
        lines = printed(table)
        assert max(map(len, lines)) <= 80 and "\N{HORIZONTAL ELLIPSIS}" not in "".join(lines)
        cells = [cell for line in lines for cell in line.split() if set(cell) == {"n"}]
        assert sum(map(len, cells)) == 64


@pytest.mark.parametrize("address", ["[::1]:8000", "[fd00:1234:ab::1]:65535"])
def test_an_ipv6_address_is_no_markup(address: str) -> None:
    (row,) = (
        each
        for each in printed(members_table([a_member("decode", address=address)]))
        if "decode-0" in each
    )
    assert row.split()[-2:] == [address, "ready"]


def test_what_nobody_has_has_no_column() -> None:
    idle = a_member("decode", load={"running": 0, "total_blocks": 13_164, "step_ms": 9.135})
    lines = [line.split() for line in printed(load_table([a_member("store", load=BUSY), idle]))]
    assert ["id", "blocks", "step", "ms"] in lines and ["decode-0", "13164", "9.135"] in lines
    assert not any("store-0" in line for line in lines)
    assert "corrupt" not in "".join(printed(store_table([FILLED | {"id": "store-0"}])))
    assert "corrupt" in "".join(printed(store_table([FILLED | {"corrupt": 1}])))


@given(st.floats(0.1, 9e14) | st.integers(0, 9 * 10**14))
@example(1000 << 20)
@example(12_345.6)
def test_a_figure_takes_the_room_that_it_was_promised(value: float) -> None:
    assert len(figure("hits", value)) <= 5
    assert len(figure("visible_bytes", value)) <= 7
